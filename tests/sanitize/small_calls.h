// Small blocking calls, which take no lock (host/fast_path.h), beside what waits for them.
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

// Sends, receives and their groups, while another thread revokes the communicator.
inline void small_transfers_ended(Rank& me) {
  std::atomic<int> done{0};
  int next = (me.rank + 1) % me.size, previous = (me.rank + me.size - 1) % me.size;
  std::thread caller([&] {
    float x[16] = {}, y[16];
    for (ncclResult_t code = ncclSuccess; code == ncclSuccess; ++done) {
      OK(ncclGroupStart());
      OK(ncclSend(x, 16, ncclFloat32, next, me.comm, nullptr));
      OK(ncclRecv(y, 16, ncclFloat32, previous, me.comm, nullptr));
      code = ncclGroupEnd();
      if (code != ncclSuccess || me.rank > 1) continue;
      if (me.rank == 0) code = ncclSend(x, done % 17, ncclFloat32, 1, me.comm, nullptr);
      else code = ncclRecv(y, done % 17, ncclFloat32, 0, me.comm, nullptr);
    }
  });
  while (done < 60) usleep(1000);
  me.barrier->wait();
  if (me.rank == 0) OK(ncclCommRevoke(me.comm, NCCL_REVOKE_DEFAULT));
  caller.join();
  OK(ncclCommAbort(me.comm));
}

// One thread of a rank is at the end of a small call while another one frees the communicator: the call
// has begun, since the other ranks have the data of it.
inline void small_call_freed(int n) {
  for (int turn = 0; turn < 150; ++turn) {
    std::atomic<int> done{0};
    on_ranks(n, [&](Rank& me) {
      std::thread caller([&] {
        float x[16] = {};
        ncclResult_t code = ncclAllReduce(x, x, 16, ncclFloat32, ncclSum, me.comm, nullptr);
        CHECK(code == ncclSuccess || code == ncclRemoteError || code == ncclInvalidUsage);
        ++done;
      });
      while (done == 0) std::this_thread::yield();
      if ((turn + me.rank) % 2) OK(ncclCommDestroy(me.comm));
      else OK(ncclCommAbort(me.comm));
      caller.join();
    }, true);
  }
}

}  // namespace sanitize
