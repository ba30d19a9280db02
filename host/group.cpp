// Groups; only here do operations get their place in the order of a communicator.
#include <algorithm>

#include "group.h"
#include "condition.h"
#include "fast_path.h"
#include "order.h"
#include "progress.h"
#include "queue.h"
#include "system.h"

namespace coll {
namespace {

struct Submitted {
  Op op;
  collHostQueue_t queue;
};
struct Deferred {
  ncclComm* parent;
  const char* op;
  Job job;
};
struct Group {
  std::vector<Submitted> ops;
  std::vector<Deferred> jobs;
  Error refused;
};
thread_local Group t_group;
thread_local int t_depth = 0;  // apart: without a constructor, so that each call reads it at little cost

// Queues of one group wait for each other, as streams do: the batch runs in the first one's thread
// when the others have come to it, and they go on when it has ended.
struct Join {
  std::mutex lock;
  Condition changed;
  size_t arrived = 0;
  bool done = false;
  Error error;
};

bool is_transfer(const Op& op) { return op.kind == CollKind::Send || op.kind == CollKind::Recv; }

Work& work_of(Batch& batch, ncclComm* comm) {
  for (Work& work : batch.works)
    if (work.comm == comm) return work;
  batch.works.emplace_back();
  batch.works.back().comm = comm;
  return batch.works.back();
}

// Under order_lock().
void take_tickets(Batch& batch) {
  for (Work& work : batch.works) {
    work.ticket = take_ticket(work.comm);
    work.comm->sequence.fetch_add(work.collective_count, std::memory_order_relaxed);
  }
}

// Sort the operations into the batch. Sends to oneself are matched with their receives here.
Error fill_batch(Batch& batch, const std::vector<Submitted>& ops) {
  for (const Submitted& s : ops) work_of(batch, s.op.comm);
  for (Work& work : batch.works) {
    std::vector<Op> sends, receives;
    std::vector<size_t> after;  // of the sends to oneself
    size_t compared = 0;        // transfers that still belong to the last comparison
    for (const Submitted& s : ops) {
      if (s.op.comm != work.comm) continue;
      if (!is_transfer(s.op)) {
        work.stored.emplace_back(s.op);
        if (s.op.compares) compared = s.op.compared;
        continue;
      }
      size_t then = compared ? work.stored.size() : 0;
      compared -= compared != 0;
      if (s.op.root != work.comm->rank) {
        if (work.transfers.empty()) work.transfers.reserve(ops.size());
        work.transfers.emplace_back(s.op, then);
      } else if (s.op.kind == CollKind::Send) {
        sends.push_back(s.op);
        after.push_back(then);
      } else {
        receives.push_back(s.op);
      }
    }
    for (size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
      if (i >= sends.size() || i >= receives.size()) {
        Error error = make_error(collHostErrorUsage, "a send to oneself and its receive must be in one group");
        error.op = i >= sends.size() ? "ncclRecv" : "ncclSend";
        error.rank = work.comm->rank;
        return error;
      }
      if (sends[i].count != receives[i].count || sends[i].type != receives[i].type) {
        Error error = make_error(collHostErrorMismatch,
                                 format("send to oneself of %zu x %s, receive of %zu x %s", sends[i].count,
                                        type_name(sends[i].type), receives[i].count, type_name(receives[i].type)));
        error.op = "ncclSend";
        error.rank = work.comm->rank;
        return error;
      }
      work.local.push_back({sends[i], receives[i], after[i]});
    }
    work.collectives = work.stored.data();
    work.collective_count = work.stored.size();
  }
  return Error();
}

// Operations that share a communicator, a queue or the calling thread (NULL) go together; others
// need not wait for them.
std::vector<std::vector<Submitted>> connected(const std::vector<Submitted>& ops) {
  std::vector<std::vector<Submitted>> parts;
  for (const Submitted& s : ops) {
    std::vector<Submitted> part;
    for (size_t i = parts.size(); i-- > 0;) {
      bool touches = std::any_of(parts[i].begin(), parts[i].end(), [&](const Submitted& other) {
        return other.op.comm == s.op.comm || other.queue == s.queue;
      });
      if (!touches) continue;
      part.insert(part.begin(), parts[i].begin(), parts[i].end());
      parts.erase(parts.begin() + static_cast<long>(i));
    }
    part.push_back(s);
    parts.push_back(std::move(part));
  }
  return parts;
}

struct Launch {
  std::shared_ptr<Batch> batch = std::make_shared<Batch>();
  std::vector<collHostQueue_t> queues;
  bool calling_thread = false;
  std::shared_ptr<Join> join;

