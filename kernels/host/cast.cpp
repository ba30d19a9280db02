// The host launcher of pack and unpack, and of the statistics' last step.
#include "coll/cast.h"

#include "coll/host_blocks.h"
#include "coll/host_kernels.h"

namespace {

constexpr int kAhead = 2048;  // bytes; measured: as fast as any from 1 KiB to 4 KiB
constexpr int kStrip = 128;   // elements between two rounds of prefetches; a whole number of lines in any type

// ---- The common pairs of types, in one loop. A row is at most COLL_LANES elements.
template <class S, class D, bool kStats, bool kAdd>
inline __attribute__((always_inline)) void cast_strip(const S* from, D* to, int n, float scale, float* lanes) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    float value = coll_element<S>::load(from[i]) * scale;
    if (kStats) lanes[i] += value * value;
    to[i] = coll_element<D>::store(kAdd ? coll_element<D>::load(to[i]) + value : value);
  }
}

template <class S, class D, bool kStats, bool kAdd>
void cast_row(const S* from, D* to, int n, float scale, float* lanes) {
  int i = 0;
  for (; i + kStrip <= n; i += kStrip) {
    coll_prefetch_ahead(from + i, kStrip * sizeof(S), kAhead);
    cast_strip<S, D, kStats, kAdd>(from + i, to + i, kStrip, scale, lanes + i);
  }
  cast_strip<S, D, kStats, kAdd>(from + i, to + i, COLL_MUTANT(1, n - i, n - i - 1), scale, lanes + i);
}

// The same past the caches, a strip of whole lines at a time; what lies before and behind them is
// stored as usual.
template <class S, class D, bool kStats>
void stream_row(const S* from, D* to, int n, float scale, float* lanes) {
  alignas(64) D strip[kStrip];
  int i = (int)(-reinterpret_cast<uintptr_t>(to) % 64 / sizeof(D));
  if (i > n) i = n;
  cast_strip<S, D, kStats, false>(from, to, i, scale, lanes);
  for (; i + kStrip <= n; i += kStrip) {
    coll_prefetch_ahead(from + i, kStrip * sizeof(S), kAhead);
    cast_strip<S, D, kStats, false>(from + i, strip, kStrip, scale, lanes + i);
    coll_stream_lines(to + i, strip, kStrip * sizeof(D));
  }
  cast_strip<S, D, kStats, false>(from + i, to + i, n - i, scale, lanes + i);
}

template <class S>
uint32_t count_bad(const S* from, int n, float scale, float limit) {
  uint32_t bad = 0;
  for (int i = 0; i < n; ++i) bad += coll_is_bad(coll_element<S>::load(from[i]) * scale, limit);
  return bad;
}

template <class S, class D, bool kStats, bool kAdd>
void cast_span(const coll_cast_args& a, const coll_cast_span& s, int64_t tile, double wide_scale, bool streams) {
  const S* from = reinterpret_cast<const S*>(s.from);
  D* to = reinterpret_cast<D*>(s.to);
  float scale = (float)wide_scale;
  for (int64_t start = 0; start < s.count; start += COLL_TILE, ++tile) {
    int count = s.count - start < COLL_TILE ? (int)(s.count - start) : COLL_TILE;
    coll_tile_sums<float> sums(coll_limit(s.to_type));
    for (int row = 0; row < count; row += COLL_LANES) {
      int n = count - row < COLL_LANES ? count - row : COLL_LANES;
      const S* in = from + start + row;
      D* out = to + start + row;
      float* lanes = kStats ? sums.row(n) : nullptr;
      if (streams && !kAdd) stream_row<S, D, kStats>(in, out, n, scale, lanes);
      else cast_row<S, D, kStats, kAdd>(in, out, n, scale, lanes);
    }
    if (kStats) sums.finish(a.work, tile, [&](float limit) { return count_bad(from + start, count, scale, limit); });
  }
}

// ---- Any pair: each row through an array of the accumulator's type. In place as well: bad values
// are counted before the row is stored.
template <class S, class A>
void load(A* values, const char* from, int n, A scale) {
  coll_load_block(values, reinterpret_cast<const S*>(from), n);
  for (int i = 0; i < n; ++i) values[i] *= scale;
}

template <class D, class A>
void store(char* to, A* values, int n, bool add, bool streams) {
  D* out = reinterpret_cast<D*>(to);
  if (add) {
    A old[COLL_LANES];
    coll_load_block(old, out, n);
    for (int i = 0; i < n; ++i) values[i] = old[i] + values[i];
  }
  if (streams && !add) {
    alignas(64) D row[COLL_LANES];
    coll_store_block(row, values, n);
    coll_stream_copy(to, row, n * sizeof(D));
  } else {
    coll_store_block(out, values, n);
  }
}

template <class A>
void store_as(int type, char* to, A* values, int n, bool add, bool streams) {
  switch (type) {
    case COLL_F16: store<coll_fp16, A>(to, values, n, add, streams); break;
    case COLL_F32: store<float, A>(to, values, n, add, streams); break;
    case COLL_F64: store<double, A>(to, values, n, add, streams); break;
    case COLL_BF16: store<coll_bf16, A>(to, values, n, add, streams); break;
    case COLL_E4M3: store<coll_e4m3, A>(to, values, n, add, streams); break;
    case COLL_E5M2: store<coll_e5m2, A>(to, values, n, add, streams); break;
  }
}

