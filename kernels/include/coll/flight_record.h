// Flight records: what the binding and the host engine write of each operation, into memory that may
// be a mapping of a file, so that it outlives the process. collectives/flight/ reads it.
//
// Layout: header | capacity records | line names. Numbers are of this machine's byte order.
// Operation n is in record (n - 1) % capacity. A record is whole where its `number` is the same
// before and after it was read, and not 0.
#ifndef COLL_FLIGHT_RECORD_H_
#define COLL_FLIGHT_RECORD_H_

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 199309L  // clock_gettime
#endif
#include <stdint.h>
#include <time.h>

#define COLL_FLIGHT_MAGIC "COLLFLT1"
enum {
  collFlightHeaderBytes = 4096,
  collFlightCapacity = 2048,      // records; a power of two
  collFlightMetaOffset = 64,      // JSON: a length of 4 bytes, then the text
  collFlightMetaBytes = 1984,
  collFlightOutcomeOffset = 2048, // JSON of the communicator's end or error, as above
  collFlightOutcomeBytes = 2048,
  collFlightLines = 512,
  collFlightLineBytes = 128       // "file:line", "\tname of a tag" or both, with the terminating 0
};

enum { collFlightBlocking = 1, collFlightCollective = 2, collFlightReported = 4 };

typedef struct collFlightRecord {
  uint64_t number;                  // from 1; 0: none, or it is being written
  int64_t submitted, started, ended;  // ns of CLOCK_MONOTONIC; 0: not yet, or not known
  uint64_t count;                   // elements, as in NCCL's call
  uint64_t stream;                  // CUDA stream or queue; 0: the calling thread
  uint32_t sequence;                // collectives so far, this one included
  int32_t peer;                     // root or peer, else -1
  uint16_t line;                    // of the program, and the tag: 1 + the place in the line names; 0: not recorded
  uint8_t op;                       // its place in the binding's FLIGHT_OPS
  uint8_t dtype;                    // NCCL's code
  int16_t code;                     // ncclResult_t of its end
  uint8_t flags;
  uint8_t reserved;
} collFlightRecord_t;

typedef struct {
  char magic[8];
  uint32_t header_bytes, record_bytes, capacity, lines;
  uint64_t issued;     // operations
  uint64_t completed;  // all up to this one are known to have ended,
  int64_t completed_at;
  uint32_t sequence;   // collectives
  uint32_t lines_used;
} collFlightHeader_t;

static inline int64_t collFlightNow(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline collFlightRecord_t* collFlightAt(collFlightHeader_t* ring, uint64_t number) {
  return (collFlightRecord_t*)((char*)ring + collFlightHeaderBytes) + ((number - 1) & (collFlightCapacity - 1));
}

// Writers of one ring take turns (they hold the interpreter's lock).
static inline collFlightRecord_t* collFlightBegin(collFlightHeader_t* ring, int op, uint64_t count, int dtype, uint64_t stream,
                                                  int peer, int flags, int line) {
  uint64_t number = ring->issued + 1;
  collFlightRecord_t* record = collFlightAt(ring, number);
  __atomic_store_n(&record->number, 0, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  if (flags & collFlightCollective) ++ring->sequence;
  record->submitted = collFlightNow();
  record->started = record->ended = 0;
  record->count = count;
  record->stream = stream;
  record->sequence = ring->sequence;
  record->peer = peer;
  record->line = (uint16_t)line;
  record->op = (uint8_t)op;
  record->dtype = (uint8_t)dtype;
  record->code = 0;
  record->flags = (uint8_t)flags;
  __atomic_store_n(&record->number, number, __ATOMIC_RELEASE);
  __atomic_store_n(&ring->issued, number, __ATOMIC_RELEASE);
  return record;
}

static inline int collFlightHolds(const collFlightRecord_t* record, uint64_t number) {
  return record && __atomic_load_n(&record->number, __ATOMIC_ACQUIRE) == number;
}

// Does nothing where a later operation has taken the record.
static inline void collFlightStart(collFlightRecord_t* record, uint64_t number) {
  if (collFlightHolds(record, number)) record->started = collFlightNow();
}

static inline void collFlightEnd(collFlightRecord_t* record, uint64_t number, int code) {
  if (!collFlightHolds(record, number)) return;
  record->code = (int16_t)code;
  __atomic_store_n(&record->ended, collFlightNow(), __ATOMIC_RELEASE);
}

#endif
