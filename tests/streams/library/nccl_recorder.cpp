// NCCL's ABI in front of the host engine: each operation is reported with its communicator, stream and buffers, then carried out by
// the host engine with stream NULL, so that it has ended when the call returns. A send or a receive alone ends late, as NCCL's does:
// the host engine carries it out on a queue of its communicator, and what uses its stream afterwards waits for it.
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <vector>

#include "coll/host_abi.h"
#include "coll/nccl_abi.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

enum Kind : int { kReduce, kBroadcast, kAllReduce, kReduceScatter, kAllGather, kAlltoAll, kGather, kScatter, kSend, kRecv };

struct Operation {
  int64_t comm, stream, send, send_bytes, recv, recv_bytes, count;
  int32_t kind, dtype, op, peer, device, ranks;
};
struct Recorder {
  void (*operations)(const Operation*, int64_t);      // one, or a group
  int (*device)();                                    // of the calling thread
  void (*memory)(int64_t address, int64_t nbytes);    // 0 bytes: it is freed
  // A buffer or window of a communicator; 0 bytes: it is none any more.
  void (*registered)(int64_t comm, int64_t handle, int64_t address, int64_t nbytes, int32_t window);
  void (*ended)(int64_t comm, int32_t aborted);       // a communicator
  void (*wrong)(const char* text);                    // what NCCL leaves undefined
  // The call that was reported last will have ended when a ticket of a queue has.
  void (*late)(int64_t device, int64_t stream, int64_t queue, int64_t ticket);
};

