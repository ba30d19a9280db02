// The CUDA launchers of reduce_n. A block takes one tile at a time; a thread some columns of packs,
// and all sources in turn.
#include "coll/reduce.h"
#include "tile.cuh"

// kPack elements as they lie in memory: one load or store, two for a pack of 8-byte types. Packs of
// COLL_PACK are for full tiles whose addresses allow it, packs of one element for all others.
template <class S, int kPack>
struct alignas(sizeof(S) * kPack < 16 ? sizeof(S) * kPack : 16) reduce_pack {
  S at[kPack];
};

// Rows that a thread has in registers at a time: with two sources on their way, 64 bytes a thread
// of the widest types.
template <class A, int kPack>
constexpr int kRowsOf = kPack == 1 ? COLL_ROWS : sizeof(A) == 8 ? 1 : 2;

// A thread's part of some rows of a tile: the packs at `i`, i + COLL_LANES, ... of `count`
// elements from `from` on.
template <class S, int kRows, int kPack>
static __device__ __forceinline__ void load_rows(reduce_pack<S, kPack>* packs, const S* from, int i, int count) {
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    int at = i + row * COLL_LANES;
    if (kPack > 1) packs[row] = *(const reduce_pack<S, kPack>*)(from + at);
    else packs[row].at[0] = at < count ? from[at] : S();
  }
}

template <class D, class A, int kRows, int kPack>
static __device__ __forceinline__ void store_rows(D* to, const A (*values)[kPack], int i, int count) {
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    int at = i + row * COLL_LANES;
    reduce_pack<D, kPack> pack;
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) pack.at[j] = coll_element<D>::store(values[row][j]);
    if (kPack > 1) *(reduce_pack<D, kPack>*)(to + at) = pack;
    else if (at < count) to[at] = pack.at[0];
  }
}

template <class S, class A, int kRows, int kPack>
static __device__ __forceinline__ void convert_rows(A (*values)[kPack], const reduce_pack<S, kPack>* packs) {
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) values[row][j] = (A)coll_element<S>::load(packs[row].at[j]);
  }
}

template <class Op, class A, int kRows, int kPack>
static __device__ __forceinline__ void apply_rows(A (*values)[kPack], const A (*operands)[kPack]) {
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) values[row][j] = Op::apply(values[row][j], operands[row][j]);
  }
}

// One switch for some packs: that is nothing beside their loads, and the rest of the code is there
// once for all operations.
template <class S, class A, int kRows, int kPack>
static __device__ __forceinline__ void reduce_in(A (*values)[kPack], const reduce_pack<S, kPack>* packs, int op) {
  A operands[kRows][kPack];
  convert_rows<S, A, kRows, kPack>(operands, packs);
  switch (op) {
    case COLL_PROD: apply_rows<coll_prod, A, kRows, kPack>(values, operands); break;
    case COLL_MAX: apply_rows<coll_max, A, kRows, kPack>(values, operands); break;
    case COLL_MIN: apply_rows<coll_min, A, kRows, kPack>(values, operands); break;
    default: apply_rows<coll_sum, A, kRows, kPack>(values, operands); break;
  }
}

// Every source in turn, two at a time, so that the loads of both are on their way together.
template <class S, class A, int kRows, int kPack>
static __device__ __forceinline__ void gather_rows(const coll_reduce_args& a, A (*values)[kPack], int64_t first, int i,
                                                   int count) {
  COLL_KEEP_LOOP
  for (int64_t k = 0; k < a.n; k += 2) {
    reduce_pack<S, kPack> even[kRows], odd[kRows];
    bool both = COLL_MUTANT(10, k + 1 < a.n, k + 2 < a.n);
    const S* one = (const S*)a.sources[k] + first;
    const S* other = (const S*)a.sources[both ? k + 1 : k] + first;
    load_rows<S, kRows, kPack>(even, one, i, count);
    if (both) load_rows<S, kRows, kPack>(odd, other, i, count);
    if (k == 0) convert_rows<S, A, kRows, kPack>(values, even);
    else reduce_in<S, A, kRows, kPack>(values, even, a.op);
    if (both) reduce_in<S, A, kRows, kPack>(values, odd, a.op);
  }
}

template <class A, int kRows, int kPack>
static __device__ __forceinline__ void finish_rows(const coll_reduce_args& a, A (*values)[kPack], A scale) {
  if (a.op == COLL_AVG) {
    COLL_UNROLL
    for (int row = 0; row < kRows; ++row) {
      COLL_UNROLL
      for (int j = 0; j < kPack; ++j) values[row][j] = coll_element<A>::average(values[row][j], a.n);
    }
  }
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) values[row][j] = coll_mul(values[row][j], scale);
  }
}

