// The ranks as threads of one process, so that the thread sanitizer, which sees nothing between processes, sees the engine.
//
// Every scenario runs on some number of ranks, checks what it computes, and ends the program with a message and status 1
// when something is wrong. Linked with all of host/ and kernels/host/ (baseline), built with the sanitizer as a whole.
#include "ranks.h"
#include "small_calls.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace {

using namespace sanitize;

const size_t kCounts[] = {0, 1, 63, 1024, 5000};

// ---- Every collective, blocking, twice in place and out of place.
void collectives(Rank& me) {
  size_t n = static_cast<size_t>(me.size), rank = static_cast<size_t>(me.rank);
  for (size_t count : kCounts) {
    float mine = static_cast<float>(rank + 1);
    std::vector<float> x = filled(count, mine), y(count), wide(count * n), wide_out(count * n);
    OK(ncclAllReduce(x.data(), y.data(), count, ncclFloat32, ncclSum, me.comm, nullptr));
    CHECK(all_equal(y, triangle(me.size)) && all_equal(x, mine));
    OK(ncclAllReduce(x.data(), x.data(), count, ncclFloat32, ncclMax, me.comm, nullptr));
    CHECK(all_equal(x, static_cast<float>(n)));
    std::fill(x.begin(), x.end(), mine);

    OK(ncclAllGather(x.data(), wide.data(), count, ncclFloat32, me.comm, nullptr));
    for (size_t i = 0; i < wide.size(); ++i) CHECK(wide[i] == static_cast<float>(i / count + 1));
    OK(ncclReduceScatter(wide.data(), y.data(), count, ncclFloat32, ncclAvg, me.comm, nullptr));
    CHECK(all_equal(y, mine));
    OK(ncclAlltoAll(wide.data(), wide_out.data(), count, ncclFloat32, me.comm, nullptr));
    CHECK(all_equal(wide_out, mine));

    for (int root = 0; root < me.size; ++root) {
      OK(ncclBroadcast(x.data(), y.data(), count, ncclFloat32, root, me.comm, nullptr));
      CHECK(all_equal(y, static_cast<float>(root + 1)));
      y = x;
      OK(ncclBcast(y.data(), count, ncclFloat32, root, me.comm, nullptr));
      CHECK(all_equal(y, static_cast<float>(root + 1)));
      std::fill(y.begin(), y.end(), -1.f);
      OK(ncclReduce(x.data(), y.data(), count, ncclFloat32, ncclMin, root, me.comm, nullptr));
      CHECK(all_equal(y, me.rank == root ? 1.f : -1.f));
      std::fill(wide_out.begin(), wide_out.end(), -1.f);
      OK(ncclGather(x.data(), me.rank == root ? wide_out.data() : nullptr, count, ncclFloat32, root, me.comm, nullptr));
      CHECK(me.rank == root ? wide_out == wide : all_equal(wide_out, -1.f));
      OK(ncclScatter(me.rank == root ? wide.data() : nullptr, y.data(), count, ncclFloat32, root, me.comm, nullptr));
      CHECK(all_equal(y, mine));
    }
  }
}

// ---- All types and operations; the values are small, so the result is exact in each of them.
void types(Rank& me) {
  for (int type = 0; type < ncclNumTypes; ++type) {
    for (int op = 0; op < ncclNumOps; ++op) {
      std::vector<unsigned char> x(3000 * 8, 0);
      OK(ncclAllReduce(x.data(), x.data(), 3000, static_cast<ncclDataType_t>(type), static_cast<ncclRedOp_t>(op), me.comm,
                       nullptr));
      CHECK(std::all_of(x.begin(), x.end(), [](unsigned char b) { return b == 0; }));
    }
  }
  ncclRedOp_t op;
  float scalar = static_cast<float>(me.rank + 1);
  OK(ncclRedOpCreatePreMulSum(&op, &scalar, ncclFloat32, ncclScalarHostImmediate, me.comm));
  std::vector<float> x = filled(2000, 2.f);
  OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, op, me.comm, nullptr));
  CHECK(all_equal(x, 2 * triangle(me.size)));
  OK(ncclRedOpDestroy(op, me.comm));
}

