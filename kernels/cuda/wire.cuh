// Common parts of the CUDA launchers of the wire formats: packs from memory to registers, as values of
// a tensor, of wires that are summed, and of a residual.
#ifndef COLL_WIRE_CUH_
#define COLL_WIRE_CUH_

#include "coll/quantize.h"
#include "tile.cuh"

// ---- Columns: kRows packs from element `at` of a tile on, kStep elements apart, of `count` elements
// that the tile has. Four of them are on their way at a time where all are there and their addresses
// allow it; one, with a look at each address, elsewhere.

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
template <int kRows, int kStep, int kWidth>
static __device__ __forceinline__ void load_packs(coll_words<kWidth>* packs, const void* tile, int at, int count) {
  typedef coll_words<kWidth> Words;
  const char* from = (const char*)tile + at * kWidth;
  if (kRows > 1) {
    COLL_UNROLL
    for (int row = 0; row < kRows; ++row) packs[row] = *(const Words*)(from + row * kStep * kWidth);
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
  return ((uint64_t)array & (uint64_t)(coll_width(type) * COLL_PACK - 1)) == 0;
}

// The same for every part's part of an array, `stride` elements apart. It is asked once a launch:
// asked for each tile, it takes as many instructions as everything else.
static __device__ __forceinline__ bool takes_packs(const void* array, int type, int64_t stride) {
  return takes_packs((const void*)((uint64_t)array | (uint64_t)(stride * coll_width(type))), type);
}

// ---- Values in: a column of the tile whose first element is `tile`.
struct coll_from_tensor {
  const void* source;
  double scale;
  int type;

  template <class S, int kRows, int kStep>
  __device__ __forceinline__ void load_typed(float (*x)[COLL_PACK], int64_t tile, int at, int count) const {
    constexpr int kAtOnce = sizeof(S) == 8 ? 1 : kRows;  // of doubles more would take too many registers
    COLL_UNROLL
    for (int first = 0; first < kRows; first += kAtOnce) {
      coll_words<sizeof(S)> packs[kAtOnce];
      load_packs<kAtOnce, kStep>(packs, (const S*)source + tile, at + first * kStep, count);
      COLL_UNROLL
      for (int row = 0; row < kAtOnce; ++row) {
        COLL_UNROLL
        for (int j = 0; j < COLL_PACK; ++j) x[first + row][j] = coll_scaled(element_of<S>::from(packs[row].at, j), scale);
      }
    }
  }

  template <int kRows, int kStep>
  __device__ __forceinline__ void load(float (*x)[COLL_PACK], int64_t tile, int at, int count) const {
    switch (type) {
      case COLL_F32: load_typed<float, kRows, kStep>(x, tile, at, count); break;
      case COLL_F16: load_typed<coll_fp16, kRows, kStep>(x, tile, at, count); break;
      case COLL_BF16: load_typed<coll_bf16, kRows, kStep>(x, tile, at, count); break;
      case COLL_F64: load_typed<double, kRows, kStep>(x, tile, at, count); break;
      case COLL_E4M3: load_typed<coll_e4m3, kRows, kStep>(x, tile, at, count); break;
      default: load_typed<coll_e5m2, kRows, kStep>(x, tile, at, count); break;
    }
  }
};

static __device__ __forceinline__ const void* wire_of(const coll_decoder& from, int k) {
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
  for (int k = 0; k < (int)from.wire_count; ++k) addresses |= (uint64_t)wire_of(from, k);
  return takes_packs((const void*)addresses, from.format);
}

// A division by it as a shift: 64 bits wide it would take a hundred instructions.
static __device__ __forceinline__ int block_shift(int block) { return block == 128 ? 7 : block == 256 ? 8 : 9; }

// Add kWires wires from wire k on, in their order.
template <class F, int kRows, int kStep, int kWires>
static __device__ __forceinline__ void add_wires(float (*x)[COLL_PACK], const coll_decoder& from, int k, int64_t tile, int at,
                                                 int count) {
  typedef typename F::element E;
  coll_words<sizeof(E)> packs[kWires][kRows];
  const char* scales[kWires];
  int shift = block_shift(from.block);
  int64_t scales_at = coll_wire_scales_at(from.count, from.format) + (((tile + at) >> shift) << 2);
  COLL_UNROLL
  for (int w = 0; w < kWires; ++w) {
    const char* wire = (const char*)wire_of(from, k + w);
    scales[w] = wire + scales_at;
    load_packs<kRows, kStep>(packs[w], (const E*)wire + tile, at, count);
  }
  COLL_UNROLL
  for (int w = 0; w < kWires; ++w) {
    COLL_UNROLL
    for (int row = 0; row < kRows; ++row) {
      int scale_of_row = row * kStep >> shift << 2;  // bytes
      float factor = F::kScaled ? *(const float*)(scales[w] + scale_of_row) : 1.0f;
      float values[COLL_PACK];
      coll_values_of_four(F(), packs[w][row].at, values);
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) x[row][j] += F::kScaled ? values[j] * factor : values[j];
    }
  }
}

