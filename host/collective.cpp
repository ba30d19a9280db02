// The collectives as rounds over the staging slots.
//
// In round r every rank puts its share of the data into its slot r & 1 and counts `posted` up; reads what it needs from the
// slots of others once they have posted; and counts `consumed` up. A slot is filled again when all have consumed the
// round before last. A rank posts round r + 1 before it consumes round r, so that nobody waits for a copy.
//
// The first post of a call also publishes what was called. Nobody consumes anything before all ranks have posted
// their first round and all calls are the same: a mismatch leaves every receive buffer as it was.
//
// All-reduce of many ranks reduces in two phases: each rank its own piece of the slots, in place, then all gather the pieces.
// Sums are always taken in the order of the ranks, so the result does not depend on any of this.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "comm.h"
#include "kernels.h"
#include "system.h"

namespace coll {
namespace {

void reduce_n(void* out, const void* const* sources, int n, size_t count, ncclDataType_t type, const coll_reduction& how) {
  [[maybe_unused]] ExactArithmetic exact;
  reduce_kernel()(out, sources, n, count, type, &how);
}

void copy(void* to, const void* from, size_t nbytes) {
  if (nbytes && to != from) memmove(to, from, nbytes);
}

// Below this many bytes in all slots, every rank reduces everything itself and saves a phase.
constexpr size_t kOnePhaseBytes = 128 << 10;

bool reduces(CollKind kind) {
  return kind == CollKind::AllReduce || kind == CollKind::ReduceScatter || kind == CollKind::Reduce;
}

bool rooted(CollKind kind) {
  return kind == CollKind::Broadcast || kind == CollKind::Reduce || kind == CollKind::Gather || kind == CollKind::Scatter;
}

// Pieces for every rank in one slot, instead of one piece.
bool sliced(CollKind kind) {
  return kind == CollKind::ReduceScatter || kind == CollKind::AllToAll || kind == CollKind::Scatter;
}

uint64_t call_hash(const CallRecord& call) {
  static const uint64_t kKey[2] = {0x636f6c6c65637469ull, 0x7665732063616c6cull};
  return siphash(kKey, &call, sizeof call);
}

}  // namespace

void Collective::begin() {
  ncclComm& c = comm();
  begun = true;
  base = c.rounds;
  op.seq = c.executed++;
  size_t esize = type_size(op.type);
  size_t chunk = c.segment->header()->chunk_bytes;
  size_t n = static_cast<size_t>(c.size);
  stride = sliced(op.kind) ? chunk / n / kLine * kLine : chunk;
  per_round = stride / esize;
  rounds = std::max<uint64_t>((op.count + per_round - 1) / per_round, 1);
  two_phase = op.kind == CollKind::AllReduce && c.size > 2 && op.bytes() * n > kOnePhaseBytes;
  if (op.reduction.scalar_at) op.reduction.scalar = scalar_bits(op.reduction.scalar_at, op.type);

  int parity = static_cast<int>(op.seq & 1);
  CallRecord call{};
  call.seq = op.seq;
  call.count = op.count;
  call.kind = static_cast<int>(op.kind);
  call.datatype = op.type;
  call.op = reduces(op.kind) ? (op.reduction.premul ? ncclNumOps : op.reduction.op) : -1;
  call.root = rooted(op.kind) ? op.root : -1;
  if (op.op_label) snprintf(call.op_label, sizeof call.op_label, "%s", op.op_label);
  if (op.type_label) snprintf(call.type_label, sizeof call.type_label, "%s", op.type_label);
  RankBlock* me = c.me();
  me->call[parity] = call;
  me->call_hash[parity] = call_hash(call);
  me->scalar[parity] = op.reduction.scalar;
}

size_t Collective::elements(uint64_t round) const {
  size_t offset = round * per_round;
  return offset >= op.count ? 0 : std::min(per_round, op.count - offset);
}

void Collective::post(uint64_t round) {
  ncclComm& c = comm();
  size_t esize = type_size(op.type), offset = round * per_round * esize, nbytes = elements(round) * esize;
  char* slot = c.segment->slot(c.rank, base + round);
  const char* from = static_cast<const char*>(op.send);
  bool gives = !(op.kind == CollKind::Broadcast || op.kind == CollKind::Scatter) || c.rank == op.root;
  if (nbytes && gives) {
    if (sliced(op.kind)) {
      for (int j = 0; j < c.size; ++j) copy(slot + j * stride, from + j * op.bytes() + offset, nbytes);
    } else {
      copy(slot, from + offset, nbytes);
    }
  }
  c.me()->posted.store(base + round + 1, std::memory_order_release);
  c.wake_sleepers();
}

bool Collective::all_at(std::atomic<uint64_t> RankBlock::*counter, uint64_t value) {
  ncclComm& c = comm();
  for (int r = 0; r < c.size; ++r) {
    if ((c.segment->rank(r)->*counter).load(std::memory_order_acquire) < value) {
      blocked_on = r;
      return false;
    }
  }
  return true;
}

bool Collective::sources_ready(uint64_t round) {
  ncclComm& c = comm();
  uint64_t value = base + round + 1;
  bool from_root = op.kind == CollKind::Broadcast || op.kind == CollKind::Scatter;
  bool to_root = op.kind == CollKind::Reduce || op.kind == CollKind::Gather;
  if (round == 0 || !(from_root || to_root) || (to_root && c.rank == op.root)) return all_at(&RankBlock::posted, value);
  if (to_root) return c.me()->posted.load(std::memory_order_relaxed) >= value;
  if (c.segment->rank(op.root)->posted.load(std::memory_order_acquire) >= value) return true;
  blocked_on = op.root;
  return false;
}

void Collective::check_calls() {
  ncclComm& c = comm();
  int parity = static_cast<int>(op.seq & 1);
  checked = true;
  uint64_t mine = c.me()->call_hash[parity];
  bool same = true;
  for (int r = 0; r < c.size; ++r) same = same && c.segment->rank(r)->call_hash[parity] == mine;
  if (same) return;
  mismatched = true;
  const CallRecord& own = c.me()->call[parity];
  std::string table = format("the ranks did not make the same call (collective %llu of this communicator):",
                             static_cast<unsigned long long>(op.seq));
  std::vector<int> others;
  for (int r = 0; r < c.size; ++r) {
    const CallRecord& call = c.segment->rank(r)->call[parity];
    bool differs = memcmp(&call, &own, sizeof call) != 0;
    if (differs) others.push_back(r);
    if (c.size > 32 && !differs && r != c.rank) continue;
    const char* name = *call.op_label ? call.op_label : kind_name(static_cast<CollKind>(call.kind));
    table += format("\n  rank %d: %s count=%llu dtype=%s", r, name, static_cast<unsigned long long>(call.count),
                    type_text(call.datatype, call.type_label).c_str());
    if (call.op >= 0) table += format(" op=%s", op_name(call.op));
    if (call.root >= 0) table += format(" root=%d", call.root);
    if (r == c.rank) table += "  (this rank)";
  }
  error = make_error(collHostErrorMismatch, table);
  error.peers = others;
}

void Collective::reduce_slots(void* out, size_t slot_offset, size_t count, uint64_t round) {
  ncclComm& c = comm();
  if (!count) return;
  const void* sources[kMaxRanks];
  uint64_t scalars[kMaxRanks];
  int parity = static_cast<int>(op.seq & 1);
  for (int r = 0; r < c.size; ++r) {
    sources[r] = c.segment->slot(r, base + round) + slot_offset;
    if (op.reduction.premul) scalars[r] = c.segment->rank(r)->scalar[parity];
  }
  coll_reduction how = {op.reduction.op == ncclAvg ? ncclSum : op.reduction.op,
                        op.reduction.op == ncclAvg ? c.size : 0, op.reduction.premul ? scalars : nullptr};
  size_t esize = type_size(op.type);
  if (reinterpret_cast<uintptr_t>(out) % esize == 0) {
    reduce_n(out, sources, c.size, count, op.type, how);
    return;
  }
  // An address that is no multiple of the element's size: through an aligned buffer.
  alignas(kLine) char block[4096];
  for (size_t done = 0; done < count;) {
    size_t some = std::min(count - done, sizeof block / esize);
    reduce_n(block, sources, c.size, some, op.type, how);
    memcpy(static_cast<char*>(out) + done * esize, block, some * esize);
    for (int r = 0; r < c.size; ++r) sources[r] = static_cast<const char*>(sources[r]) + some * esize;
    done += some;
  }
}

// The piece of a two-phase round that rank r reduces: [first, last) in elements of the round.
static void piece_of(size_t count, size_t esize, int size, int r, size_t* first, size_t* last) {
  size_t piece = (count + size - 1) / size;
  size_t line = kLine / esize;
  piece = (piece + line - 1) / line * line;
  *first = std::min(count, piece * r);
  *last = std::min(count, piece * (r + 1));
}

void Collective::reduce_piece(uint64_t round) {
  ncclComm& c = comm();
  size_t esize = type_size(op.type), first, last;
  piece_of(elements(round), esize, c.size, c.rank, &first, &last);
  reduce_slots(c.segment->slot(c.rank, base + round) + first * esize, first * esize, last - first, round);
}

void Collective::consume(uint64_t round) {
  ncclComm& c = comm();
  size_t esize = type_size(op.type), count = elements(round), nbytes = count * esize;
  size_t offset = round * per_round * esize;
  char* to = static_cast<char*>(op.recv) + offset;
  auto slot = [&](int r) { return c.segment->slot(r, base + round); };
  bool root = c.rank == op.root;
  switch (op.kind) {
    case CollKind::AllReduce:
      if (two_phase) {
        for (int i = 0; i < c.size; ++i) {
          int r = (c.rank + i) % c.size;  // everyone begins with another slot
          size_t first, last;
          piece_of(count, esize, c.size, r, &first, &last);
          copy(to + first * esize, slot(r) + first * esize, (last - first) * esize);
        }
      } else {
        reduce_slots(to, 0, count, round);
      }
      break;
    case CollKind::ReduceScatter: reduce_slots(to, c.rank * stride, count, round); break;
    case CollKind::Reduce:
      if (root) reduce_slots(to, 0, count, round);
      break;
    case CollKind::Gather:
      if (!root) break;
      [[fallthrough]];
    case CollKind::AllGather:
      for (int r = 0; r < c.size; ++r) {
        const char* from = r == c.rank ? static_cast<const char*>(op.send) + offset : slot(r);
        copy(to + r * op.bytes(), from, nbytes);
      }
      break;
    case CollKind::Broadcast: copy(to, root ? static_cast<const char*>(op.send) + offset : slot(op.root), nbytes); break;
    case CollKind::AllToAll:
      for (int r = 0; r < c.size; ++r) copy(to + r * op.bytes(), slot(r) + c.rank * stride, nbytes);
      break;
    case CollKind::Scatter: copy(to, slot(op.root) + c.rank * stride, nbytes); break;
    default: break;
  }
}

bool Collective::advance() {
  ncclComm& c = comm();
  RankBlock* me = c.me();
  bool moved = false;
  // Two slots: round r + 1 may be posted while round r is read. Before the calls are checked only the first is posted, so
  // that all ranks agree on the count of rounds after a mismatch.
  while (posted < rounds && posted < consumed + (checked ? kSlots : 1)) {
    uint64_t absolute = base + posted;
    if (absolute >= kSlots && !all_at(&RankBlock::consumed, absolute - kSlots + 1)) return moved;
    post(posted++);
    moved = true;
  }
  if (!checked) {
    if (!sources_ready(0)) return moved;
    check_calls();
    moved = true;
    if (mismatched) {
      c.rounds = base + 1;
      me->reduced.store(c.rounds, std::memory_order_release);
      me->consumed.store(c.rounds, std::memory_order_release);
      c.wake_sleepers();
      return true;
    }
    if (rounds > 1) return true;  // post the second round before consuming the first
  }
  if (two_phase && reduced < posted && sources_ready(reduced)) {
    reduce_piece(reduced++);
    me->reduced.store(base + reduced, std::memory_order_release);
    c.wake_sleepers();
    moved = true;
  }
  if (consumed < posted && (two_phase ? reduced > consumed && all_at(&RankBlock::reduced, base + consumed + 1)
                                      : sources_ready(consumed))) {
    consume(consumed++);
    if (consumed == rounds) c.rounds = base + rounds;
    if (!two_phase) me->reduced.store(base + consumed, std::memory_order_relaxed);
    me->consumed.store(base + consumed, std::memory_order_release);
    c.wake_sleepers();
    moved = true;
  }
  return moved;
}

}  // namespace coll
