// The mapping that malloc makes for one large allocation: what can be turned into shared memory at
// its address.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace coll {

size_t page_size();

// nbytes 0: there is none. `spare`: bytes between the end of the allocation and that of its mapping.
struct OwnMapping {
  char* base = nullptr;
  size_t nbytes = 0, spare = 0;
};

// The mapping that holds an allocation of nbytes at its beginning and nothing else, as the words
// before it say.
OwnMapping mapping_of(void* address, size_t nbytes);

// Whether the system, too, has plain private memory there, and no driver or library is loaded that
// may have pinned its pages for a device: it would go on with the old ones.
bool is_replaceable(const OwnMapping& mapping);
bool pages_may_be_pinned();

// Copy memory of this process. false: it isn't mapped.
bool read_own(const void* address, void* to, size_t nbytes);

}  // namespace coll