// `sums`: of each lane's squares. Elements behind the last one don't count.
template <class A, int kRows, int kPack>
static __device__ __forceinline__ void add_statistics(const A (*values)[kPack], int i, int count, A limit, A* sums,
                                                      uint32_t* bad) {
  COLL_UNROLL
  for (int row = 0; row < kRows; ++row) {
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) {
      if (kPack > 1 || i + row * COLL_LANES < count) {
        sums[j] += values[row][j] * values[row][j];
        if (kPack == 1) *bad += coll_is_bad(values[row][j], limit);
      }
    }
  }
  if (kPack > 1) *bad += coll_count_bad<kRows * kPack>(values[0], limit);
}

// The type of the sources. A kernel for one type has half the registers of one that asks which type
// it is; of those that are less common there is one for all.
template <class S>
struct source_of {
  template <class A, int kRows, int kPack>
  COLL_FN void gather(const coll_reduce_args& a, A (*values)[kPack], int64_t first, int i, int count) {
    gather_rows<S, A, kRows, kPack>(a, values, first, i, count);
  }
};

struct narrow;
template <>
struct source_of<narrow> {
  template <class A, int kRows, int kPack>
  COLL_FN void gather(const coll_reduce_args& a, A (*values)[kPack], int64_t first, int i, int count) {
    switch (a.source_type) {
      case COLL_F16: gather_rows<coll_fp16, A, kRows, kPack>(a, values, first, i, count); break;
      case COLL_F32: gather_rows<float, A, kRows, kPack>(a, values, first, i, count); break;
      case COLL_BF16: gather_rows<coll_bf16, A, kRows, kPack>(a, values, first, i, count); break;
      case COLL_E4M3: gather_rows<coll_e4m3, A, kRows, kPack>(a, values, first, i, count); break;
      default: gather_rows<coll_e5m2, A, kRows, kPack>(a, values, first, i, count); break;
    }
  }
};

template <class A, int kRows, int kPack>
static __device__ __forceinline__ void store_float(const coll_reduce_args& a, const A (*values)[kPack], int64_t first, int i,
                                                   int count) {
  switch (a.out_type) {
    case COLL_F16: store_rows<coll_fp16, A, kRows, kPack>((coll_fp16*)a.out + first, values, i, count); break;
    case COLL_F32: store_rows<float, A, kRows, kPack>((float*)a.out + first, values, i, count); break;
    case COLL_BF16: store_rows<coll_bf16, A, kRows, kPack>((coll_bf16*)a.out + first, values, i, count); break;
    case COLL_E4M3: store_rows<coll_e4m3, A, kRows, kPack>((coll_e4m3*)a.out + first, values, i, count); break;
    case COLL_E5M2: store_rows<coll_e5m2, A, kRows, kPack>((coll_e5m2*)a.out + first, values, i, count); break;
    default: store_rows<A, A, kRows, kPack>((A*)a.out + first, values, i, count); break;
  }
}

template <class S, class A, int kPack>
static __device__ __forceinline__ void reduce_float(const coll_reduce_args& a, int64_t tile, int count, A* lanes,
                                                    uint32_t* bad) {
  constexpr int kRows = kRowsOf<A, kPack>;
  A scale = (A)coll_reduce_scale(a), limit = (A)coll_limit(a.out_type);
  COLL_KEEP_LOOP
  for (int lane = threadIdx.x * kPack; lane < COLL_LANES; lane += blockDim.x * kPack) {
    A sums[kPack] = {};
    COLL_KEEP_LOOP
    for (int i = lane; i < COLL_TILE; i += kRows * COLL_LANES) {
      A values[kRows][kPack];
      source_of<S>::template gather<A, kRows, kPack>(a, values, tile * COLL_TILE, i, count);
      finish_rows<A, kRows, kPack>(a, values, scale);
      if (a.work.sums) add_statistics<A, kRows, kPack>(values, i, count, limit, sums, bad);
      store_float<A, kRows, kPack>(a, values, tile * COLL_TILE, i, count);
    }
    if (a.work.sums) {
      COLL_UNROLL
      for (int j = 0; j < kPack; ++j) lanes[lane + j] = sums[j];
    }
  }
}