template <class A>
void cast_any_span(const coll_cast_args& a, const coll_cast_span& s, int64_t tile, double scale, bool streams) {
  A values[COLL_LANES];
  const char* from = s.from;
  char* to = s.to;
  int from_width = coll_width(s.from_type), to_width = coll_width(s.to_type);
  bool add = a.flags & COLL_ADD;
  for (int64_t start = 0; start < s.count; start += COLL_TILE, ++tile) {
    int64_t end = s.count - start < COLL_TILE ? s.count : start + COLL_TILE;
    coll_tile_sums<A> sums(coll_limit(s.to_type));
    for (int64_t i = start; i < end; i += COLL_LANES) {
      int n = end - i < COLL_LANES ? (int)(end - i) : COLL_LANES;
      switch (s.from_type) {
        case COLL_F16: load<coll_fp16, A>(values, from, n, (A)scale); break;
        case COLL_F32: load<float, A>(values, from, n, (A)scale); break;
        case COLL_F64: load<double, A>(values, from, n, (A)scale); break;
        case COLL_BF16: load<coll_bf16, A>(values, from, n, (A)scale); break;
        case COLL_E4M3: load<coll_e4m3, A>(values, from, n, (A)scale); break;
        case COLL_E5M2: load<coll_e5m2, A>(values, from, n, (A)scale); break;
      }
      if (a.work.sums) sums.add(values, n);
      if (!(a.flags & COLL_MEASURE)) store_as(s.to_type, to, values, n, add, streams);
      from += (int64_t)n * from_width;
      to += (int64_t)n * to_width;
    }
    if (a.work.sums) sums.finish(a.work, tile);
  }
}

void copy_span(const coll_cast_args&, const coll_cast_span& s, int64_t, double, bool streams) {
  size_t nbytes = (size_t)s.count * coll_width(s.from_type);
  if (s.to == s.from) return;  // the tensor lies at its own place in the flat buffer
  if (streams) coll_stream_copy(s.to, s.from, nbytes);
  else memcpy(s.to, s.from, nbytes);
}

typedef void (*span_fn)(const coll_cast_args&, const coll_cast_span&, int64_t tile, double scale, bool streams);

template <class S, class D>
span_fn pair_of(const coll_cast_args& a) {
  bool stats = a.work.sums, add = a.flags & COLL_ADD;
  if (add) return stats ? cast_span<S, D, true, true> : cast_span<S, D, false, true>;
  return stats ? cast_span<S, D, true, false> : cast_span<S, D, false, false>;
}

span_fn span_of(const coll_cast_args& a, const coll_cast_span& s) {
  if (s.copies) return copy_span;
  if (s.to == s.from) return coll_cast_is_wide(s) ? cast_any_span<double> : cast_any_span<float>;
  switch (s.from_type * 64 + s.to_type) {
    case COLL_F32 * 64 + COLL_F32: return pair_of<float, float>(a);
    case COLL_F32 * 64 + COLL_BF16: return pair_of<float, coll_bf16>(a);
    case COLL_F32 * 64 + COLL_F16: return pair_of<float, coll_fp16>(a);
    case COLL_BF16 * 64 + COLL_F32: return pair_of<coll_bf16, float>(a);
    case COLL_BF16 * 64 + COLL_BF16: return pair_of<coll_bf16, coll_bf16>(a);
    case COLL_F16 * 64 + COLL_F32: return pair_of<coll_fp16, float>(a);
    case COLL_F16 * 64 + COLL_F16: return pair_of<coll_fp16, coll_fp16>(a);
    default: return coll_cast_is_wide(s) ? cast_any_span<double> : cast_any_span<float>;
  }
}

}  // namespace

void COLL_HOST_NAME(cast)(const void* args, int64_t first, int64_t last) {
  const coll_cast_args& a = *static_cast<const coll_cast_args*>(args);
  if (first >= last) return;
  double scale = coll_cast_scale(a);
  int64_t flat_width = coll_width(a.flat_type);
  int64_t at = coll_tensor_of(a.tensors, a.count, first);
  // Small tensors make this too high an estimate; they are not streamed, as their spans are short.
  bool big = a.work.tiles * COLL_TILE * (flat_width + coll_width(a.tensors[at].type)) >= coll_stream_from;
  for (int64_t tile = first; tile < last;) {
    while (tile >= a.tensors[at].first_tile + coll_tiles_of(a.tensors[at].count)) ++at;
    const coll_tensor& tensor = a.tensors[at];
    int64_t end = tensor.first_tile + coll_tiles_of(tensor.count);
    int64_t tiles = (end < last ? end : last) - tile;
    coll_cast_span s = coll_cast_at(a, tensor, tile, tiles);
    span_of(a, s)(a, s, tile, scale, big && s.count >= COLL_LANES);
    if (COLL_MUTANT(3, s.padding, 0)) memset(s.to + s.count * flat_width, 0, s.padding * flat_width);
    tile += tiles;
  }
  if (big) coll_stream_end();
}

// The lanes' rule once more, over the tiles' sums.
void COLL_HOST_NAME(finish)(const void* args, int64_t, int64_t) {
  const coll_finish_args& a = *static_cast<const coll_finish_args*>(args);
  double lanes[COLL_LANES] = {};
  int64_t bad = 0;
  for (int64_t i = 0; i < COLL_MUTANT(2, a.shares, a.shares - 1); ++i) {
    lanes[i % COLL_LANES] += a.work.sums[i];
    bad += a.work.bad[i];
  }
  *a.sum_of_squares = coll_fold_lanes(lanes, COLL_LANES);
  *a.nonfinite = bad;
}
