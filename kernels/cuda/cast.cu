// The CUDA launchers of pack and unpack, and of the statistics' last step. A block takes one tile at a time.
#include "coll/cast.h"
#include "tile.cuh"

// 4 elements side by side as fp32 or fp64; fewer at the end of a tensor. One load where the address allows it.
template <class S>
struct alignas(sizeof(S) * COLL_PACK) coll_pack_of {
  S at[COLL_PACK];
};

template <class S, class A>
static __device__ __forceinline__ void load_pack(A* values, const void* from, int i, int count, A scale) {
  const S* src = (const S*)from + i;
  if (i + COLL_PACK <= count && (uint64_t)src % sizeof(coll_pack_of<S>) == 0) {
    coll_pack_of<S> pack = *(const coll_pack_of<S>*)src;
    for (int j = 0; j < COLL_PACK; ++j) values[j] = (A)coll_element<S>::load(pack.at[j]) * scale;
  } else {
    for (int j = 0; j < COLL_PACK; ++j) values[j] = i + j < count ? (A)coll_element<S>::load(src[j]) * scale : (A)0;
  }
}

template <class D, class A>
static __device__ __forceinline__ void store_pack(void* to, const A* values, int i, int count, bool add) {
  D* dst = (D*)to + i;
  if (i + COLL_PACK <= count && (uint64_t)dst % sizeof(coll_pack_of<D>) == 0) {
    coll_pack_of<D> pack;
    if (add) {
      pack = *(const coll_pack_of<D>*)dst;
      for (int j = 0; j < COLL_PACK; ++j) {
        pack.at[j] = coll_element<D>::store((A)coll_element<D>::load(pack.at[j]) + values[j]);
      }
    } else {
      for (int j = 0; j < COLL_PACK; ++j) pack.at[j] = coll_element<D>::store(values[j]);
    }
    *(coll_pack_of<D>*)dst = pack;
  } else {
    for (int j = 0; j < COLL_PACK && i + j < count; ++j) {
      dst[j] = coll_element<D>::store(add ? (A)coll_element<D>::load(dst[j]) + values[j] : values[j]);
    }
  }
}

// One column of packs of a tile: lanes [4 * column, 4 * column + 4) in all rows.
template <class A>
static __device__ __forceinline__ void cast_column(const coll_cast_args& a, const coll_cast_tile& t, int column, A scale,
                                                   A* lanes, uint32_t* bad) {
  A values[COLL_ROWS][COLL_PACK];
#define COLL_LOAD(S) \
  for (int row = 0; row < COLL_ROWS; ++row) { \
    load_pack<S, A>(values[row], t.from, row * COLL_LANES + column * COLL_PACK, t.count, scale); \
  } \
  break;
  switch (t.from_type) {
    case COLL_F16: COLL_LOAD(coll_fp16)
    case COLL_F32: COLL_LOAD(float)
    case COLL_F64: COLL_LOAD(double)
    case COLL_BF16: COLL_LOAD(coll_bf16)
    case COLL_E4M3: COLL_LOAD(coll_e4m3)
    default: COLL_LOAD(coll_e5m2)
  }
#undef COLL_LOAD
  if (a.work.sums) {
    A limit = (A)coll_limit(t.to_type);
    for (int j = 0; j < COLL_PACK; ++j) {
      A sum = 0;
      for (int row = 0; row < COLL_ROWS; ++row) {
        sum += values[row][j] * values[row][j];
        *bad += coll_is_bad(values[row][j], limit);
      }
      lanes[column * COLL_PACK + j] = sum;
    }
  }
  bool add = a.flags & COLL_ADD;
#define COLL_STORE(D) \
  for (int row = 0; row < COLL_ROWS; ++row) { \
    store_pack<D, A>(t.to, values[row], row * COLL_LANES + column * COLL_PACK, t.count, add); \
  } \
  break;
  switch (t.to_type) {
    case COLL_F16: COLL_STORE(coll_fp16)
    case COLL_F32: COLL_STORE(float)
    case COLL_F64: COLL_STORE(double)
    case COLL_BF16: COLL_STORE(coll_bf16)
    case COLL_E4M3: COLL_STORE(coll_e4m3)
    default: COLL_STORE(coll_e5m2)
  }
#undef COLL_STORE
}

