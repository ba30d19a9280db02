// Runs a kernel's blocks one after the other, and a block's threads in turn from barrier to barrier, each on a stack of its own.
//
// What a GPU would not forgive ends the run with an error: a barrier that not all threads of a block reach, an address that is
// not aligned to its type, an array index out of bounds, a conversion or a shift whose result C++ leaves open, a wild pointer,
// a kernel that doesn't end.
#include <fenv.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

#include <vector>

#include "prelude.h"

shim_index threadIdx, blockIdx, blockDim, gridDim;

// The bounds of the section, by the linker; not there where a text has no shared memory.
extern "C" {
extern char __start_shim_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_shim_shared[] __attribute__((weak, visibility("hidden")));
}

namespace {

constexpr size_t kStack = 128 << 10;  // bytes
constexpr unsigned kWarp = 32;

enum State { kReady, kAtBarrier, kAtShuffle, kDone };

struct Fiber {
  jmp_buf at;
  ucontext_t start;
  char* stack = nullptr;
  bool begun = false;  // its stack is in use, and `at` says where
  State state = kReady;
  const char* where = "";
  int line = 0;
  unsigned shuffles = 0;
  uint64_t slots[2] = {};  // values given to the last two shuffles
};

std::vector<Fiber> g_fibers;
Fiber* g_fiber = nullptr;  // the one that runs
jmp_buf g_home;            // the scheduler
void (*g_kernel)(const void*) = nullptr;
const void* g_args = nullptr;
bool g_failed = false;
char g_error[512];
pthread_t g_thread;
uint64_t g_random = 1;

uint64_t random_bits() {
  g_random ^= g_random << 13;
  g_random ^= g_random >> 7;
  g_random ^= g_random << 17;
  return g_random;
}

// Ends the run. Fibers that are under way are never gone back to.
[[noreturn]] void fail(const char* text, ...) {
  va_list list;
  va_start(list, text);
  int used = snprintf(g_error, sizeof g_error, "block %u of %u, thread %u of %u: ", blockIdx.x, gridDim.x, threadIdx.x,
                      blockDim.x);
  vsnprintf(g_error + used, sizeof g_error - used, text, list);
  va_end(list);
  g_failed = true;
  _longjmp(g_home, 1);
}

void leave() {
  if (_setjmp(g_fiber->at) == 0) _longjmp(g_home, 1);
}

void fiber_main() {
  for (;;) {
    g_kernel(g_args);
    g_fiber->state = kDone;
    leave();
  }
}

void resume(unsigned thread) {
  g_fiber = &g_fibers[thread];
  threadIdx = {thread, 0, 0};
  if (_setjmp(g_home) == 0) {
    if (g_fiber->begun) _longjmp(g_fiber->at, 1);
    g_fiber->begun = true;
    setcontext(&g_fiber->start);
  }
}

void prepare(unsigned threads) {
  if (g_fibers.size() < threads) g_fibers.resize(threads);
  for (Fiber& fiber : g_fibers) {
    if (!fiber.stack) {
      void* map = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (map == MAP_FAILED) abort();
      fiber.stack = static_cast<char*>(map);
      mprotect(map, 4096, PROT_NONE);
    }
    if (!fiber.begun) {
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack;
      fiber.start.uc_stack.ss_size = kStack;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, fiber_main, 0);
    }
  }
}

enum Order { kForward = 0, kReverse = 1, kShuffled = 2 };

void arrange(std::vector<unsigned>& turns, int order) {
  unsigned n = (unsigned)turns.size();
  for (unsigned i = 0; i < n; ++i) turns[i] = order == kReverse ? n - 1 - i : i;
  if (order == kShuffled) {
    for (unsigned i = n; i > 1; --i) {
      unsigned j = (unsigned)(random_bits() % i), other = turns[j];
      turns[j] = turns[i - 1];
      turns[i - 1] = other;
    }
  }
}

// Let go those that wait together: a warp in one shuffle, or else the block in one barrier. False: none waits.
bool release(unsigned threads) {
  bool any = false;
  for (unsigned first = 0; first < threads; first += kWarp) {
    unsigned last = first + kWarp < threads ? first + kWarp : threads;
    unsigned here = 0;
    for (unsigned t = first; t < last; ++t) here += g_fibers[t].state == kAtShuffle && g_fibers[t].where == g_fibers[first].where;
    if (here < last - first) continue;
    for (unsigned t = first; t < last; ++t) g_fibers[t].state = kReady;
    any = true;
  }
  if (any) return true;
  unsigned waits = threads;
  for (unsigned t = 0; t < threads; ++t) {
    if (g_fibers[t].state != kDone) waits = t;
  }
  if (waits == threads) return false;
  const Fiber& one = g_fibers[waits];
  const char* what = one.state == kAtShuffle ? "shuffle" : "barrier";
  bool all = one.state == kAtBarrier;
  for (unsigned t = 0; t < threads; ++t) {
    const Fiber& other = g_fibers[t];
    threadIdx.x = waits;
    if (other.state == kDone) {
      all = false;
      if (one.state == kAtShuffle && t / kWarp != waits / kWarp) continue;
      fail("a %s (%s, line %d) that thread %u never reaches: it has ended", what, one.where, one.line, t);
    }
    if (other.state != one.state || other.line != one.line || other.where != one.where) {
      fail("a %s (%s, line %d) while thread %u is in another one (%s, line %d)", what, one.where, one.line, t, other.where,
           other.line);
    }
  }
  if (!all) fail("a %s (%s, line %d) that nothing ends", what, one.where, one.line);
  for (unsigned t = 0; t < threads; ++t) g_fibers[t].state = kReady;
  return true;
}

