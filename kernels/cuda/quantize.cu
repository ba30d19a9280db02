// The CUDA launchers of the wire formats. A warp writes a strip of a wire at a time: whole blocks of
// values, of which each lane has 16 in registers while the warp finds the blocks' largest magnitudes.
// A wire is read in columns of a tile, since its statistics are (tile.h).
#include "wire.cuh"

// Blocks that a multiprocessor holds of the kernels that write a wire, of those with more to do, and of
// those that read wires: as many as the compiler spills no registers for.
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000)
#define COLL_ENCODERS 5
#define COLL_FEEDBACKS 3
#define COLL_DECODERS 4
#else
#define COLL_ENCODERS 4
#define COLL_FEEDBACKS 2
#define COLL_DECODERS (__CUDA_ARCH__ < 900 ? 3 : 2)
#endif

#define COLL_STRIP COLL_LARGEST_BLOCK              // elements
#define COLL_STRIP_ROW (COLL_WARP * COLL_PACK)     // elements that a warp has side by side: the smallest block
#define COLL_STRIP_ROWS (COLL_STRIP / COLL_STRIP_ROW)
static_assert(COLL_STRIP_ROW == COLL_LEAST_BLOCK && COLL_STRIP_ROWS == 4, "the scales of a strip are four at most");

// ---- A wire out.

// Some rows of a strip, with the residual added.
template <int kRows, bool kPlain, class Source>
static __device__ __forceinline__ void take_rows(float (*x)[COLL_PACK], const Source& source, const coll_encoder& to, int64_t tile,
                                                 int at, int count) {
  source.template load<kRows, COLL_STRIP_ROW>(x, tile, at, count);
  if (kPlain || !to.residual) return;
  constexpr int kAtOnce = kRows > 1 ? kRows / 2 : 1;  // of the residual: all would take too many registers
  COLL_UNROLL
  for (int row = 0; row < kRows; row += kAtOnce) {
    coll_words<4> kept[kAtOnce];
    load_residual<kAtOnce, COLL_STRIP_ROW>(kept, to, tile, at + row * COLL_STRIP_ROW, count);
    add_residual<kAtOnce>(x + row, kept, to.residual_type);
  }
}

// The largest magnitude of a row of a strip, of which this lane has a pack. Elements that aren't there
// are 0 (load_packs): by any factor they stay 0, or those before them aren't finite either.
static __device__ __forceinline__ int32_t largest_of_row(const float* x) {
  int32_t most = 0;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) most = coll_larger_magnitude(most, x[j]);
  return coll_warp_max(most);
}

// `amax`: of row lane % 4, becomes that of the row's block. Returns the block's scale in lanes 0 to 3,
// its inverse in lanes 4 to 7: one division for each lane.
static __device__ __forceinline__ float scale_of_lane(int32_t amax, int block, float limit) {
  COLL_UNROLL
  for (int by = 1; by < COLL_STRIP_ROWS; by *= 2) {
    int32_t other = __shfl_xor_sync(0xffffffffu, amax, by);
    amax = COLL_MUTANT(16, block > by * COLL_STRIP_ROW, true) && other > amax ? other : amax;
  }
  return coll_scale_part(amax, limit, threadIdx.x & COLL_STRIP_ROWS);
}

// `carried`: the value that the receiver decodes. Where that isn't finite the residual stays as it was.
template <class T, bool kWhole>
static __device__ __forceinline__ void leave_residual(T* residual, const float* x, const float* carried, int live) {
  int32_t most = 0;
  coll_pack_of<T> pack;
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    most = coll_larger_magnitude(most, carried[j]);
    pack.at[j] = coll_element<T>::store(x[j] - carried[j]);
  }
  if (coll_finite_bits(most)) {
    if (kWhole) *(coll_pack_of<T>*)residual = pack;
    else store_pack(residual, pack, live);
    return;
  }
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    if ((kWhole || j < live) && coll_finite_bits(coll_magnitude_bits(carried[j]))) residual[j] = pack.at[j];
  }
}

