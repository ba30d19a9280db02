// The order of the operations on a communicator.
#include "order.h"

#include "system.h"

namespace coll {

Error wait_turn(ncclComm* comm, uint64_t ticket, bool* stop) {
  std::unique_lock<std::mutex> hold(comm->turn_lock);
  auto over = [&] { return comm->turn == ticket || comm->abort_flag || comm->revoke_flag; };
  while (!over() && !*stop) {
    if (comm->turn_changed.wait_for(hold, kCheckInterval, over)) break;
    hold.unlock();  // the check may run a program's own code
    *stop = interrupted();
    hold.lock();
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
  return comm->next_ticket++;
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
    last = comm->next_ticket;
  }
  std::unique_lock<std::mutex> hold(comm->turn_lock);
  comm->turn_changed.wait(hold, [&] { return comm->turn >= last; });
}

void wake_waiters(ncclComm* comm) {
  if (comm->segment) comm->wake_self();
  std::lock_guard<std::mutex> hold(comm->turn_lock);
  comm->turn_changed.notify_all();
}

void wait_until_idle(ncclComm* comm) {
  Use use(comm);
  std::unique_lock<std::mutex> hold(comm->turn_lock);
  comm->turn_changed.wait(hold, [&] { return !comm->active; });
}

}  // namespace coll
