// Moves the operations of a batch forward until all are done, and waits while none can move.
#include <sched.h>
#include <string.h>
#include <time.h>

#include <algorithm>

#include "progress.h"
#include "coll/mutant.h"
#include "order.h"
#include "peers.h"
#include "system.h"

namespace coll {
namespace {

constexpr int64_t kLongestSleep = 50 * 1000 * 1000;  // ns

// ---- Waiting

class Pause {
 public:
  // `comm`: whose doorbell to sleep on, or NULL when several communicators are waited for.
  Pause(ncclComm* comm, bool spin) : comm_(comm), spins_(spin ? kSpins : kSpinsInTurns) {}

  void reset() { turns_ = 0; }
  void skip_spins() { turns_ = spins_; }  // they were made already

  // One pause of the kind that fits the time waited so far. `moved` is asked once more before going
  // to sleep. `peer` returns the rank whose flag is waited for, or -1: anybody's.
  template <class P, class F>
  bool pause(P&& peer, F&& moved) {
    ++turns_;
    if (turns_ <= spins_) {
      cpu_relax();
      return false;
    }
    if (turns_ <= spins_ + kYields) {
      sched_yield();
      return false;
    }
    if (!comm_) {
      struct timespec nap = {0, 100 * 1000};
      nanosleep(&nap, nullptr);
      return false;
    }
    RankBlock* me = comm_->me();
    Header* header = comm_->segment->header();
    uint32_t bell = me->doorbell.load();
    int waiting_for = peer();
    me->waiting_for.store(waiting_for, std::memory_order_relaxed);
    me->sleeping.store(1, std::memory_order_relaxed);
    header->sleepers.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool did = moved();
    // Where the last look has found another one to wait for, that one doesn't know yet whom to
    // wake.
    if (!did && peer() == waiting_for) futex_wait(&me->doorbell, bell, kLongestSleep);
    header->sleepers.fetch_sub(1);
    me->sleeping.store(0, std::memory_order_relaxed);
    return did;
  }

  bool long_enough() const { return turns_ > spins_; }

 private:
  static constexpr int kYields = 4000;
  ncclComm* comm_;
  int spins_;
  int turns_ = 0;
};

// ---- One communicator's part of a batch

struct Run {
  Work& work;
  bool finished = false, left = false;
  bool never_begun = false;  // its turn was not waited for
  Error refused;             // why its turn was not waited for, or may not be used
  Error error;
  std::vector<char> busy;
  int64_t limit;
  int64_t since = 0;  // when something was first looked for that would make waiting no use: the clock costs time
  size_t open = 0;  // transfers not yet done
  size_t head = 0;  // transfers before this one are done

  explicit Run(Work& w) : work(w), limit(w.comm->timeout_ns.load(std::memory_order_relaxed)), open(w.transfers.size()) {
    if (open) busy.resize(2 * static_cast<size_t>(w.comm->size));
  }

  const Op& current() const {
    if (work.next < work.collective_count) return work.collectives[work.next].op;
    for (size_t i = head; i < work.transfers.size(); ++i)
      if (!work.transfers[i].done()) return work.transfers[i].op;
    return work.collective_count ? work.collectives[work.collective_count - 1].op : work.transfers.back().op;
  }

  void keep(Error e, const Op& op) {
    e.op = op.name();
    e.tag = op.tag;
    e.rank = work.comm->rank;
    e.seq = op.seq;
    if (!e.bytes) e.bytes = op.bytes();
    if (!error) error = std::move(e);
  }

  void fail(Error e) {
    current().record_end(e.code);
    keep(std::move(e), current());
    finished = true;
    bool aborted = error.kind == collHostErrorAborted;
    work.comm->break_with(error, !aborted ? kFailed : work.comm->abort_flag ? kAborted : kRevoked);
    if (work.next < work.collective_count) work.collectives[work.next].publish_stop();
  }

  void describe(const Op& op, uint64_t goal) {
    ncclComm& c = *work.comm;
    c.current_seq.store(op.seq, std::memory_order_relaxed);
    c.current_bytes.store(op.bytes(), std::memory_order_relaxed);
    c.current_goal.store(goal, std::memory_order_relaxed);
    c.current_peer.store(goal ? -1 : op.root, std::memory_order_relaxed);
    c.current_tag.store(op.tag, std::memory_order_relaxed);
    c.current_op.store(op.name(), std::memory_order_release);
  }

