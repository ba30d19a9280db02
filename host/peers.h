// State of the other ranks of a communicator, and the errors that follow from it.
#pragma once

#include <vector>

#include "comm.h"
#include "error.h"

namespace coll {

// Peers that can't go on any more, looked up in the shared state and (look_at_processes) in the
// system.
std::vector<int> failed_peers(ncclComm& comm, bool look_at_processes);
// The error of this rank that follows from it; `missing` are the ranks that it waits for itself.
Error remote_error(ncclComm& comm, const std::vector<int>& peers, const std::vector<int>& missing);

}  // namespace coll
