#include "malloc_mapping.h"

#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

namespace coll {
namespace {

// Libraries that give a device the physical addresses of a process's memory.
constexpr const char* kPinning[] = {"/libcuda.so", "/libibverbs.so", "/libucp.so", "/libfabric.so", "/libhsa-runtime64.so", "/libze_loader.so"};

constexpr const char* kSharedFile = "/memfd:collectives";

bool pins_pages(const char* line) {
  for (const char* name : kPinning)
    if (strstr(line, name)) return true;
  return false;
}

// Call `look` with every line of the process's memory map until it returns false. false: the map
// could not be read.
template <class F>
bool read_map(F&& look) {
  FILE* f = fopen("/proc/self/maps", "re");
  if (!f) return false;
  char line[512];
  bool begins = true, on = true;  // a line longer than the buffer comes in pieces
  while (on && fgets(line, sizeof line, f)) {
    on = look(line, begins);
    begins = strchr(line, '\n') != nullptr;
  }
  fclose(f);
  return true;
}

}  // namespace

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

#if defined(__has_attribute) && __has_attribute(no_sanitize)
__attribute__((no_sanitize("address")))  // its malloc lets nobody read what is before an allocation
#endif
OwnMapping mapping_of(void* address, size_t nbytes) {
#if defined(__GLIBC__) && __SIZEOF_POINTER__ == 8
  // glibc puts the size of a chunk, with three flags in its low bits, before it, and before that,
  // for a chunk that is a mapping, how far the mapping's begin is. Both must make whole pages that
  // hold exactly what the caller says. A chunk never begins at a page's first byte, so the words
  // before it can be read.
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  if (at % page_size() < 2 * sizeof(size_t) || at % 16) return {};
  const size_t* words = static_cast<const size_t*>(address) - 2;
  constexpr size_t kIsMapping = 2;
  if (words[1] - chunk_bytes(words[1]) != kIsMapping) return {};
  size_t before = words[0], size = chunk_bytes(words[1]);
  uintptr_t chunk = at - 2 * sizeof(size_t), base = chunk - before;
  if (before >= at || base % page_size() || (before + size) % page_size()) return {};
  uintptr_t end = base + before + size;
  if (at + nbytes > end || end - (at + nbytes) >= page_size() + 64) return {};
  return {reinterpret_cast<char*>(base), before + size, before};
#else
  (void)address, (void)nbytes;
  return {};
#endif
}

bool is_replaceable(const OwnMapping& mapping) {
  uintptr_t next = reinterpret_cast<uintptr_t>(mapping.base), end = next + mapping.nbytes;
  bool plain = true;
  bool known = read_map([&](const char* line, bool begins) {
    if (pins_pages(line)) return plain = false;
    unsigned long first, last, inode;
    char access[5];
    int name = 0;
    if (!begins || sscanf(line, "%lx-%lx %4s %*s %*s %lu %n", &first, &last, access, &inode, &name) != 4) return true;
    if (last <= next || first >= end) return true;
    bool anonymous = inode == 0 && (!line[name] || line[name] == '\n' || strstr(line + name, "[anon: glibc"));
    bool was_shared = strstr(line + name, kSharedFile);  // all pages are private copies
    if (first > next || strcmp(access, "rw-p") || !(anonymous || was_shared)) return plain = false;
    next = last;
    return true;
  });
  return known && plain && next >= end;
}

bool pages_may_be_pinned() {
  bool may = false;
  bool known = read_map([&](const char* line, bool) { return !(may = pins_pages(line)); });
  return may || !known;
}

bool read_own(const void* address, void* to, size_t nbytes) {
  struct iovec here = {to, nbytes}, there = {const_cast<void*>(address), nbytes};
  return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == static_cast<ssize_t>(nbytes);
}

}  // namespace coll
