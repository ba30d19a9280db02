// The 8-bit and 16-bit floating-point formats as bits: conversion to and from fp32, the same on
// every device.
//
// Written without branches where it matters, so that the host compiler vectorises the loops round
// these functions. Rounding is to nearest, ties to even. fp8 follows OCP's E4M3 (no infinity) and
// E5M2, and saturates as NCCL's conversions do.
#ifndef COLL_NUMERIC_H_
#define COLL_NUMERIC_H_

#include "kernel_abi.h"
#if !defined(__CUDACC_RTC__)
#include <string.h>
#endif

#if defined(__CUDACC__)
#define COLL_FN static __device__ __forceinline__
#else
#define COLL_FN static inline __attribute__((always_inline))
#endif

COLL_FN uint32_t coll_float_bits(float x) {
#if defined(__CUDACC__)
  return __float_as_uint(x);
#else
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
#endif
}

COLL_FN float coll_bits_float(uint32_t u) {
#if defined(__CUDACC__)
  return __uint_as_float(u);
#else
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
#endif
}

// Bits whose order is that of the magnitudes, with NaN and infinity above all numbers: their maximum
// doesn't depend on the order in which it is taken.
COLL_FN int32_t coll_magnitude_bits(float x) { return (int32_t)(coll_float_bits(x) & 0x7fffffffu); }
COLL_FN bool coll_finite_bits(int32_t magnitude) { return magnitude < 0x7f800000; }

// The larger one of `most` and x's magnitude bits. Since sm_80 an instruction does it, which makes
// one NaN of all: they are above infinity either way, and nothing else is asked of them.
COLL_FN int32_t coll_larger_magnitude(int32_t most, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float larger;
  asm("{ .reg .f32 m; abs.f32 m, %2; max.NaN.f32 %0, %1, m; }" : "=f"(larger) : "f"(coll_bits_float((uint32_t)most)), "f"(x));
  return (int32_t)coll_float_bits(larger);
#else
  int32_t magnitude = coll_magnitude_bits(x);
  return magnitude > most ? magnitude : most;
#endif
}

// The element types: bits of their own, so that no overload mistakes one for an integer.
struct coll_bf16 { uint16_t bits; };
struct coll_fp16 { uint16_t bits; };
struct coll_e4m3 { uint8_t bits; };
struct coll_e5m2 { uint8_t bits; };

COLL_FN float coll_bf16_to_float(uint16_t b) { return coll_bits_float((uint32_t)b << 16); }

COLL_FN uint16_t coll_float_to_bf16(float x) {
  uint32_t u = coll_float_bits(x);
  uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
  uint32_t nan = u | 0x400000u;  // keep the payload's top bits, make it quiet
  return (uint16_t)((x != x ? nan : rounded) >> 16);
}

// What the formats below bf16 have in common: a sign, kExponent bits of exponent, kMantissa bits of
// mantissa, subnormals. The other constants are bits of fp32 where not said otherwise:
// kSpecial    the first of the format's patterns that is no number, read as if it were one
// kMeans      what that pattern means: infinity or NaN
// kMost       what larger values are taken for: the largest number where the format saturates, else
//             what rounds to infinity
// kNan        a NaN, in the format's bits, and kPayload, those of its bits that are kept from an
//             fp32 NaN
// Everything is calculated for every value and then selected by comparing integers: a compiler that
// must mind floating-point traps moves a sum or product into the branch of a ?: where only that
// branch uses it, and then won't vectorise the loop.
template <int kExponent, int kMantissa, int32_t kSpecial, int32_t kMeans, int32_t kMost, uint32_t kNan, uint32_t kPayload>
struct coll_small_float {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int kSignShift = 31 - kExponent - kMantissa;
  static constexpr uint32_t kSign = 0x80000000u >> kSignShift;
  static constexpr int32_t kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int32_t kLeastNormal = (128 - kBias) << 23;

  COLL_FN float to_float(uint32_t b) {
    // The product moves the exponent's bias to fp32's 127, and makes normal numbers of the
    // subnormal ones.
    float rebias = coll_bits_float((uint32_t)(254 - kBias) << 23);
    int32_t x = (int32_t)coll_float_bits(coll_bits_float((b & (kSign - 1)) << kShift) * rebias);
    x += x >= kSpecial ? kMeans - kSpecial : 0;
    return coll_bits_float((uint32_t)x | (b & kSign) << kSignShift);
  }

