// Operations as the caller asked for them, and the tables of kinds, dtypes and reductions.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

#include "coll/flight_record.h"
#include "coll/host_abi.h"

enum class CollKind : int { AllReduce, ReduceScatter, AllGather, Broadcast, Reduce, AllToAll, Gather, Scatter, Send, Recv };

namespace coll {

const char* kind_name(CollKind kind);  // "ncclAllReduce"
size_t type_size(ncclDataType_t type);
const char* type_name(int type);
const char* op_name(int op);
// "float32", or "int16 (sent as uint8)" for a labelled type.
std::string type_text(int type, const char* label);

// A reduction as the caller named it; pre-mul-sum carries its scalar, in the bits of the
// accumulator's type.
struct Reduction {
  int op = ncclSum;
  bool premul = false;
  uint64_t scalar = 0;
  const void* scalar_at = nullptr;  // ncclScalarDevice: read when the operation starts
};

struct Op {
  CollKind kind;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;  // as in NCCL: per rank for reduce-scatter, all-gather, all-to-all, gather, scatter
  ncclDataType_t type = ncclInt8;
  // An all-reduce may multiply its data and round it to another type on its way into the slots: to
  // this one.
  int wire = -1;
  double wire_scale = 1;
  // Of a reduction: the statistics of this rank's slice of the result are added to this.
  collHostShare_t* share = nullptr;
  Reduction reduction;
  int root = 0;      // or the peer of send/recv
  ncclComm* comm = nullptr;
  uint64_t seq = 0;  // number of the collective on its communicator
  uint64_t step = 0;                 // of collHostCommSetStep
  // A comparison of what the ranks send and receive, which so many transfers of its group wait for.
  bool compares = false;
  size_t compared = 0;
  const char* op_label = nullptr;    // interned; the labels of the last
  const char* type_label = nullptr;  // collHostLabel
  uint32_t tag = 0;                  // of collHostTag
  int64_t header[collHostHeaderWords] = {};  // of a send: collHostSetHeader
  collFlightRecord_t* flight = nullptr;  // where its start and its end are recorded, as this number
  uint64_t flight_number = 0;
  void record_start() const { if (flight) collFlightStart(flight, flight_number); }
  void record_end(ncclResult_t code) const { if (flight) collFlightEnd(flight, flight_number, code); }
  const char* name() const { return op_label ? op_label : kind_name(kind); }
  size_t bytes() const { return count * type_size(type); }
  ncclDataType_t slot_type() const { return wire < 0 ? type : static_cast<ncclDataType_t>(wire); }
};

// A reduction that ncclRedOpCreatePreMulSum has made; `used` is false for a free place.
struct PreMulOp {
  bool used = false;
  ncclDataType_t type;
  Reduction reduction;
};

// Bits of a scalar of `type` as its accumulator's (float, double or a 64-bit integer).
uint64_t scalar_bits(const void* scalar, ncclDataType_t type);

}  // namespace coll
