// Common parts of the CUDA launchers: the block's part in the sums of a tile. Any block of up to 256
// threads will do.
//
// The text of the kernels is compiled by NVRTC, and in CI also by the host compiler round a small
// shim: keep to plain C++ and to threadIdx.x, blockIdx.x, blockDim.x, gridDim.x, __shared__ and
// __syncthreads.
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

// Fold COLL_LANES lanes in shared memory in halves, all threads of the block together; the result
// is lanes[0].
template <class A>
static __device__ __forceinline__ void coll_fold_lanes(A* lanes) {
  for (int half = COLL_LANES / 2; half >= 1; half /= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < half; i += blockDim.x) lanes[i] += lanes[i + half];
  }
  __syncthreads();
}

// Write one tile's statistics: sum of the lanes, and of the threads' own counts.
template <class A>
static __device__ __forceinline__ void coll_leave_share(const coll_work& work, int64_t tile, A* lanes, uint32_t* bad,
                                                        uint32_t own_bad) {
  if (threadIdx.x == 0) *bad = 0;
  __syncthreads();
  if (own_bad) atomicAdd(bad, own_bad);
  coll_fold_lanes(lanes);
  if (threadIdx.x == 0) {
    work.sums[tile] = (double)lanes[0];
    work.bad[tile] = *bad;
  }
  __syncthreads();
}

#endif
