// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011): random bits as a function of a seed and of an element's index, the same on every device,
// for any split of the elements.
//
// Element e of a tensor gets word e % 4 of the block whose counter is e / 4 and whose key is the
// seed. Rounding at random by these bits is here as well: a value between two neighbours of a
// format goes to either with a probability that falls with the distance, so that its mean is the
// value itself.
#ifndef COLL_PHILOX_H_
#define COLL_PHILOX_H_

#include "numeric.h"
#if !defined(__CUDACC__) && (defined(__SSE2__) || defined(__AVX2__) || defined(__AVX512F__))
#include <immintrin.h>
#endif

#define COLL_PHILOX_M0 0xD2511F53u
#define COLL_PHILOX_M1 0xCD9E8D57u
#define COLL_PHILOX_W0 0x9E3779B9u
#define COLL_PHILOX_W1 0xBB67AE85u

struct coll_philox_words {
  uint32_t w0, w1, w2, w3;
};

// One block: the counter c, the key (k0, k1).
COLL_FN coll_philox_words coll_philox(coll_philox_words c, uint32_t k0, uint32_t k1) {
#if defined(__CUDACC_RTC__)
#pragma unroll 2  // with all ten, the keys of all rounds are kept in registers, and other things are spilled
#endif
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = (uint64_t)c.w0 * COLL_PHILOX_M0;
    uint64_t p1 = (uint64_t)c.w2 * COLL_PHILOX_M1;
    coll_philox_words next = {(uint32_t)(p1 >> 32) ^ c.w1 ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c.w3 ^ k1, (uint32_t)p0};
    c = next;
    k0 += COLL_PHILOX_W0;
    k1 += COLL_PHILOX_W1;
  }
  return c;
}

