// The messages by which ranks bootstrap a communicator.
#include "handshake.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "system.h"

namespace coll {

std::vector<int> ranks_in(const uint8_t* bits) {
  std::vector<int> ranks;
  for (int r = 0; r < kMaxRanks; ++r)
    if (get_bit(bits, r)) ranks.push_back(r);
  return ranks;
}

socklen_t address_of(const Id& id, int number, struct sockaddr_un* address) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "collectives-%016llx%016llx-%d",
                        static_cast<unsigned long long>(id.name[0]), static_cast<unsigned long long>(id.name[1]), number);
  return static_cast<socklen_t>(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

bool same_user(int fd, uid_t* user, pid_t* process) {
  struct ucred peer;
  socklen_t length = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  *user = peer.uid;
  if (process) *process = peer.pid;
  return peer.uid == geteuid();
}

bool send_message(int fd, const Message& message, int descriptor) {
  struct iovec data = {const_cast<Message*>(&message), sizeof message};
  alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  struct msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    struct cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &descriptor, sizeof(int));
  }
  ssize_t sent;
  // A message about arrivals may be dropped if a rank does not read; everything else has to arrive.
  int flags = MSG_NOSIGNAL | (message.kind == Kind::Arrived ? MSG_DONTWAIT : 0);
  // The system limits how many descriptors are on their way; those who are to take them are about
  // to.
  int64_t until = 0;
  for (;;) {
    sent = sendmsg(fd, &header, flags);
    if (sent >= 0 || (errno != EINTR && errno != ETOOMANYREFS)) break;
    if (errno == EINTR) continue;
    if (!until) until = now_ns() + kLinger / 2;
    if (now_ns() > until) break;
    struct timespec nap = {0, 1000 * 1000};
    nanosleep(&nap, nullptr);
  }
  return sent == static_cast<ssize_t>(sizeof message);
}

int receive_message(int fd, Message* message, Fd* descriptor) {
  struct iovec data = {message, sizeof *message};
  alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  struct msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t got = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0 && errno == ECONNRESET) {
    // The other side closed before it had read all; what it had sent is still there, behind this
    // error.
    header.msg_controllen = sizeof control;
    got = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  }
  if (got < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
  for (struct cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    // There may be more than one, where the control message's alignment leaves room.
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= c->cmsg_len; at += sizeof(int)) {
      int fd_there;
      memcpy(&fd_there, CMSG_DATA(c) + at, sizeof fd_there);
      Fd taken(fd_there);
      if (descriptor) *descriptor = std::move(taken);
    }
  }
  message->text[sizeof message->text - 1] = 0;
  bool whole = got == static_cast<ssize_t>(sizeof *message) && !(header.msg_flags & MSG_TRUNC);
  return whole && message->protocol == kProtocol ? 1 : -1;
}

}  // namespace coll
