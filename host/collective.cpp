// The collectives as rounds over the staging slots.
//
// In round r every rank puts its share of the data into its slot r & 1 and counts `posted` up;
// reads what it needs from the slots of others once they have posted; and counts `consumed` up. A
// slot is filled again when all have consumed the round before last. What a rank sends to itself
// stays in its own memory.
//
// Where all wait for all (everything but broadcast, scatter, gather and reduce), a rank posts a
// round when it has consumed the one before: that all have posted it says that the slots of the
// round before it are free, and the data of a round stays in the second-level cache. A root runs
// one round ahead.
//
// The first post of a call also publishes what was called. Nobody consumes anything before all
// ranks have posted their first round and all calls are the same: a mismatch leaves every receive
// buffer as it was.
//
// All-reduce of many ranks reduces in two phases: each rank its own slice of the slots, in place,
// then all gather the slices. Sums are always taken in the order of the ranks, so the result does
// not depend on any of this.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "collective.h"
#include "coll/mutant.h"
#include "kernels.h"
#include "system.h"

namespace coll {
namespace {

// What was called, as one number. The labels are few and interned; their text counts, not their
// address.
uint64_t call_key(const CallRecord& call) {
  static const uint64_t kKey[2] = {0x636f6c6c65637469ull, 0x7665732063616c6cull};
  uint64_t label = 0;
  if (*call.op_label || *call.type_label) label = siphash(kKey, call.op_label, sizeof call.op_label + sizeof call.type_label);
  auto mixed = [](uint64_t value) {  // the finalizer of MurmurHash3 (Appleby): a bijection, so that no two single words meet
    value = (value ^ value >> 33) * 0xff51afd7ed558ccdull;
    value = (value ^ value >> 33) * 0xc4ceb9fe1a85ec53ull;
    return value ^ value >> 33;
  };
  uint64_t small = static_cast<uint64_t>(call.kind) | static_cast<uint64_t>(call.datatype) << 8 |
                   static_cast<uint64_t>(call.op + 1) << 16 | static_cast<uint64_t>(call.wire + 1) << 24 |
                   static_cast<uint64_t>(call.root + 1) << 32;
  // Calls that differ in one word alone differ in the key: each step is a bijection.
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15ull;
  return mixed(mixed(call.seq * kOdd + small) + call.count) + label + call.step * kOdd + (static_cast<uint64_t>(call.tag) << 32);
}

}  // namespace

void Collective::begin() {
  ncclComm& c = comm();
  begun = true;
  base = c.rounds;
  op.seq = c.executed++;
  size_t esize = type_size(op.slot_type());
  size_t chunk = c.segment->header()->chunk_bytes;
  size_t n = static_cast<size_t>(c.size);
  stride = slot_stride(op.kind, chunk, n);
  per_round = stride / esize;
  bool fans = op.kind == CollKind::AllToAll || op.kind == CollKind::AllGather || op.kind == CollKind::Gather;
  past_caches = coll::past_caches(op.bytes() * (fans ? n : 1));
  rounds = op.count <= per_round ? 1 : (op.count + per_round - 1) / per_round;
  two_phase = op.kind == CollKind::AllReduce && op.wire < 0 && c.size > 2 && op.bytes() * n > kOnePhaseBytes;
  if (op.reduction.scalar_at) op.reduction.scalar = scalar_bits(op.reduction.scalar_at, op.type);

  publish_call();
  uint8_t& sharing = c.me()->sharing[op.seq & 1];
  sharing = find_shared_arrays();
  in_place = sharing != kStaged;
}

// What this rank called, for the peers to compare. Before the post of the first round.
void Collective::publish_call() {
  int parity = static_cast<int>(op.seq & 1);
  RankBlock* me = comm().me();
  CallRecord& call = me->call[parity];  // its padding stays 0
  call.seq = op.seq;
  call.count = op.count;
  call.step = op.step;
  call.kind = static_cast<int>(op.kind);
  call.datatype = op.type;
  call.wire = op.wire;
  call.op = reduces(op.kind) ? (op.reduction.premul ? ncclNumOps : op.reduction.op) : -1;
  call.root = rooted(op.kind) ? op.root : -1;
  call.compares = op.compares;
  call.tag = op.tag;
  memset(call.op_label, 0, sizeof call.op_label);
  memset(call.type_label, 0, sizeof call.type_label);
  if (op.op_label) snprintf(call.op_label, sizeof call.op_label, "%s", op.op_label);
  if (op.type_label) snprintf(call.type_label, sizeof call.type_label, "%s", op.type_label);
  me->call_key[parity] = call_key(call);
  me->scalar[parity] = op.reduction.scalar;
}

size_t Collective::elements(uint64_t round) const {
  size_t offset = round * per_round;
  return offset >= op.count ? 0 : std::min(per_round, op.count - offset);
}

// What this rank sends to itself; NULL where it lies at an address that is no multiple of the
// element's size, so that it has to go through the slot, or where it is rounded on the way.
const char* Collective::own_source(size_t offset) const {
  if (op.wire >= 0) return nullptr;
  const char* from = static_cast<const char*>(op.send) + offset;
  return reduces(op.kind) && reinterpret_cast<uintptr_t>(from) % type_size(op.type) ? nullptr : from;
}

void Collective::move(void* to, const void* from, size_t nbytes) const {
  if (!nbytes || to == from) return;
  if (past_caches) copy_past_kernel()(to, from, nbytes);
  else memmove(to, from, nbytes);
}

void Collective::fill_slot(uint64_t round) {
  ncclComm& c = comm();
  size_t esize = type_size(op.slot_type()), offset = round * per_round * esize, nbytes = elements(round) * esize;
  bool gives = !(op.kind == CollKind::Broadcast || op.kind == CollKind::Scatter) || c.rank == op.root;
  bool own_too = !own_source(0);
  if ((op.kind == CollKind::Reduce || op.kind == CollKind::Gather) && c.rank == op.root && !own_too) gives = false;
  if (nbytes && gives && !in_place) {
    char* slot = c.segment->slot(c.rank, base + round);
    const char* from = static_cast<const char*>(op.send) + offset;
    if (op.wire >= 0) {
      const char* data = static_cast<const char*>(op.send) + round * per_round * type_size(op.type);
      cast(slot, op.wire, data, op.type, elements(round), op.wire_scale);
    } else if (sliced(op.kind)) {
      for (int j = 0; j < c.size; ++j)
        if (j != c.rank || own_too) memcpy(slot + j * stride, from + j * op.bytes(), nbytes);
    } else if (two_phase && !own_too) {
      size_t first = slice_begin(elements(round), esize, c.size, c.rank) * esize;
      size_t last = slice_begin(elements(round), esize, c.size, c.rank + 1) * esize;
      memcpy(slot, from, first);
      memcpy(slot + last, from + last, nbytes - last);
    } else {
      memcpy(slot, from, nbytes);
    }
  }
}

void Collective::post(uint64_t round) {
  ncclComm& c = comm();
  fill_slot(round);
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

// Whether nobody reads this rank's slot of an absolute round any more, from the round that used it
// before.
bool Collective::slot_free(uint64_t absolute) {
  ncclComm& c = comm();
  if (absolute < kSlots + c.all_consumed) return true;
  if (!all_at(&RankBlock::consumed, absolute - kSlots + 1)) return false;
  c.all_consumed = absolute - kSlots + 1;
  return true;
}

bool Collective::sources_ready(uint64_t round) {
  ncclComm& c = comm();
  uint64_t value = base + round + COLL_MUTANT(21, 1, 0);
  bool from_root = op.kind == CollKind::Broadcast || op.kind == CollKind::Scatter;
  bool to_root = op.kind == CollKind::Reduce || op.kind == CollKind::Gather;
  if (round == 0 || !(from_root || to_root)) {
    if (!all_at(&RankBlock::posted, value)) return false;
    // Who has posted this round has consumed all before it.
    c.all_consumed = std::max(c.all_consumed, value - 1);
    return true;
  }
  if (to_root && c.rank == op.root) return all_at(&RankBlock::posted, value);
  if (to_root) return c.me()->posted.load(std::memory_order_relaxed) >= value;
  if (c.segment->rank(op.root)->posted.load(std::memory_order_acquire) >= value) return true;
  blocked_on = op.root;
  return false;
}

bool Collective::same_calls() const {
  ncclComm& c = comm();
  int parity = static_cast<int>(op.seq & 1);
  uint64_t mine = c.me()->call_key[parity];
  bool same = true;
  for (int r = 0; r < c.size; ++r) same = same && c.segment->rank(r)->call_key[parity] == mine;
  return same;
}

void Collective::check_calls() {
  checked = true;
  if (COLL_MUTANT(22, same_calls(), true)) choose_path();
  else describe_mismatch();
}

void Collective::describe_mismatch() {
  ncclComm& c = comm();
  int parity = static_cast<int>(op.seq & 1);
  mismatched = true;
  const CallRecord& own = c.me()->call[parity];
  std::string table = format("the ranks did not make the same call (collective %llu of this communicator):",
                             static_cast<unsigned long long>(op.seq));
  std::vector<int> others;
  bool same_step = true;
  for (int r = 0; r < c.size; ++r) same_step = same_step && c.segment->rank(r)->call[parity].step == own.step;
  if (!same_step) table += " they are in different steps, since some of them left one out, or made one more:";
  for (int r = 0; r < c.size; ++r) {
    const CallRecord& call = c.segment->rank(r)->call[parity];
    bool differs = memcmp(&call, &own, sizeof call) != 0;
    if (differs) others.push_back(r);
    if (c.size > 32 && !differs && r != c.rank) continue;
    std::string name = *call.op_label ? call.op_label : kind_name(static_cast<CollKind>(call.kind));
    if (call.tag) name += format(" of tag %u", call.tag);
    if (call.compares) {
      table += format("\n  rank %d: %s dtype=%s", r, name.c_str(), call.type_label);
      const char* refusal = c.segment->slot(r, base);  // the record begins with it
      bool staged = (c.segment->rank(r)->sharing[parity] & kSharingMask) == kStaged;
      if (staged && *refusal) table += format(", which raised: %.*s", COLL_HOST_REFUSAL_BYTES - 1, refusal);
    } else {
      table += format("\n  rank %d: %s count=%llu dtype=%s", r, name.c_str(), static_cast<unsigned long long>(call.count),
                      type_text(call.datatype, call.type_label).c_str());
    }
    if (call.wire >= 0) table += format(" sent as %s", type_name(call.wire));
    bool labelled = strchr(call.op_label, ' ');  // with the op and root of which this call is a part
    if (call.op >= 0 && !labelled) table += format(" op=%s", op_name(call.op));
    if (call.root >= 0 && !labelled) table += format(" root=%d", call.root);
    if (!same_step) table += format(" step=%llu", static_cast<unsigned long long>(call.step));
    if (r == c.rank) table += "  (this rank)";
  }
  error = make_error(collHostErrorMismatch, table);
  error.peers = others;
}

coll_reduction Collective::reduction(uint64_t* scalars) {
  ncclComm& c = comm();
  int parity = static_cast<int>(op.seq & 1);
  if (op.reduction.premul)
    for (int r = 0; r < c.size; ++r) scalars[r] = c.segment->rank(r)->scalar[parity];
  return {op.reduction.op == ncclAvg ? ncclSum : op.reduction.op, op.reduction.op == ncclAvg ? c.size : 0,
          op.reduction.premul ? scalars : nullptr, nullptr, 0, 0, op.type, nullptr};
}

void Collective::reduce(void* out, const void** sources, int n, size_t count, coll_reduction how) {
  if (!count) return;
  [[maybe_unused]] ExactArithmetic exact;
  size_t esize = type_size(op.type);
  if (reinterpret_cast<uintptr_t>(out) % esize == 0) {
    reduce_kernel()(out, sources, n, count, op.slot_type(), &how);
    return;
  }
  // An address that is no multiple of the element's size: through an aligned buffer.
  alignas(kLine) char block[4096];
  for (size_t done = 0; done < count;) {
    size_t some = std::min(count - done, sizeof block / esize);
    reduce_kernel()(block, sources, n, some, op.slot_type(), &how);
    memcpy(static_cast<char*>(out) + done * esize, block, some * esize);
    for (int r = 0; r < n; ++r) sources[r] = static_cast<const char*>(sources[r]) + some * type_size(op.slot_type());
    done += some;
  }
}

// `own_offset`: where in this rank's memory its own part is. `sums`: what its statistics are added
// to, or NULL.
void Collective::reduce_slots(void* out, size_t slot_offset, size_t own_offset, size_t count, uint64_t round, coll_share* sums) {
  ncclComm& c = comm();
  const void* sources[kMaxRanks];
  uint64_t scalars[kMaxRanks];
  for (int r = 0; r < c.size; ++r) sources[r] = c.segment->slot(r, base + round) + slot_offset;
  if (const char* own = own_source(own_offset)) sources[c.rank] = own;
  coll_reduction how = reduction(scalars);
  how.past_caches = past_caches && !two_phase && out != sources[c.rank];  // a slice in a slot is read next
  how.share = sums;
  reduce(out, sources, c.size, count, how);
}

// The first of the elements that rank r reduces, of `count` that are shared out in whole lines.
size_t slice_begin(size_t count, size_t esize, int size, int r) {
  size_t piece = (count + size - 1) / size;
  size_t line = kLine / esize;
  piece = (piece + line - 1) / line * line;
  return std::min(count, piece * r);
}

void Collective::reduce_slice(uint64_t round) {
  ncclComm& c = comm();
  size_t esize = type_size(op.type), count = elements(round);
  size_t first = slice_begin(count, esize, c.size, c.rank), last = slice_begin(count, esize, c.size, c.rank + 1);
  char* slot = c.segment->slot(c.rank, base + round);
  reduce_slots(slot + first * esize, first * esize, (round * per_round + first) * esize, last - first, round,
               own_share());
}

// Every rank reduces all of a round; of the statistics each takes those of its own slice.
void Collective::reduce_all(char* out, size_t own_offset, size_t count, uint64_t round) {
  if (!op.share) return reduce_slots(out, 0, own_offset, count, round, nullptr);
  ncclComm& c = comm();
  size_t esize = type_size(op.type);
  size_t first = slice_begin(count, esize, c.size, c.rank), last = slice_begin(count, esize, c.size, c.rank + 1);
  auto part = [&](size_t begin, size_t end, coll_share* sums) {
    reduce_slots(out + begin * esize, begin * esize, own_offset + begin * esize, end - begin, round, sums);
  };
  part(0, first, nullptr);
  part(first, last, own_share());
  part(last, count, nullptr);
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
          size_t first = slice_begin(count, esize, c.size, r), last = slice_begin(count, esize, c.size, r + 1);
          memcpy(to + first * esize, slot(r) + first * esize, (last - first) * esize);
        }
      } else {
        reduce_all(to, offset, count, round);
      }
      break;
    case CollKind::ReduceScatter: reduce_slots(to, c.rank * stride, c.rank * op.bytes() + offset, count, round, own_share()); break;
    case CollKind::Reduce:
      if (root) reduce_slots(to, 0, offset, count, round, nullptr);
      break;
    case CollKind::Gather:
      if (!root) break;
      [[fallthrough]];
    case CollKind::AllGather:
      for (int r = 0; r < c.size; ++r) {
        const char* from = r == c.rank ? static_cast<const char*>(op.send) + offset : slot(r);
        move(to + r * op.bytes(), from, nbytes);
      }
      break;
    case CollKind::Broadcast: move(to, root ? static_cast<const char*>(op.send) + offset : slot(op.root), nbytes); break;
    case CollKind::AllToAll:
      for (int r = 0; r < c.size; ++r) {
        const char* own = static_cast<const char*>(op.send) + r * op.bytes() + offset;
        move(to + r * op.bytes(), r == c.rank ? own : slot(r) + c.rank * stride, nbytes);
      }
      break;
    case CollKind::Scatter:
      move(to, root ? static_cast<const char*>(op.send) + c.rank * op.bytes() + offset : slot(op.root) + c.rank * stride, nbytes);
      break;
    default: break;
  }
}