// The average, and the scale. A division by a power of two is a product, to the last bit.
template <int kRows>
static __device__ __forceinline__ void finish_sums(float (*x)[COLL_PACK], int average_over, float scale) {
  bool power = average_over > 0 && (average_over & (average_over - 1)) == 0;
  float factor = power ? 1.0f / (float)average_over : 1.0f;
  if (power || average_over <= 0) {
    COLL_UNROLL
    for (int row = 0; row < kRows; ++row) {
      COLL_UNROLL
      for (int j = 0; j < COLL_PACK; ++j) x[row][j] = coll_decoded(x[row][j] * factor, 0, scale);
    }
    return;
  }
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[row][j] = coll_decoded(x[row][j], average_over, scale);
  }
}

// The sum of the wires' elements, in the order of the wires, scaled. kMany: of any number of wires,
// else of one.
template <class F, int kRows, int kStep, bool kMany>
static __device__ __forceinline__ void decode(float (*x)[COLL_PACK], const coll_decoder& from, float scale, int64_t tile, int at,
                                              int count) {
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) x[row][j] = -0.0f;  // to which any value can be added and stays what it is
  }
  if constexpr (!kMany) {
    add_wires<F, kRows, kStep, 1>(x, from, 0, tile, at, count);
    finish_sums<kRows>(x, from.average_over, scale);
    return;
  }
  int k = 0, wires = (int)from.wire_count;
  if (kStep < COLL_LANES && kRows > 1 && sizeof(typename F::element) == 1) {  // statistics take the registers of two
    COLL_KEEP_LOOP
    for (; k + 4 <= wires; k += 4) add_wires<F, kRows, kStep, 4>(x, from, k, tile, at, count);
  }
  if (kRows > 1) {
    COLL_KEEP_LOOP
    for (; k + 2 <= wires; k += 2) add_wires<F, kRows, kStep, 2>(x, from, k, tile, at, count);
  }
  COLL_KEEP_LOOP
  for (; k < wires; ++k) add_wires<F, kRows, kStep, 1>(x, from, k, tile, at, count);
  finish_sums<kRows>(x, from.average_over, scale);
}

template <int kRows, int kStep, bool kMany>
static __device__ __forceinline__ void decode_any(float (*x)[COLL_PACK], const coll_decoder& from, float scale, int64_t tile,
                                                  int at, int count) {
#define COLL_DO(F) decode<F, kRows, kStep, kMany>(x, from, scale, tile, at, count)
  COLL_FOR_WIRE(from.format, COLL_DO)
#undef COLL_DO
}

struct coll_from_wires {

  const coll_decoder& from;
  float scale;

  template <int kRows, int kStep>
  __device__ __forceinline__ void load(float (*x)[COLL_PACK], int64_t tile, int at, int count) const {
    decode_any<kRows, kStep, true>(x, from, scale, tile, at, count);
  }
};

// A column of the residual as it lies in memory: a pack of bf16 takes the first two words.
template <int kRows, int kStep>
static __device__ __forceinline__ void load_residual(coll_words<4>* kept, const coll_encoder& to, int64_t tile, int at,
                                                     int count) {
  if (to.residual_type == COLL_F32) {
    load_packs<kRows, kStep>(kept, (const float*)to.residual + tile, at, count);
    return;
  }
  coll_words<2> packs[kRows];
  load_packs<kRows, kStep>(packs, (const coll_bf16*)to.residual + tile, at, count);
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

#endif
