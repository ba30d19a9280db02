// Bootstrap of a communicator: its ranks find each other and map one shared segment.
//
// Rank 0 listens on an abstract Unix socket whose name comes from the id; nothing of it is in a
// file system. The kernel reports to each side the other's user (SO_PEERCRED): only processes of
// one user are accepted, and only with the id's secret. When all ranks have come, rank 0 makes the
// segment and passes its descriptor to them, and each rank's file of shared memory (heap.h) to all
// others. Every error is sent to all ranks that have come, with the ranks that it is about; a rank
// that waits knows at any time who has arrived.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "bootstrap.h"
#include "handshake.h"
#include "heap.h"
#include "system.h"

namespace coll {
namespace {

// With more ranks than that nobody's memory is shared: rank 0 would pass too many descriptors on
// for one socket to hold.
constexpr int kSharingRanks = 64;
std::atomic<int64_t> g_init_timeout_ms{60000};

class Rendezvous {
 public:
  Rendezvous(ncclComm* comm, const Id& id, uint64_t options, const char* what, const Origin& origin)
      : comm_(comm), id_(id), options_(options), what_(what), origin_(origin), limit_ms_(g_init_timeout_ms.load()),
        deadline_(now_ns() + limit_ms_ * 1000000) {
    int64_t timeout_ns = origin.parent ? origin.parent->timeout_ns.load() : 0;
    if (timeout_ns <= 0 || origin.began_ns + timeout_ns >= deadline_) return;
    limit_ms_ = timeout_ns / 1000000;
    deadline_ = origin.began_ns + timeout_ns;
  }

  bool serve(Error* error);
  bool join(Error* error);

 private:
  struct Guest {
    Fd fd;
    int rank = -1;
    pid_t process = 0;  // as this process sees it
    bool mapped = false;
    uint64_t heap_id = 0;
    Fd heap;
  };

  ncclComm* comm_;
  const Id& id_;
  uint64_t options_;
  const char* what_;
  const Origin& origin_;
  int64_t limit_ms_, deadline_;

  bool stopped(Error* error) const {
    if (comm_->abort_flag.load()) *error = make_error(collHostErrorAborted, "aborted while the ranks were meeting");
    else if (interrupted()) *error = make_error(collHostErrorInterrupted, "interrupted by a signal");
    else return a_member_failed(error);
    return true;
  }

  // The number by which errors name a rank: the parent's.
  int named(int rank) const {
    return origin_.parent && rank >= 0 && rank < comm_->size ? origin_.members[static_cast<size_t>(rank)] : rank;
  }

  bool a_member_failed(Error* error) const {
    if (!origin_.parent) return false;
    std::vector<int> dead;
    ncclComm& p = *origin_.parent;
    for (int r : origin_.members) {
      // Not failed_peers(): that stops looking at ranks that have failed, as all survivors have
      // when they shrink.
      if (r != p.rank && (p.segment->rank(r)->state.load() == kDead || process_ended(p.pids[r], p.pidfds[r]))) dead.push_back(r);
    }
    if (dead.empty()) {
      *error = child_failure(p, origin_.kind, origin_.number, origin_.members);
      return static_cast<bool>(*error);
    }
    *error = make_error(collHostErrorRemote, format("%s: %s of the communicator that it is made from died", what_,
                                                    rank_list(dead).c_str()));
    error->peers = dead;
    return true;
  }

