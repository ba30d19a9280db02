// A clock of the time of day that jumps in one process: preloaded, it moves CLOCK_REALTIME by what
// move_clock() says. Waits until a time of day are moved back, as the kernel's clock has not jumped.
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/time.h>
#include <time.h>

#include <atomic>

namespace {
std::atomic<long> g_seconds{0};

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

timespec without(const timespec* until) { return {until->tv_sec - g_seconds.load(), until->tv_nsec}; }
}  // namespace

extern "C" {

void move_clock(long seconds) { g_seconds = seconds; }

int clock_gettime(clockid_t clock, timespec* out) {
  static auto* real = next<int (*)(clockid_t, timespec*)>("clock_gettime");
  int result = real(clock, out);
  if (result == 0 && clock == CLOCK_REALTIME) out->tv_sec += g_seconds;
  return result;
}

int gettimeofday(timeval* out, void* zone) {
  static auto* real = next<int (*)(timeval*, void*)>("gettimeofday");
  int result = real(out, zone);
  if (result == 0 && out) out->tv_sec += g_seconds;
  return result;
}

time_t time(time_t* out) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  static auto* real = next<int (*)(pthread_cond_t*, pthread_mutex_t*, const timespec*)>("pthread_cond_timedwait");
  timespec moved = without(until);
  return real(condition, mutex, &moved);
}

int sem_timedwait(sem_t* semaphore, const timespec* until) {
  static auto* real = next<int (*)(sem_t*, const timespec*)>("sem_timedwait");
  timespec moved = without(until);
  return real(semaphore, &moved);
}
}
