// Memory of the system that processes can share: files without a name (memfd), of which nothing is
// left when all who have them open or mapped have ended.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

#include "error.h"

namespace coll {

Error no_memory(const char* label, size_t nbytes, const std::string& why);
// The bytes that can still be had: those of collHostFreeMemory.
uint64_t available_memory();
// Whether so many bytes can still be had. Asked first, since the system would rather kill a process
// than refuse the pages.
bool enough_memory(const char* label, size_t nbytes, Error* error);
// Make a file. Returns the descriptor, or -1 and an error that says how much was asked for. The
// first `reserve` bytes get their pages.
int make_shared_memory(const char* label, size_t nbytes, size_t reserve, Error* error);
bool grow_shared_memory(int fd, const char* label, size_t nbytes, Error* error);
void* map_shared_memory(int fd, size_t nbytes, Error* error);

}  // namespace coll
