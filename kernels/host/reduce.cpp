// The host launcher of reduce_n, built once per instruction set (COLL_ISA names it). Everything but the one entry point has
// internal linkage: an inline function shared with another object would be linked from whichever set came first.
#include "coll/reduce.h"

#include "coll/nccl_abi.h"
#include "coll/ops.h"

#define COLL_PASTE2(a, b) a##b
#define COLL_PASTE(a, b) COLL_PASTE2(a, b)

namespace {

// Elements accumulated at a time: 4 KiB of fp32 stay in the first-level cache beside the sources' lines.
constexpr size_t kBlock = 1024;

template <class A>
A scalar_of(uint64_t bits) {
  A value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T, class Op, bool kScaled>
void reduce_typed(T* dst, const T* const* srcs, int n, size_t count, const coll_reduction* how) {
  typedef coll_element<T> E;
  typedef typename E::acc A;
  A acc[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    size_t len = count - start < kBlock ? count - start : kBlock;
    {
      const T* src = srcs[0] + start;
      if (kScaled) {
        A s = scalar_of<A>(how->scalars[0]);
        for (size_t i = 0; i < len; ++i) acc[i] = coll_mul(s, E::load(src[i]));
      } else {
        for (size_t i = 0; i < len; ++i) acc[i] = E::load(src[i]);
      }
    }
    for (int k = 1; k < n; ++k) {
      const T* src = srcs[k] + start;
      if (kScaled) {
        A s = scalar_of<A>(how->scalars[k]);
        for (size_t i = 0; i < len; ++i) acc[i] = Op::apply(acc[i], coll_mul(s, E::load(src[i])));
      } else {
        for (size_t i = 0; i < len; ++i) acc[i] = Op::apply(acc[i], E::load(src[i]));
      }
    }
    T* out = dst + start;
    if (how->average_over > 0) {
      int over = how->average_over;
      for (size_t i = 0; i < len; ++i) out[i] = E::store(E::average(acc[i], over));
    } else {
      for (size_t i = 0; i < len; ++i) out[i] = E::store(acc[i]);
    }
  }
}

// Two sources and no scaling is what two ranks do all day: no accumulator array, one pass. dst may be one of the sources
// as a whole, so every element is read before it is written, which `#pragma GCC ivdep` states to the vectoriser.
template <class T, class Op>
void reduce_pair(T* dst, const T* a, const T* b, size_t count, int over) {
  typedef coll_element<T> E;
  if (over > 0) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) dst[i] = E::store(E::average(Op::apply(E::load(a[i]), E::load(b[i])), over));
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) dst[i] = E::store(Op::apply(E::load(a[i]), E::load(b[i])));
  }
}

template <class T, class Op>
void reduce_op(void* dst, const void* const* srcs, int n, size_t count, const coll_reduction* how) {
  T* out = static_cast<T*>(dst);
  const T* const* in = reinterpret_cast<const T* const*>(srcs);
  if (how->scalars) {
    reduce_typed<T, Op, true>(out, in, n, count, how);
  } else if (n == 2) {
    reduce_pair<T, Op>(out, in[0], in[1], count, how->average_over);
  } else {
    reduce_typed<T, Op, false>(out, in, n, count, how);
  }
}

template <class T>
void reduce_type(void* dst, const void* const* srcs, int n, size_t count, const coll_reduction* how) {
  switch (how->op) {
    case ncclProd: reduce_op<T, coll_prod>(dst, srcs, n, count, how); break;
    case ncclMax: reduce_op<T, coll_max>(dst, srcs, n, count, how); break;
    case ncclMin: reduce_op<T, coll_min>(dst, srcs, n, count, how); break;
    default: reduce_op<T, coll_sum>(dst, srcs, n, count, how); break;
  }
}

}  // namespace

void COLL_PASTE(coll_reduce_n_, COLL_ISA)(void* dst, const void* const* srcs, int n, size_t count, int datatype,
                                          const coll_reduction* how) {
  switch (datatype) {
    case ncclInt8: reduce_type<int8_t>(dst, srcs, n, count, how); break;
    case ncclUint8: reduce_type<uint8_t>(dst, srcs, n, count, how); break;
    case ncclInt32: reduce_type<int32_t>(dst, srcs, n, count, how); break;
    case ncclUint32: reduce_type<uint32_t>(dst, srcs, n, count, how); break;
    case ncclInt64: reduce_type<int64_t>(dst, srcs, n, count, how); break;
    case ncclUint64: reduce_type<uint64_t>(dst, srcs, n, count, how); break;
    case ncclFloat16: reduce_type<coll_fp16>(dst, srcs, n, count, how); break;
    case ncclFloat32: reduce_type<float>(dst, srcs, n, count, how); break;
    case ncclFloat64: reduce_type<double>(dst, srcs, n, count, how); break;
    case ncclBfloat16: reduce_type<coll_bf16>(dst, srcs, n, count, how); break;
    case ncclFloat8e4m3: reduce_type<coll_e4m3>(dst, srcs, n, count, how); break;
    case ncclFloat8e5m2: reduce_type<coll_e5m2>(dst, srcs, n, count, how); break;
    default: break;  // the caller has checked the datatype
  }
}
