// The CUDA launchers of pack and unpack where all tensors have one type, and for copies: fewer
// registers than coll_cast.
#include "cast.cuh"

COLL_KERNEL coll_copy(COLL_WITH_ROWS(coll_cast_args) a) {
  for_each_span(a, true, [](const coll_cast_span& s, int64_t) { copy_bytes(s.to, s.from, s.count * coll_width(s.to_type)); });
}

template <class S, class D>
static __device__ __forceinline__ void cast_pair(const coll_launch<coll_cast_args>& launch) {
  const coll_cast_args& a = launch.args;
  __shared__ float lanes[COLL_LANES];
  __shared__ uint32_t bad;
  float scale = (float)coll_cast_scale(a);
  bool add = a.flags & COLL_ADD;
  for_each_span(launch, false, [&](const coll_cast_span& s, int64_t tile) {
    uint32_t own_bad = 0;
    for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES; first += blockDim.x * COLL_PACK) {
      float values[COLL_ROWS][COLL_PACK];
      load_column<S, float>(values, s.from, first, (int)s.count, scale);
      if (a.work.sums) sum_column(values, first, (float)coll_limit(s.to_type), lanes, &own_bad);
      store_column<D, float>(s.to, values, first, (int)s.count, add);
    }
    if (a.work.sums) coll_leave_share(a.work, tile, lanes, &bad, own_bad);
  });
}

// Three blocks at once have enough loads on their way; left to itself the compiler spills
// registers.
COLL_KERNEL_HELD(3) coll_cast_f32_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, float>(a); }
COLL_KERNEL_HELD(3) coll_cast_f32_bf16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_bf16>(a); }
COLL_KERNEL_HELD(3) coll_cast_f32_f16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_fp16>(a); }
COLL_KERNEL_HELD(3) coll_cast_bf16_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_bf16, float>(a); }
COLL_KERNEL_HELD(3) coll_cast_bf16_bf16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_bf16, coll_bf16>(a); }
COLL_KERNEL_HELD(3) coll_cast_f16_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_fp16, float>(a); }
