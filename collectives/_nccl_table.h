// The table of functions that the binding loads, and the fields of the structs that it fills, each with the first NCCL
// version that has it. Types come from the declarations by __typeof__, so the two can't drift apart.
#ifndef COLLECTIVES_NCCL_TABLE_H_
#define COLLECTIVES_NCCL_TABLE_H_

#include <pthread.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "coll/flight_record.h"
#include "coll/host_abi.h"
#include "coll/nccl_abi.h"

// F(function, first version code)
#define COLL_NCCL_FUNCTIONS(F) \
  F(ncclGetVersion, 2000) \
  F(ncclGetUniqueId, 2000) \
  F(ncclGetErrorString, 2000) \
  F(ncclCommInitRank, 2000) \
  F(ncclCommDestroy, 2000) \
  F(ncclCommCount, 2000) \
  F(ncclCommUserRank, 2000) \
  F(ncclReduce, 2000) \
  F(ncclAllReduce, 2000) \
  F(ncclReduceScatter, 2000) \
  F(ncclAllGather, 2000) \
  F(ncclGroupStart, 2000) \
  F(ncclGroupEnd, 2000) \
  F(ncclBroadcast, 2200) \
  F(ncclCommAbort, 2400) \
  F(ncclCommGetAsyncError, 2400) \
  F(ncclSend, 2700) \
  F(ncclRecv, 2700) \
  F(ncclRedOpCreatePreMulSum, 21100) \
  F(ncclRedOpDestroy, 21100) \
  F(ncclGetLastError, 21300) \
  F(ncclCommInitRankConfig, 21400) \
  F(ncclCommSplit, 21801) \
  F(ncclMemAlloc, 21903) \
  F(ncclMemFree, 21903) \
  F(ncclCommRegister, 21903) \
  F(ncclCommDeregister, 21903) \
  F(ncclCommShrink, 22703) \
  F(ncclCommWindowRegister, 22703) \
  F(ncclCommWindowDeregister, 22703) \
  F(ncclAlltoAll, 22803) \
  F(ncclGather, 22803) \
  F(ncclScatter, 22803) \
  F(ncclCommRevoke, 22807)

// The host engine's own functions: F(function, 0), since no NCCL has them.
#define COLL_HOST_FUNCTIONS(F) \
  F(collHostQueueCreate, 0) \
  F(collHostQueueDestroy, 0) \
  F(collHostQueueRecord, 0) \
  F(collHostQueueWait, 0) \
  F(collHostQueueCall, 0) \
  F(collHostQueueGet, 0) \
  F(collHostQueueSet, 0) \
  F(collHostGetError, 0) \
  F(collHostQueueGetError, 0) \
  F(collHostCommPending, 0) \
  F(collHostCommProbe, 0) \
  F(collHostSetHeader, 0) \
  F(collHostCommPeek, 0) \
  F(collHostCommSetTimeout, 0) \
  F(collHostCommSetStep, 0) \
  F(collHostSetInitTimeout, 0) \
  F(collHostSetInterruptCheck, 0) \
  F(collHostGetNamedUniqueId, 0) \
  F(collHostSetSecret, 0) \
  F(collHostCommSequence, 0) \
  F(collHostCommChunkBytes, 0) \
  F(collHostMemoryInUse, 0) \
  F(collHostMemoryShared, 0) \
  F(collHostAllReduceCast, 0) \
  F(collHostAllReduceShare, 0) \
  F(collHostReduceScatterShare, 0) \
  F(collHostCompareParts, 0) \
  F(collHostCheckParts, 0) \
  F(collHostLabel, 0) \
  F(collHostTag, 0) \
  F(collHostFlightRecord, 0) \
  F(collHostGroupCancel, 0)

#define COLL_MEMBER(function, since) __typeof__(&function) function;
typedef struct {
  COLL_NCCL_FUNCTIONS(COLL_MEMBER)
  COLL_HOST_FUNCTIONS(COLL_MEMBER)
} collTable_t;
#undef COLL_MEMBER

// kind, of a field: 'i' int, 's' string.
typedef struct { const char* name; int since; size_t offset; char kind; } collEntry_t;

#define COLL_ENTRY(function, since) {#function, since, offsetof(collTable_t, function), 0},
static const collEntry_t collFunctions[] = {COLL_NCCL_FUNCTIONS(COLL_ENTRY) COLL_HOST_FUNCTIONS(COLL_ENTRY) {0, 0, 0, 0}};
#undef COLL_ENTRY

// F(field, first version code, kind) of ncclConfig_t, in the order of the struct: a shorter struct of an
// older version ends where the first newer field begins.
#define COLL_CONFIG_FIELDS(F) \
  F(blocking, 21400, 'i') \
  F(cgaClusterSize, 21701, 'i') \
  F(minCTAs, 21701, 'i') \
  F(maxCTAs, 21701, 'i') \
  F(netName, 21701, 's') \
  F(splitShare, 21801, 'i') \
  F(trafficClass, 22602, 'i') \
  F(commName, 22703, 's') \
  F(collnetEnable, 22703, 'i') \
  F(CTAPolicy, 22703, 'i') \
  F(shrinkShare, 22703, 'i') \
  F(nvlsCTAs, 22703, 'i') \
  F(nChannelsPerNetPeer, 22803, 'i') \
  F(nvlinkCentricSched, 22803, 'i') \
  F(graphUsageMode, 22902, 'i') \
  F(numRmaCtx, 22902, 'i') \
  F(maxP2pPeers, 23004, 'i') \
  F(graphStreamOrdering, 23007, 'i') \
  F(launchOrderImplicit, 23100, 'i') \
  F(numRmaSig, 23100, 'i') \
  F(rmaEagerInit, 23100, 'i') \
  F(hostCftMode, 23100, 'i') \
  F(nvlsHostMode, 23200, 'i')

#define COLL_FIELD(field, since, kind) {#field, since, offsetof(ncclConfig_t, field), kind},
static const collEntry_t collConfigFields[] = {COLL_CONFIG_FIELDS(COLL_FIELD) {0, 0, 0, 0}};
#undef COLL_FIELD

// How many times this process is a fork of the one that loaded the binding: a communicator of a parent is none of ours.
static volatile int collForks = 0;
static void collCountFork(void) { collForks++; }
static int collWatchForks(void) { return pthread_atfork(NULL, NULL, collCountFork); }

// Signal handlers of Python run in the main thread alone. Other threads that wait needn't take the GIL to find out.
static int collIsMainThread(void) { return syscall(SYS_gettid) == getpid(); }

// Set while this thread runs Python's signal handlers from inside a blocking call.
static __thread int collInsideInterrupt = 0;
// Set while what such a handler did (an exception, an abort) waits for the call that it interrupted to come back.
static __thread int collInterrupted = 0;
// Set while this thread issues a group: the calls in it are on communicators that don't show them as calls.
static __thread int collInsideGroupEnd = 0;

#endif