  std::vector<int> absent(const uint8_t* arrived) const {
    std::vector<int> ranks;
    for (int r = 0; r < comm_->size; ++r)
      if (!get_bit(arrived, r)) ranks.push_back(named(r));
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  Error too_late(const std::vector<int>& missing) const {
    Error error = make_error(collHostErrorTimeout,
                             format("%s of %d ranks: %s did not come within %.1f s", what_, comm_->size,
                                    rank_list(missing).c_str(), static_cast<double>(limit_ms_) / 1e3));
    error.peers = missing;
    return error;
  }

  void say_hello(int fd) const {
    Message m;
    int heap = -1;
    if (comm_->size <= kSharingRanks) m.heap_id = heap_id(&heap);  // rank 0 has no use for more, and may have room for no more
    m.rank = comm_->rank;
    m.nranks = comm_->size;
    m.pid = getpid();
    m.options = options_;
    memcpy(m.secret, id_.secret, sizeof m.secret);
    send_message(fd, m, heap);
  }

  void pass_on_heaps(const std::vector<Guest>& guests) const;
  void take_heap(int rank, uint64_t id, Fd fd) const;

  Error refuse(const Message& m, const std::vector<Guest>& guests) const;
  void send_failure(const std::vector<Guest>& guests, const Error& error) const;
  void reject_late_ranks(int listener, int expected, const Error& error) const;
  bool connect_to_server(Fd* fd, Error* error) const;
};

// Why a rank that says hello can't take part, or no error.
Error Rendezvous::refuse(const Message& m, const std::vector<Guest>& guests) const {
  if (m.nranks != comm_->size) {
    Error error = make_error(collHostErrorUsage, format("rank %d was told that there are %d ranks, rank %d that there are %d",
                                                        named(m.rank), m.nranks, named(comm_->rank), comm_->size));
    error.peers = {named(m.rank)};
    return error;
  }
  bool taken = m.rank == comm_->rank;
  for (const Guest& g : guests) taken = taken || g.rank == m.rank;
  if (taken || m.rank < 0 || m.rank >= comm_->size) {
    Error error = make_error(collHostErrorUsage,
                             taken ? format("two processes have the rank number %d (one of them is process %d)", named(m.rank), m.pid)
                                   : format("rank %d of %d ranks", m.rank, m.nranks));
    error.peers = {named(m.rank)};
    return error;
  }
  if (m.options != options_) {
    Error error = make_error(collHostErrorMismatch, format("rank %d gave other arguments to %s than rank %d",
                                                           named(m.rank), what_, named(comm_->rank)));
    error.peers = {named(m.rank)};
    return error;
  }
  return Error();
}

// Give every rank the files of all others.
void Rendezvous::pass_on_heaps(const std::vector<Guest>& guests) const {
  if (comm_->size > kSharingRanks) {
    comm_->segment->header()->apart.store(1);
    return;
  }
  int own;
  uint64_t own_id = heap_id(&own);
  auto pass = [&](int to, int rank, uint64_t id, int fd) {
    Message m;
    m.kind = Kind::Heap;
    m.rank = rank;
    m.heap_id = fd >= 0 ? id : 0;
    if (send_message(to, m, m.heap_id ? fd : -1) || !m.heap_id) return;
    m.heap_id = 0;
    send_message(to, m);
  };
  for (const Guest& to : guests) {
    if (to.rank < 0) continue;
    pass(to.fd.get(), comm_->rank, own_id, own);
    for (const Guest& from : guests)
      if (from.rank >= 0 && from.rank != to.rank) pass(to.fd.get(), from.rank, from.heap_id, from.heap.get());
  }
}

// Where one is missing, no rank uses any: all have to agree on how each operation is done.
void Rendezvous::take_heap(int rank, uint64_t id, Fd fd) const {
  int own;
  if (!id || fd.get() < 0) comm_->segment->header()->apart.store(1);
  else if (id != heap_id(&own)) comm_->heaps[static_cast<size_t>(rank)] = PeerHeap::open(id, fd.take());
}

void Rendezvous::send_failure(const std::vector<Guest>& guests, const Error& error) const {
  Message m;
  m.kind = Kind::Failed;
  m.error_kind = error.kind == collHostErrorInterrupted || error.kind == collHostErrorAborted ? collHostErrorRemote : error.kind;
  if (m.error_kind != static_cast<int>(error.kind)) {
    snprintf(m.text, sizeof m.text, "rank %d stopped while the ranks were meeting: %s", named(comm_->rank), error.text.c_str());
    set_bit(m.ranks, named(comm_->rank));
  } else {
    snprintf(m.text, sizeof m.text, "%s", error.text.c_str());
    for (int r : error.peers)
      if (r >= 0 && r < kMaxRanks) set_bit(m.ranks, r);
  }
  for (const Guest& g : guests) send_message(g.fd.get(), m);
}

// Report a failure to the ranks that come after it, `expected` of them, for a short while: a rank
// that finds no listener would wait in vain.
void Rendezvous::reject_late_ranks(int listener, int expected, const Error& error) const {
  bool wait = error.kind != collHostErrorTimeout && error.kind != collHostErrorInterrupted && error.kind != collHostErrorAborted;
  int64_t until = now_ns() + (wait ? kLinger : 0);
  while (true) {
    struct pollfd p = {listener, POLLIN, 0};
    int64_t left_ms = expected > 0 ? std::max<int64_t>((until - now_ns()) / 1000000, 0) : 0;
    if (poll(&p, 1, static_cast<int>(left_ms)) <= 0) return;
    std::vector<Guest> guests(1);
    guests[0].fd = Fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    uid_t user;
    if (guests[0].fd.get() < 0) return;
    if (!same_user(guests[0].fd.get(), &user)) continue;
    send_failure(guests, error);
    --expected;
  }
}

// Rank 0.
bool Rendezvous::serve(Error* error) {
  struct sockaddr_un address;
  socklen_t length = address_of(id_, &address);
  Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listener.get() < 0) {
    *error = make_error(collHostErrorSystem, std::string("no socket: ") + strerror(errno));
    return false;
  }
  if (bind(listener.get(), reinterpret_cast<struct sockaddr*>(&address), length) != 0) {
    // There is a rank 0 already: connect to it, which reports the error to this rank and to all
    // others.
    if (errno == EADDRINUSE) return join(error);
    *error = make_error(collHostErrorSystem, std::string("bind: ") + strerror(errno));
    return false;
  }
  if (listen(listener.get(), 4096) != 0) {
    *error = make_error(collHostErrorSystem, std::string("listen: ") + strerror(errno));
    return false;
  }

