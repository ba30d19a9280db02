// A send or receive in progress.
#pragma once

#include "operation.h"
#include "error.h"
#include "segment.h"

namespace coll {

struct Transfer {
  Op op;
  size_t after;            // collectives of its group that must have succeeded before it begins
  Channel* channel = nullptr;
  uint64_t number = 0;     // of this transfer on its channel
  uint64_t first_chunk = 0, chunks = 0, moved = 0;
  bool begun = false, checked = false, mismatched = false;
  Error error;

  explicit Transfer(const Op& o, size_t then = 0) : op(o), after(then) {}
  bool done() const { return begun && checked && (mismatched || moved == chunks); }
  // These wake nobody: the caller does, once it has moved all that it can (ncclComm::wake_sleepers).
  void begin();
  void drop() { begun = checked = mismatched = true; }
  bool advance();  // true: something moved

  // The parts of a small one that waits for nothing else: fast_path.cpp.
  bool is_short() const;       // one chunk at most, to another rank
  bool peer_is_there() const { return other_side().transfer.load(std::memory_order_acquire) >= number; }
  bool peer_agrees() const;    // once it is there

 private:
  bool sends() const { return op.kind == CollKind::Send; }
  Channel::Side& own_side() const { return sends() ? channel->sender : channel->receiver; }
  Channel::Side& other_side() const { return sends() ? channel->receiver : channel->sender; }
  bool move_chunks();
  void check_peer();
};

// Compare what the ranks are about to send and to receive: collHostCheckParts.
Error compare_parts(const void* records, int size, int rank);

}  // namespace coll
