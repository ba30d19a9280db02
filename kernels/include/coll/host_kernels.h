// What the host launchers share: their names, one set for each instruction set, and the sums of a tile.
//
// Everything but the entry points has internal linkage: an inline function shared with another object would be linked from
// whichever instruction set came first.
#ifndef COLL_HOST_KERNELS_H_
#define COLL_HOST_KERNELS_H_

#include "tile.h"

// Do tiles [first, last) of a kernel; args points at the kernel's struct of kernel_abi.h.
typedef void (*coll_tiles_fn)(const void* args, int64_t first, int64_t last);

#define COLL_PASTE3_(a, b, c) a##b##_##c
#define COLL_PASTE3(a, b, c) COLL_PASTE3_(a, b, c)
#define COLL_HOST_NAME(kernel) COLL_PASTE3(coll_host_, kernel, COLL_ISA)  // coll_host_cast_avx2

// Every kernel: DO(its name in coll_kernel, its name here, its arguments, ISA).
#define COLL_HOST_CAST_KERNELS(DO, ISA) DO(Cast, cast, coll_cast_args, ISA) DO(Finish, finish, coll_finish_args, ISA)

#define COLL_HOST_REDUCE_KERNELS(DO, ISA)

#define COLL_HOST_QUANTIZE_KERNELS(DO, ISA)

#define COLL_HOST_OPTIM_KERNELS(DO, ISA) DO(Sgd, sgd, coll_sgd_args, ISA) DO(Adam, adam, coll_adam_args, ISA)

#define COLL_HOST_KERNELS(DO, ISA) \
  COLL_HOST_CAST_KERNELS(DO, ISA)  \
  COLL_HOST_REDUCE_KERNELS(DO, ISA) COLL_HOST_QUANTIZE_KERNELS(DO, ISA) COLL_HOST_OPTIM_KERNELS(DO, ISA)

#define COLL_DECLARE_HOST_KERNEL(Kernel, kernel, Args, ISA) \
  void coll_host_##kernel##_##ISA(const void* args, int64_t first, int64_t last);
COLL_HOST_KERNELS(COLL_DECLARE_HOST_KERNEL, baseline)
COLL_HOST_KERNELS(COLL_DECLARE_HOST_KERNEL, avx2)
COLL_HOST_KERNELS(COLL_DECLARE_HOST_KERNEL, avx512)

namespace {

// Fold lanes [0, n) in halves; n is a power of two. Lanes past n are taken to be 0.
template <class A>
A coll_fold_lanes(A* lanes, int n) {
  for (int half = n / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// The statistics of one tile. Call add with the values of each COLL_LANES elements in turn, then finish.
template <class A>
class coll_tile_sums {
 public:
  explicit coll_tile_sums(double limit) : limit_((A)limit) {}

  void add(const A* values, int n) {
    int from = n < used_ ? n : used_;
    for (int i = 0; i < from; ++i) lanes_[i] += values[i] * values[i];
    for (int i = from; i < n; ++i) lanes_[i] = values[i] * values[i];
    if (n > used_) used_ = n;
    uint32_t bad = 0;
    for (int i = 0; i < n; ++i) bad += coll_is_bad(values[i], limit_);
    bad_ += bad;
  }

  void finish(const coll_work& work, int64_t tile) {
    int n = 1;
    while (n < used_) n *= 2;
    for (int i = used_; i < n; ++i) lanes_[i] = 0;
    work.sums[tile] = (double)coll_fold_lanes(lanes_, n);
    work.bad[tile] = bad_;
  }

 private:
  A lanes_[COLL_LANES];
  A limit_;
  uint32_t bad_ = 0;
  int used_ = 0;
};

}  // namespace
#endif