void run_block(unsigned threads, int order, std::vector<unsigned>& turns) {
  for (char* p = __start_shim_shared; p < __stop_shim_shared; ++p) *p = (char)(0x80 | random_bits() >> 32);
  for (unsigned t = 0; t < threads; ++t) {
    g_fibers[t].state = kReady;
    g_fibers[t].shuffles = 0;
  }
  do {
    arrange(turns, order);
    for (unsigned t : turns) {
      if (g_fibers[t].state != kReady) continue;
      resume(t);
      if (g_failed) return;
    }
    if (_setjmp(g_home) != 0) return;  // where release fails
  } while (release(threads));
}

void on_signal(int number, siginfo_t* info, void*) {
  if (!pthread_equal(pthread_self(), g_thread)) {
    if (number == SIGVTALRM) pthread_kill(g_thread, number);
    else signal(number, SIG_DFL);
    return;
  }
  if (number == SIGVTALRM) fail("the kernel did not end in time");
  fail("illegal access to address %p", info->si_addr);
}

}  // namespace

void shim_barrier(const char* where, int line) {
  g_fiber->state = kAtBarrier;
  g_fiber->where = where;
  g_fiber->line = line;
  leave();
}

unsigned shim_lane() { return threadIdx.x % kWarp; }

uint64_t shim_exchange(uint64_t bits, unsigned lane, const char* where) {
  unsigned first = threadIdx.x - shim_lane();
  if (lane >= kWarp) fail("%s with a mask that is not all lanes", where);
  unsigned slot = g_fiber->shuffles++ % 2;
  g_fiber->slots[slot] = bits;
  g_fiber->state = kAtShuffle;
  g_fiber->where = where;
  g_fiber->line = 0;
  leave();
  if (first + lane >= blockDim.x) fail("%s reads lane %u, which this block doesn't have", where, lane);
  return g_fibers[first + lane].slots[slot];
}

#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))

// sizeof a kernel's arguments; 0: there is no such kernel.
SHIM_EXPORT size_t shim_args(const char* name) {
  for (const shim_kernel* k = shim_kernels; k->name; ++k) {
    if (strcmp(k->name, name) == 0) return k->nbytes;
  }
  return 0;
}

// NULL, or what went wrong. limit_ms: of processor time.
SHIM_EXPORT const char* shim_run(const char* name, const void* args, unsigned grid, unsigned block, int order, uint64_t seed,
                                 int limit_ms) {
  g_kernel = nullptr;
  for (const shim_kernel* k = shim_kernels; k->name; ++k) {
    if (strcmp(k->name, name) == 0) g_kernel = k->run;
  }
  if (!g_kernel || block == 0 || grid == 0) return "no such kernel, or nothing to run";
  g_args = args;
  g_failed = false;
  g_random = seed * 2 + 1;
  g_thread = pthread_self();
  prepare(block);
  gridDim = {grid, 1, 1};
  blockDim = {block, 1, 1};
  static const int kSignals[] = {SIGVTALRM, SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction before[4], ours = {};
  ours.sa_sigaction = on_signal;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &ours, &before[i]);
  itimerval limit = {{0, 0}, {limit_ms / 1000, limit_ms % 1000 * 1000}}, none = {};
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  fenv_t rounding;
  fegetenv(&rounding);
  fesetenv(FE_DFL_ENV);  // torch may flush subnormals
  std::vector<unsigned> turns(block), blocks(grid);
  arrange(blocks, order);
  for (unsigned b : blocks) {
    blockIdx = {b, 0, 0};
    run_block(block, order, turns);
    if (g_failed) break;
  }
  setitimer(ITIMER_VIRTUAL, &none, nullptr);
  fesetenv(&rounding);
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &before[i], nullptr);
  if (!g_failed) return nullptr;
  for (Fiber& fiber : g_fibers) fiber.begun = false;
  return g_error;
}

// ---- What code compiled with -fsanitize=alignment,bounds,... calls (GCC's and LLVM's common runtime interface).
namespace {
struct Place {
  const char* file;
  unsigned line, column;
};
struct TypeMismatch {
  Place place;
  const void* type;
  unsigned char log_alignment, kind;
};
}  // namespace

extern "C" {
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
  unsigned alignment = 1u << data->log_alignment;
  if (address == 0) fail("a NULL pointer is used, line %u", data->place.line);
  fail("address %p is not aligned to %u bytes, line %u", (void*)address, alignment, data->place.line);
}
void __ubsan_handle_out_of_bounds(Place* place, uintptr_t index) {
  fail("index %lld is out of its array's bounds, line %u", (long long)index, place->line);
}
void __ubsan_handle_shift_out_of_bounds(Place* place, uintptr_t, uintptr_t) { fail("shifted too far, line %u", place->line); }
void __ubsan_handle_divrem_overflow(Place* place, uintptr_t, uintptr_t) { fail("division by 0, line %u", place->line); }
void __ubsan_handle_float_cast_overflow(Place* place, uintptr_t) {
  fail("a floating-point number is out of its integer type's range, line %u", place->line);
}
}
