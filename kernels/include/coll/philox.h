// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random bits as a
// function of a seed and of an element's index, the same on every device, for any split of the elements.
//
// Element e of a tensor gets word e % 4 of the block whose counter is e / 4 and whose key is the seed. Rounding at random by
// these bits is here as well: a value between two neighbours of a format goes to the upper one with a probability that is its
// distance from the lower one in units of theirs, so that its mean is the value itself.
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
#pragma unroll
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

// ---- Rounding at random, to a format whose unit below its normal range is 2^-UNIT, with MANTISSA bits and fp32's exponents
// less BIAS. `random`: 32 bits, of which the upper ones are used. `a`: bits of a magnitude. Gives the format's bits, perhaps
// past its largest.
template <int MANTISSA, int BIAS, int UNIT>
COLL_FN uint32_t coll_round_magnitude_at_random(uint32_t a, uint32_t random) {
  // Normal results: exact, all bits that are cut off have their share of the probability.
  uint32_t normal = (a - ((uint32_t)BIAS << 23) + (random >> (9 + MANTISSA))) >> (23 - MANTISSA);
  // Subnormal ones: in units of 2^-(30 - MANTISSA) of the last place; what is below that is cut off.
  const uint32_t least = (uint32_t)(BIAS + 1) << 23;  // the least normal number, as a float
  float fixed = coll_bits_float(a < least ? a : 0u) * (float)(1ull << (UNIT + 30 - MANTISSA));
  uint32_t subnormal = ((uint32_t)(int32_t)fixed + (random >> (2 + MANTISSA))) >> (30 - MANTISSA);
  return a < least ? subnormal : normal;
}

// fp8 saturates, as it does when it is rounded to nearest. NaN isn't taken.
COLL_FN uint8_t coll_float_to_e4m3_at_random(float x, uint32_t random) {
  uint32_t u = coll_float_bits(x);
  uint32_t r = coll_round_magnitude_at_random<3, 120, 9>(u & 0x7fffffffu, random);
  return (uint8_t)((u >> 24 & 0x80u) | (r < 0x7eu ? r : 0x7eu));
}

COLL_FN uint8_t coll_float_to_e5m2_at_random(float x, uint32_t random) {
  uint32_t u = coll_float_bits(x);
  uint32_t r = coll_round_magnitude_at_random<2, 112, 16>(u & 0x7fffffffu, random);
  return (uint8_t)((u >> 24 & 0x80u) | (r < 0x7bu ? r : 0x7bu));
}

// What is infinite when it is rounded to nearest is infinite here too, and nothing else; NaN stays NaN.
COLL_FN uint16_t coll_float_to_fp16_at_random(float x, uint32_t random) {
  uint32_t u = coll_float_bits(x);
  uint32_t a = u & 0x7fffffffu;
  uint32_t r = coll_round_magnitude_at_random<10, 112, 24>(a, random);
  r = r < 0x7bffu ? r : 0x7bffu;
  return a >= 0x477ff000u ? coll_float_to_fp16(x) : (uint16_t)((u >> 16 & 0x8000u) | r);
}

COLL_FN uint16_t coll_float_to_bf16_at_random(float x, uint32_t random) {
  uint32_t u = coll_float_bits(x);
  uint32_t a = u & 0x7fffffffu;
  uint32_t r = (a + (random >> 16)) >> 16;
  r = r < 0x7f7fu ? r : 0x7f7fu;
  return a >= 0x7f7f8000u ? coll_float_to_bf16(x) : (uint16_t)((u >> 16 & 0x8000u) | r);
}

#if !defined(__CUDACC__)
namespace {

// ---- The words of `count` elements from `first` on, many counters at a time. g++ shuffles too much when it is left to
// vectorise coll_philox itself (3 times slower with AVX2): here a 64-bit lane holds one 32-bit word, and what is above is
// left to be garbage, since pmuludq doesn't look at it.
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

// Room for the words of `count` elements: whole groups are made, and the first may begin 3 words early.
#define COLL_PHILOX_ROOM(count) ((count) + 8 * COLL_PHILOX_LANES)

// Give where in `room` the word of element `first` is; those of the next count - 1 elements follow.
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
