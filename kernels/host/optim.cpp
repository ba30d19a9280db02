// The host launchers of the optimizers.
//
// A tile is done in blocks that stay in the first-level cache: what isn't in the type that the step
// is computed in is converted to it before and from it after, in loops of their own.
#include "coll/optim.h"

#include <utility>

#include "coll/host_blocks.h"
#include "coll/host_kernels.h"

namespace {

constexpr int kBlock = 512;  // elements

template <class A>
constexpr int kTypeOf = sizeof(A) == 8 ? COLL_F64 : COLL_F32;

template <class A>
void load(int type, A* values, const void* from, int n) {
  switch (type) {
    case COLL_F16: coll_load_block(values, static_cast<const coll_fp16*>(from), n); break;
    case COLL_F32: coll_load_block(values, static_cast<const float*>(from), n); break;
    case COLL_BF16: coll_load_block(values, static_cast<const coll_bf16*>(from), n); break;
  }
}

template <class A>
void store(int type, void* to, const A* values, int n) {
  switch (type) {
    case COLL_F16: coll_store_block(static_cast<coll_fp16*>(to), values, n); break;
    case COLL_BF16: coll_store_block(static_cast<coll_bf16*>(to), values, n); break;
  }
}

// To bf16. `first`: the number of the first element, by which its random bits are found.
void store_at_random(void* to, const float* __restrict values, int n, uint64_t seed, uint64_t first) {
  uint32_t room[COLL_PHILOX_ROOM(kBlock)];
  const uint32_t* __restrict words = coll_philox_fill(room, seed, first, n);
  coll_bf16* __restrict dst = static_cast<coll_bf16*>(to);
  for (int i = 0; i < n; ++i) dst[i].bits = coll_float_to_bf16_at_random(values[i], words[i]);
}

void store_at_random(void*, const double*, int, uint64_t, uint64_t) {}  // an fp64 parameter is never rounded

// A block of one parameter, in the type that the step is computed in. Arrays that aren't there are
// NULL.
template <class A>
struct Block {
  const A* grad;
  A *param, *first, *second, *largest;
  int count;
};

// A rule's flags as the bits of a number: each combination has a loop of its own, without branches.
template <class A>
int shape_of(const coll_sgd_rule<A>& r) {
  return r.has_momentum ? r.decays | 2 | r.begins << 2 | r.nesterov << 3 : r.decays;
}

template <class A, int kShape>
void shaped_block(coll_sgd_rule<A> r, const Block<A>& b) {
  r.decays = kShape & 1;
  r.has_momentum = kShape & 2;
  r.begins = kShape & 4;
  r.nesterov = kShape & 8;
#pragma GCC ivdep
  for (int i = 0; i < b.count; ++i) {
    A p = b.param[i], m = kShape & 2 ? b.first[i] : 0;
    coll_step(r, b.grad[i], p, m);
    b.param[i] = p;
    if (kShape & 2) b.first[i] = m;
  }
}

template <class A>
int shape_of(const coll_adam_rule<A>& r) {
  return r.decays | r.amsgrad << 1 | r.ends << 2;
}

template <class A, int kShape>
void shaped_block(coll_adam_rule<A> r, const Block<A>& b) {
  r.decays = kShape & 1;
  r.amsgrad = kShape & 2;
  r.ends = kShape & 4;
#pragma GCC ivdep
  for (int i = 0; i < b.count; ++i) {
    A p = b.param[i], m = b.first[i], v = b.second[i], x = kShape & 2 ? b.largest[i] : 0;
    coll_step(r, b.grad[i], p, m, v, x);
    b.param[i] = p;
    b.first[i] = m;
    b.second[i] = v;
    if (kShape & 2) b.largest[i] = x;
  }
}

template <class A, class Rule, int... kShapes>
void pick_and_step(const Rule& rule, const Block<A>& b, std::integer_sequence<int, kShapes...>) {
  static constexpr void (*kLoops[])(Rule, const Block<A>&) = {shaped_block<A, kShapes>...};
  kLoops[shape_of(rule)](rule, b);
}

template <class A>
void step_block(const coll_sgd_rule<A>& rule, const Block<A>& b) {
  pick_and_step(rule, b, std::make_integer_sequence<int, 16>());
}

template <class A>
void step_block(const coll_adam_rule<A>& rule, const Block<A>& b) {
  pick_and_step(rule, b, std::make_integer_sequence<int, 8>());
}

template <class A, class Rule>
void step_tile(const Rule& rule, const coll_parameter& row, coll_parameter_tile tile, bool at_random) {
  A grads[kBlock], params[kBlock];
  for (int start = 0; start < tile.count; start += kBlock) {
    int64_t at = tile.first + start;
    Block<A> b;
    b.count = tile.count - start < kBlock ? tile.count - start : kBlock;
    const char* grad = static_cast<const char*>(row.grad) + at * coll_width(row.grad_type);
    char* param = static_cast<char*>(row.param) + at * coll_width(row.param_type);
    b.grad = reinterpret_cast<const A*>(grad);
    if (row.grad_type != kTypeOf<A>) {
      load(row.grad_type, grads, grad, b.count);
      b.grad = grads;
    }
    b.param = reinterpret_cast<A*>(param);
    if (row.master) {
      b.param = static_cast<A*>(row.master) + at;
    } else if (row.param_type != kTypeOf<A>) {
      load(row.param_type, params, param, b.count);
      b.param = params;
    }
    b.first = row.first ? static_cast<A*>(row.first) + at : nullptr;
    b.second = row.second ? static_cast<A*>(row.second) + at : nullptr;
    b.largest = row.largest ? static_cast<A*>(row.largest) + at : nullptr;
    step_block(rule, b);
    if (row.param_type == kTypeOf<A>) continue;
    if (at_random) store_at_random(param, b.param, b.count, rule.seed, (uint64_t)(row.position + at));
    else store(row.param_type, param, b.param, b.count);
  }
}

template <class Args>
void step_tiles(const Args& a, int64_t first, int64_t last) {
  if (first >= last || coll_left_out(a.update)) return;
  const coll_parameter* rows = a.update.parameters;
  int64_t at = coll_tensor_of(rows, a.update.count, first);
  for (int64_t tile = first; tile < last; ++at) {
    const coll_parameter& row = rows[at];
    int64_t end = row.first_tile + coll_tiles_of(row.count);
    if (end > last) end = last;
    if (tile >= end) continue;
    auto wide = coll_rule_of(a, row);
    auto narrow = coll_rounded<float>(wide);
    auto exact = coll_rounded<double>(wide);
    bool at_random = (a.update.flags & COLL_STOCHASTIC) && row.param_type == COLL_BF16;
    for (; tile < end; ++tile) {
      if (row.param_type == COLL_F64) step_tile<double>(exact, row, coll_parameter_at(row, tile), at_random);
      else step_tile<float>(narrow, row, coll_parameter_at(row, tile), at_random);
    }
  }
}

}  // namespace

void COLL_HOST_NAME(sgd)(const void* args, int64_t first, int64_t last) {
  step_tiles(*static_cast<const coll_sgd_args*>(args), first, last);
}

void COLL_HOST_NAME(adam)(const void* args, int64_t first, int64_t last) {
  step_tiles(*static_cast<const coll_adam_args*>(args), first, last);
}
