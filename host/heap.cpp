#include "heap.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "huge_pages.h"
#include "memory.h"
#include "system.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace coll {
namespace {

// A peer's file is mapped in windows of so many bytes: whatever is allocated and freed there, there
// are few of them.
constexpr size_t kWindow = 64 << 20;

std::atomic<uint64_t> g_bytes{0};

struct Heap {
  int fd = -1;
  uint64_t id = 0;
  uint64_t end = 0;  // of the file
  std::map<uintptr_t, Extent> allocations;  // by address
  std::map<uint64_t, uint64_t> free;        // extents that were given back: offset -> bytes
};

// Leaked on purpose: destructors of static objects would run while other threads still use them.
// Under tables_lock().
Heap& heap() {
  static auto* it = new Heap;
  return *it;
}
auto& peers() {
  static auto* table = new std::map<uint64_t, PeerHeap*>;
  return *table;
}
std::atomic<bool> g_used{false};  // something was ever allocated

// Get pages as if they were written to. Returns 0, or errno; EINVAL before Linux 5.14.
int populate(void* address, size_t nbytes) {
  int code;
  do code = madvise(address, nbytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  while (code == EINTR || code == EAGAIN);
  return code;
}

// In a forked child: the parent's extents become private copies, made as they are written to, so
// that nothing that the child does is seen by the parent or its peers.
void leave_parents_heap() {
  Heap& h = heap();
  for (const auto& [address, extent] : h.allocations) {
    g_bytes -= extent.nbytes;
    mmap(reinterpret_cast<void*>(address), extent.nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, h.fd,
         static_cast<off_t>(extent.offset));
  }
  h.allocations.clear();
  h.free.clear();
  h.end = 0;
  h.id = 0;
  if (h.fd >= 0) close(h.fd);
  h.fd = -1;
}

// Registered before any thread can fork: before glibc 2.36 that waits while a fork does, whose
// handlers wait for tables_lock().
[[maybe_unused]] const int g_fork_handler = pthread_atfork(nullptr, nullptr, leave_parents_heap);

// Under tables_lock().
bool open_heap(Error* error) {
  Heap& h = heap();
  if (h.fd >= 0) return true;
  int fd = make_shared_memory("ncclMemAlloc", 0, 0, error);
  if (fd < 0) return false;
  h.fd = fd;
  do h.id = random_u64();
  while (!h.id);
  return true;
}

// Take the first free extent that is large enough, or the end of the file. Aligned to huge pages
// where it is as large as one.
bool take_extent(size_t nbytes, Extent* extent, Error* error) {
  Heap& h = heap();
  size_t align = nbytes >= kHugePage ? kHugePage : page_size();
  auto aligned = [align](uint64_t offset) { return (offset + align - 1) / align * align; };
  for (auto it = h.free.begin(); it != h.free.end(); ++it) {
    uint64_t first = it->first, last = first + it->second, from = aligned(first);
    if (from >= last || last - from < nbytes) continue;
    h.free.erase(it);
    if (from > first) h.free[first] = from - first;
    if (from + nbytes < last) h.free[from + nbytes] = last - from - nbytes;
    *extent = {from, nbytes};
    return true;
  }
  uint64_t from = aligned(h.end), end = from + nbytes;
  if (!grow_shared_memory(h.fd, "ncclMemAlloc", end, error)) return false;
  if (from > h.end) h.free[h.end] = from - h.end;
  h.end = end;
  *extent = {from, nbytes};
  return true;
}

void give_back(Extent extent) {
  Heap& h = heap();
  fallocate(h.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(extent.offset), static_cast<off_t>(extent.nbytes));
  auto next = h.free.lower_bound(extent.offset);
  if (next != h.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == extent.offset) {
      extent = {before->first, before->second + extent.nbytes};
      h.free.erase(before);
    }
  }
  if (next != h.free.end() && extent.offset + extent.nbytes == next->first) {
    extent.nbytes += next->second;
    h.free.erase(next);
  }
  h.free[extent.offset] = extent.nbytes;
}

// Get the pages of an extent that is mapped at `address`: running out of memory is an error here,
// and no signal later.
int get_pages(const Extent& extent, void* address) {
  if (extent.nbytes >= kHugePage) madvise(address, extent.nbytes, MADV_HUGEPAGE);  // where the system allows it
  int code = populate(address, extent.nbytes);
  if (code != EINVAL) return code == EFAULT ? ENOMEM : code;
  do code = posix_fallocate(heap().fd, static_cast<off_t>(extent.offset), static_cast<off_t>(extent.nbytes));  // before Linux 5.14
  while (code == EINTR);
  return code;
}

// Map an extent of a file where the system likes, at a multiple of huge pages if it has one.
char* map_extent(int fd, const Extent& extent) {
  size_t slack = extent.nbytes >= kHugePage ? kHugePage : 0;
  void* space = mmap(nullptr, extent.nbytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(space);
  char* address = slack ? reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(first) + slack - 1) / slack * slack) : first;
  char* last = first + extent.nbytes + slack;
  if (mmap(address, extent.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd,
           static_cast<off_t>(extent.offset)) == MAP_FAILED) {
    int code = errno;
    munmap(first, extent.nbytes + slack);
    errno = code;
    return nullptr;
  }
  if (address > first) munmap(first, static_cast<size_t>(address - first));
  if (last > address + extent.nbytes) munmap(address + extent.nbytes, static_cast<size_t>(last - address) - extent.nbytes);
  return address;
}

