// SGD, Adam and AdamW: the step of one element, and its coefficients, in the order of operations of
// torch.optim's foreach form.
//
// Where torch's CPU kernels add a product they round once (they are built with FMA), so these
// functions do, too. SGD: Sutskever et al. 2013 in torch's form; Adam: Kingma and Ba 2015; AdamW:
// Loshchilov and Hutter 2019; amsgrad: Reddi et al. 2018.
#ifndef COLL_OPTIM_H_
#define COLL_OPTIM_H_

#include "cast.h"
#include "philox.h"

// a * b + c, rounded once.
COLL_FN float coll_fma(float a, float b, float c) {
#if defined(__CUDACC__)
  return fmaf(a, b, c);
#elif defined(__FP_FAST_FMAF) || defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  // The product is exact as a double. The sum is rounded to odd (Boldo and Melquiond 2008) with its
  // error by Knuth's two-sum, so that rounding it once more, to a float, gives what one rounding
  // gives.
  double product = (double)a * (double)b, added = (double)c;
  double sum = product + added;
  double part = sum - product;
  double error = (product - (sum - part)) + (added - part);
  uint64_t bits, wrong;
  memcpy(&bits, &sum, sizeof bits);
  memcpy(&wrong, &error, sizeof wrong);
  // 1 unless the error is 0, or NaN (both top bits of its exponent set: no error of finite numbers
  // is that large).
  uint64_t inexact = ((wrong & 0x7fffffffffffffffu) + 0x7fffffffffffffffu) >> 63 & ~(wrong >> 62 & wrong >> 61);
  bits -= inexact & (wrong ^ bits) >> 63;  // toward zero
  bits |= inexact;
  memcpy(&sum, &bits, sizeof sum);
  return (float)sum;
#endif
}

COLL_FN double coll_fma(double a, double b, double c) {
#if defined(__CUDACC__)
  return fma(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

#if defined(__CUDACC__)
COLL_FN float coll_sqrt(float x) { return sqrtf(x); }
COLL_FN double coll_sqrt(double x) { return sqrt(x); }
#else
COLL_FN float coll_sqrt(float x) { return __builtin_sqrtf(x); }
COLL_FN double coll_sqrt(double x) { return __builtin_sqrt(x); }
#endif

COLL_FN double coll_value(const coll_number& n) {
  if (!n.at) return n.value;
  if (n.type == COLL_F32) return n.value + (double)*(const float*)n.at;
  if (n.type == COLL_F64) return n.value + *(const double*)n.at;
  return n.value + (double)*(const int64_t*)n.at;
}

// base^n by repeated squaring, n >= 0, in pairs of fp64 (Dekker 1971): nearly always the fp64
// number that is nearest, as a good pow gives, and the same on every device.
COLL_FN double coll_power(double base, int64_t n) {
  double result = 1.0, result_low = 0.0, low = 0.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) {
      double product = result * base;
      double rest = coll_fma(result, base, -product) + (result * low + result_low * base);
      result = product + rest;
      result_low = rest - (result - product);
    }
    double square = base * base;
    double rest = coll_fma(base, base, -square) + 2.0 * (base * low);
    base = square + rest;
    low = rest - (base - square);
  }
  return result;
}

// Whether this step is left out. NaN counts as non-zero.
COLL_FN bool coll_left_out(const coll_update& u) { return coll_value(u.nonfinite) != 0.0; }

COLL_FN double coll_gradient_factor(const coll_update& u) {
  double scale = coll_value(u.grad_scale), clip = coll_value(u.clip);
  double factor = COLL_MUTANT(18, u.flags & COLL_DIVIDE, 0) ? clip / scale : clip * scale;
  return u.flags & COLL_MAXIMIZE ? -factor : factor;
}

