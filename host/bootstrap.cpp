// Bootstrap of a communicator: its ranks find each other and map one shared segment.
//
// Rank 0 listens on an abstract Unix socket whose name comes from the id; nothing of it is in a
// file system. The kernel reports to each side the other's user (SO_PEERCRED): only processes of
// one user are accepted, and each side has the other one prove that it knows the id's secret and
// the job's (admission.h). When all ranks have come, rank 0 makes the
// segment and passes its descriptor to them, and each rank's file of shared memory (heap.h) to all
// others. Every error is sent to all ranks that have come, with the ranks that it is about; a rank
// that waits knows at any time who has arrived.
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "admission.h"
#include "bootstrap.h"
#include "handshake.h"
#include "heap.h"
#include "peer_memory.h"
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
    if (timeout_ns <= 0) return;
    limit_ms_ = timeout_ns / 1000000;
    deadline_ = origin.began_ns + timeout_ns;
  }

  bool serve(Error* error);
  bool join(Error* error);

 private:
  bool join_server(Fd fd, Error* error);

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

  Error too_late(const std::vector<int>& missing, const Strangers& strangers = {}) const {
    std::string text = format("%s of %d ranks: %s did not come within %.1f s%s", what_, comm_->size, rank_list(missing).c_str(),
                              static_cast<double>(limit_ms_) / 1e3, strangers.text().c_str());
    if (origin_.parent) return timeout_error(*origin_.parent, text, missing);
    Error error = make_error(collHostErrorTimeout, text);
    error.peers = missing;
    return error;
  }

  void send_join(int fd) const {
    Message m;
    m.kind = Kind::Join;
    int heap = -1;
    if (comm_->size <= kSharingRanks) m.heap_id = heap_id(&heap);  // rank 0 has no use for more, and may have room for no more
    m.rank = comm_->rank;
    m.nranks = comm_->size;
    m.pid = getpid();
    m.options = options_;
    send_message(fd, m, heap);
  }

  void pass_on_heaps(const std::vector<Guest>& guests) const;
  void take_heap(int rank, uint64_t id, Fd fd) const;

  Error refuse(const Message& m, const std::vector<Guest>& guests) const;
  void send_failure(const std::vector<Guest>& guests, const Error& error) const;
  void reject_late_ranks(Admission* admission, int expected, const Error& error) const;
};

// Why a rank that joins can't take part, or no error.
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
void Rendezvous::reject_late_ranks(Admission* admission, int expected, const Error& error) const {
  bool wait = error.kind != collHostErrorTimeout && error.kind != collHostErrorInterrupted && error.kind != collHostErrorAborted;
  int64_t now = now_ns(), until = now + (wait ? kLinger : 0), of_pending = now + kLinger / 10;
  while (true) {
    std::vector<struct pollfd> polls;
    admission->watch(&polls);
    int64_t left = (admission->is_pending() ? std::max(until, of_pending) : until) - now_ns();
    int64_t left_ms = expected > 0 ? std::max<int64_t>(left / 1000000, 0) : 0;
    std::vector<Admission::Guest> late;
    Error failure;
    if (poll(polls.data(), polls.size(), static_cast<int>(left_ms)) <= 0 || !admission->admit(polls.data(), &late, &failure)) return;
    std::vector<Guest> guests(late.size());
    for (size_t i = 0; i < late.size(); ++i) guests[i].fd = std::move(late[i].fd);
    send_failure(guests, error);
    expected -= static_cast<int>(guests.size());
    if (now_ns() > std::max(until, of_pending)) return;
  }
}

// Rank 0.
bool Rendezvous::serve(Error* error) {
  Admission admission(id_);
  Fd other;
  switch (admission.open([this](Error* e) { return stopped(e); }, &other, error)) {
    case Admission::Opened::Listening: break;
    // The rank 0 that is there reports the error to this rank and to all others.
    case Admission::Opened::Taken: return join_server(std::move(other), error);
    case Admission::Opened::Failed: return false;
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

  // Who has not come or, where all have, who has not mapped the segment.
  auto late = [&] {
    std::vector<int> missing = absent(arrived.ranks);
    for (const Guest& g : guests)
      if (came == comm_->size && !g.mapped) missing.push_back(named(g.rank));
    return missing;
  };

  auto give_up = [&](const Error& e) {
    *error = e;
    send_failure(guests, e);
    guests.clear();  // their descriptors may be needed to report it to the others
    // Those of a child find the cause in the parent's segment.
    if (!origin_.parent) reject_late_ranks(&admission, comm_->size - came, e);
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
      publish_probe(comm_->segment->rank(comm_->rank));
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
    std::vector<struct pollfd> polls;
    for (Guest& g : guests) polls.push_back({g.fd.get(), POLLIN, 0});
    size_t watched = polls.size();
    admission.watch(&polls);
    int64_t left_ms = (deadline_ - now_ns()) / 1000000;
    if (left_ms <= 0) return give_up(too_late(late(), admission.strangers()));
    int ready = poll(polls.data(), polls.size(), static_cast<int>(std::min<int64_t>(left_ms, 100)));
    Error stop;
    if (ready <= 0 && stopped(&stop)) return give_up(stop);

    std::vector<size_t> gone;
    for (size_t i = 0; i < guests.size(); ++i) {
      if (!polls[i].revents) continue;
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
      if (m.kind == Kind::Join && g.rank < 0) {
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
        if (m.error_kind == collHostErrorTimeout) return give_up(too_late(late()));
        Error e = make_error(collHostErrorRemote, m.text);
        e.peers = ranks_in(m.ranks);
        return give_up(e);
      }
    }
    for (size_t i = gone.size(); i-- > 0;) guests.erase(guests.begin() + static_cast<long>(gone[i]));
    std::vector<Admission::Guest> admitted;
    Error failure;
    if (!admission.admit(polls.data() + watched, &admitted, &failure)) return give_up(failure);
    for (Admission::Guest& each : admitted) {
      guests.emplace_back();
      guests.back().process = each.process;
      guests.back().fd = std::move(each.fd);
    }
  }
}

// Every other rank.
bool Rendezvous::join(Error* error) {
  Fd fd;
  Strangers strangers;
  if (find_server(id_, deadline_, [this](Error* e) { return stopped(e); }, &fd, &strangers, error))
    return join_server(std::move(fd), error);
  if (!*error) *error = too_late({named(0)}, strangers);
  return false;
}

// `fd`: a connection to rank 0, which has proven itself.
bool Rendezvous::join_server(Fd fd, Error* error) {
  send_join(fd.get());
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
      bool known = m.error_kind > collHostErrorNone && m.error_kind <= collHostErrorInternal;
      Error e = make_error(known ? static_cast<collHostErrorKind_t>(m.error_kind) : collHostErrorInternal, m.text);
      e.peers = ranks_in(m.ranks);
      return give_up(e);
    } else if (m.kind == Kind::Segment && !comm_->segment) {
      Error e;
      comm_->segment = Segment::attach(descriptor.take(), m.segment_id, comm_->size, &e);
      if (!comm_->segment) return give_up(e);
      publish_probe(comm_->segment->rank(comm_->rank));
    } else if (m.kind == Kind::Heap && comm_->segment && m.rank >= 0 && m.rank < comm_->size &&
               !comm_->heaps[static_cast<size_t>(m.rank)]) {
      take_heap(m.rank, m.heap_id, std::move(descriptor));
      ++heaps;
    } else if (m.kind == Kind::Go && comm_->segment) {
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
