// Admission to a bootstrap: a rank and rank 0 prove to each other that they know the id and the
// job's secret, before either believes anything else that the other one says.
#pragma once

#include <poll.h>
#include <stdint.h>

#include <functional>
#include <string>
#include <vector>

#include "error.h"
#include "handshake.h"

namespace coll {

// Returns whether a wait is to end, and why.
using Stop = std::function<bool(Error*)>;

// What was found at the sockets of an id beside rank 0, for the message of a rank that waits in vain.
struct Strangers {
  int unproven = 0;  // processes of this user that lack the id or the job's secret
  bool foreign = false;
  bool no_descriptor = false;  // this process had none left for a connection
  uid_t user = 0;  // of the last foreign process
  std::string text() const;
};

// Rank 0's side: its listening socket, and the processes that have connected and proven nothing yet.
class Admission {
 public:
  struct Guest {
    Fd fd;
    pid_t process;  // as this process sees it
  };
  enum class Opened { Listening, Taken, Failed };

  explicit Admission(const Id& id);
  // Listen on the first address that no stranger holds. Taken: a rank 0 of this id listens there
  // already; *other is the connection to it.
  Opened open(const Stop& stop, Fd* other, Error* error);
  void watch(std::vector<struct pollfd>* polls) const;
  // Look at what `watch` has put in the list, from `polls` on: take connections, and return those who
  // have proven themselves. Others that say anything else, or nothing for a while, are closed.
  bool admit(const struct pollfd* polls, std::vector<Guest>* admitted, Error* error);
  bool is_pending() const { return !unproven_.empty(); }
  const Strangers& strangers() const { return strangers_; }

 private:
  struct Unproven {
    Guest guest;
    Digest nonce;
    int64_t until;
  };
  const Id& id_;
  Digest key_;
  int address_ = 0;
  Fd listener_;
  std::vector<Unproven> unproven_;
  Strangers strangers_;

  bool accept_all(Error* error);
  void drop_one();
};

// Every other rank's side: connect to rank 0. Returns false with an error when `stop` says so;
// false without one when the deadline has passed.
bool find_server(const Id& id, int64_t deadline, const Stop& stop, Fd* fd, Strangers* strangers, Error* error);

}  // namespace coll
