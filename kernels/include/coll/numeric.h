// The 8-bit and 16-bit floating-point formats as bits: conversion to and from fp32, the same on every device.
//
// Written without branches where it matters, so that the host compiler vectorises the loops round these functions. Rounding
// is to nearest, ties to even. fp8 follows OCP's E4M3 (no infinity) and E5M2, and saturates as NCCL's conversions do.
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

// The element types: bits of their own, so that no overload mistakes one for an integer.
struct coll_bf16 { uint16_t bits; };
struct coll_fp16 { uint16_t bits; };
struct coll_e4m3 { uint8_t bits; };
struct coll_e5m2 { uint8_t bits; };

COLL_FN float coll_bf16_to_float(uint16_t b) { return coll_bits_float((uint32_t)b << 16); }

COLL_FN uint16_t coll_float_to_bf16(float x) {
  uint32_t u = coll_float_bits(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  uint32_t nan = (u >> 16) | 0x40u;  // keep the payload's top bits, make it quiet
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

COLL_FN float coll_fp16_to_float(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
  // Multiplying by 2^112 moves the exponent's bias from 15 to 127 and normalises the subnormals.
  uint32_t finite = coll_float_bits(coll_bits_float(magnitude) * 0x1p112f);
  uint32_t special = magnitude | 0x7f800000u;  // infinity and NaN
  uint32_t bits = (h & 0x7c00u) == 0x7c00u ? special : finite;
  return coll_bits_float(bits | (uint32_t)(h & 0x8000u) << 16);
}

COLL_FN uint16_t coll_float_to_fp16(float x) {
  uint32_t u = coll_float_bits(x);
  uint32_t sign = (u >> 16) & 0x8000u;
  uint32_t a = u & 0x7fffffffu;
  // Normal results: rebias, then round on bit 13. The carry may reach the exponent, and infinity: that is right.
  uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 puts the units of the last place (2^-24) at the bottom of the mantissa.
  uint32_t subnormal = coll_float_bits(coll_bits_float(a) + 0.5f) - 0x3f000000u;
  uint32_t nan = 0x7e00u | ((a >> 13) & 0x3ffu);
  uint32_t r = a < 0x38800000u ? subnormal : normal;
  r = a >= 0x477ff000u ? 0x7c00u : r;  // 65520 and more
  r = a > 0x7f800000u ? nan : r;
  return (uint16_t)(sign | r);
}

COLL_FN float coll_e4m3_to_float(uint8_t b) {
  uint32_t magnitude = (uint32_t)(b & 0x7fu) << 20;
  uint32_t finite = coll_float_bits(coll_bits_float(magnitude) * 0x1p120f);  // bias 7 to 127
  uint32_t bits = (b & 0x7fu) == 0x7fu ? 0x7fc00000u : finite;
  return coll_bits_float(bits | (uint32_t)(b & 0x80u) << 24);
}

COLL_FN uint8_t coll_float_to_e4m3(float x) {
  uint32_t u = coll_float_bits(x);
  uint32_t sign = (u >> 24) & 0x80u;
  uint32_t a = u & 0x7fffffffu;
  uint32_t normal = (a - 0x3c000000u + 0x7ffffu + ((a >> 20) & 1u)) >> 20;
  // Below 2^-6 the unit is 2^-9: adding 2^14 puts it at the bottom of the mantissa.
  uint32_t subnormal = coll_float_bits(coll_bits_float(a) + 16384.0f) - 0x46800000u;
  uint32_t r = a < 0x3c800000u ? subnormal : normal;
  r = a >= 0x43e00000u ? 0x7eu : r;  // 448 and more, infinity too: the largest finite value
  r = a > 0x7f800000u ? 0x7fu : r;
  return (uint8_t)(sign | r);
}

COLL_FN float coll_e5m2_to_float(uint8_t b) { return coll_fp16_to_float((uint16_t)((uint16_t)b << 8)); }

COLL_FN uint8_t coll_float_to_e5m2(float x) {
  uint32_t u = coll_float_bits(x);
  uint32_t sign = (u >> 24) & 0x80u;
  uint32_t a = u & 0x7fffffffu;
  uint32_t normal = (a - 0x38000000u + 0xfffffu + ((a >> 21) & 1u)) >> 21;
  // Below 2^-14 the unit is 2^-16: adding 2^7 puts it at the bottom of the mantissa.
  uint32_t subnormal = coll_float_bits(coll_bits_float(a) + 128.0f) - 0x43000000u;
  uint32_t r = a < 0x38800000u ? subnormal : normal;
  r = a >= 0x47600000u ? 0x7bu : r;  // 57344 and more, infinity too: the largest finite value
  r = a > 0x7f800000u ? 0x7fu : r;
  return (uint8_t)(sign | r);
}

// To a float so that rounding it once more, to a type of at most 22 bits, gives what one rounding of the double would: toward
// zero, with the last bit set where anything was cut off (round to odd; Boldo and Melquiond 2008).
COLL_FN float coll_round_to_odd(double x) {
  float f = (float)x;
  uint32_t bits = coll_float_bits(f);
  double back = (double)f;
  bits -= (back < 0 ? -back : back) > (x < 0 ? -x : x) ? 1u : 0u;
  return coll_bits_float(back == x ? bits : bits | 1u);
}

#endif
