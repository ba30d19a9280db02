// Queues, the host engine's counterpart of CUDA streams: one thread each, tasks in order.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <deque>
#include <set>

#include "queue.h"
#include "condition.h"
#include "group.h"
#include "system.h"

using namespace coll;

struct collHostQueue {
  std::mutex lock;
  coll::Condition work_there, work_done;
  std::deque<std::function<Error()>> tasks;
  uint64_t pushed = 0, done = 0;
  std::map<uint64_t, Error> failures;  // by ticket, the newest kKeptFailures
  // Runs of older failures of one kind, by their first ticket: the last one, and the report of the
  // first, which stands for all. No failure may be forgotten: its ticket would then pass for a
  // success.
  std::map<uint64_t, std::pair<uint64_t, Error>> older;
  bool closing = false;
  int forks = fork_generation();
  int cpu = -1;
  int64_t thread_id = 0;
  std::thread thread;

  void loop();
  void keep(uint64_t ticket, Error error);
  const Error* failure(uint64_t ticket) const;
};

namespace coll {
namespace {

constexpr size_t kKeptFailures = 64;

auto& queues() {
  static auto* table = new std::set<collHostQueue*>;
  return *table;
}

// A queue given by a caller, or NULL after raising.
collHostQueue* checked_queue(collHostQueue_t queue, const char* op) {
  if (!queue_alive(queue)) {
    raise(collHostErrorArgument, op,
          format("%p is no queue of the host engine (NULL: run in the calling thread; others come from "
                 "collHostQueueCreate)", static_cast<void*>(queue)));
    return nullptr;
  }
  if (queue->forks != fork_generation()) {
    raise(collHostErrorUsage, op, "the queue belongs to the parent of this forked process; make another one");
    return nullptr;
  }
  return queue;
}

}  // namespace

bool queue_alive(collHostQueue_t queue) {
  std::lock_guard<std::mutex> hold(tables_lock());
  return queues().count(queue) != 0;
}

uint64_t queue_push(collHostQueue_t queue, std::function<Error()> task) {
  std::lock_guard<std::mutex> hold(queue->lock);
  queue->tasks.push_back(std::move(task));
  queue->work_there.notify_one();
  return ++queue->pushed;
}

}  // namespace coll

void collHostQueue::loop() {
  pthread_setname_np(pthread_self(), "coll-queue");
  std::unique_lock<std::mutex> hold(lock);
  thread_id = syscall(SYS_gettid);
  work_done.notify_all();
  for (;;) {
    work_there.wait(hold, [&] { return closing || !tasks.empty(); });
    if (tasks.empty()) return;
    std::function<Error()> task = std::move(tasks.front());
    tasks.pop_front();
    hold.unlock();
    Error error;
    try {
      error = task();
    } catch (const std::exception& e) {
      error = make_error(collHostErrorInternal, e.what());
    }
    task = nullptr;  // what it holds is given back before its ticket is done
    hold.lock();
    ++done;
    if (error) keep(done, std::move(error));
    work_done.notify_all();
  }
}

// Both are called with the lock held.
void collHostQueue::keep(uint64_t ticket, Error error) {
  failures[ticket] = std::move(error);
  if (failures.size() <= kKeptFailures) return;
  auto oldest = failures.begin();
  auto run = older.empty() ? older.end() : std::prev(older.end());
  if (run != older.end() && run->second.first + 1 == oldest->first && run->second.second.kind == oldest->second.kind)
    run->second.first = oldest->first;
  else
    older.emplace(oldest->first, std::make_pair(oldest->first, std::move(oldest->second)));
  failures.erase(oldest);
}

const Error* collHostQueue::failure(uint64_t ticket) const {
  auto kept = failures.find(ticket);
  if (kept != failures.end()) return &kept->second;
  auto run = older.upper_bound(ticket);
  if (run == older.begin()) return nullptr;
  --run;
  return ticket <= run->second.first ? &run->second.second : nullptr;
}

extern "C" {

ncclResult_t collHostQueueCreate(collHostQueue_t* queue) {
  return guarded("collHostQueueCreate", [&] {
    if (!queue) return raise(collHostErrorArgument, "collHostQueueCreate", "queue is NULL");
    collHostQueue* q = new collHostQueue;
    std::string problem;
    // Signals belong to the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      q->thread = std::thread([q] { q->loop(); });
    } catch (const std::exception& e) {
      problem = std::string("no thread: ") + e.what();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!problem.empty()) {
      delete q;
      return raise(collHostErrorSystem, "collHostQueueCreate", problem);
    }
    {
      std::unique_lock<std::mutex> hold(q->lock);
      q->work_done.wait(hold, [&] { return q->thread_id != 0; });
    }
    std::lock_guard<std::mutex> hold(tables_lock());
    queues().insert(q);
    *queue = q;
    return ncclSuccess;
  });
}

ncclResult_t collHostQueueDestroy(collHostQueue_t queue) {
  return guarded("collHostQueueDestroy", [&] {
    collHostQueue* q = checked_queue(queue, "collHostQueueDestroy");
    if (!q) return last_error().code;
    if (q->thread.get_id() == std::this_thread::get_id())
      return raise(collHostErrorUsage, "collHostQueueDestroy", "a queue can't be destroyed by its own thread");
    {
      std::lock_guard<std::mutex> hold(tables_lock());
      queues().erase(q);
    }
    {
      std::lock_guard<std::mutex> hold(q->lock);
      q->closing = true;
      q->work_there.notify_one();
    }
    q->thread.join();
    delete q;
    return ncclSuccess;
  });
}

