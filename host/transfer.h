// A send or receive in progress.
#pragma once

#include "operation.h"
#include "error.h"
#include "segment.h"

namespace coll {

struct Transfer {
  Op op;
  Channel* channel = nullptr;
  uint64_t number = 0;     // of this transfer on its channel
  uint64_t first_chunk = 0, chunks = 0, moved = 0;
  bool begun = false, checked = false, mismatched = false;
  Error error;

  explicit Transfer(const Op& o) : op(o) {}
  bool done() const { return begun && checked && (mismatched || moved == chunks); }
  void begin();
  bool advance();

 private:
  void check_peer();
};

}  // namespace coll
