// Blocks of elements to and from their accumulators, for the host launchers. An element has the
// same bits on every path.
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
// 16 elements of fp16 to fp32, times a number. With AVX-512 by one store: a load of its width right
// after two has to wait.
inline void coll_store_halves(float* values, __m256i halves, float times) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(values, _mm512_mul_ps(_mm512_maskz_cvtph_ps(0xffff, halves), _mm512_set1_ps(times)));
#else
  _mm256_storeu_ps(values, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_set1_ps(times)));
  _mm256_storeu_ps(values + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extractf128_si256(halves, 1)), _mm256_set1_ps(times)));
#endif
}

inline int coll_load_fast(float* values, const coll_fp16* from, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    coll_store_halves(values + i, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)), 1.0f);
  }
  return i;
}

#if defined(__AVX2__)
// e5m2 is the upper half of an fp16.
inline int coll_load_fast(float* values, const coll_e5m2* from, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    coll_store_halves(values + i, _mm256_slli_epi16(bytes, 8), 1.0f);
  }
  return i;
}

// e4m3 moved into the place of an fp16's bits is 2^8 times too small. Its NaN becomes fp16's.
inline int coll_load_fast(float* values, const coll_e4m3* from, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    __m256i halves = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16((short)0xbf80));
    __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
    halves = _mm256_xor_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x3f80 ^ 0x7e00)));
    coll_store_halves(values + i, halves, 256.0f);
  }
  return i;
}
#endif

inline int coll_store_fast(coll_fp16* to, const float* values, int n) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    __m256i halves = _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), halves);
  }
#endif
  for (; i + 8 <= n; i += 8) {
    __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  return i;
}
#endif

template <class A, class T>
__attribute__((noinline)) void coll_load_rest(A* __restrict values, const T* __restrict from, int n) {
  for (int i = 0; i < n; ++i) values[i] = (A)coll_element<T>::load(from[i]);
}

template <class T, class A>
__attribute__((noinline)) void coll_store_rest(T* __restrict to, const A* __restrict values, int n) {
  for (int i = 0; i < n; ++i) to[i] = coll_element<T>::store(values[i]);
}

// values[i] = from[i], i < n. `values` and `from` don't overlap.
template <class A, class T>
inline void coll_load_block(A* values, const T* from, int n) {
  int done = coll_load_fast(values, from, n);
  if (done < n) coll_load_rest(values + done, from + done, n - done);
}

// to[i] = values[i] rounded, i < n. `values` and `to` don't overlap.
template <class T, class A>
inline void coll_store_block(T* to, const A* values, int n) {
  int done = coll_store_fast(to, values, n);
  if (done < n) coll_store_rest(to + done, values + done, n - done);
}

}  // namespace
#endif
