// Common parts of the host launchers: their names, one set for each instruction set, and the sums
// of a tile.
//
// Everything but the entry points has internal linkage: an inline function shared with another
// object would be linked from whichever instruction set came first.
#ifndef COLL_HOST_KERNELS_H_
#define COLL_HOST_KERNELS_H_

#include "tile.h"

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

// Do tiles [first, last) of a kernel; args points at the kernel's struct of kernel_abi.h.
typedef void (*coll_tiles_fn)(const void* args, int64_t first, int64_t last);

#define COLL_PASTE3_(a, b, c) a##b##_##c
#define COLL_PASTE3(a, b, c) COLL_PASTE3_(a, b, c)
#define COLL_HOST_NAME(kernel) COLL_PASTE3(coll_host_, kernel, COLL_ISA)  // coll_host_cast_avx2

// Every kernel: DO(its name in coll_kernel, its name here, its arguments, ISA).
#define COLL_HOST_CAST_KERNELS(DO, ISA) DO(Cast, cast, coll_cast_args, ISA) DO(Finish, finish, coll_finish_args, ISA)

#define COLL_HOST_REDUCE_KERNELS(DO, ISA) DO(Reduce, reduce, coll_reduce_args, ISA)

#define COLL_HOST_QUANTIZE_KERNELS(DO, ISA)         \
  DO(Quantize, quantize, coll_quantize_args, ISA)     \
  DO(Dequantize, dequantize, coll_dequantize_args, ISA) \
  DO(Requantize, requantize, coll_requantize_args, ISA)

#define COLL_HOST_OPTIM_KERNELS(DO, ISA) DO(Sgd, sgd, coll_sgd_args, ISA) DO(Adam, adam, coll_adam_args, ISA)

#define COLL_HOST_KERNELS(DO, ISA) \
  COLL_HOST_CAST_KERNELS(DO, ISA)  \
  COLL_HOST_REDUCE_KERNELS(DO, ISA) COLL_HOST_QUANTIZE_KERNELS(DO, ISA) COLL_HOST_OPTIM_KERNELS(DO, ISA)

#define COLL_DECLARE_HOST_KERNEL(Kernel, kernel, Args, ISA) \
  void coll_host_##kernel##_##ISA(const void* args, int64_t first, int64_t last);
COLL_HOST_KERNELS(COLL_DECLARE_HOST_KERNEL, baseline)
COLL_HOST_KERNELS(COLL_DECLARE_HOST_KERNEL, avx2)
COLL_HOST_KERNELS(COLL_DECLARE_HOST_KERNEL, avx512)

// ---- Stores past the caches. An ordinary store to memory reads the line first, and pushes out of
// the caches what somebody may want: where a kernel moves more than the last-level cache holds,
// that costs a third of its speed.

// Bytes read and written by one kernel, from which on it streams what it writes. Set in
// host/kernels.cpp.
extern int64_t coll_stream_from;

namespace {

inline void coll_prefetch(const void* at) {
#if defined(__SSE2__)
  _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
#else
  __builtin_prefetch(at);
#endif
}

// Ask for the lines that come `ahead` bytes after these. As a number: the address may lie behind
// the end of the array, which a prefetch doesn't mind.
inline void coll_prefetch_ahead(const void* at, size_t nbytes, size_t ahead) {
  uintptr_t from = reinterpret_cast<uintptr_t>(at) + ahead;
  for (size_t line = 0; line < nbytes; line += 64) coll_prefetch(reinterpret_cast<const void*>(from + line));
}

// After the last streaming store of a call, so that other threads see the data in order.
inline void coll_stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

#if defined(__AVX512F__)
typedef __m512i coll_stream_word;
inline coll_stream_word coll_stream_load(const char* from) { return _mm512_loadu_si512(from); }
inline void coll_stream_store(char* to, coll_stream_word word) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), word); }
#elif defined(__AVX2__)
typedef __m256i coll_stream_word;
inline coll_stream_word coll_stream_load(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void coll_stream_store(char* to, coll_stream_word word) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), word); }
#elif defined(__SSE2__)
typedef __m128i coll_stream_word;
inline coll_stream_word coll_stream_load(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline void coll_stream_store(char* to, coll_stream_word word) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), word); }
#endif

