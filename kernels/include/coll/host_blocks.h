// Blocks of elements to and from their accumulators, for the host launchers. An element has the same bits on every path.
#ifndef COLL_HOST_BLOCKS_H_
#define COLL_HOST_BLOCKS_H_

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "ops.h"

namespace {

// How many of the first n elements a conversion of the processor's own did.
template <class A, class T>
inline int coll_load_fast(A*, const T*, int) {
  return 0;
}
template <class T, class A>
inline int coll_store_fast(T*, const A*, int) {
  return 0;
}

#if defined(__F16C__)
inline int coll_load_fast(float* values, const coll_fp16* from, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  return i;
}

#if defined(__AVX2__)
// e5m2 is the upper half of an fp16.
inline int coll_load_fast(float* values, const coll_e5m2* from, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i halves = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    halves = _mm256_slli_epi16(halves, 8);
    _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
    _mm256_storeu_ps(values + i + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
  }
  return i;
}

// e4m3 moved into the place of an fp16's bits is 2^8 times too small; its NaN there becomes fp16's.
inline int coll_load_fast(float* values, const coll_e4m3* from, int n) {
  const __m256 rebias = _mm256_set1_ps(256.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    __m256i halves = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16((short)0xbf80));
    __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
    halves = _mm256_xor_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x3f80 ^ 0x7e00)));
    _mm256_storeu_ps(values + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), rebias));
    _mm256_storeu_ps(values + i + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), rebias));
  }
  return i;
}
#endif

inline int coll_store_fast(coll_fp16* to, const float* values, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  return i;
}
#endif

// values[i] = from[i], i < n. `values` and `from` don't overlap.
template <class A, class T>
inline void coll_load_block(A* __restrict values, const T* __restrict from, int n) {
  for (int i = coll_load_fast(values, from, n); i < n; ++i) values[i] = (A)coll_element<T>::load(from[i]);
}

// to[i] = values[i] rounded, i < n. `values` and `to` don't overlap.
template <class T, class A>
inline void coll_store_block(T* __restrict to, const A* __restrict values, int n) {
  for (int i = coll_store_fast(to, values, n); i < n; ++i) to[i] = coll_element<T>::store(values[i]);
}

}  // namespace
#endif
