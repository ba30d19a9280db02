// The CUDA launchers of the wire formats. A block takes one tile at a time: its values pass through
// shared memory, so that the source is read once, whatever the number of threads; in between the
// largest magnitude of each block of values is found.
#include "coll/quantize.h"
#include "tile.cuh"

#define COLL_TILE_PACKS (COLL_TILE / COLL_PACK)
#define COLL_GROUP 8  // packs whose maximum one thread takes
#define COLL_TILE_GROUPS (COLL_TILE_PACKS / COLL_GROUP)
#define COLL_TILE_BLOCKS (COLL_TILE / COLL_LEAST_BLOCK)

struct alignas(16) coll_encode_space {
  float values[COLL_TILE];
  int32_t pack_amax[COLL_TILE_PACKS];
  int32_t group_amax[COLL_TILE_GROUPS];
  coll_block_scale scales[COLL_TILE_BLOCKS];
};

// 4 elements side by side, in one load or store where the address allows it; `live` of them are
// there, from 1 to 4.
template <class T>
struct alignas(sizeof(T) * COLL_PACK) coll_four {
  T at[COLL_PACK];
};

template <class T>
static __device__ __forceinline__ coll_four<T> load_four(const T* from, int live) {
  if (live == COLL_PACK && (uint64_t)from % sizeof(coll_four<T>) == 0) return *(const coll_four<T>*)from;
  coll_four<T> four = {};
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    if (j < live) four.at[j] = from[j];
  }
  return four;
}

template <class T>
static __device__ __forceinline__ void store_four(T* to, const coll_four<T>& four, int live) {
  if (live == COLL_PACK && (uint64_t)to % sizeof(coll_four<T>) == 0) {
    *(coll_four<T>*)to = four;
    return;
  }
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    if (j < live) to[j] = four.at[j];
  }
}

// ---- Values in, 4 at a time: `at` is the first's index.
struct coll_from_tensor {
  const coll_quantize_args& a;
  double scale;

  template <class S>
  __device__ __forceinline__ void load_typed(float* x, int64_t at, int live) const {
    coll_four<S> four = load_four((const S*)a.source + at, live);
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[j] = coll_scaled(four.at[j], scale);
  }

  template <class F>
  __device__ __forceinline__ void load(float* x, int64_t at, int live) const {
    switch (a.source_type) {
      case COLL_F32: load_typed<float>(x, at, live); break;
      case COLL_F16: load_typed<coll_fp16>(x, at, live); break;
      case COLL_BF16: load_typed<coll_bf16>(x, at, live); break;
      case COLL_F64: load_typed<double>(x, at, live); break;
      case COLL_E4M3: load_typed<coll_e4m3>(x, at, live); break;
      default: load_typed<coll_e5m2>(x, at, live); break;
    }
  }
};

// The sum of the wires' elements, in the order of the wires, scaled.
template <class F>
static __device__ __forceinline__ void decode(const coll_decoder& from, float scale, float* x, int64_t at, int live) {
  int64_t scales_at = coll_wire_scales_at(from.count, from.format) + at / from.block * 4;
#pragma unroll 4
  for (int64_t k = 0; k < from.wire_count; ++k) {
    const char* wire = (const char*)from.wires[k];
    coll_four<typename F::element> four = load_four((const typename F::element*)wire + at, live);
    float factor = F::kScaled ? *(const float*)(wire + scales_at) : 1.0f;
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      float value = F::kScaled ? F::value(four.at[j]) * factor : F::value(four.at[j]);
      x[j] = k == 0 ? value : x[j] + value;
    }
  }
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) x[j] = coll_decoded(x[j], from.average_over, scale);
}

// What is read, with the address of the wires' addresses.
template <class Args>
static __device__ __forceinline__ coll_decoder decoder_of(const coll_launch<Args>& launch) {
  coll_decoder from = launch.args.from;
  from.wires = from.wire_count > 1 ? coll_rows_of(launch, from.wires) : &launch.args.from.wire;
  return from;
}

struct coll_from_wires {
  const coll_decoder& from;
  float scale;

  template <class F>
  __device__ __forceinline__ void load(float* x, int64_t at, int live) const {
    decode<F>(from, scale, x, at, live);
  }
};

static __device__ __forceinline__ void add_residual(const coll_encoder& to, float* x, int64_t at, int live) {
  if (!to.residual) return;
  if (to.residual_type == COLL_F32) {
    coll_four<float> four = load_four((const float*)to.residual + at, live);
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[j] += four.at[j];
  } else {
    coll_four<coll_bf16> four = load_four((const coll_bf16*)to.residual + at, live);
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[j] += coll_element<coll_bf16>::load(four.at[j]);
  }
}

// ---- A wire out.

// `carried`: the value that the receiver decodes. Where that isn't finite the residual stays as it was.
template <class T>
static __device__ __forceinline__ void leave_residual(T* residual, const float* x, const float* carried, int live) {
  bool finite = true;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) finite = finite && coll_finite_bits(coll_magnitude_bits(carried[j]));
  coll_four<T> four;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) four.at[j] = coll_element<T>::store(x[j] - carried[j]);
  if (finite) {
    store_four(residual, four, live);
    return;
  }
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    if (j < live && coll_finite_bits(coll_magnitude_bits(carried[j]))) residual[j] = four.at[j];
  }
}