// ---- Send and receive: a ring in a group, pairs one after the other, to oneself, many in one group.
void transfers(Rank& me) {
  int next = (me.rank + 1) % me.size, previous = (me.rank + me.size - 1) % me.size;
  for (size_t count : {size_t{0}, size_t{1}, size_t{3000}, size_t{70000}}) {
    std::vector<float> out = filled(count, static_cast<float>(me.rank)), in = filled(count, -1.f);
    OK(ncclGroupStart());
    OK(ncclSend(out.data(), count, ncclFloat32, next, me.comm, nullptr));
    OK(ncclRecv(in.data(), count, ncclFloat32, previous, me.comm, nullptr));
    OK(ncclGroupEnd());
    CHECK(all_equal(in, static_cast<float>(previous)));
  }
  std::vector<std::vector<int>> out, in;
  for (int r = 0; r < me.size; ++r) {
    out.push_back(std::vector<int>(2000, me.rank * 100 + r));
    in.push_back(std::vector<int>(2000, -1));
  }
  OK(ncclGroupStart());
  for (int r = 0; r < me.size; ++r) OK(ncclSend(out[r].data(), 2000, ncclInt32, r, me.comm, nullptr));
  for (int r = 0; r < me.size; ++r) OK(ncclRecv(in[r].data(), 2000, ncclInt32, r, me.comm, nullptr));
  OK(ncclGroupEnd());
  for (int r = 0; r < me.size; ++r) CHECK(in[r] == std::vector<int>(2000, r * 100 + me.rank));
  if (me.size > 1 && me.rank < 2) {
    for (int i = 0; i < 20; ++i) {
      int value = me.rank == 0 ? i : -1;
      if (me.rank == 0) OK(ncclSend(&value, 1, ncclInt32, 1, me.comm, nullptr));
      else OK(ncclRecv(&value, 1, ncclInt32, 0, me.comm, nullptr));
      CHECK(value == i);
    }
  }
}

// ---- Groups of collectives on two communicators, posted in another order on odd ranks.
void groups(Rank& me) {
  ncclComm_t second;
  OK(ncclCommSplit(me.comm, 0, -me.rank, &second, nullptr));
  for (int step = 0; step < 10; ++step) {
    std::vector<float> a = filled(4000, 1.f), b = filled(3000, 2.f), c = filled(10, static_cast<float>(me.rank));
    auto first_calls = [&] {
      OK(ncclAllReduce(a.data(), a.data(), a.size(), ncclFloat32, ncclSum, me.comm, nullptr));
      OK(ncclBcast(c.data(), c.size(), ncclFloat32, step % me.size, me.comm, nullptr));
    };
    auto second_calls = [&] { OK(ncclAllReduce(b.data(), b.data(), b.size(), ncclFloat32, ncclAvg, second, nullptr)); };
    OK(ncclGroupStart());
    OK(ncclGroupStart());
    me.rank % 2 ? second_calls() : first_calls();
    OK(ncclGroupEnd());
    me.rank % 2 ? first_calls() : second_calls();
    OK(ncclGroupEnd());
    CHECK(all_equal(a, static_cast<float>(me.size)) && all_equal(b, 2.f));
    CHECK(all_equal(c, static_cast<float>(step % me.size)));
  }
  OK(ncclCommDestroy(second));
}

// ---- Queues: two on one communicator with the NULL stream between, callbacks, waits from several threads.
void queues(Rank& me) {
  collHostQueue_t queue[2];
  OK(collHostQueueCreate(&queue[0]));
  OK(collHostQueueCreate(&queue[1]));
  std::vector<float> x = filled(4000, 1.f);
  std::atomic<int> called{0};
  float want = 1;
  for (int step = 0; step < 12; ++step) {
    cudaStream_t stream = step % 3 == 2 ? nullptr : reinterpret_cast<cudaStream_t>(queue[step % 3]);
    OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, step % 2 ? ncclAvg : ncclSum, me.comm, stream));
    if (step % 2 == 0) want *= static_cast<float>(me.size);
    if (stream) {
      auto count_up = [](void* p) { static_cast<std::atomic<int>*>(p)->fetch_add(1); };
      OK(collHostQueueCall(queue[step % 3], count_up, &called));
    } else {
      CHECK(all_equal(x, want));  // done when the call returned, and so is what was queued before it
    }
  }
  uint64_t tickets[2];
  for (int i = 0; i < 2; ++i) {
    OK(collHostQueueRecord(queue[i], &tickets[i]));
    CHECK(tickets[i] == 8);
  }
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) waiters.emplace_back([&, i] { OK(collHostQueueWait(queue[i % 2], tickets[i % 2], -1)); });
  for (std::thread& t : waiters) t.join();
  CHECK(called == 8 && all_equal(x, want));
  int64_t value;
  OK(collHostQueueGet(queue[0], collHostQueuePending, &value));
  CHECK(value == 0);
  for (collHostQueue_t q : queue) OK(collHostQueueDestroy(q));
}

