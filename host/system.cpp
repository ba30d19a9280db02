#include "system.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <stdexcept>

#include "heap.h"

namespace coll {
namespace {

std::atomic<int> g_forks{0};
std::atomic<int (*)(void)> g_interrupt_check{nullptr};

struct Watch { int fd; int users; };
auto& watches() {
  static auto* table = new std::map<int, Watch>;
  return *table;
}

// A child must not inherit a lock that another thread of its parent holds.
struct ForkHandlers {
  ForkHandlers() {
    pthread_atfork(
        [] { order_lock().lock(); tables_lock().lock(); },
        [] { tables_lock().unlock(); order_lock().unlock(); },
        [] { tables_lock().unlock(); order_lock().unlock(); g_forks++; });
  }
} g_fork_handlers;

}  // namespace

std::mutex& tables_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

std::mutex& order_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

int fork_generation() { return g_forks.load(std::memory_order_relaxed); }

void random_bytes(void* out, size_t nbytes) {
  char* p = static_cast<char*>(out);
  while (nbytes) {
    ssize_t got = getrandom(p, nbytes, 0);
    if (got < 0 && errno != EINTR) throw std::runtime_error(std::string("getrandom: ") + strerror(errno));
    if (got > 0) p += got, nbytes -= static_cast<size_t>(got);
  }
}

uint64_t random_u64() {
  uint64_t value;
  random_bytes(&value, sizeof value);
  return value;
}

int64_t now_ns() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

uint64_t siphash(const uint64_t key[2], const void* data, size_t nbytes) {
  uint64_t v0 = key[0] ^ 0x736f6d6570736575ull, v1 = key[1] ^ 0x646f72616e646f6dull;
  uint64_t v2 = key[0] ^ 0x6c7967656e657261ull, v3 = key[1] ^ 0x7465646279746573ull;
  auto rotate = [](uint64_t x, int b) { return (x << b) | (x >> (64 - b)); };
  auto round = [&] {
    v0 += v1; v1 = rotate(v1, 13); v1 ^= v0; v0 = rotate(v0, 32);
    v2 += v3; v3 = rotate(v3, 16); v3 ^= v2;
    v0 += v3; v3 = rotate(v3, 21); v3 ^= v0;
    v2 += v1; v1 = rotate(v1, 17); v1 ^= v2; v2 = rotate(v2, 32);
  };
  const uint8_t* p = static_cast<const uint8_t*>(data);
  uint64_t last = static_cast<uint64_t>(nbytes) << 56;
  for (; nbytes >= 8; nbytes -= 8, p += 8) {
    uint64_t m;
    memcpy(&m, p, 8);
    v3 ^= m; round(); round(); v0 ^= m;
  }
  for (size_t i = 0; i < nbytes; ++i) last |= static_cast<uint64_t>(p[i]) << (8 * i);
  v3 ^= last; round(); round(); v0 ^= last;
  v2 ^= 0xff;
  for (int i = 0; i < 4; ++i) round();
  return v0 ^ v1 ^ v2 ^ v3;
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns) {
  struct timespec t = {timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, timeout_ns < 0 ? nullptr : &t, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word, int sleepers) {
  syscall(SYS_futex, word, FUTEX_WAKE, sleepers, nullptr, nullptr, 0);
}

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return CPU_COUNT(&set);
}

int idle_cores() {
  int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[128];
  ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  text[got > 0 ? got : 0] = 0;
  int running = 0;  // "0.47 0.21 0.68 4/114 18759": 4 threads want a core now, this one among them
  if (sscanf(text, "%*s %*s %*s %d/", &running) != 1) return 0;
  return std::max(static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) - running, 0);
}

int process_watch(int pid) {
  if (pid == 0 || pid == getpid()) return -1;
  std::lock_guard<std::mutex> hold(tables_lock());
  auto found = watches().find(pid);
  if (found != watches().end()) return found->second.users++, found->second.fd;
  int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return -1;
  watches()[pid] = {fd, 1};
  return fd;
}

void process_release(int pid) {
  std::lock_guard<std::mutex> hold(tables_lock());
  auto found = watches().find(pid);
  if (found == watches().end() || --found->second.users > 0) return;
  close(found->second.fd);
  watches().erase(found);
}

namespace {

// The state of a process as ps shows it; 0 where it can't be read, 'X' where there is no such process.
char process_state(int pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* f = fopen(path, "re");
  if (!f) return errno == ENOENT ? 'X' : 0;
  char line[512] = "";
  size_t got = fread(line, 1, sizeof line - 1, f);
  fclose(f);
  line[got] = 0;
  const char* after = strrchr(line, ')');
  return after && after[1] ? after[2] : 0;
}

}  // namespace

bool process_ended(int pid, int pidfd) {
  if (pidfd >= 0) {
    struct pollfd p = {pidfd, POLLIN, 0};
    return poll(&p, 1, 0) == 1;
  }
  if (pid == 0 || pid == getpid()) return false;
  // No pidfd here (an old kernel, a sandbox): kill(pid, 0) succeeds on a zombie, so look at its
  // state.
  char state = process_state(pid);
  return state == 'Z' || state == 'X';
}

bool process_stopped(int pid) {
  if (pid == 0 || pid == getpid()) return false;
  char state = process_state(pid);
  return state == 'T' || state == 't';
}

bool interrupted() {
  auto check = g_interrupt_check.load(std::memory_order_acquire);
  return check && check() != 0;
}

void set_interrupt_check(int (*check)(void)) { g_interrupt_check.store(check, std::memory_order_release); }

}  // namespace coll
