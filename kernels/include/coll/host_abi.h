// C API of the host engine beside NCCL's: queues (its streams), full error reports, time limits.
//
// Every function returns an ncclResult_t, never throws, prints or exits.
#ifndef COLL_HOST_ABI_H_
#define COLL_HOST_ABI_H_

#include "nccl_abi.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define COLL_HOST_MAX_RANKS 1024

// ---- Queues. A queue is a thread that runs what is put into it, in order. Cast one to
// cudaStream_t where NCCL's functions take a stream; a NULL stream means that the operation is done
// when the call returns.
typedef struct collHostQueue* collHostQueue_t;

ncclResult_t collHostQueueCreate(collHostQueue_t* queue);
// Runs what is queued to its end, then ends the thread. Not from inside the queue's own thread.
ncclResult_t collHostQueueDestroy(collHostQueue_t queue);
// The ticket of the newest task in the queue (0: none was ever put in). Tickets count up by one for
// each task.
ncclResult_t collHostQueueRecord(collHostQueue_t queue, uint64_t* ticket);
// Wait until task `ticket` has ended. timeout_ns < 0: no limit; 0: only look. Returns
// ncclInProgress when the time ran out, otherwise the task's own result (ncclSuccess, or the code with which it
// failed).
ncclResult_t collHostQueueWait(collHostQueue_t queue, uint64_t ticket, int64_t timeout_ns);
// Put a function of the caller's into the queue. It must not wait for the queue itself.
ncclResult_t collHostQueueCall(collHostQueue_t queue, void (*function)(void*), void* argument);

typedef enum {
  collHostQueuePending = 0,   // get: tasks not yet ended
  collHostQueueCpu = 1,       // get, set: the core that the queue's thread is bound to; -1: not bound
  collHostQueueThreadId = 2   // get: the kernel's thread id
} collHostQueueAttribute_t;
ncclResult_t collHostQueueGet(collHostQueue_t queue, collHostQueueAttribute_t attribute, int64_t* value);
ncclResult_t collHostQueueSet(collHostQueue_t queue, collHostQueueAttribute_t attribute, int64_t value);

// ---- Errors.
typedef enum {
  collHostErrorNone = 0,
  collHostErrorArgument = 1,
  collHostErrorUsage = 2,
  collHostErrorMismatch = 3,     // the ranks did not make the same call
  collHostErrorTimeout = 4,      // peers: the ranks that have not arrived
  collHostErrorRemote = 5,       // peers: the ranks that died or left
  collHostErrorAborted = 6,      // by abort or revoke on this rank
  collHostErrorInterrupted = 7,  // the interrupt check said so (Ctrl-C)
  collHostErrorMemory = 8,       // bytes: of the allocation that failed
  collHostErrorSystem = 9,
  collHostErrorInternal = 10
} collHostErrorKind_t;

typedef struct {
  size_t size;        // set to sizeof(collHostErrorInfo_t) by the caller
  int code;           // ncclResult_t
  int kind;           // collHostErrorKind_t
  int rank;           // that reports the error; -1: not in a communicator
  int npeers;
  uint64_t seq;       // number of the collective on its communicator, from 0
  uint64_t bytes;
  char op[32];        // "ncclAllReduce"
  char text[4096];
  int peers[COLL_HOST_MAX_RANKS];
  uint32_t tag;       // of collHostTag; 0: none
} collHostErrorInfo_t;

// The newest error of the calling thread (comm NULL), or the error that a communicator is stuck in.
ncclResult_t collHostGetError(ncclComm_t comm, collHostErrorInfo_t* info);
// The error with which task `ticket` of a queue failed. Past the newest 64 failures a run of one
// kind shares one report.
ncclResult_t collHostQueueGetError(collHostQueue_t queue, uint64_t ticket, collHostErrorInfo_t* info);
// The operation that is in progress on a communicator: its op, seq and bytes, and in peers the ranks
// that it waits for. op is empty when nothing is in progress.
ncclResult_t collHostCommPending(ncclComm_t comm, collHostErrorInfo_t* info);
// Whether rank `peer` has begun an ncclSend to this rank that no ncclRecv here has begun to take, or
// can't send any more: collHostCommPeek would not wait. Never blocks.
ncclResult_t collHostCommProbe(ncclComm_t comm, int peer, int* waiting);
// Numbers that a layer above gives to a send, and that the receiver reads before it receives: of the
// calling thread's next ncclSend.
enum { collHostHeaderWords = 4 };
ncclResult_t collHostSetHeader(const int64_t header[collHostHeaderWords]);
// Waits until rank `peer` has begun an ncclSend to this rank that no ncclRecv here has begun to take,
// and gives its header. A peer that can't go on any more is an error: it has given its send up. After
// an error other than a peer's the communicator can be used as before.
ncclResult_t collHostCommPeek(ncclComm_t comm, int peer, int64_t header[collHostHeaderWords]);

// Sets the names of the calling thread's next operation and of its element type in reports: for a
// layer above that sends types of its own as bytes, or makes an operation of its own out of
// another. Either may be NULL. Ranks whose labels differ did not make the same call.
ncclResult_t collHostLabel(const char* op, const char* datatype);
// Sets the tag of the calling thread's next operation, a number that stands for a part of the program;
// 0: none. Ranks whose tags differ did not make the same call. Sends and receives don't compare it.
ncclResult_t collHostTag(uint32_t tag);
// Has the engine write into a flight record when the calling thread's next operation starts and ends.
// The memory stays the caller's, and must stay mapped; see flight_record.h.
typedef struct collFlightRecord collFlightRecord_t;
ncclResult_t collHostFlightRecord(collFlightRecord_t* record);
// The bytes of memory that this process can still get: what is free on the node, and what its
// control groups leave. UINT64_MAX where neither is known.
uint64_t collHostFreeMemory(void);

