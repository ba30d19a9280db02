#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>

namespace coll {
namespace {
thread_local Error t_last;
}

std::string format(const char* fmt, ...) {
  char buffer[1024];
  va_list args;
  va_start(args, fmt);
  vsnprintf(buffer, sizeof buffer, fmt, args);
  va_end(args);
  return buffer;
}

std::string rank_list(const std::vector<int>& ranks) {
  if (ranks.empty()) return "no rank";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  size_t shown = std::min<size_t>(ranks.size(), 32);
  for (size_t i = 0; i < shown; ++i) {
    if (i) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  if (shown < ranks.size()) text += format(" and %zu more", ranks.size() - shown);
  return text;
}

std::string byte_text(uint64_t nbytes) {
  static const char* const kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(nbytes);
  int unit = 0;
  while (value >= 1024 && unit < 6) value /= 1024, ++unit;
  if (unit == 0) return format("%llu bytes", static_cast<unsigned long long>(nbytes));
  return format("%.1f %s (%llu bytes)", value, kUnits[unit], static_cast<unsigned long long>(nbytes));
}

ncclResult_t code_of(collHostErrorKind_t kind) {
  switch (kind) {
    case collHostErrorNone: return ncclSuccess;
    case collHostErrorArgument: return ncclInvalidArgument;
    case collHostErrorUsage:
    case collHostErrorMismatch:
    case collHostErrorAborted: return ncclInvalidUsage;
    case collHostErrorTimeout: return ncclTimeout;
    case collHostErrorRemote: return ncclRemoteError;
    case collHostErrorMemory:
    case collHostErrorSystem: return ncclSystemError;
    default: return ncclInternalError;
  }
}

Error make_error(collHostErrorKind_t kind, std::string text) {
  Error error;
  error.kind = kind;
  error.code = code_of(kind);
  error.text = std::move(text);
  return error;
}

ncclResult_t raise(const Error& error) {
  t_last = error;
  return error.code;
}

ncclResult_t raise(collHostErrorKind_t kind, const char* op, std::string text) {
  t_last = make_error(kind, std::move(text));
  t_last.op = op;
  return t_last.code;
}

const Error& last_error() { return t_last; }

const char* last_error_text() {
  // The pointer stays valid until the thread's next call of this function.
  thread_local std::string text;
  text = t_last.op.empty() ? t_last.text : t_last.op + ": " + t_last.text;
  return text.c_str();
}

void fill(const Error& error, collHostErrorInfo_t* info) {
  collHostErrorInfo_t full;
  memset(&full, 0, sizeof full);
  size_t size = std::min(info->size, sizeof full);  // a client built against a smaller struct gets what fits
  full.size = info->size;
  full.code = error.code;
  full.kind = error.kind;
  full.rank = error.rank;
  full.seq = error.seq;
  full.bytes = error.bytes;
  snprintf(full.op, sizeof full.op, "%s", error.op.c_str());
  snprintf(full.text, sizeof full.text, "%s", error.text.c_str());
  full.npeers = static_cast<int>(std::min<size_t>(error.peers.size(), COLL_HOST_MAX_RANKS));
  std::copy_n(error.peers.begin(), full.npeers, full.peers);
  full.tag = error.tag;
  memcpy(info, &full, size);
}

}  // namespace coll
