// The exported functions that start operations, ncclAllReduce and the others. Arguments are checked
// here, so that a wrong one is an error and never a crash. comm.h has the path of a call from here
// to the bytes.
#include <string.h>

#include <set>
#include <utility>

#include "coll/ops.h"
#include "comm.h"
#include "group.h"
#include "operation.h"
#include "queue.h"
#include "system.h"
#include "transfer.h"

namespace coll {

const char* kind_name(CollKind kind) {
  static const char* const kNames[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclReduce",
                                       "ncclAlltoAll", "ncclGather", "ncclScatter", "ncclSend", "ncclRecv"};
  unsigned i = static_cast<unsigned>(kind);
  return i < sizeof kNames / sizeof *kNames ? kNames[i] : "?";
}

size_t type_size(ncclDataType_t type) {
  static const size_t kSizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[type];
}

const char* type_name(int type) {
  static const char* const kNames[ncclNumTypes] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16",
                                                   "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return type >= 0 && type < ncclNumTypes ? kNames[type] : "?";
}

const char* op_name(int op) {
  static const char* const kNames[] = {"sum", "prod", "max", "min", "avg", "premul_sum"};
  return op >= 0 && op <= ncclNumOps ? kNames[op] : "?";
}

std::string type_text(int type, const char* label) {
  if (!label || !*label || !strcmp(label, type_name(type))) return type_name(type);
  return std::string(label) + " (sent as " + type_name(type) + ")";
}

uint64_t scalar_bits(const void* scalar, ncclDataType_t type) {
  uint64_t bits = 0;
  auto as_float = [&](float value) { memcpy(&bits, &value, sizeof value); };
  uint16_t half;
  uint8_t byte;
  memcpy(&half, scalar, type_size(type) >= 2 ? 2 : 1);
  memcpy(&byte, scalar, 1);
  switch (type) {
    case ncclFloat16: as_float(coll_fp16_to_float(half)); break;
    case ncclBfloat16: as_float(coll_bf16_to_float(half)); break;
    case ncclFloat8e4m3: as_float(coll_e4m3_to_float(byte)); break;
    case ncclFloat8e5m2: as_float(coll_e5m2_to_float(byte)); break;
    default: memcpy(&bits, scalar, type_size(type)); break;  // its own accumulator
  }
  return bits;
}

namespace {

// What is set for a thread's next call.
struct NextCall {
  const char* op_label = nullptr;
  const char* type_label = nullptr;
  collFlightRecord_t* flight = nullptr;
  int64_t header[collHostHeaderWords] = {};
  uint32_t tag = 0;
};
thread_local NextCall t_next;

const char* interned(const char* text) {
  if (!text || !*text) return nullptr;
  std::lock_guard<std::mutex> hold(tables_lock());
  static auto* texts = new std::set<std::string>;  // labels are few, and pointers to them live long
  return texts->insert(text).first->c_str();
}

struct Wire {
  ncclDataType_t type;
  double scale;
};

struct Share {
  collHostShare_t* at;
};

bool floating(ncclDataType_t t) { return t == ncclFloat16 || t == ncclFloat32 || t == ncclFloat64 || t >= ncclBfloat16; }

ncclResult_t call(CollKind kind, const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                  ncclComm_t comm, cudaStream_t stream, const Wire* wire = nullptr, const Share* share = nullptr,
                  const size_t* compared = nullptr) noexcept {
  const char* name = kind_name(kind);
  const NextCall set = std::exchange(t_next, NextCall());
  if (set.op_label) name = set.op_label;
  return guarded(name, [&] {
    ncclComm* c = checked(comm, name);
    if (!c) return refuse(last_error().code);
    auto wrong = [&](std::string text) {
      Error error = make_error(collHostErrorArgument, std::move(text));
      error.op = name;
      error.rank = c->rank;
      return refuse(raise(error));
    };
    if (c->finalized) {
      Error error = make_error(collHostErrorUsage, "the communicator is finalized");
      error.op = name;
      error.rank = c->rank;
      return refuse(raise(error));
    }
    if (static_cast<unsigned>(type) >= ncclNumTypes) return wrong(format("datatype %d is not known", static_cast<int>(type)));
    Op o;
    o.kind = kind;
    o.send = send;
    o.recv = recv;
    if (compared) {
      o.compares = true;
      o.compared = *compared;
      count = COLL_HOST_PARTS_BYTES(c->size);
    }
    o.count = count;
    o.type = type;
    o.root = root;
    o.comm = c;
    o.step = c->step.load(std::memory_order_relaxed);
    o.op_label = set.op_label;
    o.type_label = set.type_label;
    o.tag = set.tag;
    memcpy(o.header, set.header, sizeof o.header);
    o.flight = set.flight;
    o.flight_number = set.flight ? set.flight->number : 0;
    if (root < 0 || root >= c->size)
      return wrong(format("%s is %d, must be 0 to %d", kind == CollKind::Send || kind == CollKind::Recv ? "peer" : "root", root,
                          c->size - 1));
    constexpr size_t kAddressSpace = size_t{1} << 56;  // bytes of a process; transfer_key relies on it
    constexpr size_t kNeverTooMuch = kAddressSpace / 8 / kMaxRanks;  // spares a small call two divisions
    if (count > kNeverTooMuch && count >= kAddressSpace / type_size(type) / static_cast<size_t>(c->size))
      return wrong(format("count is %zu, more than an address space holds", count));

    bool is_root = c->rank == root;
    bool gives = kind != CollKind::Recv && (!(kind == CollKind::Broadcast || kind == CollKind::Scatter) || is_root);
    bool takes = kind != CollKind::Send && (!(kind == CollKind::Reduce || kind == CollKind::Gather) || is_root);
    if (count && gives && !send) return wrong("sendbuff is NULL");
    if (count && takes && !recv) return wrong("recvbuff is NULL");

    if (kind == CollKind::AllReduce || kind == CollKind::ReduceScatter || kind == CollKind::Reduce) {
      int number = static_cast<int>(op);
      if (number >= 0 && number < ncclNumOps) {
        o.reduction.op = number;
      } else {
        std::lock_guard<std::mutex> hold(c->state_lock);
        size_t index = static_cast<size_t>(number) - ncclNumOps;
        if (number < 0 || index >= c->premul.size() || !c->premul[index].used)
          return wrong(format("op %d is not known to this communicator", number));
        if (c->premul[index].type != type)
          return wrong(format("the pre-mul-sum op was made for %s, the data is %s", type_name(c->premul[index].type), type_name(type)));
        o.reduction = c->premul[index].reduction;
      }
    }
    if (wire) {
      if (type != ncclFloat32 && type != ncclFloat64) return wrong(format("the data is %s, must be float32 or float64", type_name(type)));
      if (static_cast<unsigned>(wire->type) >= ncclNumTypes || !floating(wire->type))
        return wrong(format("wire is datatype %d, must be a floating one", static_cast<int>(wire->type)));
      if (o.reduction.premul) return wrong("a pre-mul-sum can't be cast on the way: give its factor as the scale");
      if (reinterpret_cast<uintptr_t>(send) % type_size(type)) return wrong(format("sendbuff is not aligned to %s", type_name(type)));
      o.wire = wire->type;
      o.wire_scale = wire->scale;
    }
    if (share) {
      if (!floating(type)) return wrong(format("the data is %s, must be a floating type: others have no sum of squares", type_name(type)));
      if (!share->at || reinterpret_cast<uintptr_t>(share->at) % alignof(collHostShare_t))
        return wrong(format("share is %p, must be the address of two doubles", static_cast<void*>(share->at)));
      o.share = share->at;
    }
    if (stream && !queue_alive(reinterpret_cast<collHostQueue_t>(stream)))
      return wrong(format("stream %p is no queue of the host engine; give NULL (0), or a collHostQueue_t", static_cast<void*>(stream)));
    return submit(o, stream);
  });
}

}  // namespace
}  // namespace coll

