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

using Transfer = ssize_t (*)(pid_t, const struct iovec*, unsigned long, const struct iovec*, unsigned long, unsigned long);

// Copy between memory here and a process's, by process_vm_readv or _writev. Returns 0, or errno.
int copy_all(Transfer transfer, int pid, void* here, uint64_t there, size_t nbytes) {
  char* at = static_cast<char*>(here);
  while (nbytes) {
    struct iovec local = {at, nbytes}, remote = {reinterpret_cast<void*>(there), nbytes};
    ssize_t some = transfer(pid, &local, 1, &remote, 1, 0);
    if (some < 0) return errno;
    if (some == 0) return EFAULT;
    at += some;
    there += static_cast<uint64_t>(some);
    nbytes -= static_cast<size_t>(some);
  }
  return 0;
}

int read_all(int pid, void* to, uint64_t address, size_t nbytes) { return copy_all(process_vm_readv, pid, to, address, nbytes); }

bool try_peers(const ncclComm& c) {
  if (!is_wanted()) return false;
  for (int r = 0; r < c.size; ++r) {
    const RankBlock* peer = c.segment->rank(r);
    int pid = c.pids[static_cast<size_t>(r)];
    uint64_t found = 0;
    if (pid == 0 || !peer->probe_address) return false;
    if (pid == getpid()) continue;
    if (read_all(pid, &found, peer->probe_address, sizeof found) || found != peer->probe) return false;
    // A filter may allow one and forbid the other. It writes what is there.
    if (copy_all(process_vm_writev, pid, &found, peer->probe_address, sizeof found)) return false;
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
  // Arrays come again, and asking takes 1 us: an answer holds for some calls.
  constexpr int kHolds = 64;
  static thread_local struct { const void* memory; size_t nbytes; int calls; } found_so[16];
  auto& known = found_so[(reinterpret_cast<uintptr_t>(memory) >> 6 ^ reinterpret_cast<uintptr_t>(memory) >> 12) % 16];
  if (known.memory == memory && known.nbytes == nbytes && known.calls-- > 0) return true;
  char found[2], *first = static_cast<char*>(const_cast<void*>(memory));
  struct iovec here = {found, 2}, there[2] = {{first, 1}, {first + nbytes - 1, 1}};
  if (process_vm_readv(getpid(), &here, 1, there, 2, 0) != 2) return false;
  known = {memory, nbytes, kHolds};
  return true;
}

namespace {

Error access_error(int rank, const char* what, size_t nbytes, int reason) {
  if (!reason) return {};
  Error error = make_error(collHostErrorMemory, format("rank %d's memory could not be %s: %s", rank, what, strerror(reason)));
  error.peers = {rank};
  error.bytes = nbytes;
  return error;
}

}  // namespace

Error read_peer(const ncclComm& c, int rank, void* to, uint64_t address, size_t nbytes) {
  int pid = c.pids[static_cast<size_t>(rank)], reason = 0;
  if (pid == c.pids[static_cast<size_t>(c.rank)]) memcpy(to, reinterpret_cast<const void*>(address), nbytes);
  else reason = read_all(pid, to, address, nbytes);
  return access_error(rank, "read", nbytes, reason);
}

Error write_peer(const ncclComm& c, int rank, uint64_t address, const void* from, size_t nbytes) {
  size_t at = static_cast<size_t>(rank);
  int pid = c.pids[at], reason = 0;
  if (pid == c.pids[static_cast<size_t>(c.rank)]) memcpy(reinterpret_cast<void*>(address), from, nbytes);
  else if (process_ended(pid, c.pidfds[at])) reason = ESRCH;  // another process may get the number
  else reason = copy_all(process_vm_writev, pid, const_cast<void*>(from), address, nbytes);
  return access_error(rank, "written", nbytes, reason);
}

}  // namespace coll
