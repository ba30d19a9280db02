// The host launchers of the wire formats: block by block in the first-level cache.
#include "coll/quantize.h"

#include "coll/host_blocks.h"
#include "coll/host_kernels.h"

namespace {

// Distance of the prefetches of a source, in bytes: they save a third of the time where nearly all
// the traffic is one array that is read in bursts, and cost time where there are more.
constexpr size_t kAhead = 4096;

// ---- Values in: each of these writes n values to x, at most a block, and returns the largest of
// their magnitudes' bits.

inline int32_t largest(const float* x, int n) {
  int32_t most = 0;
  for (int i = 0; i < n; ++i) {
    int32_t magnitude = coll_magnitude_bits(x[i]);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// x[i] = values[i] * scale + residual[i]. x may be values.
inline int32_t finish(float* x, const float* values, float scale, const float* residual, int n) {
  int32_t most = 0;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    float value = values[i] * scale + residual[i];
    x[i] = value;
    int32_t magnitude = coll_magnitude_bits(value);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

inline int32_t finish(float* x, const float* values, float scale, int n) {
  int32_t most = 0;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    float value = values[i] * scale;
    x[i] = value;
    int32_t magnitude = coll_magnitude_bits(value);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

int32_t with_residual(float* x, const float* values, float scale, const coll_encoder& to, int64_t at, int n) {
  if (!to.residual) return finish(x, values, scale, n);
  if (to.residual_type == COLL_F32) return finish(x, values, scale, static_cast<const float*>(to.residual) + at, n);
  float residual[COLL_LARGEST_BLOCK];
  coll_load_block(residual, static_cast<const coll_bf16*>(to.residual) + at, n);
  return finish(x, values, scale, residual, n);
}

struct FromTensor {
  const coll_quantize_args& a;
  double scale;
  int width;  // bytes of an element

  template <class S>
  int32_t load_typed(float* x, int64_t at, int n) const {
    coll_load_block(x, static_cast<const S*>(a.source) + at, n);
    return with_residual(x, x, (float)scale, a.to, at, n);
  }

  int32_t load(float* x, int64_t at, int n) const {
    if (!a.to.residual) coll_prefetch_ahead(static_cast<const char*>(a.source) + at * width, (size_t)n * width, kAhead);
    switch (a.source_type) {
      case COLL_F32: return with_residual(x, static_cast<const float*>(a.source) + at, (float)scale, a.to, at, n);
      case COLL_F16: return load_typed<coll_fp16>(x, at, n);
      case COLL_BF16: return load_typed<coll_bf16>(x, at, n);
      case COLL_E4M3: return load_typed<coll_e4m3>(x, at, n);
      case COLL_E5M2: return load_typed<coll_e5m2>(x, at, n);
      default: break;
    }
    const double* source = static_cast<const double*>(a.source) + at;
    for (int i = 0; i < n; ++i) x[i] = coll_scaled(source[i], scale);
    return with_residual(x, x, 1.0f, a.to, at, n);
  }
};

// ---- Wires in.

template <class F>
void decode_block(float* __restrict x, const typename F::element* __restrict from, int n, float scale, bool first) {
  if constexpr (F::kScaled) {
    if (first) {
      for (int i = 0; i < n; ++i) x[i] = F::value(from[i]) * scale;
    } else {
      for (int i = 0; i < n; ++i) x[i] += F::value(from[i]) * scale;
    }
  } else {
    const typename F::plain* elements = reinterpret_cast<const typename F::plain*>(from);
    if (first) {
      coll_load_block(x, elements, n);
    } else {
      float values[COLL_LANES];
      coll_load_block(values, elements, n);
      for (int i = 0; i < n; ++i) x[i] += values[i];
    }
  }
}

// Two wires at once: x = (x + one) + other, without the x where they are the first.
template <class F>
void decode_blocks(float* __restrict x, const typename F::element* __restrict one, const typename F::element* __restrict other,
                   int n, float one_scale, float other_scale, bool first) {
  if constexpr (F::kScaled) {
    if (first) {
      for (int i = 0; i < n; ++i) x[i] = F::value(one[i]) * one_scale + F::value(other[i]) * other_scale;
    } else {
      for (int i = 0; i < n; ++i) x[i] = (x[i] + F::value(one[i]) * one_scale) + F::value(other[i]) * other_scale;
    }
  } else {
    decode_block<F>(x, one, n, 1.0f, first);
    decode_block<F>(x, other, n, 1.0f, false);
  }
}

// x = the sum of the wires' elements [at, at + n), of one block.
template <class F>
void decode_sum(float* x, const coll_decoder& from, int64_t at, int n) {
  typedef typename F::element E;
  int64_t scale_at = F::kScaled ? coll_wire_scales_at(from.count, from.format) + at / from.block * (int64_t)sizeof(float) : 0;
  for (int64_t k = 0; k < from.wire_count; k += 2) {
    const char* one = static_cast<const char*>(from.wires ? from.wires[k] : from.wire);
    float one_scale = F::kScaled ? *reinterpret_cast<const float*>(one + scale_at) : 1.0f;
    if (k + 1 == from.wire_count) {
      decode_block<F>(x, reinterpret_cast<const E*>(one) + at, n, one_scale, k == 0);
      break;
    }
    const char* other = static_cast<const char*>(from.wires[k + 1]);
    float other_scale = F::kScaled ? *reinterpret_cast<const float*>(other + scale_at) : 1.0f;
    decode_blocks<F>(x, reinterpret_cast<const E*>(one) + at, reinterpret_cast<const E*>(other) + at, n, one_scale, other_scale,
                     k == 0);
  }
  if (from.average_over > 0) {
    float over = (float)from.average_over;
    for (int i = 0; i < n; ++i) x[i] /= over;
  }
}

// `at` begins a block.
template <class F>
void decode(float* x, const coll_decoder& from, int64_t at, int n) {
  for (int start = 0; start < n; start += from.block) {
    decode_sum<F>(x + start, from, at + start, n - start < from.block ? n - start : from.block);
  }
}

void decode_any(float* x, const coll_decoder& from, int64_t at, int n) {
#define COLL_DO(F) decode<F>(x, from, at, n)
  COLL_FOR_WIRE(from.format, COLL_DO)
#undef COLL_DO
}

struct FromWires {
  const coll_requantize_args& a;
  float scale;

  int32_t load(float* x, int64_t at, int n) const {
    decode_any(x, a.from, at, n);
    return with_residual(x, x, scale, a.to, at, n);
  }
};

// ---- A wire out.

void store_residual(const coll_encoder& to, const float* left, int64_t at, int n) {
  if (to.residual_type == COLL_F32) memcpy(static_cast<float*>(to.residual) + at, left, (size_t)n * sizeof(float));
  else coll_store_block(static_cast<coll_bf16*>(to.residual) + at, left, n);
}

// The residual is what the wire doesn't carry.
template <class F>
void leave_residual(const coll_encoder& to, const float* __restrict x, const typename F::element* __restrict payload, float scale,
                    int64_t at, int n) {
  if (to.residual_type == COLL_F32) {
    float* __restrict residual = static_cast<float*>(to.residual) + at;
    for (int i = 0; i < n; ++i) residual[i] = x[i] - F::value(payload[i]) * scale;
  } else {
    float left[COLL_LARGEST_BLOCK];
    for (int i = 0; i < n; ++i) left[i] = x[i] - F::value(payload[i]) * scale;
    store_residual(to, left, at, n);
  }
}

// The same without scales: an element that is sent as infinity or NaN leaves its residual as it
// was.
template <class F>
void leave_plain_residual(const coll_encoder& to, const float* x, const typename F::element* payload, int64_t at, int n) {
  float carried[COLL_LARGEST_BLOCK], left[COLL_LARGEST_BLOCK];
  decode_block<F>(carried, payload, n, 1.0f, true);
  for (int i = 0; i < n; ++i) left[i] = x[i] - carried[i];
  if (COLL_MUTANT(13, coll_finite_bits(largest(carried, n)), true)) {
    store_residual(to, left, at, n);
    return;
  }
  for (int i = 0; i < n; ++i) {
    if (coll_finite_bits(coll_magnitude_bits(carried[i]))) store_residual(to, left + i, at + i, 1);
  }
}

template <class F>
void encode_block(const coll_encoder& to, const float* x, int32_t amax, int64_t at, int n) {
  typedef typename F::element E;
  E* __restrict payload = static_cast<E*>(to.wire) + at;
  float inverse = 1.0f, scale = 1.0f;
  if (F::kScaled) {
    coll_block_scale s = coll_scale_of(amax, F::kLimit);
    char* scales = static_cast<char*>(to.wire) + coll_wire_scales_at(to.count, to.format);
    reinterpret_cast<float*>(scales)[at / to.block] = scale = s.scale;
    inverse = s.inverse;
    if (inverse == 0.0f) {
      memset(payload, 0, (size_t)n);
      if (to.residual && coll_finite_bits(amax)) store_residual(to, x, at, n);
      return;
    }
  }
  if (to.stochastic) {
    uint32_t room[COLL_PHILOX_ROOM(COLL_LARGEST_BLOCK)];
    const uint32_t* random = coll_philox_fill(room, to.seed, (uint64_t)COLL_MUTANT(11, to.position + at, at), n);
    for (int i = 0; i < n; ++i) payload[i] = (E)F::at_random(F::kScaled ? x[i] * inverse : x[i], random[i]);
  } else if constexpr (F::kScaled) {
    for (int i = 0; i < n; ++i) payload[i] = (E)F::nearest(x[i] * inverse);
  } else {
    coll_store_block(reinterpret_cast<typename F::plain*>(payload), x, n);
  }
  if (!to.residual) return;
  if constexpr (F::kScaled) leave_residual<F>(to, x, payload, scale, at, n);
  else leave_plain_residual<F>(to, x, payload, at, n);
}

template <class F, class Source>
void encode_tile(const Source& source, const coll_encoder& to, int64_t first, int count) {
  float x[COLL_LARGEST_BLOCK];
  for (int start = 0; start < count; start += to.block) {
    int n = count - start < to.block ? count - start : to.block;
    int32_t amax = source.load(x, first + start, n);
    encode_block<F>(to, x, amax, first + start, n);
  }
}

// What lies between the payload and the scales, and behind them.
void clear_padding(const coll_encoder& to) {
  char* wire = static_cast<char*>(to.wire);
  int64_t payload = to.count * coll_wire_width(to.format), end = coll_wire_scales_at(to.count, to.format);
  memset(wire + payload, 0, (size_t)(end - payload));
  if (!coll_wire_scaled(to.format)) return;
  int64_t scales = coll_wire_blocks(to.count, to.block) * 4;
  memset(wire + end + scales, 0, (size_t)(coll_wire_padded(scales) - scales));
}

template <class Source>
void encode(const Source& source, const coll_encoder& to, int64_t tiles, int64_t first_tile, int64_t last_tile) {
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    int64_t first = tile * COLL_TILE, left = to.count - first;
    int count = (int)(left < COLL_TILE ? left : COLL_TILE);
#define COLL_DO(F) encode_tile<F>(source, to, first, count)
    COLL_FOR_WIRE(to.format, COLL_DO)
#undef COLL_DO
    if (COLL_MUTANT(12, tile == tiles - 1, false)) clear_padding(to);
  }
}

// ---- A tensor out.
template <class D>
void store(void* out, int64_t at, float* values, int n, bool add) {
  typedef coll_element<D> E;
  D* dst = static_cast<D*>(out) + at;
  if (add) {
    for (int i = 0; i < n; ++i) dst[i] = E::store((typename E::acc)(E::load(dst[i]) + (typename E::acc)values[i]));
  } else {
    coll_store_block(dst, values, n);
  }
}

void decode_tile(const coll_dequantize_args& a, float scale, int64_t tile) {
  alignas(64) float buffer[COLL_LANES];
  coll_tile_sums<float> sums(coll_limit(a.out_type));
  bool add = a.flags & COLL_ADD, direct = a.out_type == COLL_F32 && !add;
  int64_t first = tile * COLL_TILE, last = a.from.count - first < COLL_TILE ? a.from.count : first + COLL_TILE;
  for (int64_t at = first; at < last; at += COLL_LANES) {
    int n = (int)(last - at < COLL_LANES ? last - at : COLL_LANES);
    float* x = direct ? static_cast<float*>(a.out) + at : buffer;
    decode_any(x, a.from, at, n);
    if (scale != 1.0f) {
      for (int i = 0; i < n; ++i) x[i] *= scale;
    }
    if (a.work.sums) sums.add(x, n);
    if (direct) continue;
    switch (a.out_type) {
      case COLL_F32: store<float>(a.out, at, x, n, add); break;
      case COLL_F16: store<coll_fp16>(a.out, at, x, n, add); break;
      case COLL_BF16: store<coll_bf16>(a.out, at, x, n, add); break;
      case COLL_F64: store<double>(a.out, at, x, n, add); break;
      case COLL_E4M3: store<coll_e4m3>(a.out, at, x, n, add); break;
      default: store<coll_e5m2>(a.out, at, x, n, add); break;
    }
  }
  if (a.work.sums) sums.finish(a.work, tile);
}

}  // namespace

void COLL_HOST_NAME(quantize)(const void* args, int64_t first, int64_t last) {
  const coll_quantize_args& a = *static_cast<const coll_quantize_args*>(args);
  double scale = coll_factor(a.scale, a.scale_at);
  coll_for_each_part(first, last, a.to.count, [&](int64_t part, int64_t first_tile, int64_t last_tile) {
    coll_quantize_args own = coll_part_of(a, part);
    encode(FromTensor{own, scale, coll_width(a.source_type)}, own.to, own.work.tiles, first_tile, last_tile);
  });
}

void COLL_HOST_NAME(requantize)(const void* args, int64_t first, int64_t last) {
  const coll_requantize_args& a = *static_cast<const coll_requantize_args*>(args);
  encode(FromWires{a, (float)coll_factor(a.from.scale, a.from.scale_at)}, a.to, a.work.tiles, first, last);
}

void COLL_HOST_NAME(dequantize)(const void* args, int64_t first, int64_t last) {
  const coll_dequantize_args& a = *static_cast<const coll_dequantize_args*>(args);
  float scale = (float)coll_factor(a.from.scale, a.from.scale_at);
  coll_for_each_part(first, last, a.from.count, [&](int64_t part, int64_t first_tile, int64_t last_tile) {
    coll_dequantize_args own = coll_part_of(a, part);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) decode_tile(own, scale, tile);
  });
}
