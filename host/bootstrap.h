// Bootstrap of a communicator: its ranks find each other and map one shared segment.
#pragma once

#include <stdint.h>

#include <vector>

#include "comm.h"
#include "error.h"
#include "peers.h"
#include "unique_id.h"

namespace coll {

// The communicator that a new one is made from, which of its ranks take part, in the new one's
// order, and which of its splits or shrinks makes it, begun when. Its owner keeps it alive
// meanwhile.
struct Origin {
  ncclComm* parent = nullptr;
  std::vector<int> members;
  ChildKind kind = kSplit;
  uint64_t number = 0;
  int64_t began_ns = 0;
};
// Find the other ranks, and fill in comm's segment, pids and pidfds. Blocks, for the parent's timeout
// and for that of init; ends early when abort_flag is set, or when a rank of the origin that should
// come has died or failed. An error of a new communicator that has an origin has the parent's rank
// numbers.
bool bootstrap(ncclComm* comm, const Id& id, uint64_t options, const char* what, const Origin& origin, Error* error);
void set_init_timeout(int64_t ms);

}  // namespace coll