// A pack of elements, side by side in words, rounded to nearest.
template <class F>
static __device__ __forceinline__ void round_pack(uint32_t* words, const float* x, float inverse) {
  float t[COLL_PACK];
  if constexpr (F::kScaled) {
    // Zeros for values that may not be finite are put in before the functor, or else at the end.
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) t[j] = F::kAnyRounds || inverse != 0.0f ? x[j] * inverse : 0.0f;
    uint32_t word = coll_nearest_four(F(), t);
    words[0] = inverse != 0.0f ? word : 0u;
  } else {
    words[0] = coll_nearest_two(F(), x[0], x[1]);
    words[1] = coll_nearest_two(F(), x[2], x[3]);
  }
}

template <class F>
static __device__ __forceinline__ void round_pack_at_random(uint32_t* words, const float* x, float inverse,
                                                            const coll_encoder& to, int64_t at) {
  coll_philox_words random = coll_philox_pack(to.seed, (uint64_t)(to.position + at));
  float t[COLL_PACK];
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) t[j] = !F::kScaled ? x[j] : inverse != 0.0f ? x[j] * inverse : 0.0f;
  uint32_t r0 = F::at_random(t[0], random.w0), r1 = F::at_random(t[1], random.w1);
  uint32_t r2 = F::at_random(t[2], random.w2), r3 = F::at_random(t[3], random.w3);
  if constexpr (F::kScaled) {
    words[0] = r0 | r1 << 8 | r2 << 16 | r3 << 24;
  } else {
    words[0] = r0 | r1 << 16;
    words[1] = r2 | r3 << 16;
  }
}

// The pack at `at`, of which `live` elements are there.
template <class F, bool kWhole>
static __device__ __forceinline__ void store_words(const coll_encoder& to, const coll_words<sizeof(typename F::element)>& words,
                                                   int64_t at, int live) {
  typedef typename F::element E;
  E* wire = (E*)to.wire + at;
  if (kWhole) {
    *(coll_words<sizeof(E)>*)wire = words;
    return;
  }
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) {
    if (COLL_MUTANT(15, j < live, j <= live)) wire[j] = element_of<E>::from(words.at, j);
  }
}

template <class F, bool kWhole>
static __device__ __forceinline__ void leave_residual_of(const coll_encoder& to, const float* x,
                                                         const coll_words<sizeof(typename F::element)>& words, float scale,
                                                         int64_t at, int live) {
  float carried[COLL_PACK];
  coll_values_of_four(F(), words.at, carried);
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) carried[j] = F::kScaled ? carried[j] * scale : carried[j];
  if (to.residual_type == COLL_F32) leave_residual<float, kWhole>((float*)to.residual + at, x, carried, live);
  else leave_residual<coll_bf16, kWhole>((coll_bf16*)to.residual + at, x, carried, live);
}

// Rows from `row` of a strip on; `scales`: what scale_of_lane returned.
template <class F, int kRows, bool kWhole, bool kPlain>
static __device__ __forceinline__ void encode_rows(const coll_encoder& to, float (*x)[COLL_PACK], float scales, int row,
                                                   int64_t tile, int at, int count) {
  if constexpr (kPlain) {
    COLL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      coll_words<sizeof(typename F::element)> words;
      float inverse = F::kScaled ? __shfl_sync(0xffffffffu, scales, row + i + COLL_STRIP_ROWS) : 1.0f;
      round_pack<F>(words.at, x[i], inverse);
      store_words<F, kWhole>(to, words, tile + at + i * COLL_STRIP_ROW, count - at - i * COLL_STRIP_ROW);
    }
    return;
  }
  // One text for all rows, which come to the first one's registers in turn: it is long.
  coll_words<sizeof(typename F::element)> words;
  COLL_KEEP_LOOP
  for (int i = 0; i < kRows; ++i) {
    float inverse = F::kScaled ? __shfl_sync(0xffffffffu, scales, row + i + COLL_STRIP_ROWS) : 1.0f;
    float scale = F::kScaled ? __shfl_sync(0xffffffffu, scales, row + i) : 1.0f;
    int own = at + i * COLL_STRIP_ROW;
    if (to.stochastic) round_pack_at_random<F>(words.at, x[0], inverse, to, tile + own);
    else round_pack<F>(words.at, x[0], inverse);
    store_words<F, kWhole>(to, words, tile + own, count - own);
    if (to.residual) leave_residual_of<F, kWhole>(to, x[0], words, scale, tile + own, count - own);
    COLL_UNROLL
    for (int next = 1; next < kRows; ++next) {
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) x[next - 1][j] = x[next][j];
    }
  }
}

