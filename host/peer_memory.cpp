#include "peer_memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "comm.h"
#include "segment.h"
#include "system.h"

namespace coll {
namespace {

uint64_t g_probe;

bool is_wanted() {
  const char* text = getenv("COLLECTIVES_CMA");
  return !text || strcmp(text, "0") != 0;
}

// Returns 0, or errno.
int read_all(int pid, void* to, uint64_t address, size_t nbytes) {
  char* at = static_cast<char*>(to);
  while (nbytes) {
    struct iovec here = {at, nbytes}, there = {reinterpret_cast<void*>(address), nbytes};
    ssize_t some = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (some < 0) return errno;
    if (some == 0) return EFAULT;
    at += some;
    address += static_cast<uint64_t>(some);
    nbytes -= static_cast<size_t>(some);
  }
  return 0;
}

bool try_peers(const ncclComm& c) {
  if (!is_wanted()) return false;
  for (int r = 0; r < c.size; ++r) {
    const RankBlock* peer = c.segment->rank(r);
    int pid = c.pids[static_cast<size_t>(r)];
    uint64_t found = 0;
    if (pid == 0 || !peer->probe_address) return false;
    if (pid != getpid() && (read_all(pid, &found, peer->probe_address, sizeof found) || found != peer->probe)) return false;
  }
  return true;
}

}  // namespace

void publish_probe(RankBlock* block) {
  static const bool made = (random_bytes(&g_probe, sizeof g_probe), true);
  (void)made;
  block->probe = g_probe;
  block->probe_address = reinterpret_cast<uint64_t>(&g_probe);
}

bool can_read_peers(ncclComm& c) {
  if (c.reads_peers < 0) c.reads_peers = try_peers(c);
  return c.reads_peers > 0;
}

bool is_readable(const void* memory, size_t nbytes) {
  char found[2], *first = static_cast<char*>(const_cast<void*>(memory));
  struct iovec here = {found, 2}, there[2] = {{first, 1}, {first + nbytes - 1, 1}};
  return process_vm_readv(getpid(), &here, 1, there, 2, 0) == 2;
}

Error read_peer(const ncclComm& c, int rank, void* to, uint64_t address, size_t nbytes) {
  int pid = c.pids[static_cast<size_t>(rank)];
  int reason = 0;
  if (pid == getpid()) {
    memcpy(to, reinterpret_cast<const void*>(address), nbytes);
  } else {
    reason = read_all(pid, to, address, nbytes);
  }
  if (!reason) return {};
  Error error = make_error(collHostErrorMemory, format("rank %d's memory could not be read: %s", rank, strerror(reason)));
  error.peers = {rank};
  error.bytes = nbytes;
  return error;
}

}  // namespace coll
