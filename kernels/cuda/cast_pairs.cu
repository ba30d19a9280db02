// The CUDA launchers of pack and unpack where all tensors have one type, and for copies: fewer
// registers than coll_cast.
#include "cast.cuh"

COLL_KERNEL coll_copy(COLL_WITH_ROWS(coll_cast_args) a) {
  for_each_span(a, true, [](const coll_cast_span& s, int64_t) { copy_bytes(s.to, s.from, s.count * coll_width(s.to_type)); });
}

template <class S, class D>
static __device__ __forceinline__ void cast_pair(const coll_launch<coll_cast_args>& launch) {
  const coll_cast_args& a = launch.args;
  __shared__ coll_share_space<float> space;
  int turn = 0;
  if (a.work.sums) coll_begin_shares(&space);
  float scale = (float)coll_cast_scale(a);
  bool add = a.flags & COLL_ADD;
  float limit = (float)coll_limit(a.flags & COLL_FROM_FLAT ? coll_rows_of(launch, a.tensors)->type : a.flat_type);
  // A span's tiles one by one: what they have in common is found once.
  for_each_span(launch, true, [&](const coll_cast_span& s, int64_t tile) {
    const char* from = s.from;
    char* to = s.to;
    COLL_KEEP_LOOP
    for (int64_t left = s.count; left > 0; left -= COLL_TILE, ++tile) {
      int count = (int)(left < COLL_TILE ? left : COLL_TILE);
      uint32_t own_bad = 0;
      COLL_KEEP_LOOP
      for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES; first += blockDim.x * COLL_PACK) {
        float values[COLL_ROWS][COLL_PACK];
        load_column<S, float>(values, from, first, count, scale);
        if (a.work.sums) sum_column(values, first, limit, space.lanes[turn], &own_bad);
        store_column<D, float>(to, values, first, count, add);
      }
      if (a.work.sums) coll_leave_share<float>(a.work, tile, &space, &turn, own_bad);
      from += COLL_TILE * sizeof(S);
      to += COLL_TILE * sizeof(D);
    }
  });
}

// Three blocks at once have enough loads on their way; left to itself the compiler spills
// registers.
COLL_KERNEL_HELD(3) coll_cast_f32_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, float>(a); }
COLL_KERNEL_HELD(3) coll_cast_f32_bf16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_bf16>(a); }
COLL_KERNEL_HELD(3) coll_cast_f32_f16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_fp16>(a); }
COLL_KERNEL_HELD(3) coll_cast_f32_e4m3(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_e4m3>(a); }
COLL_KERNEL_HELD(3) coll_cast_f32_e5m2(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_e5m2>(a); }
COLL_KERNEL_HELD(3) coll_cast_bf16_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_bf16, float>(a); }
COLL_KERNEL_HELD(3) coll_cast_bf16_bf16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_bf16, coll_bf16>(a); }
COLL_KERNEL_HELD(3) coll_cast_f16_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_fp16, float>(a); }