// ---- Several threads of each rank on one communicator: the same call from all, so any order is right.
void many_threads(Rank& me) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 15; ++i) {
        std::vector<float> x = filled(2000, 1.f);
        OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, me.comm, nullptr));
        CHECK(all_equal(x, static_cast<float>(me.size)));
        ncclResult_t state;
        OK(ncclCommGetAsyncError(me.comm, &state));
        uint64_t sequence;
        OK(collHostCommSequence(me.comm, &sequence));
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

// ---- Splits by color, from a part of a part, with ranks that take no part; shrink.
void splits(Rank& me) {
  ncclComm_t parts, alone, none = nullptr;
  OK(ncclCommSplit(me.comm, me.rank % 2, me.rank, &parts, nullptr));
  OK(ncclCommSplit(parts, me.rank, 0, &alone, nullptr));
  OK(ncclCommSplit(me.comm, me.rank == 0 ? NCCL_SPLIT_NOCOLOR : 1, 0, &none, nullptr));
  CHECK((none == nullptr) == (me.rank == 0));
  for (ncclComm_t comm : {parts, alone, none, me.comm}) {
    if (!comm) continue;
    int size;
    OK(ncclCommCount(comm, &size));
    std::vector<float> x = filled(3000, 1.f);
    OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, comm, nullptr));
    CHECK(all_equal(x, static_cast<float>(size)));
  }
  if (me.size > 2) {
    int last = me.size - 1;
    if (me.rank != last) {
      ncclComm_t smaller;
      OK(ncclCommShrink(me.comm, &last, 1, &smaller, nullptr, NCCL_SHRINK_DEFAULT));
      float one = 1;
      OK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, smaller, nullptr));
      CHECK(one == static_cast<float>(last));
      OK(ncclCommDestroy(smaller));
    }
  }
  for (ncclComm_t comm : {parts, alone, none})
    if (comm) OK(ncclCommDestroy(comm));
}

// ---- The ranks call different things: an error on all of them, and everything works afterwards.
void mismatch(Rank& me) {
  std::vector<float> x = filled(5000, 1.f);
  for (int i = 0; i < 5; ++i) {
    size_t count = me.rank == i % me.size ? 5000 : 4999;
    FAILS(ncclAllReduce(x.data(), x.data(), count, ncclFloat32, ncclSum, me.comm, nullptr), ncclInvalidUsage);
    collHostErrorInfo_t info;
    info.size = sizeof info;
    OK(collHostGetError(nullptr, &info));
    CHECK(info.kind == collHostErrorMismatch && info.npeers > 0);
    OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclMax, me.comm, nullptr));
    CHECK(all_equal(x, 1.f));
  }
}

// ---- Abort from another thread while this one waits, and revoke; the peers are told.
void abort_while_waiting(Rank& me) {
  std::vector<float> x = filled(100, 1.f);
  OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, me.comm, nullptr));
  if (me.rank == 0) {
    std::thread other([&] {
      usleep(100 * 1000);
      ncclCommRevoke(me.comm, NCCL_REVOKE_DEFAULT);
    });
    CHECK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, me.comm, nullptr) != ncclSuccess);
    other.join();
    me.barrier->wait();
  } else {
    me.barrier->wait();
    ncclResult_t first = ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, me.comm, nullptr);
    // Rank 0 had given its share to the first call; not to this one.
    CHECK(first != ncclSuccess ||
          ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, me.comm, nullptr) != ncclSuccess);
  }
  OK(ncclCommAbort(me.comm));
}

