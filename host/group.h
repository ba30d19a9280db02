// Groups of operations, and the batches and jobs that are made of them.
#pragma once

#include <functional>

#include "coll/host_abi.h"
#include "comm.h"
#include "error.h"
#include "operation.h"

namespace coll {

bool in_group();
ncclResult_t submit(const Op& op, cudaStream_t stream);
// Run an init-like job now, or at the end of the open group. Jobs of one parent run one after the
// other, in call order. With `cancelled` a job only undoes what was prepared when it was submitted.
using Job = std::function<Error(bool cancelled)>;
ncclResult_t submit_job(ncclComm* parent, const char* op, Job job);
ncclResult_t group_start();
ncclResult_t group_end(const char* op);
// A call inside the open group was refused: the whole group fails at its end.
ncclResult_t refuse(ncclResult_t code);
void group_cancel();

}  // namespace coll
