// NCCL's ABI for one process that stands for all ranks of a communicator: every rank is taken to be the same as this one, nothing is
// sent, and nothing waits. With echo_carry_out(1) results are those of equal ranks (a gather repeats this rank's part, a sum
// multiplies), so that the ranks "agree"; with 0 operations do nothing at all. Built with -DECHO_HOST it passes for the host engine.
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "coll/host_abi.h"
#include "coll/nccl_abi.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct ncclComm { int ranks, rank; };
// What is called, for a program that counts: the function's name, the elements and their bytes, the operation, the ranks.
using Recorder = void (*)(const char* function, int64_t count, int64_t width, int32_t op, int32_t ranks, int64_t stream);

namespace {
std::atomic<int> carries_out{1};
std::atomic<Recorder> recorder{nullptr};

size_t width(ncclDataType_t type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? widths[type] : 0;
}
template <typename T> void multiply(void* data, size_t n, int by) {
  for (T* each = static_cast<T*>(data); n--; ++each) *each = static_cast<T>(*each * by);
}
void reduced(void* data, size_t n, ncclDataType_t type, ncclRedOp_t op, int ranks) {
  if (op != ncclSum) return;
  if (type == ncclInt32 || type == ncclUint32) multiply<int32_t>(data, n, ranks);
  if (type == ncclInt64 || type == ncclUint64) multiply<int64_t>(data, n, ranks);
  if (type == ncclFloat32) multiply<float>(data, n, ranks);
  if (type == ncclFloat64) multiply<double>(data, n, ranks);
}
void repeat(void* out, const void* part, size_t nbytes, const ncclComm* c) {
  char* at = static_cast<char*>(out);
  memmove(at + c->rank * nbytes, part, nbytes);
  for (int rank = 0; rank < c->ranks; ++rank)
    if (rank != c->rank) memcpy(at + rank * nbytes, at + c->rank * nbytes, nbytes);
}
void note(const char* function, size_t n, ncclDataType_t t, int op, ncclComm_t c, cudaStream_t q) {
  if (Recorder call = recorder.load(std::memory_order_relaxed))
    call(function, static_cast<int64_t>(n), static_cast<int64_t>(width(t)), op, c ? c->ranks : 0, reinterpret_cast<int64_t>(q));
}
bool idle() { return !carries_out.load(std::memory_order_relaxed); }
ncclComm_t made(int ranks, int rank) { return new ncclComm{ranks, rank}; }
}  // namespace

EXPORTED void echo_set_recorder(Recorder function) { recorder = function; }
EXPORTED void echo_carry_out(int on) { carries_out = on; }

// ---- Operations.
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t q) {
  note("all_reduce", n, t, op, c, q);
  if (idle()) return ncclSuccess;
  if (s != r) memcpy(r, s, n * width(t));
  reduced(r, n, t, op, c->ranks);
  return ncclSuccess;
}
ncclResult_t ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t q) {
  note("reduce_scatter", n, t, op, c, q);
  if (idle()) return ncclSuccess;
  memmove(r, static_cast<const char*>(s) + c->rank * n * width(t), n * width(t));
  reduced(r, n, t, op, c->ranks);
  return ncclSuccess;
}
ncclResult_t ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t q) {
  note("all_gather", n, t, 0, c, q);
  if (!idle()) repeat(r, s, n * width(t), c);
  return ncclSuccess;
}
ncclResult_t ncclAlltoAll(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t q) {
  note("all_to_all", n, t, 0, c, q);
  if (!idle()) repeat(r, static_cast<const char*>(s) + c->rank * n * width(t), n * width(t), c);
  return ncclSuccess;
}
ncclResult_t ncclGather(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t) {
  if (!idle() && c->rank == root) repeat(r, s, n * width(t), c);
  return ncclSuccess;
}
ncclResult_t ncclScatter(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t) {
  if (!idle() && c->rank == root) memmove(r, static_cast<const char*>(s) + c->rank * n * width(t), n * width(t));
  return ncclSuccess;
}
ncclResult_t ncclReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t q) {
  return c->rank == root ? ncclAllReduce(s, r, n, t, op, c, q) : ncclSuccess;
}
ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t t, int, ncclComm_t c, cudaStream_t q) {
  note("broadcast", n, t, 0, c, q);
  if (!idle() && s != r) memcpy(r, s, n * width(t));
  return ncclSuccess;
}
ncclResult_t ncclBcast(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclSuccess; }
ncclResult_t ncclSend(const void*, size_t n, ncclDataType_t t, int, ncclComm_t c, cudaStream_t q) {
  note("send", n, t, 0, c, q);
  return ncclSuccess;
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclSuccess; }
ncclResult_t ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  *op = ncclSum;
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