namespace {
void* host = nullptr;
Recorder recorder{};
std::mutex lock;
std::map<ncclComm_t, int> devices;
std::map<ncclComm_t, ncclConfig_t> configs;
std::map<uintptr_t, size_t> allocations;
std::map<ncclComm_t, collHostQueue_t> queues;  // of sends and receives
thread_local int depth = 0;
thread_local std::vector<Operation> group;

template <typename F> F real(F, const char* name) { return reinterpret_cast<F>(dlsym(host, name)); }
#define REAL(name) (real(&name, #name))

int64_t width(ncclDataType_t type) {
  static const int widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? widths[type] : 0;
}
// config NULL: the parent's, as in NCCL.
ncclResult_t made(ncclResult_t result, ncclComm_t* comm, const ncclConfig_t* config = nullptr, ncclComm_t parent = nullptr) {
  if (result == ncclSuccess && comm && *comm && recorder.device) {
    std::lock_guard<std::mutex> held(lock);
    devices[*comm] = recorder.device();
    configs[*comm] = config ? *config : parent ? configs[parent] : ncclConfig_t{};
  }
  return result;
}
// Whether memory is part of an allocation of ncclMemAlloc, the only one that NCCL makes a window of.
bool allocated(const void* at, size_t size) {
  auto address = reinterpret_cast<uintptr_t>(at);
  std::lock_guard<std::mutex> held(lock);
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return false;
  --next;
  return address + size <= next->first + next->second && (address - next->first) % 4096 == 0;
}
// Windows of one call lie beside each other: a rank's offset into its own is the offset into all.
void compare_sizes(ncclComm_t comm, size_t size) {
  int ranks = 1;
  REAL(ncclCommCount)(comm, &ranks);
  std::vector<uint64_t> sizes(ranks);
  uint64_t own = size;
  if (REAL(ncclAllGather)(&own, sizes.data(), 1, ncclUint64, comm, nullptr) != ncclSuccess) return;
  for (uint64_t each : sizes)
    if (each != own) {
      recorder.wrong("the ranks register windows of different sizes");
      return;
    }
}
int device_of(ncclComm_t comm) {
  std::lock_guard<std::mutex> held(lock);
  auto found = devices.find(comm);
  return found == devices.end() ? recorder.device() : found->second;
}
void note(Kind kind, const void* send, int64_t sent, void* recv, int64_t received, size_t count, ncclDataType_t type, int op, int peer,
          ncclComm_t comm, cudaStream_t stream) {
  if (!recorder.operations || !comm) return;
  int ranks = 1, rank = 0;
  REAL(ncclCommCount)(comm, &ranks);
  REAL(ncclCommUserRank)(comm, &rank);
  auto bytes = static_cast<int64_t>(count) * width(type);
  const bool rooted = kind == kReduce || kind == kBroadcast || kind == kGather || kind == kScatter;
  const bool reads = !(kind == kBroadcast || kind == kScatter) || rank == peer;
  const bool writes = !(kind == kReduce || kind == kGather) || rank == peer;
  auto amount = [&](int64_t parts) { return parts < 0 ? bytes * ranks : bytes * parts; };
  Operation each{reinterpret_cast<int64_t>(comm), reinterpret_cast<int64_t>(stream), reinterpret_cast<int64_t>(send),
                 send && (!rooted || reads) ? amount(sent) : 0, reinterpret_cast<int64_t>(recv),
                 recv && (!rooted || writes) ? amount(received) : 0, static_cast<int64_t>(count), kind, type, op, peer,
                 device_of(comm), ranks};
  if (depth) {
    group.push_back(each);
  } else {
    recorder.operations(&each, 1);
  }
}
ncclResult_t run(const Operation& o) {
  auto comm = reinterpret_cast<ncclComm_t>(o.comm);
  auto send = reinterpret_cast<const void*>(o.send);
  auto recv = reinterpret_cast<void*>(o.recv);
  auto count = static_cast<size_t>(o.count);
  auto type = static_cast<ncclDataType_t>(o.dtype);
  auto op = static_cast<ncclRedOp_t>(o.op);
  switch (o.kind) {
    case kReduce: return REAL(ncclReduce)(send, recv, count, type, op, o.peer, comm, nullptr);
    case kBroadcast: return REAL(ncclBroadcast)(send, recv, count, type, o.peer, comm, nullptr);
    case kAllReduce: return REAL(ncclAllReduce)(send, recv, count, type, op, comm, nullptr);
    case kReduceScatter: return REAL(ncclReduceScatter)(send, recv, count, type, op, comm, nullptr);
    case kAllGather: return REAL(ncclAllGather)(send, recv, count, type, comm, nullptr);
    case kAlltoAll: return REAL(ncclAlltoAll)(send, recv, count, type, comm, nullptr);
    case kGather: return REAL(ncclGather)(send, recv, count, type, o.peer, comm, nullptr);
    case kScatter: return REAL(ncclScatter)(send, recv, count, type, o.peer, comm, nullptr);
    case kSend: return REAL(ncclSend)(send, count, type, o.peer, comm, nullptr);
    case kRecv: return REAL(ncclRecv)(recv, count, type, o.peer, comm, nullptr);
  }
  return ncclInternalError;
}
collHostQueue_t queue_of(ncclComm_t comm) {
  std::lock_guard<std::mutex> held(lock);
  collHostQueue_t& queue = queues[comm];
  if (!queue && REAL(collHostQueueCreate)(&queue) != ncclSuccess) queue = nullptr;
  return queue;
}
void end_queue(ncclComm_t comm) {
  collHostQueue_t queue = nullptr;
  {
    std::lock_guard<std::mutex> held(lock);
    auto found = queues.find(comm);
    if (found == queues.end()) return;
    queue = found->second;
    queues.erase(found);
  }
  REAL(collHostQueueDestroy)(queue);
}
template <typename F> ncclResult_t start_late(ncclComm_t comm, cudaStream_t stream, F&& start) {
  if (depth || !recorder.late) return start(nullptr);
  collHostQueue_t queue = queue_of(comm);
  ncclResult_t result = start(reinterpret_cast<cudaStream_t>(queue));
  uint64_t ticket = 0;
  if (result == ncclSuccess) result = REAL(collHostQueueRecord)(queue, &ticket);
  if (result == ncclSuccess)
    recorder.late(device_of(comm), reinterpret_cast<int64_t>(stream), reinterpret_cast<int64_t>(queue), static_cast<int64_t>(ticket));
  return result;
}
}  // namespace

