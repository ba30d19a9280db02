// The host launchers of reduce_n: the kernel, and what the engine calls for the chunks of a
// collective.
#include "coll/reduce.h"

#include <type_traits>

#include "coll/host_blocks.h"
#include "coll/host_kernels.h"

namespace {

// What to do to elements [first, last) of all arrays.
struct Job {
  const void* const* sources;
  int64_t n;
  void* out;
  int64_t first, last;
  int64_t all;              // elements of the whole call, if it may store past the caches; else 0
  int op;
  int64_t over;             // > 0: divide by this
  const uint64_t* scalars;  // as in coll_reduction
  double scale;
  int source_type, out_type;
  const coll_work* work;    // NULL: no statistics; else `first` is where a tile begins
  void* const* copies = nullptr;  // as in coll_reduction
  int copy_count = 0;
  int past_caches = -1;     // 1: yes, 0: no, -1: where it pays
  coll_share* share = nullptr;  // as in coll_reduction; not beside `work`
};

// A row is at most COLL_LANES elements: 4 KiB of fp32, which stay in the first-level cache beside
// the sources' lines. Rows of 16 KiB don't, and take 1.5 times as long. Where a share is taken rows
// are shorter: while a row's squares are added up nothing is asked of the memory, unless the
// processor looks past them to the next row; and shorter ones have more calls. (Two sources from
// the last-level cache, AVX-512, averaged in place: fp32 in rows of 1024 takes 1.2 times as long as
// without a share, of 512 0.95 times, since the division's pass gets quicker; bf16 in rows of 256
// 1.11 times, of 512 1.01 times.)
constexpr int kShareRow = 512;
template <class A>
using gather_fn = void (*)(A* values, const Job& job, int64_t at, int len);
template <class A>
using store_fn = void (*)(void* out, const A* values, int64_t at, int len);

template <class S>
const S* row_of(const Job& job, int64_t source, int64_t at) {
  return static_cast<const S*>(job.sources[source]) + at;
}

// How many of n sources are reduced in one loop at first, in registers and from the left, before
// the values are stored.
int first_together(int64_t n) { return n >= 4 ? 4 : n >= 2 ? 2 : 1; }

// Types whose conversion takes more than a shift are converted first, some elements at a time: that
// takes no longer, and there need not be as many loops as there are pairs of types. The sources are
// still read side by side: memory is slow to give one row of each after the other (measured: half
// the rate for 4 sources of fp16).
template <class S, class A>
constexpr bool kConvertsFirst = !std::is_same_v<S, A> && !(std::is_same_v<S, coll_bf16> && std::is_same_v<A, float>);
constexpr int kStrip = 128;

// `values` may be one of the sources: every element is read before it is written, which ivdep
// states to the vectoriser.
template <class R, class A, class Op, int kTogether, bool kBegin>
__attribute__((noinline)) void gather_rows(A* values, const R* const* rows, int len) {
  const R *a = rows[0], *b = rows[kTogether > 1 ? 1 : 0], *c = rows[kTogether > 2 ? 2 : 0], *d = rows[kTogether > 3 ? 3 : 0];
#pragma GCC ivdep
  for (int i = 0; i < len; ++i) {
    A value = coll_element<R>::load(a[i]);
    if (!kBegin) value = Op::apply(values[i], value);
    if (kTogether > 1) value = Op::apply(value, coll_element<R>::load(b[i]));
    if (kTogether > 2) value = Op::apply(value, coll_element<R>::load(c[i]));
    if (kTogether > 3) value = Op::apply(value, coll_element<R>::load(d[i]));
    values[i] = value;
  }
}

template <class A>
using gather_strips_fn = void (*)(A* values, const A* const* strips, int n);

template <class S, class A, int kTogether>
inline __attribute__((always_inline)) void convert_strips(A* values, const S* const* rows, int len, gather_strips_fn<A> gather) {
  alignas(64) A held[kTogether][kStrip];
  for (int start = 0; start < len; start += kStrip) {
    int n = len - start < kStrip ? len - start : kStrip;
    const A* strips[kTogether];
#pragma GCC unroll 4
    for (int k = 0; k < kTogether; ++k) {
      coll_load_block(held[k], rows[k] + start, n);
      strips[k] = held[k];
    }
    gather(values + start, strips, n);
  }
}

// The conversion of several rows is the same for all operations: it is compiled once for each pair
// of types. Of one row it is too short for that (measured: 6% of the time of 3 sources of fp8).
template <class S, class A, int kTogether>
__attribute__((noinline)) void convert_rows(A* values, const S* const* rows, int len, gather_strips_fn<A> gather) {
  convert_strips<S, A, kTogether>(values, rows, len, gather);
}

template <class S, class A, class Op, int kTogether, bool kBegin>
void gather_some(A* values, const Job& job, int64_t source, int64_t at, int len) {
  const S* rows[kTogether];
  for (int k = 0; k < kTogether; ++k) rows[k] = row_of<S>(job, source + k, at);
  constexpr auto gather = gather_rows<std::conditional_t<kConvertsFirst<S, A>, A, S>, A, Op, kTogether, kBegin>;
  if constexpr (!kConvertsFirst<S, A>) gather(values, rows, len);
  else if constexpr (kTogether == 1) convert_strips<S, A, kTogether>(values, rows, len, gather);
  else convert_rows<S, A, kTogether>(values, rows, len, gather);
}

template <class S, class A, class Op>
void gather(A* values, const Job& job, int64_t at, int len) {
  int64_t n = job.n, k = first_together(n);
  if (k == 4) gather_some<S, A, Op, 4, true>(values, job, 0, at, len);
  else if (k == 2) gather_some<S, A, Op, 2, true>(values, job, 0, at, len);
  else gather_some<S, A, Op, 1, true>(values, job, 0, at, len);
  for (; COLL_MUTANT(8, k + 4 <= n, k + 4 < n); k += 4) gather_some<S, A, Op, 4, false>(values, job, k, at, len);
  if (k + 2 <= n) gather_some<S, A, Op, 2, false>(values, job, k, at, len), k += 2;
  if (k < n) gather_some<S, A, Op, 1, false>(values, job, k, at, len);
}

// A sum whose sources are multiplied first.
template <class S, class A>
void gather_scaled(A* values, const Job& job, int64_t at, int len) {
  for (int64_t k = 0; k < job.n; ++k) {
    const S* row = row_of<S>(job, k, at);
    A scalar;
    memcpy(&scalar, &job.scalars[k], sizeof scalar);
    if (k == 0) {
#pragma GCC ivdep
      for (int i = 0; i < len; ++i) values[i] = coll_mul(scalar, (A)coll_element<S>::load(row[i]));
    } else {
#pragma GCC ivdep
      for (int i = 0; i < len; ++i) values[i] = coll_add(values[i], coll_mul(scalar, (A)coll_element<S>::load(row[i])));
    }
  }
}

// Sums and products of integers wrap: those of signed ones have the bits of unsigned ones, and take
// the same loops.
template <class T, bool kInteger = std::is_integral_v<T>>
struct wrapping { typedef T type; };
template <class T>
struct wrapping<T, true> { typedef std::make_unsigned_t<T> type; };

template <class S, class A, class Op>
void gather_wrapping(A* values, const Job& job, int64_t at, int len) {
  typedef typename wrapping<A>::type Wrapping;
  gather<typename wrapping<S>::type, Wrapping, Op>(reinterpret_cast<Wrapping*>(values), job, at, len);
}

template <class S, class A>
void gather_scaled_wrapping(A* values, const Job& job, int64_t at, int len) {
  typedef typename wrapping<A>::type Wrapping;
  gather_scaled<typename wrapping<S>::type, Wrapping>(reinterpret_cast<Wrapping*>(values), job, at, len);
}

template <class S, class A>
gather_fn<A> gather_of(const Job& job) {
  if (job.scalars) return gather_scaled_wrapping<S, A>;
  switch (job.op) {
    case COLL_PROD: return gather_wrapping<S, A, coll_prod>;
    case COLL_MAX: return gather<S, A, coll_max>;
    case COLL_MIN: return gather<S, A, coll_min>;
    default: return gather_wrapping<S, A, coll_sum>;
  }
}

template <class D, class A>
void store(void* out, const A* values, int64_t at, int len) {
  coll_store_block(static_cast<D*>(out) + at, values, len);
}

template <class A>
void stream(void* out, const A* values, int64_t at, int len) {
  coll_stream_copy(static_cast<A*>(out) + at, values, len * sizeof(A));
}

template <class A>
store_fn<A> store_of(int type) {
  if constexpr (std::is_floating_point_v<A>) {
    switch (type) {
      case COLL_F16: return store<coll_fp16, A>;
      case COLL_F32: return store<float, A>;
      case COLL_BF16: return store<coll_bf16, A>;
      case COLL_E4M3: return store<coll_e4m3, A>;
      case COLL_E5M2: return store<coll_e5m2, A>;
    }
  }
  return store<A, A>;
}

// Whether the values can be gathered in `out` itself: no source but those that are read first may
// be `out`.
bool gathers_in_place(const Job& job) {
  for (int64_t k = job.scalars ? 1 : first_together(job.n); k < job.n; ++k) {
    if (job.sources[k] == job.out) return COLL_MUTANT(9, false, true);
  }
  return true;
}

// Stores past the caches pay where the values need no rounding: 1.2 to 1.7 times the rate for up to
// 4 sources of fp32 that are larger than the caches. Narrower types take the time for their
// rounding, and lose by it.
template <class A>
bool streams(const Job& job, int64_t source_width) {
  if (job.past_caches >= 0) return job.past_caches;
  if (job.all * (job.n * source_width + (int64_t)sizeof(A)) < coll_stream_from) return false;
  for (int64_t k = 0; k < job.n; ++k) {
    if (job.sources[k] == job.out) return false;  // its lines are in the caches
  }
  return true;
}

template <class A>
void multiply(A* values, int len, A scale) {
  for (int i = 0; i < len; ++i) values[i] = coll_mul(values[i], scale);
}

// Returns the number of bad values.
template <class A>
uint32_t add_squares(A* lanes, const A* values, int len, A limit) {
  uint32_t bad = 0;
  for (int i = 0; i < len; ++i) {
    lanes[i] += values[i] * values[i];
    bad += coll_is_bad(values[i], limit);
  }
  return bad;
}

// Bytes of a vector register, and of the lanes in which a row's squares are added up: these are as
// many on every instruction set, so that the sum is the same on all, and few enough to stay in
// registers. (The lanes of a tile's statistics don't: with those a collective took 1.3 times as
// long.)
#if defined(__AVX512F__)
constexpr int kWide = 64;
#elif defined(__AVX2__)
constexpr int kWide = 32;
#else
constexpr int kWide = 16;
#endif
constexpr int kShareLanes = 256;

template <class A>
__attribute__((noinline)) A sum_of_squares(const A* values, int len) {
  constexpr int kLanes = kShareLanes / (int)sizeof(A), kParts = kShareLanes / kWide;
  typedef A wide __attribute__((vector_size(kWide), aligned(alignof(A)), may_alias));
  wide sums[kParts] = {};
  auto add = [&sums](const A* from) {
    const wide* v = reinterpret_cast<const wide*>(from);
#pragma GCC unroll 16
    for (int k = 0; k < kParts; ++k) sums[k] += v[k] * v[k];
  };
  int i = 0;
  for (; i + kLanes <= len; i += kLanes) add(values + i);
  if (i < len) {
    A rest[kLanes] = {};
    memcpy(rest, values + i, (size_t)(len - i) * sizeof(A));
    add(rest);
  }
  // In halves, as coll_fold_lanes does: by whole registers first.
#pragma GCC unroll 4
  for (int half = kParts / 2; half >= 1; half /= 2) {
#pragma GCC unroll 8
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  A lanes[kWide / sizeof(A)];
  memcpy(lanes, sums, sizeof lanes);
#pragma GCC unroll 4
  for (int half = kWide / (int)sizeof(A) / 2; half >= 1; half /= 2) {
#pragma GCC unroll 8
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

// Where the sum is less than the least bad square, no value is bad: they are looked at where it
// isn't.
template <class A>
void add_row(coll_share& share, const A* values, int len, A limit) {
  A sum = sum_of_squares(values, len);
  share.sum_of_squares += sum;
  if (sum < limit * limit) return;
  uint32_t count = 0;
  for (int i = 0; i < len; ++i) count += coll_is_bad(values[i], limit);
  share.nonfinite += count;
}

// `values_are_output`: they need no rounding. `source_width`: bytes of a source's element.
template <class A>
__attribute__((noinline)) void reduce_rows(const Job& job, gather_fn<A> gather, int64_t source_width, bool values_are_output) {
  constexpr bool kFloat = std::is_floating_point_v<A>;
  bool past_caches = values_are_output && streams<A>(job, source_width);
  store_fn<A> store = past_caches ? stream<A> : store_of<A>(job.out_type);
  bool in_place = values_are_output && !past_caches && gathers_in_place(job);
  int row = job.share ? kShareRow : COLL_LANES;
  alignas(64) A held[COLL_LANES];
  for (int64_t at = job.first; at < job.last;) {
    int64_t tile = at / COLL_TILE, end = job.last - at < COLL_TILE ? job.last : at + COLL_TILE;
    double limit = job.work || job.share ? coll_limit(job.out_type) : 0;
    coll_tile_sums<std::conditional_t<kFloat, A, float>> sums(limit);
    uint32_t bad = 0;
    for (int len; at < end; at += len) {
      len = end - at < row ? (int)(end - at) : row;
      A* values = in_place ? static_cast<A*>(job.out) + at : held;
      gather(values, job, at, len);
      if (job.over > 0) {
        for (int i = 0; i < len; ++i) values[i] = coll_element<A>::average(values[i], job.over);
      }
      if constexpr (kFloat) {
        if (job.scale != 1) multiply(values, len, (A)job.scale);
        if (job.work) bad += add_squares(sums.row(len), values, len, (A)limit);
        if (job.share) add_row(*job.share, values, len, (A)limit);
      }
      for (int c = 0; c < job.copy_count; ++c) store(job.copies[c], values, at, len);
      if (!in_place) store(job.out, values, at, len);
    }
    if (job.work) sums.finish(*job.work, tile, [bad](auto) { return bad; });
  }
  if (past_caches) coll_stream_end();
}

template <class S, class A>
void reduce(const Job& job, bool values_are_output) {
  reduce_rows<A>(job, gather_of<S, A>(job), sizeof(S), values_are_output);
}

template <class S>
void reduce_float(const Job& job) {
  if (job.out_type == COLL_F64) reduce<S, double>(job, true);
  else reduce<S, float>(job, job.out_type == COLL_F32);
}

void reduce_any(const Job& job) {
  switch (job.source_type) {
    case COLL_I8: reduce<int8_t, int8_t>(job, true); break;
    case COLL_U8: reduce<uint8_t, uint8_t>(job, true); break;
    case COLL_I32: reduce<int32_t, int32_t>(job, true); break;
    case COLL_U32: reduce<uint32_t, uint32_t>(job, true); break;
    case COLL_I64: reduce<int64_t, int64_t>(job, true); break;
    case COLL_U64: reduce<uint64_t, uint64_t>(job, true); break;
    case COLL_F16: reduce_float<coll_fp16>(job); break;
    case COLL_F32: reduce_float<float>(job); break;
    case COLL_BF16: reduce_float<coll_bf16>(job); break;
    case COLL_E4M3: reduce_float<coll_e4m3>(job); break;
    case COLL_E5M2: reduce_float<coll_e5m2>(job); break;
    case COLL_F64: reduce<double, double>(job, job.out_type == COLL_F64); break;
    default: break;  // the caller has checked the types
  }
}

}  // namespace

void COLL_HOST_NAME(reduce)(const void* args, int64_t first, int64_t last) {
  const coll_reduce_args& a = *static_cast<const coll_reduce_args*>(args);
  int64_t end = last * COLL_TILE < a.count ? last * COLL_TILE : a.count;
  reduce_any({a.sources, a.n, a.out, first * COLL_TILE, end, a.count, a.op, coll_reduce_over(a), nullptr, coll_reduce_scale(a),
              a.source_type, a.out_type, a.work.sums ? &a.work : nullptr});
}

void COLL_PASTE3(coll_reduce_, n, COLL_ISA)(void* dst, const void* const* srcs, int n, size_t count, int datatype,
                                            const coll_reduction* how) {
  reduce_any({srcs, n, dst, 0, (int64_t)count, 0, how->op, how->average_over, how->scalars, 1.0, datatype, how->out_type, nullptr,
              how->copies, how->copy_count, how->past_caches, how->share});
}

void COLL_PASTE3(coll_copy_, past, COLL_ISA)(void* to, const void* from, size_t nbytes) {
  coll_stream_copy(to, from, nbytes);
  coll_stream_end();
}