// ---- Memory.
ncclResult_t ncclMemAlloc(void** at, size_t size) {
  note("ncclMemAlloc", size, ncclInt8, 0, nullptr, nullptr);
  return posix_memalign(at, 4096, size ? size : 1) ? ncclSystemError : ncclSuccess;
}
ncclResult_t ncclMemFree(void* at) {
  free(at);
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void* at, size_t, void** handle) {
  note("ncclCommRegister", 0, ncclInt8, 0, nullptr, nullptr);
  *handle = at;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void* at, size_t, ncclWindow_t* window, int) {
  note("ncclCommWindowRegister", 0, ncclInt8, 0, nullptr, nullptr);
  *window = reinterpret_cast<ncclWindow_t>(at);
  return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }

// ---- Communicators.
ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 1, sizeof *id);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "no error"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommInitRank(ncclComm_t* c, int ranks, ncclUniqueId, int rank) {
  *c = made(ranks, rank);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int ranks, ncclUniqueId, int rank, ncclConfig_t*) {
  *c = made(ranks, rank);
  return ncclSuccess;
}
ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return ncclInvalidUsage; }
// All ranks have this rank's color and are ordered as they were.
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int, ncclComm_t* child, ncclConfig_t*) {
  *child = color == NCCL_SPLIT_NOCOLOR ? nullptr : made(c->ranks, c->rank);
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) {
  delete c;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) { return ncclCommDestroy(c); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  *result = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int* ranks) {
  *ranks = c->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t, int* device) {
  *device = 0;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) {
  *rank = c->rank;
  return ncclSuccess;
}

#ifdef ECHO_HOST
// ---- The host engine's own functions: a queue is done with all at once.
ncclResult_t collHostQueueCreate(collHostQueue_t* queue) {
  *queue = static_cast<collHostQueue_t>(malloc(1));
  return ncclSuccess;
}
ncclResult_t collHostQueueDestroy(collHostQueue_t queue) {
  free(queue);
  return ncclSuccess;
}
ncclResult_t collHostQueueRecord(collHostQueue_t, uint64_t* ticket) {
  *ticket = 1;
  return ncclSuccess;
}
ncclResult_t collHostQueueWait(collHostQueue_t, uint64_t, int64_t) { return ncclSuccess; }
ncclResult_t collHostQueueCall(collHostQueue_t, void (*function)(void*), void* argument) {
  function(argument);
  return ncclSuccess;
}
ncclResult_t collHostQueueGet(collHostQueue_t, collHostQueueAttribute_t, int64_t* value) {
  *value = 0;
  return ncclSuccess;
}
ncclResult_t collHostQueueSet(collHostQueue_t, collHostQueueAttribute_t, int64_t) { return ncclSuccess; }
static ncclResult_t nothing(collHostErrorInfo_t* info) {
  const size_t size = info->size;
  memset(info, 0, size);
  info->size = size;
  info->rank = -1;
  return ncclSuccess;
}
ncclResult_t collHostGetError(ncclComm_t, collHostErrorInfo_t* info) { return nothing(info); }
ncclResult_t collHostQueueGetError(collHostQueue_t, uint64_t, collHostErrorInfo_t* info) { return nothing(info); }
ncclResult_t collHostCommPending(ncclComm_t, collHostErrorInfo_t* info) { return nothing(info); }
ncclResult_t collHostCommSetTimeout(ncclComm_t, int64_t) { return ncclSuccess; }
ncclResult_t collHostCommSetStep(ncclComm_t, uint64_t) { return ncclSuccess; }
ncclResult_t collHostSetInitTimeout(int64_t) { return ncclSuccess; }
ncclResult_t collHostSetInterruptCheck(int (*)(void)) { return ncclSuccess; }
ncclResult_t collHostCommSequence(ncclComm_t, uint64_t* sequence) {
  *sequence = 0;
  return ncclSuccess;
}
ncclResult_t collHostLabel(const char*, const char*) { return ncclSuccess; }
ncclResult_t collHostMemoryShared(const void*, size_t, int* shared) {
  *shared = 0;
  return ncclSuccess;
}
ncclResult_t collHostGroupCancel(void) { return ncclSuccess; }
#else
// ---- The simulated GPU's reports: counted by kind, and answered as by a device that is behind the host.
static std::atomic<int64_t> reports[32], asked{0};
EXPORTED int64_t echo_report(int kind, int64_t, int64_t, int64_t, const char*, const void*, int64_t) {
  reports[kind & 31].fetch_add(1, std::memory_order_relaxed);
  if (kind != 5 && kind != 6) return 0;
  return !idle() || ++asked % 3 == 0;  // an event, a stream: in a step it has mostly not completed
}
// The driver's functions that the package itself calls: nothing is captured.
EXPORTED int cuStreamGetCaptureInfo_v2(void*, int* status, uint64_t*, void*, void*, void*) {
  *status = 0;
  return 0;
}
EXPORTED int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
EXPORTED int64_t echo_reports(int kind) { return reports[kind & 31].load(); }
#endif
