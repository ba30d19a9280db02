// A library with NCCL's interface that only notes down, as text, what it was called with: for test_marshalling.py.
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "coll/nccl_abi.h"

#ifndef VERSION
#define VERSION NCCL_VERSION_CODE
#endif
#ifndef RANKS
#define RANKS 5
#endif

static char noted[4096];
static ncclConfig_t config_seen;
static unsigned char scalar_seen[8];

const char* recorder_noted(void) { return noted; }
const void* recorder_config(void) { return &config_seen; }
const void* recorder_scalar(void) { return scalar_seen; }

__attribute__((format(printf, 1, 2))) static ncclResult_t note(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(noted, sizeof noted, format, values);
  va_end(values);
  return ncclSuccess;
}
#define X PRIxPTR
#define P(x) ((uintptr_t)(x))
// Only as many bytes as the caller's struct says it has, the rest zero; strings are noted while they live.
#define SEEN(copy, config) \
  do { \
    memset(&copy, 0, sizeof copy); \
    if (config) memcpy(&copy, config, (config)->size < sizeof copy ? (config)->size : sizeof copy); \
  } while (0)

static ncclResult_t open_as(ncclComm_t* comm, uintptr_t handle) {
  *comm = (ncclComm_t)handle;
  return ncclSuccess;
}

ncclResult_t ncclGetVersion(int* version) { *version = VERSION; return ncclSuccess; }
ncclResult_t ncclGroupStart(void) { return note("group_start"); }
ncclResult_t ncclGroupEnd(void) { return note("group_end"); }
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n, ncclUniqueId id, int rank) {
  note("init n=%d rank=%d id=%u,%u", n, rank, (unsigned char)id.internal[0], (unsigned char)id.internal[127]);
  return open_as(comm, 0x100);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int n, ncclUniqueId id, int rank, ncclConfig_t* config) {
  (void)id;
  SEEN(config_seen, config);
  note("init_config n=%d rank=%d net=%s", n, rank, config_seen.netName ? config_seen.netName : "-");
  return open_as(comm, 0x100);
}
ncclResult_t ncclCommAbort(ncclComm_t c) { return note("abort %" X, P(c)); }
ncclResult_t ncclCommDestroy(ncclComm_t c) { return note("destroy %" X, P(c)); }
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  SEEN(config_seen, config);
  note("split %" X " %d %d %s", P(c), color, key, config ? "config" : "inherit");
  return open_as(child, color == NCCL_SPLIT_NOCOLOR ? 0 : 0x200);
}
ncclResult_t ncclCommShrink(ncclComm_t c, int* ranks, int n, ncclComm_t* child, ncclConfig_t* config, int flags) {
  note("shrink %" X " n=%d last=%d %s flags=%d", P(c), n, n ? ranks[n - 1] : -1, config ? "config" : "inherit", flags);
  return open_as(child, 0x200);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* state) {
  (void)c; *state = ncclInProgress; return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int* count) { (void)c; *count = RANKS; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) { (void)c; *rank = 3; return ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t c, void* p, size_t n, void** handle) {
  *handle = (void*)0x300;
  return note("register %" X " %" X " %zu", P(c), P(p), n);
}
ncclResult_t ncclCommDeregister(const ncclComm_t c, void* handle) {
  return note("deregister %" X " %" X, P(c), P(handle));
}
ncclResult_t ncclCommWindowRegister(ncclComm_t c, void* p, size_t n, ncclWindow_t* win, int flags) {
  *win = (ncclWindow_t)0x400;
  return note("window %" X " %" X " %zu %d", P(c), P(p), n, flags);
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t c, ncclWindow_t win) {
  return note("unwindow %" X " %" X, P(c), P(win));
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t t, ncclScalarResidence_t where,
                                      ncclComm_t c) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  memset(scalar_seen, 0, sizeof scalar_seen);
  memcpy(scalar_seen, scalar, sizes[t]);
  *op = (ncclRedOp_t)11;
  return note("premul %d where=%d %" X, (int)t, (int)where, P(c));
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t c) { return note("destroy_op %d %" X, (int)op, P(c)); }

#define TAIL " c=%" X " s=%" X
#define END ncclComm_t c, cudaStream_t s
#define COLLECTIVE(name, middle, format, ...) \
  ncclResult_t nccl##name(const void* a, void* b, size_t n, ncclDataType_t t, middle END) { \
    return note(#name " %" X " %" X " %zu %d" format TAIL, P(a), P(b), n, (int)t, __VA_ARGS__ P(c), P(s)); \
  }
#define COMMA ,
COLLECTIVE(AllReduce, ncclRedOp_t op COMMA, " op=%d", (int)op COMMA)
COLLECTIVE(ReduceScatter, ncclRedOp_t op COMMA, " op=%d", (int)op COMMA)
COLLECTIVE(AllGather, , "", )
COLLECTIVE(AlltoAll, , "", )
COLLECTIVE(Broadcast, int root COMMA, " root=%d", root COMMA)
COLLECTIVE(Gather, int root COMMA, " root=%d", root COMMA)
COLLECTIVE(Scatter, int root COMMA, " root=%d", root COMMA)
COLLECTIVE(Reduce, ncclRedOp_t op COMMA int root COMMA, " op=%d root=%d", (int)op COMMA root COMMA)

ncclResult_t ncclSend(const void* a, size_t n, ncclDataType_t t, int peer, END) {
  return note("Send %" X " %zu %d peer=%d" TAIL, P(a), n, (int)t, peer, P(c), P(s));
}
ncclResult_t ncclRecv(void* b, size_t n, ncclDataType_t t, int peer, END) {
  return note("Recv %" X " %zu %d peer=%d" TAIL, P(b), n, (int)t, peer, P(c), P(s));
}
ncclResult_t ncclMemAlloc(void** p, size_t n) { *p = (void*)0x500; return note("alloc %zu", n); }
ncclResult_t ncclMemFree(void* p) { return note("free %" X, P(p)); }
