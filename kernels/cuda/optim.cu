// The CUDA launchers of the optimizers. A block takes a run of tiles; a thread takes packs of 16
// bytes of state: 4 elements, or 2 where the step is computed in fp64.
#include "coll/optim.h"
#include "tile.cuh"

// The `n` elements from `from` on, 1 to kPack: one load where there are kPack and the address
// allows it.
template <class S, class A, int kPack>
static __device__ __forceinline__ void load_pack(A (&values)[kPack], const S* from, int n) {
  if (n == kPack && (uint64_t)from % sizeof(coll_pack_of<S, kPack>) == 0) {
    coll_pack_of<S, kPack> pack = *(const coll_pack_of<S, kPack>*)from;
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) values[j] = (A)coll_element<S>::load(pack.at[j]);
  } else {
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) values[j] = j < n ? (A)coll_element<S>::load(from[j]) : (A)0;
  }
}

template <class D, class A, int kPack>
static __device__ __forceinline__ void store_pack(D* to, const A (&values)[kPack], int n) {
  if (n == kPack && (uint64_t)to % sizeof(coll_pack_of<D, kPack>) == 0) {
    coll_pack_of<D, kPack> pack;
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) pack.at[j] = coll_element<D>::store(values[j]);
    *(coll_pack_of<D, kPack>*)to = pack;
  } else {
    COLL_UNROLL
    for (int j = 0; j < kPack; ++j) {
      if (j < n) to[j] = coll_element<D>::store(values[j]);
    }
  }
}

// With fp64, only gradients can be of 16-bit types.
template <class A, int kPack>
static __device__ __forceinline__ void load_pack_of(int type, A (&values)[kPack], const void* from, int64_t i, int n) {
  switch (type) {
    case COLL_F16: load_pack(values, (const coll_fp16*)from + i, n); break;
    case COLL_BF16: load_pack(values, (const coll_bf16*)from + i, n); break;
    case COLL_F32: load_pack(values, (const float*)from + i, n); break;
    default: load_pack(values, (const double*)from + i, n); break;
  }
}

static __device__ __forceinline__ void store_at_random(coll_bf16* to, const float (&values)[4], int n, uint64_t seed,
                                                       uint64_t first) {
  coll_philox_words w = coll_philox_pack(seed, first);
  uint32_t words[4] = {w.w0, w.w1, w.w2, w.w3};
  coll_bf16 rounded[4];
  COLL_UNROLL
  for (int j = 0; j < 4; ++j) rounded[j].bits = coll_float_to_bf16_at_random(values[j], words[j]);
  if (n == 4 && (uint64_t)to % sizeof(coll_pack_of<coll_bf16, 4>) == 0) {
    coll_pack_of<coll_bf16, 4> pack;
    COLL_UNROLL
    for (int j = 0; j < 4; ++j) pack.at[j] = rounded[j];
    *(coll_pack_of<coll_bf16, 4>*)to = pack;
  } else {
    COLL_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (j < n) to[j] = rounded[j];
    }
  }
}

static __device__ __forceinline__ void load_param(float (&p)[4], const coll_parameter& row, int64_t i, int n) {
  if (row.master) load_pack(p, (const float*)row.master + i, n);
  else load_pack_of(row.param_type, p, row.param, i, n);
}

static __device__ __forceinline__ void load_param(double (&p)[2], const coll_parameter& row, int64_t i, int n) {
  load_pack(p, (const double*)row.param + i, n);
}

static __device__ __forceinline__ void store_param(const float (&p)[4], const coll_parameter& row, int64_t i, int n,
                                                   int64_t flags, uint64_t seed) {
  if (row.master) store_pack((float*)row.master + i, p, n);
  if (row.param_type == COLL_BF16) {
    coll_bf16* to = (coll_bf16*)row.param + i;
    if (flags & COLL_STOCHASTIC) store_at_random(to, p, n, seed, (uint64_t)COLL_MUTANT(19, row.position + i, i));
    else store_pack(to, p, n);
  } else if (row.param_type == COLL_F16) {
    store_pack((coll_fp16*)row.param + i, p, n);
  } else {
    store_pack((float*)row.param + i, p, n);
  }
}

static __device__ __forceinline__ void store_param(const double (&p)[2], const coll_parameter& row, int64_t i, int n, int64_t,
                                                   uint64_t) {
  store_pack((double*)row.param + i, p, n);
}

