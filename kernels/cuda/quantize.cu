// The CUDA launchers of the wire formats. A block takes one tile at a time, a thread a column of its
// packs, 16 elements, whose loads are all on their way before the first value is used. Where values
// share scales they pass through shared memory while the largest magnitude of each block of values
// is found, so that the source is read once, whatever the number of threads.
#include "coll/quantize.h"
#include "tile.cuh"

#define COLL_TILE_PACKS (COLL_TILE / COLL_PACK)
#define COLL_GROUP 8  // packs whose maximum one thread takes
#define COLL_TILE_GROUPS (COLL_TILE_PACKS / COLL_GROUP)
#define COLL_TILE_BLOCKS (COLL_TILE / COLL_LEAST_BLOCK)

// Blocks that a multiprocessor holds of the kernels that write a wire. For sm_100 the compiler spills
// registers if they are to be 4.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define COLL_ENCODERS 3
#else
#define COLL_ENCODERS 4
#endif

struct alignas(16) coll_encode_space {
  float values[COLL_TILE];
  int32_t pack_amax[COLL_TILE_PACKS];
  int32_t group_amax[COLL_TILE_GROUPS];
  coll_block_scale scales[COLL_TILE_BLOCKS];
};

// ---- Columns: the packs from element `at` of a tile on, COLL_LANES elements apart, of `count`
// elements that the tile has. kRows of them are on their way at a time: all of a full tile whose
// addresses allow it, half of it with a residual, which takes as many registers again; and one, with
// a look at each address, of all other tiles.

// A pack as it lies in memory: small elements side by side in a word, which take a register less each
// until they are used.
template <int kWidth>
struct alignas(4 * kWidth) coll_words {
  uint32_t at[kWidth];
};

template <class T>
struct element_of {
  COLL_FN T from(const uint32_t* words, int j) {
    T x;
    x.bits = (decltype(x.bits))(words[j * sizeof(T) / 4] >> j * sizeof(T) % 4 * 8);
    return x;
  }
};
template <>
struct element_of<int8_t> {
  COLL_FN int8_t from(const uint32_t* words, int j) { return (int8_t)(words[0] >> 8 * j); }
};
template <>
struct element_of<uint8_t> {
  COLL_FN uint8_t from(const uint32_t* words, int j) { return (uint8_t)(words[0] >> 8 * j); }
};
template <>
struct element_of<uint16_t> {
  COLL_FN uint16_t from(const uint32_t* words, int j) { return (uint16_t)(words[j / 2] >> j % 2 * 16); }
};
template <>
struct element_of<float> {
  COLL_FN float from(const uint32_t* words, int j) { return coll_bits_float(words[j]); }
};
template <>
struct element_of<double> {
  COLL_FN double from(const uint32_t* words, int j) {
    return __longlong_as_double((long long)((uint64_t)words[2 * j + 1] << 32 | words[2 * j]));
  }
};

// `tile`: the address of the tile's first element. What isn't there is 0.
template <int kRows, int kWidth>
static __device__ __forceinline__ void load_packs(coll_words<kWidth>* packs, const void* tile, int at, int count) {
  typedef coll_words<kWidth> Words;
  const char* from = (const char*)tile + at * kWidth;
  if (kRows > 1) {
    COLL_UNROLL
    for (int row = 0; row < kRows; ++row) packs[row] = *(const Words*)(from + row * COLL_LANES * kWidth);
    return;
  }
  if (count - at >= COLL_PACK && (uint64_t)from % sizeof(Words) == 0) {
    packs[0] = *(const Words*)from;
    return;
  }
  packs[0] = Words{};
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    if (at + j >= count) continue;
    if (kWidth == 1) packs[0].at[0] |= (uint32_t)((const uint8_t*)from)[j] << 8 * j;
    else if (kWidth == 2) packs[0].at[j / 2] |= (uint32_t)((const uint16_t*)from)[j] << j % 2 * 16;
    else if (kWidth == 4) packs[0].at[j] = ((const uint32_t*)from)[j];
    else packs[0].at[2 * j] = ((const uint32_t*)from)[2 * j], packs[0].at[2 * j + 1] = ((const uint32_t*)from)[2 * j + 1];
  }
}

