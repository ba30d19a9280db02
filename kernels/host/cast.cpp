// The host launcher of pack and unpack.
#include "coll/cast.h"

#include "coll/host_kernels.h"

namespace {

template <class S, class A>
void load(A* values, const void* from, int n, A scale) {
  const S* src = static_cast<const S*>(from);
  for (int i = 0; i < n; ++i) values[i] = (A)coll_element<S>::load(src[i]) * scale;
}

template <class D, class A>
void store(void* to, const A* values, int n, bool add) {
  D* dst = static_cast<D*>(to);
  if (add) {
    for (int i = 0; i < n; ++i) dst[i] = coll_element<D>::store((A)coll_element<D>::load(dst[i]) + values[i]);
  } else {
    for (int i = 0; i < n; ++i) dst[i] = coll_element<D>::store(values[i]);
  }
}

template <class A>
void cast_tile(const coll_cast_args& a, const coll_cast_tile& t, int64_t tile, A scale) {
  A values[COLL_LANES];
  coll_tile_sums<A> sums(coll_limit(t.to_type));
  for (int start = 0; start < t.count; start += COLL_LANES) {
    int n = t.count - start < COLL_LANES ? t.count - start : COLL_LANES;
    const void* from = static_cast<const char*>(t.from) + (size_t)start * coll_width(t.from_type);
    void* to = static_cast<char*>(t.to) + (size_t)start * coll_width(t.to_type);
    switch (t.from_type) {
      case COLL_F16: load<coll_fp16, A>(values, from, n, scale); break;
      case COLL_F32: load<float, A>(values, from, n, scale); break;
      case COLL_F64: load<double, A>(values, from, n, scale); break;
      case COLL_BF16: load<coll_bf16, A>(values, from, n, scale); break;
      case COLL_E4M3: load<coll_e4m3, A>(values, from, n, scale); break;
      case COLL_E5M2: load<coll_e5m2, A>(values, from, n, scale); break;
    }
    if (a.work.sums) sums.add(values, n);
    bool add = a.flags & COLL_ADD;
    switch (t.to_type) {
      case COLL_F16: store<coll_fp16, A>(to, values, n, add); break;
      case COLL_F32: store<float, A>(to, values, n, add); break;
      case COLL_F64: store<double, A>(to, values, n, add); break;
      case COLL_BF16: store<coll_bf16, A>(to, values, n, add); break;
      case COLL_E4M3: store<coll_e4m3, A>(to, values, n, add); break;
      case COLL_E5M2: store<coll_e5m2, A>(to, values, n, add); break;
    }
  }
  if (a.work.sums) sums.finish(a.work, tile);
}

}  // namespace

void COLL_HOST_NAME(cast)(const void* args, int64_t first, int64_t last) {
  const coll_cast_args& a = *static_cast<const coll_cast_args*>(args);
  double scale = a.scale_at ? a.scale * (double)*a.scale_at : a.scale;
  int64_t at = first < last ? coll_tensor_of(a.tensors, a.count, first) : 0;
  for (int64_t tile = first; tile < last; ++tile) {
    while (tile >= a.tensors[at].first_tile + coll_tiles_of(a.tensors[at].count)) ++at;
    coll_cast_tile t = coll_cast_at(a, a.tensors[at], tile);
    if (t.copies) memcpy(t.to, t.from, (size_t)t.count * coll_width(t.from_type));
    else if (coll_cast_wide(t)) cast_tile<double>(a, t, tile, scale);
    else cast_tile<float>(a, t, tile, (float)scale);
  }
}

// The lanes' rule once more, over the tiles' sums.
void COLL_HOST_NAME(finish)(const void* args, int64_t, int64_t) {
  const coll_finish_args& a = *static_cast<const coll_finish_args*>(args);
  double lanes[COLL_LANES] = {};
  int64_t bad = 0;
  for (int64_t i = 0; i < a.shares; ++i) {
    lanes[i % COLL_LANES] += a.work.sums[i];
    bad += a.work.bad[i];
  }
  *a.sum_of_squares = coll_fold_lanes(lanes, COLL_LANES);
  *a.nonfinite = bad;
}
