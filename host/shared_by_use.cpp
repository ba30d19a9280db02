#include "shared_by_use.h"

#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "heap.h"
#include "malloc_mapping.h"
#include "system.h"

namespace coll {
namespace {

constexpr size_t kLeast = 1 << 20;
constexpr int kMost = 1024;       // of the uses before an allocation is shared
constexpr uint32_t kPays = 64;    // uses after which sharing has paid
constexpr int kSweepEvery = 256;  // uses

// Uses before an allocation is shared; 0: none is. The Python layer checks the variable.
int from_environment() {
  const char* text = getenv("COLLECTIVES_SHARE_AFTER");
  return text && *text ? std::min(std::max(atoi(text), 0), kMost) : 3;
}
const int g_least_uses = from_environment();
std::atomic<int> g_needed{g_least_uses};

// The allocations that were used last, under tables_lock(). A new one takes the place of the one
// that came first.
struct Seen { uintptr_t address; size_t nbytes; int uses; };
constexpr size_t kSeen = 256;
Seen g_seen[kSeen];
size_t g_first = 0;

Seen& seen_at(uintptr_t address) {
  Seen* found = std::find_if(g_seen, g_seen + kSeen, [&](const Seen& s) { return s.address == address; });
  return found == g_seen + kSeen ? g_seen[g_first++ % kSeen] : *found;
}

std::atomic<int> g_until_sweep{kSweepEvery};

}  // namespace

bool may_share_by_use() { return g_least_uses > 0; }

bool note_use(const void* address, size_t nbytes) {
  if (nbytes < kLeast || !g_least_uses) return false;
  void* memory = const_cast<void*>(address);
  OwnMapping own = mapping_of(memory, nbytes);
  if (!--g_until_sweep) {
    forget_freed();
    g_until_sweep = kSweepEvery;
  }
  if (!own.nbytes) return false;
  std::lock_guard<std::mutex> hold(tables_lock());
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  Seen& seen = seen_at(at);
  if (seen.address != at || seen.nbytes != nbytes) seen = {at, nbytes, 0};
  if (++seen.uses < g_needed.load(std::memory_order_relaxed)) return false;
  // Not again for long: where it can't be shared, asking costs time.
  bool shared = memory_share_used(memory, nbytes);
  seen.uses = shared ? 0 : -kMost;
  return shared;
}

void note_shared_use(uint32_t uses) {
  if (uses == kPays) g_needed.store(g_least_uses, std::memory_order_relaxed);
}

void note_freed(uint32_t uses) {
  if (uses < kPays) g_needed.store(std::min(2 * g_needed.load(std::memory_order_relaxed), kMost), std::memory_order_relaxed);
}

}  // namespace coll
