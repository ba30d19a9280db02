// The communicator and what is put into it.
//
// Path of a call: api.cpp checks the arguments and makes an Op; group.cpp puts the ops of a group (or the one op) into a
// Batch and gives it its place in the order of each communicator it uses; the batch runs in the calling thread (NULL
// stream) or in a queue's; progress.cpp moves its collectives (collective.cpp) and transfers (transfer.cpp) forward, none of
// which ever blocks, until all are done.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "coll/reduce.h"
#include "segment.h"

enum class CollKind : int { AllReduce, ReduceScatter, AllGather, Broadcast, Reduce, AllToAll, Gather, Scatter, Send, Recv };

namespace coll {

const char* kind_name(CollKind kind);  // "ncclAllReduce"
size_t type_size(ncclDataType_t type);
const char* type_name(int type);
const char* op_name(int op);

// A reduction as the caller named it; pre-mul-sum carries its scalar, in the bits of the accumulator's type.
struct Reduction {
  int op = ncclSum;
  bool premul = false;
  uint64_t scalar = 0;
  const void* scalar_at = nullptr;  // ncclScalarDevice: read when the operation starts
};

struct Op {
  CollKind kind;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;  // as in NCCL: of one piece for reduce-scatter, all-gather, all-to-all, gather, scatter
  ncclDataType_t type = ncclInt8;
  int wire = -1;       // an all-reduce whose data is multiplied and rounded to another type on its way into the slots: to this one
  double wire_scale = 1;
  collHostShare_t* share = nullptr;  // of a reduction: what this rank's share of the result is added to
  Reduction reduction;
  int root = 0;      // or the peer of send/recv
  ncclComm* comm = nullptr;
  uint64_t seq = 0;  // number of the collective on its communicator
  const char* op_label = nullptr;    // interned, as
  const char* type_label = nullptr;  // given to collHostLabel
  const char* name() const { return op_label ? op_label : kind_name(kind); }
  size_t bytes() const { return count * type_size(type); }
  ncclDataType_t slot_type() const { return wire < 0 ? type : static_cast<ncclDataType_t>(wire); }
};

// What was registered; its address is the handle (of a window, too).
struct Registration {
  void* address;
  size_t nbytes;
  bool shared;  // it counts as one memory_share
};

struct PreMulOp {
  bool used = false;
  ncclDataType_t type;
  Reduction reduction;
};

// Bits of a scalar of `type` as its accumulator's (float, double or a 64-bit integer).
uint64_t scalar_bits(const void* scalar, ncclDataType_t type);

}  // namespace coll

struct ncclComm {
  uint64_t magic = 0;
  int rank = -1, size = 0, device = 0;
  coll::Segment* segment = nullptr;
  uint64_t secret[4] = {};        // ids of children are derived from it
  // So far. Each is equal on all ranks that take part: apart, because a rank that failed in one kind of call may not
  // have made the other.
  uint64_t splits = 0, shrinks = 0;
  uint64_t splits_begun = 0;      // by the batch whose turn it is
  int forks = 0;                  // fork_generation() of the process that made it
  bool spin = true;               // no more ranks than cores
  int cores = 1;                  // of this process's affinity mask
  std::vector<int> pids, pidfds;
  std::vector<coll::PeerHeap*> heaps;  // NULL: this process's own

  // Order. Every batch takes the next ticket of each communicator that it uses, under order_lock(), and runs when all
  // before it have ended. So operations take effect in call order, across queues, threads and the NULL stream.
  uint64_t next_ticket = 0;               // under order_lock()
  std::mutex turn_lock;                   // guards turn and active
  std::condition_variable turn_changed;
  uint64_t turn = 0;
  std::set<uint64_t> given_up;            // tickets whose owners stopped waiting; their turn is passed on at once
  bool active = false;                    // an operation is running, and may touch the caller's memory
  // The handle and every ticket that is not yet served. Whoever gives up the last one frees the communicator, so that an
  // aborted one can have operations in queues that are held up by others.
  std::atomic<int> users{1};

  // Used by the batch whose turn it is, and by nobody else.
  uint64_t rounds = 0;      // rounds done by all collectives so far, equal on all ranks
  uint64_t all_consumed = 0;  // rounds whose slots, as far as this rank knows, nobody reads any more
  uint64_t executed = 0;    // collectives begun so far
  std::map<int, bool> claimed;  // channels whose pages are there