  // Under order_lock().
  void enqueue() {
    take_tickets(*batch);
    size_t others = queues.empty() ? 0 : queues.size() - 1;
    for (size_t i = 0; i < queues.size(); ++i) {
      if (i == 0) queue_push(queues[i], [batch = batch, join = join, others] { return lead(*batch, join.get(), others); });
      else queue_push(queues[i], [join = join] { return follow(*join); });
    }
  }

  static Error lead(Batch& batch, Join* join, size_t others) {
    if (join) {
      std::unique_lock<std::mutex> hold(join->lock);
      join->changed.wait(hold, [&] { return join->arrived == others; });
    }
    batch.run();
    if (join) {
      std::lock_guard<std::mutex> hold(join->lock);
      join->error = batch.error;
      join->done = true;
      join->changed.notify_all();
    }
    return batch.error;
  }

  static Error follow(Join& join) {
    std::unique_lock<std::mutex> hold(join.lock);
    ++join.arrived;
    join.changed.notify_all();
    join.changed.wait(hold, [&] { return join.done; });
    return join.error;
  }

  // What the calling thread has to do or to wait for.
  Error finish() {
    if (!calling_thread) return Error();
    if (queues.empty()) {
      batch->run();
      return batch->error;
    }
    std::unique_lock<std::mutex> hold(join->lock);
    join->changed.wait(hold, [&] { return join->done; });
    return join->error;
  }
};

// Operations of one communicator in the calling thread, which share nothing with another one: most
// groups, and every send and receive alone.
bool in_one_place(const std::vector<Submitted>& ops) {
  ncclComm* comm = ops.front().op.comm;
  return std::all_of(ops.begin(), ops.end(), [=](const Submitted& s) { return !s.queue && s.op.comm == comm; });
}

ncclResult_t run_in_one_place(const std::vector<Submitted>& ops) {
  if (std::all_of(ops.begin(), ops.end(), [](const Submitted& s) { return is_transfer(s.op); })) {
    TransferList list;
    ncclResult_t code;
    for (const Submitted& s : ops) list.transfers.emplace_back(s.op);
    if (run_short(list.transfers, &code)) return code;
  }
  Batch batch;
  Error error = fill_batch(batch, ops);
  if (error) return raise(error);
  {
    std::lock_guard<std::mutex> hold(order_lock());
    take_tickets(batch);
  }
  batch.run();
  return batch.error ? raise(batch.error) : ncclSuccess;
}

ncclResult_t launch(const std::vector<Submitted>& ops) {
  if (in_one_place(ops)) return run_in_one_place(ops);
  std::vector<Launch> launches;
  for (const std::vector<Submitted>& part : ops.size() == 1 ? std::vector<std::vector<Submitted>>{ops} : connected(ops)) {
    launches.emplace_back();
    Launch& launch = launches.back();
    Error error = fill_batch(*launch.batch, part);
    if (error) return raise(error);
    for (const Submitted& s : part) {
      if (!s.queue) launch.calling_thread = true;
      else if (std::find(launch.queues.begin(), launch.queues.end(), s.queue) == launch.queues.end()) launch.queues.push_back(s.queue);
    }
    if (launch.queues.size() + launch.calling_thread > 1 && !launch.queues.empty()) launch.join = std::make_shared<Join>();
  }
  {
    // Tickets and places in queues are given together: whoever is earlier here is earlier
    // everywhere, so that waiting for an earlier one can't go round in a circle.
    std::lock_guard<std::mutex> hold(order_lock());
    for (Launch& launch : launches) launch.enqueue();
  }
  Error first;
  for (Launch& launch : launches) {
    Error error = launch.finish();
    if (error && !first) first = error;
  }
  return first ? raise(first) : ncclSuccess;
}

// Jobs without a parent wait for each other, so each has a thread of its own; those of one parent
// keep their order.
Error run_jobs(std::vector<Deferred> jobs) {
  std::vector<std::vector<Deferred*>> lines;
  for (Deferred& job : jobs) {
    auto same = std::find_if(lines.begin(), lines.end(),
                             [&](const auto& line) { return job.parent && line.front()->parent == job.parent; });
    if (same != lines.end()) same->push_back(&job);
    else lines.push_back({&job});
  }
  std::vector<Error> errors(lines.size());
  auto run_line = [&](size_t i) {
    for (Deferred* job : lines[i]) {
      Error error;
      try {
        error = job->job(false);
      } catch (const std::exception& e) {
        error = make_error(collHostErrorInternal, e.what());
      }
      if (error && error.op.empty()) error.op = job->op;
      if (error && !errors[i]) errors[i] = std::move(error);
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(lines.size());
  try {
    for (size_t i = 1; i < lines.size(); ++i) threads.emplace_back(run_line, i);
  } catch (const std::exception& e) {
    size_t failed = threads.size() + 1;
    errors[failed] = make_error(collHostErrorSystem, std::string("no thread for a communicator of the group: ") + e.what());
    errors[failed].op = lines[failed].front()->op;
    for (size_t i = 0; i < lines.size(); ++i) {
      if (i > 0 && i < failed) continue;
      for (Deferred* job : lines[i]) job->job(true);
      lines[i].clear();
    }
  }
  run_line(0);
  for (std::thread& thread : threads) thread.join();
  for (Error& error : errors)
    if (error) return error;
  return Error();
}

}  // namespace

bool in_group() { return t_depth > 0; }

ncclResult_t refuse(ncclResult_t code) {
  if (in_group() && !t_group.refused) t_group.refused = last_error();
  return code;
}

ncclResult_t submit(const Op& op, cudaStream_t stream) {
  collHostQueue_t queue = reinterpret_cast<collHostQueue_t>(stream);
  if (in_group()) {
    t_group.ops.push_back({op, queue});
    return ncclSuccess;
  }
  if (queue) return launch({{op, queue}});
  ncclResult_t code;
  if (is_transfer(op)) {
    TransferList list;
    list.transfers.emplace_back(op);
    return run_short(list.transfers, &code) ? code : launch({{op, queue}});
  }
  if (run_short(op, &code)) return code;
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> hold(order_lock());
    ticket = take_ticket(op.comm);
    op.comm->sequence.fetch_add(1, std::memory_order_relaxed);
  }
  Error error = run_alone(op, ticket);
  return error ? raise(error) : ncclSuccess;
}

ncclResult_t submit_job(ncclComm* parent, const char* op, Job job) {
  if (in_group()) {
    t_group.jobs.push_back({parent, op, std::move(job)});
    return ncclSuccess;
  }
  Error error = job(false);
  if (error && error.op.empty()) error.op = op;
  return error ? raise(error) : ncclSuccess;
}

ncclResult_t group_start() {
  ++t_depth;
  return ncclSuccess;
}

ncclResult_t group_end(const char* op) {
  if (t_depth == 0) return raise(collHostErrorUsage, op, "no group is open in this thread");
  if (--t_depth > 0) return ncclSuccess;
  Group group = std::move(t_group);
  t_group = Group();
  if (group.refused || (!group.jobs.empty() && !group.ops.empty())) {
    for (Deferred& job : group.jobs) job.job(true);
  }
  if (group.refused) {
    Error error = group.refused;
    error.text += " (so nothing of its group was started)";
    return raise(error);
  }
  if (!group.jobs.empty() && !group.ops.empty())
    return raise(collHostErrorUsage, op, "communicators can't be made in the same group as operations");
  if (!group.jobs.empty()) {
    Error error = run_jobs(std::move(group.jobs));
    return error ? raise(error) : ncclSuccess;
  }
  if (group.ops.empty()) return ncclSuccess;
  ncclResult_t code = launch(group.ops);
  group.ops.clear();
  if (t_group.ops.empty()) t_group.ops.swap(group.ops);  // so that the next group allocates nothing
  return code;
}

void group_cancel() {
  for (Deferred& job : t_group.jobs) job.job(true);
  t_group = Group();
  t_depth = 0;
}

}  // namespace coll
