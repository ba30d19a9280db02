// Dispatch to one instruction set's kernels, whose tiles are divided over threads.
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "coll/host_kernels.h"
#include "error.h"
#include "pool.h"
#include "system.h"

namespace {

// Bytes of the largest cache up to a level, as the kernel reports it; 0 if it doesn't. sysconf is
// not asked: in virtual machines it returns ten times that.
int64_t cache_bytes(int up_to_level) {
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    auto read = [index](const char* what, long long* number, char* unit) {
      char path[64];
      snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, what);
      FILE* file = fopen(path, "re");
      if (!file) return 0;
      int fields = fscanf(file, "%lld%c", number, unit);
      fclose(file);
      return fields;
    };
    long long level = 0, size = 0;
    char unit = 0, none;
    if (read("level", &level, &none) < 1) break;
    if (level > up_to_level || read("size", &size, &unit) < 1) continue;
    size *= unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : 1;
    largest = std::max<int64_t>(largest, size);
  }
  return largest;
}

int64_t last_level_cache() {
  int64_t nbytes = cache_bytes(8);
  return nbytes > 0 ? nbytes : 32 << 20;
}

}  // namespace

int64_t coll_stream_from = last_level_cache() / 4 * 3;

namespace coll {
namespace {

struct KernelEntry {
  size_t args_size = 0;  // 0: there is no such kernel
  coll_tiles_fn run = nullptr;
};

struct InstructionSet {
  const char* name;
  coll_reduce_n_fn reduce_n;
  coll_copy_past_fn copy_past;
  KernelEntry kernels[collKernelCount] = {};
};

#define COLL_ENTRY(Kernel, kernel, Args, ISA) set.kernels[collKernel##Kernel] = {sizeof(Args), coll_host_##kernel##_##ISA};
#define COLL_INSTRUCTION_SET(ISA)                       \
  []() {                                                \
    InstructionSet set{#ISA, coll_reduce_n_##ISA, coll_copy_past_##ISA}; \
    COLL_HOST_KERNELS(COLL_ENTRY, ISA)                  \
    return set;                                         \
  }()
const InstructionSet kBaseline = COLL_INSTRUCTION_SET(baseline);
#if defined(COLL_HAVE_X86_ISA)
const InstructionSet kAvx2 = COLL_INSTRUCTION_SET(avx2);
const InstructionSet kAvx512 = COLL_INSTRUCTION_SET(avx512);
#endif

// Those that this processor has; each one wider than those before it.
std::vector<const InstructionSet*> sets_here() {
  std::vector<const InstructionSet*> sets = {&kBaseline};
#if defined(COLL_HAVE_X86_ISA)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    sets.push_back(&kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      sets.push_back(&kAvx512);
    }
  }
#endif
  return sets;
}

std::atomic<const InstructionSet*> g_set{nullptr};

const InstructionSet* named_set(const char* name) {
  const InstructionSet* found = nullptr;
  for (const InstructionSet* set : sets_here()) {
    if (!name || !*name || strcmp(name, set->name) == 0) found = set;
  }
  return found;
}

// Before anything has chosen: the widest. A wrong COLLECTIVES_ISA is reported where the set is
// chosen, not here.
const InstructionSet& current_set() {
  const InstructionSet* set = g_set.load(std::memory_order_relaxed);
  return set ? *set : *named_set(nullptr);
}

// Tiles of one part: enough to be worth the counter, few enough that a thread whose core is taken
// away holds little back.
constexpr int64_t kPartTiles = 32;
// From here on a kernel is shared out: 4 MiB of fp32, which one thread takes a quarter of a
// millisecond or more to move.
constexpr int64_t kBigTiles = 256;

struct Run {
  coll_tiles_fn kernel;
  const void* args;
  int64_t tiles;
};

void do_part(void* context, int64_t part) {
  const Run& run = *static_cast<const Run*>(context);
  [[maybe_unused]] ExactArithmetic exact;
  run.kernel(run.args, part * kPartTiles, std::min((part + 1) * kPartTiles, run.tiles));
}

}  // namespace

std::string choose_kernels() {
  const char* name = getenv("COLLECTIVES_ISA");
  if (const InstructionSet* set = named_set(name)) {
    g_set.store(set, std::memory_order_relaxed);
    return "";
  }
  std::string there;
  for (const InstructionSet* set : sets_here()) there += there.empty() ? set->name : std::string(", ") + set->name;
  return format("COLLECTIVES_ISA=%s: this machine has %s", name, there.c_str());
}

coll_reduce_n_fn reduce_kernel() { return current_set().reduce_n; }

coll_copy_past_fn copy_past_kernel() { return current_set().copy_past; }

void cast(void* to, int to_type, const void* from, int from_type, size_t count, double scale) {
  if (!count) return;
  [[maybe_unused]] ExactArithmetic exact;
  coll_tensor tensor = {const_cast<void*>(from), static_cast<int64_t>(count), 0, 0, from_type, 0};
  coll_cast_args args{};
  args.work.tiles = static_cast<int64_t>((count + COLL_TILE - 1) / COLL_TILE);
  args.tensors = &tensor;
  args.count = 1;
  args.flat = to;
  args.flat_type = to_type;
  args.scale = scale;
  current_set().kernels[collKernelCast].run(&args, 0, args.work.tiles);
}

// Set when the library is loaded, as all that takes long to find: a static of a function, which another
// thread is setting when a process forks, is locked in the child for ever.
const int64_t g_second_level_cache = cache_bytes(2);

size_t second_level_cache() {
  return g_second_level_cache > 0 ? static_cast<size_t>(g_second_level_cache) : 512 << 10;
}

// On AMD a quarter of the last level's cache, which at most 16 threads share. Elsewhere twice the
// second level's cache, 4 MiB at least: the last level is shared with cores that nobody sees here
// (of other virtual machines), and its size says little.
size_t past_caches_from() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("amd")) return std::max<size_t>(last_level_cache() / 4, 4 << 20);
#endif
  return std::max<size_t>(2 * second_level_cache(), 4 << 20);
}

const size_t g_past_caches_from = past_caches_from();

bool past_caches(size_t nbytes) {
  return nbytes >= g_past_caches_from;
}

}  // namespace coll

using namespace coll;

int collKernelRun(int kernel, const void* args, size_t nbytes, int threads) try {
  if (nbytes == 0 || nbytes != collKernelArgsSize(kernel)) return 1;
  Run run = {current_set().kernels[kernel].run, args, static_cast<const coll_work*>(args)->tiles};
  if (run.tiles < kBigTiles) threads = 1;
  if (threads < 0) threads = std::min(-threads, 1 + idle_cores());
  if (threads > 1) {
    pool_run(threads, (run.tiles + kPartTiles - 1) / kPartTiles, do_part, &run);
  } else {
    [[maybe_unused]] ExactArithmetic exact;
    run.kernel(args, 0, run.tiles);
  }
  return 0;
} catch (...) {
  return 2;
}

size_t collKernelArgsSize(int kernel) {
  return kernel < 0 || kernel >= collKernelCount ? 0 : kBaseline.kernels[kernel].args_size;
}

const char* collKernelIsa(const char* name) try {
  if (!name) return choose_kernels().empty() ? current_set().name : nullptr;
  const InstructionSet* set = *name ? named_set(name) : nullptr;
  if (set) g_set.store(set, std::memory_order_relaxed);
  return set ? set->name : nullptr;
} catch (...) {
  return nullptr;
}