EXPORTED int recorder_open(const char* path, Recorder with) {
  host = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  recorder = with;
  return host != nullptr;
}
// Waits for what has ended late, at most `nanoseconds`; 1: it has ended.
EXPORTED int recorder_wait(int64_t queue, int64_t ticket, int64_t nanoseconds) {
  {
    std::lock_guard<std::mutex> held(lock);
    bool known = false;
    for (auto& each : queues) known = known || reinterpret_cast<int64_t>(each.second) == queue;
    if (!known) return 1;  // its communicator has ended
  }
  return REAL(collHostQueueWait)(reinterpret_cast<collHostQueue_t>(queue), static_cast<uint64_t>(ticket), nanoseconds) != ncclInProgress;
}
// Runs recorded operations again, as one group.
EXPORTED int recorder_run(const Operation* operations, int64_t count) {
  REAL(ncclGroupStart)();
  ncclResult_t result = ncclSuccess;
  for (int64_t i = 0; i < count; ++i) {
    ncclResult_t each = run(operations[i]);
    if (each != ncclSuccess) result = each;
  }
  ncclResult_t end = REAL(ncclGroupEnd)();
  return result == ncclSuccess ? end : result;
}

// The config with which a communicator was made.
EXPORTED void recorder_config(ncclComm_t comm, ncclConfig_t* config) {
  std::lock_guard<std::mutex> held(lock);
  *config = configs[comm];
}

// ---- Operations.
#define CALL(name, ...) return REAL(name)(__VA_ARGS__)
ncclResult_t ncclReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t q) {
  note(kReduce, s, 1, r, 1, n, t, op, root, c, q);
  CALL(ncclReduce, s, r, n, t, op, root, c, nullptr);
}
ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t q) {
  note(kBroadcast, s, 1, r, 1, n, t, 0, root, c, q);
  CALL(ncclBroadcast, s, r, n, t, root, c, nullptr);
}
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t q) {
  note(kAllReduce, s, 1, r, 1, n, t, op, 0, c, q);
  CALL(ncclAllReduce, s, r, n, t, op, c, nullptr);
}
ncclResult_t ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t q) {
  note(kReduceScatter, s, -1, r, 1, n, t, op, 0, c, q);
  CALL(ncclReduceScatter, s, r, n, t, op, c, nullptr);
}
ncclResult_t ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t q) {
  note(kAllGather, s, 1, r, -1, n, t, 0, 0, c, q);
  CALL(ncclAllGather, s, r, n, t, c, nullptr);
}
ncclResult_t ncclAlltoAll(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t q) {
  note(kAlltoAll, s, -1, r, -1, n, t, 0, 0, c, q);
  CALL(ncclAlltoAll, s, r, n, t, c, nullptr);
}
ncclResult_t ncclGather(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t q) {
  note(kGather, s, 1, r, -1, n, t, 0, root, c, q);
  CALL(ncclGather, s, r, n, t, root, c, nullptr);
}
ncclResult_t ncclScatter(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t q) {
  note(kScatter, s, -1, r, 1, n, t, 0, root, c, q);
  CALL(ncclScatter, s, r, n, t, root, c, nullptr);
}
ncclResult_t ncclSend(const void* s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t q) {
  note(kSend, s, 1, nullptr, 0, n, t, 0, peer, c, q);
  return start_late(c, q, [&](cudaStream_t queue) { return REAL(ncclSend)(s, n, t, peer, c, queue); });
}
ncclResult_t ncclRecv(void* r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t q) {
  note(kRecv, nullptr, 0, r, 1, n, t, 0, peer, c, q);
  return start_late(c, q, [&](cudaStream_t queue) { return REAL(ncclRecv)(r, n, t, peer, c, queue); });
}
ncclResult_t ncclGroupStart(void) {
  ++depth;
  CALL(ncclGroupStart);
}
ncclResult_t ncclGroupEnd(void) {
  if (depth && !--depth && !group.empty()) {
    std::vector<Operation> all;
    all.swap(group);
    if (recorder.operations) recorder.operations(all.data(), static_cast<int64_t>(all.size()));
  }
  CALL(ncclGroupEnd);
}