  bool advance_collectives() {
    bool moved = false;
    while (work.next < work.collective_count) {
      Collective& now = work.collectives[work.next];
      if (!now.begun) {
        // No collective ends without this rank, so a peer that is out already has failed in this
        // one, or never called it. What it has posted must not pass for its part of a call that it
        // gave up.
        if (work.comm->segment->header()->troubles.load(std::memory_order_acquire)) {
          std::vector<int> lost = failed_peers(*work.comm, false);
          if (!lost.empty()) {
            fail(remote_error(*work.comm, lost, {}));
            return true;
          }
        }
        now.begin();
        now.op.record_start();
        describe(now.op, now.base + 1);
      }
      moved = now.advance() || moved;
      if (now.error && !now.mismatched) {
        fail(now.error);
        return true;
      }
      if (!now.done()) return moved;
      if (now.op.compares && !now.mismatched) {
        now.error = compare_parts(now.op.recv, work.comm->size, work.comm->rank);
        now.mismatched = static_cast<bool>(now.error);
      }
      now.op.record_end(now.error.code);
      ++work.next;
      if (now.mismatched) {
        keep(now.error, now.op);
        drop_transfers(now.error.code);
        work.next = work.collective_count;  // all ranks leave out the rest, so that they agree on what comes next
      } else if (now.op.compares) {
        copy_local();
      }
    }
    return moved;
  }

  // Copy what this rank sends to itself behind the collectives that have ended.
  void copy_local() {
    for (Work::Local& each : work.local) {
      if (each.after != work.next) continue;
      each.send.record_start();
      each.receive.record_start();
      if (each.send.bytes()) memmove(each.receive.recv, each.send.send, each.send.bytes());
      each.send.record_end(ncclSuccess);
      each.receive.record_end(ncclSuccess);
    }
  }

  // Drop the transfers of a comparison that has failed, or that is left out.
  void drop_transfers(ncclResult_t code) {
    for (Transfer& each : work.transfers) {
      if (each.after < work.next || each.done()) continue;
      each.drop();
      each.op.record_end(code);
      --open;
    }
    for (Work::Local& each : work.local) {
      if (each.after < work.next) continue;
      each.send.record_end(code);
      each.receive.record_end(code);
    }
  }

  // No transfer ends before both sides have announced it. So a peer that is out when this side comes
  // to one has given it up, or never called it: what it has put into the channel doesn't count.
  bool peer_is_out(int peer) {
    ncclComm& c = *work.comm;
    if (!c.segment->header()->troubles.load(std::memory_order_acquire)) return false;
    std::vector<int> lost = failed_peers(c, false);
    if (std::find(lost.begin(), lost.end(), peer) == lost.end()) return false;
    fail(remote_error(c, lost, missing()));
    return true;
  }

  bool advance_transfers() {
    bool moved = false, news = false;
    std::fill(busy.begin(), busy.end(), 0);
    for (size_t i = head; i < work.transfers.size() && open; ++i) {
      Transfer& t = work.transfers[i];
      if (t.done()) {
        if (i == head) ++head;
        continue;
      }
      char& taken = busy[2 * static_cast<size_t>(t.op.root) + (t.op.kind == CollKind::Send)];
      if (taken) continue;  // an earlier one of the same pair and direction goes first
      if (t.after > work.next) {
        taken = 1;
        continue;
      }
      if (!t.begun) {
        if (peer_is_out(t.op.root)) return true;
        t.begin();
        t.op.record_start();
        if (t.error) {
          fail(t.error);
          return true;
        }
        if (!work.collective_count) describe(t.op, 0);
        news = true;
      }
      moved = t.advance() || moved;
      if (t.done()) {
        t.op.record_end(t.error.code);
        --open;
        if (t.mismatched) keep(t.error, t.op);
      } else {
        taken = 1;
      }
    }
    if (news || moved) work.comm->wake_sleepers();
    return moved;
  }

  bool advance() {
    if (finished) return false;
    bool moved = advance_collectives();
    if (open) moved = advance_transfers() || moved;
    if (!finished && work.next == work.collective_count && !open) finished = moved = true;
    return moved;
  }

  int blocked_on() const {
    if (open) return -1;
    return work.next < work.collective_count ? work.collectives[work.next].blocked_on : -1;
  }

  std::vector<int> missing() {
    ncclComm& c = *work.comm;
    std::vector<int> ranks;
    if (work.next < work.collective_count) {
      Collective& now = work.collectives[work.next];
      for (int r = 0; r < c.size; ++r)
        if (c.segment->rank(r)->posted.load() < now.base + 1) ranks.push_back(r);
      if (ranks.empty() && now.blocked_on >= 0) ranks.push_back(now.blocked_on);
    } else {
      for (const Transfer& t : work.transfers)
        if (!t.done() && std::find(ranks.begin(), ranks.end(), t.op.root) == ranks.end()) ranks.push_back(t.op.root);
      std::sort(ranks.begin(), ranks.end());
    }
    return ranks;
  }

