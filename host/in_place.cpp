// Collectives on memory that the ranks share (heap.h): each reads the others' arrays where they
// are, and an all-reduce writes the results there too. Nothing is staged.
//
// The first round of the call, which compares the calls, also publishes where each rank's arrays
// lie. Then each rank does its part of the work, counts `reduced` up, and ends when those who read
// or write its memory have counted too. Sums are taken by the same kernel in the same order as in
// the slots, so that the result is the same to the bit.
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
#include "shared_by_use.h"
#include "system.h"

namespace coll {
namespace {

// From which piece on, and up to how much in all, reading by the kernel is quicker than staging: it
// pins pages and writes into the caches. Where ranks take turns on cores the pages cost more.
constexpr size_t kLeastRead = 128 << 10;
constexpr size_t kMostRead = 16 << 20, kMostReadInTurns = 4 << 20;
// From how much on an all-reduce is.
constexpr size_t kLeastReduced = 1 << 20, kLeastReducedInTurns = 4 << 20;
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

// The place of an array of this rank's in shared memory, where it is there; the call uses all of
// `whole`, which may become shared by that.
SharedPlace find_or_share(SharedMemoryUse& use, const void* array, size_t nbytes, const void* whole, size_t whole_bytes) {
  SharedPlace place = use.place(array, nbytes);
  if (place.extent.nbytes || !note_use(whole, whole_bytes)) return place;
  return use.place(array, nbytes);
}

}  // namespace

// What this rank's memory allows in this call, and where it is. Each rank publishes its own;
// choose_path() decides for all.
uint8_t Collective::find_shared_arrays() {
  ncclComm& c = comm();
  size_t esize = type_size(op.type);
  bool aligned = reinterpret_cast<uintptr_t>(op.send) % esize == 0;
  if (op.wire >= 0) return kStaged;
  if (c.size == 1) return aligned ? kShared : kStaged;
  if (op.bytes() <= kMostStaged || c.segment->header()->apart.load(std::memory_order_relaxed)) return kStaged;
  bool root = c.rank == op.root, sends = true, receives = false;
  size_t n = static_cast<size_t>(c.size), given = op.bytes(), taken = op.bytes();
  switch (op.kind) {
    case CollKind::AllReduce: receives = true; break;
    case CollKind::Reduce: receives = root; break;
    case CollKind::ReduceScatter: case CollKind::AllToAll: given *= n; break;
    case CollKind::AllGather: break;
    case CollKind::Broadcast: sends = root; break;
    case CollKind::Scatter: sends = root, given *= n; break;
    case CollKind::Gather: sends = !root; break;
    default: return kStaged;
  }
  // Where all ranks send and receive. With one sender, staging has two cores copy.
  bool exchanges = op.kind == CollKind::AllGather || op.kind == CollKind::AllToAll;
  bool worthwhile = op.kind == CollKind::AllReduce
                        ? op.bytes() >= (c.spin ? kLeastReduced : kLeastReducedInTurns)
                        : exchanges && op.bytes() >= kLeastRead && op.bytes() * n <= (c.spin ? kMostRead : kMostReadInTurns);
  uint8_t reads = worthwhile && can_read_peers(c) ? kReads : 0;
  if (!sends && !receives) return kEither | reads;
  if (!aligned || reinterpret_cast<uintptr_t>(op.recv) % esize) return kStaged;
  if (op.kind == CollKind::AllToAll) {  // in place, a rank would write over what its peers have not read yet
    const char *from = static_cast<const char*>(op.send), *into = static_cast<const char*>(op.recv);
    if (from < into + given && into < from + given) return kStaged;
  }
  auto& memory = c.me()->memory[op.seq & 1];
  const char* to = static_cast<const char*>(op.recv);
  bool part_of_result = op.kind == CollKind::AllGather && op.send == to + static_cast<size_t>(c.rank) * given;
  uint8_t how = kShared;
  // Publishes an array, by its address where it isn't shared. false: it can't be used in place.
  auto publish = [&](SharedPlace* place, const SharedPlace& found, const void* array, size_t nbytes) {
    *place = found;
    if (found.extent.nbytes) return true;
    if (!reads || !is_readable(array, nbytes)) return false;
    place->offset = reinterpret_cast<uint64_t>(array);
    how = kReadable;
    return true;
  };
  if (sends) {
    const void* whole = part_of_result ? to : op.send;
    SharedPlace found = find_or_share(shared_memory_use, op.send, given, whole, part_of_result ? given * n : given);
    if (!publish(&memory.send, found, op.send, given)) return kStaged;
  }
  if (receives) {
    if (op.recv == op.send) memory.recv = memory.send;
    else if (!publish(&memory.recv, find_or_share(shared_memory_use, to, taken, to, taken), to, taken)) return kStaged;
  }
  return how | reads;
}

// All ranks read the same answers, and choose the same path. Where some can share and others can't,
// those who can have put nothing into their slots: the round counts for nothing and the data begins
// with the next one.
void Collective::choose_path() {
  ncclComm& c = comm();
  int parity = static_cast<int>(op.seq & 1);
  bool any = false, all = true, readable = false, all_read = true;
  for (int r = 0; r < c.size; ++r) {
    uint8_t published = c.segment->rank(r)->sharing[parity], sharing = published & kSharingMask;
    any = any || sharing == kShared || sharing == kReadable;
    all = all && sharing != kStaged;
    readable = readable || sharing == kReadable;
    all_read = all_read && (published & kReads);
  }
  in_place = any && all && (all_read || !readable);
  if (in_place) {
    rounds = 1;
    two_phase = false;
  } else if (any) {
    ++base;
    posted = 0;
    c.me()->reduced.store(base, std::memory_order_relaxed);
    c.me()->consumed.store(base, std::memory_order_release);
    c.wake_sleepers();
  }
}

// Whether a rank's array can only be reached by the system.
bool Collective::is_apart(int rank, const SharedPlace& place) const {
  return rank != comm().rank && !place.extent.nbytes;
}

// Where the data is that a rank sends, or where it wants the result. NULL after an error.
char* Collective::peer_array(int rank, bool receives) {
  ncclComm& c = comm();
  if (rank == c.rank) return receives ? static_cast<char*>(op.recv) : static_cast<char*>(const_cast<void*>(op.send));
  const auto& memory = c.segment->rank(rank)->memory[op.seq & 1];
  const SharedPlace& place = receives ? memory.recv : memory.send;
  PeerHeap* heap = c.heaps[static_cast<size_t>(rank)];
  char* address = heap ? heap->address(place) : own_address(place);
  if (!address && !error) {
    error = make_error(collHostErrorMemory, format("rank %d's shared memory could not be mapped: %s", rank, strerror(errno)));
    error.bytes = place.extent.nbytes;
  }
  return address;
}

namespace {

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

void Collective::work_in_place() {
  ncclComm& c = comm();
  size_t esize = type_size(op.type), nbytes = op.bytes();
  char* to = static_cast<char*>(op.recv);
  bool root = c.rank == op.root;
  auto sent_by = [&](int r) { return peer_array(r, false); };
  Error unreachable;  // a peer's memory, or memory for it
  std::mutex unreachable_lock;
  auto keep = [&](Error e) {
    if (!e) return;
    std::lock_guard<std::mutex> lock(unreachable_lock);
    if (!unreachable) unreachable = std::move(e);
  };
  auto take = [&](char* into, int r, size_t offset) {
    const SharedPlace& place = c.segment->rank(r)->memory[op.seq & 1].send;
    bool read = is_apart(r, place);
    const char* from = read ? nullptr : sent_by(r);
    if (error || (!read && into == from + offset)) return;
    in_parts(c, nbytes, 1, [&](size_t begin, size_t end, size_t) {
      if (peer_gave_up()) return;
      if (read) keep(read_peer(c, r, into + begin, place.offset + offset + begin, end - begin));
      else move(into + begin, from + offset + begin, end - begin);
    });
  };
  switch (op.kind) {
    case CollKind::AllReduce:
    case CollKind::Reduce:
    case CollKind::ReduceScatter: {
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
        else sources[r] = sent_by(r) + from;
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
        outs[n++] = scatters ? to : out_of(op.root);
      }
      if (error) break;
      how.copy_count = n - 1;
      how.past_caches = past_caches && !writes && outs[0] != sources[c.rank];  // in place the lines are in the caches: it takes 1.3 times as long
      size_t read_at_once = esize * static_cast<size_t>(c.size), parts = parts_of(last - first, read_at_once);
      std::unique_ptr<coll_share[]> shares;  // of each part, since the parts end in any order
      if (op.share) {
        shares.reset(new (std::nothrow) coll_share[parts]());
        if (!shares) error = make_error(collHostErrorMemory, "no memory for the sums of squares");
        if (error) break;
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
        if (apart && !copy) return keep(make_error(collHostErrorMemory, "no memory for copies of the peers' data"));
        for (int r = 0; r < c.size; ++r) {
          if (!read_from[r]) {
            some[r] = static_cast<const char*>(sources[r]) + begin * esize;
            continue;
          }
          keep(read_peer(c, r, copy, read_from[r] + begin * esize, part_bytes));
          some[r] = copy;
          copy += part_bytes;
        }
        for (int i = 1; i < n; ++i) copies[i - 1] = static_cast<char*>(outs[i]) + begin * esize;
        char* out = static_cast<char*>(outs[0]) + begin * esize;
        reduce(out, some, c.size, end - begin, part);
        if (writes && peer_gave_up()) return;  // its memory may be something else by now
        for (int i = 1; i < c.size; ++i)
          if (int r = (c.rank + i) % c.size; written_to[r]) keep(write_peer(c, r, written_to[r] + begin * esize, out, part_bytes));
      });
      for (size_t i = 0; shares && i < parts; ++i) {
        share.sum_of_squares += shares[i].sum_of_squares;
        share.nonfinite += shares[i].nonfinite;
      }
      break;
    }
    case CollKind::Gather:
      if (!root) break;
      [[fallthrough]];
    case CollKind::AllGather:
      for (int i = 0; i < c.size && !error; ++i) {
        int r = (c.rank + i) % c.size;
        take(to + r * nbytes, r, 0);
      }
      break;
    case CollKind::AllToAll:
      for (int i = 0; i < c.size && !error; ++i) {
        int r = (c.rank + i) % c.size;
        take(to + r * nbytes, r, c.rank * nbytes);
      }
      break;
    case CollKind::Broadcast:
      take(to, op.root, 0);
      break;
    case CollKind::Scatter:
      take(to, op.root, c.rank * nbytes);
      break;
    default: break;
  }
  std::vector<int> gone;
  if (!error && peer_gave_up(&gone)) error = remote_error(c, gone, gone);
  if (!error && unreachable) {  // a process that ends gives its memory back some time before it counts as ended
    gone = failed_peers(c, true);
    for (int64_t until = now_ns() + kLinger; gone.empty() && now_ns() < until; gone = failed_peers(c, true)) {
      struct timespec nap = {0, 1000 * 1000};
      nanosleep(&nap, nullptr);
    }
    error = gone.empty() ? unreachable : remote_error(c, gone, gone);
  }
  if (error) return;  // what isn't done must not be counted: the others would take it for done
  c.me()->reduced.store(base + 1, std::memory_order_release);
  c.wake_sleepers();
}

// Whether this rank reads or writes a peer's memory in this call.
bool Collective::touches(int rank) const {
  switch (op.kind) {
    case CollKind::Broadcast: case CollKind::Scatter: return rank == op.root;
    case CollKind::Gather: return comm().rank == op.root;
    default: return true;
  }
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
    if (r == c.rank || !touches(r)) continue;
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
  bool written = op.kind == CollKind::AllReduce || (op.kind == CollKind::Reduce && c.rank == op.root);
  if (!begun || !in_place || !written) return;
  for (int r = 0; r < c.size; ++r)
    if (c.segment->rank(r)->posted.load() <= base) return;  // then nobody has begun
  int64_t until = now_ns() + kLinger;
  for (int r = 0; r < c.size; ++r) {
    if (r == c.rank) continue;
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
  bool root = c.rank == op.root;
  switch (op.kind) {
    case CollKind::Broadcast: case CollKind::Scatter:
      if (!root) return true;
      break;
    case CollKind::Gather:
      if (root) return true;
      if (c.segment->rank(op.root)->reduced.load(std::memory_order_acquire) > base) return true;
      blocked_on = op.root;
      return false;
    default: break;
  }
  return all_at(&RankBlock::reduced, base + 1);
}

}  // namespace coll
