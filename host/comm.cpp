// Communicators: init, split, shrink, destroy and abort.
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "comm.h"
#include "bootstrap.h"
#include "group.h"
#include "hmac.h"
#include "kernels.h"
#include "order.h"
#include "peers.h"
#include "progress.h"
#include "system.h"
#include "unique_id.h"

namespace coll {

ncclComm* checked(ncclComm_t comm, const char* op) {
  if (!comm || comm->magic != kCommMagic) {
    raise(collHostErrorArgument, op, comm ? "this is no communicator of the host engine, or it was destroyed" : "comm is NULL");
    return nullptr;
  }
  if (comm->forks != fork_generation()) {
    raise(collHostErrorUsage, op,
          "the communicator belongs to the parent of this forked process; a child must make its own");
    return nullptr;
  }
  if (!comm->ready.load(std::memory_order_acquire)) {
    raise(collHostErrorUsage, op, "the communicator is still being made (ncclCommGetAsyncError tells when it is ready)");
    return nullptr;
  }
  if (!comm->segment) {  // the non-blocking init has failed
    raise(comm->init_error);
    return nullptr;
  }
  return comm;
}

namespace {

struct Settings {
  bool blocking = true;
};

// Configs are read by their size only, so that clients of older and of newer versions work.
ncclResult_t read_config(const ncclConfig_t* config, const char* op, Settings* settings) {
  if (!config) return ncclSuccess;
  if (config->magic != NCCL_API_MAGIC || config->size < offsetof(ncclConfig_t, blocking))
    return raise(collHostErrorArgument, op, "the config was not made with NCCL_CONFIG_INITIALIZER");
  if (config->size >= offsetof(ncclConfig_t, blocking) + sizeof config->blocking &&
      config->blocking != NCCL_CONFIG_UNDEF_INT) {
    if (config->blocking != 0 && config->blocking != 1)
      return raise(collHostErrorArgument, op, format("config: blocking is %d, must be 0 or 1", config->blocking));
    settings->blocking = config->blocking != 0;
  }
  return ncclSuccess;
}

ncclComm* fresh(int rank, int size, int device) {
  ncclComm* comm = new ncclComm;
  comm->magic = kCommMagic;
  comm->rank = rank;
  comm->size = size;
  comm->device = device;
  comm->forks = fork_generation();
  return comm;
}

}  // namespace

void release(ncclComm* comm) {
  if (comm->users.fetch_sub(1) > 1) return;
  if (comm->init_thread.joinable()) comm->init_thread.join();
  for (size_t r = 0; r < comm->pidfds.size(); ++r)
    if (comm->pidfds[r] >= 0) process_release(comm->pids[r]);
  for (PeerHeap* heap : comm->heaps)
    if (heap) heap->close();
  if (comm->segment) comm->segment->release();
  delete comm;
}

namespace {

// Run `meet`, the bootstrap (maybe with an exchange before it), for a new communicator to which
// *out already points.
ncclResult_t start(ncclComm_t* out, ncclComm* comm, ncclComm* parent, const Settings& settings, const char* op,
                   std::function<Error(ncclComm*)> meet) {
  *out = comm;
  auto job = [out, comm, meet](bool cancelled) {
    Error error;
    if (!cancelled) error = meet(comm);
    if (!cancelled && !error && comm->segment) {
      comm->ready.store(true, std::memory_order_release);
      return error;
    }
    *out = nullptr;  // an error, cancelled, or (split) no part in any new communicator
    release(comm);
    return error;
  };
  if (settings.blocking || in_group()) return submit_job(parent, op, job);
  auto in_background = [comm, meet, op] {
    Error error;
    try {
      error = meet(comm);
    } catch (const std::exception& e) {
      error = make_error(collHostErrorInternal, e.what());
    }
    if (error && error.op.empty()) error.op = op;
    {
      std::lock_guard<std::mutex> hold(comm->state_lock);
      comm->init_error = error;
      if (error) comm->broken = error;
      if (error) comm->is_broken.store(true);
    }
    comm->ready.store(true, std::memory_order_release);
  };
  try {
    comm->init_thread = std::thread(in_background);
  } catch (const std::system_error&) {
    return submit_job(parent, op, job);  // no thread to be had: as a blocking one, which is slower and as good
  }
  return ncclInProgress;
}

ncclResult_t check_ranks(const char* op, int nranks, int rank) {
  if (nranks < 1 || nranks > kMaxRanks)
    return raise(collHostErrorArgument, op, format("nranks is %d, must be 1 to %d", nranks, kMaxRanks));
  if (rank < 0 || rank >= nranks)
    return raise(collHostErrorArgument, op, format("rank is %d, must be 0 to %d", rank, nranks - 1));
  return ncclSuccess;
}

ncclResult_t init_rank(ncclComm_t* out, int nranks, const Id& id, int rank, const ncclConfig_t* config, int device,
                       const char* op) {
  if (!out) return refuse(raise(collHostErrorArgument, op, "comm is NULL"));
  *out = nullptr;
  Settings settings;
  ncclResult_t code = check_ranks(op, nranks, rank);
  if (!code) code = read_config(config, op, &settings);
  std::string problem = code ? "" : choose_kernels();
  if (!problem.empty()) code = raise(collHostErrorArgument, op, problem);
  if (!code && memcmp(id.magic, "COLLHOST", 8) != 0)
    code = raise(collHostErrorArgument, op, "the unique id is not one of the host engine's ncclGetUniqueId");
  if (code) return refuse(code);
  return start(out, fresh(rank, nranks, device), nullptr, settings, op, [id, op](ncclComm* comm) {
    Error error;
    bootstrap(comm, id, 0, op, Origin(), &error);
    return error;
  });
}

// The label from which a child's id is made; equal on all its ranks, and different for every child.
struct ChildLabel {
  char kind[8];
  uint64_t number;
  int64_t color;
};

Id child_id(ncclComm* parent, const char* kind, uint64_t number, int64_t color) {
  ChildLabel label{};
  snprintf(label.kind, sizeof label.kind, "%s", kind);
  label.number = number;
  label.color = color;
  return derive_id(parent->secret, &label, sizeof label);
}

// Exchange color and key with all ranks; returns the ranks of the same color in their new order.
Error exchange_colors(ncclComm* parent, int color, int key, uint64_t number, std::vector<int>* members) {
  RankBlock* me = parent->me();
  parent->splits_begun = number;
  me->split[number & 1].color = color;
  me->split[number & 1].key = key;
  me->split_posted.store(number, std::memory_order_release);
  parent->wake_sleepers();
  Error error = wait_until(*parent, true, [&](int r) {
    return parent->segment->rank(r)->split_posted.load(std::memory_order_acquire) < number;
  });
  if (error) {
    error.op = "ncclCommSplit";
    error.rank = parent->rank;
    // A rank that may still call this split, or never does, no longer agrees with this one on what
    // comes next.
    bool apart = error.kind == collHostErrorMismatch || error.kind == collHostErrorTimeout || error.kind == collHostErrorInterrupted;
    if (apart) parent->break_with(error, kFailed);
    publish_child_failure(*parent, kSplit, number, error);
    return error;
  }
  for (int r = 0; r < parent->size && color != NCCL_SPLIT_NOCOLOR; ++r)
    if (parent->segment->rank(r)->split[number & 1].color == color) members->push_back(r);
  std::stable_sort(members->begin(), members->end(), [&](int a, int b) {
    return parent->segment->rank(a)->split[number & 1].key < parent->segment->rank(b)->split[number & 1].key;
  });
  return Error();
}

// A place in the parent's order for a split, and the split's number.
struct SplitPlace {
  bool taken = false;
  uint64_t ticket = 0, number = 0;

