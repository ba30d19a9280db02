// Exported functions that query or set something.
#include <string.h>

#include <new>

#include "bootstrap.h"
#include "comm.h"
#include "heap.h"
#include "memory.h"
#include "order.h"
#include "peers.h"
#include "progress.h"
#include "system.h"

using namespace coll;

namespace {
ncclResult_t add_registration(const char* op, ncclComm_t comm, void* buff, size_t size, void** handle) noexcept {
  return guarded(op, [&] {
    ncclComm* c = checked(comm, op);
    if (!c) return last_error().code;
    if (!handle) return raise(collHostErrorArgument, op, "the handle's address is NULL");
    if (!buff && size) return raise(collHostErrorArgument, op, "buff is NULL");
    auto record = std::make_unique<Registration>(Registration{buff});
    std::lock_guard<std::mutex> hold(c->state_lock);
    *handle = record.get();
    c->registered[*handle] = std::move(record);
    return ncclSuccess;
  });
}

ncclResult_t remove_registration(const char* op, ncclComm_t comm, void* handle) noexcept {
  return guarded(op, [&] {
    ncclComm* c = checked(comm, op);
    if (!c) return last_error().code;
    std::lock_guard<std::mutex> hold(c->state_lock);
    auto found = c->registered.find(handle);
    if (found == c->registered.end())
      return raise(collHostErrorArgument, op, format("%p is no handle of this communicator", handle));
    c->registered.erase(found);
    return ncclSuccess;
  });
}

template <class T>
ncclResult_t answer(const char* op, ncclComm_t comm, T* out, T ncclComm::*member) noexcept {
  return guarded(op, [&] {
    ncclComm* c = checked(comm, op);
    if (!c) return last_error().code;
    if (!out) return raise(collHostErrorArgument, op, "the result's address is NULL");
    *out = c->*member;
    return ncclSuccess;
  });
}
}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return raise(collHostErrorArgument, "ncclGetVersion", "version is NULL");
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "operation in progress";
    case ncclTimeout: return "operation timed out";
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) { return last_error_text(); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  return guarded("ncclCommGetAsyncError", [&] {
    const char* op = "ncclCommGetAsyncError";
    if (!asyncError) return raise(collHostErrorArgument, op, "asyncError is NULL");
    if (comm && comm->magic == kCommMagic && comm->forks == fork_generation() && !comm->ready.load(std::memory_order_acquire)) {
      *asyncError = ncclInProgress;
      return ncclSuccess;
    }
    ncclComm* c = comm && comm->magic == kCommMagic && comm->forks == fork_generation() ? comm : checked(comm, op);
    if (!c) return last_error().code;
    std::lock_guard<std::mutex> hold(c->state_lock);
    *asyncError = c->broken.code;
    return ncclSuccess;
  });
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return answer("ncclCommCount", comm, count, &ncclComm::size); }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return answer("ncclCommCuDevice", comm, device, &ncclComm::device);
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return answer("ncclCommUserRank", comm, rank, &ncclComm::rank); }

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  return guarded("ncclMemAlloc", [&] {
    if (!ptr) return raise(collHostErrorArgument, "ncclMemAlloc", "ptr is NULL");
    return memory_allocate(ptr, size);
  });
}
ncclResult_t ncclMemFree(void* ptr) {
  return guarded("ncclMemFree", [&] { return memory_free(ptr); });
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  return add_registration("ncclCommRegister", comm, buff, size, handle);
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return remove_registration("ncclCommDeregister", comm, handle);
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int) {
  return add_registration("ncclCommWindowRegister", comm, buff, size, reinterpret_cast<void**>(win));
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  return remove_registration("ncclCommWindowDeregister", comm, win);
}
// ---- Beside NCCL's

ncclResult_t collHostGetError(ncclComm_t comm, collHostErrorInfo_t* info) {
  return guarded("collHostGetError", [&] {
    if (!info || !info->size) return raise(collHostErrorArgument, "collHostGetError", "info is NULL or has no size");
    if (!comm) {
      fill(last_error(), info);
      return ncclSuccess;
    }
    ncclComm* c = checked(comm, "collHostGetError");
    if (!c) return last_error().code;
    std::lock_guard<std::mutex> hold(c->state_lock);
    fill(c->broken, info);
    return ncclSuccess;
  });
}

