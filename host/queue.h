// Queues of tasks, the host engine's counterpart of CUDA streams.
#pragma once

#include <stdint.h>

#include <functional>

#include "coll/host_abi.h"
#include "error.h"

namespace coll {

bool queue_alive(collHostQueue_t queue);
// Put a task behind the others. collHostQueueWait returns its error for its ticket.
uint64_t queue_push(collHostQueue_t queue, std::function<Error()> task);

}  // namespace coll
