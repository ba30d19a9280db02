// The kernels of one instruction set, chosen at run time.
#pragma once

#include <string>

#include "coll/reduce.h"

namespace coll {

// Choose by COLLECTIVES_ISA, else the widest set that this machine has. Gives "" or, where the variable names a set that isn't
// there, what is wrong; then the choice stays as it was.
std::string choose_kernels();

coll_reduce_n_fn reduce_kernel();

}  // namespace coll