// One pack, of which `live` elements are there.
template <class T>
static __device__ __forceinline__ void store_pack(T* to, const coll_pack_of<T>& pack, int live) {
  if (live >= COLL_PACK && (uint64_t)to % sizeof(coll_pack_of<T>) == 0) {
    *(coll_pack_of<T>*)to = pack;
    return;
  }
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    if (j < live) to[j] = pack.at[j];
  }
}

static __device__ __forceinline__ bool takes_packs(const void* array, int type) {
  return (uint64_t)array % (uint64_t)(coll_width(type) * COLL_PACK) == 0;
}

// ---- Values in: a column of the tile whose first element is `tile`.
struct coll_from_tensor {
  const void* source;
  double scale;
  int type;

  template <class S, int kRows>
  __device__ __forceinline__ void load_typed(float (*x)[COLL_PACK], int64_t tile, int at, int count) const {
    constexpr int kAtOnce = sizeof(S) == 8 && kRows > 1 ? 2 : kRows;  // 64 bytes
    COLL_UNROLL
    for (int first = 0; first < kRows; first += kAtOnce) {
      coll_words<sizeof(S)> packs[kAtOnce];
      load_packs<kAtOnce>(packs, (const S*)source + tile, at + first * COLL_LANES, count);
      COLL_UNROLL
      for (int row = 0; row < kAtOnce; ++row) {
        COLL_UNROLL
        for (int j = 0; j < COLL_PACK; ++j) x[first + row][j] = coll_scaled(element_of<S>::from(packs[row].at, j), scale);
      }
    }
  }

  template <int kRows>
  __device__ __forceinline__ void load(float (*x)[COLL_PACK], int64_t tile, int at, int count) const {
    switch (type) {
      case COLL_F32: load_typed<float, kRows>(x, tile, at, count); break;
      case COLL_F16: load_typed<coll_fp16, kRows>(x, tile, at, count); break;
      case COLL_BF16: load_typed<coll_bf16, kRows>(x, tile, at, count); break;
      case COLL_F64: load_typed<double, kRows>(x, tile, at, count); break;
      case COLL_E4M3: load_typed<coll_e4m3, kRows>(x, tile, at, count); break;
      default: load_typed<coll_e5m2, kRows>(x, tile, at, count); break;
    }
  }
};

static __device__ __forceinline__ const void* wire_of(const coll_decoder& from, int64_t k) {
  return from.wires ? from.wires[k] : from.wire;
}

// The address of the wires' addresses; of a single wire NULL.
template <class Args>
static __device__ __forceinline__ const void* const* wires_of(const coll_launch<Args>& launch) {
  return launch.args.from.wire_count > 1 ? coll_rows_of(launch, launch.args.from.wires) : nullptr;
}

// Whether all wires begin where packs may.
static __device__ __forceinline__ bool takes_packs(const coll_decoder& from) {
  uint64_t addresses = 0;
  COLL_KEEP_LOOP
  for (int64_t k = 0; k < from.wire_count; ++k) addresses |= (uint64_t)wire_of(from, k);
  return takes_packs((const void*)addresses, from.format);
}

// A division by it as a shift: 64 bits wide it would take a hundred instructions.
static __device__ __forceinline__ int block_shift(int block) { return block == 128 ? 7 : block == 256 ? 8 : 9; }

// Add kWires wires from wire k on, in their order.
template <class F, int kRows, int kWires>
static __device__ __forceinline__ void add_wires(float (*x)[COLL_PACK], const coll_decoder& from, int64_t k, int64_t tile, int at,
                                                 int count) {
  typedef typename F::element E;
  coll_words<sizeof(E)> packs[kWires][kRows];
  const char* scales[kWires];
  int64_t scales_at = coll_wire_scales_at(from.count, from.format) + (((tile + at) >> block_shift(from.block)) << 2);
  int scales_of_row = COLL_LANES >> block_shift(from.block) << 2;  // bytes
  COLL_UNROLL
  for (int w = 0; w < kWires; ++w) {
    const char* wire = (const char*)wire_of(from, k + w);
    scales[w] = wire + scales_at;
    load_packs<kRows>(packs[w], (const E*)wire + tile, at, count);
  }
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int w = 0; w < kWires; ++w) {
      float factor = F::kScaled ? *(const float*)(scales[w] + row * scales_of_row) : 1.0f;
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) {
        float value = F::value(element_of<E>::from(packs[w][row].at, j));
        x[row][j] += F::kScaled ? value * factor : value;
      }
    }
  }
}