// ---- Abort while another thread of this rank waits in a split for ranks that never come.
void abort_while_splitting(Rank& me) {
  if (me.rank == 0) {
    std::thread other([&] {
      ncclComm_t part = nullptr;
      CHECK(ncclCommSplit(me.comm, 0, 0, &part, nullptr) != ncclSuccess);
    });
    usleep(100 * 1000);
    OK(ncclCommAbort(me.comm));
    other.join();
    me.barrier->wait();
  } else {
    me.barrier->wait();
    OK(ncclCommAbort(me.comm));
  }
}

// ---- Abort while another thread of this rank finalizes, which waits for a queued operation that never ends.
void abort_while_finalizing(Rank& me) {
  if (me.rank == 0) {
    collHostQueue_t queue;
    OK(collHostQueueCreate(&queue));
    float x = 1;
    OK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, me.comm, reinterpret_cast<cudaStream_t>(queue)));
    std::thread other([&] { ncclCommFinalize(me.comm); });
    usleep(100 * 1000);
    CHECK(collHostQueueWait(queue, 1, 1000 * 1000) == ncclInProgress);  // until its time has run out
    OK(ncclCommAbort(me.comm));
    other.join();
    CHECK(collHostQueueWait(queue, 1, -1) != ncclSuccess);
    OK(collHostQueueDestroy(queue));
    me.barrier->wait();
  } else {
    me.barrier->wait();
    OK(ncclCommAbort(me.comm));
  }
}

// ---- A split that goes on in the background while its parent is destroyed.
void split_in_the_background(Rank& me) {
  ncclConfig_t config;
  memset(&config, 0, sizeof config);
  for (int* field = &config.blocking; field <= &config.maxCTAs; ++field) *field = NCCL_CONFIG_UNDEF_INT;
  config.size = offsetof(ncclConfig_t, netName);  // as much of it as older clients have
  config.magic = NCCL_API_MAGIC;
  config.version = 21400;
  config.blocking = 0;
  ncclComm_t part = nullptr;
  ncclResult_t code = ncclCommSplit(me.comm, 0, 0, &part, &config);
  CHECK(code == ncclSuccess || code == ncclInProgress);
  OK(ncclCommDestroy(me.comm));
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress) {
    usleep(1000);
    OK(ncclCommGetAsyncError(part, &state));
  }
  OK(state);
  float one = 1;
  OK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, part, nullptr));
  CHECK(one == static_cast<float>(me.size));
  OK(ncclCommDestroy(part));
}

// ---- Time limits, and what is pending as seen from another thread.
void time_limit(Rank& me) {
  OK(collHostCommSetTimeout(me.comm, 300));
  float x = 1;
  if (me.rank == 0) {
    std::thread watcher([&] {
      for (int i = 0; i < 50; ++i) {
        collHostErrorInfo_t info;
        info.size = sizeof info;
        OK(collHostCommPending(me.comm, &info));
        usleep(1000);
      }
    });
    FAILS(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, me.comm, nullptr), ncclTimeout);
    watcher.join();
    collHostErrorInfo_t info;
    info.size = sizeof info;
    OK(collHostGetError(nullptr, &info));
    CHECK(info.kind == collHostErrorTimeout && info.npeers == me.size - 1);
  }
  me.barrier->wait();
  OK(ncclCommAbort(me.comm));
}

// ---- Communicators and memory come and go while others work.
void come_and_go(Rank& me) {
  for (int i = 0; i < 15; ++i) {
    ncclComm_t part;
    OK(ncclCommSplit(me.comm, 0, 0, &part, nullptr));
    void* memory;
    size_t nbytes = 20000 + 4096 * static_cast<size_t>(i);
    OK(ncclMemAlloc(&memory, nbytes));
    void* handle;
    OK(ncclCommRegister(part, memory, nbytes, &handle));
    float* x = static_cast<float*>(memory);
    for (int k = 0; k < 5000; ++k) x[k] = 1;
    OK(ncclAllReduce(x, x, 5000, ncclFloat32, ncclSum, part, nullptr));
    CHECK(x[0] == static_cast<float>(me.size) && x[4999] == x[0]);
    OK(ncclCommDeregister(part, handle));
    OK(ncclMemFree(memory));
    OK(ncclCommFinalize(part));
    OK(ncclCommDestroy(part));
  }
}