// ---- Memory.
ncclResult_t ncclMemAlloc(void** at, size_t size) {
  ncclResult_t result = REAL(ncclMemAlloc)(at, size);
  if (result == ncclSuccess && recorder.memory) {
    recorder.memory(reinterpret_cast<int64_t>(*at), static_cast<int64_t>(size));
    std::lock_guard<std::mutex> held(lock);
    allocations[reinterpret_cast<uintptr_t>(*at)] = size;
  }
  return result;
}
ncclResult_t ncclMemFree(void* at) {
  {
    std::lock_guard<std::mutex> held(lock);
    allocations.erase(reinterpret_cast<uintptr_t>(at));
  }
  if (recorder.memory) recorder.memory(reinterpret_cast<int64_t>(at), 0);
  CALL(ncclMemFree, at);
}

// ---- Communicators.
ncclResult_t ncclGetVersion(int* v) { CALL(ncclGetVersion, v); }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { CALL(ncclGetUniqueId, id); }
const char* ncclGetErrorString(ncclResult_t r) { CALL(ncclGetErrorString, r); }
const char* ncclGetLastError(ncclComm_t c) { CALL(ncclGetLastError, c); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return made(REAL(ncclCommInitRankConfig)(c, n, id, rank, config), c, config);
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) {
  return made(REAL(ncclCommInitRank)(c, n, id, rank), c);
}
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* made_one, ncclConfig_t* config) {
  return made(REAL(ncclCommSplit)(c, color, key, made_one, config), made_one, config, c);
}
ncclResult_t ncclCommShrink(ncclComm_t c, int* list, int n, ncclComm_t* made_one, ncclConfig_t* config, int flags) {
  return made(REAL(ncclCommShrink)(c, list, n, made_one, config, flags), made_one, config, c);
}
ncclResult_t ncclCommDestroy(ncclComm_t c) {
  if (recorder.ended) recorder.ended(reinterpret_cast<int64_t>(c), 0);
  end_queue(c);
  CALL(ncclCommDestroy, c);
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
  if (recorder.ended) recorder.ended(reinterpret_cast<int64_t>(c), 1);
  ncclResult_t result = REAL(ncclCommAbort)(c);
  end_queue(c);  // what was in flight has ended by it
  return result;
}
ncclResult_t ncclCommRevoke(ncclComm_t c, int flags) { CALL(ncclCommRevoke, c, flags); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* r) { CALL(ncclCommGetAsyncError, c, r); }
ncclResult_t ncclCommCount(const ncclComm_t c, int* n) { CALL(ncclCommCount, c, n); }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) { CALL(ncclCommUserRank, c, rank); }
ncclResult_t ncclCommRegister(const ncclComm_t c, void* at, size_t n, void** handle) {
  ncclResult_t result = REAL(ncclCommRegister)(c, at, n, handle);
  if (result == ncclSuccess && recorder.registered)
    recorder.registered(reinterpret_cast<int64_t>(c), reinterpret_cast<int64_t>(*handle), reinterpret_cast<int64_t>(at),
                        static_cast<int64_t>(n), 0);
  return result;
}
ncclResult_t ncclCommDeregister(const ncclComm_t c, void* handle) {
  if (recorder.registered) recorder.registered(reinterpret_cast<int64_t>(c), reinterpret_cast<int64_t>(handle), 0, 0, 0);
  CALL(ncclCommDeregister, c, handle);
}
// A collective here as in NCCL: it compares what the ranks register.
ncclResult_t ncclCommWindowRegister(ncclComm_t c, void* at, size_t n, ncclWindow_t* w, int flags) {
  if (!allocated(at, n)) return ncclUnhandledCudaError;
  if (recorder.wrong) compare_sizes(c, n);
  ncclResult_t result = REAL(ncclCommWindowRegister)(c, at, n, w, flags);
  if (result == ncclSuccess && recorder.registered)
    recorder.registered(reinterpret_cast<int64_t>(c), reinterpret_cast<int64_t>(*w), reinterpret_cast<int64_t>(at),
                        static_cast<int64_t>(n), 1);
  return result;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t c, ncclWindow_t w) {
  if (recorder.registered) recorder.registered(reinterpret_cast<int64_t>(c), reinterpret_cast<int64_t>(w), 0, 0, 1);
  CALL(ncclCommWindowDeregister, c, w);
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t t, ncclScalarResidence_t where, ncclComm_t c) {
  CALL(ncclRedOpCreatePreMulSum, op, scalar, t, where, c);
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t c) { CALL(ncclRedOpDestroy, op, c); }