template <class A>
static __device__ __forceinline__ void cast_tile(const coll_cast_args& a, const coll_cast_tile& t, int64_t tile, A scale,
                                                 A* lanes, uint32_t* bad) {
  uint32_t own_bad = 0;
  for (int column = threadIdx.x; column < COLL_PACKS; column += blockDim.x) {
    cast_column<A>(a, t, column, scale, lanes, &own_bad);
  }
  if (a.work.sums) coll_leave_share(a.work, tile, lanes, bad, own_bad);
}

// Bytes as they are, in the widest words that both addresses allow.
template <class W>
static __device__ __forceinline__ void copy_words(const coll_cast_tile& t, int nbytes) {
  int words = nbytes / (int)sizeof(W);
  for (int i = threadIdx.x; i < words; i += blockDim.x) ((W*)t.to)[i] = ((const W*)t.from)[i];
  for (int i = words * (int)sizeof(W) + threadIdx.x; i < nbytes; i += blockDim.x) {
    ((char*)t.to)[i] = ((const char*)t.from)[i];
  }
}

static __device__ __forceinline__ void copy_tile(const coll_cast_tile& t) {
  int nbytes = t.count * coll_width(t.from_type);
  uint64_t address = (uint64_t)t.from | (uint64_t)t.to;
  if (address % 16 == 0) copy_words<coll_pack_of<float>>(t, nbytes);
  else if (address % 4 == 0) copy_words<uint32_t>(t, nbytes);
  else if (address % 2 == 0) copy_words<uint16_t>(t, nbytes);
  else copy_words<uint8_t>(t, nbytes);
}

// A block takes a run of tiles side by side, so that it looks for its first tensor only once.
COLL_KERNEL coll_cast(const coll_cast_args a) {
  __shared__ double lanes[COLL_LANES];
  __shared__ uint32_t bad;
  double scale = a.scale_at ? a.scale * (double)*a.scale_at : a.scale;
  int64_t first = a.work.tiles * (int64_t)blockIdx.x / gridDim.x;
  int64_t last = a.work.tiles * ((int64_t)blockIdx.x + 1) / gridDim.x;
  int64_t at = first < last ? coll_tensor_of(a.tensors, a.count, first) : 0;
  for (int64_t tile = first; tile < last; ++tile) {
    while (tile >= a.tensors[at].first_tile + coll_tiles_of(a.tensors[at].count)) ++at;
    coll_cast_tile t = coll_cast_at(a, a.tensors[at], tile);
    if (t.copies) copy_tile(t);
    else if (coll_cast_wide(t)) cast_tile<double>(a, t, tile, scale, lanes, &bad);
    else cast_tile<float>(a, t, tile, (float)scale, (float*)lanes, &bad);
  }
}

// One block.
COLL_KERNEL coll_finish(const coll_finish_args a) {
  __shared__ double lanes[COLL_LANES];
  __shared__ unsigned long long bad;
  if (threadIdx.x == 0) bad = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int lane = threadIdx.x; lane < COLL_LANES; lane += blockDim.x) {
    double sum = 0;
    for (int64_t i = lane; i < a.shares; i += COLL_LANES) {
      sum += a.work.sums[i];
      own += a.work.bad[i];
    }
    lanes[lane] = sum;
  }
  if (own) atomicAdd(&bad, own);
  coll_fold_lanes(lanes);
  if (threadIdx.x == 0) {
    *a.sum_of_squares = lanes[0];
    *a.nonfinite = (int64_t)bad;
  }
}
