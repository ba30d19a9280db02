// Admission to a bootstrap.
//
// Rank 0 sends a challenge to whoever connects, a nonce. The other side answers with a nonce of its
// own and an HMAC of both, and rank 0 with another HMAC of both. The key is made of the id and of
// the job's secret; neither is ever sent. The number of the socket's address is in what the HMAC
// covers, so a process that listens on one address can't pass on what rank 0 says on another.
//
// Names of sockets can be taken by anybody. So an id has several, and rank 0 listens on the first
// one that no stranger holds, which is another user's process or one that proves nothing. The other
// ranks look at all of them and stay with the one whose process proves itself.
#include "admission.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

#include <algorithm>

#include "system.h"

namespace coll {
namespace {

constexpr int64_t kSecond = 1000000000;            // ns
constexpr int64_t kHelloPatience = 5 * kSecond;    // with one that has connected
constexpr int64_t kProofPatience = 2 * kSecond;    // with one that listens, at first
constexpr int64_t kLongestPatience = 16 * kSecond;
constexpr int64_t kListenPatience = kSecond;       // with one that has an address and doesn't listen yet
constexpr size_t kUnproven = 64;                   // connections held at a time
constexpr int kFullLook = 8;                       // of so many looks for rank 0, one is at all addresses

Digest make_nonce() {
  Digest nonce;
  random_bytes(nonce.data(), nonce.size());
  return nonce;
}

// What proves that its sender has the key. role: "join" or "serve".
Digest prove(const Digest& key, const char* role, int address, const Digest& challenge, const Digest& hello) {
  std::string text = format("collectives %s %d ", role, address);
  text.append(reinterpret_cast<const char*>(challenge.data()), challenge.size());
  text.append(reinterpret_cast<const char*>(hello.data()), hello.size());
  return hmac_sha256(key.data(), key.size(), text.c_str(), text.size());  // data() of a string is of GCC 9
}

void nap_for(int64_t ns) {
  struct timespec nap = {ns / kSecond, ns % kSecond};
  nanosleep(&nap, nullptr);
}

enum class Found { Nobody, Stranger, Server, Failed };

// Wait for a message of this kind. Stranger: another one came, or none in time; Nobody: the
// connection was closed.
Found receive(int fd, Kind kind, int64_t until, const Stop& stop, Message* message, Error* error) {
  for (;;) {
    int64_t left = until - now_ns();
    if (left <= 0) return Found::Stranger;
    struct pollfd p = {fd, POLLIN, 0};
    poll(&p, 1, static_cast<int>(std::min<int64_t>(left / 1000000 + 1, 100)));
    int got = receive_message(fd, message, nullptr);
    if (got > 0) return message->kind == kind ? Found::Server : Found::Stranger;
    if (got < 0) return Found::Nobody;
    if (stop(error)) return Found::Failed;
  }
}

// Connect to an address, and have the process that listens there prove itself.
Found knock(const Id& id, const Digest& key, int address, int64_t until, const Stop& stop, Fd* fd, Strangers* strangers,
            Error* error) {
  struct sockaddr_un name;
  socklen_t length = address_of(id, address, &name);
  // Without waiting: a stranger may take no connection, and then the system would have this process wait.
  Fd client(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (client.get() < 0) {
    *error = make_error(collHostErrorSystem, std::string("no socket: ") + strerror(errno));
    return Found::Failed;
  }
  if (connect(client.get(), reinterpret_cast<struct sockaddr*>(&name), length) != 0) {
    if (errno == ECONNREFUSED || errno == EINTR) return Found::Nobody;
    if (errno == EAGAIN) return Found::Stranger;
    *error = make_error(collHostErrorSystem, std::string("connect: ") + strerror(errno));
    return Found::Failed;
  }
  uid_t user = 0;
  if (!same_user(client.get(), &user)) {
    strangers->foreign = true;
    strangers->user = user;
    return Found::Stranger;
  }
  Message challenge, hello, welcome;
  Found found = receive(client.get(), Kind::Challenge, until, stop, &challenge, error);
  if (found == Found::Server) {
    hello.kind = Kind::Hello;
    hello.nonce = make_nonce();
    hello.proof = prove(key, "join", address, challenge.nonce, hello.nonce);
    send_message(client.get(), hello);
    found = receive(client.get(), Kind::Welcome, until, stop, &welcome, error);
    bool proven = found == Found::Server &&
                  same_digest(welcome.proof, prove(key, "serve", address, challenge.nonce, hello.nonce));
    if (found != Found::Failed && !proven) found = Found::Stranger;
  }
  if (found == Found::Stranger) ++strangers->unproven;
  if (found != Found::Server) return found;
  int flags = fcntl(client.get(), F_GETFL);
  fcntl(client.get(), F_SETFL, flags & ~O_NONBLOCK);
  *fd = std::move(client);
  return Found::Server;
}

}  // namespace

std::string Strangers::text() const {
  std::string text;
  if (no_descriptor) text += "; this process had no file descriptor left for a connection (ulimit -n)";
  if (foreign) text += format("; a process of user %u, not of this process's user %u, holds a socket of this id", user, geteuid());
  if (unproven)
    text += format("; %d connection%s with a process of this user that did not prove itself: all ranks need the same id, and the "
                   "same COLLECTIVES_SECRET where one is set",
                   unproven, unproven == 1 ? "" : "s");
  return text;
}

Admission::Admission(const Id& id) : id_(id), key_(job_key(&id, sizeof id)) {}

Admission::Opened Admission::open(const Stop& stop, Fd* other, Error* error) {
  for (address_ = 0; address_ < kAddresses; ++address_) {
    struct sockaddr_un name;
    socklen_t length = address_of(id_, address_, &name);
    int64_t patience = now_ns() + kListenPatience;
    for (Found found = Found::Nobody; found == Found::Nobody && now_ns() < patience; nap_for(kSecond / 1000)) {
      listener_ = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (listener_.get() < 0) {
        *error = make_error(collHostErrorSystem, std::string("no socket: ") + strerror(errno));
        return Opened::Failed;
      }
      if (bind(listener_.get(), reinterpret_cast<struct sockaddr*>(&name), length) == 0) {
        if (listen(listener_.get(), 4096) == 0) return Opened::Listening;
        *error = make_error(collHostErrorSystem, std::string("listen: ") + strerror(errno));
        return Opened::Failed;
      }
      if (errno != EADDRINUSE) {
        *error = make_error(collHostErrorSystem, std::string("bind: ") + strerror(errno));
        return Opened::Failed;
      }
      found = knock(id_, key_, address_, now_ns() + kProofPatience, stop, other, &strangers_, error);
      if (found == Found::Server) return Opened::Taken;
      if (found == Found::Failed || stop(error)) return Opened::Failed;
    }
  }
  *error = make_error(collHostErrorSystem, format("all %d sockets of this id are taken%s. Set COLLECTIVES_SECRET: names made of a "
                                                  "secret can't be guessed", kAddresses, strangers_.text().c_str()));
  return Opened::Failed;
}

void Admission::watch(std::vector<struct pollfd>* polls) const {
  polls->push_back({listener_.get(), POLLIN, 0});
  for (const Unproven& each : unproven_) polls->push_back({each.guest.fd.get(), POLLIN, 0});
}

bool Admission::admit(const struct pollfd* polls, std::vector<Guest>* admitted, Error* error) {
  std::vector<Unproven> left;
  for (size_t i = 0; i < unproven_.size(); ++i) {
    Unproven& each = unproven_[i];
    Message hello;
    int got = polls[i + 1].revents ? receive_message(each.guest.fd.get(), &hello, nullptr) : 0;
    if (got == 0) {
      if (now_ns() < each.until) left.push_back(std::move(each));
      continue;
    }
    bool proven = got > 0 && hello.kind == Kind::Hello &&
                  same_digest(hello.proof, prove(key_, "join", address_, each.nonce, hello.nonce));
    if (proven) {
      Message welcome;
      welcome.kind = Kind::Welcome;
      welcome.proof = prove(key_, "serve", address_, each.nonce, hello.nonce);
      send_message(each.guest.fd.get(), welcome);
      admitted->push_back(std::move(each.guest));
    } else if (got > 0) {
      ++strangers_.unproven;
    }
  }
  unproven_ = std::move(left);
  return !polls[0].revents || accept_all(error);
}

bool Admission::accept_all(Error* error) {
  for (size_t taken = 0; taken < kUnproven; ++taken) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd.get() < 0) {
      if (errno == EAGAIN) return true;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if ((errno == EMFILE || errno == ENFILE) && !unproven_.empty()) {
        strangers_.no_descriptor = true;
        unproven_.clear();  // they take the descriptors, mostly, and those who belong here come again
        continue;
      }
      *error = make_error(collHostErrorSystem, std::string("accept: ") + strerror(errno));
      return false;
    }
    uid_t user;
    pid_t process;
    if (!same_user(fd.get(), &user, &process)) continue;  // turned away by closing
    struct timeval patience = {1, 0};  // with a rank that proves itself and then reads nothing
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    Message challenge;
    challenge.nonce = make_nonce();
    send_message(fd.get(), challenge);
    if (unproven_.size() == kUnproven) drop_one();
    unproven_.push_back({{std::move(fd), process}, challenge.nonce, now_ns() + kHelloPatience});
  }
  return true;
}

