// The messages by which ranks bootstrap a communicator, and the Unix sockets that carry them.
#pragma once

#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "comm.h"
#include "hmac.h"
#include "unique_id.h"

namespace coll {

constexpr uint32_t kProtocol = 0x434f4c04;
constexpr int64_t kLinger = 2000000000;  // ns

// Of the messages, Challenge, Hello and Welcome are admission.cpp's.
enum class Kind : uint32_t { Challenge, Hello, Welcome, Join, Arrived, Segment, Heap, Mapped, GaveUp, Failed, Go };

struct Message {
  uint32_t protocol = kProtocol;
  Kind kind = Kind::Challenge;
  int32_t rank = 0, nranks = 0, pid = 0, error_kind = 0;
  Digest nonce = {};        // Challenge, Hello
  Digest proof = {};        // Hello, Welcome
  uint64_t options = 0;     // must be the same on all ranks
  uint64_t segment_id = 0;
  uint64_t heap_id = 0;     // Join, Heap: of the rank's process; 0: the system gave it none
  uint8_t ranks[kMaxRanks / 8] = {};  // Arrived: who has come. Failed: whom it is about
  char text[1024] = "";
};

inline void set_bit(uint8_t* bits, int i) { bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | 1 << (i % 8)); }
inline bool get_bit(const uint8_t* bits, int i) { return bits[i / 8] >> (i % 8) & 1; }
std::vector<int> ranks_in(const uint8_t* bits);

// A file descriptor that is closed with its owner.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept { std::swap(fd_, other.fd_); return *this; }
  ~Fd() { if (fd_ >= 0) ::close(fd_); }
  int get() const { return fd_; }
  int take() { int fd = fd_; fd_ = -1; return fd; }
 private:
  int fd_;
};

// The addresses of an id's sockets, from 0 to kAddresses - 1. Rank 0 listens on one of them.
constexpr int kAddresses = 16;
socklen_t address_of(const Id& id, int number, struct sockaddr_un* address);
// Whether the process on the other side belongs to this process's user.
bool same_user(int fd, uid_t* user, pid_t* process = nullptr);
bool send_message(int fd, const Message& message, int descriptor = -1);
// 1: a message; 0: nothing there now; -1: the other side has closed, or what came is no message.
int receive_message(int fd, Message* message, Fd* descriptor);

}  // namespace coll
