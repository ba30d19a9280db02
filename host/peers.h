// State of the other ranks of a communicator, and the errors that follow from it.
#pragma once

#include <string>
#include <vector>

#include "comm.h"
#include "error.h"

namespace coll {

// Peers that can't go on any more, looked up in the shared state and (look_at_processes) in the
// system.
std::vector<int> failed_peers(ncclComm& comm, bool look_at_processes);
// The error of a wait whose time is over: it names the ranks whose processes are stopped, if there are
// any, since the ranks that are waited for may wait for these themselves; else those that are waited for.
Error timeout_error(ncclComm& comm, const std::string& text, const std::vector<int>& waited_for);
// Which counter the number of a child that is being made comes from.
enum ChildKind { kSplit = 0, kShrink = 1 };
// Publish to the other ranks that this one has failed to make a child, and why.
void publish_child_failure(ncclComm& comm, ChildKind kind, uint64_t number, const Error& error);
// The error of this rank because one of `members` has failed to make that child, or no error.
Error child_failure(ncclComm& comm, ChildKind kind, uint64_t number, const std::vector<int>& members);
// The error of this rank that follows from it; `missing` are the ranks that it waits for itself.
Error remote_error(ncclComm& comm, const std::vector<int>& peers, const std::vector<int>& missing);

}  // namespace coll
