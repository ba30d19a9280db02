// A condition variable on the monotonic clock: setting the system's clock neither shortens nor lengthens a wait.
#pragma once

#include <errno.h>
#include <pthread.h>
#include <time.h>

#include <cstdint>
#include <mutex>
#include <system_error>

namespace coll {

// std::condition_variable keeps to that clock only by a function that glibc has from 2.30 on; this one runs on older ones too.
class Condition {
 public:
  Condition() {
    pthread_condattr_t monotonic;
    int code = pthread_condattr_init(&monotonic);
    if (code == 0) {
      code = pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
      if (code == 0) code = pthread_cond_init(&condition_, &monotonic);
      pthread_condattr_destroy(&monotonic);
    }
    if (code != 0) throw std::system_error(code, std::generic_category(), "pthread_cond_init");
  }
  ~Condition() { pthread_cond_destroy(&condition_); }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void notify_one() { pthread_cond_signal(&condition_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }

  // Blocks until over() is true. It is called with the lock held.
  template <class Over>
  void wait(std::unique_lock<std::mutex>& hold, Over over) {
    while (!over()) pthread_cond_wait(&condition_, hold.mutex()->native_handle());
  }

  // Blocks as wait(), at most for so many nanoseconds; returns over().
  template <class Over>
  bool wait_for(std::unique_lock<std::mutex>& hold, int64_t nanoseconds, Over over) {
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    int64_t fraction = end.tv_nsec + nanoseconds % kSecond;
    end.tv_sec += nanoseconds / kSecond + fraction / kSecond;
    end.tv_nsec = fraction % kSecond;
    while (!over())
      if (pthread_cond_timedwait(&condition_, hold.mutex()->native_handle(), &end) == ETIMEDOUT) return over();
    return true;
  }

 private:
  static constexpr int64_t kSecond = 1000000000;
  pthread_cond_t condition_;
};

}  // namespace coll
