// Send and receive: one channel for each ordered pair of ranks, a ring of slots that the sender
// fills and the receiver empties.
//
// Both sides announce a transfer with its count and datatype, and compare before any data moves. So
// a send waits for its receive (as MPI's synchronous send), and a mismatch is seen on both sides.
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "transfer.h"
#include "comm.h"

namespace coll {
namespace {
Channel::Side& own_side(Transfer& t) { return t.op.kind == CollKind::Send ? t.channel->sender : t.channel->receiver; }
Channel::Side& other_side(Transfer& t) { return t.op.kind == CollKind::Send ? t.channel->receiver : t.channel->sender; }
}  // namespace

void Transfer::begin() {
  ncclComm& c = *op.comm;
  bool sends = op.kind == CollKind::Send;
  int source = sends ? c.rank : op.root, destination = sends ? op.root : c.rank;
  begun = true;
  bool& claimed = c.claimed[source * c.size + destination];
  if (!claimed) {
    if (!c.segment->claim_channel(source, destination, &error)) return;
    claimed = true;
  }
  channel = c.segment->channel(source, destination);
  Channel::Side& own = own_side(*this);
  number = own.transfer.load(std::memory_order_relaxed) + 1;
  first_chunk = own.chunks.load(std::memory_order_relaxed);
  size_t size = c.segment->header()->channel_chunk_bytes;
  chunks = (op.bytes() + size - 1) / size;
  Channel::Side::Record& record = own.record[number & 1];
  record = {};
  record.count = op.count;
  record.datatype = op.type;
  if (op.type_label) snprintf(record.type_label, sizeof record.type_label, "%s", op.type_label);
  own.transfer.store(number, std::memory_order_release);
  c.wake_sleepers();
}

void Transfer::check_peer() {
  const auto& own = own_side(*this).record[number & 1];
  const auto& other = other_side(*this).record[number & 1];
  checked = true;
  if (own.count == other.count && own.datatype == other.datatype && !strcmp(own.type_label, other.type_label)) return;
  mismatched = true;
  bool sends = op.kind == CollKind::Send;
  error = make_error(collHostErrorMismatch,
                     format("send and receive do not match (transfer %llu of this pair):\n  rank %d: %s count=%llu dtype=%s"
                            "\n  rank %d: %s count=%llu dtype=%s  (this rank)",
                            static_cast<unsigned long long>(number), op.root, sends ? "ncclRecv" : "ncclSend",
                            static_cast<unsigned long long>(other.count), type_text(other.datatype, other.type_label).c_str(),
                            op.comm->rank,
                            op.name(), static_cast<unsigned long long>(own.count),
                            type_text(own.datatype, own.type_label).c_str()));
  error.peers = {op.root};
}

bool Transfer::advance() {
  ncclComm& c = *op.comm;
  Channel::Side &own = own_side(*this), &other = other_side(*this);
  bool moved_any = false;
  if (!checked) {
    if (other.transfer.load(std::memory_order_acquire) < number) return false;
    check_peer();
    if (mismatched) return true;
    moved_any = true;
  }
  size_t size = c.segment->header()->channel_chunk_bytes;
  bool sends = op.kind == CollKind::Send;
  while (moved < chunks) {
    uint64_t chunk = first_chunk + moved, there = other.chunks.load(std::memory_order_acquire);
    if (sends ? chunk - there >= kChannelSlots : there <= chunk) break;
    size_t offset = moved * size, nbytes = std::min(size, op.bytes() - offset);
    char* slot = c.segment->channel_slot(channel, chunk);
    if (sends) memcpy(slot, static_cast<const char*>(op.send) + offset, nbytes);
    else memcpy(static_cast<char*>(op.recv) + offset, slot, nbytes);
    own.chunks.store(chunk + 1, std::memory_order_release);
    ++moved;
    c.wake_sleepers();
    moved_any = true;
  }
  return moved_any;
}

}  // namespace coll
