#include "huge_pages.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include "heap.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace coll {
namespace {

constexpr size_t kLeast = 256 << 10;
// A block takes the system 1 to 2 ms, as much as it saves in 30 uses of 16 MiB, or in 150 of 1 MiB.
constexpr int kUses = 16;
// Uses until the system is asked again: the owner may have unmapped a block, and it costs 5 us
// where nothing has changed; and after a refusal, which may have taken long.
constexpr int kAgain = 32, kAfterRefusal = 1024;
constexpr int kAtOnce = 8;       // blocks in one call

bool is_allowed() {
  FILE* file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
  if (!file) return false;
  char line[128] = {};
  bool known = fgets(line, sizeof line, file);
  fclose(file);
  return known && !strstr(line, "[never]");
}

struct Block { uintptr_t address; int uses; };
constexpr size_t kBlocks = 4096;  // of 8 GiB; others at the same place in the table begin again
Block g_blocks[kBlocks];
std::mutex g_lock;
// A child must not inherit the lock while another thread of its parent holds it.
[[maybe_unused]] const int g_fork_handlers =
    pthread_atfork([] { g_lock.lock(); }, [] { g_lock.unlock(); }, [] { g_lock.unlock(); });

// Whether all of a block is memory of this process alone, so that a huge page takes as much as the
// pages that it replaces. It isn't where a page was only read so far (all of those are one page of
// zeros), or where a forked process has it, too: the old pages stay there.
bool is_private(uintptr_t block) {
  constexpr uint64_t kPresent = uint64_t{1} << 63, kOfFile = uint64_t{1} << 61, kExclusive = uint64_t{1} << 56;
  uint64_t pages[kHugePage / 4096];
  size_t count = kHugePage / page_size();
  int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  ssize_t got = pread(fd, pages, count * sizeof *pages, static_cast<off_t>(block / page_size() * sizeof *pages));
  close(fd);
  return got == static_cast<ssize_t>(count * sizeof *pages) && std::all_of(pages, pages + count, [](uint64_t page) {
    return (page & (kPresent | kOfFile | kExclusive)) == (kPresent | kExclusive);
  });
}

// Count one use of a block. true: now the system is to be asked, by this thread alone.
bool count_use(uintptr_t address) {
  std::lock_guard<std::mutex> hold(g_lock);
  Block& block = g_blocks[address / kHugePage % kBlocks];
  if (block.address != address) block = {address, 0};
  if (++block.uses < kUses) return false;
  block.uses = kUses - kAgain;
  return true;
}

// Not under the lock: it may take long, and other threads have arrays, too, or fork.
void ask_for_huge_page(uintptr_t address) {
  // In one step, whoever uses the memory meanwhile. Where the system has no huge page, or a device
  // has pinned the old pages, it refuses, and nothing has changed.
  if (is_private(address) && madvise(reinterpret_cast<void*>(address), kHugePage, MADV_COLLAPSE) == 0) return;
  std::lock_guard<std::mutex> hold(g_lock);
  Block& block = g_blocks[address / kHugePage % kBlocks];
  if (block.address == address) block.uses = kUses - kAfterRefusal;
}

const bool g_allowed = is_allowed();  // at load, as in kernels.cpp

}  // namespace

void note_ordinary_use(const void* array, size_t nbytes) {
  if (!g_allowed || nbytes < kLeast) return;
  uintptr_t first = reinterpret_cast<uintptr_t>(array), last = first + nbytes;
  int asked = 0;
  for (uintptr_t at = first / kHugePage * kHugePage; at < last && asked < kAtOnce; at += kHugePage) {
    if (!count_use(at)) continue;
    ask_for_huge_page(at);
    ++asked;
  }
}

}  // namespace coll
