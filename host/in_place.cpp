// Collectives on memory that the ranks share (heap.h) or that the system reads and writes for them
// (peer_memory.h): each reads the others' arrays where they are, and an all-reduce writes the
// results there too. Nothing is staged.
//
// The first round of the call says where the arrays are (arrays_in_place.cpp). Then each rank does
// its part of the work, counts `reduced` up, and ends when those who read or write its memory have
// counted too. Where one rank has all the data, or receives it, that one and each of the others
// copy a part of what they exchange, so that no core waits for another's copies. Sums are taken by
// the same kernel in the same order as in the slots, so that the result is the same to the bit.
#include <errno.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>

#include "collective.h"
#include "kernels.h"
#include "peer_memory.h"
#include "peers.h"
#include "pool.h"
#include "system.h"

namespace coll {
namespace {

// What one thread does at a time where several share the work, and from how much on they do.
constexpr size_t kPart = 512 << 10;
constexpr size_t kShareFrom = 4 << 20;

size_t parts_of(size_t count, size_t esize) { return (count + kPart / esize - 1) / (kPart / esize); }

// How long a rank that fails waits for those who still write into its memory.
constexpr int64_t kLinger = 1000 * 1000 * 1000;  // ns

// Do [0, count) elements in parts, on this thread and on cores that its rank has to itself and that
// are idle: one core doesn't reach the rate of the memory on a node that has many. Which parts
// there are depends on count and esize alone, so that statistics of them add up to the same bits.
template <class F>
void in_parts(const ncclComm& c, size_t count, size_t esize, F&& work) {
  int own_cores = count * esize < kShareFrom ? 1 : c.cores / c.size;
  int threads = own_cores > 1 ? std::min(own_cores, 1 + idle_cores()) : 1;
  struct Parts {
    size_t count, part;
    F& work;
  } parts{count, kPart / esize, work};
  pool_run(threads, static_cast<int64_t>(parts_of(count, esize)), [](void* context, int64_t i) {
    const Parts& p = *static_cast<const Parts*>(context);
    size_t first = static_cast<size_t>(i) * p.part;
    p.work(first, std::min(p.count, first + p.part), static_cast<size_t>(i));
  }, &parts);
}

// Memory for copies of the peers', of this thread. NULL: there is none.
char* scratch(size_t nbytes) {
  static thread_local std::unique_ptr<char[]> memory;
  static thread_local size_t size = 0;
  if (nbytes > size) {
    memory.reset(new (std::nothrow) char[nbytes]);
    size = memory ? nbytes : 0;
  }
  return memory.get();
}

}  // namespace

// The first error of a call's parts, which several threads may do.
class FirstError {
 public:
  void keep(Error e) {
    if (!e) return;
    std::lock_guard<std::mutex> hold(lock_);
    if (!first_) first_ = std::move(e);
  }
  const Error& first() const { return first_; }

