// Send and receive: one channel for each ordered pair of ranks, a ring of slots that the sender
// fills and the receiver empties.
//
// Both sides announce a transfer with its count and datatype. The sender puts the first chunk into
// its slot before that, if the slot is free, so that a receiver finds the data with the announcement.
// Each side compares when it sees the other's announcement, before the receiver takes anything. So
// a send waits for its receive to be called (as MPI's synchronous send), and a mismatch is seen on
// both sides: the sender then counts the chunk back that nobody will take.
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "transfer.h"
#include "comm.h"
#include "system.h"

namespace coll {
namespace {

// Count and datatype as one number; equal only if they are, but for labels, of which it has a hash.
uint64_t transfer_key(const Op& op, const Channel::Side::Record& record) {
  static const uint64_t kKey[2] = {0x636f6c6c65637469ull, 0x7665732073656e64ull};
  uint64_t label = op.type_label ? siphash(kKey, record.type_label, sizeof record.type_label) : 0;
  return (static_cast<uint64_t>(op.count) | static_cast<uint64_t>(op.type) << 56) ^ label;  // api.cpp limits the count
}

// A channel with its pages, or NULL with an error.
Channel* claim(ncclComm& c, bool sends, int peer, Error* error) {
  if (c.channels.empty()) c.channels.resize(2 * static_cast<size_t>(c.size));
  Channel*& channel = c.channels[2 * static_cast<size_t>(peer) + !sends];
  int source = sends ? c.rank : peer, destination = sends ? peer : c.rank;
  if (!channel && c.segment->claim_channel(source, destination, error))
    channel = c.segment->channel(source, destination);
  return channel;
}

}  // namespace

bool Transfer::is_short() const {
  const ncclComm& c = *op.comm;
  return op.root != c.rank && op.bytes() <= c.segment->header()->channel_chunk_bytes;
}

void Transfer::begin() {
  ncclComm& c = *op.comm;
  begun = true;
  channel = claim(c, sends(), op.root, &error);
  if (!channel) return;
  Channel::Side& own = own_side();
  number = own.transfer.load(std::memory_order_relaxed) + 1;
  first_chunk = own.chunks.load(std::memory_order_relaxed);
  size_t size = c.segment->header()->channel_chunk_bytes;
  chunks = op.bytes() <= size ? op.count != 0 : (op.bytes() + size - 1) / size;
  Channel::Side::Record& record = own.record[number & 1];  // its padding stays 0
  record.count = op.count;
  record.datatype = op.type;
  if (record.type_label[0]) memset(record.type_label, 0, sizeof record.type_label);
  if (op.type_label) snprintf(record.type_label, sizeof record.type_label, "%s", op.type_label);
  if (sends()) memcpy(record.header, op.header, sizeof record.header);
  uint64_t key = transfer_key(op, record);
  if (sends()) move_chunks();
  // Last, and at once: a peer that waits takes this line away with each look at it.
  own.key[number & 1] = key;
  own.transfer.store(number, std::memory_order_release);
}

bool Transfer::peer_agrees() const { return own_side().key[number & 1] == other_side().key[number & 1]; }

void Transfer::check_peer() {
  checked = true;
  if (peer_agrees()) return;
  mismatched = true;
  if (sends()) own_side().chunks.store(first_chunk, std::memory_order_relaxed);  // read after the next announcement
  const auto& own = own_side().record[number & 1];
  const auto& other = other_side().record[number & 1];
  error = make_error(collHostErrorMismatch,
                     format("send and receive do not match (transfer %llu of this pair):\n  rank %d: %s count=%llu dtype=%s"
                            "\n  rank %d: %s count=%llu dtype=%s  (this rank)",
                            static_cast<unsigned long long>(number), op.root, sends() ? "ncclRecv" : "ncclSend",
                            static_cast<unsigned long long>(other.count), type_text(other.datatype, other.type_label).c_str(),
                            op.comm->rank,
                            op.name(), static_cast<unsigned long long>(own.count),
                            type_text(own.datatype, own.type_label).c_str()));
  error.peers = {op.root};
}

bool Transfer::advance() {
  bool checks = !checked;
  if (checks) {
    if (!peer_is_there()) return sends() && move_chunks();
    check_peer();
    if (mismatched) return true;
  }
  return move_chunks() || checks;
}

// Before the announcements are compared only a sender moves anything: its first chunk, and after its
// own announcement one more in each call, as long as there are slots.
bool Transfer::move_chunks() {
  ncclComm& c = *op.comm;
  Channel::Side &own = own_side(), &other = other_side();
  size_t size = c.segment->header()->channel_chunk_bytes;
  bool moved_any = false;
  for (uint64_t most = checked ? chunks : std::min(chunks, moved + 1); moved < most; moved_any = true) {
    uint64_t chunk = first_chunk + moved, there = other.chunks.load(std::memory_order_acquire);
    if (sends() ? chunk - there >= kChannelSlots : there <= chunk) break;
    size_t offset = moved * size, nbytes = std::min(size, op.bytes() - offset);
    char* slot = c.segment->channel_slot(channel, chunk);
    if (sends()) memcpy(slot, static_cast<const char*>(op.send) + offset, nbytes);
    else memcpy(static_cast<char*>(op.recv) + offset, slot, nbytes);
    own.chunks.store(chunk + 1, std::memory_order_release);
    ++moved;
  }
  return moved_any;
}

Error compare_parts(const void* records, int size, int rank) {
  constexpr size_t kMostLines = 8;
  auto record = [&](int r) { return static_cast<const char*>(records) + static_cast<size_t>(r) * COLL_HOST_PARTS_BYTES(size); };
  auto elements = [&](int r, int peer, bool received) {
    uint64_t count;
    memcpy(&count, record(r) + COLL_HOST_REFUSAL_BYTES + sizeof count * (2 * static_cast<size_t>(peer) + received), sizeof count);
    return static_cast<unsigned long long>(count);
  };
  std::vector<std::string> refusals, lines;
  std::vector<char> differs(static_cast<size_t>(size), 0);
  for (int r = 0; r < size; ++r) {
    if (!*record(r)) continue;
    differs[static_cast<size_t>(r)] = 1;
    refusals.push_back(format("rank %d takes no part, since it raised: %.*s", r, COLL_HOST_REFUSAL_BYTES - 1, record(r)));
  }
  for (int r = 0; r < size && refusals.empty(); ++r) {
    for (int peer = 0; peer < size; ++peer) {
      if (elements(r, peer, false) == elements(peer, r, true)) continue;
      differs[static_cast<size_t>(r)] = differs[static_cast<size_t>(peer)] = 1;
      lines.push_back(format("rank %d sends %llu to rank %d, which expects %llu", r, elements(r, peer, false), peer,
                             elements(peer, r, true)));
    }
  }
  if (refusals.empty() && lines.empty()) return Error();
  std::string text = refusals.empty() ? "what the ranks send and what they expect differ, in elements:" : "";
  if (!refusals.empty()) lines = std::move(refusals);
  for (size_t i = 0; i < std::min(lines.size(), kMostLines); ++i) text += (text.empty() ? "" : "\n  ") + lines[i];
  if (lines.size() > kMostLines) text += format("\n  and %zu more", lines.size() - kMostLines);
  Error error = make_error(collHostErrorMismatch, std::move(text));
  for (int r = 0; r < size; ++r)
    if (r != rank && differs[static_cast<size_t>(r)]) error.peers.push_back(r);
  return error;
}

}  // namespace coll
