#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>

#include "system.h"

namespace coll {
namespace {

constexpr uint64_t kMagic = 0x31305453484c4f43ull;  // "COLHST01": changes with the layout
std::atomic<uint64_t> g_bytes{0};

// Leaked on purpose: destructors of static objects would run while other threads still use them.
auto& allocations() {
  static auto* table = new std::map<void*, size_t>;
  return *table;
}
auto& segments() {
  static auto* table = new std::map<uint64_t, Segment*>;
  return *table;
}

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Bytes that count as used by the control group and that the kernel gives back when it needs them: file caches.
uint64_t reclaimable_of_group() {
  FILE* f = fopen("/sys/fs/cgroup/memory.stat", "re");
  if (!f) return 0;
  char name[64];
  unsigned long long value, sum = 0;
  while (fscanf(f, "%63s %llu", name, &value) == 2) {
    if (!strcmp(name, "active_file") || !strcmp(name, "inactive_file") || !strcmp(name, "slab_reclaimable")) sum += value;
  }
  fclose(f);
  return sum;
}

// Bytes that can still be had: the kernel would kill a process rather than refuse pages of shared memory.
uint64_t available_memory() {
  uint64_t available = UINT64_MAX;
  if (FILE* f = fopen("/proc/meminfo", "re")) {
    char line[128];
    unsigned long long kib, sum = 0;
    bool found = false;
    while (fgets(line, sizeof line, f)) {
      if (sscanf(line, "MemAvailable: %llu", &kib) == 1) sum += kib, found = true;
      if (sscanf(line, "SwapFree: %llu", &kib) == 1) sum += kib;
    }
    fclose(f);
    if (found) available = sum * 1024;
  }
  auto number_in = [](const char* path, uint64_t* value) {
    FILE* f = fopen(path, "re");
    if (!f) return false;
    unsigned long long v;
    bool ok = fscanf(f, "%llu", &v) == 1;  // "max" is no number: no limit
    fclose(f);
    *value = v;
    return ok;
  };
  uint64_t limit, used;
  if (number_in("/sys/fs/cgroup/memory.max", &limit) && number_in("/sys/fs/cgroup/memory.current", &used)) {
    uint64_t in_use = used - std::min(used, reclaimable_of_group());
    available = std::min(available, limit > in_use ? limit - in_use : 0);
  }
  return available;
}

Error no_memory(const char* label, size_t nbytes, const std::string& why) {
  Error error = make_error(collHostErrorMemory, format("%s: could not get %s of shared memory: %s", label,
                                                       byte_text(nbytes).c_str(), why.c_str()));
  error.bytes = nbytes;
  return error;
}

bool bytes_from_environment(const char* name, size_t least, size_t most, size_t* value, Error* error) {
  const char* text = getenv(name);
  if (!text || !*text) return true;
  char* end;
  errno = 0;
  unsigned long long number = strtoull(text, &end, 10);
  if (*end || errno || *text == '-' || number < least || number > most) {
    *error = make_error(collHostErrorArgument, format("%s=%s: must be a number of bytes from %zu to %zu", name, text, least, most));
    return false;
  }
  *value = number;
  return true;
}

}  // namespace

int make_shared_memory(const char* label, size_t nbytes, size_t reserve, Error* error) {
  uint64_t available = available_memory();
  if (reserve > available) {
    *error = no_memory(label, nbytes, "only " + byte_text(available) + " are free");
    return -1;
  }
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && nbytes > limit.rlim_cur) {
    *error = no_memory(label, nbytes, "the limit of a file's size (ulimit -f) is " + byte_text(limit.rlim_cur));
    return -1;
  }
  int fd = memfd_create("collectives", MFD_CLOEXEC);
  if (fd < 0) {
    *error = no_memory(label, nbytes, std::string("memfd_create: ") + strerror(errno));
    return -1;
  }
  int code = 0;
  if (ftruncate(fd, static_cast<off_t>(nbytes)) != 0) code = errno;
  if (!code && reserve) {
    do code = posix_fallocate(fd, 0, static_cast<off_t>(reserve));
    while (code == EINTR);
  }
  if (code) {
    *error = no_memory(label, nbytes, strerror(code));
    close(fd);
    return -1;
  }
  return fd;
}

void* map_shared_memory(int fd, size_t nbytes, Error* error) {
  void* ptr = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (ptr == MAP_FAILED) {
    *error = no_memory("mmap", nbytes, strerror(errno));
    return nullptr;
  }
  return ptr;
}

ncclResult_t memory_allocate(void** ptr, size_t nbytes) {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (nbytes > SIZE_MAX - page || nbytes > static_cast<size_t>(INT64_MAX) - page)
    return raise(no_memory("ncclMemAlloc", nbytes, "more than an address space holds"));
  size_t rounded = std::max(round_up(nbytes, page), page);
  Error error;
  int fd = make_shared_memory("ncclMemAlloc", rounded, rounded, &error);
  if (fd < 0) return raise(error);
  void* address = map_shared_memory(fd, rounded, &error);
  close(fd);
  if (!address) return raise(error);
  std::lock_guard<std::mutex> hold(tables_lock());
  allocations()[address] = rounded;
  g_bytes += rounded;
  *ptr = address;
  return ncclSuccess;
}

