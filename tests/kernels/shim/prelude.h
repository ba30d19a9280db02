// What the text of a CUDA kernel needs to be compiled by the host compiler and run on host memory: see shim.py.
//
// The system's headers come first: some of them look for __CUDACC__.
#ifndef SHIM_PRELUDE_H_
#define SHIM_PRELUDE_H_

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
// Shared memory: static storage that the scheduler fills with garbage before each block.
#define __shared__ static __attribute__((section("shim_shared")))

struct shim_index {
  unsigned x, y, z;
};
extern shim_index threadIdx, blockIdx, blockDim, gridDim;

// Until all threads of the block are here. `where` and `line` tell barriers apart.
void shim_barrier(const char* where, int line);
#define __syncthreads() shim_barrier(__func__, __LINE__)

// The value that lane `lane` of this thread's warp gives in the same call.
uint64_t shim_exchange(uint64_t bits, unsigned lane, const char* where);
unsigned shim_lane();

template <class T>
inline T shim_shuffle(unsigned mask, T value, unsigned lane, const char* where) {
  static_assert(sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = shim_exchange(bits, mask == 0xffffffffu ? lane : 64, where);
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane) {
  return shim_shuffle(mask, value, (unsigned)lane % 32, "__shfl_sync");
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return shim_shuffle(mask, value, shim_lane() ^ (unsigned)bits, "__shfl_xor_sync");
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  unsigned lane = shim_lane();
  return shim_shuffle(mask, value, lane + by < 32 ? lane + by : lane, "__shfl_down_sync");
}
inline int __reduce_max_sync(unsigned mask, int value) {
  for (int by = 16; by >= 1; by /= 2) {
    int other = shim_shuffle(mask, value, shim_lane() ^ (unsigned)by, "__reduce_max_sync");
    value = other > value ? other : value;
  }
  return value;
}
inline void __syncwarp() { shim_exchange(0, shim_lane(), "__syncwarp"); }

// Only one thread runs at a time.
template <class T>
inline T shim_add(T* at, T value) {
  T before = *at;
  *at = before + value;
  return before;
}
inline int atomicAdd(int* at, int value) { return shim_add(at, value); }
inline unsigned atomicAdd(unsigned* at, unsigned value) { return shim_add(at, value); }
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) { return shim_add(at, value); }
inline float atomicAdd(float* at, float value) { return shim_add(at, value); }
inline double atomicAdd(double* at, double value) { return shim_add(at, value); }

template <class To, class From>
inline To shim_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return shim_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return shim_bits<float>(x); }
inline int __float_as_int(float x) { return shim_bits<int>(x); }
inline float __int_as_float(int x) { return shim_bits<float>(x); }
inline long long __double_as_longlong(double x) { return shim_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return shim_bits<double>(x); }
// Four of the eight bytes of a and b, by four bits each.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t both = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }

// ---- What shim.py puts behind the text: the table of its kernels. Each takes one struct by value.
struct shim_kernel {
  const char* name;
  size_t nbytes;
  void (*run)(const void* args);
};
extern const shim_kernel shim_kernels[];

template <class Args>
constexpr size_t shim_args_size(void (*)(Args)) {
  return sizeof(Args);
}
template <class Args>
inline void shim_call(void (*kernel)(Args), const void* args) {
  kernel(*static_cast<const Args*>(args));
}
#define SHIM_KERNEL(name) {#name, shim_args_size(name), [](const void* args) { shim_call(name, args); }},

#endif