// `n` elements of a parameter from number i on.
template <class A>
static __device__ __forceinline__ void step_pack(const coll_sgd_rule<A>& rule, const coll_parameter& row, int64_t i, int n,
                                                 int64_t flags) {
  constexpr int kPack = 16 / sizeof(A);
  A g[kPack], p[kPack], m[kPack] = {};
  load_pack_of(row.grad_type, g, row.grad, i, n);
  load_param(p, row, i, n);
  if (rule.has_momentum) load_pack(m, (const A*)row.first + i, n);
  COLL_UNROLL
  for (int j = 0; j < kPack; ++j) coll_step(rule, g[j], p[j], m[j]);
  if (rule.has_momentum) store_pack((A*)row.first + i, m, n);
  store_param(p, row, i, n, flags, rule.seed);
}

template <class A>
static __device__ __forceinline__ void step_pack(const coll_adam_rule<A>& rule, const coll_parameter& row, int64_t i, int n,
                                                 int64_t flags) {
  constexpr int kPack = 16 / sizeof(A);
  A g[kPack], p[kPack], m[kPack], v[kPack], x[kPack] = {};
  load_pack_of(row.grad_type, g, row.grad, i, n);
  load_param(p, row, i, n);
  load_pack(m, (const A*)row.first + i, n);
  load_pack(v, (const A*)row.second + i, n);
  if (rule.amsgrad) load_pack(x, (const A*)row.largest + i, n);
  COLL_UNROLL
  for (int j = 0; j < kPack; ++j) coll_step(rule, g[j], p[j], m[j], v[j], x[j]);
  store_pack((A*)row.first + i, m, n);
  store_pack((A*)row.second + i, v, n);
  if (rule.amsgrad) store_pack((A*)row.largest + i, x, n);
  store_param(p, row, i, n, flags, rule.seed);
}

template <class A, template <class> class Rule>
static __device__ __forceinline__ void step_tile(const Rule<A>& rule, const coll_parameter& row, coll_parameter_tile tile,
                                                 int64_t flags) {
  constexpr int kPack = 16 / sizeof(A);
  for (int i = threadIdx.x * kPack; i < tile.count; i += blockDim.x * kPack) {
    step_pack(rule, row, tile.first + i, tile.count - i < kPack ? tile.count - i : kPack, flags);
  }
}

// What a block's threads read of a parameter: its row, and the rule that one of them has worked
// out. In shared memory, since in registers it would leave room for half as many threads.
template <template <class> class Rule>
struct Plan {
  coll_parameter row;
  Rule<double> wide;
  Rule<float> narrow;
};

template <class Args, template <class> class Rule>
static __device__ __forceinline__ void step_tiles(const coll_launch<Args>& launch, Plan<Rule>& plan) {
  const Args& a = launch.args;
  int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x;
  int64_t last = a.work.tiles * ((int64_t)blockIdx.x + 1) / gridDim.x;
  if (tile >= last || coll_left_out(a.update)) return;
  const coll_parameter* rows = coll_rows_of(launch, a.update.parameters);
  for (int64_t at = coll_tensor_of(rows, a.update.count, tile); tile < last; ++at) {
    __syncthreads();
    if (threadIdx.x == 0) {
      plan.row = rows[at];
      Rule<double> rule = coll_rule_of(a, plan.row);
      plan.narrow = coll_rounded<float>(rule);
      plan.wide = coll_rounded<double>(rule);
    }
    __syncthreads();
    int64_t end = plan.row.first_tile + coll_tiles_of(plan.row.count);
    if (end > last) end = last;
    for (; tile < end; ++tile) {
      coll_parameter_tile t = coll_parameter_at(plan.row, tile);
      if (plan.row.param_type == COLL_F64) step_tile(plan.wide, plan.row, t, a.update.flags);
      else step_tile(plan.narrow, plan.row, t, a.update.flags);
    }
  }
}

// 3: 80 registers a thread; with 64 some of them spill.
COLL_KERNEL_HELD(3) coll_sgd(COLL_WITH_ROWS(coll_sgd_args) a) {
  __shared__ Plan<coll_sgd_rule> plan;
  step_tiles(a, plan);
}

COLL_KERNEL_HELD(3) coll_adam(COLL_WITH_ROWS(coll_adam_args) a) {
  __shared__ Plan<coll_adam_rule> plan;
  step_tiles(a, plan);
}
