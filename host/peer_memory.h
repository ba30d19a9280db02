// Reading and writing a peer process's memory by the kernel (cross-memory attach, process_vm_readv):
// one copy, where staging takes two.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "error.h"

struct ncclComm;

namespace coll {

struct RankBlock;

// Write into this rank's block what a peer tries to read. Before the ranks go.
void publish_probe(RankBlock* block);
// Whether this rank may read and write the memory of all others: the kernel, a container's filter or
// COLLECTIVES_CMA=0 may forbid it. Tried at the first call that asks.
bool can_read_peers(ncclComm& comm);
// Whether the kernel reads this process's memory for others: it doesn't where a driver has mapped it
// (CUDA's page-locked memory). Tries the first and the last byte.
bool is_readable(const void* memory, size_t nbytes);
// Read or write a peer's memory at an address of its own. Returns the reason where it can't.
Error read_peer(const ncclComm& comm, int rank, void* to, uint64_t address, size_t nbytes);
Error write_peer(const ncclComm& comm, int rank, uint64_t address, const void* from, size_t nbytes);

}  // namespace coll