// Map an extent of this process's own file, with all its pages. Where that fails, the extent is
// given back and *code says why.
char* map_own(const Extent& extent, int* code) {
  char* address = map_extent(heap().fd, extent);
  *code = address ? get_pages(extent, address) : errno;
  if (!*code) return address;
  if (address) munmap(address, extent.nbytes);
  give_back(extent);
  return nullptr;
}

size_t whole_pages(size_t nbytes) { return (nbytes + page_size() - 1) / page_size() * page_size(); }

}  // namespace

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

ncclResult_t memory_allocate(void** ptr, size_t nbytes) {
  if (nbytes > static_cast<size_t>(INT64_MAX) / 2)
    return raise(no_memory("ncclMemAlloc", nbytes, "more than an address space holds"));
  size_t rounded = std::max(whole_pages(nbytes), page_size());
  Error error;
  if (!enough_memory("ncclMemAlloc", rounded, &error)) return raise(error);
  std::lock_guard<std::mutex> hold(tables_lock());
  Extent extent;
  if (!open_heap(&error) || !take_extent(rounded, &extent, &error)) return raise(error);
  int code;
  char* address = map_own(extent, &code);
  if (!address) return raise(no_memory("ncclMemAlloc", nbytes, strerror(code)));
  heap().allocations[reinterpret_cast<uintptr_t>(address)] = extent;
  g_used.store(true, std::memory_order_release);
  g_bytes += rounded;
  *ptr = address;
  return ncclSuccess;
}

ncclResult_t memory_free(void* ptr) {
  if (!ptr) return ncclSuccess;
  std::lock_guard<std::mutex> hold(tables_lock());
  auto found = heap().allocations.find(reinterpret_cast<uintptr_t>(ptr));
  if (found == heap().allocations.end())
    return raise(collHostErrorArgument, "ncclMemFree", format("%p was not given by ncclMemAlloc", ptr));
  Extent extent = found->second;
  heap().allocations.erase(found);
  munmap(ptr, extent.nbytes);
  give_back(extent);
  g_bytes -= extent.nbytes;
  return ncclSuccess;
}

SharedPlace shared_place(const void* address, size_t nbytes) {
  if (!g_used.load(std::memory_order_acquire)) return {};
  std::lock_guard<std::mutex> hold(tables_lock());
  auto& allocations = heap().allocations;
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  auto above = allocations.upper_bound(at);
  if (above == allocations.begin()) return {};
  auto [base, extent] = *std::prev(above);
  if (at + nbytes > base + extent.nbytes) return {};
  return {extent, extent.offset + (at - base)};
}

char* own_address(const SharedPlace& place) {
  std::lock_guard<std::mutex> hold(tables_lock());
  for (const auto& [base, extent] : heap().allocations)
    if (extent.offset == place.extent.offset) return reinterpret_cast<char*>(base) + (place.offset - place.extent.offset);
  errno = EFAULT;
  return nullptr;
}

uint64_t heap_id(int* fd) {
  std::lock_guard<std::mutex> hold(tables_lock());
  Error error;
  bool there = open_heap(&error);
  *fd = heap().fd;
  return there ? heap().id : 0;
}

PeerHeap* PeerHeap::open(uint64_t id, int fd) {
  std::lock_guard<std::mutex> hold(tables_lock());
  auto found = peers().find(id);
  if (found != peers().end()) {
    ::close(fd);
    ++found->second->users_;
    return found->second;
  }
  return peers()[id] = new PeerHeap(id, fd);
}

void PeerHeap::close() {
  {
    std::lock_guard<std::mutex> hold(tables_lock());
    if (--users_ > 0) return;
    peers().erase(id_);
  }
  for (const Mapping& mapping : mappings_) munmap(mapping.base, mapping.extent.nbytes);
  ::close(fd_);
  delete this;
}

char* PeerHeap::address(const SharedPlace& place) {
  std::lock_guard<std::mutex> hold(tables_lock());
  // A mapping shows a part of the file, whatever is allocated there: one that covers the extent is
  // as good as a new one.
  auto covers = [&](const Mapping& m) {
    return place.extent.offset >= m.extent.offset &&
           place.extent.offset + place.extent.nbytes <= m.extent.offset + m.extent.nbytes;
  };
  if (newest_ >= mappings_.size() || !covers(mappings_[newest_])) {
    newest_ = static_cast<size_t>(std::find_if(mappings_.begin(), mappings_.end(), covers) - mappings_.begin());
    if (newest_ == mappings_.size()) {
      uint64_t first = place.extent.offset / kWindow * kWindow;
      uint64_t last = (place.extent.offset + place.extent.nbytes + kWindow - 1) / kWindow * kWindow;
      Extent window = {first, last - first};
      char* base = map_extent(fd_, window);
      if (!base) return nullptr;
      madvise(base, window.nbytes, MADV_HUGEPAGE);
      mappings_.push_back({window, base});
    }
  }
  const Mapping& m = mappings_[newest_];
  return m.base + (place.offset - m.extent.offset);
}

uint64_t memory_in_use() { return g_bytes; }

void count_memory(int64_t nbytes) { g_bytes += static_cast<uint64_t>(nbytes); }

}  // namespace coll
