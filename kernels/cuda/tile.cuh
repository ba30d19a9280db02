// Common parts of the CUDA launchers: the block's part in the sums of a tile. Any block of up to 256
// threads in whole warps will do.
//
// The text of the kernels is compiled by NVRTC, and in CI also by the host compiler round a small
// shim: keep to plain C++ and to threadIdx.x, blockIdx.x, blockDim.x, gridDim.x, __shared__,
// __syncthreads, and the shuffles and __byte_perm that the shim has; other instructions stand beside a
// plain form, by __CUDA_ARCH__.
#ifndef COLL_TILE_CUH_
#define COLL_TILE_CUH_

#include "coll/tile.h"

#define COLL_BLOCK 256
#define COLL_KERNEL extern "C" __global__ void __launch_bounds__(COLL_BLOCK)
// The same with the number of blocks that a multiprocessor should hold at once, by which the
// compiler divides the registers.
#define COLL_KERNEL_HELD(blocks) extern "C" __global__ void __launch_bounds__(COLL_BLOCK, blocks)

// The arguments of a kernel that reads a table, see COLL_ARGUMENTS. There is one copy of them for
// all threads, whose address can be taken without making another one.
template <class Args>
struct coll_launch {
  Args args;
  char rows[COLL_ARGUMENTS - sizeof(Args)];
};
#define COLL_WITH_ROWS(Args) const __grid_constant__ coll_launch<Args>

// Where the rows are: at `there`, or behind the arguments.
template <class Row, class Args>
static __device__ __forceinline__ const Row* coll_rows_of(const coll_launch<Args>& launch, const Row* there) {
  return there ? there : (const Row*)launch.rows;
}

// Before each loop of a fixed number of turns over an array of a thread's own: where NVRTC doesn't
// unroll it, the array lies in memory instead of registers. Works inside macros, too.
#if defined(__CUDACC_RTC__)
#define COLL_UNROLL _Pragma("unroll")
#else
#define COLL_UNROLL
#endif

// Elements that a thread takes at a time, side by side: a pack. COLL_LANES / COLL_PACK packs make a
// row of lanes.
#define COLL_PACK 4
#define COLL_PACKS (COLL_LANES / COLL_PACK)
#define COLL_ROWS (COLL_TILE / COLL_LANES)

// Before a loop round those over a thread's own arrays: unrolled, they would take twice the
// registers and leave a multiprocessor half its threads.
#if defined(__CUDACC_RTC__)
#define COLL_KEEP_LOOP _Pragma("unroll 1")
#else
#define COLL_KEEP_LOOP
#endif

// Elements side by side, in one load or store where the address allows it.
template <class T, int kPack = COLL_PACK>
struct alignas(sizeof(T) * kPack) coll_pack_of {
  T at[kPack];
};

// ---- The statistics of tiles. A block's warps are whole.
#define COLL_WARP 32

static __device__ __forceinline__ int32_t coll_warp_max(int32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  COLL_UNROLL
  for (int by = COLL_WARP / 2; by >= 1; by /= 2) {
    int32_t other = __shfl_xor_sync(0xffffffffu, x, by);
    x = other > x ? other : x;
  }
  return x;
#endif
}

// kSets sets of lanes. With two, the other warps are in the next tile while one folds; with one, they
// wait, and two registers less are taken.
template <class A, int kSets = 2>
struct alignas(sizeof(A) * COLL_PACK) coll_share_space {
  A lanes[kSets][COLL_LANES];
  uint32_t bad[kSets];
};

// Before the first tile, by all threads.
template <class A, int kSets>
static __device__ __forceinline__ void coll_begin_shares(coll_share_space<A, kSets>* space) {
  if (threadIdx.x < kSets) space->bad[threadIdx.x] = 0;
  __syncthreads();
}

// The sum of COLL_LANES lanes in shared memory, folded in halves, by one warp: thread l has lanes
// 4 l to 4 l + 3 of each 128, so that the first three halves are its own, the next five are other
// threads', and the last two its own again.
template <class A>
static __device__ __forceinline__ A coll_fold_lanes(const A* lanes) {
  static_assert(COLL_PACKS == 8 * COLL_WARP, "eight packs a thread");
  typedef coll_pack_of<A> Pack;
  const Pack* packs = (const Pack*)lanes + threadIdx.x % COLL_WARP;
  A sums[COLL_PACK];
  Pack even[2], odd[2];
  COLL_UNROLL
  for (int k = 0; k < 2; ++k) {
    Pack a = packs[2 * k * COLL_WARP], b = packs[(2 * k + 4) * COLL_WARP];
    Pack c = packs[(2 * k + 1) * COLL_WARP], d = packs[(2 * k + 5) * COLL_WARP];
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) {
      even[k].at[j] = a.at[j] + b.at[j];
      odd[k].at[j] = c.at[j] + d.at[j];
    }
  }
  COLL_UNROLL
  for (int j = 0; j < COLL_PACK; ++j) sums[j] = (even[0].at[j] + even[1].at[j]) + (odd[0].at[j] + odd[1].at[j]);
  COLL_UNROLL
  for (int by = COLL_WARP / 2; by >= 1; by /= 2) {
    COLL_UNROLL
    for (int j = 0; j < COLL_PACK; ++j) sums[j] += __shfl_down_sync(0xffffffffu, sums[j], by);
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Write one tile's statistics: the sum of its lanes, and of the threads' own counts. `turn`: which
// set this tile has; becomes the next tile's. All threads of the block together.
template <class A, class S, int kSets>
static __device__ __forceinline__ void coll_leave_share(const coll_work& work, int64_t tile, coll_share_space<S, kSets>* space,
                                                        int* turn, uint32_t own_bad) {
  int own = kSets == 1 ? 0 : *turn;
  *turn = kSets - 1 - own;
  if (own_bad) atomicAdd(&space->bad[own], own_bad);
  if (COLL_MUTANT(6, true, false)) __syncthreads();
  if (threadIdx.x / COLL_WARP == (uint32_t)tile % (blockDim.x / COLL_WARP)) {
    A sum = coll_fold_lanes((const A*)space->lanes[own]);
    if (threadIdx.x % COLL_WARP == 0) {
      work.sums[tile] = (double)sum;
      work.bad[tile] = space->bad[own];
      if (COLL_MUTANT(7, true, false)) space->bad[own] = 0;
    }
  }
  if (kSets == 1) __syncthreads();
}

// How many of some values are bad. There is seldom one: their largest magnitude shows it.
template <int kCount>
static __device__ __forceinline__ uint32_t coll_count_bad(const float* x, float limit) {
  int32_t most = 0;
  COLL_UNROLL
  for (int i = 0; i < kCount; ++i) most = coll_larger_magnitude(most, x[i]);
  uint32_t bad = 0;
  if (coll_is_bad(coll_bits_float((uint32_t)most), limit)) {
    COLL_UNROLL
    for (int i = 0; i < kCount; ++i) bad += coll_is_bad(x[i], limit);
  }
  return bad;
}

template <int kCount>
static __device__ __forceinline__ uint32_t coll_count_bad(const double* x, double limit) {
  uint32_t bad = 0;
  COLL_UNROLL
  for (int i = 0; i < kCount; ++i) bad += coll_is_bad(x[i], limit);
  return bad;
}

#endif