using namespace coll;

extern "C" {

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(CollKind::AllReduce, send, recv, count, type, op, 0, comm, stream);
}
ncclResult_t collHostAllReduceCast(const void* send, void* recv, size_t count, ncclDataType_t type, ncclDataType_t wire,
                                   double scale, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  Wire as = {wire, scale};
  return call(CollKind::AllReduce, send, recv, count, type, op, 0, comm, stream, &as);
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return call(CollKind::ReduceScatter, send, recv, count, type, op, 0, comm, stream);
}
ncclResult_t collHostAllReduceShare(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                    collHostShare_t* share, ncclComm_t comm, cudaStream_t stream) {
  Share into = {share};
  return call(CollKind::AllReduce, send, recv, count, type, op, 0, comm, stream, nullptr, &into);
}
ncclResult_t collHostReduceScatterShare(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                        collHostShare_t* share, ncclComm_t comm, cudaStream_t stream) {
  Share into = {share};
  return call(CollKind::ReduceScatter, send, recv, count, type, op, 0, comm, stream, nullptr, &into);
}
ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(CollKind::AllGather, send, recv, count, type, ncclSum, 0, comm, stream);
}
ncclResult_t collHostCompareParts(const void* own, void* all, size_t transfers, ncclComm_t comm, cudaStream_t stream) {
  return call(CollKind::AllGather, own, all, 0, ncclUint8, ncclSum, 0, comm, stream, nullptr, nullptr, &transfers);
}
ncclResult_t collHostCheckParts(const void* all, int nranks, int rank) {
  const char* op = "collHostCheckParts";
  return guarded(op, [&] {
    if (!all || nranks < 1 || nranks > kMaxRanks || rank < 0 || rank >= nranks)
      return raise(collHostErrorArgument, op, "all is NULL, or nranks or rank can't be");
    Error error = compare_parts(all, nranks, rank);
    error.rank = rank;
    return error ? raise(error) : ncclSuccess;
  });
}
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(CollKind::Broadcast, send, recv, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return call(CollKind::Broadcast, buff, buff, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return call(CollKind::Reduce, send, recv, count, type, op, root, comm, stream);
}
ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  return call(CollKind::AllToAll, send, recv, count, type, ncclSum, 0, comm, stream);
}
ncclResult_t ncclGather(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return call(CollKind::Gather, send, recv, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclScatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  return call(CollKind::Scatter, send, recv, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return call(CollKind::Send, send, nullptr, count, type, ncclSum, peer, comm, stream);
}
ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return call(CollKind::Recv, nullptr, recv, count, type, ncclSum, peer, comm, stream);
}

ncclResult_t ncclGroupStart(void) { return group_start(); }
ncclResult_t ncclGroupEnd(void) {
  return guarded("ncclGroupEnd", [&] { return group_end("ncclGroupEnd"); });
}
ncclResult_t collHostFlightRecord(collFlightRecord_t* record) {
  t_next.flight = record;
  return ncclSuccess;
}

ncclResult_t collHostTag(uint32_t tag) {
  t_next.tag = tag;
  return ncclSuccess;
}

ncclResult_t collHostSetHeader(const int64_t header[collHostHeaderWords]) {
  memcpy(t_next.header, header, sizeof t_next.header);
  return ncclSuccess;
}

ncclResult_t collHostLabel(const char* op, const char* datatype) {
  return guarded("collHostLabel", [&] {
    t_next.op_label = interned(op);
    t_next.type_label = interned(datatype);
    return ncclSuccess;
  });
}
ncclResult_t collHostGroupCancel(void) {
  return guarded("collHostGroupCancel", [&] {
    group_cancel();
    return ncclSuccess;
  });
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                                      ncclComm_t comm) {
  return guarded("ncclRedOpCreatePreMulSum", [&] {
    const char* name = "ncclRedOpCreatePreMulSum";
    ncclComm* c = checked(comm, name);
    if (!c) return last_error().code;
    if (!op || !scalar) return raise(collHostErrorArgument, name, "op or scalar is NULL");
    if (static_cast<unsigned>(type) >= ncclNumTypes) return raise(collHostErrorArgument, name, format("datatype %d is not known", static_cast<int>(type)));
    if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate)
      return raise(collHostErrorArgument, name, format("residence %d is not known", static_cast<int>(residence)));
    PreMulOp made;
    made.used = true;
    made.type = type;
    made.reduction.premul = true;
    if (residence == ncclScalarHostImmediate) made.reduction.scalar = scalar_bits(scalar, type);
    else made.reduction.scalar_at = scalar;
    std::lock_guard<std::mutex> hold(c->state_lock);
    size_t index = 0;
    while (index < c->premul.size() && c->premul[index].used) ++index;
    if (index == c->premul.size()) c->premul.emplace_back();
    c->premul[index] = made;
    *op = static_cast<ncclRedOp_t>(ncclNumOps + index);
    return ncclSuccess;
  });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return guarded("ncclRedOpDestroy", [&] {
    const char* name = "ncclRedOpDestroy";
    ncclComm* c = checked(comm, name);
    if (!c) return last_error().code;
    std::lock_guard<std::mutex> hold(c->state_lock);
    size_t index = static_cast<size_t>(op) - ncclNumOps;
    if (static_cast<int>(op) < ncclNumOps || index >= c->premul.size() || !c->premul[index].used)
      return raise(collHostErrorArgument, name, format("op %d was not made by ncclRedOpCreatePreMulSum", static_cast<int>(op)));
    c->premul[index].used = false;
    return ncclSuccess;
  });
}

}  // extern "C"
