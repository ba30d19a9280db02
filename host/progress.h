// Moves the operations of a batch forward until all are done.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <vector>

#include "collective.h"
#include "comm.h"
#include "error.h"
#include "operation.h"
#include "transfer.h"

namespace coll {

// What a batch does on one communicator.
struct Work {
  ncclComm* comm = nullptr;
  uint64_t ticket = 0;
  Collective* collectives = nullptr;     // run one after the other: `stored`, or a lone one of the caller's
  size_t collective_count = 0;
  std::vector<Collective> stored;
  std::vector<Transfer> transfers;       // run side by side, in order for each peer and direction
  struct Local { Op send, receive; size_t after; };  // as in Transfer
  std::vector<Local> local;              // sends to oneself with their receives
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

// The rest of a collective whose first round is posted, or of transfers of one communicator that have
// begun, for a caller whose turn it is.
Error run_posted(Collective& collective);
Error run_posted(std::vector<Transfer>& transfers);

// Pauses of a wait before it yields the core: where each rank has a core, and where they take turns.
constexpr int kSpins = 300, kSpinsInTurns = 20;

// Wait until is_missing(r) is false for every rank r. revoked_too: peers that revoked the
// communicator still answer.
Error wait_until(ncclComm& comm, bool revoked_too, const std::function<bool(int)>& is_missing);

}  // namespace coll