  void take(ncclComm* parent) {
    if (taken) return;
    std::lock_guard<std::mutex> hold(order_lock());
    taken = true;
    number = ++parent->splits;
    ticket = take_ticket(parent);
  }
};

// For destroy and abort: an init that is under way is waited for, one that failed is no error any
// more.
ncclComm* to_be_ended(ncclComm_t comm, const char* op, bool abort) {
  if (!comm || comm->magic != kCommMagic || comm->forks != fork_generation()) return checked(comm, op);
  if (abort) comm->abort_flag.store(true, std::memory_order_release);
  if (comm->init_thread.joinable()) comm->init_thread.join();
  // A blocking init of another thread ends by itself now, and frees the handle.
  else if (!comm->ready.load(std::memory_order_acquire)) return checked(comm, op);
  return comm;
}

}  // namespace
}  // namespace coll

using namespace coll;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId) {
  return guarded("ncclGetUniqueId", [&] {
    if (!uniqueId) return raise(collHostErrorArgument, "ncclGetUniqueId", "uniqueId is NULL");
    make_id(reinterpret_cast<Id*>(uniqueId));
    return ncclSuccess;
  });
}

ncclResult_t collHostGetNamedUniqueId(const void* name, size_t nbytes, ncclUniqueId* uniqueId) {
  return guarded("collHostGetNamedUniqueId", [&] {
    if (!uniqueId || (!name && nbytes))
      return raise(collHostErrorArgument, "collHostGetNamedUniqueId", "name or uniqueId is NULL");
    uint64_t user[4] = {geteuid(), 0x6e616d6564, 0, 0};
    Digest key = job_key("named unique id", 15);  // where there is a secret, nobody else can guess the name
    memcpy(&user[2], key.data(), 2 * sizeof user[2]);
    Id id = derive_id(user, name, nbytes);
    memcpy(uniqueId, &id, sizeof id);
    return ncclSuccess;
  });
}