// Close the oldest connection of the process that has most of them: who floods this socket harms
// itself, and who belongs here comes again.
void Admission::drop_one() {
  auto of_same = [this](const Unproven& each) {
    return std::count_if(unproven_.begin(), unproven_.end(),
                         [&](const Unproven& other) { return other.guest.process == each.guest.process; });
  };
  unproven_.erase(std::max_element(unproven_.begin(), unproven_.end(),
                                   [&](const Unproven& a, const Unproven& b) { return of_same(a) < of_same(b); }));
}

bool find_server(const Id& id, int64_t deadline, const Stop& stop, Fd* fd, Strangers* strangers, Error* error) {
  Digest key = job_key(&id, sizeof id);
  int64_t nap_ns = 200 * 1000, patience = kProofPatience;
  for (int look = 1;; ++look) {
    bool strange = false;
    for (int address = 0; address < kAddresses; ++address) {
      int64_t until = std::min(deadline, now_ns() + patience);
      Found found = knock(id, key, address, until, stop, fd, strangers, error);
      if (found == Found::Server) return true;
      if (found == Found::Failed) return false;
      strange = strange || found == Found::Stranger;
      // Rank 0 may have passed over an address that is free now.
      if (found == Found::Nobody && look % kFullLook) break;
    }
    if (now_ns() > deadline || stop(error)) return false;
    if (strange) patience = std::min(2 * patience, kLongestPatience);  // it may be rank 0, on a busy machine
    nap_for(nap_ns);
    nap_ns = std::min<int64_t>(nap_ns * 2, 20 * 1000 * 1000);
  }
}

}  // namespace coll