// The blocks' scales into the wire. Lanes whose rows are of one block have the same one.
static __device__ __forceinline__ void leave_scales(const coll_encoder& to, float scales, int64_t tile, int strip, int count) {
  int row = threadIdx.x % COLL_WARP * COLL_STRIP_ROW;
  if (row >= COLL_STRIP || strip + row >= count) return;
  ((float*)((char*)to.wire + coll_wire_scales_at(to.count, to.format)))[(tile + strip + row) >> block_shift(to.block)] = scales;
}

template <class F, bool kWhole, bool kPlain, class Source>
static __device__ __forceinline__ void encode_loaded(const Source& source, const coll_encoder& to, float (*x)[COLL_PACK],
                                                     int32_t amax, int64_t tile, int strip, int at, int count) {
  float scales = F::kScaled ? scale_of_lane(amax, to.block, F::kLimit) : 1.0f;
  if constexpr (kWhole) {
    encode_rows<F, COLL_STRIP_ROWS, true, kPlain>(to, x, scales, 0, tile, at, count);
  } else {
    COLL_KEEP_LOOP
    for (int row = 0; row < COLL_STRIP_ROWS; ++row) {
      take_rows<1, kPlain>(x, source, to, tile, at + row * COLL_STRIP_ROW, count);
      encode_rows<F, 1, false, kPlain>(to, x, scales, row, tile, at + row * COLL_STRIP_ROW, count);
    }
    __syncwarp();
  }
  if (F::kScaled) leave_scales(to, scales, tile, strip, count);
}

// A strip, from element `strip` of a tile on. A lane stores the packs that it has loaded, and the
// scales come last, so that the wire may be one of those that are read. kWhole: all of its elements
// are there, and all addresses take packs; elsewhere it is read twice, row by row, since registers
// hold no loop's rows.
template <bool kWhole, bool kPlain, class Source>
static __device__ __forceinline__ void encode_strip(const Source& source, const coll_encoder& to, int64_t tile, int strip,
                                                    int count) {
  constexpr int kRows = kWhole ? COLL_STRIP_ROWS : 1;
  int at = strip + threadIdx.x % COLL_WARP * COLL_PACK;
  bool scaled = coll_wire_scaled(to.format);
  float x[kRows][COLL_PACK];
  int32_t amax = 0;
  if (kWhole) take_rows<kRows, kPlain>(x, source, to, tile, at, count);
  if (kWhole && scaled) {
    COLL_UNROLL
    for (int row = 0; row < kRows; ++row) {
      int32_t most = largest_of_row(x[row]);
      amax = threadIdx.x % COLL_STRIP_ROWS == row ? most : amax;
    }
  }
  if (!kWhole && scaled) {
    COLL_KEEP_LOOP
    for (int row = 0; row < COLL_STRIP_ROWS; ++row) {
      take_rows<1, kPlain>(x, source, to, tile, at + row * COLL_STRIP_ROW, count);
      int32_t most = largest_of_row(x[0]);
      amax = threadIdx.x % COLL_STRIP_ROWS == row ? most : amax;
    }
  }
#define COLL_DO(F) encode_loaded<F, kWhole, kPlain>(source, to, x, amax, tile, strip, at, count)
  COLL_FOR_WIRE(to.format, COLL_DO)
#undef COLL_DO
}

// What lies between the payload and the scales, and behind them: at most 15 bytes and 3 scales.
static __device__ __forceinline__ void clear_padding(const coll_encoder& to) {
  if (threadIdx.x % COLL_WARP != 0) return;
  int64_t scales_at = coll_wire_scales_at(to.count, to.format);
  for (int64_t i = to.count * coll_wire_width(to.format); i < scales_at; ++i) ((uint8_t*)to.wire)[i] = 0;
  if (!coll_wire_scaled(to.format)) return;
  int64_t blocks = coll_wire_blocks(to.count, to.block);
  float* scales = (float*)((char*)to.wire + scales_at);
  for (int64_t i = blocks; i % 4 != 0; ++i) scales[i] = 0.0f;
}