uint64_t collHostFreeMemory(void) {
  try {
    return available_memory();
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

ncclResult_t collHostCommPending(ncclComm_t comm, collHostErrorInfo_t* info) {
  return guarded("collHostCommPending", [&] {
    ncclComm* c = checked(comm, "collHostCommPending");
    if (!c) return last_error().code;
    if (!info || !info->size) return raise(collHostErrorArgument, "collHostCommPending", "info is NULL or has no size");
    Error now;
    now.rank = c->rank;
    const char* op = c->current_op.load(std::memory_order_acquire);
    if (op) {
      now.op = op;
      now.seq = c->current_seq.load(std::memory_order_relaxed);
      now.bytes = c->current_bytes.load(std::memory_order_relaxed);
      now.tag = c->current_tag.load(std::memory_order_relaxed);
      uint64_t goal = c->current_goal.load(std::memory_order_relaxed);
      int peer = c->current_peer.load(std::memory_order_relaxed);
      if (peer >= 0) now.peers.push_back(peer);
      for (int r = 0; goal && r < c->size; ++r)
        if (c->segment->rank(r)->posted.load() < goal) now.peers.push_back(r);
      now.text = "waiting for " + rank_list(now.peers);
    }
    fill(now, info);
    return ncclSuccess;
  });
}

ncclResult_t collHostCommProbe(ncclComm_t comm, int peer, int* waiting) {
  return guarded("collHostCommProbe", [&] {
    const char* op = "collHostCommProbe";
    ncclComm* c = checked(comm, op);
    if (!c) return last_error().code;
    if (!waiting) return raise(collHostErrorArgument, op, "waiting is NULL");
    if (peer < 0 || peer >= c->size) return raise(collHostErrorArgument, op, format("rank %d of %d", peer, c->size));
    const Channel* channel = c->segment->channel(peer, c->rank);
    // Pages of a channel that nobody has claimed read as zeros: the segment's file has its full size.
    bool is_out = c->segment->rank(peer)->state.load(std::memory_order_acquire) != kAlive;
    *waiting = is_out ||
               channel->sender.transfer.load(std::memory_order_acquire) > channel->receiver.transfer.load(std::memory_order_acquire);
    return ncclSuccess;
  });
}

ncclResult_t collHostCommPeek(ncclComm_t comm, int peer, int64_t header[collHostHeaderWords]) {
  return guarded("collHostCommPeek", [&] {
    const char* op = "collHostCommPeek";
    ncclComm* c = checked(comm, op);
    if (!c) return last_error().code;
    if (!header) return raise(collHostErrorArgument, op, "header is NULL");
    if (peer < 0 || peer >= c->size || peer == c->rank)
      return raise(collHostErrorArgument, op, format("rank %d of %d, and this one is %d", peer, c->size, c->rank));
    const Channel* channel = c->segment->channel(peer, c->rank);
    auto next = [&] { return channel->receiver.transfer.load(std::memory_order_acquire) + 1; };
    auto has_begun = [&] { return channel->sender.transfer.load(std::memory_order_acquire) >= next(); };
    if (!has_begun()) {
      uint64_t ticket;
      {
        std::lock_guard<std::mutex> hold(order_lock());
        ticket = take_ticket(c);
      }
      Error error = in_turn(c, ticket, [&] {
        if (c->is_broken) return c->why_broken();
        c->current_bytes.store(0, std::memory_order_relaxed);
        c->current_goal.store(0, std::memory_order_relaxed);
        c->current_peer.store(peer, std::memory_order_relaxed);
        c->current_tag.store(0, std::memory_order_relaxed);
        c->current_op.store("ncclRecv", std::memory_order_release);
        return wait_until(*c, false, [&](int r) { return r == peer && !has_begun(); });
      });
      if (error) {
        error.op = "ncclRecv";
        error.rank = c->rank;
        return raise(error);
      }
    }
    // A sender that is out has given its message up: it ends no send before this rank has announced the receive.
    if (c->segment->rank(peer)->state.load(std::memory_order_acquire) != kAlive) {
      Error error = remote_error(*c, failed_peers(*c, false), {peer});
      error.op = "ncclRecv";
      error.rank = c->rank;
      return raise(error);
    }
    memcpy(header, channel->sender.record[next() & 1].header, sizeof(int64_t) * collHostHeaderWords);
    return ncclSuccess;
  });
}

ncclResult_t collHostCommSetTimeout(ncclComm_t comm, int64_t timeout_ms) {
  return guarded("collHostCommSetTimeout", [&] {
    ncclComm* c = checked(comm, "collHostCommSetTimeout");
    if (!c) return last_error().code;
    int64_t ns = timeout_ms > 0 && timeout_ms < INT64_MAX / 2000000 ? timeout_ms * 1000000 : 0;
    c->timeout_ns.store(ns, std::memory_order_relaxed);
    return ncclSuccess;
  });
}

ncclResult_t collHostCommSetStep(ncclComm_t comm, uint64_t step) {
  return guarded("collHostCommSetStep", [&] {
    ncclComm* c = checked(comm, "collHostCommSetStep");
    if (!c) return last_error().code;
    c->step.store(step, std::memory_order_relaxed);
    return ncclSuccess;
  });
}

ncclResult_t collHostSetInitTimeout(int64_t timeout_ms) {
  set_init_timeout(timeout_ms);
  return ncclSuccess;
}

ncclResult_t collHostSetInterruptCheck(int (*check)(void)) {
  set_interrupt_check(check);
  return ncclSuccess;
}

ncclResult_t collHostCommSequence(ncclComm_t comm, uint64_t* sequence) {
  return guarded("collHostCommSequence", [&] {
    ncclComm* c = checked(comm, "collHostCommSequence");
    if (!c) return last_error().code;
    if (!sequence) return raise(collHostErrorArgument, "collHostCommSequence", "sequence is NULL");
    *sequence = c->sequence.load(std::memory_order_relaxed) + c->short_calls.load(std::memory_order_relaxed);
    return ncclSuccess;
  });
}

ncclResult_t collHostCommChunkBytes(ncclComm_t comm, size_t* nbytes) {
  return guarded("collHostCommChunkBytes", [&] {
    ncclComm* c = checked(comm, "collHostCommChunkBytes");
    if (!c) return last_error().code;
    if (!nbytes) return raise(collHostErrorArgument, "collHostCommChunkBytes", "nbytes is NULL");
    *nbytes = c->segment->header()->chunk_bytes;
    return ncclSuccess;
  });
}

ncclResult_t collHostMemoryShared(const void* address, size_t nbytes, int* shared) {
  return guarded("collHostMemoryShared", [&] {
    if (!shared) return raise(collHostErrorArgument, "collHostMemoryShared", "shared is NULL");
    *shared = nbytes && shared_place(address, nbytes).extent.nbytes;
    return ncclSuccess;
  });
}

ncclResult_t collHostMemoryInUse(uint64_t* nbytes) {
  if (!nbytes) return raise(collHostErrorArgument, "collHostMemoryInUse", "nbytes is NULL");
  *nbytes = memory_in_use();
  return ncclSuccess;
}

}  // extern "C"