// Copy whole lines past the caches: `to` and nbytes are multiples of 64. Without such stores:
// memcpy.
inline void coll_stream_lines(void* to, const void* from, size_t nbytes) {
#if defined(__SSE2__)
  constexpr size_t kWord = sizeof(coll_stream_word), kWords = 64 / kWord;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  for (size_t at = 0; at < nbytes; at += 64) {
    coll_stream_word words[kWords];
    for (size_t i = 0; i < kWords; ++i) words[i] = coll_stream_load(in + at + i * kWord);
    for (size_t i = 0; i < kWords; ++i) coll_stream_store(out + at + i * kWord, words[i]);
  }
#else
  memcpy(to, from, nbytes);
#endif
}

// memcpy with stores past the caches, except for the lines that it covers in part.
inline void coll_stream_copy(void* to, const void* from, size_t nbytes) {
  constexpr size_t kAhead = 2048, kBlock = 256;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  size_t head = -reinterpret_cast<uintptr_t>(out) % 64;
  if (head > nbytes) head = nbytes;
  memcpy(out, in, head);
  out += head, in += head, nbytes -= head;
  for (; nbytes >= kBlock; out += kBlock, in += kBlock, nbytes -= kBlock) {
    coll_prefetch_ahead(in, kBlock, kAhead);
    coll_stream_lines(out, in, kBlock);
  }
  memcpy(out, in, nbytes);
}

// Fold lanes [0, n) in halves; n is a power of two. Lanes past n are taken to be 0.
template <class A>
A coll_fold_lanes(A* lanes, int n) {
  for (int half = n / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// The statistics of one tile: call add with the values of each COLL_LANES elements in turn, then
// finish. A loop that has the values at hand adds their squares itself, to the lanes that row
// returns, and calls finish with a function that counts the bad ones.
template <class A>
class coll_tile_sums {
 public:
  explicit coll_tile_sums(double limit) : limit_((A)limit) {}

  void add(const A* values, int n) {
    int from = n < used_ ? n : used_;
    for (int i = 0; i < from; ++i) lanes_[i] += values[i] * values[i];
    for (int i = from; i < n; ++i) lanes_[i] = values[i] * values[i];
    if (n > used_) used_ = n;
    uint32_t bad = 0;
    for (int i = 0; i < n; ++i) bad += coll_is_bad(values[i], limit_);
    bad_ += bad;
  }

  void finish(const coll_work& work, int64_t tile) {
    work.sums[tile] = (double)fold();
    work.bad[tile] = bad_;
  }

  // The lanes of the next n values, to which the caller adds their squares.
  A* row(int n) {
    for (int i = used_; i < n; ++i) lanes_[i] = 0;
    if (n > used_) used_ = n;
    return lanes_;
  }

  // count_bad(limit) returns the number of the tile's values that are bad. It is called only where
  // there may be one: a sum of squares is not less than any of them, whatever was rounded. It reads
  // the inputs again: not for kernels that write over them.
  template <class F>
  void finish(const coll_work& work, int64_t tile, F count_bad) {
    A sum = fold();
    work.sums[tile] = (double)sum;
    work.bad[tile] = sum < limit_ * limit_ ? 0 : count_bad(limit_);
  }

 private:
  A fold() {
    int n = 1;
    while (n < used_) n *= 2;
    for (int i = used_; i < n; ++i) lanes_[i] = 0;
    return coll_fold_lanes(lanes_, n);
  }

  A lanes_[COLL_LANES];
  A limit_;
  uint32_t bad_ = 0;
  int used_ = 0;
};

}  // namespace
#endif