// The strip from element `strip` of tile `tile` of a wire on; `packs`: all addresses take packs.
template <bool kPlain, class Source>
static __device__ __forceinline__ void encode(const Source& source, const coll_encoder& to, int64_t tile, int strip, bool packs) {
  int64_t first = tile * COLL_TILE, left = to.count - first;
  int count = (int)(left < COLL_TILE ? left : COLL_TILE);
  if (strip >= count) return;
  if (packs && strip + COLL_STRIP <= count) encode_strip<true, kPlain>(source, to, first, strip, count);
  else encode_strip<false, kPlain>(source, to, first, strip, count);
  if (left <= strip + COLL_STRIP) clear_padding(to);
}

// f(tile, strip) for each of this warp's strips. No memory has 2^32 strips.
template <class F>
static __device__ __forceinline__ void for_each_strip(int64_t tiles, F f) {
  constexpr uint32_t kStrips = COLL_TILE / COLL_STRIP;
  uint32_t warps = blockDim.x / COLL_WARP, strips = (uint32_t)tiles * kStrips;
  COLL_KEEP_LOOP
  for (uint32_t i = blockIdx.x * warps + threadIdx.x / COLL_WARP; i < strips; i += gridDim.x * warps) {
    f(i / kStrips, (int)(i % kStrips * COLL_STRIP));
  }
}

// f(tile) for each of this block's tiles. No memory has 2^31 tiles.
template <class F>
static __device__ __forceinline__ void for_each_tile(int64_t tiles, F f) {
  COLL_KEEP_LOOP
  for (uint32_t tile = blockIdx.x; tile < (uint32_t)tiles; tile += gridDim.x) f(tile);
}

// The part that a tile belongs to.
template <class Args>
static __device__ __forceinline__ uint32_t part_of(const Args& a, uint32_t tile, uint32_t tiles) {
  return a.work.tiles == tiles ? 0 : tile / tiles;
}

template <bool kPlain>
static __device__ __forceinline__ void quantize(const coll_quantize_args& a) {
  double scale = coll_factor(a.scale, a.scale_at);
  uint32_t tiles = (uint32_t)coll_tiles_of(a.to.count);
  bool several = a.work.tiles != tiles;
  int64_t stride = several ? a.parts.stride : 0, wire_stride = several ? a.parts.wire_stride : 0;
  bool packs = takes_packs(a.source, a.source_type, stride) &&
               takes_packs((const void*)((uint64_t)a.to.wire | (uint64_t)wire_stride), a.to.format) &&
               (kPlain || !a.to.residual || takes_packs(a.to.residual, a.to.residual_type, stride));
  for_each_strip(a.work.tiles, [&](uint32_t tile, int strip) {
    uint32_t part = part_of(a, tile, tiles);
    coll_quantize_args own = a;
    if (part != 0) own = coll_part_of(a, part);
    coll_from_tensor source = {own.source, scale, a.source_type};
    encode<kPlain>(source, own.to, tile - part * tiles, strip, packs);
  });
}

template <bool kPlain>
static __device__ __forceinline__ void requantize(const coll_launch<coll_requantize_args>& launch) {
  const coll_requantize_args& a = launch.args;
  coll_decoder from = a.from;
  from.wires = wires_of(launch);
  coll_from_wires source = {from, (float)coll_factor(from.scale, from.scale_at)};
  bool packs = takes_packs(from) && takes_packs(a.to.wire, a.to.format) &&
               (kPlain || !a.to.residual || takes_packs(a.to.residual, a.to.residual_type));
  for_each_strip(a.work.tiles, [&](uint32_t tile, int strip) { encode<kPlain>(source, a.to, tile, strip, packs); });
}