  std::atomic<uint64_t> sequence{0};      // collectives called
  std::atomic<int64_t> timeout_ns{0};
  std::atomic<bool> abort_flag{false}, revoke_flag{false};
  std::atomic<bool> ready{false};         // false while a non-blocking init is under way
  bool finalized = false;

  // What is in progress, for collHostCommPending.
  std::atomic<const char*> current_op{nullptr};
  std::atomic<uint64_t> current_seq{0}, current_bytes{0}, current_goal{0};
  std::atomic<int> current_peer{-1};

  std::atomic<bool> is_broken{false};
  std::mutex state_lock;                  // guards what follows
  coll::Error broken;                     // why no operation can run any more
  std::vector<coll::PreMulOp> premul;
  std::map<void*, std::unique_ptr<coll::Registration>> registered;
  std::thread init_thread;                // of a non-blocking init
  coll::Error init_error;

  coll::RankBlock* me() const { return segment->rank(rank); }
  // Write a flag, then call this: wakes the peers that sleep until this rank does something.
  void wake_sleepers();
  void wake_self();
  void wake_peers();  // all of them, whatever they wait for
  // Tell the peers that this rank can't go on.
  void publish_state(coll::RankState state, const coll::Error* cause = nullptr);
  // Put the error in place as the reason why nothing can run any more (the first one stays).
  void break_with(const coll::Error& error, coll::RankState state);
  coll::Error why_broken();
};

namespace coll {

constexpr uint64_t kCommMagic = 0x434f4d4d20686f73ull;
constexpr int kMaxRanks = COLL_HOST_MAX_RANKS;

// ---- collective.cpp, and in_place.cpp for the ranks' own memory in the place of slots
struct Collective {
  Op op;
  uint64_t base = 0;      // rounds of the communicator before this call
  uint64_t rounds = 0;
  uint64_t posted = 0, reduced = 0, consumed = 0;
  size_t per_round = 0;   // elements of one piece in a round
  size_t stride = 0;      // bytes between the pieces of a slot
  bool begun = false, checked = false, two_phase = false, mismatched = false;
  bool in_place = false;  // no slots: the peers' memory itself
  bool past_caches = false;
  int blocked_on = -1;
  Error error;
  coll_share share{};  // so far; the caller gets it when the call has succeeded

  explicit Collective(const Op& o) : op(o) {}
  bool done() const { return begun && checked && (mismatched || consumed == rounds); }
  void begin();
  bool advance();  // true: something moved

 private:
  ncclComm& comm() const { return *op.comm; }
  size_t elements(uint64_t round) const;
  void post(uint64_t round);
  bool all_at(std::atomic<uint64_t> RankBlock::*counter, uint64_t value);
  bool slot_free(uint64_t absolute);
  bool sources_ready(uint64_t round);
  void check_calls();
  void describe_mismatch();
  void reduce_piece(uint64_t round);
  void consume(uint64_t round);
  const char* own_source(size_t offset) const;
  coll_share* own_share() { return op.share ? &share : nullptr; }
  coll_reduction reduction(uint64_t* scalars);
  void reduce(void* out, const void** sources, int n, size_t count, coll_reduction how);
  void reduce_slots(void* out, size_t slot_offset, size_t own_offset, size_t count, uint64_t round, coll_share* sums);
  void reduce_all(char* out, size_t own_offset, size_t count, uint64_t round);
  void move(void* to, const void* from, size_t nbytes) const;
  void finish_round();

  uint8_t what_is_shared();
  void settle_way();
  char* there(int rank, bool receives);
  void work_in_place();
  bool touches(int rank) const;
  bool given_up(std::vector<int>* who = nullptr) const;
  bool others_done();

 public:
  void let_others_stop();
};
size_t piece_begin(size_t count, size_t esize, int size, int r);

// ---- transfer.cpp
struct Transfer {
  Op op;
  Channel* channel = nullptr;
  uint64_t number = 0;     // of this transfer on its channel
  uint64_t first_chunk = 0, chunks = 0, moved = 0;
  bool begun = false, checked = false, mismatched = false;
  Error error;

  explicit Transfer(const Op& o) : op(o) {}
  bool done() const { return begun && checked && (mismatched || moved == chunks); }
  void begin();
  bool advance();

