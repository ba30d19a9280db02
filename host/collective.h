// A collective in progress: rounds over the staging slots, or work on memory that the ranks share.
#pragma once

#include <atomic>
#include <vector>

#include "comm.h"
#include "coll/reduce.h"
#include "heap.h"
#include "operation.h"
#include "segment.h"

namespace coll {

class FirstError;

struct Collective {
  Op op;
  uint64_t base = 0;      // rounds of the communicator before this call
  uint64_t rounds = 0;
  uint64_t posted = 0, reduced = 0, consumed = 0;
  size_t per_round = 0;   // elements of one slice in a round
  size_t stride = 0;      // bytes between the slices of a slot
  bool begun = false, checked = false, two_phase = false, mismatched = false;
  bool in_place = false;  // works on the peers' memory, without slots
  bool writes_apart = true;  // may use the system to write; before the calls are compared it isn't known
  bool past_caches = false;
  int blocked_on = -1;
  Error error;
  coll_share share{};  // statistics so far; written to the caller's when the call has succeeded

  explicit Collective(const Op& o) : op(o) {}
  bool done() const { return begun && checked && (mismatched || consumed == rounds); }
  void begin();
  bool advance();  // true: something moved

  // The parts of a call that one round does, with nothing shared: fast_path.cpp.
  //
  // Whether this call is one; it depends on this rank's arrays, too, and the others may go the full
  // path.
  bool is_short() const;
  bool post_short();    // false: nothing was begun
  bool finish_short();  // false: a peer isn't there yet, or called something else; advance() does the rest

 private:
  ncclComm& comm() const { return *op.comm; }
  size_t elements(uint64_t round) const;
  void publish_call();
  void fill_slot(uint64_t round);
  void post(uint64_t round);
  bool all_at(std::atomic<uint64_t> RankBlock::*counter, uint64_t value);
  bool slot_free(uint64_t absolute);
  bool sources_ready(uint64_t round);
  bool same_calls() const;
  void check_calls();
  void describe_mismatch();
  void reduce_slice(uint64_t round);
  void consume(uint64_t round);
  const char* own_source(size_t offset) const;
  coll_share* own_share() { return op.share ? &share : nullptr; }
  coll_reduction reduction(uint64_t* scalars);
  void reduce(void* out, const void** sources, int n, size_t count, coll_reduction how);
  void reduce_slots(void* out, size_t slot_offset, size_t own_offset, size_t count, uint64_t round, coll_share* sums);
  void reduce_all(char* out, size_t own_offset, size_t count, uint64_t round);
  void move(void* to, const void* from, size_t nbytes) const;
  void finish_round();
  void count_round();

  bool worth_reading() const;
  uint8_t find_shared_arrays();
  void choose_path();
  bool is_apart(int rank, const SharedPlace& place) const;
  char* peer_array(int rank, bool receives);
  size_t written_by(int sender, int receiver) const;
  bool uses(int rank, int other) const;
  bool writes(int rank, int other) const;
  void reduce_in_place(FirstError& unreachable);
  void copy_in_place(FirstError& unreachable);
  void work_in_place();
  bool peer_gave_up(std::vector<int>* who = nullptr) const;
  bool peers_done();

 public:
  void publish_stop();
};
size_t slice_begin(size_t count, size_t esize, int size, int r);

// Below this many bytes in all slots, every rank of an all-reduce reduces everything itself and saves
// a phase.
constexpr size_t kOnePhaseBytes = 128 << 10;
// Up to this many bytes a rank's memory is never used in place: it is as quick through a slot, which
// takes one wait in the place of two.
constexpr size_t kMostStaged = 8 << 10;

inline bool reduces(CollKind kind) {
  return kind == CollKind::AllReduce || kind == CollKind::ReduceScatter || kind == CollKind::Reduce;
}

inline bool rooted(CollKind kind) {
  return kind == CollKind::Broadcast || kind == CollKind::Reduce || kind == CollKind::Gather || kind == CollKind::Scatter;
}

// A slice for every rank in one slot, instead of one slice.
inline bool sliced(CollKind kind) {
  return kind == CollKind::ReduceScatter || kind == CollKind::AllToAll || kind == CollKind::Scatter;
}

// Every rank waits for the posts of all in every round.
inline bool in_lockstep(CollKind kind) { return !rooted(kind); }

// Bytes between the slices of a slot.
inline size_t slot_stride(CollKind kind, size_t chunk, size_t size) {
  return sliced(kind) ? chunk / size / kLine * kLine : chunk;
}

}  // namespace coll
