#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "cgroups.h"

namespace coll {
namespace {

// A process stays in its groups, mostly; their limits may change at any time. At load, as in kernels.cpp.
const std::vector<std::string>* const g_groups = new std::vector<std::string>(memory_groups(""));

}  // namespace

// The kernel would kill a process rather than refuse pages of shared memory.
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
  return std::min(available, room_in(*g_groups));
}

Error no_memory(const char* label, size_t nbytes, const std::string& why) {
  Error error = make_error(collHostErrorMemory, format("%s: could not get %s of shared memory: %s", label,
                                                       byte_text(nbytes).c_str(), why.c_str()));
  error.bytes = nbytes;
  return error;
}

bool enough_memory(const char* label, size_t nbytes, Error* error) {
  uint64_t available = available_memory();
  if (nbytes <= available) return true;
  *error = no_memory(label, nbytes, "only " + byte_text(available) + " are free");
  return false;
}

bool grow_shared_memory(int fd, const char* label, size_t nbytes, Error* error) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && nbytes > limit.rlim_cur) {
    *error = no_memory(label, nbytes, "the limit of a file's size (ulimit -f) is " + byte_text(limit.rlim_cur));
    return false;
  }
  if (ftruncate(fd, static_cast<off_t>(nbytes)) == 0) return true;
  *error = no_memory(label, nbytes, strerror(errno));
  return false;
}

int make_shared_memory(const char* label, size_t nbytes, size_t reserve, Error* error) {
  if (!enough_memory(label, reserve, error)) return -1;
  int fd = memfd_create("collectives", MFD_CLOEXEC);
  if (fd < 0) {
    *error = no_memory(label, nbytes, std::string("memfd_create: ") + strerror(errno));
    return -1;
  }
  if (!grow_shared_memory(fd, label, nbytes, error)) {
    close(fd);
    return -1;
  }
  int code = 0;
  if (reserve) {
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

}  // namespace coll
