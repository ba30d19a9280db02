// Every operation on tensors of the simulated GPU: carried out by the CPU's kernel on the same memory, and reported with its stream
// and what it reads and writes.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "simulated.h"

namespace simulated {
namespace {
using c10::IValue;
using Stack = torch::jit::Stack;

thread_local int inside = 0;  // how many operations of the simulation this thread is in
struct Inside { Inside() { ++inside; } ~Inside() { --inside; } };

// Operations that on CUDA end with a copy of a size or a value to the host.
const std::unordered_set<std::string>& waiting() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::equal",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::is_nonzero", "aten::bincount", "aten::_assert_async",
      "aten::repeat_interleave", "aten::linalg_eig", "aten::histc"};
  return *names;
}
// Operations in which CPU tensors may stand beside CUDA tensors.
const std::unordered_set<std::string>& mixed() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_copy_", "aten::_copy_from"};
  return *names;
}

// A CUDA tensor over a storage, with the sizes of another tensor. `base`: the tensor that it is a view of.
at::Tensor cuda_tensor(c10::Storage storage, const at::Tensor& like, const at::Tensor* base) {
  const bool view = base != nullptr;
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  auto made = view ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), base->key_set(), like.dtype())
                   : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->set_storage_offset(view ? like.storage_offset() : 0);
  if (like.is_neg()) impl->_set_neg(true);
  if (like.is_conj()) impl->_set_conj(true);
  return made;
}

int64_t extent(const at::Tensor& t) {  // bytes from the first to behind the last element
  if (!t.numel()) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return (last + 1) * static_cast<int64_t>(t.element_size());
}

void add_access(std::vector<Access>& accesses, const at::Tensor& t, bool writes, int device) {
  int64_t bytes = extent(t);
  if (!bytes || !t.unsafeGetTensorImpl()->has_storage()) return;
  auto base = reinterpret_cast<int64_t>(t.storage().data());
  if (!base) return;
  Access access{};
  access.low = base + t.storage_offset() * static_cast<int64_t>(t.element_size());
  access.high = access.low + bytes;
  access.writes = writes;
  access.dtype = static_cast<int>(t.scalar_type());
  access.dims = static_cast<int>(t.dim());
  access.device = device;
  for (int d = 0; d < 4 && d < t.dim(); ++d) access.sizes[d] = t.size(d);
  accesses.push_back(access);
}

// A pointer that keeps another storage, and with it the memory.
c10::DataPtr holding(void* data, const c10::Storage& storage) {
  auto* held = new c10::Storage(storage);
  return {data, held, [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::Device(c10::kCPU)};
}

// The CPU tensors that stand for the CUDA tensors of one call.
struct Aliases {
  bool outlive_call = false;  // whether they hold the memory: a collective of torch's goes on in a thread
  struct Pair { at::Tensor cuda, cpu; bool writes; };
  std::vector<Pair> pairs;
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_cpu;
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_cuda;

  at::Tensor of(const at::Tensor& t, bool writes) {
    for (auto& pair : pairs) {
      if (pair.cuda.is_same(t)) { pair.writes |= writes; return pair.cpu; }
    }
    auto* impl = t.storage().unsafeGetStorageImpl();
    auto found = to_cpu.find(impl);
    if (found == to_cpu.end()) {
      void* data = impl->mutable_data();
      c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
          outlive_call ? holding(data, t.storage()) : c10::DataPtr(data, c10::Device(c10::kCPU)),
          c10::GetAllocator(c10::kCPU), true));
      to_cuda.emplace(storage.unsafeGetStorageImpl(), t.storage());
      found = to_cpu.emplace(impl, storage).first;
    }
    auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), keys, t.dtype());
    auto* to = made.unsafeGetTensorImpl();
    to->set_sizes_and_strides(t.sizes(), t.strides());
    to->set_storage_offset(t.storage_offset());
    if (t.is_neg()) to->_set_neg(true);
    if (t.is_conj()) to->_set_conj(true);
    pairs.push_back({t, made, writes});
    return made;
  }

  // What an operation changed of its own arguments: sizes, and the storage's length.
  void write_back() {
    for (auto& [cpu_impl, storage] : to_cuda) {
      auto* impl = storage.unsafeGetStorageImpl();
      if (cpu_impl->data() == impl->data() && cpu_impl->nbytes() == impl->nbytes()) continue;
      auto data = device_allocator()->allocate(cpu_impl->nbytes());
      if (cpu_impl->nbytes()) std::memcpy(data.get(), cpu_impl->data(), cpu_impl->nbytes());
      impl->set_data_ptr_noswap(std::move(data));
      impl->set_nbytes(cpu_impl->nbytes());
    }
    for (auto& pair : pairs) {
      if (pair.cuda.sizes() == pair.cpu.sizes() && pair.cuda.strides() == pair.cpu.strides() &&
          pair.cuda.storage_offset() == pair.cpu.storage_offset())
        continue;
      auto* impl = pair.cuda.unsafeGetTensorImpl();
      impl->set_sizes_and_strides(pair.cpu.sizes(), pair.cpu.strides());
      impl->set_storage_offset(pair.cpu.storage_offset());
    }
  }
};