  std::vector<Guest> guests;
  Fd segment_fd;
  Message arrived;
  arrived.kind = Kind::Arrived;
  set_bit(arrived.ranks, comm_->rank);
  int came = 1, mapped = 1;
  bool news = false;
  bool watchable = true;  // false: some ranks have a process namespace of their own, where numbers mean nothing to others
  comm_->pids.assign(static_cast<size_t>(comm_->size), 0);
  comm_->pids[static_cast<size_t>(comm_->rank)] = getpid();

  auto give_up = [&](const Error& e) {
    *error = e;
    send_failure(guests, e);
    guests.clear();  // their descriptors may be needed to report it to the others
    // Those of a child find the cause in the parent's segment.
    if (!origin_.parent) reject_late_ranks(listener.get(), comm_->size - came, e);
    if (comm_->segment) comm_->segment->release();
    comm_->segment = nullptr;
    return false;
  };

  while (true) {
    if (came == comm_->size && !comm_->segment) {
      int fd = -1;
      Error e;
      comm_->segment = Segment::create(comm_->size, &fd, &e);
      if (!comm_->segment) return give_up(e);
      segment_fd = Fd(fd);
      for (int r = 0; r < comm_->size; ++r) comm_->segment->rank(r)->pid = watchable ? comm_->pids[static_cast<size_t>(r)] : 0;
      Message m;
      m.kind = Kind::Segment;
      m.segment_id = comm_->segment->header()->segment_id;
      for (Guest& g : guests)
        if (g.rank >= 0) send_message(g.fd.get(), m, fd);
      pass_on_heaps(guests);
      for (Guest& g : guests)
        if (g.rank >= 0 && comm_->size <= kSharingRanks) take_heap(g.rank, g.heap_id, std::move(g.heap));
    }
    if (mapped == comm_->size && comm_->segment) {
      Message m;
      m.kind = Kind::Go;
      for (Guest& g : guests) send_message(g.fd.get(), m);
      return true;
    }
    if (news) {
      for (Guest& g : guests)
        if (g.rank >= 0) send_message(g.fd.get(), arrived);
      news = false;
    }
    std::vector<struct pollfd> polls = {{listener.get(), POLLIN, 0}};
    for (Guest& g : guests) polls.push_back({g.fd.get(), POLLIN, 0});
    int64_t left_ms = (deadline_ - now_ns()) / 1000000;
    if (left_ms <= 0) {
      std::vector<int> missing = absent(arrived.ranks);
      for (const Guest& g : guests)
        if (came == comm_->size && !g.mapped) missing.push_back(named(g.rank));
      return give_up(too_late(missing));
    }
    int ready = poll(polls.data(), polls.size(), static_cast<int>(std::min<int64_t>(left_ms, 100)));
    Error stop;
    if (ready <= 0 && stopped(&stop)) return give_up(stop);

    std::vector<size_t> gone;
    for (size_t i = 0; i < guests.size(); ++i) {
      if (!polls[i + 1].revents) continue;
      Guest& g = guests[i];
      Message m;
      Fd descriptor;
      int got = receive_message(g.fd.get(), &m, &descriptor);
      if (got == 0) continue;
      if (got < 0) {
        if (g.rank < 0) {
          gone.push_back(i);
          continue;
        }
        Error e = make_error(collHostErrorRemote, format("rank %d (process %d) died while the ranks were meeting",
                                                         named(g.rank), comm_->pids[static_cast<size_t>(g.rank)]));
        e.peers = {named(g.rank)};
        return give_up(e);
      }
      if (m.kind == Kind::Hello && g.rank < 0) {
        if (memcmp(m.secret, id_.secret, sizeof m.secret) != 0) {
          gone.push_back(i);
          continue;
        }
        Error e = refuse(m, guests);
        if (e) return give_up(e);
        g.rank = m.rank;
        g.heap_id = m.heap_id;
        g.heap = std::move(descriptor);
        comm_->pids[static_cast<size_t>(m.rank)] = m.pid;
        if (g.process != m.pid) watchable = false;
        set_bit(arrived.ranks, m.rank);
        ++came;
        news = true;
      } else if (m.kind == Kind::Mapped && g.rank >= 0 && !g.mapped) {
        g.mapped = true;
        ++mapped;
      } else if (m.kind == Kind::GaveUp) {
        if (m.error_kind == collHostErrorTimeout) return give_up(too_late(absent(arrived.ranks)));
        Error e = make_error(collHostErrorRemote, m.text);
        e.peers = ranks_in(m.ranks);
        return give_up(e);
      }
    }
    for (size_t i = gone.size(); i-- > 0;) guests.erase(guests.begin() + static_cast<long>(gone[i]));
    if (polls[0].revents) {
      Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      uid_t user;
      pid_t process;
      if (fd.get() < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
        return give_up(make_error(collHostErrorSystem, std::string("accept: ") + strerror(errno)));
      if (fd.get() >= 0 && same_user(fd.get(), &user, &process)) {
        struct timeval patience = {1, 0};  // with a rank that says hello and then reads nothing
        setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
        guests.emplace_back();
        guests.back().process = process;
        guests.back().fd = std::move(fd);
      }  // another user's process is turned away by closing
    }
  }
}

bool Rendezvous::connect_to_server(Fd* fd, Error* error) const {
  struct sockaddr_un address;
  socklen_t length = address_of(id_, &address);
  int64_t nap_ns = 200 * 1000;
  for (;;) {
    *fd = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd->get() < 0) {
      *error = make_error(collHostErrorSystem, std::string("no socket: ") + strerror(errno));
      return false;
    }
    if (connect(fd->get(), reinterpret_cast<struct sockaddr*>(&address), length) == 0) break;
    if (errno != ECONNREFUSED && errno != EINTR && errno != EAGAIN) {
      *error = make_error(collHostErrorSystem, std::string("connect: ") + strerror(errno));
      return false;
    }
    if (now_ns() > deadline_) {
      *error = too_late({named(0)});
      return false;
    }
    if (stopped(error)) return false;
    struct timespec nap = {0, nap_ns};
    nanosleep(&nap, nullptr);
    nap_ns = std::min<int64_t>(nap_ns * 2, 20 * 1000 * 1000);
  }
  uid_t user = 0;
  if (same_user(fd->get(), &user)) return true;
  *error = make_error(collHostErrorSystem, format("the ranks of this id belong to user %u, this process to user %u", user,
                                                  geteuid()));
  error->peers = {named(0)};
  return false;
}

// Every other rank.
bool Rendezvous::join(Error* error) {
  Fd fd;
  if (!connect_to_server(&fd, error)) return false;
  say_hello(fd.get());
  bool answered = false;
  int heaps = 0;
  Message arrived;
  set_bit(arrived.ranks, 0);
  set_bit(arrived.ranks, comm_->rank);

  auto give_up = [&](const Error& e) {
    Message m;
    m.kind = Kind::GaveUp;
    m.error_kind = e.kind;
    if (e.kind == collHostErrorRemote) {  // the others need what this rank has seen, not that it gave up
      snprintf(m.text, sizeof m.text, "%s", e.text.c_str());
      for (int r : e.peers) set_bit(m.ranks, r);
    } else {
      snprintf(m.text, sizeof m.text, "rank %d stopped while the ranks were meeting: %s", named(comm_->rank), e.text.c_str());
      set_bit(m.ranks, named(comm_->rank));
    }
    send_message(fd.get(), m);
    *error = e;
    if (comm_->segment) {
      comm_->publish_state(kFailed, &e);  // rank 0 may have sent the others on in this very moment
      comm_->segment->release();
    }
    comm_->segment = nullptr;
    return false;
  };

  for (;;) {
    struct pollfd p = {fd.get(), POLLIN, 0};
    // Where all have come rank 0 knows who is late, and is about to say so.
    std::vector<int> missing = absent(arrived.ranks);
    int64_t left_ms = (deadline_ + (missing.empty() ? kLinger / 4 : 0) - now_ns()) / 1000000;
    if (left_ms <= 0) return give_up(too_late(missing.empty() ? std::vector<int>{named(0)} : missing));
    int ready = poll(&p, 1, static_cast<int>(std::min<int64_t>(left_ms, 100)));
    Error stop;
    if (ready <= 0) {
      if (stopped(&stop)) return give_up(stop);
      continue;
    }
    Message m;
    Fd descriptor;
    int got = receive_message(fd.get(), &m, &descriptor);
    if (got == 0) continue;
    if (got < 0 && !answered) {
      // Nobody took the connection: it went to a listener that was just closing, of an earlier
      // rendezvous by this name.
      if (!connect_to_server(&fd, error)) return false;
      say_hello(fd.get());
      continue;
    }
    answered = true;
    if (got < 0) {
      Error e;
      if (a_member_failed(&e)) return give_up(e);
      e = make_error(collHostErrorRemote, format("rank %d died while the ranks were meeting, or turned this process away", named(0)));
      e.peers = {named(0)};
      return give_up(e);
    }
    if (m.kind == Kind::Arrived) {
      memcpy(arrived.ranks, m.ranks, sizeof arrived.ranks);
    } else if (m.kind == Kind::Failed) {
      Error e = make_error(static_cast<collHostErrorKind_t>(m.error_kind), m.text);
      e.peers = ranks_in(m.ranks);
      return give_up(e);
    } else if (m.kind == Kind::Segment) {
      Error e;
      comm_->segment = Segment::attach(descriptor.take(), m.segment_id, comm_->size, &e);
      if (!comm_->segment) return give_up(e);
    } else if (m.kind == Kind::Heap && comm_->segment && m.rank >= 0 && m.rank < comm_->size) {
      take_heap(m.rank, m.heap_id, std::move(descriptor));
      ++heaps;
    } else if (m.kind == Kind::Go) {
      return true;
    }
    bool all = heaps == comm_->size - 1 || comm_->size > kSharingRanks;
    if (all && comm_->segment && (m.kind == Kind::Segment || m.kind == Kind::Heap)) {
      Message done;
      done.kind = Kind::Mapped;
      send_message(fd.get(), done);
    }
  }
}

}  // namespace

void make_id(Id* id) {
  memset(id, 0, sizeof *id);
  memcpy(id->magic, "COLLHOST", 8);
  random_bytes(id->name, sizeof id->name);
  random_bytes(id->secret, sizeof id->secret);
}

Id derive_id(const uint64_t secret[4], const void* label, size_t nbytes) {
  Id id;
  memset(&id, 0, sizeof id);
  memcpy(id.magic, "COLLHOST", 8);
  for (uint64_t i = 0; i < 6; ++i) {
    uint64_t key[2] = {secret[i % 2] + i, secret[2 + i % 2] ^ (i << 56)};
    (i < 2 ? id.name[i] : id.secret[i - 2]) = siphash(key, label, nbytes);
  }
  return id;
}

bool bootstrap(ncclComm* comm, const Id& id, uint64_t options, const char* what, const Origin& origin, Error* error) {
  memcpy(comm->secret, id.secret, sizeof comm->secret);
  comm->heaps.resize(static_cast<size_t>(comm->size));
  Rendezvous rendezvous(comm, id, options, what, origin);
  bool complete = comm->rank == 0 ? rendezvous.serve(error) : rendezvous.join(error);
  if (!complete) {
    error->rank = origin.parent ? origin.parent->rank : comm->rank;
    if (origin.parent) publish_child_failure(*origin.parent, origin.kind, origin.number, *error);
    return false;
  }
  comm->cores = available_cores();
  comm->spin = comm->size <= comm->cores;
  comm->segment->place_slots(comm->rank);
  comm->pids.resize(static_cast<size_t>(comm->size));
  comm->pidfds.resize(static_cast<size_t>(comm->size));
  for (int r = 0; r < comm->size; ++r) {
    comm->pids[static_cast<size_t>(r)] = comm->segment->rank(r)->pid;
    comm->pidfds[static_cast<size_t>(r)] = process_watch(comm->segment->rank(r)->pid);
  }
  return true;
}

void set_init_timeout(int64_t ms) { g_init_timeout_ms.store(ms > 0 ? ms : INT64_MAX / 4000000); }

}  // namespace coll
