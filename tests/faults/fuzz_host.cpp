// The host engine's bootstrap on mutated messages: fuzz_host TARGET SEED FIRST COUNT
//   message   receive_message: packets of any bytes and length, with any number of descriptors
//   admit     rank 0: connections that say a mutated Hello, or another one's
//   knock     the other ranks: a listener that says a mutated Challenge or Welcome
//   serve     rank 0: a rank that has proven itself and then says anything
//   join      the other ranks: a rank 0 that has proven itself and then says anything
// Prints "inputs read refused"; anything wrong ends the program, with the input's number on stderr.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "admission.h"
#include "bootstrap.h"
#include "handshake.h"
#include "segment.h"
#include "system.h"

using namespace coll;

namespace {

std::atomic<long> g_input{-1};
long g_read = 0, g_refused = 0;

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "input %ld: %s\n", g_input.load(), what);
  _exit(1);
}
#define CHECK(condition) \
  do { if (!(condition)) fail("not true: " #condition); } while (0)

class Draw {
 public:
  Draw(uint64_t seed, uint64_t number) : state_(seed * 0x9e3779b97f4a7c15ull ^ (number + 1) * 0xbf58476d1ce4e5b9ull) {}
  uint64_t word() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  size_t below(size_t n) { return n ? word() % n : 0; }
  bool one_in(size_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

using Bytes = std::vector<uint8_t>;

Bytes bytes_of(const Message& m) {
  const uint8_t* first = reinterpret_cast<const uint8_t*>(&m);
  return Bytes(first, first + sizeof m);
}

Bytes mutate(Draw& draw, Bytes data) {
  static const uint64_t kNumbers[] = {0, 1, 2, 3, 0x7f, 0x80, 0xff, 0x7fff, 0x7fffffff, 0x80000000, 0xffffffff, ~0ull, 1ull << 63};
  for (size_t n = 1 + draw.below(3); n > 0; --n) {
    switch (draw.below(9)) {
      case 0: data.resize(draw.below(data.size() + 1)); break;
      case 1: data.resize(data.size() + draw.below(5000), static_cast<uint8_t>(draw.word())); break;
      case 2: {
        size_t first = draw.below(data.size() + 1), count = draw.below(data.size() - first + 1);
        Bytes part(data.begin() + static_cast<long>(first), data.begin() + static_cast<long>(first + count));
        data.insert(data.end(), part.begin(), part.end());
        break;
      }
      case 3: for (size_t i = draw.below(20); i > 0 && !data.empty(); --i) data[draw.below(data.size())] = static_cast<uint8_t>(draw.word()); break;
      case 4: for (uint8_t& byte : data) byte = static_cast<uint8_t>(draw.word()); break;
      case 5:
      case 6: {  // a field of the head
        size_t at = draw.below(24) * 4, size = draw.one_in(2) ? 4 : 8;
        uint64_t number = draw.one_in(3) ? draw.below(20) : kNumbers[draw.below(sizeof kNumbers / sizeof *kNumbers)];
        if (at + size <= data.size()) memcpy(&data[at], &number, size);
        break;
      }
      default: if (!data.empty()) data[draw.below(data.size())] ^= static_cast<uint8_t>(1 << draw.below(8)); break;
    }
  }
  return data;
}

// Once what is opened once for a process is open, there must be no more.
void check_descriptors() {
  static int inputs = 0, steady = 0;
  int now = 0;
  for (int fd = 0; fd < 256; ++fd) now += fcntl(fd, F_GETFD) >= 0;
  if (++inputs <= 300) steady = std::max(steady, now);
  CHECK(now <= steady);
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

// Send a packet with some descriptors.
bool send_bytes(int fd, const Bytes& data, const std::vector<int>& descriptors = {}) {
  struct iovec part = {const_cast<uint8_t*>(data.data()), data.size()};
  alignas(struct cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  struct msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    size_t nbytes = descriptors.size() * sizeof(int);
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(nbytes);
    struct cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(nbytes);
    memcpy(CMSG_DATA(c), descriptors.data(), nbytes);
  }
  return sendmsg(fd, &header, MSG_NOSIGNAL) >= 0;
}

const int kNull = open("/dev/null", O_RDWR | O_CLOEXEC);

std::vector<int> some_descriptors(Draw& draw) {
  return std::vector<int>(draw.one_in(3) ? 1 + draw.below(4) : 0, kNull);
}

Id make_fixed_id(uint64_t seed, uint64_t number) {
  uint64_t secret[4] = {seed, number, static_cast<uint64_t>(getpid()), 7};
  return derive_id(secret, "fuzz", 4);
}

// As prove() in admission.cpp.
Digest proof_of(const Id& id, const char* role, int address, const Digest& challenge, const Digest& hello) {
  std::string text = format("collectives %s %d ", role, address);
  text.append(reinterpret_cast<const char*>(challenge.data()), challenge.size());
  text.append(reinterpret_cast<const char*>(hello.data()), hello.size());
  Digest key = job_key(&id, sizeof id);
  return hmac_sha256(key.data(), key.size(), text.c_str(), text.size());
}

Fd connect_to(const Id& id) {
  struct sockaddr_un name;
  socklen_t length = address_of(id, 0, &name);
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  CHECK(fd.get() >= 0);
  if (connect(fd.get(), reinterpret_cast<struct sockaddr*>(&name), length) != 0) return Fd();
  return fd;
}

Fd listen_as(const Id& id) {
  struct sockaddr_un name;
  socklen_t length = address_of(id, 0, &name);
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  CHECK(fd.get() >= 0 && bind(fd.get(), reinterpret_cast<struct sockaddr*>(&name), length) == 0 && listen(fd.get(), 64) == 0);
  return fd;
}

// Wait for a message, a moment; what receive_message returns.
int await(int fd, Message* message, Fd* descriptor = nullptr, int ms = 2000) {
  struct pollfd p = {fd, POLLIN, 0};
  if (poll(&p, 1, ms) <= 0) return 0;
  return receive_message(fd, message, descriptor);
}

// ---- Targets, each for one input.

void fuzz_message(Draw& draw) {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  Fd to(ends[0]), from(ends[1]);
  Message m;
  m.kind = static_cast<Kind>(draw.below(12));
  Bytes data = draw.one_in(10) ? bytes_of(m) : mutate(draw, bytes_of(m));
  uint32_t protocol = 0;
  if (data.size() >= sizeof protocol) memcpy(&protocol, data.data(), sizeof protocol);
  bool whole = data.size() == sizeof m && protocol == kProtocol;
  std::vector<int> descriptors = some_descriptors(draw);
  int before = open_descriptors();
  CHECK(send_bytes(to.get(), data, descriptors));
  Message got;
  {
    Fd taken;
    int result = receive_message(from.get(), &got, draw.one_in(2) ? &taken : nullptr);
    CHECK(result == (whole ? 1 : -1));
    CHECK(memchr(got.text, 0, sizeof got.text));
    CHECK(!whole || memcmp(&got, data.data(), sizeof got - 1) == 0);
    CHECK(ranks_in(got.ranks).size() <= static_cast<size_t>(kMaxRanks));
    ++(result > 0 ? g_read : g_refused);
  }
  CHECK(open_descriptors() == before);
}

void fuzz_admit(Draw& draw) {
  static Id id = make_fixed_id(1, 0);
  static Bytes replayed;
  static Admission* admission = [] {
    auto* made = new Admission(id);
    Error error;
    Fd other;
    CHECK(made->open([](Error*) { return false; }, &other, &error) == Admission::Opened::Listening);
    return made;
  }();
  auto turn = [](std::vector<Admission::Guest>* admitted) {
    std::vector<struct pollfd> polls;
    Error error;
    admission->watch(&polls);
    poll(polls.data(), polls.size(), 0);
    CHECK(admission->admit(polls.data(), admitted, &error) && !error);
  };
  int before = open_descriptors();
  std::vector<Admission::Guest> admitted;
  {
    Fd fd = connect_to(id);
    CHECK(fd.get() >= 0);
    turn(&admitted);
    Message challenge, hello;
    CHECK(await(fd.get(), &challenge) == 1 && challenge.kind == Kind::Challenge);
    hello.kind = Kind::Hello;
    random_bytes(hello.nonce.data(), hello.nonce.size());
    hello.proof = proof_of(id, draw.one_in(20) ? "serve" : "join", draw.one_in(20) ? 1 : 0, challenge.nonce, hello.nonce);
    Bytes right = bytes_of(hello), data = right;
    Digest expected = proof_of(id, "join", 0, challenge.nonce, hello.nonce);
    bool valid = hello.proof == expected;
    if (!draw.one_in(10)) data = mutate(draw, data);
    if (draw.one_in(20) && !replayed.empty()) data = replayed;
    // What the proof covers, and the message's form, make it right; other fields aren't looked at.
    Message sent;
    valid = data.size() == sizeof sent;
    if (valid) {
      memcpy(&sent, data.data(), sizeof sent);
      valid = sent.protocol == kProtocol && sent.kind == Kind::Hello &&
              sent.proof == proof_of(id, "join", 0, challenge.nonce, sent.nonce);
    }
    replayed = right;
    send_bytes(fd.get(), data, some_descriptors(draw));
    if (draw.one_in(5)) send_bytes(fd.get(), mutate(draw, data), some_descriptors(draw));
    if (draw.one_in(5)) fd = Fd();
    turn(&admitted);
    CHECK(admitted.size() == (valid ? 1u : 0u));
    ++(valid ? g_read : g_refused);
  }
  admitted.clear();
  turn(&admitted);
  turn(&admitted);
  CHECK(admitted.empty() && !admission->is_pending());
  CHECK(open_descriptors() == before);
}

void fuzz_knock(Draw& draw) {
  Id id = make_fixed_id(2, static_cast<uint64_t>(g_input.load()));
  Fd listener = listen_as(id);
  std::atomic<bool> served{false};
  bool valid = true;
  std::thread server([&] {
    Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Message challenge, hello, welcome;
    random_bytes(challenge.nonce.data(), challenge.nonce.size());
    Bytes data = bytes_of(challenge);
    if (draw.one_in(3)) data = mutate(draw, data);
    Message sent;
    if (data.size() == sizeof sent) memcpy(&sent, data.data(), sizeof sent);
    valid = data.size() == sizeof sent && sent.protocol == kProtocol && sent.kind == Kind::Challenge;
    send_bytes(fd.get(), data, some_descriptors(draw));
    if (valid && await(fd.get(), &hello) == 1) {
      welcome.kind = Kind::Welcome;
      welcome.proof = proof_of(id, draw.one_in(10) ? "join" : "serve", draw.one_in(10) ? 1 : 0, sent.nonce, hello.nonce);
      data = bytes_of(welcome);
      if (!draw.one_in(4)) data = mutate(draw, data);
      Message last;
      if (data.size() == sizeof last) memcpy(&last, data.data(), sizeof last);
      valid = data.size() == sizeof last && last.protocol == kProtocol && last.kind == Kind::Welcome &&
              last.proof == proof_of(id, "serve", 0, sent.nonce, hello.nonce);
      send_bytes(fd.get(), data, some_descriptors(draw));
    } else {
      valid = false;
    }
    listener = Fd();
    served = true;
  });
  Fd fd;
  Strangers strangers;
  Error error;
  bool found = find_server(id, now_ns() + 20000000000, [&](Error*) { return served.load(); }, &fd, &strangers, &error);
  server.join();
  CHECK(found == valid && !error);
  strangers.text();
  ++(found ? g_read : g_refused);
}

ncclUniqueId as_unique(const Id& id) {
  ncclUniqueId unique;
  memcpy(&unique, &id, sizeof unique);
  return unique;
}

// Init as a rank of two, in a thread; every outcome but a success without a communicator is right.
class Starting {
 public:
  Starting(const Id& id, int rank) : thread_([this, id, rank] {
    ncclComm_t comm = nullptr;
    ncclResult_t result = ncclCommInitRank(&comm, 2, as_unique(id), rank);
    CHECK((result == ncclSuccess) == (comm != nullptr));
    if (result != ncclSuccess) CHECK(strlen(ncclGetLastError(nullptr)) > 0);
    if (comm) ncclCommAbort(comm);
    good = result == ncclSuccess;
    done = true;
  }) {}
  ~Starting() {
    thread_.join();
    ++(good ? g_read : g_refused);
  }
  std::atomic<bool> done{false}, good{false};

 private:
  std::thread thread_;
};

// Connect to rank 0 and prove that this process belongs to the job; no descriptor once `until` is.
Fd prove_to(const Id& id, const std::atomic<bool>& until) {
  while (!until) {
    Fd fd = connect_to(id);
    Message challenge, hello, welcome;
    if (fd.get() >= 0 && await(fd.get(), &challenge, nullptr, 50) == 1) {
      hello.kind = Kind::Hello;
      random_bytes(hello.nonce.data(), hello.nonce.size());
      hello.proof = proof_of(id, "join", 0, challenge.nonce, hello.nonce);
      if (send_message(fd.get(), hello) && await(fd.get(), &welcome, nullptr, 200) == 1) return fd;
    }
    usleep(50);
  }
  return Fd();
}

void fuzz_serve(Draw& draw) {
  Id id = make_fixed_id(3, static_cast<uint64_t>(g_input.load()));
  {
    Starting rank0(id, 0);
    Fd fd = prove_to(id, rank0.done);
    Message join;
    join.kind = Kind::Join;
    join.rank = 1;
    join.nranks = 2;
    join.pid = getpid();
    if (draw.one_in(2)) send_bytes(fd.get(), bytes_of(join));
    for (size_t n = 1 + draw.below(3); n > 0 && !rank0.done; --n) {
      Message m = join;
      static const Kind kKinds[] = {Kind::Join, Kind::Mapped, Kind::GaveUp, Kind::Go, Kind::Failed, Kind::Heap};
      m.kind = kKinds[draw.below(6)];
      for (char& c : m.text) c = static_cast<char>(draw.one_in(2) ? 'x' : draw.word());
      for (uint8_t& byte : m.ranks) byte = static_cast<uint8_t>(draw.one_in(4) ? draw.word() : 0);
      m.error_kind = static_cast<int>(draw.below(14));
      send_bytes(fd.get(), draw.one_in(4) ? bytes_of(m) : mutate(draw, bytes_of(m)), some_descriptors(draw));
    }
    if (draw.one_in(2)) usleep(static_cast<useconds_t>(draw.below(300)));
    fd = Fd();
    // Rank 0 waits for others until one of them gives up.
    while (!rank0.done) {
      Fd other = prove_to(id, rank0.done);
      join.kind = Kind::GaveUp;
      if (other.get() >= 0) send_message(other.get(), join);
      if (other.get() >= 0) await(other.get(), &join, nullptr, 50);
    }
  }
  check_descriptors();
}

// A file with a segment's head, right or with another word, and no pages behind it.
int make_segment(Draw& draw) {
  static uint64_t head[512];
  static const bool kOnce = [] {
    Error error;
    int fd;
    Segment* segment = Segment::create(2, &fd, &error);
    CHECK(segment && pread(fd, head, sizeof head, 0) == sizeof head);
    segment->release();
    close(fd);
    return true;
  }();
  (void)kOnce;
  uint64_t words[512];
  memcpy(words, head, sizeof words);
  if (draw.one_in(2)) words[draw.below(9)] = draw.one_in(2) ? draw.word() : draw.below(1 << 22);
  int fd = memfd_create("segment", MFD_CLOEXEC);
  off_t nbytes = static_cast<off_t>(draw.one_in(8) ? draw.below(1 << 22) : head[2]);
  CHECK(fd >= 0 && pwrite(fd, words, sizeof words, 0) == sizeof words && ftruncate(fd, nbytes) == 0);
  return fd;
}

void fuzz_join(Draw& draw) {
  Id id = make_fixed_id(4, static_cast<uint64_t>(g_input.load()));
  Fd listener = listen_as(id);
  Starting rank1(id, 1);
  Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  Message challenge, hello, welcome, join;
  send_message(fd.get(), challenge);
  CHECK(await(fd.get(), &hello) == 1);
  welcome.kind = Kind::Welcome;
  welcome.proof = proof_of(id, "serve", 0, challenge.nonce, hello.nonce);
  send_message(fd.get(), welcome);
  CHECK(await(fd.get(), &join) == 1 && join.kind == Kind::Join);
  int memory = -1;
  static const Kind kRight[] = {Kind::Arrived, Kind::Segment, Kind::Heap, Kind::Go};
  bool ordered = draw.one_in(3);
  for (size_t n = 0, count = ordered ? 4 : 1 + draw.below(5); n < count; ++n) {
    Message m;
    static const Kind kKinds[] = {Kind::Arrived, Kind::Segment, Kind::Heap, Kind::Failed, Kind::Go, Kind::Segment};
    m.kind = ordered ? kRight[n] : kKinds[draw.below(6)];
    m.error_kind = static_cast<int>(draw.below(14));
    m.heap_id = draw.below(3);
    std::vector<int> descriptors = some_descriptors(draw);
    if (m.kind == Kind::Segment && (ordered || draw.one_in(3)) && memory < 0) {  // one whose head is wrong, or right
      memory = make_segment(draw);
      m.segment_id = draw.word();
      descriptors = {memory};
    }
    if (m.kind == Kind::Failed)
      for (char& c : m.text) c = static_cast<char>(draw.one_in(2) ? 'x' : draw.word());
    send_bytes(fd.get(), draw.one_in(ordered ? 8 : 2) ? mutate(draw, bytes_of(m)) : bytes_of(m), descriptors);
  }
  fd = Fd();
  listener = Fd();
  while (!rank1.done) usleep(50);
  if (memory >= 0) close(memory);
  check_descriptors();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  std::string target = argv[1];
  uint64_t seed = strtoull(argv[2], nullptr, 10);
  long first = atol(argv[3]), count = atol(argv[4]);
  set_init_timeout(20000);
  signal(SIGPIPE, SIG_IGN);
  auto* run = target == "message" ? fuzz_message : target == "admit" ? fuzz_admit : target == "knock" ? fuzz_knock
              : target == "serve" ? fuzz_serve : target == "join" ? fuzz_join : nullptr;
  if (!run) return 2;
  std::atomic<bool> over{false};
  std::thread guard([&] {  // an input that takes more than five seconds
    long last = -1;
    for (int ticks = 0; !over; usleep(100000)) {
      ticks = g_input == last ? ticks + 1 : 0;
      last = g_input;
      if (ticks > 50) fail("took more than 5 s");
    }
  });
  for (long number = first; number < first + count; ++number) {
    g_input = number;
    Draw draw(seed, static_cast<uint64_t>(number));
    run(draw);
  }
  over = true;
  guard.join();
  printf("%ld %ld %ld\n", count, g_read, g_refused);
  return 0;
}