 private:
  void check_peer();
};

// ---- progress.cpp
// What a batch does on one communicator.
struct Work {
  ncclComm* comm = nullptr;
  uint64_t ticket = 0;
  Collective* collectives = nullptr;     // run one after the other: `stored`, or a lone one of the caller's
  size_t collective_count = 0;
  std::vector<Collective> stored;
  std::vector<Transfer> transfers;       // run side by side, in order for each peer and direction
  std::vector<std::pair<Op, Op>> local;  // sends to oneself with their receives
  size_t next = 0;
};

// The operations of one group on all communicators that it touches.
struct Batch {
  std::vector<Work> works;
  Error error;  // the first
  void run();   // waits for its turn, runs, passes the turn on
};

// The same for one collective in the calling thread, with nothing allocated.
Error run_alone(const Op& op, uint64_t ticket);

// Peers that can't go on any more, looked up in the shared state and (look_at_processes) in the system.
std::vector<int> lost_peers(ncclComm& comm, bool look_at_processes);
// What that means for this rank; `missing` are the ranks that it waits for itself.
Error remote_error(ncclComm& comm, const std::vector<int>& peers, const std::vector<int>& missing);
// Take a place in the communicator's order, under order_lock().
uint64_t take_ticket(ncclComm* comm);
// Run `body` when it is the ticket's turn, then pass the turn on. The communicator may be gone after that.
Error in_turn(ncclComm* comm, uint64_t ticket, const std::function<Error()>& body);
// Wait until blocked_on() gives -1 instead of a rank. revoked_too: peers that revoked the communicator still answer.
Error wait_until(ncclComm& comm, bool revoked_too, const std::function<int()>& blocked_on);

// ---- bootstrap.cpp
struct Id {
  char magic[8];
  uint64_t name[2];
  uint64_t secret[4];
  char rest[NCCL_UNIQUE_ID_BYTES - 56];
};
static_assert(sizeof(Id) == NCCL_UNIQUE_ID_BYTES, "an id of the host engine is an ncclUniqueId");
void make_id(Id* id);
Id derive_id(const uint64_t secret[4], const void* label, size_t nbytes);
// The communicator that a new one is made from, and which of its ranks take part. Kept alive by its owner meanwhile.
struct Origin {
  ncclComm* parent = nullptr;
  std::vector<int> members;
};
// Meet the other ranks and fill in comm's segment, pids and pidfds. Blocks; ends early when abort_flag is set, or when a
// rank of the origin that should come has died.
bool bootstrap(ncclComm* comm, const Id& id, uint64_t options, const char* what, const Origin& origin, Error* error);
void set_init_timeout(int64_t ms);

// ---- group.cpp
bool in_group();
ncclResult_t submit(const Op& op, cudaStream_t stream);
// Run an init-like job now, or at the end of the open group. Jobs of one parent run one after the other, in call order.
// With `cancelled` a job only undoes what was prepared when it was submitted.
using Job = std::function<Error(bool cancelled)>;
ncclResult_t submit_job(ncclComm* parent, const char* op, Job job);
ncclResult_t group_start();
ncclResult_t group_end(const char* op);
// A call inside the open group was refused: the whole group fails at its end.
ncclResult_t refuse(ncclResult_t code);
void group_cancel();

// ---- queue.cpp
bool queue_alive(collHostQueue_t queue);
// Put a task behind the others. Its error is what collHostQueueWait gives for its ticket.
uint64_t queue_push(collHostQueue_t queue, std::function<Error()> task);

// ---- api.cpp
// "float32", or "int16 as bytes" for a labelled type.
std::string type_text(int type, const char* label);

// ---- comm.cpp
// The communicator, or NULL after raising: not one of ours, of a parent process, or not ready.
ncclComm* checked(ncclComm_t comm, const char* op);
void drain(ncclComm* comm);     // until all tickets are served
void rest(ncclComm* comm);      // until nothing is running; for one whose flags let nothing more begin
void release(ncclComm* comm);   // give up one use
void stop_waiting(ncclComm* comm);  // after setting a flag: wake whoever waits for something on this rank
// Keeps a communicator from being freed. (A program must not end it before the call that needs it has begun.)
struct Use {
  ncclComm* comm;
  explicit Use(ncclComm* c) : comm(c) { comm->users.fetch_add(1); }
  ~Use() { release(comm); }
  Use(const Use&) = delete;
};

}  // namespace coll
