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

// The parts of ncclComm::order: a bit that is set while a short call runs; how many threads wait for
// the turn or for the communicator to be idle; the next ticket.
constexpr uint64_t kShortCall = 1;
constexpr uint64_t kWaiter = 2;
constexpr uint64_t kTicket = uint64_t{1} << 21;

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

// For the fast path: set its bit, if no ticket is out and nobody waits. From then on until the end an
// abort waits for it. false: nothing was done.
bool begin_short_call(ncclComm* comm);
// After that the communicator may be freed.
void end_short_call(ncclComm* comm);

// Wait until all tickets are served and no short call runs.
void drain(ncclComm* comm);
// Wait until nothing is running. For a communicator whose flags let nothing more begin.
void wait_until_idle(ncclComm* comm);
// Wake whatever waits for something on this rank. Called after a flag has been set.
void wake_waiters(ncclComm* comm);

}  // namespace coll