ncclResult_t collHostQueueRecord(collHostQueue_t queue, uint64_t* ticket) {
  return guarded("collHostQueueRecord", [&] {
    collHostQueue* q = checked_queue(queue, "collHostQueueRecord");
    if (!q) return last_error().code;
    if (!ticket) return raise(collHostErrorArgument, "collHostQueueRecord", "ticket is NULL");
    std::lock_guard<std::mutex> hold(q->lock);
    *ticket = q->pushed;
    return ncclSuccess;
  });
}

ncclResult_t collHostQueueWait(collHostQueue_t queue, uint64_t ticket, int64_t timeout_ns) {
  return guarded("collHostQueueWait", [&] {
    collHostQueue* q = checked_queue(queue, "collHostQueueWait");
    if (!q) return last_error().code;
    std::unique_lock<std::mutex> hold(q->lock);
    if (ticket > q->pushed)
      return raise(collHostErrorArgument, "collHostQueueWait",
                   format("ticket %llu was never given", static_cast<unsigned long long>(ticket)));
    auto over = [&] { return q->done >= ticket; };
    if (!over() && timeout_ns != 0) {
      if (q->thread.get_id() == std::this_thread::get_id())
        return raise(collHostErrorUsage, "collHostQueueWait", "a queue's own thread can't wait for the queue");
      if (timeout_ns < 0) q->work_done.wait(hold, over);
      else q->work_done.wait_for(hold, timeout_ns, over);
    }
    if (!over()) return ncclInProgress;
    const Error* failed = q->failure(ticket);
    return failed ? raise(*failed) : ncclSuccess;
  });
}

ncclResult_t collHostQueueCall(collHostQueue_t queue, void (*function)(void*), void* argument) {
  return guarded("collHostQueueCall", [&] {
    collHostQueue* q = checked_queue(queue, "collHostQueueCall");
    if (!q) return last_error().code;
    if (!function) return raise(collHostErrorArgument, "collHostQueueCall", "function is NULL");
    queue_push(q, [function, argument] {
      function(argument);
      return Error();
    });
    return ncclSuccess;
  });
}

ncclResult_t collHostQueueGetError(collHostQueue_t queue, uint64_t ticket, collHostErrorInfo_t* info) {
  return guarded("collHostQueueGetError", [&] {
    collHostQueue* q = checked_queue(queue, "collHostQueueGetError");
    if (!q) return last_error().code;
    if (!info || !info->size) return raise(collHostErrorArgument, "collHostQueueGetError", "info is NULL or has no size");
    std::lock_guard<std::mutex> hold(q->lock);
    const Error* failed = q->failure(ticket);
    fill(failed ? *failed : Error(), info);
    return ncclSuccess;
  });
}

ncclResult_t collHostQueueGet(collHostQueue_t queue, collHostQueueAttribute_t attribute, int64_t* value) {
  return guarded("collHostQueueGet", [&] {
    collHostQueue* q = checked_queue(queue, "collHostQueueGet");
    if (!q) return last_error().code;
    if (!value) return raise(collHostErrorArgument, "collHostQueueGet", "value is NULL");
    std::lock_guard<std::mutex> hold(q->lock);
    switch (attribute) {
      case collHostQueuePending: *value = static_cast<int64_t>(q->pushed - q->done); return ncclSuccess;
      case collHostQueueCpu: *value = q->cpu; return ncclSuccess;
      case collHostQueueThreadId: *value = q->thread_id; return ncclSuccess;
    }
    return raise(collHostErrorArgument, "collHostQueueGet", format("no attribute %d", static_cast<int>(attribute)));
  });
}

ncclResult_t collHostQueueSet(collHostQueue_t queue, collHostQueueAttribute_t attribute, int64_t value) {
  return guarded("collHostQueueSet", [&] {
    collHostQueue* q = checked_queue(queue, "collHostQueueSet");
    if (!q) return last_error().code;
    if (attribute != collHostQueueCpu)
      return raise(collHostErrorArgument, "collHostQueueSet",
                   format("attribute %d can't be set; collHostQueueCpu can", static_cast<int>(attribute)));
    cpu_set_t set;
    CPU_ZERO(&set);
    if (value == -1) {
      if (sched_getaffinity(0, sizeof set, &set) != 0) return raise(collHostErrorSystem, "collHostQueueSet", strerror(errno));
    } else if (value >= 0 && value < CPU_SETSIZE) {
      CPU_SET(static_cast<int>(value), &set);
    } else {
      return raise(collHostErrorArgument, "collHostQueueSet", format("no core %lld", static_cast<long long>(value)));
    }
    int code = pthread_setaffinity_np(q->thread.native_handle(), sizeof set, &set);
    if (code)
      return raise(collHostErrorArgument, "collHostQueueSet",
                   format("core %lld: %s", static_cast<long long>(value), strerror(code)));
    std::lock_guard<std::mutex> hold(q->lock);
    q->cpu = static_cast<int>(value);
    return ncclSuccess;
  });
}

}  // extern "C"
