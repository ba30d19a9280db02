// Common parts of the CUDA launchers of pack and unpack: packs of a tile to and from registers,
// statistics, plain copies.
#ifndef COLL_CAST_CUH_
#define COLL_CAST_CUH_

#include "coll/cast.h"
#include "tile.cuh"

// The packs of one column of a tile, COLL_ROWS of them: all loads are on their way before the first
// value is used. A pack that the tensor's end cuts off, and one at an address that no single load
// takes, goes element by element.
template <class S, class A>
static __device__ __forceinline__ void load_column(A (*values)[COLL_PACK], const char* from, int first, int count, A scale) {
  const S* src = (const S*)from;
  if (COLL_MUTANT(4, (uint64_t)src % sizeof(coll_pack_of<S>), 0) == 0 && first + (COLL_ROWS - 1) * COLL_LANES + COLL_PACK <= count) {
    coll_pack_of<S> packs[COLL_ROWS];
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) packs[row] = *(const coll_pack_of<S>*)(src + first + row * COLL_LANES);
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) {
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) values[row][j] = (A)coll_element<S>::load(packs[row].at[j]) * scale;
    }
    return;
  }
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      int i = first + row * COLL_LANES + j;
      values[row][j] = COLL_MUTANT(5, 0, scale);  // behind the end: not 0 times the scale, which may be infinite
      if (i < count) values[row][j] = (A)coll_element<S>::load(src[i]) * scale;
    }
  }
}

template <class D, class A>
static __device__ __forceinline__ coll_pack_of<D> stored(const A* values, D) {
  coll_pack_of<D> pack;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) pack.at[j] = coll_element<D>::store(values[j]);
  return pack;
}

#if COLL_HALF_INSTRUCTIONS
// By the instructions where all four are numbers.
template <class D>
static __device__ __forceinline__ coll_pack_of<D> stored_halves(const float* x, uint32_t first, uint32_t second) {
  int32_t most = 0;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) most = coll_larger_magnitude(most, x[j]);
  coll_pack_of<D> pack;
  if (most <= 0x7f800000) {
    pack.at[0].bits = (uint16_t)first, pack.at[1].bits = (uint16_t)(first >> 16);
    pack.at[2].bits = (uint16_t)second, pack.at[3].bits = (uint16_t)(second >> 16);
  } else {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) pack.at[j] = coll_element<D>::store(x[j]);
  }
  return pack;
}

static __device__ __forceinline__ coll_pack_of<coll_bf16> stored(const float* x, coll_bf16) {
  return stored_halves<coll_bf16>(x, coll_two_to_bf16(x[0], x[1]), coll_two_to_bf16(x[2], x[3]));
}

static __device__ __forceinline__ coll_pack_of<coll_fp16> stored(const float* x, coll_fp16) {
  return stored_halves<coll_fp16>(x, coll_two_to_fp16(x[0], x[1]), coll_two_to_fp16(x[2], x[3]));
}
#endif

#if COLL_FP8_INSTRUCTIONS
// A number's sign is in its element already; NaN gets it back here.
template <class D>
static __device__ __forceinline__ coll_pack_of<D> with_signs(uint32_t first, uint32_t second, const float* values) {
  uint32_t signs[2];
  COLL_UNROLL
  for (int j = 0; j < 2; ++j) signs[j] = __byte_perm(coll_float_bits(values[2 * j]), coll_float_bits(values[2 * j + 1]), 0x0073);
  uint32_t word = __byte_perm(first, second, 0x5410) | (__byte_perm(signs[0], signs[1], 0x5410) & 0x80808080u);
  coll_pack_of<D> pack;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) pack.at[j].bits = (uint8_t)(word >> 8 * j);
  return pack;
}

static __device__ __forceinline__ coll_pack_of<coll_e4m3> stored(const float* x, coll_e4m3) {
  return with_signs<coll_e4m3>(coll_two_to_e4m3(x[0], x[1]), coll_two_to_e4m3(x[2], x[3]), x);
}

static __device__ __forceinline__ coll_pack_of<coll_e5m2> stored(const float* x, coll_e5m2) {
  return with_signs<coll_e5m2>(coll_two_to_e5m2(x[0], x[1]), coll_two_to_e5m2(x[2], x[3]), x);
}
#endif

