// The communicator: a rank's state of it.
//
// Path of a call: api.cpp checks the arguments and makes an Op (operation.h); group.cpp puts the
// ops of a group (or the one op) into a Batch and gives it its place in the order of each
// communicator that it uses (order.h); the batch runs in the calling thread (NULL stream) or in a
// queue's (queue.h); progress.cpp moves its collectives (collective.h) and transfers (transfer.h)
// forward, none of which ever blocks, until all are done. A small blocking collective has a path of
// its own between the first step and the last one: fast_path.h.
#pragma once

#include <stdint.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "condition.h"
#include "error.h"
#include "operation.h"
#include "segment.h"

namespace coll {

// What was registered; its address is the handle (of a window, too).
struct Registration {
  void* address;
};

}  // namespace coll

struct ncclComm {
  uint64_t magic = 0;
  int rank = -1, size = 0, device = 0;
  coll::Segment* segment = nullptr;
  uint64_t secret[4] = {};        // ids of children are derived from it
  // Calls so far, equal on all ranks that take part. They are counted separately, because a rank
  // that failed in one kind of call may not have made the other.
  uint64_t splits = 0, shrinks = 0;
  uint64_t splits_begun = 0;      // by the batch whose turn it is
  std::mutex child_lock;          // guards this rank's ChildFailure records
  int forks = 0;                  // fork_generation() of the process that made it
  bool spin = true;               // no more ranks than cores
  int cores = 1;                  // of this process's affinity mask
  std::vector<int> pids, pidfds;
  int reads_peers = -1;           // whether it can read their memory; -1: not tried. Used by the batch whose turn it is
  std::vector<coll::PeerHeap*> heaps;  // NULL: this process's own

  // Order. Every batch takes the next ticket of each communicator that it uses, under order_lock(),
  // and runs when all before it have ended. So operations take effect in call order, across queues,
  // threads and the NULL stream. A short call (fast_path.h) takes no ticket: it runs only where all
  // tickets are served, and the next ticket's batch waits until it has ended.
  std::atomic<uint64_t> order{0};         // next ticket, waiting threads, and the short call's bit: order.h
  std::mutex turn_lock;                   // guards turn and active
  coll::Condition turn_changed;
  std::atomic<uint64_t> turn{0};          // written under turn_lock
  std::set<uint64_t> abandoned;            // tickets whose owners stopped waiting; their turn is passed on at once
  bool active = false;                    // an operation is running, and may touch the caller's memory
  // Users: the handle, and every ticket that is not yet served. The last one frees the
  // communicator, so that an aborted communicator may have operations in queues that others hold
  // up.
  std::atomic<int> users{1};

  // Used by the batch whose turn it is, and by nobody else.
  uint64_t rounds = 0;      // rounds done by all collectives so far, equal on all ranks
  uint64_t all_consumed = 0;  // rounds whose slots, as far as this rank knows, nobody reads any more
  uint64_t executed = 0;    // collectives begun so far
  std::vector<coll::Channel*> channels;  // whose pages are there, else NULL: at 2 * peer to it, at 2 * peer + 1 from it

  std::atomic<uint64_t> sequence{0};      // collectives called, but for
  std::atomic<uint64_t> short_calls{0};   // those by the fast path; written by the call that runs
  std::atomic<int64_t> timeout_ns{0};
  std::atomic<uint64_t> step{0};          // of the program, by collHostCommSetStep
  std::atomic<bool> abort_flag{false}, revoke_flag{false};
  std::atomic<bool> ready{false};         // false while a non-blocking init is under way
  bool finalized = false;

  // What is in progress, for collHostCommPending.
  std::atomic<const char*> current_op{nullptr};
  std::atomic<uint64_t> current_seq{0}, current_bytes{0}, current_goal{0};
  std::atomic<int> current_peer{-1};
  std::atomic<uint32_t> current_tag{0};

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
  // Publish to the peers that this rank can't go on.
  void publish_state(coll::RankState state, const coll::Error* cause = nullptr);
  // Record the error as the reason why nothing can run any more (the first one stays).
  void break_with(const coll::Error& error, coll::RankState state);
  coll::Error why_broken();
};

namespace coll {

constexpr uint64_t kCommMagic = 0x434f4d4d20686f73ull;
constexpr int kMaxRanks = COLL_HOST_MAX_RANKS;

// The communicator, or NULL after raising: not one of ours, of a parent process, or not ready.
ncclComm* checked(ncclComm_t comm, const char* op);
void release(ncclComm* comm);  // give up one use

// Keeps a communicator from being freed. (A program must not end it before the call that needs it
// has begun.)
struct Use {
  ncclComm* comm;
  explicit Use(ncclComm* c) : comm(c) { comm->users.fetch_add(1); }
  ~Use() { release(comm); }
  Use(const Use&) = delete;
};

}  // namespace coll
