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

struct alignas(16) coll_encode_space {
  float values[COLL_TILE];
  int32_t pack_amax[COLL_TILE_PACKS];
  int32_t group_amax[COLL_TILE_GROUPS];
  coll_block_scale scales[COLL_TILE_BLOCKS];
};

// ---- Columns: the packs from element `first` of a tile on, COLL_LANES elements apart, of `count`
// elements that the tile has.

template <class T>
static __device__ __forceinline__ bool takes_packs(const T* tile, int first, int count) {
  return (uint64_t)tile % sizeof(coll_pack_of<T>) == 0 && first + (COLL_ROWS - 1) * COLL_LANES + COLL_PACK <= count;
}

// As they lie in memory; what isn't there is 0.
template <class T>
static __device__ __forceinline__ void load_packs(coll_pack_of<T>* packs, const T* tile, int first, int count) {
  if (takes_packs(tile, first, count)) {
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) packs[row] = *(const coll_pack_of<T>*)(tile + first + row * COLL_LANES);
    return;
  }
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      int i = first + row * COLL_LANES + j;
      packs[row].at[j] = i < count ? tile[i] : T();
    }
  }
}

// One pack, of which `live` elements are there; none where that is 0 or less.
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

// ---- Values in: a column of the tile whose first element is `tile`.
typedef float coll_column[COLL_ROWS][COLL_PACK];

struct coll_from_tensor {
  const void* source;
  double scale;
  int type;

  template <class S>
  __device__ __forceinline__ void load_typed(coll_column& x, int64_t tile, int first, int count) const {
    coll_pack_of<S> packs[COLL_ROWS];
    load_packs(packs, (const S*)source + tile, first, count);
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) {
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) x[row][j] = coll_scaled(packs[row].at[j], scale);
    }
  }

  template <class F>
  __device__ __forceinline__ void load(coll_column& x, int64_t tile, int first, int count) const {
    switch (type) {
      case COLL_F32: load_typed<float>(x, tile, first, count); break;
      case COLL_F16: load_typed<coll_fp16>(x, tile, first, count); break;
      case COLL_BF16: load_typed<coll_bf16>(x, tile, first, count); break;
      case COLL_F64: load_typed<double>(x, tile, first, count); break;
      case COLL_E4M3: load_typed<coll_e4m3>(x, tile, first, count); break;
      default: load_typed<coll_e5m2>(x, tile, first, count); break;
    }
  }
};

static __device__ __forceinline__ const void* wire_of(const coll_decoder& from, int64_t k) {
  return from.wires ? from.wires[k] : from.wire;
}

// Add kWires wires from wire k on, in their order.
template <class F, int kWires>
static __device__ __forceinline__ void add_wires(coll_column& x, const coll_decoder& from, int64_t k, int64_t tile, int first,
                                                 int count) {
  typedef typename F::element E;
  coll_pack_of<E> packs[kWires][COLL_ROWS];
  COLL_UNROLL
  for (int w = 0; w < kWires; ++w) load_packs(packs[w], (const E*)wire_of(from, k + w) + tile, first, count);
  int64_t scales_at = coll_wire_scales_at(from.count, from.format) + tile / from.block * 4 + first / from.block * 4;
  int scales_of_row = COLL_LANES / from.block * 4;  // bytes
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    int64_t scale_at = scales_at + (first + row * COLL_LANES < count ? row * scales_of_row : 0);  // of one that is there
    COLL_UNROLL
    for (int w = 0; w < kWires; ++w) {
      float factor = F::kScaled ? *(const float*)((const char*)wire_of(from, k + w) + scale_at) : 1.0f;
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) {
        float value = F::value(packs[w][row].at[j]);
        x[row][j] += F::kScaled ? value * factor : value;
      }
    }
  }
}

// The sum of the wires' elements, in the order of the wires, scaled.
template <class F>
static __device__ __forceinline__ void decode(const coll_decoder& from, float scale, coll_column& x, int64_t tile, int first,
                                              int count) {
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[row][j] = -0.0f;  // to which any value can be added and stays what it is
  }
  int64_t k = 0;
  if (F::kScaled) {
    COLL_KEEP_LOOP
    for (; k + 4 <= from.wire_count; k += 4) add_wires<F, 4>(x, from, k, tile, first, count);
  }
  COLL_KEEP_LOOP
  for (; k + 2 <= from.wire_count; k += 2) add_wires<F, 2>(x, from, k, tile, first, count);
  if (k < from.wire_count) add_wires<F, 1>(x, from, k, tile, first, count);
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[row][j] = coll_decoded(x[row][j], from.average_over, scale);
  }
}

// The address of the wires' addresses; of a single wire NULL.
template <class Args>
static __device__ __forceinline__ const void* const* wires_of(const coll_launch<Args>& launch) {
  return launch.args.from.wire_count > 1 ? coll_rows_of(launch, launch.args.from.wires) : nullptr;
}

struct coll_from_wires {
  const coll_decoder& from;
  float scale;

  template <class F>
  __device__ __forceinline__ void load(coll_column& x, int64_t tile, int first, int count) const {
    decode<F>(from, scale, x, tile, first, count);
  }
};

