// Small blocking calls, which take no lock (host/short_path.h), beside what waits for them.
#pragma once

#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "ranks.h"

namespace sanitize {

// Several threads of each rank make them, one of them through a queue, while another one ends them all.
inline void small_calls_ended(Rank& me) {
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  collHostQueue_t queue;
  OK(collHostQueueCreate(&queue));
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      float x[16] = {};
      ncclResult_t code = ncclSuccess;
      for (; code == ncclSuccess; ++done) {
        code = ncclAllReduce(x, x, 16, ncclFloat32, ncclMax, me.comm, t == 0 ? reinterpret_cast<cudaStream_t>(queue) : nullptr);
        uint64_t ticket;
        if (t == 0 && code == ncclSuccess) {
          OK(collHostQueueRecord(queue, &ticket));
          code = collHostQueueWait(queue, ticket, -1);
        }
      }
    });
  }
  while (done < 60) usleep(1000);
  me.barrier->wait();
  if (me.rank == 0) OK(ncclCommRevoke(me.comm, NCCL_REVOKE_DEFAULT));
  for (std::thread& t : threads) t.join();
  OK(collHostQueueDestroy(queue));
  OK(ncclCommAbort(me.comm));
}

}  // namespace sanitize
