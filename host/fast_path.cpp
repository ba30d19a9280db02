// The fast path of one blocking collective of a few KiB, and of small sends and receives.
//
// It does what the full path does in the first round, or with the first chunk, and publishes the
// same, so that each rank chooses its path by itself: its peers can't know it. What it leaves out is
// the work around the round: tickets and their lock (order.h has what stands in for them), the
// objects of a batch, the search for memory that could be used in place, and the fence before the
// data of the peers is read. Where a peer isn't there after the spins, or has called something else,
// the full path's loop does the rest, with all that it watches.
#include "fast_path.h"

#include <algorithm>

#include "collective.h"
#include "error.h"
#include "order.h"
#include "progress.h"
#include "system.h"

namespace coll {
namespace {

// Ask so many times as a wait spins. false: it wasn't ready.
template <class Ready>
bool spin_until(const ncclComm& c, Ready ready) {
  for (int turns = c.spin ? kSpins : kSpinsInTurns; !ready(); --turns) {
    if (!turns) return false;
    cpu_relax();
  }
  return true;
}

}  // namespace

bool Collective::is_short() const {
  const ncclComm& c = comm();
  size_t nbytes = op.bytes(), n = static_cast<size_t>(c.size);
  if (nbytes > kMostStaged || n < 2 || op.wire >= 0 || op.share || op.reduction.premul || op.flight || op.compares) return false;
  if (nbytes > slot_stride(op.kind, c.segment->header()->chunk_bytes, n)) return false;
  if (!reduces(op.kind)) return op.kind != CollKind::Send && op.kind != CollKind::Recv;
  // Kernels take aligned elements; and a second phase is worth its wait.
  uintptr_t addresses = reinterpret_cast<uintptr_t>(op.send) | reinterpret_cast<uintptr_t>(op.recv);
  return addresses % type_size(op.type) == 0 && nbytes * n <= kOnePhaseBytes;
}

bool Collective::post_short() {
  ncclComm& c = comm();
  // A peer that is out already is an error, which the full path makes.
  if (c.segment->header()->troubles.load(std::memory_order_acquire)) return false;
  base = c.rounds;
  if (!slot_free(base)) return false;
  begun = true;
  rounds = posted = 1;
  per_round = op.count;
  stride = slot_stride(op.kind, c.segment->header()->chunk_bytes, static_cast<size_t>(c.size));
  op.seq = c.executed++;
  c.short_calls.store(c.short_calls.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  fill_slot(0);
  // Last, and at once: a peer that waits takes this line away with each look at it.
  RankBlock* me = c.me();
  publish_call();
  me->sharing[op.seq & 1] = kStaged;
  me->posted.store(base + 1, std::memory_order_release);
  return true;
}

bool Collective::finish_short() {
  ncclComm& c = comm();
  bool at_once = sources_ready(0);
  if (!at_once) {
    c.wake_sleepers();
    if (!spin_until(c, [&] { return sources_ready(0); })) return false;
  }
  if (!same_calls()) return false;
  checked = true;
  consume(0);
  count_round();
  // The fence in it waits for this rank's stores to reach the caches: here they are there. Nobody
  // waits for the end of a lone round: the posts of the next call's first one say it, too.
  if (at_once) c.wake_sleepers();
  return true;
}

namespace {

struct Turn {
  ncclComm* comm;
  ~Turn() { end_short_call(comm); }
};

bool are_short(const std::vector<Transfer>& transfers) {
  constexpr size_t kMost = 16;  // all are compared with all
  size_t n = transfers.size();
  if (n > kMost) return false;
  for (size_t i = 0; i < n; ++i) {
    const Op& op = transfers[i].op;
    if (!transfers[i].is_short()) return false;
    for (size_t j = 0; j < i; ++j)
      if (transfers[j].op.root == op.root && transfers[j].op.kind == op.kind) return false;
  }
  return true;
}

// false: one isn't done, or doesn't fit its peer's.
bool move_short(std::vector<Transfer>& transfers) {
  bool all = true;
  for (Transfer& each : transfers) {
    if (each.done()) continue;
    if (each.peer_is_there() && !each.peer_agrees()) return false;
    each.advance();
    if (each.done()) each.op.record_end(ncclSuccess);
    else all = false;
  }
  return all;
}

bool finish_short(std::vector<Transfer>& transfers) {
  ncclComm& c = *transfers.front().op.comm;
  // A chunk that had no free slot when its send began: a peer may fall asleep until it is there.
  bool wakes = std::any_of(transfers.begin(), transfers.end(),
                           [](const Transfer& t) { return t.op.kind == CollKind::Send && t.moved < t.chunks; });
  if (!move_short(transfers)) {
    c.wake_sleepers();
    if (!spin_until(c, [&] { return move_short(transfers); })) {
      if (wakes) c.wake_sleepers();
      return false;
    }
  } else {
    wakes = true;
  }
  // Nobody waits for the slot of a lone chunk: a sender fills its second one, at the earliest, when
  // the receiver has announced the next transfer.
  if (wakes) c.wake_sleepers();
  return true;
}

thread_local std::vector<Transfer> t_spare;

}  // namespace

TransferList::TransferList() { transfers.swap(t_spare); }

TransferList::~TransferList() {
  transfers.clear();
  if (transfers.capacity() > t_spare.capacity()) t_spare.swap(transfers);
}

bool run_short(std::vector<Transfer>& transfers, ncclResult_t* code) {
  ncclComm* comm = transfers.front().op.comm;
  if (!are_short(transfers) || !begin_short_call(comm)) return false;
  Turn turn{comm};
  // A peer that is out already may be an error, which the full path makes.
  if (comm->segment->header()->troubles.load(std::memory_order_acquire)) return false;
  *code = ncclSuccess;
  bool failed = false;
  for (size_t i = 0; i < transfers.size() && !failed; ++i) {
    transfers[i].begin();
    transfers[i].op.record_start();
    failed = static_cast<bool>(transfers[i].error);
  }
  if (failed || !finish_short(transfers))
    if (Error error = run_posted(transfers)) *code = raise(error);
  return true;
}

bool run_short(const Op& op, ncclResult_t* code) {
  Collective call(op);
  if (!call.is_short() || !begin_short_call(op.comm)) return false;
  Turn turn{op.comm};
  if (!call.post_short()) return false;
  *code = ncclSuccess;
  if (!call.finish_short())
    if (Error error = run_posted(call)) *code = raise(error);
  return true;
}

}  // namespace coll
