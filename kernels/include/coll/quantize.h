// Wire formats: values to the elements of a wire buffer and back.
//
// A wire buffer is the payload, one element a value, and behind it the scales, one fp32 for each
// block of values; both are padded to 16 bytes, with zeros. fp16 and bf16 have no scales.
// collectives/layout.py has the same rule.
//
// The scale of a block is amax / limit, where limit is the largest number of the format: the whole
// range is used, and the largest value of a block is as good as exact. (Scales that are powers of
// two would save one rounding of fp32, and lose up to a bit: with int8 their error is 1.4 times as
// large.) Values are multiplied by limit / amax and rounded; the largest of a block is not amax but
// amax's neighbour where amax is the largest fp32, since its multiple would be infinite.
#ifndef COLL_QUANTIZE_H_
#define COLL_QUANTIZE_H_

#include "ops.h"
#include "philox.h"
#include "tile.h"

#define COLL_LARGEST_BLOCK 512
#define COLL_LEAST_BLOCK 128

COLL_FN int coll_wire_width(int format) { return format == COLL_F16 || format == COLL_BF16 ? 2 : 1; }
COLL_FN bool coll_wire_scaled(int format) { return coll_wire_width(format) == 1; }
COLL_FN int64_t coll_wire_padded(int64_t nbytes) { return (nbytes + 15) / 16 * 16; }
COLL_FN int64_t coll_wire_blocks(int64_t count, int block) { return (count + block - 1) / block; }
// Bytes in front of the scales.
COLL_FN int64_t coll_wire_scales_at(int64_t count, int format) { return coll_wire_padded(count * coll_wire_width(format)); }

// Format::from_float for what is known to be a number that doesn't pass the format's largest once
// it is rounded: two thirds of the work.
template <class Format>
COLL_FN uint32_t coll_round_in_range(float value) {
  uint32_t u = coll_float_bits(value);
  int32_t a = (int32_t)(u & 0x7fffffffu);
  int32_t exponent = a & 0x7f800000;
  exponent = exponent > Format::kLeastNormal ? exponent : Format::kLeastNormal;
  int32_t power = exponent + (Format::kShift << 23);
  float rounded = coll_bits_float((uint32_t)a) + coll_bits_float((uint32_t)power);
  int32_t r = (int32_t)coll_float_bits(rounded) - power + ((exponent - Format::kLeastNormal) >> Format::kShift);
  return (u >> Format::kSignShift & Format::kSign) | (uint32_t)r;
}

// ---- The formats: an element's bits from a value that has been brought into range, and the value
// of an element.
struct coll_int8_wire {
  typedef int8_t element;
  static constexpr bool kScaled = true;
  static constexpr float kLimit = 127.0f;
  // 1.5 * 2^23 puts the units at the bottom of the mantissa.
  COLL_FN uint32_t nearest(float t) { return coll_float_bits(t + 12582912.0f) & 0xffu; }
  COLL_FN uint32_t at_random(float t, uint32_t random) {
    // With 23 bits behind the point; the shift rounds down, of negative numbers too.
    int32_t q = ((int32_t)(t * 8388608.0f) + (int32_t)(random >> 9)) >> 23;
    q = q < 127 ? q : 127;
    q = q > -127 ? q : -127;
    return (uint32_t)q & 0xffu;
  }
  COLL_FN float value(int32_t element) { return (float)element; }
};

struct coll_e4m3_wire {
  typedef uint8_t element;
  static constexpr bool kScaled = true;
  static constexpr float kLimit = 448.0f;
  COLL_FN uint32_t nearest(float t) { return coll_round_in_range<coll_e4m3_format>(t); }
  COLL_FN uint32_t at_random(float t, uint32_t random) { return coll_float_to_e4m3_at_random(t, random); }
  COLL_FN float value(uint32_t element) { return coll_e4m3_format::to_float(element); }
};

struct coll_e5m2_wire {
  typedef uint8_t element;
  static constexpr bool kScaled = true;
  static constexpr float kLimit = 57344.0f;
  COLL_FN uint32_t nearest(float t) { return coll_round_in_range<coll_e5m2_format>(t); }
  COLL_FN uint32_t at_random(float t, uint32_t random) { return coll_float_to_e5m2_at_random(t, random); }
  COLL_FN float value(uint32_t element) { return coll_e5m2_format::to_float(element); }
};

struct coll_fp16_wire {
  typedef uint16_t element;
  typedef coll_fp16 plain;  // rounding to nearest is nothing but this type's
  static constexpr bool kScaled = false;
  static constexpr float kLimit = 0.0f;
  COLL_FN uint32_t nearest(float t) { return coll_fp16_format::from_float(t); }
  COLL_FN uint32_t at_random(float t, uint32_t random) { return coll_float_to_fp16_at_random(t, random); }
  COLL_FN float value(uint32_t element) { return coll_fp16_format::to_float(element); }
};

struct coll_bf16_wire {
  typedef uint16_t element;
  typedef coll_bf16 plain;  // rounding to nearest is nothing but this type's
  static constexpr bool kScaled = false;
  static constexpr float kLimit = 0.0f;
  COLL_FN uint32_t nearest(float t) { return coll_float_to_bf16(t); }
  COLL_FN uint32_t at_random(float t, uint32_t random) { return coll_float_to_bf16_at_random(t, random); }
  COLL_FN float value(uint32_t element) { return coll_bf16_to_float((uint16_t)element); }
};

