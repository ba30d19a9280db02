// The fast path of one blocking collective of a few KiB, which takes no lock and allocates nothing.
#pragma once

#include "coll/host_abi.h"
#include "operation.h"

namespace coll {

// Run a collective that is in no group and no queue, where its communicator is idle and it fits into
// one round of the slots. false: it didn't begin, and goes the full path.
bool run_short(const Op& op, ncclResult_t* code);

}  // namespace coll
