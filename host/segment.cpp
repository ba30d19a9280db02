#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>

#include "heap.h"
#include "kernels.h"
#include "memory.h"
#include "system.h"

namespace coll {
namespace {

constexpr uint64_t kMagic = 0x33305453484c4f43ull;  // "COLHST03": changes with the layout
// Leaked on purpose: destructors of static objects would run while other threads still use them.
auto& segments() {
  static auto* table = new std::map<uint64_t, Segment*>;
  return *table;
}

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Whether a segment's parts lie in its file, one behind the other.
bool fits(const Header& h, size_t nbytes) {
  uint64_t n = static_cast<uint64_t>(h.nranks), ranks_offset = round_up(sizeof(Header), 4096);
  constexpr uint64_t kMost = 1ull << 40;  // of any length: no sum and no product of them overflows
  if (h.total_bytes != nbytes || nbytes > kMost || std::max(h.chunk_bytes, h.channel_stride) > kMost / COLL_HOST_MAX_RANKS)
    return false;
  return h.slots_offset % kLine == 0 && h.channels_offset % kLine == 0 && h.chunk_bytes % kLine == 0 && h.chunk_bytes > 0 &&
         h.channel_stride % kLine == 0 && h.slots_offset >= ranks_offset + n * sizeof(RankBlock) && h.slots_offset <= nbytes &&
         h.channels_offset >= h.slots_offset + n * kSlots * h.chunk_bytes && h.channels_offset <= nbytes &&
         h.channel_chunk_bytes >= kLine && h.channel_chunk_bytes <= h.channel_stride &&
         kChannelHeader + kChannelSlots * h.channel_chunk_bytes <= h.channel_stride &&
         nbytes - h.channels_offset == n * n * h.channel_stride;
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

// ---- Segments

Segment::Segment(char* base, size_t nbytes, int fd)
    : base_(base), nbytes_(nbytes), fd_(fd),
      ranks_(reinterpret_cast<RankBlock*>(base + round_up(sizeof(Header), 4096))),
      slots_(base + header()->slots_offset) {
  count_memory(static_cast<int64_t>(header()->channels_offset));
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

void Segment::place_slots(int rank) {
  if (access("/sys/devices/system/node/node1", F_OK) != 0) return;
#if defined(SYS_mbind) && defined(SYS_getcpu)
  unsigned cpu = 0, node = 0;
  if (syscall(SYS_getcpu, &cpu, &node, nullptr) != 0 || node >= 1024) return;
  unsigned long nodes[1024 / (8 * sizeof(long))] = {};
  nodes[node / (8 * sizeof(long))] = 1ul << node % (8 * sizeof(long));
  uintptr_t first = reinterpret_cast<uintptr_t>(slot(rank, 0)) / 4096 * 4096;
  uintptr_t last = reinterpret_cast<uintptr_t>(slot(rank, 0)) + kSlots * header()->chunk_bytes;
  constexpr int kPreferred = 1, kMove = 2;  // MPOL_PREFERRED, MPOL_MF_MOVE
  // A wish: where the system refuses it, the slots are as good as before, only farther away.
  syscall(SYS_mbind, first, last - first, kPreferred, nodes, 1025ul, kMove);
#else
  (void)rank;
#endif
}

Segment* Segment::create(int nranks, int* fd, Error* error) {
  size_t n = static_cast<size_t>(nranks);
  Header plan{};
  plan.magic = kMagic;
  plan.segment_id = random_u64();
  plan.nranks = nranks;
  size_t chunk = std::min<size_t>(std::max<size_t>(second_level_cache() / 2, 64 << 10), 1 << 20);
  if (!bytes_from_environment("COLLECTIVES_HOST_CHUNK", 64, 1 << 30, &chunk, error)) return nullptr;
  plan.chunk_bytes = round_up(chunk, kLine * n);  // at least one line for each rank's slice of a slot
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
  if (fd < 0) {
    *error = make_error(collHostErrorSystem,
                        "rank 0's shared memory could not be received: this process has no file descriptor left");
    return nullptr;
  }
  off_t end = lseek(fd, 0, SEEK_END);  // not fstat(), whose symbol in glibc is of 2.33
  if (end < static_cast<off_t>(sizeof(Header))) {
    *error = make_error(collHostErrorSystem, "what rank 0 sent is not a segment");
    close(fd);
    return nullptr;
  }
  size_t nbytes = static_cast<size_t>(end);
  char* base = static_cast<char*>(map_shared_memory(fd, nbytes, error));
  if (!base) {
    close(fd);
    return nullptr;
  }
  Header* header = reinterpret_cast<Header*>(base);
  if (header->magic != kMagic || header->nranks != nranks || !fits(*header, nbytes)) {
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
  count_memory(-static_cast<int64_t>(header()->channels_offset));
  munmap(base_, nbytes_);
  close(fd_);
  delete this;
}

}  // namespace coll