template <class D, class A>
static __device__ __forceinline__ void store_column(char* to, A (*values)[COLL_PACK], int first, int count, bool add) {
  D* dst = (D*)to;
  bool whole = (uint64_t)dst % sizeof(coll_pack_of<D>) == 0 && first + (COLL_ROWS - 1) * COLL_LANES + COLL_PACK <= count;
  if (add) {
    A old[COLL_ROWS][COLL_PACK];
    load_column<D, A>(old, to, first, count, (A)1);
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) {
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) values[row][j] = old[row][j] + values[row][j];
    }
  }
  if (whole) {
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) {
      *(coll_pack_of<D>*)(dst + first + row * COLL_LANES) = stored(values[row], D());
    }
    return;
  }
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    coll_pack_of<D> pack = stored(values[row], D());
    int i = first + row * COLL_LANES;
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      if (i + j < count) dst[i + j] = pack.at[j];
    }
  }
}

// The sums of the squares of a column's lanes, and its bad values.
template <class A>
static __device__ __forceinline__ void sum_column(A (*values)[COLL_PACK], int first, A limit, A* lanes, uint32_t* own_bad) {
  coll_pack_of<A> sums;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    A sum = 0;
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) {
      sum += values[row][j] * values[row][j];
    }
    sums.at[j] = sum;
  }
  *(coll_pack_of<A>*)(lanes + first) = sums;
  *own_bad += coll_count_bad<COLL_ROWS * COLL_PACK>(values[0], limit);
}

// Bytes as they are, in the widest words that both addresses allow, four of a thread's on their way
// at a time.
template <class W>
static __device__ __forceinline__ void copy_words(char* to, const char* from, int64_t nbytes) {
  W* out = (W*)to;
  const W* in = (const W*)from;
  int64_t words = nbytes / (int64_t)sizeof(W), i = threadIdx.x, step = blockDim.x;
  for (; i + 3 * step < words; i += 4 * step) {
    W kept[4];
    COLL_UNROLL
    for (int j = 0; j < 4; ++j) kept[j] = in[i + j * step];
    COLL_UNROLL
    for (int j = 0; j < 4; ++j) out[i + j * step] = kept[j];
  }
  for (; i < words; i += step) out[i] = in[i];
  for (i = words * (int64_t)sizeof(W) + threadIdx.x; i < nbytes; i += step) to[i] = from[i];
}

static __device__ __forceinline__ void copy_bytes(char* to, const char* from, int64_t nbytes) {
  uint64_t address = (uint64_t)to | (uint64_t)from;
  if (address % 16 == 0) copy_words<coll_pack_of<float>>(to, from, nbytes);
  else if (address % 4 == 0) copy_words<uint32_t>(to, from, nbytes);
  else if (address % 2 == 0) copy_words<uint16_t>(to, from, nbytes);
  else copy_words<uint8_t>(to, from, nbytes);
}

// What comes behind a tensor in the flat buffer.
static __device__ __forceinline__ void clear_padding(const coll_cast_span& s) {
  int width = coll_width(s.to_type);
  for (int64_t i = s.count * width + threadIdx.x; i < (s.count + s.padding) * width; i += blockDim.x) s.to[i] = 0;
}

// A block's tiles: a run side by side, so that it looks for its first tensor only once. Tiles of
// one tensor are taken together where `whole` says so, else one by one.
template <class F>
static __device__ __forceinline__ void for_each_span(const coll_launch<coll_cast_args>& launch, bool whole, F do_span) {
  const coll_cast_args& a = launch.args;
  const coll_tensor* tensors = coll_rows_of(launch, a.tensors);
  int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x;
  int64_t last = a.work.tiles * ((int64_t)blockIdx.x + 1) / gridDim.x;
  int64_t at = tile < last ? coll_tensor_of(tensors, a.count, tile) : 0;
  while (tile < last) {
    coll_tensor tensor = tensors[at];
    int64_t end = tensor.first_tile + coll_tiles_of(tensor.count);
    if (tile >= end) {
      ++at;
      continue;
    }
    int64_t tiles = whole ? (end < last ? end : last) - tile : 1;
    coll_cast_span s = coll_cast_at(a, tensor, tile, tiles);
    do_span(s, tile);
    clear_padding(s);
    tile += tiles;
  }
}

#endif