// The sum of the wires' elements, in the order of the wires, scaled.
template <class F, int kRows>
static __device__ __forceinline__ void decode(float (*x)[COLL_PACK], const coll_decoder& from, float scale, int64_t tile, int at,
                                              int count) {
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[row][j] = -0.0f;  // to which any value can be added and stays what it is
  }
  int64_t k = 0;
  if (kRows > 1) {
    COLL_KEEP_LOOP
    for (; k + 2 <= from.wire_count; k += 2) add_wires<F, kRows, 2>(x, from, k, tile, at, count);
  }
  COLL_KEEP_LOOP
  for (; k < from.wire_count; ++k) add_wires<F, kRows, 1>(x, from, k, tile, at, count);
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[row][j] = coll_decoded(x[row][j], from.average_over, scale);
  }
}

template <int kRows>
static __device__ __forceinline__ void decode_any(float (*x)[COLL_PACK], const coll_decoder& from, float scale, int64_t tile,
                                                  int at, int count) {
#define COLL_DO(F) decode<F, kRows>(x, from, scale, tile, at, count)
  COLL_FOR_WIRE(from.format, COLL_DO)
#undef COLL_DO
}

struct coll_from_wires {
  const coll_decoder& from;
  float scale;

  template <int kRows>
  __device__ __forceinline__ void load(float (*x)[COLL_PACK], int64_t tile, int at, int count) const {
    decode_any<kRows>(x, from, scale, tile, at, count);
  }
};

// A column of the residual as it lies in memory: a pack of bf16 takes the first two words.
template <int kRows>
static __device__ __forceinline__ void load_residual(coll_words<4>* kept, const coll_encoder& to, int64_t tile, int at,
                                                     int count) {
  if (to.residual_type == COLL_F32) {
    load_packs<kRows>(kept, (const float*)to.residual + tile, at, count);
    return;
  }
  coll_words<2> packs[kRows];
  load_packs<kRows>(packs, (const coll_bf16*)to.residual + tile, at, count);
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) kept[row].at[0] = packs[row].at[0], kept[row].at[1] = packs[row].at[1];
}

template <int kRows>
static __device__ __forceinline__ void add_residual(float (*x)[COLL_PACK], const coll_words<4>* kept, int type) {
  if (type == COLL_F32) {
    COLL_UNROLL
    for (int row = 0; row < kRows; ++row) {
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) x[row][j] += coll_bits_float(kept[row].at[j]);
    }
    return;
  }
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[row][j] += coll_bf16_to_float(element_of<uint16_t>::from(kept[row].at, j));
  }
}

// ---- A wire out.

// Values with their residual into `space`, and the largest magnitude of each pack.
template <int kRows, class Source>
static __device__ __forceinline__ void gather_rows(const Source& source, const coll_encoder& to, int64_t tile, int first, int count,
                                                   coll_encode_space* space) {
  float x[kRows][COLL_PACK];
  coll_words<4> kept[kRows];
  bool has_residual = kRows < COLL_ROWS && (kRows > 1 || to.residual);
  if (has_residual) load_residual<kRows>(kept, to, tile, first, count);
  source.template load<kRows>(x, tile, first, count);
  if (has_residual) add_residual<kRows>(x, kept, to.residual_type);
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    int at = first + row * COLL_LANES;
    int32_t amax = 0;
    coll_pack_of<float> pack;
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      pack.at[j] = x[row][j];
      int32_t magnitude = kRows > 1 || at + j < count ? coll_magnitude_bits(x[row][j]) : 0;
      amax = magnitude > amax ? magnitude : amax;
    }
    space->pack_amax[at / COLL_PACK] = amax;
    *(coll_pack_of<float>*)&space->values[at] = pack;
  }
}

