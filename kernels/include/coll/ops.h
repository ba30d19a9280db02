// Functors, element in, element out: no index, no stride, no thread. The launchers for the host and
// for CUDA call them in their loops.
//
// Every element type has an accumulator: fp32 for the floating types up to 32 bits, fp64 for fp64,
// an unsigned integer of the same width for integers (they wrap). A value is rounded to its own
// type once, by `store`, at the end.
#ifndef COLL_OPS_H_
#define COLL_OPS_H_

#include "numeric.h"

// ---- Element types.
template <class T>
struct coll_element;

// A double is rounded only once, too, when it is stored as another type: DIRECT is the conversion
// to a float that comes before.
#define COLL_FLOAT_ELEMENT(T, LOAD, STORE, DIRECT)  \
  template <>                                       \
  struct coll_element<T> {                          \
    typedef float acc;                              \
    COLL_FN float load(T x) { return LOAD; }        \
    COLL_FN T store(float a) {                      \
      T r;                                          \
      STORE;                                        \
      return r;                                     \
    }                                               \
    COLL_FN T store(double a) { return store(DIRECT); } \
    COLL_FN float average(float a, int64_t n) { return a / (float)n; } \
  };
COLL_FLOAT_ELEMENT(float, x, r = a, (float)a)
COLL_FLOAT_ELEMENT(coll_bf16, coll_bf16_to_float(x.bits), r.bits = coll_float_to_bf16(a), coll_round_to_odd(a))
COLL_FLOAT_ELEMENT(coll_fp16, coll_fp16_to_float(x.bits), r.bits = coll_float_to_fp16(a), coll_round_to_odd(a))
COLL_FLOAT_ELEMENT(coll_e4m3, coll_e4m3_to_float(x.bits), r.bits = coll_float_to_e4m3(a), coll_round_to_odd(a))
COLL_FLOAT_ELEMENT(coll_e5m2, coll_e5m2_to_float(x.bits), r.bits = coll_float_to_e5m2(a), coll_round_to_odd(a))
#undef COLL_FLOAT_ELEMENT

template <>
struct coll_element<double> {
  typedef double acc;
  COLL_FN double load(double x) { return x; }
  COLL_FN double store(double a) { return a; }
  COLL_FN double average(double a, int64_t n) { return a / (double)n; }
};

// Integers accumulate in their own signedness for min, max and the average's division (which
// truncates), and wrap in sums and products, which the functors below do on the unsigned type. WIDE
// holds both a value and the number of arrays, which is below 2^31.
#define COLL_INT_ELEMENT(T, WIDE)                             \
  template <>                                                 \
  struct coll_element<T> {                                    \
    typedef T acc;                                            \
    COLL_FN T load(T x) { return x; }                         \
    COLL_FN T store(T a) { return a; }                        \
    COLL_FN T average(T a, int64_t n) { return (T)((WIDE)a / (WIDE)n); } \
  };
COLL_INT_ELEMENT(int8_t, int32_t)
COLL_INT_ELEMENT(uint8_t, int32_t)
COLL_INT_ELEMENT(int32_t, int32_t)
COLL_INT_ELEMENT(uint32_t, uint32_t)
COLL_INT_ELEMENT(int64_t, int64_t)
COLL_INT_ELEMENT(uint64_t, uint64_t)
#undef COLL_INT_ELEMENT

// ---- Arithmetic that wraps for integers without the undefined behaviour of a signed overflow.
COLL_FN float coll_add(float a, float b) { return a + b; }
COLL_FN double coll_add(double a, double b) { return a + b; }
COLL_FN float coll_mul(float a, float b) { return a * b; }
COLL_FN double coll_mul(double a, double b) { return a * b; }
#define COLL_WRAP(T, U)                                                    \
  COLL_FN T coll_add(T a, T b) { return (T)(U)((U)a + (U)b); }             \
  COLL_FN T coll_mul(T a, T b) { return (T)(U)((U)a * (U)b); }
COLL_WRAP(int8_t, uint32_t)
COLL_WRAP(uint8_t, uint32_t)
COLL_WRAP(int32_t, uint32_t)
COLL_WRAP(uint32_t, uint32_t)
COLL_WRAP(int64_t, uint64_t)
COLL_WRAP(uint64_t, uint64_t)
#undef COLL_WRAP

// ---- Reductions. min and max let NaN through: once the accumulator is NaN it stays, and a NaN
// operand replaces it.
struct coll_sum {
  template <class A>
  COLL_FN A apply(A a, A b) { return coll_add(a, b); }
};
struct coll_prod {
  template <class A>
  COLL_FN A apply(A a, A b) { return coll_mul(a, b); }
};
struct coll_max {
  template <class A>
  COLL_FN A apply(A a, A b) { return a != a ? a : (b > a || b != b ? b : a); }
};
struct coll_min {
  template <class A>
  COLL_FN A apply(A a, A b) { return a != a ? a : (b < a || b != b ? b : a); }
};

#endif
