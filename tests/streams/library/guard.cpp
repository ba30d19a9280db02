// The device guard and the hooks of a CUDA device that isn't there: streams and events are numbers, and each record, wait and
// host wait is reported.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdlib>

#include "simulated.h"

namespace simulated {
namespace {
constexpr int kMostDevices = 16;
std::atomic<Callback> callback{nullptr};
std::atomic<bool> of_python{true};  // whether the call back runs Python
std::atomic<int64_t> streams{0x1000}, events{1};
thread_local int device = 0;
thread_local std::array<int64_t, kMostDevices> current{};
int devices = 4;

// An error of Python's that is on its way while memory is freed: the call back must not find it.
struct PendingError {
  template <typename F> static F python(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name)); }
  void *type = nullptr, *value = nullptr, *trace = nullptr;
  int lock;
  PendingError() {
    static auto ensure = python<int (*)()>("PyGILState_Ensure");
    static auto fetch = python<void (*)(void**, void**, void**)>("PyErr_Fetch");
    lock = ensure();
    fetch(&type, &value, &trace);
  }
  ~PendingError() {
    static auto restore = python<void (*)(void*, void*, void*)>("PyErr_Restore");
    static auto release = python<void (*)(int)>("PyGILState_Release");
    restore(type, value, trace);
    release(lock);
  }
};

void permitted(int64_t answer, const char* what) {
  TORCH_CHECK(answer != -1, "CUDA error: operation not permitted when stream is capturing (", what, ")");
  TORCH_CHECK(answer != -2, "called a synchronizing CUDA operation (", what, ")");
}
void set_device(int index) {
  TORCH_CHECK(0 <= index && index < devices, "CUDA error: invalid device ordinal ", index);
  device = index;
  report(kSetDevice, index);
}
}  // namespace

int64_t report(Kind kind, int64_t a, int64_t b, int64_t c, const char* text, const Access* accesses, int64_t count) {
  Callback function = callback.load(std::memory_order_relaxed);
  if (!function) return 0;
  if (!of_python.load(std::memory_order_relaxed)) return function(kind, a, b, c, text, accesses, count);
  PendingError error;
  return function(kind, a, b, c, text, accesses, count);
}
int device_count() { return devices; }
int current_device() { return device; }
int64_t current_stream(int index) { return current[index < 0 ? device : index]; }

namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device of(int index) { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)); }
  static int index_of(c10::Device d) { return d.has_index() ? d.index() : device; }
  static c10::Stream stream(int index, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, of(index), id); }

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    int old = device;
    if (index_of(d) != old) set_device(index_of(d));
    return of(old);
  }
  c10::Device getDevice() const override { return of(device); }
  void setDevice(c10::Device d) const override { if (index_of(d) != device) set_device(index_of(d)); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { device = index_of(d); }
  c10::Stream getStream(c10::Device d) const noexcept override { return stream(index_of(d), current[index_of(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index_of(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return stream(index_of(d), streams++); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(index_of(d), streams++); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    int64_t old = current[s.device_index()];
    current[s.device_index()] = s.id();
    return stream(s.device_index(), old);
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) report(kDestroyEvent, reinterpret_cast<int64_t>(event));
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(events++);
    report(kRecord, key_of(s), reinterpret_cast<int64_t>(*event));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) permitted(report(kBlock, key_of(s), reinterpret_cast<int64_t>(event)), "a stream waits for an event");
  }
  bool queryEvent(void* event) const override {
    int64_t answer = event ? report(kQueryEvent, reinterpret_cast<int64_t>(event)) : 1;
    permitted(answer, "cudaEventQuery");
    return answer;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }
  bool queryStream(const c10::Stream& s) const override {
    int64_t answer = report(kQueryStream, key_of(s));
    permitted(answer, "cudaStreamQuery");
    return answer;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    permitted(report(kSyncStream, key_of(s)), "cudaStreamSynchronize");
  }
  void synchronizeEvent(void* event) const override {
    if (event) permitted(report(kSyncEvent, reinterpret_cast<int64_t>(event)), "cudaEventSynchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    permitted(report(kSyncDevice, index < 0 ? device : index), "cudaDeviceSynchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    if (data.get()) report(kRecordStream, reinterpret_cast<int64_t>(data.get()), key_of(s));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};
c10::impl::DeviceGuardImplRegistrar registered(c10::kCUDA, new Guard());

struct CUDAHooks : at::CUDAHooksInterface {  // the registry looks for this very name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(devices); }
  int getNumGPUs() const override { return devices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device); }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(device); }
  void setCurrentDevice(c10::DeviceIndex index) const override { if (index != device) set_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return swap(index); }
  // A device without a context isn't set in CUDA, only noted for the thread's next call.
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    auto old = static_cast<c10::DeviceIndex>(device);
    if (index >= 0) device = index;
    return old;
  }
  static c10::DeviceIndex swap(c10::DeviceIndex index) {
    auto old = static_cast<c10::DeviceIndex>(device);
    if (index >= 0 && index != device) set_device(index);
    return old;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Device getDeviceFromPtr(void* data) const override {
    int index = device_of_address(data);
    TORCH_CHECK(index >= 0, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return Guard::of(index);
  }
  void deviceSynchronize(c10::DeviceIndex index) const override { permitted(report(kSyncDevice, index), "cudaDeviceSynchronize"); }
};

struct NoTimer : c10d::Timer {  // DDP's reducer wants one for its device
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 0; }
};
}  // namespace
}  // namespace simulated

namespace c10d { C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simulated::NoTimer) }
using at::CUDAHooksArgs; using at::CUDAHooksRegistry; using at::RegistererCUDAHooksRegistry; using simulated::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void simulated_set_callback(simulated::Callback function) { simulated::callback = function; }
// A call back of C, which needs no lock of Python's.
EXPORTED void simulated_set_native_callback(simulated::Callback function) {
  simulated::of_python = false;
  simulated::callback = function;
}
EXPORTED void simulated_set_device_count(int count) { simulated::devices = count; }
EXPORTED int simulated_device_count() { return simulated::devices; }
EXPORTED int simulated_current_device() { return simulated::device; }
EXPORTED void simulated_aim_at_device(int index) { simulated::device = index; }  // which makes no context
EXPORTED void simulated_set_device(int index) { if (index != simulated::device) simulated::set_device(index); }
EXPORTED int64_t simulated_current_stream(int index) { return simulated::current_stream(index); }
EXPORTED void simulated_set_current_stream(int index, int64_t id) { simulated::current[index] = id; }
