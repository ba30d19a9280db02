// Errors of the host engine: made in one place, kept for the thread that made them, read by
// ncclGetLastError.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "coll/host_abi.h"

namespace coll {

struct Error {
  ncclResult_t code = ncclSuccess;
  collHostErrorKind_t kind = collHostErrorNone;
  int rank = -1;
  uint64_t seq = 0;
  uint64_t bytes = 0;
  std::string op;
  uint32_t tag = 0;  // of the operation
  std::string text;
  std::vector<int> peers;

  explicit operator bool() const { return code != ncclSuccess; }
};

#define COLL_PRINTF(a, b) __attribute__((format(printf, a, b)))

std::string format(const char* fmt, ...) COLL_PRINTF(1, 2);
// "ranks 1, 2 and 5" or "rank 1".
std::string rank_list(const std::vector<int>& ranks);
// "12.5 MiB (13107200 bytes)"
std::string byte_text(uint64_t nbytes);

ncclResult_t code_of(collHostErrorKind_t kind);
Error make_error(collHostErrorKind_t kind, std::string text);

// Keep as the calling thread's newest error, and return its code.
ncclResult_t raise(const Error& error);
ncclResult_t raise(collHostErrorKind_t kind, const char* op, std::string text);
const Error& last_error();
const char* last_error_text();
void fill(const Error& error, collHostErrorInfo_t* info);

// Every exported function runs inside this: C++ exceptions must not cross the ABI.
template <class F>
ncclResult_t guarded(const char* op, F&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return raise(collHostErrorMemory, op, "out of memory for the engine's own bookkeeping");
  } catch (const std::exception& e) {
    return raise(collHostErrorInternal, op, e.what());
  }
}

}  // namespace coll
