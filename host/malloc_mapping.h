// The mapping that malloc makes for one large allocation: what can be turned into shared memory at
// its address.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace coll {

size_t page_size();

// nbytes 0: there is none. `before`: bytes that malloc has left unused at its beginning, for an
// allocation with an alignment of its own, such as a tensor's.
struct OwnMapping {
  char* base = nullptr;
  size_t nbytes = 0, before = 0;
};

// The mapping that holds an allocation of nbytes at its beginning and nothing else, as the words
// before it say.
OwnMapping mapping_of(void* address, size_t nbytes);

// The size of a chunk of malloc's, of the word that holds it with three flags.
constexpr size_t chunk_bytes(size_t word) { return word & ~size_t{7}; }

// Whether the system, too, has plain private memory there, and no driver or library is loaded that
// may have pinned its pages for a device: it would go on with the old ones.
bool is_replaceable(const OwnMapping& mapping);
bool pages_may_be_pinned();

// Copy memory of this process. false: it isn't mapped.
bool read_own(const void* address, void* to, size_t nbytes);

}  // namespace coll
