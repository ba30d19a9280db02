// Huge pages for ordinary memory that calls use again and again where it is.
#pragma once

#include <stddef.h>

namespace coll {

constexpr size_t kHugePage = 2 << 20;

// Note that a call uses an array which is no shared memory. From the 16th use on the system is asked
// to put each block of 2 MiB that the array touches into one huge page, where it may (transparent huge
// pages that are off forbid it). Addresses and values stay as they are, and no memory is taken that
// wasn't there.
void note_ordinary_use(const void* array, size_t nbytes);

}  // namespace coll
