// Thread pool: a few threads that divide the tiles of one big kernel. Started at the first use;
// idle ones sleep.
#pragma once

#include <stdint.h>

namespace coll {

// Call do_part(context, p) for every p in [0, parts), on at most `threads` threads, the caller
// among them. Blocks until all are done. While one caller has the pool, others do their work alone:
// nobody waits for somebody else's kernel.
void pool_run(int threads, int64_t parts, void (*do_part)(void* context, int64_t part), void* context);

}  // namespace coll
