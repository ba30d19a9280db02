// Which arrays of a call the peers can use where they are, and which rank uses whose.
//
// The first round of a call, which compares the calls, also publishes where each rank's arrays lie.
// All ranks read the same answers and come to the same decision.
#include <errno.h>
#include <string.h>

#include <algorithm>

#include "collective.h"
#include "huge_pages.h"
#include "peer_memory.h"
#include "peers.h"

namespace coll {
namespace {

// From which to which size the kernel's reading is quicker than staging: it pins pages and writes
// into the caches. A piece is what one rank sends to another.
struct Range {
  size_t least_piece, most;  // `most`: of what a rank receives in all
  bool holds(size_t piece, size_t all) const { return piece >= least_piece && all <= most; }
};
constexpr size_t kNoLimit = ~size_t{0};
constexpr Range kAllReduce = {1 << 20, kNoLimit}, kReduceScatter = {1 << 20, 16 << 20};
constexpr Range kExchange = {32 << 10, 16 << 20};  // all-gather, all-to-all
// Two ranks: the root and the other one each copy a half. More: staging has the root's data read
// from a slot, which stays in the caches.
constexpr Range kRootedOfTwo = {64 << 10, kNoLimit}, kRooted = {64 << 10, 16 << 20};
// Where ranks take turns on cores the pages cost more.
constexpr Range kAllReduceInTurns = {4 << 20, kNoLimit}, kReduceScatterInTurns = {1 << 20, 4 << 20};
constexpr Range kExchangeInTurns = {128 << 10, 4 << 20}, kBroadcastInTurns = {256 << 10, 2 << 20};
constexpr Range kRootedInTurns = {128 << 10, 32 << 20};
// The least that a sender writes into a receiver's array: below, the wait for it takes longer.
constexpr size_t kLeastWritten = 32 << 10;
constexpr size_t kPage = 4096;

// One rank has all the data, or receives it.
bool copies_with_root(CollKind kind) {
  return kind == CollKind::Broadcast || kind == CollKind::Scatter || kind == CollKind::Gather;
}

}  // namespace

// Whether reading by the kernel is quicker than staging in this call. (A reduce isn't: two ranks took
// as long for 1 MiB, 1.4 times as long for 64.)
bool Collective::worth_reading() const {
  bool in_turns = !comm().spin;
  size_t n = static_cast<size_t>(comm().size), nbytes = op.bytes();
  const Range& rooted = n == 2 ? kRootedOfTwo : kRooted;
  switch (op.kind) {
    case CollKind::AllReduce: return (in_turns ? kAllReduceInTurns : kAllReduce).holds(nbytes, nbytes);
    case CollKind::ReduceScatter: return (in_turns ? kReduceScatterInTurns : kReduceScatter).holds(nbytes, n * nbytes);
    case CollKind::AllGather:
    case CollKind::AllToAll: return (in_turns ? kExchangeInTurns : kExchange).holds(nbytes, n * nbytes);
    case CollKind::Broadcast: return (in_turns ? kBroadcastInTurns : rooted).holds(nbytes, nbytes);
    case CollKind::Scatter:
    case CollKind::Gather: return (in_turns ? kRootedInTurns : rooted).holds(nbytes, n * nbytes);
    default: return false;
  }
}

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
    case CollKind::Gather: sends = !root, taken *= n; break;
    default: return kStaged;
  }
  uint8_t reads = worth_reading() && can_read_peers(c) ? kReads : 0;
  auto& memory = c.me()->memory[op.seq & 1];
  const char* to = static_cast<const char*>(op.recv);
  if (copies_with_root(op.kind) && !sends) {  // its senders may write a part; where they can't, it reads all
    uint8_t how = kEither | reads;
    if (root && op.send == to + static_cast<size_t>(c.rank) * op.bytes()) how |= kInPlace;
    if (op.bytes() < 2 * kLeastWritten) return how;
    memory.recv = shared_place(to, taken);
    if (memory.recv.extent.nbytes) return how | kTakes;
    if (!reads || !is_readable(to, taken)) return how;
    note_ordinary_use(to, taken);
    memory.recv.offset = reinterpret_cast<uint64_t>(to);
    return how | kTakes;
  }
  if (!sends && !receives) return kEither | reads;
  if (!aligned || reinterpret_cast<uintptr_t>(op.recv) % esize) return kStaged;
  if (op.kind == CollKind::AllToAll) {  // in place, a rank would write over what its peers have not read yet
    const char *from = static_cast<const char*>(op.send), *into = static_cast<const char*>(op.recv);
    if (from < into + given && into < from + given) return kStaged;
  }
  uint8_t how = kShared;
  // Publishes an array, by its address where it isn't shared. false: it can't be used in place.
  auto publish = [&](SharedPlace* place, const SharedPlace& found, const void* array, size_t nbytes) {
    *place = found;
    if (found.extent.nbytes) return true;
    if (!reads || !is_readable(array, nbytes)) return false;
    note_ordinary_use(array, nbytes);
    place->offset = reinterpret_cast<uint64_t>(array);
    how = kReadable;
    return true;
  };
  if (sends) {
    if (!publish(&memory.send, shared_place(op.send, given), op.send, given)) return kStaged;
  }
  if (receives) {
    if (op.recv == op.send) memory.recv = memory.send;
    else if (!publish(&memory.recv, shared_place(to, taken), to, taken)) return kStaged;
  }
  bool exchanges = op.kind == CollKind::AllGather || op.kind == CollKind::AllToAll;
  if (exchanges && how == kReadable) note_ordinary_use(to, taken * n);
  size_t own = op.kind == CollKind::Scatter ? static_cast<size_t>(c.rank) * op.bytes() : 0;
  if (copies_with_root(op.kind) && root && to == static_cast<const char*>(op.send) + own) how |= kInPlace;
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
  writes_apart = all_read;
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

// How much of what one rank sends to another the sender writes into the receiver's array, from its
// end; the receiver reads the rest. So the root and the others are done at the same time.
size_t Collective::written_by(int sender, int receiver) const {
  ncclComm& c = comm();
  if (!copies_with_root(op.kind) || sender == receiver || (sender != op.root && receiver != op.root)) return 0;
  const RankBlock* to = c.segment->rank(receiver);
  int parity = static_cast<int>(op.seq & 1);
  if (!(to->sharing[parity] & kTakes)) return 0;
  bool apart = !to->memory[parity].recv.extent.nbytes;
  if (apart && !writes_apart) return 0;
  size_t nbytes = op.bytes(), part = nbytes / static_cast<size_t>(c.size) / kPage * kPage;
  bool in_place_there = c.segment->rank(op.root)->sharing[parity] & kInPlace;
  size_t written = receiver == op.root ? nbytes - part : part;
  if (!in_place_there) written = receiver == op.root ? nbytes : 0;  // the root copies its own part, too
  return written < kLeastWritten ? 0 : written;
}

// Whether a rank reads or writes another one's memory in this call.
bool Collective::uses(int rank, int other) const {
  switch (op.kind) {
    case CollKind::Broadcast: case CollKind::Scatter:
      return other == op.root || (rank == op.root && written_by(rank, other));
    case CollKind::Gather:
      if (rank == op.root) return written_by(other, rank) < op.bytes();
      return other == op.root && written_by(rank, other);
    default: return true;
  }
}

// Whether a rank writes another one's memory in this call.
bool Collective::writes(int rank, int other) const {
  switch (op.kind) {
    case CollKind::AllReduce: return true;
    case CollKind::Reduce: return other == op.root;
    default: return written_by(rank, other) > 0;
  }
}

}  // namespace coll