template <class F>
static __device__ __forceinline__ void encode_pack(const coll_encoder& to, const float* x, coll_block_scale s, int64_t at,
                                                   int live) {
  typedef typename F::element E;
  float t[COLL_PACK];
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) t[j] = !F::kScaled ? x[j] : s.inverse != 0.0f ? x[j] * s.inverse : 0.0f;
  coll_four<E> four;
  if (to.stochastic) {
    coll_philox_words random = coll_philox_pack(to.seed, (uint64_t)(to.position + at));
    four.at[0] = (E)F::at_random(t[0], random.w0);
    four.at[1] = (E)F::at_random(t[1], random.w1);
    four.at[2] = (E)F::at_random(t[2], random.w2);
    four.at[3] = (E)F::at_random(t[3], random.w3);
  } else {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) four.at[j] = (E)F::nearest(t[j]);
  }
  store_four((E*)to.wire + at, four, live);
  if (!to.residual) return;
  float carried[COLL_PACK];
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) carried[j] = F::kScaled ? F::value(four.at[j]) * s.scale : F::value(four.at[j]);
  if (to.residual_type == COLL_F32) leave_residual((float*)to.residual + at, x, carried, live);
  else leave_residual((coll_bf16*)to.residual + at, x, carried, live);
}

// A thread stores those packs that it has loaded, so that no other thread may have changed the
// residual in between.
template <class F, class Source>
static __device__ __forceinline__ void encode_tile(const Source& source, const coll_encoder& to, int64_t first, int count,
                                                   coll_encode_space* space) {
  int packs = (count + COLL_PACK - 1) / COLL_PACK;
  for (int pack = threadIdx.x; pack < packs; pack += blockDim.x) {
    int live = count - pack * COLL_PACK < COLL_PACK ? count - pack * COLL_PACK : COLL_PACK;
    coll_four<float> x;
    source.template load<F>(x.at, first + pack * COLL_PACK, live);
    add_residual(to, x.at, first + pack * COLL_PACK, live);
    if (F::kScaled) {
      int32_t amax = 0;
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) {
        int32_t magnitude = j < live ? coll_magnitude_bits(x.at[j]) : 0;
        amax = magnitude > amax ? magnitude : amax;
      }
      space->pack_amax[pack] = amax;
      *(coll_four<float>*)&space->values[pack * COLL_PACK] = x;
    } else {
      encode_pack<F>(to, x.at, coll_block_scale{1.0f, 1.0f}, first + pack * COLL_PACK, live);
    }
  }
  if (!F::kScaled) return;

  __syncthreads();
  int groups = (packs + COLL_GROUP - 1) / COLL_GROUP;
  for (int group = threadIdx.x; group < groups; group += blockDim.x) {
    int32_t amax = 0;
    for (int pack = group * COLL_GROUP; pack < (group + 1) * COLL_GROUP && pack < packs; ++pack) {
      amax = space->pack_amax[pack] > amax ? space->pack_amax[pack] : amax;
    }
    space->group_amax[group] = amax;
  }
  __syncthreads();
  int blocks = (count + to.block - 1) / to.block, groups_of_block = to.block / (COLL_PACK * COLL_GROUP);
  float* scales = (float*)((char*)to.wire + coll_wire_scales_at(to.count, to.format)) + first / to.block;
  for (int block = threadIdx.x; block < blocks; block += blockDim.x) {
    int32_t amax = 0;
    for (int group = block * groups_of_block; group < (block + 1) * groups_of_block && group < groups; ++group) {
      amax = space->group_amax[group] > amax ? space->group_amax[group] : amax;
    }
    coll_block_scale s = coll_scale_of(amax, F::kLimit);
    space->scales[block] = s;
    scales[block] = s.scale;
  }
  __syncthreads();
  for (int pack = threadIdx.x; pack < packs; pack += blockDim.x) {
    int live = count - pack * COLL_PACK < COLL_PACK ? count - pack * COLL_PACK : COLL_PACK;
    coll_four<float> x = *(const coll_four<float>*)&space->values[pack * COLL_PACK];
    encode_pack<F>(to, x.at, space->scales[pack * COLL_PACK / to.block], first + pack * COLL_PACK, live);
  }
}

// What lies between the payload and the scales, and behind them: at most 15 bytes and 3 scales.
static __device__ __forceinline__ void clear_padding(const coll_encoder& to) {
  if (threadIdx.x != 0) return;
  int64_t scales_at = coll_wire_scales_at(to.count, to.format);
  for (int64_t i = to.count * coll_wire_width(to.format); i < scales_at; ++i) ((uint8_t*)to.wire)[i] = 0;
  if (!coll_wire_scaled(to.format)) return;
  int64_t blocks = coll_wire_blocks(to.count, to.block);
  float* scales = (float*)((char*)to.wire + scales_at);
  for (int64_t i = blocks; i % 4 != 0; ++i) scales[i] = 0.0f;
}