// The key of the random bits of one step: splitmix64 (Steele, Lea and Flood 2014), so that each
// step draws others.
COLL_FN uint64_t coll_step_seed(uint64_t seed, int64_t step) {
  uint64_t z = seed + (uint64_t)step * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// One tile of one parameter: where its elements begin, and how many there are.
struct coll_parameter_tile {
  int64_t first;
  int count;
};

COLL_FN coll_parameter_tile coll_parameter_at(const coll_parameter& row, int64_t tile) {
  coll_parameter_tile t;
  t.first = (tile - row.first_tile) * COLL_TILE;
  int64_t left = row.count - t.first;
  t.count = (int)(left < COLL_TILE ? left : COLL_TILE);
  return t;
}

// ---- SGD. A rule is computed in fp64 for each parameter, and used in fp32 or fp64.
template <class A>
struct coll_sgd_rule {
  A factor;    // of the gradient
  A decay;     // weight decay
  A momentum;
  A intake;    // 1 - dampening
  A step;      // -lr
  uint64_t seed;
  bool decays, has_momentum, begins, nesterov;
};

COLL_FN coll_sgd_rule<double> coll_rule_of(const coll_sgd_args& a, const coll_parameter& row) {
  coll_sgd_rule<double> r;
  r.factor = coll_gradient_factor(a.update);
  r.decay = a.update.weight_decay;
  r.momentum = a.momentum;
  r.intake = 1.0 - a.dampening;
  r.step = -coll_value(a.update.lr);
  r.seed = coll_step_seed(a.update.seed, (int64_t)coll_value(row.step));
  r.decays = r.decay != 0;
  r.has_momentum = row.first != 0;
  r.begins = coll_value(row.step) == COLL_MUTANT(17, 1.0, 0.0);
  r.nesterov = (a.update.flags & COLL_NESTEROV) != 0;
  return r;
}

template <class A>
COLL_FN coll_sgd_rule<A> coll_rounded(const coll_sgd_rule<double>& w) {
  coll_sgd_rule<A> r = {(A)w.factor, (A)w.decay, (A)w.momentum, (A)w.intake, (A)w.step,
                        w.seed, w.decays, w.has_momentum, w.begins, w.nesterov};
  return r;
}

// Step one element; `buffer` is not used without momentum.
template <class A>
COLL_FN void coll_step(const coll_sgd_rule<A>& r, A grad, A& param, A& buffer) {
  A g = grad * r.factor;
  if (r.decays) g = coll_fma(param, r.decay, g);
  if (r.has_momentum) {
    buffer = r.begins ? g : coll_fma(g, r.intake, buffer * r.momentum);
    g = r.nesterov ? coll_fma(buffer, r.momentum, g) : buffer;
  }
  param = coll_fma(g, r.step, param);
}

// ---- Adam and AdamW.
template <class A>
struct coll_adam_rule {
  A factor;  // of the gradient
  A keep;    // 1 - lr * weight_decay (AdamW), else 1
  A decay;   // weight decay into the gradient (Adam)
  A lerp;    // 1 - beta1, less 1 where `ends`
  A beta2;
  A intake;  // 1 - beta2
  A root;    // sqrt(1 - beta2^step)
  A eps;
  A step;    // -lr / (1 - beta1^step)
  uint64_t seed;
  bool decays, ends, amsgrad;
};

COLL_FN coll_adam_rule<double> coll_rule_of(const coll_adam_args& a, const coll_parameter& row) {
  coll_adam_rule<double> r;
  double lr = coll_value(a.update.lr);
  int64_t step = (int64_t)coll_value(row.step);
  bool decoupled = (a.update.flags & COLL_DECOUPLED) != 0;
  r.factor = coll_gradient_factor(a.update);
  r.keep = decoupled ? 1.0 - lr * a.update.weight_decay : 1.0;
  r.decay = decoupled ? 0.0 : a.update.weight_decay;
  r.lerp = 1.0 - a.beta1;
  r.beta2 = a.beta2;
  r.intake = 1.0 - a.beta2;
  r.root = coll_sqrt(1.0 - coll_power(a.beta2, step));
  r.eps = a.eps;
  r.step = -(lr / (1.0 - coll_power(a.beta1, step)));
  r.seed = coll_step_seed(a.update.seed, step);
  r.decays = r.decay != 0;
  r.ends = false;
  r.amsgrad = row.largest != 0;
  return r;
}

// torch's lerp goes from the nearer end, as it sees the weight in the type that it works in.
template <class A>
COLL_FN coll_adam_rule<A> coll_rounded(const coll_adam_rule<double>& w) {
  A weight = (A)w.lerp;
  bool ends = !(weight < (A)0.5);
  coll_adam_rule<A> r = {(A)w.factor, (A)w.keep, (A)w.decay, ends ? weight - (A)1 : weight, (A)w.beta2, (A)w.intake,
                         (A)w.root, (A)w.eps, (A)w.step, w.seed, w.decays, ends, w.amsgrad};
  return r;
}

// Step one element; `largest` is not used without amsgrad.
template <class A>
COLL_FN void coll_step(const coll_adam_rule<A>& r, A grad, A& param, A& mean, A& square, A& largest) {
  A g = grad * r.factor;
  A p = param * r.keep;
  if (r.decays) g = coll_fma(p, r.decay, g);
  mean = coll_fma(r.lerp, g - mean, r.ends ? g : mean);
  square = coll_fma(r.intake * g, g, square * r.beta2);
  A most = square;
  if (r.amsgrad) most = largest = coll_max::apply(largest, square);
  A divisor = coll_sqrt(most) / r.root + r.eps;
  param = p + r.step * mean / divisor;
}

#endif