template <int kRows, class Source>
static __device__ __forceinline__ void gather_tile(const Source& source, const coll_encoder& to, int64_t tile, int count,
                                                   coll_encode_space* space) {
  COLL_KEEP_LOOP
  for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES; first += blockDim.x * COLL_PACK) {
    if constexpr (kRows == COLL_ROWS) {
      gather_rows<kRows>(source, to, tile, first, count, space);
    } else {
      COLL_KEEP_LOOP
      for (int at = first; at < count; at += kRows * COLL_LANES) gather_rows<kRows>(source, to, tile, at, count, space);
    }
  }
}

// The blocks' scales, into `space` and into the wire. Starts and ends at a barrier.
template <class F>
static __device__ __forceinline__ void find_scales(const coll_encoder& to, int64_t tile, int count, coll_encode_space* space) {
  int packs = (count + COLL_PACK - 1) / COLL_PACK, groups = (packs + COLL_GROUP - 1) / COLL_GROUP;
  __syncthreads();
  for (int group = threadIdx.x; group < groups; group += blockDim.x) {
    int32_t amax = 0;
    for (int pack = group * COLL_GROUP; pack < (group + 1) * COLL_GROUP && pack < packs; ++pack) {
      amax = space->pack_amax[pack] > amax ? space->pack_amax[pack] : amax;
    }
    space->group_amax[group] = amax;
  }
  __syncthreads();
  int blocks = (count + to.block - 1) / to.block, groups_of_block = to.block / (COLL_PACK * COLL_GROUP);
  float* scales = (float*)((char*)to.wire + coll_wire_scales_at(to.count, to.format)) + (tile >> block_shift(to.block));
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
}

// `carried`: the value that the receiver decodes. Where that isn't finite the residual stays as it was.
template <class T>
static __device__ __forceinline__ void leave_residual(T* residual, const float* x, const float* carried, int live) {
  bool finite = true;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) finite = finite && coll_finite_bits(coll_magnitude_bits(carried[j]));
  coll_pack_of<T> pack;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) pack.at[j] = coll_element<T>::store(x[j] - carried[j]);
  if (finite) {
    store_pack(residual, pack, live);
    return;
  }
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    if (j < live && coll_finite_bits(coll_magnitude_bits(carried[j]))) residual[j] = pack.at[j];
  }
}

// The pack at `at`, of which `live` elements are there.
template <class F>
static __device__ __forceinline__ void encode_pack(const coll_encoder& to, const float* x, coll_block_scale s, int64_t at,
                                                   int live) {
  typedef typename F::element E;
  float t[COLL_PACK];
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) t[j] = !F::kScaled ? x[j] : s.inverse != 0.0f ? x[j] * s.inverse : 0.0f;
  coll_pack_of<E> pack;
  if (to.stochastic) {
    coll_philox_words random = coll_philox_pack(to.seed, (uint64_t)(to.position + at));
    pack.at[0] = (E)F::at_random(t[0], random.w0);
    pack.at[1] = (E)F::at_random(t[1], random.w1);
    pack.at[2] = (E)F::at_random(t[2], random.w2);
    pack.at[3] = (E)F::at_random(t[3], random.w3);
  } else {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; j += 2) {
      uint32_t two = coll_nearest_two(F(), t[j], t[j + 1]);
      pack.at[j] = (E)two;
      pack.at[j + 1] = (E)(two >> 8 * sizeof(E));
    }
  }
  store_pack((E*)to.wire + at, pack, live);
  if (!to.residual) return;
  float carried[COLL_PACK];
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) carried[j] = F::kScaled ? F::value(pack.at[j]) * s.scale : F::value(pack.at[j]);
  if (to.residual_type == COLL_F32) leave_residual((float*)to.residual + at, x, carried, live);
  else leave_residual((coll_bf16*)to.residual + at, x, carried, live);
}