// Two elements, the first of them in the lower bits.
template <class F>
COLL_FN uint32_t coll_nearest_two(F, float low, float high) {
  return F::nearest(low) | F::nearest(high) << 8 * sizeof(typename F::element);
}

// Since sm_89 an instruction converts two. Of the numbers that F::nearest takes it makes the same
// bits; it would make the one NaN without a sign of every NaN, which is why it isn't used where a
// value may be one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
COLL_FN uint32_t coll_nearest_two(coll_e4m3_wire, float low, float high) {
  uint16_t two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}

COLL_FN uint32_t coll_nearest_two(coll_e5m2_wire, float low, float high) {
  uint16_t two;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}
#endif

// DO(format's struct) for a format that is known when the kernel runs.
#define COLL_FOR_WIRE(format, DO)            \
  switch (format) {                          \
    case COLL_I8: DO(coll_int8_wire); break; \
    case COLL_E4M3: DO(coll_e4m3_wire); break; \
    case COLL_E5M2: DO(coll_e5m2_wire); break; \
    case COLL_F16: DO(coll_fp16_wire); break;  \
    default: DO(coll_bf16_wire); break;        \
  }

// ---- Scales. `inverse` is 0 where no value of the block is carried: the elements are 0 then.
struct coll_block_scale {
  float scale, inverse;
};

// Bits whose order is that of the magnitudes, with NaN and infinity above all numbers: their maximum
// doesn't depend on the order in which it is taken.
COLL_FN int32_t coll_magnitude_bits(float x) { return (int32_t)(coll_float_bits(x) & 0x7fffffffu); }
COLL_FN bool coll_finite_bits(int32_t magnitude) { return magnitude < 0x7f800000; }

// `amax`: the largest of the block's coll_magnitude_bits. A block with a value that isn't finite
// gets the scale NaN. One whose scale would not be a normal number is carried as zeros: below it
// the scale itself, or its inverse, would be inexact or infinite.
COLL_FN coll_block_scale coll_scale_of(int32_t amax, float limit) {
  float most = coll_bits_float((uint32_t)(amax < 0x7f7ffffe ? amax : 0x7f7ffffe));
  bool tiny = most < limit * 0x1p-126f;
  float divisor = tiny ? limit : most;
  coll_block_scale s = {tiny ? 0.0f : divisor / limit, tiny ? 0.0f : limit / divisor};
  if (!coll_finite_bits(amax)) {
    s.scale = coll_bits_float(0x7fc00000u);
    s.inverse = 0.0f;
  }
  return s;
}

// ---- Values on their way in: scaled, and with the residual added.
template <class S>
COLL_FN float coll_scaled(S value, double scale) { return coll_element<S>::load(value) * (float)scale; }
COLL_FN float coll_scaled(double value, double scale) { return (float)(value * scale); }

// The sum of wires on its way out.
COLL_FN float coll_decoded(float sum, int average_over, float scale) {
  return (average_over > 0 ? sum / (float)average_over : sum) * scale;
}

// ---- Parts. Each launcher takes the tiles of one part with arguments as if it were the only one.

// f(part, first, last) for the tiles [first, last) of all parts, as tiles of each part in turn;
// `count`: elements of part 0.
template <class F>
COLL_FN void coll_for_each_part(int64_t first, int64_t last, int64_t count, F f) {
  if (first >= last) return;
  int64_t tiles = coll_tiles_of(count);
  for (int64_t part = first / tiles; first < last; ++part) {
    int64_t begin = part * tiles, end = last - begin < tiles ? last - begin : tiles;
    f(part, first - begin, end);
    first = begin + end;
  }
}

COLL_FN int64_t coll_count_of(const coll_parts& parts, int64_t count, int64_t part) {
  int64_t left = parts.total - part * parts.stride;
  return left < count ? left : count;
}

COLL_FN coll_quantize_args coll_part_of(coll_quantize_args a, int64_t part) {
  int64_t first = part * a.parts.stride;
  a.to.wire = (char*)a.to.wire + part * a.parts.wire_stride;
  if (a.to.residual) a.to.residual = (char*)a.to.residual + first * coll_width(a.to.residual_type);
  a.to.position += first;
  a.to.count = coll_count_of(a.parts, a.to.count, part);
  a.source = (const char*)a.source + first * coll_width(a.source_type);
  a.work.tiles = coll_tiles_of(a.to.count);
  return a;
}

COLL_FN coll_dequantize_args coll_part_of(coll_dequantize_args a, int64_t part) {
  int64_t first = part * a.parts.stride, tiles = part * coll_tiles_of(a.from.count);
  a.from.wire = (const char*)a.from.wire + part * a.parts.wire_stride;
  a.out = (char*)a.out + first * coll_width(a.out_type);
  if (a.work.sums) a.work.sums += tiles, a.work.bad += tiles;
  a.from.count = coll_count_of(a.parts, a.from.count, part);
  a.work.tiles = coll_tiles_of(a.from.count);
  return a;
}

COLL_FN double coll_factor(double scale, const float* scale_at) { return scale_at ? scale * (double)*scale_at : scale; }

#endif