template <class T, int kPack>
static __device__ __forceinline__ void reduce_integer(const coll_reduce_args& a, int64_t tile, int count) {
  constexpr int kRows = kRowsOf<T, kPack>;
  COLL_KEEP_LOOP
  for (int i = threadIdx.x * kPack; i < COLL_LANES; i += blockDim.x * kPack) {
    COLL_KEEP_LOOP
    for (int at = i; at < COLL_TILE; at += kRows * COLL_LANES) {
      T values[kRows][kPack];
      gather_rows<T, T, kRows, kPack>(a, values, tile * COLL_TILE, at, count);
      finish_rows<T, kRows, kPack>(a, values, (T)1);
      store_rows<T, T, kRows, kPack>((T*)a.out + tile * COLL_TILE, values, at, count);
    }
  }
}

// Whether all arrays begin where packs may; tiles are a multiple of any pack.
static __device__ __forceinline__ bool takes_packs(const coll_reduce_args& a) {
  uint64_t addresses = (uint64_t)a.out;
  COLL_KEEP_LOOP
  for (int64_t k = 0; k < a.n; ++k) addresses |= (uint64_t)a.sources[k];
  return addresses % 16 == 0;
}

static __device__ __forceinline__ int elements_of(const coll_reduce_args& a, int64_t tile) {
  int64_t left = a.count - tile * COLL_TILE;
  return (int)(left < COLL_TILE ? left : COLL_TILE);
}

// The arguments with the address of the sources' addresses.
static __device__ __forceinline__ coll_reduce_args coll_reduce_of(const coll_launch<coll_reduce_args>& launch) {
  coll_reduce_args a = launch.args;
  a.sources = coll_rows_of(launch, a.sources);
  return a;
}

template <class S, class A>
static __device__ __forceinline__ void reduce_floats(const coll_launch<coll_reduce_args>& launch) {
  coll_reduce_args a = coll_reduce_of(launch);
  __shared__ coll_share_space<A, sizeof(A) == 8 ? 1 : 2> space;
  int turn = 0;
  if (a.work.sums) coll_begin_shares(&space);
  bool packs = takes_packs(a);
  int64_t last = a.work.tiles * ((int64_t)blockIdx.x + 1) / gridDim.x;
  COLL_KEEP_LOOP
  for (int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x; tile < last; ++tile) {
    int count = elements_of(a, tile);
    uint32_t own_bad = 0;
    if (packs && count == COLL_TILE) reduce_float<S, A, COLL_PACK>(a, tile, count, space.lanes[turn], &own_bad);
    else reduce_float<S, A, 1>(a, tile, count, space.lanes[turn], &own_bad);
    if (a.work.sums) coll_leave_share<A>(a.work, tile, &space, &turn, own_bad);
  }
}

// T: signed, U: the unsigned type of the same width.
template <class T, class U>
static __device__ __forceinline__ void reduce_integers(const coll_launch<coll_reduce_args>& launch, bool is_signed) {
  coll_reduce_args a = coll_reduce_of(launch);
  bool packs = takes_packs(a);
  int64_t last = a.work.tiles * ((int64_t)blockIdx.x + 1) / gridDim.x;
  COLL_KEEP_LOOP
  for (int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x; tile < last; ++tile) {
    int count = elements_of(a, tile);
    if (packs && count == COLL_TILE) {
      if (is_signed) reduce_integer<T, COLL_PACK>(a, tile, count);
      else reduce_integer<U, COLL_PACK>(a, tile, count);
    } else {
      if (is_signed) reduce_integer<T, 1>(a, tile, count);
      else reduce_integer<U, 1>(a, tile, count);
    }
  }
}

// Sources of fp32.
COLL_KERNEL coll_reduce(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_floats<float, float>(a); }
COLL_KERNEL coll_reduce_bf16(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_floats<coll_bf16, float>(a); }
COLL_KERNEL coll_reduce_f16(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_floats<coll_fp16, float>(a); }
COLL_KERNEL coll_reduce_e4m3(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_floats<coll_e4m3, float>(a); }
COLL_KERNEL coll_reduce_e5m2(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_floats<coll_e5m2, float>(a); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define COLL_WIDES 2  // left to itself the compiler spills registers
#else
#define COLL_WIDES 3
#endif
COLL_KERNEL_HELD(COLL_WIDES) coll_reduce_f64(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_floats<double, double>(a); }
// Sources of any other floating type into fp64.
COLL_KERNEL coll_reduce_wide(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_floats<narrow, double>(a); }
COLL_KERNEL coll_reduce_int8(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_integers<int8_t, uint8_t>(a, a.args.source_type == COLL_I8); }
COLL_KERNEL coll_reduce_int32(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_integers<int32_t, uint32_t>(a, a.args.source_type == COLL_I32); }
COLL_KERNEL coll_reduce_int64(COLL_WITH_ROWS(coll_reduce_args) a) { reduce_integers<int64_t, uint64_t>(a, a.args.source_type == COLL_I64); }