  COLL_FN uint32_t from_float(float value) {
    uint32_t u = coll_float_bits(value);
    int32_t a = (int32_t)(u & 0x7fffffffu);
    int32_t x = a < kMost ? a : kMost;
    int32_t exponent = x & 0x7f800000;
    exponent = exponent > kLeastNormal ? exponent : kLeastNormal;
    // Added to a power of two whose last place is the format's last place at x, x is rounded to it.
    // The carry may reach the exponent, and infinity: that is right.
    int32_t power = exponent + (kShift << 23);
    float rounded = coll_bits_float((uint32_t)x) + coll_bits_float((uint32_t)power);
    int32_t digits = (int32_t)coll_float_bits(rounded) - power;
    uint32_t r = (uint32_t)(digits + ((exponent - kLeastNormal) >> kShift));
    r |= a > 0x7f800000 ? kNan | ((uint32_t)a >> kShift & kPayload) : 0u;
    return (u >> kSignShift & kSign) | r;
  }
};
typedef coll_small_float<5, 10, 0x47800000, 0x7f800000, 0x477ff000, 0x7e00, 0x3ff> coll_fp16_format;  // 65520: up to infinity
typedef coll_small_float<4, 3, 0x43f00000, 0x7fc00000, 0x43e00000, 0x7f, 0> coll_e4m3_format;         // up to 448
typedef coll_small_float<5, 2, 0x47800000, 0x7f800000, 0x47600000, 0x7f, 0> coll_e5m2_format;         // up to 57344

COLL_FN float coll_fp16_to_float(uint16_t h) { return coll_fp16_format::to_float(h); }
COLL_FN uint16_t coll_float_to_fp16(float x) { return (uint16_t)coll_fp16_format::from_float(x); }
COLL_FN float coll_e4m3_to_float(uint8_t b) { return coll_e4m3_format::to_float(b); }
COLL_FN uint8_t coll_float_to_e4m3(float x) { return (uint8_t)coll_e4m3_format::from_float(x); }
COLL_FN float coll_e5m2_to_float(uint8_t b) { return coll_e5m2_format::to_float(b); }
COLL_FN uint8_t coll_float_to_e5m2(float x) { return (uint8_t)coll_e5m2_format::from_float(x); }

// ---- 16 bits by instructions, since sm_80: two at a time, the first one in the lower half. Of numbers
// they make the same bits as from_float and coll_float_to_bf16; of every NaN one NaN.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define COLL_HALF_INSTRUCTIONS 1

COLL_FN uint32_t coll_two_to_bf16(float low, float high) {
  uint32_t two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}

COLL_FN uint32_t coll_two_to_fp16(float low, float high) {
  uint32_t two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
#else
#define COLL_HALF_INSTRUCTIONS 0
#endif

// ---- fp8 by instructions, since sm_89: two at a time, the first one in the lower byte.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define COLL_FP8_INSTRUCTIONS 1

// Of numbers they make the same bits as from_float; of every NaN the one NaN without a sign.
COLL_FN uint32_t coll_two_to_e4m3(float low, float high) {
  uint16_t two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}

COLL_FN uint32_t coll_two_to_e5m2(float low, float high) {
  uint16_t two;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}

// By way of fp16, which holds all values of both formats. Of NaN neither sign nor payload is kept.
COLL_FN void coll_halves_to_two(uint32_t halves, float* low, float* high) {
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(*low), "=f"(*high) : "r"(halves));
}

COLL_FN void coll_e4m3_to_two(uint32_t two, float* low, float* high) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)two));
  coll_halves_to_two(halves, low, high);
}

COLL_FN void coll_e5m2_to_two(uint32_t two, float* low, float* high) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)two));
  coll_halves_to_two(halves, low, high);
}
#else
#define COLL_FP8_INSTRUCTIONS 0
#endif

// To a float so that rounding it once more, to a type of at most 22 bits, gives what one rounding
// of the double would: toward zero, with the last bit set where anything was cut off (round to odd;
// Boldo and Melquiond 2008).
COLL_FN float coll_round_to_odd(double x) {
  float f = (float)x;
  uint32_t bits = coll_float_bits(f);
  double back = (double)f;
  bits -= (back < 0 ? -back : back) > (x < 0 ? -x : x) ? 1u : 0u;
  return coll_bits_float(back == x ? bits : bits | 1u);
}

#endif
