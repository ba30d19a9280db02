// The unique id that the ranks of a new communicator share: the name of a socket, and a secret.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "coll/host_abi.h"

namespace coll {

struct Id {
  char magic[8];
  uint64_t name[2];
  uint64_t secret[4];
  char rest[NCCL_UNIQUE_ID_BYTES - 56];
};
static_assert(sizeof(Id) == NCCL_UNIQUE_ID_BYTES, "an id of the host engine is an ncclUniqueId");
void make_id(Id* id);
Id derive_id(const uint64_t secret[4], const void* label, size_t nbytes);

}  // namespace coll