template <typename F>
IValue mapped(const IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isList()) {
    auto list = value.toList();
    auto kind = list.elementType()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::OptionalType && kind != c10::TypeKind::ListType) return value;
    c10::impl::GenericList made(list.elementType());
    made.reserve(list.size());
    for (const IValue& each : list.vec()) made.push_back(mapped(each, f));
    return made;
  }
  return value;
}

// ---- Calls that a CUDA graph holds.
struct Captured {
  c10::OperatorHandle op;
  Stack arguments;                     // of CPU tensors
  std::vector<at::Tensor> results;     // CUDA tensors that take the call's new results
};
std::mutex captured_lock;
std::unordered_map<int64_t, Captured>& captured() { static auto* all = new std::unordered_map<int64_t, Captured>(); return *all; }
int64_t captured_count = 0;

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

std::vector<at::Tensor> new_results(const Stack& stack, const std::unordered_set<c10::TensorImpl*>& known) {
  std::vector<at::Tensor> found;
  for (const auto& value : stack) {
    mapped(value, [&](const at::Tensor& t) { if (!known.count(t.unsafeGetTensorImpl())) found.push_back(t); return t; });
  }
  return found;
}

void operation(const c10::OperatorHandle& op, Stack* stack) {
  Inside guard;
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  const bool is_collective = schema.name().rfind("c10d::", 0) == 0;
  Aliases aliases;
  aliases.outlive_call = is_collective;
  std::vector<at::Tensor> hosts;  // CPU tensors among the arguments
  std::vector<bool> host_writes;
  int device = -1;
  bool is_view = false, blocking = true;
  for (const auto& each : schema.returns()) is_view |= each.alias_info() && !each.alias_info()->isWrite();
  Stack arguments;
  for (size_t i = 0; i < n; ++i) {
    const auto& about = schema.arguments()[i];
    const bool writes = (about.alias_info() && about.alias_info()->isWrite()) || is_collective;
    const IValue& value = (*stack)[first + i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (device < 0) device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
      arguments.push_back(c10::Device(c10::kCPU));
      continue;
    }
    if (about.name() == "non_blocking" && value.isBool()) blocking = !value.toBool();
    if (about.name() == "pin_memory") { arguments.push_back(IValue()); continue; }
    arguments.push_back(mapped(value, [&](const at::Tensor& t) -> at::Tensor {
      if (!t.is_cuda()) { hosts.push_back(t); host_writes.push_back(writes); return t; }
      if (device < 0) device = t.device().index();
      TORCH_CHECK(t.device().index() == device || mixed().count(schema.name()),
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and ",
                  t.device(), "! (", schema.name(), ")");
      return aliases.of(t, writes);
    }));
  }
  if (device < 0) device = current_device();
  c10::DeviceGuard on(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));

  // What is accessed, and what the host waits for.
  std::vector<Access> accesses;
  bool waits = waiting().count(schema.name()) != 0, pageable = false;
  for (auto& pair : aliases.pairs) add_access(accesses, pair.cuda, pair.writes, pair.cuda.device().index());
  for (size_t i = 0; i < hosts.size(); ++i) {
    const auto& t = hosts[i];
    if (!t.is_cpu() || !t.unsafeGetTensorImpl()->has_storage()) continue;
    const bool moves = mixed().count(schema.name()) != 0;
    TORCH_CHECK(moves || t.dim() == 0 || is_collective || aliases.pairs.empty(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and cpu! (",
                schema.name(), ")");
    if (!moves || !t.numel()) continue;
    const bool pins = is_pinned(t.storage().data());
    if (pins && !blocking) {
      add_access(accesses, t, host_writes[i], -1);
    } else {
      waits = true;
      pageable |= !pins;
    }
  }
  const bool works = !is_view && (waits || !accesses.empty());
  int64_t answer = 0;
  if (works) {
    answer = report(kOperation, key_of(device, current_stream(device)), waits, pageable, schema.name().c_str(), accesses.data(),
                    static_cast<int64_t>(accesses.size()));
    TORCH_CHECK(answer != -1, "CUDA error: operation not permitted when stream is capturing (", schema.name(), ")");
    TORCH_CHECK(answer != -2, "called a synchronizing CUDA operation (", schema.name(), ")");
  }

  Stack results = arguments;
  run_on_cpu(op, &results);
  aliases.write_back();

  std::unordered_set<c10::TensorImpl*> known;
  for (auto& pair : aliases.pairs) known.insert(pair.cpu.unsafeGetTensorImpl());
  for (auto& t : hosts) known.insert(t.unsafeGetTensorImpl());
  std::vector<Access> made;
  std::vector<at::Tensor> fresh;
  torch::jit::drop(*stack, n);
  for (auto& value : results) {
    stack->push_back(mapped(value, [&](const at::Tensor& t) -> at::Tensor {
      for (auto& pair : aliases.pairs) if (pair.cpu.is_same(t)) return pair.cuda;
      for (auto& host : hosts) if (host.is_same(t)) return t;
      if (!t.is_cpu()) return t;
      if (!t.unsafeGetTensorImpl()->has_storage()) return t;
      auto found = aliases.to_cuda.find(t.storage().unsafeGetStorageImpl());
      if (found != aliases.to_cuda.end()) {
        for (auto& pair : aliases.pairs)
          if (pair.cpu.storage().unsafeGetStorageImpl() == found->first) return cuda_tensor(found->second, t, &pair.cuda);
      }
      const auto bytes = static_cast<size_t>(extent(t));
      c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), bytes, device_allocator()->allocate(bytes), device_allocator(), true));
      if (bytes) {
        std::memcpy(storage.mutable_data(),
                    static_cast<const char*>(t.storage().data()) + t.storage_offset() * static_cast<int64_t>(t.element_size()), bytes);
      }
      auto out = cuda_tensor(std::move(storage), t, nullptr);
      add_access(made, out, true, device);
      fresh.push_back(out);
      return out;
    }));
  }
  if (!made.empty()) {
    // The same operation again, for what it has made: its inputs were reported before it ran.
    report(kOperation, key_of(device, current_stream(device)), 0, kMade, schema.name().c_str(), made.data(), static_cast<int64_t>(made.size()));
  }
  if (answer == 1) {
    int64_t number;
    {
      std::lock_guard<std::mutex> held(captured_lock);
      number = captured_count++;
      captured().emplace(number, Captured{op, arguments, fresh});
    }
    report(kCaptured, number);
  }
}

