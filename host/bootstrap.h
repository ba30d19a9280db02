// Bootstrap of a communicator: its ranks find each other and map one shared segment.
#pragma once

#include <stdint.h>

#include <vector>

#include "comm.h"
#include "error.h"
#include "unique_id.h"

namespace coll {

// The communicator that a new one is made from, and which of its ranks take part. Its owner keeps
// it alive meanwhile.
struct Origin {
  ncclComm* parent = nullptr;
  std::vector<int> members;
};
// Find the other ranks, and fill in comm's segment, pids and pidfds. Blocks; ends early when
// abort_flag is set, or when a rank of the origin that should come has died.
bool bootstrap(ncclComm* comm, const Id& id, uint64_t options, const char* what, const Origin& origin, Error* error);
void set_init_timeout(int64_t ms);

}  // namespace coll
