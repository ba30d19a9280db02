#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "system.h"

namespace coll {
namespace {

constexpr int kMostHelpers = 63;

struct Job {
  void (*do_part)(void*, int64_t);
  void* context;
  int64_t parts;
};

constexpr uint32_t kOpen = 1u << 31;

// One job at a time. `jobs` counts them: a worker sleeps until it moves. `door` holds kOpen while a
// job has parts left, and the number of workers inside. The caller shuts the door when all parts
// are taken and waits only for those inside: a worker that the system wakes late, because its core
// is busy, finds the door shut and keeps nobody waiting.
struct Pool {
  std::atomic<bool> taken{false};
  std::atomic<uint32_t> jobs{0};
  std::atomic<uint32_t> door{0};
  std::atomic<int64_t> next{0};
  Job job{};
  int workers = 0;
  int generation = fork_generation();
};

// A child has none of its parent's threads, and begins with a new pool. None is ever destroyed:
// workers live until the end.
std::atomic<Pool*> g_pool{nullptr};

Pool& pool() {
  Pool* p = g_pool.load(std::memory_order_acquire);
  if (p && p->generation == fork_generation()) return *p;
  std::lock_guard<std::mutex> hold(tables_lock());
  p = g_pool.load(std::memory_order_relaxed);
  if (!p || p->generation != fork_generation()) g_pool.store(p = new Pool, std::memory_order_release);
  return *p;
}

void take_parts(Pool& p) {
  for (;;) {
    int64_t part = p.next.fetch_add(1, std::memory_order_relaxed);
    if (part >= p.job.parts) return;
    p.job.do_part(p.job.context, part);
  }
}

bool enter(Pool& p) {
  uint32_t door = p.door.load(std::memory_order_relaxed);
  do {
    if (!(door & kOpen)) return false;
  } while (!p.door.compare_exchange_weak(door, door + 1, std::memory_order_acquire, std::memory_order_relaxed));
  return true;
}

void leave(Pool& p) {
  if (p.door.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake(&p.door);
}

void work(Pool* p, uint32_t seen) {
  for (;;) {
    uint32_t now = p->jobs.load(std::memory_order_acquire);
    if (now == seen) {
      futex_wait(&p->jobs, seen, -1);
      continue;
    }
    seen = now;
    if (!enter(*p)) continue;
    take_parts(*p);
    leave(*p);
  }
}

// Workers block all signals: handlers run on the program's own threads.
void start_workers(Pool& p, int count) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (p.workers < count) {
    try {
      std::thread(work, &p, p.jobs.load(std::memory_order_relaxed)).detach();
    } catch (const std::system_error&) {
      break;  // the system refuses more threads: the existing ones do the work
    } catch (const std::bad_alloc&) {
      break;
    }
    ++p.workers;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void pool_run(int threads, int64_t parts, void (*do_part)(void*, int64_t), void* context) {
  int helpers = static_cast<int>(threads < parts ? threads : parts) - 1;
  if (helpers > kMostHelpers) helpers = kMostHelpers;
  Pool* p = helpers > 0 ? &pool() : nullptr;
  if (!p || p->taken.exchange(true, std::memory_order_acquire)) {
    for (int64_t part = 0; part < parts; ++part) do_part(context, part);
    return;
  }
  start_workers(*p, helpers);
  p->job = {do_part, context, parts};
  p->next.store(0, std::memory_order_relaxed);
  p->door.store(kOpen, std::memory_order_release);
  p->jobs.fetch_add(1, std::memory_order_release);
  futex_wake(&p->jobs, helpers);
  take_parts(*p);
  uint32_t inside = p->door.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  for (; inside != 0; inside = p->door.load(std::memory_order_acquire)) futex_wait(&p->door, inside, -1);
  p->taken.store(false, std::memory_order_release);
}

}  // namespace coll
