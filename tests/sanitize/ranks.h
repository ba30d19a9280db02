// Ranks as threads, checks that end the program, and what scenarios compare their results with.
#pragma once

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coll/host_abi.h"
#include "coll/kernel_abi.h"

namespace sanitize {

inline const char* g_scenario = "";

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  fprintf(stderr, "%s:%d: %s: %s (last error: %s)\n", file, line, g_scenario, text.c_str(), ncclGetLastError(nullptr));
  fflush(stderr);
  _exit(1);
}
#define CHECK(condition) \
  do { if (!(condition)) sanitize::fail(__FILE__, __LINE__, "not true: " #condition); } while (0)
#define OK(call) \
  do { \
    ncclResult_t r_ = (call); \
    if (r_ != ncclSuccess) sanitize::fail(__FILE__, __LINE__, #call " gave " + std::to_string(r_)); \
  } while (0)
#define FAILS(call, code) \
  do { \
    ncclResult_t r_ = (call); \
    if (r_ != (code)) sanitize::fail(__FILE__, __LINE__, #call " gave " + std::to_string(r_)); \
  } while (0)

// All ranks meet here. Used only where a scenario is about order; it would hide races everywhere else.
class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}
  void wait() {
    std::unique_lock<std::mutex> hold(lock_);
    long round = round_;
    if (++came_ == n_) {
      came_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(hold, [&] { return round_ != round; });
    }
  }

 private:
  int n_, came_ = 0;
  long round_ = 0;
  std::mutex lock_;
  std::condition_variable changed_;
};

struct Rank {
  int rank, size;
  ncclComm_t comm;
  Barrier* barrier;
};

// Run `body` on `n` threads, each a rank of a fresh communicator. `body` ends the communicator itself if `owns` is true.
inline void on_ranks(int n, const std::function<void(Rank&)>& body, bool owns = false) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  Barrier barrier(n);
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      Rank me = {r, n, nullptr, &barrier};
      OK(ncclCommInitRank(&me.comm, n, id, r));
      body(me);
      if (!owns) OK(ncclCommDestroy(me.comm));
    });
  }
  for (std::thread& t : threads) t.join();
}

template <class T>
std::vector<T> filled(size_t count, T value) {
  return std::vector<T>(count, value);
}

inline float triangle(int n) { return static_cast<float>(n * (n + 1)) / 2; }

inline bool all_equal(const std::vector<float>& x, float value) {
  return std::all_of(x.begin(), x.end(), [&](float v) { return v == value; });
}

}  // namespace sanitize