// Without a residual, rounded to nearest; and with either: more registers and a longer text.
COLL_KERNEL_HELD(COLL_ENCODERS) coll_quantize(const __grid_constant__ coll_quantize_args a) { quantize<true>(a); }
COLL_KERNEL_HELD(COLL_FEEDBACKS) coll_quantize_feedback(const __grid_constant__ coll_quantize_args a) { quantize<false>(a); }
COLL_KERNEL_HELD(COLL_ENCODERS) coll_requantize(COLL_WITH_ROWS(coll_requantize_args) a) { requantize<true>(a); }
COLL_KERNEL_HELD(COLL_FEEDBACKS) coll_requantize_feedback(COLL_WITH_ROWS(coll_requantize_args) a) { requantize<false>(a); }

// ---- A tensor out.
template <class D, int kRows, bool kAdd>
static __device__ __forceinline__ void store_rows(D* tile, const float (*x)[COLL_PACK], int at, int count) {
  typedef coll_element<D> E;
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    D* to = tile + at + row * COLL_LANES;
    coll_words<sizeof(D)> old;
    if (kAdd && kRows > 1) old = *(const coll_words<sizeof(D)>*)to;
    else if (kAdd) load_packs<kRows, COLL_LANES>(&old, tile, at, count);
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
template <int kRows, bool kMany>
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
      decode_any<kRows, COLL_LANES, kMany>(x, from, scale, tile, at, count);
      if (a.work.sums) {
        COLL_UNROLL
        for (int row = 0; row < kRows; ++row) {
          COLL_UNROLL
          for (int j = 0; j < COLL_PACK; ++j) {
            if (kRows == 1 && at + j >= count) continue;
            sums.at[j] += x[row][j] * x[row][j];
            if (kRows == 1) bad += coll_is_bad(x[row][j], limit);
          }
        }
        if (kRows > 1) bad += coll_count_bad<kRows * COLL_PACK>(x[0], limit);
      }
      store<kRows>(a, x, tile, at, count);
    }
    if (a.work.sums) lanes[column] = sums;
  }
  return bad;
}

template <bool kMany>
static __device__ __forceinline__ void dequantize(const coll_launch<coll_dequantize_args>& launch) {
  const coll_dequantize_args& a = launch.args;
  __shared__ coll_share_space<float, 1> space;
  int turn = 0;
  if (a.work.sums) coll_begin_shares(&space);
  float scale = (float)coll_factor(a.from.scale, a.from.scale_at);
  coll_decoder own_wires = a.from;
  own_wires.wires = wires_of(launch);
  bool take_packs = takes_packs(own_wires) && a.parts.wire_stride % 16 == 0 && (!kMany || takes_packs(a.out, a.out_type));
  for_each_tile(a.work.tiles, [&](uint32_t tile) {
    uint32_t tiles = (uint32_t)coll_tiles_of(a.from.count), part = kMany ? 0 : part_of(a, tile, tiles);
    coll_dequantize_args own = kMany ? a : coll_part_of(a, part);
    own.from.wires = own_wires.wires;
    int64_t at = (int64_t)(tile - part * tiles) * COLL_TILE, left = own.from.count - at;
    int count = (int)(left < COLL_TILE ? left : COLL_TILE);
    bool packs = take_packs && (kMany || takes_packs(own.out, a.out_type)) && count == COLL_TILE;
    coll_pack_of<float>* lanes = (coll_pack_of<float>*)space.lanes[0];
    uint32_t own_bad = packs
                           ? decode_tile<COLL_ROWS, kMany>(own, own.from, scale, at, COLL_TILE, lanes)
                           : decode_tile<1, kMany>(own, own.from, scale, at, count, lanes);
    if (a.work.sums) coll_leave_share<float>(a.work, tile, &space, &turn, own_bad);
  });
}

// One wire for each part, and several wires of one part.
COLL_KERNEL_HELD(COLL_DECODERS) coll_dequantize(COLL_WITH_ROWS(coll_dequantize_args) a) { dequantize<false>(a); }
COLL_KERNEL_HELD(COLL_DECODERS) coll_reduce_wires(COLL_WITH_ROWS(coll_dequantize_args) a) { dequantize<true>(a); }
