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
  static constexpr bool kAnyRounds = true;  // to nearest: what isn't finite gives bits, too
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
  static constexpr bool kAnyRounds = COLL_FP8_INSTRUCTIONS;
  COLL_FN uint32_t nearest(float t) { return coll_round_in_range<coll_e4m3_format>(t); }
  COLL_FN uint32_t at_random(float t, uint32_t random) { return coll_float_to_e4m3_at_random(t, random); }
  COLL_FN float value(uint32_t element) { return coll_e4m3_format::to_float(element); }
};

struct coll_e5m2_wire {
  typedef uint8_t element;
  static constexpr bool kScaled = true;
  static constexpr float kLimit = 57344.0f;
  static constexpr bool kAnyRounds = COLL_FP8_INSTRUCTIONS;
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

#if defined(__CUDACC__)
// ---- Several elements at a time, the first of them in the lowest bits, for CUDA: there bytes are
// put together and taken apart by one instruction each, and since sm_89 one converts two values.
template <class F>
COLL_FN uint32_t coll_nearest_two(F, float low, float high) {
  return F::nearest(low) | F::nearest(high) << 8 * sizeof(typename F::element);
}

// The values of the two elements in the lower bits of `two`.
template <class F>
COLL_FN void coll_values_of_two(F, uint32_t two, float* low, float* high) {
  *low = F::value((typename F::element)two);
  *high = F::value((typename F::element)(two >> 8 * sizeof(typename F::element)));
}

#if COLL_FP8_INSTRUCTIONS
COLL_FN uint32_t coll_nearest_two(coll_e4m3_wire, float low, float high) { return coll_two_to_e4m3(low, high); }
COLL_FN uint32_t coll_nearest_two(coll_e5m2_wire, float low, float high) { return coll_two_to_e5m2(low, high); }
COLL_FN void coll_values_of_two(coll_e4m3_wire, uint32_t two, float* low, float* high) { coll_e4m3_to_two(two, low, high); }
COLL_FN void coll_values_of_two(coll_e5m2_wire, uint32_t two, float* low, float* high) { coll_e5m2_to_two(two, low, high); }
#endif

// Four elements of one byte.
template <class F>
COLL_FN uint32_t coll_nearest_four(F format, const float* t) {
  return __byte_perm(coll_nearest_two(format, t[0], t[1]), coll_nearest_two(format, t[2], t[3]), 0x5410);
}

COLL_FN uint32_t coll_nearest_four(coll_int8_wire, const float* t) {
  // As coll_int8_wire::nearest: the lowest byte of each.
  uint32_t b0 = coll_float_bits(t[0] + 12582912.0f), b1 = coll_float_bits(t[1] + 12582912.0f);
  uint32_t b2 = coll_float_bits(t[2] + 12582912.0f), b3 = coll_float_bits(t[3] + 12582912.0f);
  return __byte_perm(__byte_perm(b0, b1, 0x0040), __byte_perm(b2, b3, 0x0040), 0x5410);
}

// The values of four elements; `words`: as they lie in memory.
template <class F>
COLL_FN void coll_values_of_four(F format, const uint32_t* words, float* values) {
  constexpr bool kNarrow = sizeof(typename F::element) == 1;
  coll_values_of_two(format, words[0], values, values + 1);
  coll_values_of_two(format, kNarrow ? words[0] >> 16 : words[kNarrow ? 0 : 1], values + 2, values + 3);
}

// An element plus 128 as the lowest byte of 2^23: a conversion has a quarter of an addition's rate.
COLL_FN void coll_values_of_four(coll_int8_wire, const uint32_t* words, float* values) {
  uint32_t word = words[0] ^ 0x80808080u;
  values[0] = coll_bits_float(__byte_perm(word, 0x4b000000u, 0x7440)) - 8388736.0f;
  values[1] = coll_bits_float(__byte_perm(word, 0x4b000000u, 0x7441)) - 8388736.0f;
  values[2] = coll_bits_float(__byte_perm(word, 0x4b000000u, 0x7442)) - 8388736.0f;
  values[3] = coll_bits_float(__byte_perm(word, 0x4b000000u, 0x7443)) - 8388736.0f;
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

// `amax`: the largest of the block's coll_magnitude_bits. A block with a value that isn't finite
// gets the scale NaN. One whose scale would not be a normal number is carried as zeros: below it
// the scale itself, or its inverse, would be inexact or infinite.
COLL_FN float coll_scale_part(int32_t amax, float limit, bool inverse) {
  float most = coll_bits_float((uint32_t)(amax < 0x7f7ffffe ? amax : 0x7f7ffffe));
  bool tiny = most < limit * 0x1p-126f;
  float divisor = tiny ? limit : most;
  float part = (inverse ? limit : divisor) / (inverse ? divisor : limit);
  if (tiny) part = 0.0f;
  if (!coll_finite_bits(amax)) part = inverse ? 0.0f : coll_bits_float(0x7fc00000u);
  return part;
}

COLL_FN coll_block_scale coll_scale_of(int32_t amax, float limit) {
  coll_block_scale s = {coll_scale_part(amax, limit, false), coll_scale_part(amax, limit, true)};
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
  a.to.position += COLL_MUTANT(14, first, 0);
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