// The words of elements [4 * index, 4 * index + 4).
COLL_FN coll_philox_words coll_philox_at(uint64_t seed, uint64_t index) {
  coll_philox_words counter = {(uint32_t)index, (uint32_t)(index >> 32), 0, 0};
  return coll_philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

// The words of the 4 elements from `first` on.
COLL_FN coll_philox_words coll_philox_pack(uint64_t seed, uint64_t first) {
  coll_philox_words a = coll_philox_at(seed, first / 4);
  int skip = (int)(first % 4);
  if (skip == 0) return a;
  coll_philox_words b = coll_philox_at(seed, first / 4 + 1);
  coll_philox_words one = {a.w1, a.w2, a.w3, b.w0}, two = {a.w2, a.w3, b.w0, b.w1}, three = {a.w3, b.w0, b.w1, b.w2};
  return skip == 1 ? one : skip == 2 ? two : three;
}

// ---- Rounding at random. `random`: 32 bits, of which the upper kShift are used, so that a value
// of the format stays as it is. Below the format's normal range a value is cut off at 2^-kShift of
// a unit before: that is all that the mean may be off. Format: a coll_small_float; kMost: its
// largest number, as bits of fp32. What is larger is taken for that; NaN too.
template <class Format, int32_t kMost>
COLL_FN uint32_t coll_round_at_random(float value, uint32_t random) {
  const int kShift = Format::kShift;
  uint32_t u = coll_float_bits(value);
  int32_t x = (int32_t)(u & 0x7fffffffu);
  x = x < kMost ? x : kMost;
  int32_t exponent = x & 0x7f800000;
  exponent = exponent > Format::kLeastNormal ? exponent : Format::kLeastNormal;
  // The product has 23 bits behind the point of the mantissa: kShift of them go.
  float fixed = coll_bits_float((uint32_t)x) * coll_bits_float((277u << 23) - (uint32_t)exponent);
  uint32_t digits = ((uint32_t)(int32_t)fixed + (random >> (32 - kShift))) >> kShift;
  uint32_t r = digits + (uint32_t)((exponent - Format::kLeastNormal) >> kShift);
  return (u >> Format::kSignShift & Format::kSign) | r;
}

COLL_FN uint8_t coll_float_to_e4m3_at_random(float x, uint32_t random) {
  return (uint8_t)coll_round_at_random<coll_e4m3_format, 0x43e00000>(x, random);
}

COLL_FN uint8_t coll_float_to_e5m2_at_random(float x, uint32_t random) {
  return (uint8_t)coll_round_at_random<coll_e5m2_format, 0x47600000>(x, random);
}

// What is infinite when it is rounded to nearest is infinite here too, and nothing else; NaN stays
// NaN.
COLL_FN uint16_t coll_float_to_fp16_at_random(float x, uint32_t random) {
  uint32_t r = coll_round_at_random<coll_fp16_format, 0x477fe000>(x, random);
  int32_t a = (int32_t)(coll_float_bits(x) & 0x7fffffffu);
  r = a >= 0x477ff000 ? (r & 0x8000u) | 0x7c00u : r;
  r |= a > 0x7f800000 ? 0x7e00u | ((uint32_t)a >> 13 & 0x3ffu) : 0u;
  return (uint16_t)r;
}

COLL_FN uint16_t coll_float_to_bf16_at_random(float x, uint32_t random) {
  uint32_t u = coll_float_bits(x);
  int32_t a = (int32_t)(u & 0x7fffffffu);
  int32_t most = a < 0x7f7f0000 ? a : 0x7f7f0000;
  uint32_t r = ((uint32_t)most + (random >> 16)) >> 16 | (u >> 16 & 0x8000u);
  uint32_t beyond = coll_float_to_bf16(x);
  return (uint16_t)(a >= 0x7f7f8000 ? beyond : r);
}

#if !defined(__CUDACC__)
namespace {

// ---- The words of `count` elements from `first` on, many counters at a time. g++ shuffles too
// much when it is left to vectorise coll_philox itself (3 times slower with AVX2): here a 64-bit
// lane holds one 32-bit word, and what is above is left to be garbage, since pmuludq doesn't look
// at it.
#if defined(__AVX512F__)
#define COLL_PHILOX_LANES 8
#define COLL_PHILOX_DO(what, a, b) _mm512_maskz_##what(0xff, (__m512i)(a), (__m512i)(b))  // the plain ones warn in g++ 12
#elif defined(__AVX2__)
#define COLL_PHILOX_LANES 4
#define COLL_PHILOX_DO(what, a, b) _mm256_##what((__m256i)(a), (__m256i)(b))
#elif defined(__SSE2__)
#define COLL_PHILOX_LANES 2
#define COLL_PHILOX_DO(what, a, b) _mm_##what((__m128i)(a), (__m128i)(b))
#endif

#if defined(COLL_PHILOX_LANES)
typedef unsigned long long coll_philox_lanes __attribute__((vector_size(8 * COLL_PHILOX_LANES)));

// Words of counters [index, index + COLL_PHILOX_LANES), 4 words each, in order.
inline void coll_philox_some(uint32_t* words, uint64_t seed, uint64_t index) {
  typedef coll_philox_lanes V;
  // Counters in such an order that the two halves of the result are as they lie in memory.
  V order = {};
  for (int i = 0; i < COLL_PHILOX_LANES; ++i) order[i] = i / 2 + i % 2 * (COLL_PHILOX_LANES / 2);
  V c0 = order + index, c1 = c0 >> 32, c2 = {}, c3 = {};
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    V p0 = (V)COLL_PHILOX_DO(mul_epu32, c0, V{} + COLL_PHILOX_M0);
    V p1 = (V)COLL_PHILOX_DO(mul_epu32, c2, V{} + COLL_PHILOX_M1);
    c0 = p1 >> 32 ^ c1 ^ k0;
    c2 = p0 >> 32 ^ c3 ^ k1;
    c1 = p1;
    c3 = p0;
    k0 += COLL_PHILOX_W0;
    k1 += COLL_PHILOX_W1;
  }
  V first = (c0 & 0xffffffffull) | c1 << 32, second = (c2 & 0xffffffffull) | c3 << 32;
  V low = (V)COLL_PHILOX_DO(unpacklo_epi64, first, second), high = (V)COLL_PHILOX_DO(unpackhi_epi64, first, second);
  memcpy(words, &low, sizeof low);
  memcpy(words + 2 * COLL_PHILOX_LANES, &high, sizeof high);
}
#else
#define COLL_PHILOX_LANES 1
inline void coll_philox_some(uint32_t* words, uint64_t seed, uint64_t index) {
  coll_philox_words w = coll_philox_at(seed, index);
  memcpy(words, &w, sizeof w);
}
#endif

// Room for the words of `count` elements: whole groups are made, and the first may begin 3 words
// early.
#define COLL_PHILOX_ROOM(count) ((count) + 8 * COLL_PHILOX_LANES)

// Returns where in `room` the word of element `first` is; those of the next count - 1 elements follow.
inline const uint32_t* coll_philox_fill(uint32_t* room, uint64_t seed, uint64_t first, int count) {
  int skip = (int)(first % 4);
  uint64_t index = first / 4;
  for (int done = 0; done < skip + count; done += 4 * COLL_PHILOX_LANES, index += COLL_PHILOX_LANES) {
    coll_philox_some(room + done, seed, index);
  }
  return room + skip;
}

}  // namespace
#endif
#endif