// ---- Operations that need more than the CPU's kernel.
at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}
void record_stream(at::Tensor& self, at::Stream stream) {
  if (self.numel() && self.storage().data())
    report(kRecordStream, reinterpret_cast<int64_t>(self.storage().data()), key_of(stream));
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  impl->set_storage_offset(offset.expect_int());
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sym_sizes(), other.sym_strides());
}
at::Tensor& set_none(at::Tensor& self) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true));
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({0});
  return self;
}
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // the one in plain operations
}

// ---- The host's own use of pinned memory.
std::unique_ptr<at::ObserverContext> on_host(const at::RecordFunction& call) {
  if (inside || !any_pinned()) return nullptr;
  auto schema = call.operator_schema();
  if (!schema) return nullptr;
  for (const auto& each : schema->returns()) {
    if (each.alias_info() && !each.alias_info()->isWrite()) return nullptr;  // a view
  }
  std::vector<Access> accesses;
  bool cuda = false;
  auto inputs = call.inputs();
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); ++i) {
    const auto* alias = schema->arguments()[i].alias_info();
    const bool writes = alias && alias->isWrite();
    mapped(inputs[i], [&](const at::Tensor& t) {
      cuda |= t.is_cuda();
      if (t.is_cpu() && t.layout() == at::kStrided && t.unsafeGetTensorImpl()->has_storage() && t.numel() && is_pinned(t.storage().data()))
        add_access(accesses, t, writes, -1);
      return t;
    });
  }
  static const std::unordered_set<std::string> harmless{"aten::is_pinned", "aten::set_", "aten::detach", "aten::resize_", "aten::_pin_memory"};
  if (!accesses.empty() && !cuda && !harmless.count(schema->name()))
    report(kHost, 0, 0, 0, schema->name().c_str(), accesses.data(), static_cast<int64_t>(accesses.size()));
  return nullptr;
}
}  // namespace
}  // namespace simulated

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::operation>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(simulated::empty));
  m.impl("empty_strided", TORCH_FN(simulated::empty_strided));
  m.impl("record_stream", TORCH_FN(simulated::record_stream));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(simulated::set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(simulated::set_tensor));
  m.impl("set_", TORCH_FN(simulated::set_none));
  m.impl("_fused_sdp_choice", TORCH_FN(simulated::sdp_choice));
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&simulated::operation>());
}