ncclResult_t collHostSetSecret(const void* secret, size_t nbytes) {
  return guarded("collHostSetSecret", [&] {
    if (!secret && nbytes) return raise(collHostErrorArgument, "collHostSetSecret", "secret is NULL");
    set_job_secret(secret, nbytes);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config) {
  return guarded("ncclCommInitRankConfig", [&] {
    Id id;
    memcpy(&id, &commId, sizeof id);
    return init_rank(comm, nranks, id, rank, config, 0, "ncclCommInitRankConfig");
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  return guarded("ncclCommInitRank", [&] {
    Id id;
    memcpy(&id, &commId, sizeof id);
    return init_rank(comm, nranks, id, rank, nullptr, 0, "ncclCommInitRank");
  });
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ndev, const int* devlist) {
  return guarded("ncclCommInitAll", [&] {
    const char* op = "ncclCommInitAll";
    if (!comms) return refuse(raise(collHostErrorArgument, op, "comm is NULL"));
    if (ndev < 1 || ndev > kMaxRanks)
      return refuse(raise(collHostErrorArgument, op, format("ndev is %d, must be 1 to %d", ndev, kMaxRanks)));
    Id id;
    make_id(&id);
    group_start();
    for (int i = 0; i < ndev; ++i) init_rank(&comms[i], ndev, id, i, nullptr, devlist ? devlist[i] : i, op);
    ncclResult_t code = group_end(op);
    if (code) {
      Error error = last_error();
      for (int i = 0; i < ndev; ++i) {
        if (comms[i]) ncclCommAbort(comms[i]);
        comms[i] = nullptr;
      }
      raise(error);
    }
    return code;
  });
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  return guarded("ncclCommSplit", [&] {
    const char* op = "ncclCommSplit";
    if (!newcomm) return refuse(raise(collHostErrorArgument, op, "newcomm is NULL"));
    *newcomm = nullptr;
    ncclComm* p = checked(parent, op);
    if (!p) return refuse(last_error().code);
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
      return refuse(raise(collHostErrorArgument, op, format("color is %d, must be 0 or more, or NCCL_SPLIT_NOCOLOR (-1)", color)));
    Settings settings;
    ncclResult_t code = read_config(config, op, &settings);
    if (code) return refuse(code);
    if (color == NCCL_SPLIT_NOCOLOR) settings.blocking = true;  // the NULL that it gets must be there on return
    ncclComm* comm = fresh(-1, 0, p->device);
    // In a group the place is taken when the group ends: a group that is dropped must leave nothing
    // behind.
    SplitPlace early;
    if (!settings.blocking && !in_group()) early.take(p);
    return start(newcomm, comm, p, settings, op, [=](ncclComm* child) {
      SplitPlace place = early;
      place.take(p);
      uint64_t number = place.number;
      Use parent(p);
      Origin origin{p, {}, kSplit, number, now_ns()};
      std::vector<int>& members = origin.members;
      int rank = p->rank;
      Id id = child_id(p, "split", number, color);
      Error error = in_turn(p, place.ticket, [&] {
        Error broken = p->why_broken();
        if (broken && broken.kind != collHostErrorAborted) return broken;
        return exchange_colors(p, color, key, number, &members);
      });
      if (error || members.empty()) {
        error.rank = rank;
        return error;
      }
      child->size = static_cast<int>(members.size());
      child->rank = static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
      bootstrap(child, id, 0, op, origin, &error);
      return error;
    });
  });
}

ncclResult_t ncclCommShrink(ncclComm_t parent, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm,
                            ncclConfig_t* config, int shrinkFlags) {
  return guarded("ncclCommShrink", [&] {
    const char* op = "ncclCommShrink";
    if (!newcomm) return refuse(raise(collHostErrorArgument, op, "newcomm is NULL"));
    *newcomm = nullptr;
    ncclComm* p = checked(parent, op);
    if (!p) return refuse(last_error().code);
    if (!excludeRanksList || excludeRanksCount < 1 || excludeRanksCount >= p->size)
      return refuse(raise(collHostErrorArgument, op,
                          format("excludeRanksCount is %d, must be 1 to %d, and the list not NULL", excludeRanksCount, p->size - 1)));
    if (shrinkFlags != NCCL_SHRINK_DEFAULT && shrinkFlags != NCCL_SHRINK_ABORT)
      return refuse(raise(collHostErrorArgument, op, format("shrinkFlags is %d", shrinkFlags)));
    Settings settings;
    ncclResult_t code = read_config(config, op, &settings);
    if (code) return refuse(code);
    std::vector<char> excluded(static_cast<size_t>(p->size), 0);
    for (int i = 0; i < excludeRanksCount; ++i) {
      int r = excludeRanksList[i];
      if (r < 0 || r >= p->size || r == p->rank)
        return refuse(raise(collHostErrorArgument, op,
                            format("excluded rank %d: must be a rank of the communicator (0 to %d), and not this one", r, p->size - 1)));
      excluded[static_cast<size_t>(r)] = 1;
    }
    Use use(p);
    int64_t began = now_ns();
    if (shrinkFlags == NCCL_SHRINK_ABORT) {
      p->abort_flag.store(true);
      Error ended = make_error(collHostErrorAborted, "shrunk with NCCL_SHRINK_ABORT");
      ended.op = op;
      ended.rank = p->rank;
      p->break_with(ended, kAborted);
      wake_waiters(p);
      wait_until_idle(p);
    } else {
      drain(p);
    }
    uint64_t number;
    {
      std::lock_guard<std::mutex> hold(order_lock());
      number = ++p->shrinks;
    }
    int rank = 0, size = 0;
    Origin origin{p, {}, kShrink, number, began};
    for (int r = 0; r < p->size; ++r) {
      if (excluded[static_cast<size_t>(r)]) continue;
      origin.members.push_back(r);
      if (r < p->rank) ++rank;
      ++size;
    }
    static const uint64_t kKey[2] = {0x736872696e6bull, 0};
    uint64_t options = siphash(kKey, excluded.data(), excluded.size());  // all must leave out the same ranks
    Id id = child_id(p, "shrink", number, 0);
    return start(newcomm, fresh(rank, size, p->device), p, settings, op, [id, options, op, origin](ncclComm* child) {
      Use parent(origin.parent);
      Error error;
      bootstrap(child, id, options, op, origin, &error);
      return error;
    });
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return guarded("ncclCommFinalize", [&] {
    ncclComm* c = checked(comm, "ncclCommFinalize");
    if (!c) return last_error().code;
    if (c->finalized) return raise(collHostErrorUsage, "ncclCommFinalize", "the communicator is finalized already");
    if (c->revoke_flag.load()) return raise(collHostErrorUsage, "ncclCommFinalize", "the communicator is revoked");
    c->finalized = true;
    drain(c);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return guarded("ncclCommDestroy", [&] {
    ncclComm* c = to_be_ended(comm, "ncclCommDestroy", false);
    if (!c) return last_error().code;
    drain(c);
    if (c->segment) c->publish_state(kLeft);
    c->magic = 0;
    release(c);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return guarded("ncclCommAbort", [&] {
    ncclComm* c = to_be_ended(comm, "ncclCommAbort", true);
    if (!c) return last_error().code;
    if (c->segment) c->publish_state(kAborted);
    wake_waiters(c);
    wait_until_idle(c);  // what waits in queues behind others fails when its turn comes, and touches nothing of the caller's
    c->magic = 0;
    release(c);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
  return guarded("ncclCommRevoke", [&] {
    const char* op = "ncclCommRevoke";
    ncclComm* c = checked(comm, op);
    if (!c) return last_error().code;
    if (revokeFlags != NCCL_REVOKE_DEFAULT) return raise(collHostErrorArgument, op, format("revokeFlags is %d, must be 0", revokeFlags));
    c->revoke_flag.store(true, std::memory_order_release);
    Error ended = make_error(collHostErrorAborted, "the communicator was revoked by this rank");
    ended.op = op;
    ended.rank = c->rank;
    c->break_with(ended, kRevoked);
    wake_waiters(c);
    wait_until_idle(c);
    return ncclSuccess;
  });
}

}  // extern "C"
