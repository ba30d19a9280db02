// Functions of Linux: random bytes, clocks, futexes, processes, fork.
#pragma once

#include <stdint.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <mutex>

namespace coll {

uint64_t random_u64();
void random_bytes(void* out, size_t nbytes);
int64_t now_ns();  // monotonic

// Keyed 64-bit hash (SipHash-2-4, Aumasson and Bernstein 2012): names that can't be guessed without
// the key.
uint64_t siphash(const uint64_t key[2], const void* data, size_t nbytes);

// Sleep while *word == expected, until woken or timeout_ns has passed (< 0: no limit). Works
// between processes.
void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns);
void futex_wake(std::atomic<uint32_t>* word, int sleepers = 1);

int available_cores();  // of this thread's affinity mask
int idle_cores();       // of the processor, at this moment; 0 if unknown

// pid 0: not known, so never seen to end.
// A descriptor that becomes readable when the process ends, shared by all communicators of this
// process; -1 when there can't be one. Give back with process_release.
int process_watch(int pid);
void process_release(int pid);
bool process_ended(int pid, int pidfd);
// Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped the process.
bool process_stopped(int pid);

// Guards the tables of this process (allocations, segments, processes) and is held across fork.
std::mutex& tables_lock();
// Guards the order in which operations get their place (see order.h), held across fork as well.
std::mutex& order_lock();
// Counts the forks between the process that loaded the library and this one.
int fork_generation();

// The caller's interrupt check (collHostSetInterruptCheck): true when the wait is to end.
bool interrupted();
void set_interrupt_check(int (*check)(void));

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The program may have set this thread's processor to take subnormals for zero, or to round another
// way than to nearest; then its ranks would not get the same sums.
class ExactArithmetic {
 public:
#if defined(__SSE2__)
  ExactArithmetic() : before_(_mm_getcsr()) {
    if (before_ & kOther) _mm_setcsr(before_ & ~kOther);
  }
  ~ExactArithmetic() {
    if (before_ & kOther) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kOther = 0xe040;  // flush to zero, denormals are zero, the rounding mode
  unsigned before_;
#elif defined(__aarch64__)
  ExactArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_) : : "memory");
    if (before_ & kOther) asm volatile("msr fpcr, %0" : : "r"(before_ & ~kOther) : "memory");
  }
  ~ExactArithmetic() {
    if (before_ & kOther) asm volatile("msr fpcr, %0" : : "r"(before_) : "memory");
  }

 private:
  static constexpr uint64_t kOther = 3 << 22 | 1 << 24 | 1 << 19 | 1;  // the rounding mode, FZ, FZ16, FIZ
  uint64_t before_;
#else
  ExactArithmetic() {}
  ~ExactArithmetic() {}  // so that no compiler warns of an unused object
#endif
  ExactArithmetic(const ExactArithmetic&) = delete;
};

}  // namespace coll
