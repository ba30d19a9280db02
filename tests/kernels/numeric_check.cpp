// Every fp32 value to bf16, fp16, e4m3 and e5m2, and every value of those to fp32, against the definition of the formats in double.
//
//   numeric_check STEP    1: all 2^32 values; more: each STEP-th and those round every boundary
//
// The values that round to one number are an interval of fp32, whose ends are the midpoints to its neighbours: they follow from the
// numbers, in double, and nothing else of the rounding is written down here.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "coll/host_blocks.h"
#include "coll/quantize.h"

namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr int kBlock = 4099;  // no multiple of a vector: the loops' ends are checked, too
long long checked = 0;
int failures = 0;

void fail(const char* format, const char* what, uint32_t input, uint32_t got, uint32_t want) {
  if (++failures <= 20) printf("%s %s %08x: %x, not %x\n", format, what, input, got, want);
}

// A format by its definition.
template <class T>
struct Format {
  const char* name;
  int exponent_bits, mantissa_bits;
  bool saturates;
  uint32_t largest;  // its bits
  uint32_t nan, payload;  // of a NaN: bits that are always set, bits that are kept of an fp32 NaN

  int width() const { return 1 + exponent_bits + mantissa_bits; }
  uint32_t sign() const { return 1u << (width() - 1); }

  double value(uint32_t bits) const {  // as if the exponent at the top meant no infinity
    int exponent = (int)(bits >> mantissa_bits), bias = (1 << (exponent_bits - 1)) - 1;
    double fraction = bits & ((1u << mantissa_bits) - 1);
    if (exponent == 0) return ldexp(fraction, 1 - bias - mantissa_bits);
    return ldexp(fraction + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
};

// Store `n` values from bits `first` on, `step` apart, of both signs.
template <class T>
void check_block(const Format<T>& format, uint32_t first, uint32_t step, int n, uint32_t want, bool nan) {
  static float values[kBlock];
  static T stored[kBlock];
  for (uint32_t minus = 0; minus < 2; ++minus) {
    for (int i = 0; i < n; ++i) values[i] = coll_bits_float((first + (uint32_t)i * step) | minus << 31);
    coll_store_block(stored, values, n);
    uint32_t wrong = 0;
    uint32_t sign = minus ? format.sign() : 0;
    if (nan) {
      for (int i = 0; i < n; ++i) {
        uint32_t kept = (first + (uint32_t)i * step) >> (23 - format.mantissa_bits) & format.payload;
        wrong |= stored[i].bits ^ (sign | format.nan | kept);
      }
    } else {
      for (int i = 0; i < n; ++i) wrong |= stored[i].bits ^ (want | sign);
    }
    checked += n;
    for (int i = 0; wrong && i < n; ++i) {
      uint32_t kept = nan ? (format.nan | ((first + (uint32_t)i * step) >> (23 - format.mantissa_bits) & format.payload)) : want;
      if (stored[i].bits != (kept | sign)) fail(format.name, "from", coll_float_bits(values[i]), stored[i].bits, kept | sign);
    }
  }
}

// All fp32 patterns in [first, last].
template <class T>
void check_interval(const Format<T>& format, uint32_t first, uint32_t last, uint32_t step, uint32_t want, bool nan = false) {
  uint32_t edge = last - first < 8 ? last - first + 1 : 8;
  check_block(format, first, 1, (int)edge, want, nan);
  check_block(format, last - edge + 1, 1, (int)edge, want, nan);
  uint64_t count = ((uint64_t)last - first) / step + 1;
  for (uint64_t done = 0; done < count; done += kBlock) {
    int n = count - done < kBlock ? (int)(count - done) : kBlock;
    check_block(format, first + (uint32_t)done * step, step, n, want, nan);
  }
}

template <class T>
void check_stores(const Format<T>& format, uint32_t step) {
  uint32_t first = 0;
  for (uint32_t bits = 0;; ++bits) {
    if (bits == format.largest && format.saturates) {
      check_interval(format, first, kInfinity, step, bits);
      break;
    }
    // An infinity takes what the number after the largest would take.
    double middle = (format.value(bits) + format.value(bits + 1)) / 2;
    uint32_t last = coll_float_bits((float)middle);
    if ((double)(float)middle != middle) fail(format.name, "has no midpoint after", bits, 0, 0);
    if (bits % 2) --last;  // the tie goes to the even neighbour
    check_interval(format, first, last, step, bits);
    first = last + 1;
    if (bits == format.largest) {
      check_interval(format, first, kInfinity, step, bits + 1);
      break;
    }
  }
  check_interval(format, kInfinity + 1, 0x7fffffffu, step, 0, true);
}

template <class T>
void check_loads(const Format<T>& format) {
  uint32_t count = 1u << format.width();
  std::vector<T> stored(count);
  std::vector<float> values(count);
  for (uint32_t bits = 0; bits < count; ++bits) stored[bits].bits = bits;
  coll_load_block(values.data(), stored.data(), (int)count);
  for (uint32_t bits = 0; bits < count; ++bits) {
    uint32_t magnitude = bits & (format.sign() - 1);
    float one = coll_element<T>::load(stored[bits]);
    for (float got : {values[bits], one}) {
      double want = format.value(magnitude);
      if (magnitude > format.largest) want = !format.saturates || format.mantissa_bits == 2 ? INFINITY : NAN;
      if (magnitude > format.largest + 1) want = NAN;
      bool same = isnan(want) ? isnan(got) : fabs((double)got) == want;
      if (!same || (signbit(got) != 0) != (bits != magnitude)) fail(format.name, "to fp32", bits, coll_float_bits(got), 0);
      checked += 1;
    }
  }
}

// A wire's rounding of what its block can have, once it is scaled, is the cast's.
template <class Wire, class Cast>
void check_wire(const char* name, uint32_t step) {
  uint32_t last = coll_float_bits(Wire::kLimit) + 64;  // x * (limit / max |x|) may be a little more than the limit
  for (uint32_t u = 0; u <= last; u += last - u < 4096 ? 1 : step) {
    for (uint32_t bits : {u, u | 1u << 31}) {
      uint32_t got = Wire::nearest(coll_bits_float(bits)), want = Cast::from_float(coll_bits_float(bits));
      if (got != want) fail(name, "on a wire", bits, got, want);
    }
    checked += 2;
  }
}

template <class T>
void check(const Format<T>& format, uint32_t step) {
  check_loads(format);
  check_stores(format, step);
}

}  // namespace

int main(int, char** arguments) {
  uint32_t step = (uint32_t)strtoul(arguments[1], nullptr, 10);
  check(Format<coll_bf16>{"bf16", 8, 7, false, 0x7f7f, 0x7fc0, 0x3f}, step);
  check(Format<coll_fp16>{"fp16", 5, 10, false, 0x7bff, 0x7e00, 0x3ff}, step);
  check(Format<coll_e4m3>{"e4m3", 4, 3, true, 0x7e, 0x7f, 0}, step);
  check(Format<coll_e5m2>{"e5m2", 5, 2, true, 0x7b, 0x7f, 0}, step);
  check_wire<coll_e4m3_wire, coll_e4m3_format>("e4m3", step);
  check_wire<coll_e5m2_wire, coll_e5m2_format>("e5m2", step);
  printf("%lld conversions, %d wrong\n", checked, failures);
  return failures != 0;
}