// ---- Memory that the ranks share, on two communicators in turn; one rank's memory is its own now and then.
void shared_memory(Rank& me) {
  size_t n = static_cast<size_t>(me.size), count = 40'003;
  ncclComm_t second;
  OK(ncclCommSplit(me.comm, 0, -me.rank, &second, nullptr));
  void* memory[2];
  for (void*& m : memory) OK(ncclMemAlloc(&m, n * count * sizeof(float)));
  std::vector<float> own(n * count);
  float mine = static_cast<float>(me.rank + 1);
  for (int step = 0; step < 6; ++step) {
    ncclComm_t comm = step % 2 ? second : me.comm;
    float* x = static_cast<float*>(memory[0]);
    float* y = step % 3 == 2 && me.rank == 0 ? own.data() : static_cast<float*>(memory[1]);
    auto fill = [&](float* at, size_t elements, float value) { std::fill(at, at + elements, value); };
    auto holds = [&](const float* at, size_t elements, float value) {
      return std::all_of(at, at + elements, [&](float v) { return v == value; });
    };
    int root = step % me.size, root_value = comm == second ? me.size - root : root + 1;
    fill(x, count, mine);
    OK(ncclAllReduce(x, y, count, ncclFloat32, ncclSum, comm, nullptr));
    CHECK(holds(y, count, triangle(me.size)) && holds(x, count, mine));
    OK(ncclBroadcast(x, y, count, ncclFloat32, root, comm, nullptr));
    CHECK(holds(y, count, static_cast<float>(root_value)));
    OK(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, comm, nullptr));
    CHECK(holds(x, count, triangle(me.size)));
    OK(ncclReduce(x, x, count, ncclFloat32, ncclMax, root, comm, nullptr));
    fill(x, n * count, mine);
    OK(ncclAlltoAll(x, y, count, ncclFloat32, comm, nullptr));
    for (size_t r = 0; r < n; ++r) CHECK(holds(y + r * count, count, static_cast<float>(comm == second ? n - r : r + 1)));
    OK(ncclAllGather(x, y, count, ncclFloat32, comm, nullptr));
    for (size_t r = 0; r < n; ++r) CHECK(holds(y + r * count, count, static_cast<float>(comm == second ? n - r : r + 1)));
    OK(ncclReduceScatter(x, y, count, ncclFloat32, ncclSum, comm, nullptr));
    CHECK(holds(y, count, triangle(me.size)));
    OK(ncclGather(x, y, count, ncclFloat32, root, comm, nullptr));
    OK(ncclScatter(y, x, count, ncclFloat32, root, comm, nullptr));
    CHECK(holds(x, count, mine));
    std::vector<float> wide = filled(5000, mine);
    OK(collHostAllReduceCast(wide.data(), wide.data(), wide.size(), ncclFloat32, ncclBfloat16, 2.0, ncclSum, comm, nullptr));
    CHECK(all_equal(wide, 2 * triangle(me.size)));
    // x is of the heap, wide isn't: in place and staged.
    collHostShare_t share = {0, 0};
    float least = 0;
    OK(collHostReduceScatterShare(wide.data(), &least, 1, ncclFloat32, ncclMin, &share, comm, nullptr));
    CHECK(share.sum_of_squares == 4 * triangle(me.size) * triangle(me.size) && share.nonfinite == 0);
    std::vector<double> sums(2, 0);
    for (float* data : {x, wide.data()}) {
      std::fill(data, data + 5000, 1.f);
      share = {0, 0};
      OK(collHostAllReduceShare(data, data, 5000, ncclFloat32, ncclSum, &share, comm, nullptr));
      OK(ncclAllReduce(&share, sums.data(), 2, ncclFloat64, ncclSum, comm, nullptr));
      CHECK(sums[0] == 5000.0 * me.size * me.size && sums[1] == 0);
    }
  }
  for (void* m : memory) OK(ncclMemFree(m));
  OK(ncclCommDestroy(second));
}