// A column of the residual as it lies in memory: a pack of bf16 has half of the bytes.
static __device__ __forceinline__ void load_residual(coll_pack_of<float>* kept, const coll_encoder& to, int64_t tile, int first,
                                                     int count) {
  if (to.residual_type == COLL_F32) {
    load_packs(kept, (const float*)to.residual + tile, first, count);
    return;
  }
  coll_pack_of<coll_bf16> packs[COLL_ROWS];
  load_packs(packs, (const coll_bf16*)to.residual + tile, first, count);
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) kept[row].at[j] = coll_bits_float(packs[row].at[j].bits);
  }
}

static __device__ __forceinline__ void add_residual(coll_column& x, const coll_pack_of<float>* kept, int type) {
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      float value = kept[row].at[j];
      x[row][j] += type == COLL_F32 ? value : coll_bf16_to_float((uint16_t)coll_float_bits(value));
    }
  }
}

// ---- A wire out.

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

// Without scales a value needs to know no other one.
template <class F, class Source>
static __device__ __forceinline__ void encode_plain(const Source& source, const coll_encoder& to, int64_t tile, int count) {
  COLL_KEEP_LOOP
  for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES && first < count; first += blockDim.x * COLL_PACK) {
    coll_column x;
    coll_pack_of<float> kept[COLL_ROWS];
    if (to.residual) load_residual(kept, to, tile, first, count);
    source.template load<F>(x, tile, first, count);
    if (to.residual) add_residual(x, kept, to.residual_type);
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) {
      int at = first + row * COLL_LANES;
      encode_pack<F>(to, x[row], coll_block_scale{1.0f, 1.0f}, tile + at, count - at);
    }
  }
}

// Values into `space`, and the largest magnitude of each pack.
template <class F, class Source>
static __device__ __forceinline__ void gather_tile(const Source& source, const coll_encoder& to, int64_t tile, int count,
                                                   coll_encode_space* space) {
  COLL_KEEP_LOOP
  for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES && first < count; first += blockDim.x * COLL_PACK) {
    coll_column x;
    coll_pack_of<float> kept[COLL_ROWS];
    if (to.residual) load_residual(kept, to, tile, first, count);
    source.template load<F>(x, tile, first, count);
    if (to.residual) add_residual(x, kept, to.residual_type);
    COLL_UNROLL
    for (int row = 0; row < COLL_ROWS; ++row) {
      int at = first + row * COLL_LANES;
      int32_t amax = 0;
      coll_pack_of<float> pack;
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) {
        pack.at[j] = x[row][j];
        int32_t magnitude = at + j < count ? coll_magnitude_bits(x[row][j]) : 0;
        amax = magnitude > amax ? magnitude : amax;
      }
      space->pack_amax[at / COLL_PACK] = amax;
      *(coll_pack_of<float>*)&space->values[at] = pack;
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
  float* scales = (float*)((char*)to.wire + coll_wire_scales_at(to.count, to.format)) + tile / to.block;
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

// A thread stores those packs that it has loaded, so that no other thread may have changed the
// residual in between.
template <class F, class Source>
static __device__ __forceinline__ void encode_scaled(const Source& source, const coll_encoder& to, int64_t tile, int count,
                                                     coll_encode_space* space) {
  gather_tile<F>(source, to, tile, count, space);
  find_scales<F>(to, tile, count, space);
  COLL_KEEP_LOOP
  for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES; first += blockDim.x * COLL_PACK) {
    COLL_KEEP_LOOP
    for (int at = first; at < count; at += COLL_LANES) {
      coll_pack_of<float> x = *(const coll_pack_of<float>*)&space->values[at];
      encode_pack<F>(to, x.at, space->scales[at / to.block], tile + at, count - at);
    }
  }
}

template <class F, class Source>
static __device__ __forceinline__ void encode_tile(const Source& source, const coll_encoder& to, int64_t tile, int count,
                                                   coll_encode_space* space) {
  if (F::kScaled) encode_scaled<F>(source, to, tile, count, space);
  else encode_plain<F>(source, to, tile, count);
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

// Tiles [first_tile, last_tile) of a wire that has `tiles`.
template <class Source>
static __device__ __forceinline__ void encode(const Source& source, const coll_encoder& to, int64_t tiles, int64_t first_tile,
                                              int64_t last_tile, coll_encode_space* space) {
  COLL_KEEP_LOOP
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    int64_t first = tile * COLL_TILE, left = to.count - first;
    int count = (int)(left < COLL_TILE ? left : COLL_TILE);
#define COLL_DO(F) encode_tile<F>(source, to, first, count, space)
    COLL_FOR_WIRE(to.format, COLL_DO)
#undef COLL_DO
    if (tile == tiles - 1) clear_padding(to);
  }
}

// This block's run of tiles.
static __device__ __forceinline__ int64_t tiles_before(int64_t tiles, int64_t block) { return tiles * block / gridDim.x; }

