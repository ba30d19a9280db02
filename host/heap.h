// Memory that a process shares with its peers: what ncclMemAlloc returns.
//
// Each process has one file without a name (memfd), made at its first communicator and passed to
// the peers' processes in the bootstrap. Memory is an extent of that file, so a peer that knows an
// extent's place can map it at any time: nothing more is sent, one descriptor a process is enough,
// and all of it is freed when the last process that has it ends.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "error.h"

namespace coll {

// A place in a process's file. An extent is what was allocated as one; nbytes 0: not shared memory.
struct Extent {
  uint64_t offset = 0, nbytes = 0;
};
struct SharedPlace {
  Extent extent;
  uint64_t offset = 0;  // of the place itself, in the file
};

ncclResult_t memory_allocate(void** ptr, size_t nbytes);
ncclResult_t memory_free(void* ptr);

// Where memory of this process is in its file; extent.nbytes 0 where not all of it is one shared
// extent's.
SharedPlace shared_place(const void* address, size_t nbytes);

// The address in this process of a place in its own file, for ranks that are threads of one
// process.
char* own_address(const SharedPlace& place);

// This process's file, made at first use: its number, which no other has, and its descriptor. 0:
// the system gave none.
uint64_t heap_id(int* fd);

// A peer process's file. Takes the descriptor. Peers of several communicators share one.
class PeerHeap {
 public:
  static PeerHeap* open(uint64_t id, int fd);
  void close();
  // The address of a place, mapped at first use; NULL with the reason in errno.
  char* address(const SharedPlace& place);

 private:
  struct Mapping {
    Extent extent;
    char* base;
  };
  PeerHeap(uint64_t id, int fd) : id_(id), fd_(fd) {}
  uint64_t id_;
  int fd_, users_ = 1;
  std::vector<Mapping> mappings_;
  size_t newest_ = 0;
};

size_t page_size();

// Bytes of extents, and of communicators' segments, that this process has asked the system for.
uint64_t memory_in_use();
void count_memory(int64_t nbytes);

}  // namespace coll
