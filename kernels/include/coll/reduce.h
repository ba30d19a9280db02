// reduce_n: n arrays into one, in the order of the sources, one rounding at the end.
#ifndef COLL_REDUCE_H_
#define COLL_REDUCE_H_

#include <stddef.h>
#include <stdint.h>

// How to reduce. `average_over` > 0 divides the sum by that number. `scalars`, where not NULL, holds n values of the
// accumulator's type by which each source is multiplied first (NCCL's pre-mul-sum): as bits of a float, a double or a
// 64-bit integer in each uint64_t.
struct coll_reduction {
  int op;            // ncclSum, ncclProd, ncclMax, ncclMin
  int average_over;
  const uint64_t* scalars;
};

// dst[i] = reduce(srcs[0][i], srcs[1][i], ... srcs[n-1][i]) for `count` elements of an NCCL datatype, n >= 1.
// dst may be the same array as any source, but must not overlap one in part.
typedef void (*coll_reduce_n_fn)(void* dst, const void* const* srcs, int n, size_t count, int datatype,
                                 const coll_reduction* how);

// One of each per instruction set; collReduceN picks by what the processor has. Rounding is the same in all.
void coll_reduce_n_baseline(void*, const void* const*, int, size_t, int, const coll_reduction*);
void coll_reduce_n_avx2(void*, const void* const*, int, size_t, int, const coll_reduction*);
void coll_reduce_n_avx512(void*, const void* const*, int, size_t, int, const coll_reduction*);

#endif
