// The CUDA launchers of pack and unpack where all tensors have one type, and for copies: fewer
// registers than coll_cast.
#include "cast.cuh"

COLL_KERNEL coll_copy(COLL_WITH_ROWS(coll_cast_args) a) {
  for_each_span(a, true, [](const coll_cast_span& s, int64_t) { copy_bytes(s.to, s.from, s.count * coll_width(s.to_type)); });
}

static __device__ __forceinline__ int type_of(float) { return COLL_F32; }
static __device__ __forceinline__ int type_of(coll_bf16) { return COLL_BF16; }
static __device__ __forceinline__ int type_of(coll_fp16) { return COLL_F16; }
static __device__ __forceinline__ int type_of(coll_e4m3) { return COLL_E4M3; }
static __device__ __forceinline__ int type_of(coll_e5m2) { return COLL_E5M2; }

template <class S, class D>
static __device__ __forceinline__ void cast_pair(const coll_launch<coll_cast_args>& launch) {
  const coll_cast_args& a = launch.args;
  __shared__ coll_share_space<float> space;
  int turn = 0;
  if (a.work.sums) coll_begin_shares(&space);
  float scale = (float)coll_cast_scale(a);
  bool add = a.flags & COLL_ADD;
  float limit = (float)coll_limit(type_of(D()));
  // A span's tiles one by one: what they have in common is found once.
  for_each_span(launch, true, [&](const coll_cast_span& s, int64_t tile) {
    const char* from = s.from;
    char* to = s.to;
    COLL_KEEP_LOOP
    for (int left = (int)coll_tiles_of(s.count); left > 0; --left, ++tile) {
      int count = left == 1 ? (int)((s.count - 1) % COLL_TILE) + 1 : COLL_TILE;
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

// Blocks that a multiprocessor holds: as many as the compiler spills no registers for. Three have
// enough loads on their way.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
#define COLL_CASTERS 4
#else
#define COLL_CASTERS 3
#endif

COLL_KERNEL_HELD(COLL_CASTERS) coll_cast_f32_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, float>(a); }
COLL_KERNEL_HELD(COLL_CASTERS) coll_cast_f32_bf16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_bf16>(a); }
COLL_KERNEL_HELD(COLL_CASTERS) coll_cast_f32_f16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_fp16>(a); }
COLL_KERNEL_HELD(COLL_CASTERS) coll_cast_f32_e4m3(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_e4m3>(a); }
COLL_KERNEL_HELD(COLL_CASTERS) coll_cast_f32_e5m2(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<float, coll_e5m2>(a); }
COLL_KERNEL_HELD(COLL_CASTERS) coll_cast_bf16_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_bf16, float>(a); }
COLL_KERNEL_HELD(COLL_CASTERS) coll_cast_bf16_bf16(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_bf16, coll_bf16>(a); }
COLL_KERNEL_HELD(COLL_CASTERS) coll_cast_f16_f32(COLL_WITH_ROWS(coll_cast_args) a) { cast_pair<coll_fp16, float>(a); }