// A thread stores those packs that it has loaded, so that no other thread may have changed the
// values or the residual in between.
template <class F>
static __device__ __forceinline__ void encode_tile(const coll_encoder& to, int64_t tile, int count, coll_encode_space* space) {
  if (F::kScaled) find_scales<F>(to, tile, count, space);
  COLL_KEEP_LOOP
  for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES; first += blockDim.x * COLL_PACK) {
    COLL_KEEP_LOOP
    for (int at = first; at < count; at += COLL_LANES) {
      coll_pack_of<float> x = *(const coll_pack_of<float>*)&space->values[at];
      coll_block_scale s = {1.0f, 1.0f};
      if (F::kScaled) s = space->scales[at >> block_shift(to.block)];
      encode_pack<F>(to, x.at, s, tile + at, count - at);
    }
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

// Tile `tile` of a wire; `packs`: all addresses allow packs.
template <class Source>
static __device__ __forceinline__ void encode(const Source& source, const coll_encoder& to, int64_t tile, bool packs,
                                              coll_encode_space* space) {
  int64_t first = tile * COLL_TILE, left = to.count - first;
  int count = (int)(left < COLL_TILE ? left : COLL_TILE);
  if (!packs || count < COLL_TILE) gather_tile<1>(source, to, first, count, space);
  else if (to.residual) gather_tile<COLL_ROWS / 2>(source, to, first, count, space);
  else gather_tile<COLL_ROWS>(source, to, first, count, space);
#define COLL_DO(F) encode_tile<F>(to, first, count, space)
  COLL_FOR_WIRE(to.format, COLL_DO)
#undef COLL_DO
  if (left <= COLL_TILE) clear_padding(to);
}

// f(tile) for each of this block's tiles. No memory has 2^31 tiles.
template <class F>
static __device__ __forceinline__ void for_each_tile(int64_t tiles, F f) {
  COLL_KEEP_LOOP
  for (uint32_t tile = blockIdx.x; tile < (uint32_t)tiles; tile += gridDim.x) f(tile);
}

COLL_KERNEL_HELD(COLL_ENCODERS) coll_quantize(const __grid_constant__ coll_quantize_args a) {
  __shared__ coll_encode_space space;
  double scale = coll_factor(a.scale, a.scale_at);
  for_each_tile(a.work.tiles, [&](uint32_t tile) {
    uint32_t tiles = (uint32_t)coll_tiles_of(a.to.count), part = tile / tiles;
    coll_quantize_args own = coll_part_of(a, part);
    coll_from_tensor source = {own.source, scale, a.source_type};
    bool packs = takes_packs(own.source, a.source_type) && takes_packs(own.to.residual, a.to.residual_type);
    encode(source, own.to, tile - part * tiles, packs, &space);
  });
}

COLL_KERNEL_HELD(COLL_ENCODERS) coll_requantize(COLL_WITH_ROWS(coll_requantize_args) launch) {
  __shared__ coll_encode_space space;
  const coll_requantize_args& a = launch.args;
  coll_decoder from = a.from;
  from.wires = wires_of(launch);
  coll_from_wires source = {from, (float)coll_factor(from.scale, from.scale_at)};
  bool packs = takes_packs(from) && takes_packs(a.to.residual, a.to.residual_type);
  for_each_tile(a.work.tiles, [&](uint32_t tile) { encode(source, a.to, tile, packs, &space); });
}

// ---- A tensor out.
template <class D, int kRows, bool kAdd>
static __device__ __forceinline__ void store_rows(D* tile, const float (*x)[COLL_PACK], int at, int count) {
  typedef coll_element<D> E;
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    D* to = tile + at + row * COLL_LANES;
    coll_words<sizeof(D)> old;
    if (kAdd && kRows > 1) old = *(const coll_words<sizeof(D)>*)to;
    else if (kAdd) load_packs<kRows>(&old, tile, at, count);
    coll_pack_of<D> pack;
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      typename E::acc value = (typename E::acc)x[row][j];
      if (kAdd) value = (typename E::acc)(E::load(element_of<D>::from(old.at, j)) + value);
      pack.at[j] = E::store(value);
    }
    if (kRows > 1) *(coll_pack_of<D>*)to = pack;
    else store_pack(to, pack, count - at);
  }
}

