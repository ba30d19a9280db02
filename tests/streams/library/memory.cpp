// The memory of the simulated GPU: host memory whose allocation, stream of origin and end are reported; and pinned memory.
#include <c10/core/StorageImpl.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "simulated.h"

namespace simulated {
namespace {
struct Block { int64_t nbytes; int device; void (*release)(void*, ssize_t, int, void*) = nullptr; };
std::mutex lock;
std::map<uintptr_t, Block>& blocks() { static auto* all = new std::map<uintptr_t, Block>(); return *all; }
std::map<uintptr_t, Block>& pinned() { static auto* all = new std::map<uintptr_t, Block>(); return *all; }
std::atomic<int64_t> pins{0};

const Block* find(std::map<uintptr_t, Block>& in, const void* address) {  // with the lock held
  auto at = reinterpret_cast<uintptr_t>(address);
  auto next = in.upper_bound(at);
  if (next == in.begin()) return nullptr;
  --next;
  return at < next->first + next->second.nbytes ? &next->second : nullptr;
}
void put(std::map<uintptr_t, Block>& in, void* address, Block block) {
  std::lock_guard<std::mutex> held(lock);
  in[reinterpret_cast<uintptr_t>(address)] = block;
}
void take(std::map<uintptr_t, Block>& from, void* address) {
  std::lock_guard<std::mutex> held(lock);
  from.erase(reinterpret_cast<uintptr_t>(address));
}
void* aligned(size_t nbytes) {
  void* address = nullptr;
  TORCH_CHECK(posix_memalign(&address, 512, nbytes) == 0, "CUDA out of memory: ", nbytes, " bytes");
  std::memset(address, 0xff, nbytes);  // NaN: what reads it before it is written shows
  return address;
}
// The pool of this thread's allocations: the functions of a CUDAPluggableAllocator, or none.
struct Pool { void* (*allocate)(ssize_t, int, void*); void (*release)(void*, ssize_t, int, void*); };
thread_local Pool pool{};

void give_back(void* address) {
  Block block{};
  {
    std::lock_guard<std::mutex> held(lock);
    if (const Block* found = find(blocks(), address)) block = *found;
  }
  take(blocks(), address);
  if (block.release) {
    block.release(address, block.nbytes, block.device, nullptr);
  } else {
    std::free(address);
  }
}
void free_device(void* address) {
  if (report(kFree, reinterpret_cast<int64_t>(address)) != 1) give_back(address);  // else a graph keeps it
}
void free_pinned(void* address) {
  report(kUnpin, reinterpret_cast<int64_t>(address));
  take(pinned(), address);
  --pins;
  std::free(address);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int index = current_device();
    c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    if (!nbytes) return {nullptr, nullptr, &free_device, device};
    void* address = pool.allocate ? pool.allocate(static_cast<ssize_t>(nbytes), index, nullptr) : aligned(nbytes);
    TORCH_CHECK(address, "CUDA out of memory: ", nbytes, " bytes of a pool");
    if (pool.allocate) std::memset(address, 0xff, nbytes);
    put(blocks(), address, {static_cast<int64_t>(nbytes), index, pool.release});
    report(kAllocate, reinterpret_cast<int64_t>(address), static_cast<int64_t>(nbytes), key_of(index, current_stream(index)));
    return {address, address, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    void* address = aligned(nbytes);
    ++pins;
    put(pinned(), address, {static_cast<int64_t>(nbytes), -1});
    report(kPin, reinterpret_cast<int64_t>(address), static_cast<int64_t>(nbytes));
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
DeviceAllocator device_memory;
PinnedAllocator pinned_memory;
struct Registered { Registered() { c10::SetAllocator(c10::kCUDA, &device_memory, 100); } } allocator_registered;
}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }
bool any_pinned() { return pins.load(std::memory_order_relaxed) > 0; }
bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> held(lock);
  return find(pinned(), address) != nullptr;
}
int device_of_address(const void* address) {
  std::lock_guard<std::mutex> held(lock);
  const Block* block = find(blocks(), address);
  return block ? block->device : -1;
}
}  // namespace simulated

#define EXPORTED extern "C" __attribute__((visibility("default")))
// Memory of ncclMemAlloc: the caller has it, and frees it.
EXPORTED void simulated_add_memory(void* address, int64_t nbytes, int device) {
  simulated::put(simulated::blocks(), address, {nbytes, device});
}
EXPORTED void simulated_remove_memory(void* address) { simulated::take(simulated::blocks(), address); }
// Has this thread's tensors allocated by these functions; NULL: no more. In torch the pool's segments outlive its tensors.
EXPORTED void simulated_use_pool(void* allocate, void* release) {
  simulated::pool = {reinterpret_cast<void* (*)(ssize_t, int, void*)>(allocate),
                     reinterpret_cast<void (*)(void*, ssize_t, int, void*)>(release)};
}
// Memory that a graph has kept.
EXPORTED void simulated_release(void* address) { simulated::give_back(address); }
// torch.UntypedStorage.resize_ of a CPU build knows no CUDA.
EXPORTED void simulated_resize_storage(int64_t storage, int64_t nbytes) {
  auto* impl = reinterpret_cast<c10::StorageImpl*>(storage);
  auto data = simulated::device_memory.allocate(static_cast<size_t>(nbytes));
  size_t kept = std::min<size_t>(impl->nbytes(), static_cast<size_t>(nbytes));
  if (kept) std::memcpy(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(static_cast<size_t>(nbytes));
}
