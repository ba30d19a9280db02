// Ordinary memory that is used again and again becomes shared memory at its address, with nobody
// asking for it: the engine then works on it in place, as on memory of ncclMemAlloc.
//
// That can be done to an allocation of 1 MiB or more that malloc gave a mapping of its own, in a
// call that uses all of it, since then nobody else may write to it. It ends when the allocation is
// freed (heap.cpp finds that out when it looks it up, or shares another one), or the process forks.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace coll {

// Whether memory is changed because of its use: COLLECTIVES_SHARE_AFTER isn't 0.
bool may_share_by_use();

// Count a use of memory that isn't shared, and share it if it is due. true: now it is shared.
bool note_use(const void* address, size_t nbytes);

// Memory that became shared by use was used once more, or freed, after so many uses. Where it is
// freed early, sharing didn't pay, and the next allocation must be used more often.
void note_shared_use(uint32_t uses);
void note_freed(uint32_t uses);

}  // namespace coll