// ---- Operations.
// An all-reduce of float32 or float64 whose data travels as `wire` (a floating type): each rank's
// elements are multiplied by `scale` and rounded to it, once, on the way into the slots; they are
// reduced in float32 (float64) in the order of the ranks, and the result is not rounded to it. Not
// with a pre-mul-sum. Beside that, as ncclAllReduce.
ncclResult_t collHostAllReduceCast(const void* send, void* recv, size_t count, ncclDataType_t type, ncclDataType_t wire,
                                   double scale, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);

// Statistics of some elements.
typedef struct {
  double sum_of_squares;
  double nonfinite;  // how many are infinite or NaN, or become infinite when they are rounded; a whole number
} collHostShare_t;

// ncclAllReduce and ncclReduceScatter of a floating type which, in the same pass, add to *share
// this rank's share of the result: of a reduce-scatter the elements that it receives; of an
// all-reduce a part of the elements, such that the shares of all ranks together have each element
// once. The squares are those of the values before their last rounding (an average's after the
// division), added up in float32 (float64 for float64) in rows of at most 512 elements, and these
// in float64: in an order that depends on the call and on where its arrays lie, not on time. The
// result has the bits that it has without. *share is this process's own and is written once, when
// the operation has succeeded: it must stay valid until then, not be read before, nor be given at
// the same time to operations of another communicator. An operation that fails leaves it as it was.
// Ranks that give a share and ranks that call ncclAllReduce (ncclReduceScatter) make the same call.
ncclResult_t collHostAllReduceShare(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                    collHostShare_t* share, ncclComm_t comm, cudaStream_t stream);
ncclResult_t collHostReduceScatterShare(const void* send, void* recv, size_t recvcount, ncclDataType_t type, ncclRedOp_t op,
                                        collHostShare_t* share, ncclComm_t comm, cudaStream_t stream);

// ---- Operations that are made of sends and receives, such as an all-to-all of unequal parts.
// What one rank is about to send and receive is a record: the text of the reason why it takes no part
// ("": it does), with its terminating 0, then for each rank two uint64_t, the elements that are sent
// to it and those that are received from it.
#define COLL_HOST_REFUSAL_BYTES 256
#define COLL_HOST_PARTS_BYTES(nranks) (COLL_HOST_REFUSAL_BYTES + 16 * (size_t)(nranks))
// A collective that gathers the ranks' records in `all`, in rank order, and compares them: where a
// rank refuses, or expects another number of elements than its peer sends, all ranks get
// collHostErrorMismatch, and so they do where one makes another call. The next `transfers` sends and
// receives of the open group are made once it has succeeded, else they are dropped on all ranks. Its
// name and the elements' type are those of collHostLabel.
ncclResult_t collHostCompareParts(const void* own, void* all, size_t transfers, ncclComm_t comm, cudaStream_t stream);
// The comparison alone, of the records of `nranks` ranks, for rank `rank`.
ncclResult_t collHostCheckParts(const void* all, int nranks, int rank);

// ---- Settings.
// Limit of one operation on this communicator, in ms; <= 0: none (the default). Past it the
// operation fails with ncclTimeout and the communicator is out of use, since this rank can't take
// back what it has already contributed.
ncclResult_t collHostCommSetTimeout(ncclComm_t comm, int64_t timeout_ms);

/* The program's step from now on, 0 for none: ranks that call a collective in different steps get collHostErrorMismatch. */
ncclResult_t collHostCommSetStep(ncclComm_t comm, uint64_t step);
// Limit of the init functions of the calling process, in ms (60,000 at first).
ncclResult_t collHostSetInitTimeout(int64_t timeout_ms);
// Called about ten times a second by a thread that waits inside a blocking call; non-zero ends the
// wait.
ncclResult_t collHostSetInterruptCheck(int (*check)(void));
// A unique id made from a name instead of random bits: all processes of this user that use the
// same bytes get the same id. For launchers that give all ranks of a job a common name and no way to exchange
// an id.
ncclResult_t collHostGetNamedUniqueId(const void* name, size_t nbytes, ncclUniqueId* uniqueId);
// The job's secret, for all communicators that this process opens from now on: processes without it
// can't take part, and names of unique ids are made of it. It is copied. nbytes 0: none.
ncclResult_t collHostSetSecret(const void* secret, size_t nbytes);
// Number of collectives called on this communicator so far; bytes of one staging chunk; bytes held
// by ncclMemAlloc and by the communicators of this process.
ncclResult_t collHostCommSequence(ncclComm_t comm, uint64_t* sequence);
ncclResult_t collHostCommChunkBytes(ncclComm_t comm, size_t* nbytes);
ncclResult_t collHostMemoryInUse(uint64_t* nbytes);
// Whether a whole range of memory is this process's shared memory, which collectives use with no
// staging copy: from ncclMemAlloc. *shared: 1 or 0.
ncclResult_t collHostMemoryShared(const void* address, size_t nbytes, int* shared);
// Drop what the calling thread has put into its open group, and leave the group (all levels).
ncclResult_t collHostGroupCancel(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