#define EXPORTED extern "C" __attribute__((visibility("default")))
// torch's own collectives on CUDA tensors, as DDP uses them over Gloo: carried out as the CPU's.
EXPORTED void simulated_take_c10d() {
  struct Silent : c10::WarningHandler { void process(const c10::Warning&) override {} } silent;  // they are registered already
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static auto* library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name : {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_",
                           "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
                           "_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_",
                           "alltoall_", "alltoall_base_", "barrier"})
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&simulated::operation>());
}
// An operation that has a kernel of its own on CUDA, and is made of others on the CPU: from now on it is one.
EXPORTED void simulated_take(const char* name) {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl(name, torch::CppFunction::makeFromBoxedFunction<&simulated::operation>());
}
EXPORTED void simulated_watch_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&simulated::on_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
// Runs a captured call again.
EXPORTED int simulated_replay(int64_t number) {
  using namespace simulated;
  Inside guard;
  Captured* call;
  {
    std::lock_guard<std::mutex> held(captured_lock);
    auto found = captured().find(number);
    if (found == captured().end()) return 1;
    call = &found->second;
  }
  c10::InferenceMode plain(false);
  Stack results = call->arguments;
  std::unordered_set<c10::TensorImpl*> known;
  for (const auto& value : results) mapped(value, [&](const at::Tensor& t) { known.insert(t.unsafeGetTensorImpl()); return t; });
  run_on_cpu(call->op, &results);
  auto fresh = new_results(results, known);
  for (size_t i = 0; i < fresh.size() && i < call->results.size(); ++i) {
    const auto& t = fresh[i];
    std::memcpy(call->results[i].storage().mutable_data(),
                static_cast<const char*>(t.storage().data()) + t.storage_offset() * static_cast<int64_t>(t.element_size()),
                static_cast<size_t>(extent(t)));
  }
  return 0;
}
EXPORTED void simulated_forget(int64_t number) {
  std::unique_ptr<simulated::Captured> gone;
  {
    std::lock_guard<std::mutex> held(simulated::captured_lock);
    auto found = simulated::captured().find(number);
    if (found == simulated::captured().end()) return;
    gone = std::make_unique<simulated::Captured>(std::move(found->second));
    simulated::captured().erase(found);
  }
}
