// The simulated GPU, as its parts share it: what is reported to Python, memory, streams.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <cstdint>

namespace simulated {

enum Kind : int {
  kRecord = 0,        // stream, event
  kBlock = 1,         // stream, event: the stream waits for the event
  kSyncEvent = 2,     // event: the host waits for it
  kSyncStream = 3,    // stream: the host waits for it
  kSyncDevice = 4,    // device: the host waits for all its streams
  kQueryEvent = 5,    // event; returns 1 where it has completed
  kQueryStream = 6,   // stream
  kRecordStream = 7,  // address, stream
  kAllocate = 8,      // address, bytes, stream
  kFree = 9,          // address
  kOperation = 10,    // stream, whether the host waits, pageable copies or kMade; with accesses. Returns 1 where it is captured
  kHost = 11,         // an operation of the host on pinned memory; with accesses
  kPin = 12,          // address, bytes
  kUnpin = 13,        // address
  kSetDevice = 14,    // device: a thread makes it the current one
  kDestroyEvent = 15, // event
  kCaptured = 16,     // the number of a call that was captured: comes after its kOperation
};

constexpr int64_t kMade = 2;  // in place of kOperation's third number: the operation of the report before, with what it has made

struct Access {
  int64_t low, high;  // addresses
  int32_t writes, dtype, dims, device;
  int64_t sizes[4];
};

// Returns -1 where CUDA would refuse the call because a stream is capturing, -2 where the sync debug mode does.
using Callback = int64_t (*)(int kind, int64_t a, int64_t b, int64_t c, const char* text, const Access* accesses, int64_t count);

int64_t report(Kind kind, int64_t a = 0, int64_t b = 0, int64_t c = 0, const char* text = "", const Access* accesses = nullptr,
               int64_t count = 0);

int device_count();
int current_device();
int64_t current_stream(int device);                                   // its number; 0 is the default stream
inline int64_t key_of(int device, int64_t stream) { return (static_cast<int64_t>(device) << 40) | stream; }
inline int64_t key_of(const c10::Stream& s) { return key_of(s.device_index(), s.id()); }

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
bool any_pinned();
int device_of_address(const void* address);  // -1: of the host

}  // namespace simulated
