// The CUDA launchers of pack and unpack for any types, and of the statistics' last step.
// cast_pairs.cu has the common types.
#include "cast.cuh"

// One tile, by the whole block. A thread takes columns of packs: lanes [4 * column, 4 * column + 4)
// in all rows.
template <class A, class S>
static __device__ __forceinline__ void cast_tile(const coll_cast_args& a, const coll_cast_span& s, int64_t tile, A scale,
                                                 coll_share_space<S>* space, int* turn) {
  uint32_t own_bad = 0;
  int count = (int)s.count;
  bool add = a.flags & COLL_ADD;
  for (int first = threadIdx.x * COLL_PACK; first < COLL_LANES; first += blockDim.x * COLL_PACK) {
    A values[COLL_ROWS][COLL_PACK];
    switch (s.from_type) {
      case COLL_F16: load_column<coll_fp16, A>(values, s.from, first, count, scale); break;
      case COLL_F32: load_column<float, A>(values, s.from, first, count, scale); break;
      case COLL_F64: load_column<double, A>(values, s.from, first, count, scale); break;
      case COLL_BF16: load_column<coll_bf16, A>(values, s.from, first, count, scale); break;
      case COLL_E4M3: load_column<coll_e4m3, A>(values, s.from, first, count, scale); break;
      default: load_column<coll_e5m2, A>(values, s.from, first, count, scale); break;
    }
    if (a.work.sums) sum_column(values, first, (A)coll_limit(s.to_type), (A*)space->lanes[*turn], &own_bad);
    if (a.flags & COLL_MEASURE) continue;
    switch (s.to_type) {
      case COLL_F16: store_column<coll_fp16, A>(s.to, values, first, count, add); break;
      case COLL_F32: store_column<float, A>(s.to, values, first, count, add); break;
      case COLL_F64: store_column<double, A>(s.to, values, first, count, add); break;
      case COLL_BF16: store_column<coll_bf16, A>(s.to, values, first, count, add); break;
      case COLL_E4M3: store_column<coll_e4m3, A>(s.to, values, first, count, add); break;
      default: store_column<coll_e5m2, A>(s.to, values, first, count, add); break;
    }
  }
  if (a.work.sums) coll_leave_share<A>(a.work, tile, space, turn, own_bad);
}

// S: the type of the sums, double for a kernel that takes fp64.
template <class S>
static __device__ __forceinline__ void cast_tiles(const coll_launch<coll_cast_args>& launch) {
  const coll_cast_args& a = launch.args;
  __shared__ coll_share_space<S> space;
  int turn = 0;
  if (a.work.sums) coll_begin_shares(&space);
  double scale = coll_cast_scale(a);
  for_each_span(launch, false, [&](const coll_cast_span& s, int64_t tile) {
    if (s.copies) copy_bytes(s.to, s.from, s.count * coll_width(s.to_type));
    else if (sizeof(S) == 8 && coll_cast_is_wide(s)) cast_tile<double>(a, s, tile, scale, &space, &turn);
    else cast_tile<float>(a, s, tile, (float)scale, &space, &turn);
  });
}

// Any types; only coll_cast_wide takes fp64, which costs half of the threads that a multiprocessor
// holds.
COLL_KERNEL_HELD(2) coll_cast(COLL_WITH_ROWS(coll_cast_args) a) { cast_tiles<float>(a); }
COLL_KERNEL_HELD(2) coll_cast_wide(COLL_WITH_ROWS(coll_cast_args) a) { cast_tiles<double>(a); }

// One block.
COLL_KERNEL coll_finish(const coll_finish_args a) {
  __shared__ coll_pack_of<double> packs[COLL_PACKS];
  __shared__ unsigned long long bad;
  double* lanes = (double*)packs;
  if (threadIdx.x == 0) bad = 0;
  __syncthreads();
  unsigned long long own = 0;
  // Four of a thread's lanes side by side, and four values of each, so that their loads are on their
  // way together: the time is that of one after the other.
  constexpr int kLanes = 4, kTurns = 4;
  for (int lane = threadIdx.x; lane < COLL_LANES; lane += kLanes * blockDim.x) {
    double sums[kLanes] = {};
    COLL_KEEP_LOOP
    for (int64_t start = lane; start < a.shares; start += kTurns * COLL_LANES) {
      double values[kTurns][kLanes];
      uint32_t counts[kTurns][kLanes];
      COLL_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) {
        COLL_UNROLL
        for (int j = 0; j < kLanes; ++j) {
          int64_t i = start + turn * COLL_LANES + j * blockDim.x;
          bool live = lane + j * blockDim.x < COLL_LANES && i < a.shares;
          values[turn][j] = live ? a.work.sums[i] : 0.0;
          counts[turn][j] = live ? a.work.bad[i] : 0u;
        }
      }
      COLL_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) {
        COLL_UNROLL
        for (int j = 0; j < kLanes; ++j) {
          sums[j] += values[turn][j];
          own += counts[turn][j];
        }
      }
    }
    COLL_UNROLL
    for (int j = 0; j < kLanes; ++j) {
      if (lane + j * blockDim.x < COLL_LANES) lanes[lane + j * blockDim.x] = sums[j];
    }
  }
  if (own) atomicAdd(&bad, own);
  __syncthreads();
  if (threadIdx.x >= COLL_WARP) return;
  double sum = coll_fold_lanes(lanes);
  if (threadIdx.x == 0) {
    *a.sum_of_squares = sum;
    *a.nonfinite = (int64_t)bad;
  }
}
