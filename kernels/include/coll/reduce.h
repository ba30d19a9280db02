// reduce_n: n arrays into one, in the order of the sources, one rounding at the end.
#ifndef COLL_REDUCE_H_
#define COLL_REDUCE_H_

#include "tile.h"

// Values pass through fp32, or fp64 where either side is fp64. Integers stay what they are.
COLL_FN bool coll_reduce_wide(const coll_reduce_args& a) { return a.source_type == COLL_F64 || a.out_type == COLL_F64; }

// By how much a sum is divided; 0: not at all.
COLL_FN int64_t coll_reduce_over(const coll_reduce_args& a) { return a.op == COLL_AVG ? a.n : 0; }

// The scale as the kernel uses it, which may be known only on the device.
COLL_FN double coll_reduce_scale(const coll_reduce_args& a) { return a.scale_at ? a.scale * (double)*a.scale_at : a.scale; }

#if !defined(__CUDACC__)
// ---- Entry points for the host engine: the same code reduces the chunks of a collective.

// Statistics of a result's elements: the sum of the squares of the values before their last
// rounding, and the number of non-finite ones.
struct coll_share {
  double sum_of_squares;
  double nonfinite;  // a whole number
};

// Options of a reduction. `average_over` > 0 divides the sum by that number. `scalars`, where not NULL,
// holds n values of the accumulator's type by which the sources of a sum are multiplied first
// (NCCL's pre-mul-sum): as bits of a float, a double or a 64-bit integer in each uint64_t. The
// result is also written to `copies`, each of which may be one of the sources. `past_caches`: with
// stores that leave the caches alone, where there are such. To `share`, where not NULL, the
// result's statistics are added, in rows of 512 elements from the first one on; of floating types
// only.
struct coll_reduction {
  int op;            // ncclSum, ncclProd, ncclMax, ncclMin
  int average_over;
  const uint64_t* scalars;
  void* const* copies;
  int copy_count;
  int past_caches;
  int out_type;      // another one than the sources' for floating types only
  coll_share* share;
};

// dst[i] = reduce(srcs[0][i], srcs[1][i], ... srcs[n-1][i]) for `count` elements of an NCCL
// datatype, n >= 1. dst may be the same array as any source, but must not overlap one in part.
typedef void (*coll_reduce_n_fn)(void* dst, const void* const* srcs, int n, size_t count, int datatype,
                                 const coll_reduction* how);

// One of each per instruction set. Rounding is the same in all.
void coll_reduce_n_baseline(void*, const void* const*, int, size_t, int, const coll_reduction*);
void coll_reduce_n_avx2(void*, const void* const*, int, size_t, int, const coll_reduction*);
void coll_reduce_n_avx512(void*, const void* const*, int, size_t, int, const coll_reduction*);

// memcpy with stores past the caches: for what is larger than they are, and not read soon.
typedef void (*coll_copy_past_fn)(void* to, const void* from, size_t nbytes);
void coll_copy_past_baseline(void*, const void*, size_t);
void coll_copy_past_avx2(void*, const void*, size_t);
void coll_copy_past_avx512(void*, const void*, size_t);
#endif

#endif
