// The fast path of one blocking collective of a few KiB, and of small sends and receives, which takes
// no lock and allocates nothing.
#pragma once

#include <vector>

#include "coll/host_abi.h"
#include "operation.h"
#include "transfer.h"

namespace coll {

// Run a collective that is in no group and no queue, where its communicator is idle and it fits into
// one round of the slots. false: it didn't begin, and goes the full path.
bool run_short(const Op& op, ncclResult_t* code);

// The same for sends and receives of one communicator, alone or in a group, in no queue, each of one
// chunk of its channel at most and no two to the same peer or from the same one.
bool run_short(std::vector<Transfer>& transfers, ncclResult_t* code);

// An empty vector that has kept its memory from a call before.
class TransferList {
 public:
  TransferList();
  ~TransferList();
  TransferList(const TransferList&) = delete;
  std::vector<Transfer> transfers;
};

}  // namespace coll