  // Whether this waits for one of these peers. Others that have left may have done all their part
  // before.
  bool waits_for(const std::vector<int>& peers) {
    std::vector<int> waited = missing();
    return std::any_of(peers.begin(), peers.end(),
                       [&](int r) { return std::find(waited.begin(), waited.end(), r) != waited.end(); });
  }

  // A rank that has not come to this collective, but to a split that this rank has not called: it
  // left this one out.
  int in_a_split() {
    if (work.next >= work.collective_count || work.collectives[work.next].checked) return -1;
    ncclComm& c = *work.comm;
    uint64_t goal = work.collectives[work.next].base + 1;
    for (int r = 0; r < c.size; ++r) {
      RankBlock* other = c.segment->rank(r);
      if (other->split_posted.load() > c.splits_begun && other->posted.load() < goal) return r;
    }
    return -1;
  }

  // Whether something says that waiting is no use. Called when nothing moves.
  void look_around(bool thoroughly, bool stop, int64_t now) {
    ncclComm& c = *work.comm;
    if (!since) since = now;
    if (c.abort_flag.load(std::memory_order_acquire)) {
      fail(make_error(collHostErrorAborted, "the communicator was aborted by this rank"));
    } else if (c.revoke_flag.load(std::memory_order_acquire)) {
      fail(make_error(collHostErrorAborted, "the communicator was revoked by this rank"));
    } else if (thoroughly || c.segment->header()->troubles.load(std::memory_order_acquire)) {
      // In this order: a rank that has noticed a peer's end then reads all that the peer has
      // written.
      std::vector<int> lost = failed_peers(c, thoroughly);
      if (!lost.empty() && !advance() && COLL_MUTANT(24, waits_for(lost), false)) fail(remote_error(c, lost, missing()));
    }
    if (finished || !thoroughly) return;
    int apart = in_a_split();
    if (apart >= 0 && !advance()) {
      Error e = make_error(collHostErrorMismatch, format("rank %d called ncclCommSplit where this rank called %s", apart, current().name()));
      e.peers = {apart};
      fail(std::move(e));
    } else if (finished) {
      return;
    }
    if (limit > 0 && COLL_MUTANT(25, now - since > limit, false)) {
      std::vector<int> ranks = missing();
      fail(timeout_error(c, format("no end after the timeout of %.1f s; waiting for %s", static_cast<double>(limit) / 1e9, rank_list(ranks).c_str()),
                         ranks));
    } else if (stop) {
      fail(make_error(collHostErrorInterrupted, "interrupted by a signal"));
    }
  }
};

}  // namespace

Error wait_until(ncclComm& c, bool revoked_too, const std::function<bool(int)>& is_missing) {
  auto blocked_on = [&] {
    for (int r = 0; r < c.size; ++r)
      if (is_missing(r)) return r;
    return -1;
  };
  Pause pause(&c, c.spin);
  int64_t limit = c.timeout_ns.load(), start = now_ns(), looked = start;
  bool revoked_before = c.revoke_flag.load();
  for (int peer; (peer = blocked_on()) >= 0;) {
    pause.pause([&] { return peer; }, [&] { return blocked_on() != peer; });
    if (!pause.long_enough()) continue;
    if (c.abort_flag.load()) return make_error(collHostErrorAborted, "the communicator was aborted by this rank");
    if (c.revoke_flag.load() && !revoked_before)
      return make_error(collHostErrorAborted, "the communicator was revoked by this rank");
    int64_t now = now_ns();
    bool thoroughly = now - looked > kCheckInterval;
    if (thoroughly) looked = now;
    if (thoroughly || c.segment->header()->troubles.load()) {
      std::vector<int> lost = failed_peers(c, thoroughly);
      // One that is gone is enough: the others that are missing may have noticed it, and not come.
      for (int r : lost) {
        bool revoked = c.segment->rank(r)->state.load() == kRevoked && revoked_too &&
                       !(thoroughly && process_ended(c.pids[r], c.pidfds[r]));
        // A rank that gave up may have found out by itself who has died.
        if (!revoked && is_missing(r)) return remote_error(c, failed_peers(c, true), {r});
      }
    }
    if (thoroughly && c.segment->rank(peer)->posted.load() > c.rounds && blocked_on() == peer) {
      Error error = make_error(collHostErrorMismatch, format("rank %d called another operation where this rank called this", peer));
      error.peers = {peer};
      return error;
    }
    if (thoroughly && interrupted()) return make_error(collHostErrorInterrupted, "interrupted by a signal");
    if (limit > 0 && now - start > limit)
      return timeout_error(c, format("no end after the timeout of %.1f s; waiting for rank %d", limit / 1e9, peer), {peer});
  }
  return Error();
}

namespace {

// Move runs forward, whose turns are there, until all are finished. Returns the first error. `spun`:
// they have been waited for without yielding.
Error move_until_done(Run* runs, size_t count, bool spin, bool spun);

// Wait for the turns of the runs' communicators, run, pass the turns on. Returns the first error.
Error run_all(Run* runs, size_t count) {
  struct Turns {
    Run* runs;
    size_t count;
    Turns(Run* r, size_t n) : runs(r), count(n) {
      bool stop = false;
      for (size_t i = 0; i < n; ++i) r[i].refused = wait_turn(r[i].work.comm, r[i].work.ticket, &stop);
      for (size_t i = 0; i < n; ++i)
        if (!r[i].refused) r[i].refused = become_active(r[i].work.comm, stop);
    }
    ~Turns() {
      for (size_t i = 0; i < count; ++i) pass_turn(runs[i].work.comm, runs[i].work.ticket);
    }
  } turns(runs, count);
  bool spin = true;
  for (size_t i = 0; i < count; ++i) {
    Run& run = runs[i];
    Work& w = run.work;
    spin = spin && w.comm->spin;
    run.never_begun = static_cast<bool>(run.refused);
    Error broken;
    if (run.refused) broken = run.refused;
    else if (w.comm->is_broken.load(std::memory_order_acquire)) broken = w.comm->why_broken();
    if (!broken && w.comm->revoke_flag.load())
      broken = make_error(collHostErrorAborted, "the communicator was revoked by this rank");
    if (broken) {
      run.keep(broken, !w.collective_count && w.transfers.empty() ? w.local.front().send : run.current());
      run.finished = true;
      // The peers count on an operation that this rank has left out.
      if (broken.kind == collHostErrorInterrupted) w.comm->break_with(run.error, kFailed);
      continue;
    }
    run.copy_local();
  }

  return move_until_done(runs, count, spin, false);
}

Error move_until_done(Run* runs, size_t count, bool spin, bool spun) {
  Pause pause(count == 1 ? runs->work.comm : nullptr, spin);
  if (spun) pause.skip_spins();
  auto advance_all = [&] {
    bool moved = false;
    for (size_t i = 0; i < count; ++i) moved = runs[i].advance() || moved;
    return moved;
  };
  auto all_finished = [&] {
    if (count == 1) return runs->finished;
    bool all = true;
    for (size_t i = 0; i < count; ++i) {
      Run& run = runs[i];
      all = all && run.finished;
      if (!run.finished || run.left) continue;
      run.left = true;  // an abort need not wait for the other communicators of the group
      if (!run.never_begun) become_inactive(run.work.comm);
    }
    return all;
  };
  int64_t looked = 0;
  for (;;) {
    if (advance_all()) pause.reset();
    if (all_finished()) break;
    if (pause.pause([&] { return count == 1 ? runs->blocked_on() : -1; }, advance_all)) pause.reset();
    if (!pause.long_enough()) continue;
    int64_t now = now_ns();
    if (!looked) looked = now;
    bool thoroughly = now - looked > kCheckInterval;
    if (thoroughly) looked = now;
    bool stop = thoroughly && interrupted();
    for (size_t i = 0; i < count; ++i)
      if (!runs[i].finished) runs[i].look_around(thoroughly, stop, now);
  }
  for (size_t i = 0; i < count; ++i)
    if (runs[i].error) return std::move(runs[i].error);
  return Error();
}

}  // namespace

void Batch::run() {
  std::vector<Run> runs;
  runs.reserve(works.size());
  for (Work& work : works) runs.emplace_back(work);
  error = run_all(runs.data(), runs.size());
}

Error run_alone(const Op& op, uint64_t ticket) {
  Collective collective(op);
  Work work;
  work.comm = op.comm;
  work.ticket = ticket;
  work.collectives = &collective;
  work.collective_count = 1;
  Run run(work);
  return run_all(&run, 1);
}

Error run_posted(Collective& collective) {
  Work work;
  work.comm = collective.op.comm;
  work.collectives = &collective;
  work.collective_count = 1;
  Run run(work);
  run.describe(collective.op, collective.base + 1);
  return move_until_done(&run, 1, work.comm->spin, true);
}

Error run_posted(std::vector<Transfer>& transfers) {
  Work work;
  work.comm = transfers.front().op.comm;
  work.transfers.swap(transfers);
  Run run(work);
  for (const Transfer& each : work.transfers) {
    run.open -= each.done();
    if (each.error && !run.finished) run.fail(each.error);
  }
  run.describe(run.current(), 0);
  Error error = move_until_done(&run, 1, work.comm->spin, true);
  transfers.swap(work.transfers);
  return error;
}

}  // namespace coll