 private:
  std::mutex lock_;
  Error first_;
};

// Reduce this rank's slice of all arrays. `unreachable` keeps the errors of reaching the peers' memory,
// or of memory for it.
void Collective::reduce_in_place(FirstError& unreachable) {
  ncclComm& c = comm();
  size_t esize = type_size(op.type), nbytes = op.bytes();
  const void* sources[kMaxRanks];
  void* outs[kMaxRanks];
  uint64_t scalars[kMaxRanks];
  bool scatters = op.kind == CollKind::ReduceScatter;
  size_t first = scatters ? 0 : slice_begin(op.count, esize, c.size, c.rank);
  size_t last = scatters ? op.count : slice_begin(op.count, esize, c.size, c.rank + 1);
  size_t from = scatters ? c.rank * nbytes : first * esize;
  uint64_t read_from[kMaxRanks] = {}, written_to[kMaxRanks] = {};  // by the system; 0: the memory is shared
  size_t apart = 0;
  bool writes = false;
  for (int r = 0; r < c.size && !error; ++r) {
    const auto& memory = c.segment->rank(r)->memory[op.seq & 1];
    if (is_apart(r, memory.send)) read_from[r] = memory.send.offset + from, ++apart;
    else sources[r] = peer_array(r, false) + from;
    if (op.kind == CollKind::AllReduce && is_apart(r, memory.recv)) written_to[r] = memory.recv.offset + from, writes = true;
  }
  coll_reduction how = reduction(scalars);
  int n = 0;
  // An array that is both is one address: a peer's memory may be mapped twice, and the kernel
  // compares addresses.
  auto out_of = [&](int r) -> void* {
    const auto& memory = c.segment->rank(r)->memory[op.seq & 1];
    if (r != c.rank && memory.send.offset == memory.recv.offset && memory.send.extent.nbytes) return const_cast<void*>(sources[r]);
    return peer_array(r, true) + first * esize;
  };
  if (op.kind == CollKind::AllReduce) {
    for (int i = 0; i < c.size && !error; ++i)
      if (int r = (c.rank + i) % c.size; !written_to[r]) outs[n++] = out_of(r);
  } else {
    outs[n++] = scatters ? op.recv : out_of(op.root);
  }
  if (error) return;
  how.copy_count = n - 1;
  how.past_caches = past_caches && !writes && outs[0] != sources[c.rank];  // in place the lines are in the caches: it takes 1.3 times as long
  size_t read_at_once = esize * static_cast<size_t>(c.size), parts = parts_of(last - first, read_at_once);
  std::unique_ptr<coll_share[]> shares;  // of each part, since the parts end in any order
  if (op.share) {
    shares.reset(new (std::nothrow) coll_share[parts]());
    if (!shares) error = make_error(collHostErrorMemory, "no memory for the sums of squares");
    if (error) return;
  }
  in_parts(c, last - first, read_at_once, [&](size_t begin, size_t end, size_t index) {
    if (peer_gave_up()) return;
    const void* some[kMaxRanks];
    void* copies[kMaxRanks];
    coll_reduction part = how;
    part.copies = copies;
    if (shares) part.share = &shares[index];
    size_t part_bytes = (end - begin) * esize;
    char* copy = apart ? scratch(apart * part_bytes) : nullptr;
    if (apart && !copy) return unreachable.keep(make_error(collHostErrorMemory, "no memory for copies of the peers' data"));
    for (int r = 0; r < c.size; ++r) {
      if (!read_from[r]) {
        some[r] = static_cast<const char*>(sources[r]) + begin * esize;
        continue;
      }
      unreachable.keep(read_peer(c, r, copy, read_from[r] + begin * esize, part_bytes));
      some[r] = copy;
      copy += part_bytes;
    }
    for (int i = 1; i < n; ++i) copies[i - 1] = static_cast<char*>(outs[i]) + begin * esize;
    char* out = static_cast<char*>(outs[0]) + begin * esize;
    reduce(out, some, c.size, end - begin, part);
    if (writes && peer_gave_up()) return;  // its memory may be something else by now
    for (int i = 1; i < c.size; ++i)
      if (int r = (c.rank + i) % c.size; written_to[r]) unreachable.keep(write_peer(c, r, written_to[r] + begin * esize, out, part_bytes));
  });
  for (size_t i = 0; shares && i < parts; ++i) {
    share.sum_of_squares += shares[i].sum_of_squares;
    share.nonfinite += shares[i].nonfinite;
  }
}

// Copy what this rank receives, and what it sends and writes itself (written_by). The parts are
// checked as in reduce_in_place().
void Collective::copy_in_place(FirstError& unreachable) {
  ncclComm& c = comm();
  size_t nbytes = op.bytes();
  char* to = static_cast<char*>(op.recv);
  int parity = static_cast<int>(op.seq & 1);
  auto take = [&](char* into, int r, size_t offset) {
    const SharedPlace& place = c.segment->rank(r)->memory[parity].send;
    bool read = is_apart(r, place);
    size_t taken = nbytes - written_by(r, c.rank);
    if (!taken) return;
    const char* from = read ? nullptr : peer_array(r, false);
    if (error || (!read && into == from + offset)) return;
    in_parts(c, taken, 1, [&](size_t begin, size_t end, size_t) {
      if (peer_gave_up()) return;
      if (read) unreachable.keep(read_peer(c, r, into + begin, place.offset + offset + begin, end - begin));
      else move(into + begin, from + offset + begin, end - begin);
    });
  };
  auto write = [&](int r, size_t offset, const char* from) {
    size_t written = written_by(c.rank, r), first = nbytes - written;
    if (error || !written) return;
    const SharedPlace& place = c.segment->rank(r)->memory[parity].recv;
    bool apart = is_apart(r, place);
    char* into = apart ? nullptr : peer_array(r, true);
    if (error) return;
    in_parts(c, written, 1, [&](size_t begin, size_t end, size_t) {
      if (peer_gave_up()) return;  // its memory may be something else by now
      size_t at = first + begin;
      if (apart) unreachable.keep(write_peer(c, r, place.offset + offset + at, from + at, end - begin));
      else move(into + offset + at, from + at, end - begin);
    });
  };
  bool root = c.rank == op.root;
  const char* own = static_cast<const char*>(op.send);
  for (int i = 0; i < c.size && !error; ++i) {
    int r = (c.rank + i) % c.size;
    size_t theirs = static_cast<size_t>(r) * nbytes, mine = static_cast<size_t>(c.rank) * nbytes;
    switch (op.kind) {
      case CollKind::AllGather: take(to + theirs, r, 0); break;
      case CollKind::AllToAll: take(to + theirs, r, mine); break;
      case CollKind::Gather:
        if (root) take(to + theirs, r, 0);
        else if (r == op.root) write(r, mine, own);
        break;
      case CollKind::Broadcast:
        if (r == op.root) take(to, r, 0);
        else if (root) write(r, 0, own);
        break;
      case CollKind::Scatter:
        if (r == op.root) take(to, r, mine);
        else if (root) write(r, 0, own + theirs);
        break;
      default: break;
    }
  }
}

void Collective::work_in_place() {
  ncclComm& c = comm();
  bool sums = op.kind == CollKind::AllReduce || op.kind == CollKind::Reduce || op.kind == CollKind::ReduceScatter;
  FirstError unreachable;
  if (sums) reduce_in_place(unreachable);
  else copy_in_place(unreachable);
  std::vector<int> gone;
  if (!error && peer_gave_up(&gone)) error = remote_error(c, gone, gone);
  if (!error && unreachable.first()) {  // a process that ends gives its memory back some time before it counts as ended
    gone = failed_peers(c, true);
    for (int64_t until = now_ns() + kLinger; gone.empty() && now_ns() < until; gone = failed_peers(c, true)) {
      struct timespec nap = {0, 1000 * 1000};
      nanosleep(&nap, nullptr);
    }
    error = gone.empty() ? unreachable.first() : remote_error(c, gone, gone);
  }
  if (error) return;  // what isn't done must not be counted: the others would take it for done
  c.me()->reduced.store(base + 1, std::memory_order_release);
  c.wake_sleepers();
}

// Whether a rank whose memory is used here has given this call up. From then on the memory is its
// caller's, who may write to it or free it. None of these ranks ends the call in good order before
// this one has done its part.
bool Collective::peer_gave_up(std::vector<int>* who) const {
  ncclComm& c = comm();
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read before this, was read before the states are
  if (!c.segment->header()->troubles.load(std::memory_order_relaxed)) return false;
  bool any = false;
  for (int r = 0; r < c.size; ++r) {
    if (r == c.rank || !uses(c.rank, r)) continue;
    uint32_t state = c.segment->rank(r)->state.load(std::memory_order_acquire);
    bool gone = state == kFailed || state == kAborted || state == kRevoked;
    any = any || gone;
    if (who && (gone || state == kDead)) who->push_back(r);
  }
  return any;
}

// After an error here, which the peers can read: they check it at every part of their work, so this
// takes no longer than a part. Only for one that was stopped from outside it is not waited for
// long. (A peer's state doesn't show that: a revoke changes it at once.)
void Collective::publish_stop() {
  ncclComm& c = comm();
  if (begun) c.me()->stopped.store(base + 1);
  if (!begun || !in_place) return;
  for (int r = 0; r < c.size; ++r)
    if (c.segment->rank(r)->posted.load() <= base) return;  // then nobody has begun
  int64_t until = now_ns() + kLinger;
  for (int r = 0; r < c.size; ++r) {
    if (r == c.rank || !writes(r, c.rank)) continue;
    RankBlock* other = c.segment->rank(r);
    size_t at = static_cast<size_t>(r);
    while (other->reduced.load() <= base && other->stopped.load() <= base && !process_ended(c.pids[at], c.pidfds[at])) {
      if (now_ns() > until) return;
      struct timespec nap = {0, 50 * 1000};
      nanosleep(&nap, nullptr);
    }
  }
}

// Whether those who read or write this rank's memory in this call have done so.
bool Collective::peers_done() {
  ncclComm& c = comm();
  for (int r = 0; r < c.size; ++r) {
    if (r == c.rank || !uses(r, c.rank) || c.segment->rank(r)->reduced.load(std::memory_order_acquire) > base) continue;
    blocked_on = r;
    return false;
  }
  return true;
}

}  // namespace coll