// ---- Work on shared memory while other threads of the same ranks allocate, free, and register memory that can't be shared.
void shared_memory_comes_and_goes(Rank& me) {
  std::atomic<bool> over{false};
  std::thread other([&] {
    std::vector<float> heap(30000);
    while (!over) {
      void* memory;
      void* handle;
      OK(ncclMemAlloc(&memory, 3 << 20));
      OK(ncclCommRegister(me.comm, heap.data(), heap.size() * sizeof(float), &handle));
      OK(ncclCommDeregister(me.comm, handle));
      OK(ncclMemFree(memory));
    }
  });
  for (int i = 0; i < 20; ++i) {
    void* memory;
    size_t count = 3000 + 7001 * static_cast<size_t>(i % 5);
    OK(ncclMemAlloc(&memory, count * sizeof(float)));
    float* x = static_cast<float*>(memory);
    std::fill(x, x + count, 1.f);
    OK(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, me.comm, nullptr));
    CHECK(std::all_of(x, x + count, [&](float v) { return v == static_cast<float>(me.size); }));
    OK(ncclMemFree(memory));
  }
  over = true;
  other.join();
}

// ---- Abort in the middle of work on shared memory: nobody writes to it after that.
void abort_shared_work(Rank& me) {
  size_t count = 300'000;
  void* memory;
  OK(ncclMemAlloc(&memory, count * sizeof(float)));
  float* x = static_cast<float*>(memory);
  std::fill(x, x + count, 1.f);
  std::thread other;
  if (me.rank == 0) {
    other = std::thread([&] {
      usleep(20 * 1000);
      ncclCommRevoke(me.comm, NCCL_REVOKE_DEFAULT);
    });
  }
  while (ncclAllReduce(x, x, count, ncclFloat32, ncclMax, me.comm, nullptr) == ncclSuccess) {}
  std::fill(x, x + count, 2.f);
  if (other.joinable()) other.join();
  OK(ncclCommAbort(me.comm));
  OK(ncclMemFree(memory));
}

// ---- One thread drives all ranks (ncclCommInitAll), in groups.
void one_thread(int n) {
  std::vector<ncclComm_t> comms(static_cast<size_t>(n));
  OK(ncclCommInitAll(comms.data(), n, nullptr));
  for (int step = 0; step < 5; ++step) {
    std::vector<std::vector<float>> x, sum, moved;
    for (int r = 0; r < n; ++r) {
      x.push_back(filled(4000, static_cast<float>(r + 1)));
      sum.push_back(filled(4000, 0.f));
      moved.push_back(filled(4000, 0.f));
    }
    OK(ncclGroupStart());
    for (int r = n - 1; r >= 0; --r) {
      size_t i = static_cast<size_t>(r);
      OK(ncclAllReduce(x[i].data(), sum[i].data(), 4000, ncclFloat32, ncclSum, comms[i], nullptr));
      OK(ncclSend(x[i].data(), 4000, ncclFloat32, (r + 1) % n, comms[i], nullptr));
      OK(ncclRecv(moved[i].data(), 4000, ncclFloat32, (r + n - 1) % n, comms[i], nullptr));
    }
    OK(ncclGroupEnd());
    for (int r = 0; r < n; ++r) {
      CHECK(all_equal(sum[static_cast<size_t>(r)], triangle(n)));
      CHECK(all_equal(moved[static_cast<size_t>(r)], static_cast<float>((r + n - 1) % n + 1)));
    }
  }
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
}

// ---- Several communicators of one job of threads at the same time, each driven by a thread of its own.
void side_by_side(Rank& me) {
  ncclComm_t second;
  OK(ncclCommSplit(me.comm, 0, 0, &second, nullptr));
  auto work = [&](ncclComm_t comm) {
    for (int i = 0; i < 20; ++i) {
      std::vector<float> x = filled(static_cast<size_t>(100 * i), 1.f);
      OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, comm, nullptr));
      CHECK(all_equal(x, static_cast<float>(me.size)));
    }
  };
  std::thread other([&] { work(second); });
  work(me.comm);
  other.join();
  OK(ncclCommDestroy(second));
}

