// The order of the operations on a communicator: each takes a ticket, and runs when its turn comes.
#pragma once

#include <stdint.h>

#include <functional>

#include "comm.h"
#include "error.h"

namespace coll {

// ns between checks of the peers' processes, of signals and of the clock, while something is waited
// for.
constexpr int64_t kCheckInterval = 100 * 1000 * 1000;

// Take the next ticket in the communicator's order, under order_lock().
uint64_t take_ticket(ncclComm* comm);

// Run `body` when it is the ticket's turn, then pass the turn on. After that the communicator may
// be freed.
Error in_turn(ncclComm* comm, uint64_t ticket, const std::function<Error()>& body);

// The parts of that, for a batch that uses several communicators.
//
// Wait for the turn; or return the reason why it is not waited for, or may not be used.
// `stop`: a signal has said so, here or in the wait for another communicator's turn.
Error wait_turn(ncclComm* comm, uint64_t ticket, bool* stop);
// Called when all turns are there: from now on an abort has to wait for what runs.
Error become_active(ncclComm* comm, bool stop);
void become_inactive(ncclComm* comm);
void pass_turn(ncclComm* comm, uint64_t ticket);

// Wait until all tickets are served.
void drain(ncclComm* comm);
// Wait until nothing is running. For a communicator whose flags let nothing more begin.
void wait_until_idle(ncclComm* comm);
// Wake whatever waits for something on this rank. Called after a flag has been set.
void wake_waiters(ncclComm* comm);

}  // namespace coll
