// State of a communicator's ranks: how it is published, looked up and turned into errors, and which
// rank wakes which.
#include "peers.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "system.h"

using namespace coll;

// ---- Waking

// Wake a rank, or have it not fall asleep.
static void ring(RankBlock* rank) {
  rank->doorbell.fetch_add(1);
  futex_wake(&rank->doorbell);
}

void ncclComm::wake_sleepers() {
  // Pairs with the fence in doze(): either this rank notices the sleeper, or the sleeper reads what
  // was written before.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (segment->header()->sleepers.load(std::memory_order_relaxed) == 0) return;
  for (int r = 0; r < size; ++r) {
    RankBlock* other = segment->rank(r);
    if (r == rank || !other->sleeping.load(std::memory_order_relaxed)) continue;
    int waiting_for = other->waiting_for.load(std::memory_order_relaxed);
    if (waiting_for != -1 && waiting_for != rank) continue;
    ring(other);
  }
}

void ncclComm::wake_self() { ring(me()); }

void ncclComm::wake_peers() {
  for (int r = 0; r < size; ++r)
    if (r != rank) ring(segment->rank(r));
}

void ncclComm::publish_state(RankState state, const Error* cause) {
  uint32_t alive = kAlive;
  if (cause) {
    std::lock_guard<std::mutex> hold(state_lock);
    if (me()->state.load() == kAlive && me()->cause == collHostErrorNone) {
      me()->cause = cause->kind;
      for (int r : cause->peers) me()->cause_peers[r / 8] = static_cast<uint8_t>(me()->cause_peers[r / 8] | 1 << (r % 8));
    }
  }
  if (!me()->state.compare_exchange_strong(alive, state)) return;
  segment->header()->troubles.fetch_add(1);
  wake_peers();
}

void ncclComm::break_with(const Error& error, RankState state) {
  {
    std::lock_guard<std::mutex> hold(state_lock);
    if (!broken) broken = error;
    is_broken.store(true, std::memory_order_release);
  }
  publish_state(state, &error);
}

Error ncclComm::why_broken() {
  std::lock_guard<std::mutex> hold(state_lock);
  if (!broken) return broken;
  Error error = broken;
  if (error.kind != collHostErrorRemote && error.kind != collHostErrorAborted) {
    error.kind = collHostErrorUsage;
    error.code = ncclInvalidUsage;
  }
  error.text = "the communicator is out of use since " + error.op + " failed: " + error.text;
  return error;
}