void run(const char* name, const std::function<void()>& scenario) {
  struct timespec from, to;
  clock_gettime(CLOCK_MONOTONIC, &from);
  g_scenario = name;
  scenario();
  clock_gettime(CLOCK_MONOTONIC, &to);
  double seconds = static_cast<double>(to.tv_sec - from.tv_sec) + 1e-9 * static_cast<double>(to.tv_nsec - from.tv_nsec);
  printf("%-24s %.2f s\n", name, seconds);
  fflush(stdout);
}

}  // namespace

// Big kernels on the thread pool, from several threads at once: one has the pool, the others do their work alone.
void kernels(Rank& me) {
  constexpr int64_t kMost = 300 * COLL_TILE + 5;
  std::vector<float> from(kMost), to(kMost);
  std::vector<double> sums(301);
  std::vector<uint32_t> bad(301);
  for (int64_t i = 0; i < kMost; ++i) from[i] = static_cast<float>(i % 1000 + me.rank);
  for (int round = 0; round < 20; ++round) {
    // Threads share out tiles: twice a lot of them, then few, many times.
    const int64_t tiles = round < 2 ? 300 : 30, elements = tiles * COLL_TILE + 5, parts = tiles + 1;
    coll_tensor tensor = {from.data(), elements, 0, 0, COLL_F32, 0};
    coll_cast_args args = {{parts, sums.data(), bad.data()}, &tensor, 1, to.data(), nullptr, 2.0, COLL_F32, 0};
    CHECK(collKernelRun(collKernelCast, &args, sizeof args, round % 2 ? 3 : -3) == 0);
    for (int64_t i = 0; i < elements; ++i) CHECK(to[i] == 2 * from[i]);
    double sum = 0;
    int64_t count = -1;
    coll_finish_args finish = {{1, sums.data(), bad.data()}, parts, &sum, &count};
    CHECK(collKernelRun(collKernelFinish, &finish, sizeof finish, 3) == 0);
    CHECK(sum > 0 && count == 0);
    std::fill(to.begin(), to.begin() + elements, 0.0f);
  }
}

int main() {
  setenv("COLLECTIVES_HOST_CHUNK", "4096", 0);  // many rounds with little data
  for (int n : {1, 2, 3, 5}) {
    printf("---- %d ranks\n", n);
    run("kernels", [&] { on_ranks(n, kernels); });
    run("collectives", [&] { on_ranks(n, collectives); });
    run("types", [&] { on_ranks(n, types); });
    run("transfers", [&] { on_ranks(n, transfers); });
    run("groups", [&] { on_ranks(n, groups); });
    run("queues", [&] { on_ranks(n, queues); });
    run("many threads", [&] { on_ranks(n, many_threads); });
    run("splits", [&] { on_ranks(n, splits); });
    run("come and go", [&] { on_ranks(n, come_and_go); });
    run("side by side", [&] { on_ranks(n, side_by_side); });
    run("shared memory", [&] { on_ranks(n, shared_memory); });
    run("it comes and goes", [&] { on_ranks(n, shared_memory_comes_and_goes); });
    run("one thread", [&] { one_thread(n); });
    run("split in the background", [&] { on_ranks(n, split_in_the_background, true); });
    if (n == 1) continue;
    run("mismatch", [&] { on_ranks(n, mismatch); });
    run("small calls ended", [&] { on_ranks(n, small_calls_ended, true); });
    run("small transfers ended", [&] { on_ranks(n, small_transfers_ended, true); });
    run("small call freed", [&] { small_call_freed(n); });
    run("abort while waiting", [&] { on_ranks(n, abort_while_waiting, true); });
    run("abort while splitting", [&] { on_ranks(n, abort_while_splitting, true); });
    run("abort while finalizing", [&] { on_ranks(n, abort_while_finalizing, true); });
    run("abort shared work", [&] { on_ranks(n, abort_shared_work, true); });
    run("time limit", [&] { on_ranks(n, time_limit, true); });
  }
  uint64_t in_use;
  OK(collHostMemoryInUse(&in_use));
  CHECK(in_use == 0);
  printf("all scenarios passed\n");
  return 0;
}
