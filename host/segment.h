// Segment: the memory that the ranks of one communicator share.
//
// Layout of a segment of n ranks:   Header | n RankBlocks | n x 2 staging slots | n x n channels (send/recv)
// The part before the channels is allocated when the segment is made. A channel gets its pages at
// its first use.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "error.h"
#include "heap.h"

namespace coll {

constexpr size_t kLine = 64;
constexpr int kSlots = 2;  // a rank fills one while its peers still read the other

// Whether peers can use a rank's memory of one call in place.
enum Sharing : uint8_t {
  kStaged = 0,  // no
  kShared = 1,
  kEither = 2,    // they need not
  kReadable = 3,  // by process_vm_readv alone: memory.send.offset is the address in its process
  kSharingMask = 0x0f,
  // With one of these:
  kReads = 0x10,   // this rank can read and write the others' so
  kTakes = 0x20,   // who sends to this rank may write into its array: memory.recv
  kInPlace = 0x40  // this rank is the root, and has its own part where it wants the result
};

enum RankState : uint32_t {
  kAlive = 0,
  kLeft = 1,     // destroyed its communicator in good order
  kFailed = 2,   // an operation failed there; it can't go on
  kAborted = 3,
  kRevoked = 4,
  kDead = 5      // its process has ended; a peer that noticed it wrote this
};

// What one rank called, in full; read only when the hashes of two ranks differ.
struct CallRecord {
  uint64_t seq;
  uint64_t count;
  uint64_t step;  // of collHostCommSetStep
  int32_t kind, datatype, wire, op, root;
  int32_t compares;
  char op_label[24], type_label[24];  // of collHostLabel
  uint32_t tag;                       // of collHostTag
};

// Why a rank has given up the making of a child. `number`: of the newest split or shrink that failed
// there; the rest is about that one, and is being written while `version` is odd.
struct ChildFailure {
  std::atomic<uint64_t> number;
  std::atomic<uint32_t> version;
  int32_t kind;                               // collHostErrorKind_t
  uint8_t peers[COLL_HOST_MAX_RANKS / 8];     // whom it was about
  char text[256];
};

// Everything in a RankBlock is written by its own rank, except `state` (kDead) and `doorbell`.
struct RankBlock {
  // The cache line that peers wait on. The description of call k is at [k & 1]: a rank writes that
  // of call k + 2 only after all have posted k + 1, so after all have read k.
  alignas(kLine) std::atomic<uint64_t> posted;  // rounds put into this rank's slots
  uint64_t call_key[2];
  uint64_t scalar[2];  // pre-mul-sum
  uint8_t sharing[2];  // what of its memory the peers can use in place: Sharing
  alignas(kLine) std::atomic<uint64_t> reduced;   // rounds whose own slice has been reduced (two-phase all-reduce)
  std::atomic<uint64_t> stopped;  // rounds in which this rank, which has failed, touches nobody's memory any more
  alignas(kLine) std::atomic<uint64_t> consumed;  // rounds whose slots this rank no longer reads
  alignas(kLine) struct { SharedPlace send, recv; } memory[2];
  alignas(kLine) CallRecord call[2];
  alignas(kLine) std::atomic<uint32_t> state;
  std::atomic<uint32_t> doorbell;   // futex; others add one and wake
  std::atomic<uint32_t> sleeping;
  std::atomic<int32_t> waiting_for; // a rank, or -1: anybody
  int32_t pid;
  uint64_t probe_address, probe;    // what peers try to read: peer_memory.h
  int32_t cause;                    // collHostErrorKind_t of the error with which this rank failed, and whom it was
  uint8_t cause_peers[COLL_HOST_MAX_RANKS / 8];  // about; written before state
  alignas(kLine) std::atomic<uint64_t> split_posted;  // the exchange before a split, apart from the rounds above
  struct { int32_t color, key; } split[2];
  ChildFailure child_failure[2];  // of splits, of shrinks
};

struct Header {
  uint64_t magic;
  uint64_t segment_id;
  uint64_t total_bytes;
  uint64_t slots_offset, channels_offset;
  uint64_t chunk_bytes;          // of one slot
  uint64_t channel_chunk_bytes;  // of one of the kChannelSlots slots of a channel
  uint64_t channel_stride;
  int32_t nranks;
  alignas(kLine) std::atomic<uint32_t> sleepers;  // ranks that are asleep or about to be
  alignas(kLine) std::atomic<uint32_t> troubles;  // ranks whose state isn't kAlive
  std::atomic<uint32_t> apart;  // not 0: some rank can't map another's memory, so none uses any. Written before the first call
};

constexpr int kChannelSlots = 4;

// One direction between two ranks. The transfer numbers start at 1; what a side says of transfer t
// is at [t & 1].
struct Channel {
  struct Side {
    // The cache line that the other side waits on.
    alignas(kLine) std::atomic<uint64_t> transfer;  // the newest transfer that this side has announced
    std::atomic<uint64_t> chunks;  // written by the sender, or taken by the receiver, since the beginning
    uint64_t key[2];               // stands for count and datatype
    // Count and datatype in full, read only when the keys of both sides differ.
    alignas(kLine) struct Record {
      uint64_t count;
      int32_t datatype;
      char type_label[24];
      int64_t header[collHostHeaderWords];  // the sender's, for collHostCommPeek
    } record[2];
  };
  Side sender;
  Side receiver;
};
constexpr size_t kChannelHeader = (sizeof(Channel) + kLine - 1) / kLine * kLine;

class Segment {
 public:
  // Make one for n ranks; the descriptor for the others is in `fd`.
  static Segment* create(int nranks, int* fd, Error* error);
  // Map one that another rank made. Takes the descriptor. Ranks of one process share the mapping.
  static Segment* attach(int fd, uint64_t segment_id, int nranks, Error* error);
  void release();

  Header* header() const { return reinterpret_cast<Header*>(base_); }
  RankBlock* rank(int r) const { return ranks_ + r; }
  char* slot(int r, uint64_t round) const {
    return slots_ + (static_cast<size_t>(r) * kSlots + (round & 1)) * header()->chunk_bytes;
  }
  Channel* channel(int source, int destination) const;
  char* channel_slot(Channel* channel, uint64_t chunk) const {
    return reinterpret_cast<char*>(channel) + kChannelHeader + (chunk % kChannelSlots) * header()->channel_chunk_bytes;
  }
  // With several memory nodes: place this rank's slots on the one that it runs on, so that they are
  // filled there.
  void place_slots(int rank);
  // Get the pages of a channel, so that running out of memory is an error and not a signal.
  bool claim_channel(int source, int destination, Error* error);

 private:
  Segment(char* base, size_t nbytes, int fd);
  char* base_;
  size_t nbytes_;
  int fd_;
  int users_ = 1;
  RankBlock* ranks_;
  char* slots_;
};

}  // namespace coll