template <class Source>
static __device__ __forceinline__ void encode(const Source& source, const coll_encoder& to, int64_t tiles,
                                              coll_encode_space* space) {
  int64_t first_tile = tiles * (int64_t)blockIdx.x / gridDim.x;
  int64_t last_tile = tiles * ((int64_t)blockIdx.x + 1) / gridDim.x;
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    int64_t first = tile * COLL_TILE, left = to.count - first;
    int count = (int)(left < COLL_TILE ? left : COLL_TILE);
#define COLL_DO(F) encode_tile<F>(source, to, first, count, space)
    COLL_FOR_WIRE(to.format, COLL_DO)
#undef COLL_DO
    if (tile == tiles - 1) clear_padding(to);
  }
}

COLL_KERNEL coll_quantize(const coll_quantize_args a) {
  __shared__ coll_encode_space space;
  coll_from_tensor source = {a, coll_factor(a.scale, a.scale_at)};
  encode(source, a.to, a.work.tiles, &space);
}

// 2: without a number the compiler spills registers for sm_100.
COLL_KERNEL_HELD(2) coll_requantize(COLL_WITH_ROWS(coll_requantize_args) launch) {
  __shared__ coll_encode_space space;
  const coll_requantize_args& a = launch.args;
  coll_decoder from = decoder_of(launch);
  coll_from_wires source = {from, (float)coll_factor(from.scale, from.scale_at)};
  encode(source, a.to, a.work.tiles, &space);
}

// ---- A tensor out.
template <class D>
static __device__ __forceinline__ void store_typed(void* out, const float* x, int64_t at, int live, bool add) {
  typedef coll_element<D> E;
  D* to = (D*)out + at;
  coll_four<D> four;
  if (add) {
    four = load_four(to, live);
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      four.at[j] = E::store((typename E::acc)(E::load(four.at[j]) + (typename E::acc)x[j]));
    }
  } else {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) four.at[j] = E::store((typename E::acc)x[j]);
  }
  store_four(to, four, live);
}

static __device__ __forceinline__ void store(const coll_dequantize_args& a, const float* x, int64_t at, int live) {
  bool add = a.flags & COLL_ADD;
  switch (a.out_type) {
    case COLL_F32: store_typed<float>(a.out, x, at, live, add); break;
    case COLL_F16: store_typed<coll_fp16>(a.out, x, at, live, add); break;
    case COLL_BF16: store_typed<coll_bf16>(a.out, x, at, live, add); break;
    case COLL_F64: store_typed<double>(a.out, x, at, live, add); break;
    case COLL_E4M3: store_typed<coll_e4m3>(a.out, x, at, live, add); break;
    default: store_typed<coll_e5m2>(a.out, x, at, live, add); break;
  }
}

template <class F>
static __device__ __forceinline__ void decode_tile(const coll_dequantize_args& a, const coll_decoder& from, float scale,
                                                   float limit, int64_t first, int count, coll_four<float>* lanes,
                                                   uint32_t* bad) {
  for (int column = threadIdx.x; column < COLL_PACKS; column += blockDim.x) {
    coll_four<float> sums = {};
#pragma unroll 1
    for (int at = column * COLL_PACK; at < count; at += COLL_LANES) {
      int live = count - at < COLL_PACK ? count - at : COLL_PACK;
      float x[COLL_PACK];
      decode<F>(from, scale, x, first + at, live);
      if (a.work.sums) {
        COLL_UNROLL
        for (int j = 0; j < COLL_PACK; ++j) {
          if (j >= live) continue;
          sums.at[j] += x[j] * x[j];
          *bad += coll_is_bad(x[j], limit);
        }
      }
      store(a, x, first + at, live);
    }
    if (a.work.sums) lanes[column] = sums;
  }
}

COLL_KERNEL coll_dequantize(COLL_WITH_ROWS(coll_dequantize_args) launch) {
  const coll_dequantize_args& a = launch.args;
  coll_decoder from = decoder_of(launch);
  __shared__ coll_four<float> lanes[COLL_PACKS];
  __shared__ uint32_t bad;
  float scale = (float)coll_factor(a.from.scale, a.from.scale_at), limit = (float)coll_limit(a.out_type);
  int64_t first_tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x;
  int64_t last_tile = a.work.tiles * ((int64_t)blockIdx.x + 1) / gridDim.x;
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    int64_t first = tile * COLL_TILE, left = a.from.count - first;
    int count = (int)(left < COLL_TILE ? left : COLL_TILE);
    uint32_t own_bad = 0;
#define COLL_DO(F) decode_tile<F>(a, from, scale, limit, first, count, lanes, &own_bad)
    COLL_FOR_WIRE(a.from.format, COLL_DO)
#undef COLL_DO
    if (a.work.sums) coll_leave_share(a.work, tile, (float*)lanes, &bad, own_bad);
  }
}
