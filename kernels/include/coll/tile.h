// Tiles, and the shape of every sum over them: the same for any number of threads, blocks and
// instruction sets.
//
// In a tile, value i goes to lane i % COLL_LANES; a lane adds its values in order; then the lanes
// are folded in halves: lane l takes lane l + 512, then l + 256, down to 1. The tiles' sums, as
// doubles, are added up by the same rule, as if they were the values of one long tile. A lane that
// has no value is 0, which changes no sum of squares.
#ifndef COLL_TILE_H_
#define COLL_TILE_H_

#include "kernel_abi.h"
#include "mutant.h"
#include "numeric.h"
#include "ops.h"

// Bytes of an element.
COLL_FN int coll_width(int type) {
  switch (type) {
    case COLL_I8: case COLL_U8: case COLL_E4M3: case COLL_E5M2: return 1;
    case COLL_F16: case COLL_BF16: return 2;
    case COLL_I32: case COLL_U32: case COLL_F32: return 4;
    case COLL_I64: case COLL_U64: case COLL_F64: return 8;
    default: return type - COLL_OPAQUE;
  }
}

COLL_FN int64_t coll_tiles_of(int64_t count) { return (count + COLL_TILE - 1) / COLL_TILE; }

// The tensor (the row of a table) that a tile belongs to: the last one whose first tile is not
// behind it. Empty ones never are.
template <class Row>
COLL_FN int64_t coll_tensor_of(const Row* tensors, int64_t count, int64_t tile) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    int64_t middle = low + (high - low + 1) / 2;
    if (tensors[middle].first_tile <= tile) low = middle;
    else high = middle - 1;
  }
  return low;
}

// The least magnitude that is not finite once it has been rounded to a type. fp8 saturates, so
// there only inf and NaN count.
COLL_FN double coll_limit(int type) {
  switch (type) {
    case COLL_F16: return 65520.0;
    case COLL_BF16: return 0x1.ffp127;
    case COLL_F32: return 0x1.ffffffp127;  // infinity as a float
    default: return (double)coll_bits_float(0x7f800000u);
  }
}

COLL_FN float coll_magnitude(float x) { return coll_bits_float(coll_float_bits(x) & 0x7fffffffu); }
COLL_FN double coll_magnitude(double x) { return x < 0 ? -x : x; }

// 1 where a value is NaN or at least as large as the limit.
template <class A>
COLL_FN uint32_t coll_is_bad(A x, A limit) { return coll_magnitude(x) < limit ? 0u : 1u; }

#endif