COLL_KERNEL_HELD(4) coll_quantize(const __grid_constant__ coll_quantize_args a) {
  __shared__ coll_encode_space space;
  double scale = coll_factor(a.scale, a.scale_at);
  int64_t first = tiles_before(a.work.tiles, blockIdx.x), last = tiles_before(a.work.tiles, blockIdx.x + (int64_t)1);
  coll_for_each_part(first, last, a.to.count, [&](int64_t part, int64_t first_tile, int64_t last_tile) {
    coll_quantize_args own = coll_part_of(a, part);
    coll_from_tensor source = {own.source, scale, a.source_type};
    encode(source, own.to, own.work.tiles, first_tile, last_tile, &space);
  });
}

COLL_KERNEL_HELD(4) coll_requantize(COLL_WITH_ROWS(coll_requantize_args) launch) {
  __shared__ coll_encode_space space;
  const coll_requantize_args& a = launch.args;
  coll_decoder from = a.from;
  from.wires = wires_of(launch);
  coll_from_wires source = {from, (float)coll_factor(from.scale, from.scale_at)};
  int64_t first = tiles_before(a.work.tiles, blockIdx.x), last = tiles_before(a.work.tiles, blockIdx.x + (int64_t)1);
  encode(source, a.to, a.work.tiles, first, last, &space);
}

// ---- A tensor out.
template <class D>
static __device__ __forceinline__ void store_typed(void* out, const coll_column& x, int64_t tile, int first, int count, bool add) {
  typedef coll_element<D> E;
  D* to = (D*)out + tile;
  coll_pack_of<D> old[COLL_ROWS];
  if (add) load_packs(old, (const D*)to, first, count);
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    coll_pack_of<D> pack;
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      typename E::acc value = (typename E::acc)x[row][j];
      if (add) value = (typename E::acc)(E::load(old[row].at[j]) + value);
      pack.at[j] = E::store(value);
    }
    store_pack(to + first + row * COLL_LANES, pack, count - first - row * COLL_LANES);
  }
}

static __device__ __forceinline__ void store(const coll_dequantize_args& a, const coll_column& x, int64_t tile, int first,
                                             int count) {
  bool add = a.flags & COLL_ADD;
  switch (a.out_type) {
    case COLL_F32: store_typed<float>(a.out, x, tile, first, count, add); break;
    case COLL_F16: store_typed<coll_fp16>(a.out, x, tile, first, count, add); break;
    case COLL_BF16: store_typed<coll_bf16>(a.out, x, tile, first, count, add); break;
    case COLL_F64: store_typed<double>(a.out, x, tile, first, count, add); break;
    case COLL_E4M3: store_typed<coll_e4m3>(a.out, x, tile, first, count, add); break;
    default: store_typed<coll_e5m2>(a.out, x, tile, first, count, add); break;
  }
}

static __device__ __forceinline__ void sum_lanes(const coll_column& x, int first, int count, float limit, float* lanes,
                                                 uint32_t* bad) {
  coll_pack_of<float> sums = {};
  COLL_UNROLL
  for (int row = 0; row < COLL_ROWS; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      if (first + row * COLL_LANES + j >= count) continue;
      sums.at[j] += x[row][j] * x[row][j];
      *bad += coll_is_bad(x[row][j], limit);
    }
  }
  *(coll_pack_of<float>*)&lanes[first] = sums;
}

static __device__ __forceinline__ void decode_tile(const coll_dequantize_args& a, const coll_decoder& from, float scale,
                                                   int64_t tile, float* lanes, uint32_t* bad) {
  int64_t first_element = tile * COLL_TILE, left = from.count - first_element;
  int count = (int)(left < COLL_TILE ? left : COLL_TILE);
  uint32_t own_bad = 0;
  COLL_KEEP_LOOP
  for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES; first += blockDim.x * COLL_PACK) {
    coll_column x;
    if (first < count) {
#define COLL_DO(F) decode<F>(from, scale, x, first_element, first, count)
      COLL_FOR_WIRE(from.format, COLL_DO)
#undef COLL_DO
      store(a, x, first_element, first, count);
    }
    if (a.work.sums) sum_lanes(x, first, count, (float)coll_limit(a.out_type), lanes, &own_bad);
  }
  if (a.work.sums) coll_leave_share(a.work, tile, lanes, bad, own_bad);
}

COLL_KERNEL_HELD(4) coll_dequantize(COLL_WITH_ROWS(coll_dequantize_args) launch) {
  const coll_dequantize_args& a = launch.args;
  __shared__ coll_pack_of<float> lanes[COLL_PACKS];
  __shared__ uint32_t bad;
  float scale = (float)coll_factor(a.from.scale, a.from.scale_at);
  const void* const* wires = wires_of(launch);
  int64_t first = tiles_before(a.work.tiles, blockIdx.x), last = tiles_before(a.work.tiles, blockIdx.x + (int64_t)1);
  coll_for_each_part(first, last, a.from.count, [&](int64_t part, int64_t first_tile, int64_t last_tile) {
    coll_dequantize_args own = coll_part_of(a, part);
    coll_decoder from = own.from;
    from.wires = wires;
    COLL_KEEP_LOOP
    for (int64_t tile = first_tile; tile < last_tile; ++tile) decode_tile(own, from, scale, tile, (float*)lanes, &bad);
  });
}