template <class D, int kRows>
static __device__ __forceinline__ void store_typed(void* out, const float (*x)[COLL_PACK], int64_t tile, int at, int count,
                                                   bool add) {
  if (add) store_rows<D, kRows, true>((D*)out + tile, x, at, count);
  else store_rows<D, kRows, false>((D*)out + tile, x, at, count);
}

template <int kRows>
static __device__ __forceinline__ void store(const coll_dequantize_args& a, const float (*x)[COLL_PACK], int64_t tile, int at,
                                             int count) {
  bool add = a.flags & COLL_ADD;
  switch (a.out_type) {
    case COLL_F32: store_typed<float, kRows>(a.out, x, tile, at, count, add); break;
    case COLL_F16: store_typed<coll_fp16, kRows>(a.out, x, tile, at, count, add); break;
    case COLL_BF16: store_typed<coll_bf16, kRows>(a.out, x, tile, at, count, add); break;
    case COLL_F64: store_typed<double, kRows>(a.out, x, tile, at, count, add); break;
    case COLL_E4M3: store_typed<coll_e4m3, kRows>(a.out, x, tile, at, count, add); break;
    default: store_typed<coll_e5m2, kRows>(a.out, x, tile, at, count, add); break;
  }
}

// Returns the number of bad values of this thread.
template <int kRows>
static __device__ __forceinline__ uint32_t decode_tile(const coll_dequantize_args& a, const coll_decoder& from, float scale,
                                                       int64_t tile, int count, coll_pack_of<float>* lanes) {
  uint32_t bad = 0;
  float limit = (float)coll_limit(a.out_type);
  COLL_KEEP_LOOP
  for (int column = threadIdx.x; column < COLL_PACKS; column += blockDim.x) {
    coll_pack_of<float> sums = {};
    COLL_KEEP_LOOP
    for (int at = column * COLL_PACK; at < count; at += kRows * COLL_LANES) {
      float x[kRows][COLL_PACK];
      decode_any<kRows>(x, from, scale, tile, at, count);
      if (a.work.sums) {
        COLL_UNROLL
        for (int row = 0; row < kRows; ++row) {
          COLL_UNROLL
          for (int j = 0; j < COLL_PACK; ++j) {
            if (kRows == 1 && at + j >= count) continue;
            sums.at[j] += x[row][j] * x[row][j];
            bad += coll_is_bad(x[row][j], limit);
          }
        }
      }
      store<kRows>(a, x, tile, at, count);
    }
    if (a.work.sums) lanes[column] = sums;
  }
  return bad;
}

COLL_KERNEL_HELD(4) coll_dequantize(COLL_WITH_ROWS(coll_dequantize_args) launch) {
  const coll_dequantize_args& a = launch.args;
  __shared__ coll_pack_of<float> lanes[COLL_PACKS];
  __shared__ uint32_t bad;
  float scale = (float)coll_factor(a.from.scale, a.from.scale_at);
  coll_decoder own_wires = a.from;
  own_wires.wires = wires_of(launch);
  bool wires_take_packs = takes_packs(own_wires) && a.parts.wire_stride % 16 == 0;
  for_each_tile(a.work.tiles, [&](uint32_t tile) {
    uint32_t tiles = (uint32_t)coll_tiles_of(a.from.count), part = tile / tiles;
    coll_dequantize_args own = coll_part_of(a, part);
    own.from.wires = own_wires.wires;
    int64_t at = (int64_t)(tile - part * tiles) * COLL_TILE, left = own.from.count - at;
    int count = (int)(left < COLL_TILE ? left : COLL_TILE);
    bool packs = wires_take_packs && takes_packs(own.out, a.out_type) && count == COLL_TILE;
    uint32_t own_bad = packs ? decode_tile<COLL_ROWS>(own, own.from, scale, at, count, lanes)
                             : decode_tile<1>(own, own.from, scale, at, count, lanes);
    if (a.work.sums) coll_leave_share(a.work, tile, (float*)lanes, &bad, own_bad);
  });
}