ncclResult_t memory_free(void* ptr) {
  if (!ptr) return ncclSuccess;
  size_t nbytes;
  {
    std::lock_guard<std::mutex> hold(tables_lock());
    auto found = allocations().find(ptr);
    if (found == allocations().end())
      return raise(collHostErrorArgument, "ncclMemFree", format("%p was not given by ncclMemAlloc", ptr));
    nbytes = found->second;
    allocations().erase(found);
  }
  g_bytes -= nbytes;
  munmap(ptr, nbytes);
  return ncclSuccess;
}

uint64_t memory_in_use() { return g_bytes; }

// ---- Segments

Segment::Segment(char* base, size_t nbytes, int fd)
    : base_(base), nbytes_(nbytes), fd_(fd),
      ranks_(reinterpret_cast<RankBlock*>(base + round_up(sizeof(Header), 4096))),
      slots_(base + header()->slots_offset) {
  g_bytes += header()->channels_offset;
}

Channel* Segment::channel(int source, int destination) const {
  size_t index = static_cast<size_t>(source) * header()->nranks + destination;
  return reinterpret_cast<Channel*>(base_ + header()->channels_offset + index * header()->channel_stride);
}

bool Segment::claim_channel(int source, int destination, Error* error) {
  size_t offset = reinterpret_cast<char*>(channel(source, destination)) - base_;
  int code;
  do code = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(header()->channel_stride));
  while (code == EINTR);
  if (!code) return true;
  *error = no_memory("a channel for send/recv", header()->channel_stride, strerror(code));
  return false;
}

Segment* Segment::create(int nranks, int* fd, Error* error) {
  size_t n = static_cast<size_t>(nranks);
  Header plan{};
  plan.magic = kMagic;
  plan.segment_id = random_u64();
  plan.nranks = nranks;
  size_t chunk = 256 << 10;
  if (!bytes_from_environment("COLLECTIVES_HOST_CHUNK", 64, 1 << 30, &chunk, error)) return nullptr;
  plan.chunk_bytes = round_up(chunk, kLine * n);  // at least one line for each rank's piece of a slot
  plan.channel_chunk_bytes = std::min<size_t>(n <= 4 ? 256 << 10 : n <= 16 ? 32 << 10 : 8 << 10,
                                              std::max<size_t>(round_up(plan.chunk_bytes, kLine), kLine));
  plan.channel_stride = round_up(kChannelHeader + kChannelSlots * plan.channel_chunk_bytes, 4096);
  size_t ranks_offset = round_up(sizeof(Header), 4096);
  plan.slots_offset = round_up(ranks_offset + n * sizeof(RankBlock), 4096);
  plan.channels_offset = round_up(plan.slots_offset + n * kSlots * plan.chunk_bytes, 4096);
  plan.total_bytes = plan.channels_offset + n * n * plan.channel_stride;
  *fd = make_shared_memory("a communicator's segment", plan.total_bytes, plan.channels_offset, error);
  if (*fd < 0) return nullptr;
  char* base = static_cast<char*>(map_shared_memory(*fd, plan.total_bytes, error));
  int own = base ? fcntl(*fd, F_DUPFD_CLOEXEC, 0) : -1;
  if (own < 0) {
    if (base) *error = make_error(collHostErrorSystem, std::string("no file descriptor is free: ") + strerror(errno));
    if (base) munmap(base, plan.total_bytes);
    close(*fd);
    return nullptr;
  }
  // Fresh pages are zero, which is the right beginning for every counter.
  Header* header = new (base) Header{};
  header->magic = plan.magic;
  header->segment_id = plan.segment_id;
  header->total_bytes = plan.total_bytes;
  header->slots_offset = plan.slots_offset;
  header->channels_offset = plan.channels_offset;
  header->chunk_bytes = plan.chunk_bytes;
  header->channel_chunk_bytes = plan.channel_chunk_bytes;
  header->channel_stride = plan.channel_stride;
  header->nranks = nranks;
  Segment* segment = new Segment(base, plan.total_bytes, own);
  std::lock_guard<std::mutex> hold(tables_lock());
  segments()[plan.segment_id] = segment;
  return segment;
}

Segment* Segment::attach(int fd, uint64_t segment_id, int nranks, Error* error) {
  std::lock_guard<std::mutex> hold(tables_lock());
  auto found = segments().find(segment_id);
  if (found != segments().end()) {
    close(fd);
    found->second->users_++;
    return found->second;
  }
  struct stat info;
  if (fstat(fd, &info) != 0 || info.st_size < static_cast<off_t>(sizeof(Header))) {
    *error = make_error(collHostErrorSystem, "what rank 0 sent is not a segment");
    close(fd);
    return nullptr;
  }
  size_t nbytes = static_cast<size_t>(info.st_size);
  char* base = static_cast<char*>(map_shared_memory(fd, nbytes, error));
  if (!base) {
    close(fd);
    return nullptr;
  }
  Header* header = reinterpret_cast<Header*>(base);
  if (header->magic != kMagic || header->total_bytes != nbytes || header->nranks != nranks) {
    *error = make_error(collHostErrorSystem, "rank 0 runs another version of the host engine");
    munmap(base, nbytes);
    close(fd);
    return nullptr;
  }
  Segment* segment = new Segment(base, nbytes, fd);
  segments()[segment_id] = segment;
  return segment;
}

void Segment::release() {
  {
    std::lock_guard<std::mutex> hold(tables_lock());
    if (--users_ > 0) return;
    segments().erase(header()->segment_id);
  }
  g_bytes -= header()->channels_offset;
  munmap(base_, nbytes_);
  close(fd_);
  delete this;
}

}  // namespace coll