namespace coll {
namespace {

const char* state_text(uint32_t state) {
  switch (state) {
    case kLeft: return "left the communicator";
    case kFailed: return "gave up after an error of its own";
    case kAborted: return "aborted the communicator";
    case kRevoked: return "revoked the communicator";
    default: return "died";
  }
}

}  // namespace

std::vector<int> failed_peers(ncclComm& comm, bool look_at_processes) {
  std::vector<int> lost;
  bool found_dead = false;
  for (int r = 0; r < comm.size; ++r) {
    RankBlock* other = comm.segment->rank(r);
    if (r == comm.rank) continue;
    uint32_t state = other->state.load(std::memory_order_acquire);
    if (state == kAlive && look_at_processes && process_ended(comm.pids[r], comm.pidfds[r])) {
      uint32_t alive = kAlive;
      if (other->state.compare_exchange_strong(alive, kDead)) {
        comm.segment->header()->troubles.fetch_add(1);
        found_dead = true;
      }
      state = other->state.load();
    }
    if (state != kAlive) lost.push_back(r);
  }
  if (found_dead) comm.wake_peers();
  if (lost.empty()) return lost;
  // A rank that gave up because of another one did so after it had noted that one's end: a second
  // look sees the cause, too.
  lost.clear();
  for (int r = 0; r < comm.size; ++r)
    if (r != comm.rank && comm.segment->rank(r)->state.load(std::memory_order_acquire) != kAlive) lost.push_back(r);
  return lost;
}

Error timeout_error(ncclComm& comm, const std::string& text, const std::vector<int>& waited_for) {
  std::vector<int> stopped;
  for (int r = 0; r < comm.size; ++r)
    if (r != comm.rank && process_stopped(comm.pids[r])) stopped.push_back(r);
  std::string more;
  if (!stopped.empty())
    more = format("; a signal or a debugger has stopped the process%s of %s", stopped.size() > 1 ? "es" : "", rank_list(stopped).c_str());
  Error error = make_error(collHostErrorTimeout, text + more);
  error.peers = stopped.empty() ? waited_for : stopped;
  return error;
}

namespace {

// A peer ran out of time. The ranks that wait for the same late one run out at nearly the same
// moment, so a rank that notices the first failure is as late as that: it names the ranks that are
// missing, and not the peer.
bool shared_timeout(ncclComm& comm, const std::vector<int>& peers, const std::vector<int>& missing, Error* error) {
  for (int r : peers) {
    RankBlock* other = comm.segment->rank(r);
    if (other->state.load() != kFailed || other->cause != collHostErrorTimeout) continue;
    auto in_cause = [&](int rank) { return other->cause_peers[rank / 8] >> (rank % 8) & 1; };
    if (in_cause(comm.rank)) continue;  // it waited for this rank
    std::vector<int> late;
    for (int m = 0; m < comm.size; ++m) {
      bool waits = std::find(missing.begin(), missing.end(), m) != missing.end();
      if (m != comm.rank && comm.segment->rank(m)->state.load() == kAlive && (waits || in_cause(m))) late.push_back(m);
    }
    if (late.empty()) continue;
    *error = timeout_error(comm, format("rank %d ran out of time; still waiting for %s", r, rank_list(late).c_str()), late);
    return true;
  }
  return false;
}

std::string what_happened(ncclComm& comm, int r) {
  RankBlock* other = comm.segment->rank(r);
  uint32_t state = other->state.load();
  std::string text = format("rank %d (process %d) ", r, comm.pids[r]);
  if (state != kFailed) return text + state_text(state);
  switch (other->cause) {
    case collHostErrorTimeout: return text + "ran out of time and gave up";
    case collHostErrorInterrupted: return text + "was interrupted";
    default: return text + state_text(state);
  }
}

}  // namespace

Error remote_error(ncclComm& comm, const std::vector<int>& peers, const std::vector<int>& missing) {
  Error timeout;
  bool dead = std::any_of(peers.begin(), peers.end(), [&](int r) { return comm.segment->rank(r)->state.load() == kDead; });
  if (!dead && shared_timeout(comm, peers, missing, &timeout)) return timeout;
  // A dead process is a cause, ranks that gave up are consequences: name the causes.
  std::vector<int> causes = peers;
  for (uint32_t state : {uint32_t(kDead), uint32_t(kAborted), uint32_t(kRevoked), uint32_t(kLeft)}) {
    std::vector<int> some;
    for (int r : peers) {
      // A rank that has left in good order is a cause only where something of it is missing.
      bool blameless = state == kLeft && !missing.empty() && std::find(missing.begin(), missing.end(), r) == missing.end();
      if (!blameless && comm.segment->rank(r)->state.load() == state) some.push_back(r);
    }
    if (some.empty()) continue;
    causes = some;
    break;
  }
  std::string text;
  for (int r : causes) {
    if (!text.empty()) text += "; ";
    text += what_happened(comm, r);
    if (text.size() > 800) {
      text += "; ...";
      break;
    }
  }
  Error error = make_error(collHostErrorRemote, text);
  error.peers = causes;
  return error;
}

void publish_child_failure(ncclComm& comm, ChildKind kind, uint64_t number, const Error& error) {
  ChildFailure& record = comm.me()->child_failure[kind];
  {
    std::lock_guard<std::mutex> hold(comm.child_lock);
    if (record.number.load() >= number) return;
    record.version.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    record.kind = error.kind;
    memset(record.peers, 0, sizeof record.peers);
    for (int r : error.peers)
      if (r >= 0 && r < comm.size) record.peers[r / 8] = static_cast<uint8_t>(record.peers[r / 8] | 1 << (r % 8));
    snprintf(record.text, sizeof record.text, "%s", error.text.c_str());
    record.version.fetch_add(1);
    record.number.store(number);
  }
  comm.wake_sleepers();
}

namespace {

// ``later``: of calls after this one, in place of this one.
Error child_failure_of(ncclComm& comm, ChildKind kind, uint64_t number, const std::vector<int>& members, bool later) {
  for (int r : members) {
    if (r == comm.rank) continue;
    const ChildFailure& record = comm.segment->rank(r)->child_failure[kind];
    uint64_t newest = record.number.load();
    if (newest < number || (newest > number) != later) continue;
    uint32_t version = record.version.load();
    ChildFailure copy;
    copy.kind = record.kind;
    memcpy(copy.peers, record.peers, sizeof copy.peers);
    memcpy(copy.text, record.text, sizeof copy.text);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool torn = version % 2 || version != record.version.load() || newest != record.number.load();
    if (torn) continue;  // it is written just now, and is there at the next look
    const char* what = kind == kSplit ? "split" : "shrink";
    const char* text = later ? "rank %d has given up a later %s" : "rank %d has given up this %s";
    Error error = make_error(collHostErrorRemote, format(text, r, what));
    error.peers = {r};
    copy.text[sizeof copy.text - 1] = 0;
    // What it has found out about the ranks holds for this one, too, also in a later call, for which this
    // rank is late. An error of its own is its end.
    bool shared = copy.kind == collHostErrorRemote || copy.kind == collHostErrorTimeout ||
                  (!later && (copy.kind == collHostErrorMismatch || copy.kind == collHostErrorUsage));
    std::vector<int> about;
    for (int peer = 0; peer < comm.size; ++peer)
      if (copy.peers[peer / 8] >> (peer % 8) & 1) about.push_back(peer);
    bool accused = std::find(about.begin(), about.end(), comm.rank) != about.end();
    if (shared && !about.empty() && !accused) {
      error = make_error(static_cast<collHostErrorKind_t>(copy.kind), copy.text);
      error.peers = about;
    } else if (!later) {
      error.text += std::string(": ") + copy.text;
    }
    return error;
  }
  return Error();
}

}  // namespace

Error child_failure(ncclComm& comm, ChildKind kind, uint64_t number, const std::vector<int>& members) {
  Error error = child_failure_of(comm, kind, number, members, false);
  return error ? error : child_failure_of(comm, kind, number, members, true);
}

}  // namespace coll
