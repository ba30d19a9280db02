// Dispatch to the kernels of one instruction set, chosen at run time.
#pragma once

#include <string>

#include "coll/reduce.h"

namespace coll {

// Choose by COLLECTIVES_ISA, else the widest set that this processor has. Returns "" or, where the
// variable names a set that isn't there, what is wrong; then the choice stays as it was.
std::string choose_kernels();

coll_reduce_n_fn reduce_kernel();
coll_copy_past_fn copy_past_kernel();
// to[i] = from[i] * scale, rounded once; of floating NCCL datatypes.
void cast(void* to, int to_type, const void* from, int from_type, size_t count, double scale);
// Bytes of a core's second-level cache, as the kernel reports it; 512 KiB if it doesn't.
size_t second_level_cache();
// Whether an operation that leaves so many bytes with a rank writes them past the caches, which then
// takes half to 0.8 of the time.
bool past_caches(size_t nbytes);

}  // namespace coll
