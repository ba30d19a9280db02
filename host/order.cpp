// The order of the operations on a communicator.
#include "order.h"

#include "coll/mutant.h"
#include "system.h"

namespace coll {
namespace {

bool short_call_runs(const ncclComm* comm) { return comm->order.load(std::memory_order_acquire) & kShortCall; }

// Counts a thread that waits for turn_changed. The end of a short call, which takes no lock, reads
// the count in the same word as its own bit: it either wakes the thread, or has ended before the
// thread looks.
struct Waiter {
  ncclComm* comm;
  explicit Waiter(ncclComm* c) : comm(c) { comm->order.fetch_add(kWaiter); }
  ~Waiter() { comm->order.fetch_sub(kWaiter); }
  Waiter(const Waiter&) = delete;
};

}  // namespace

Error wait_turn(ncclComm* comm, uint64_t ticket, bool* stop) {
  std::unique_lock<std::mutex> hold(comm->turn_lock);
  auto is_next = [&] { return COLL_MUTANT(23, comm->turn == ticket, true) && !short_call_runs(comm); };
  // A revoked communicator still splits, in its turn: a short call ends first, as it does at once.
  auto over = [&] { return is_next() || comm->abort_flag || (comm->revoke_flag && comm->turn != ticket); };
  if (!over()) {
    Waiter waits(comm);
    while (!over() && !*stop) {
      if (comm->turn_changed.wait_for(hold, kCheckInterval, over)) break;
      hold.unlock();  // the check may run a program's own code
      *stop = interrupted();
      hold.lock();
    }
  }
  if (comm->turn != ticket) comm->abandoned.insert(ticket);
  if (comm->abort_flag) return make_error(collHostErrorAborted, "the communicator was aborted by this rank");
  if (*stop) return make_error(collHostErrorInterrupted, "interrupted by a signal");
  if (comm->turn != ticket) return make_error(collHostErrorAborted, "the communicator was revoked by this rank");
  return Error();
}

Error become_active(ncclComm* comm, bool stop) {
  std::lock_guard<std::mutex> hold(comm->turn_lock);
  if (comm->abort_flag) return make_error(collHostErrorAborted, "the communicator was aborted by this rank");
  if (stop) return make_error(collHostErrorInterrupted, "interrupted by a signal");
  comm->active = true;
  return Error();
}

void become_inactive(ncclComm* comm) {
  std::lock_guard<std::mutex> hold(comm->turn_lock);
  comm->active = false;
  comm->current_op.store(nullptr, std::memory_order_relaxed);
  comm->turn_changed.notify_all();
}

void pass_turn(ncclComm* comm, uint64_t ticket) {
  {
    std::lock_guard<std::mutex> hold(comm->turn_lock);
    if (comm->turn == ticket) {  // else it was given up
      comm->active = false;
      comm->current_op.store(nullptr, std::memory_order_relaxed);
      ++comm->turn;
      while (comm->abandoned.erase(comm->turn)) ++comm->turn;
      comm->turn_changed.notify_all();
    }
  }
  release(comm);
}

uint64_t take_ticket(ncclComm* comm) {
  comm->users.fetch_add(1);
  return comm->order.fetch_add(kTicket) / kTicket;
}

bool begin_short_call(ncclComm* comm) {
  uint64_t idle = comm->turn.load(std::memory_order_acquire) * kTicket;
  if (!comm->order.compare_exchange_strong(idle, idle | kShortCall)) return false;
  // An abort sets its flag, then counts itself as waiting: either that has failed the exchange, or it
  // waits for this call.
  if (!comm->abort_flag && !comm->revoke_flag && !comm->is_broken) return true;
  end_short_call(comm);
  return false;
}

void end_short_call(ncclComm* comm) {
  comm->current_op.store(nullptr, std::memory_order_relaxed);
  uint64_t alone = comm->turn.load(std::memory_order_relaxed) * kTicket | kShortCall;
  if (comm->order.compare_exchange_strong(alone, alone & ~kShortCall)) return;
  Use use(comm);
  std::lock_guard<std::mutex> hold(comm->turn_lock);
  comm->order.fetch_sub(kShortCall);
  comm->turn_changed.notify_all();
}

Error in_turn(ncclComm* comm, uint64_t ticket, const std::function<Error()>& body) {
  bool stop = false;
  Error error = wait_turn(comm, ticket, &stop);
  if (!error) error = become_active(comm, stop);
  if (error.kind == collHostErrorInterrupted) comm->break_with(error, kFailed);
  if (!error) error = body();
  pass_turn(comm, ticket);
  return error;
}

void drain(ncclComm* comm) {
  Use use(comm);
  uint64_t last;
  {
    std::lock_guard<std::mutex> hold(order_lock());
    last = comm->order.load() / kTicket;
  }
  std::unique_lock<std::mutex> hold(comm->turn_lock);
  Waiter waits(comm);
  comm->turn_changed.wait(hold, [&] { return comm->turn >= last && !short_call_runs(comm); });
}

void wake_waiters(ncclComm* comm) {
  if (comm->segment) comm->wake_self();
  std::lock_guard<std::mutex> hold(comm->turn_lock);
  comm->turn_changed.notify_all();
}

void wait_until_idle(ncclComm* comm) {
  Use use(comm);
  std::unique_lock<std::mutex> hold(comm->turn_lock);
  Waiter waits(comm);
  comm->turn_changed.wait(hold, [&] { return !comm->active && !short_call_runs(comm); });
}

}  // namespace coll