bool Collective::advance() {
  ncclComm& c = comm();
  RankBlock* me = c.me();
  bool moved = false;
  // Before the calls are checked only the first round is posted, so that all ranks agree on the
  // count of rounds after a mismatch.
  uint64_t ahead = checked && !in_lockstep(op.kind) ? kSlots : 1;
  while (posted < rounds && posted < consumed + ahead) {
    if (!slot_free(base + posted)) return moved;
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
    if (in_place) {
      work_in_place();
      if (error) return true;  // and counts nothing: a rank that is to get something from here would take it for done
    } else if (posted < rounds && ahead < kSlots && !in_lockstep(op.kind)) {
      return true;  // a root posts before it consumes
    } else if (!posted) {
      return true;  // the first round was given up
    }
  }
  if (in_place) {
    if (!peers_done()) return moved;
    finish_round();
    return true;
  }
  if (two_phase && reduced < posted && sources_ready(reduced)) {
    reduce_slice(reduced++);
    me->reduced.store(base + reduced, std::memory_order_release);
    c.wake_sleepers();
    moved = true;
  }
  if (consumed < posted && (two_phase ? reduced > consumed && all_at(&RankBlock::reduced, base + consumed + 1)
                                      : sources_ready(consumed))) {
    consume(consumed);
    finish_round();
    moved = true;
  }
  return moved;
}

// Nothing of this round is read any more, here.
void Collective::finish_round() {
  count_round();
  // In lockstep nobody waits for this: the next post says it, too.
  if (!in_lockstep(op.kind)) comm().wake_sleepers();
}

void Collective::count_round() {
  ncclComm& c = comm();
  ++consumed;
  if (consumed == rounds) {
    c.rounds = base + rounds;
    if (op.share) {
      op.share->sum_of_squares += share.sum_of_squares;
      op.share->nonfinite += share.nonfinite;
    }
  }
  if (!two_phase) c.me()->reduced.store(base + consumed, std::memory_order_relaxed);
  c.me()->consumed.store(base + consumed, std::memory_order_release);
}

}  // namespace coll
