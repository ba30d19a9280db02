"""The one place where torch.cuda's names are mapped to the simulated GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types

import torch

from . import device, graphs
from .checker import checker, site

CUDA = 1  # c10::DeviceType::CUDA
priorities: dict[int, int] = {}  # of the streams that were made with another one than 0, by number


class Stream(torch.Stream):
    """torch.cuda.Stream"""

    def __new__(cls, device=None, priority=0, **kwargs):
        if kwargs.get("stream_ptr"):  # of 0 torch makes a new stream, too
            return super().__new__(cls, stream_id=kwargs["stream_ptr"], device_index=_index(device), device_type=CUDA)
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        made = super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)
        if priority:
            priorities[made.stream_id] = priority
        return made

    @property
    def priority(self) -> int:
        return priorities.get(self.stream_id, 0)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def _as_parameter_(self):
        return ctypes.c_void_p(self.cuda_stream)

    def wait_event(self, event) -> None:
        event.wait(self)

    def wait_stream(self, stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """torch.cuda.ExternalStream: the simulated streams' addresses are their numbers."""

    def __new__(cls, stream_ptr, device=None, **kwargs):
        return super().__new__(cls, device=device, stream_ptr=stream_ptr)


class Event(torch.Event):
    """torch.cuda.Event"""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream=None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream=None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end_event) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1.0

    @property
    def cuda_event(self) -> int:
        return self.event_id


class Graph:
    """torch._C._CUDAGraph"""

    def __new__(cls, keep_graph=False):
        self = object.__new__(cls)
        self._capture = self._pool = None
        return self

    def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False) -> None:
        stream = torch.cuda.current_stream()
        if not stream.cuda_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = pool or (0, id(self))
        self._capture = graphs.begin(_key(stream))

    def capture_end(self) -> None:
        wrong = graphs.end(self._capture)
        if wrong:
            raise RuntimeError("; ".join(wrong))

    def instantiate(self) -> None:
        pass

    def replay(self) -> None:
        if self._capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        graphs.replay(self._capture, _key(torch.cuda.current_stream()))

    def reset(self) -> None:
        if self._capture is not None:
            capture, self._capture = self._capture, None
            graphs.forget(capture)

    def pool(self):
        return self._pool

    def __del__(self):
        self.reset()


class PluggableAllocator:
    """torch.cuda.memory.CUDAPluggableAllocator"""

    def __init__(self, path_to_so_file, alloc_fn_name, free_fn_name):
        library = ctypes.CDLL(path_to_so_file)
        names = alloc_fn_name, free_fn_name
        self.functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]

    def allocator(self):
        return self


class MemPool:
    """torch.cuda.MemPool: each tensor is a segment, which is freed with it."""

    def __init__(self, allocator=None, use_on_oom=False, no_split=False):
        self.functions = allocator.functions


@contextlib.contextmanager
def use_mem_pool(pool, *_):
    """torch.cuda.use_mem_pool"""
    device.library.simulated_use_pool(*pool.functions)
    try:
        yield
    finally:
        device.library.simulated_use_pool(None, None)


def _index(given) -> int:
    if isinstance(given, int):
        return given
    given = torch.device("cuda") if given is None else torch.device(given)
    return given.index if given.index is not None else device.library.simulated_current_device()


def _key(stream) -> int:
    return (stream.device_index << 40) | stream.stream_id


def _exchange(index: int) -> int:
    old = device.library.simulated_current_device()
    if index >= 0:
        device.library.simulated_set_device(index)
    return old


def _maybe_exchange(index: int) -> int:
    old = device.library.simulated_current_device()
    if index >= 0:
        device.library.simulated_aim_at_device(index)
    return old


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    device.library.simulated_set_device(device_index)
    device.library.simulated_set_current_stream(device_index, stream_id)


def _properties(index: int):
    return types.SimpleNamespace(
        name="simulated GPU", major=9, minor=0, total_memory=1 << 34, multi_processor_count=132, L2_cache_size=50 << 20,
        uuid=f"GPU-5100000{index:x}-0000-0000-0000-000000000000", max_threads_per_multi_processor=2048, is_integrated=0,
        gcnArchName="", warp_size=32, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    )  # fmt: skip


def _synchronize() -> None:
    device.library.simulated_current_device()
    if device.sync_device(device.library.simulated_current_device()) == device.REFUSED:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing (cudaDeviceSynchronize)")


def _resize(self, nbytes):
    if self.device.type != "cuda":
        return _resize_host(self, nbytes)
    device.library.simulated_resize_storage(self._cdata, nbytes)
    return self


def _on_host(name: str, writes: bool):
    """A method of tensors that uses memory on the host below torch's dispatcher: seen where the memory is pinned."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def seen(self, *args, **kwargs):
        if self.device.type == "cpu" and self.numel() and self.layout is torch.strided and self.is_pinned():
            shape = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
            access = (self.data_ptr(), self.data_ptr() + self.numel() * self.element_size(), writes, shape)
            checker.submit(checker.host_access, name, [access], site(), device.known())
        return method(self, *args, **kwargs)

    return seen


def _set_sync_debug_mode(mode) -> None:
    device.sync_debug_mode = mode


_resize_host = torch.UntypedStorage.resize_


def install() -> None:
    """Map torch.cuda's names."""
    cuda, C = torch.cuda, torch._C
    library = device.library
    low = {
        "_cuda_getDevice": lambda: library.simulated_current_device(),
        "_cuda_setDevice": lambda index: library.simulated_set_device(index),
        "_cuda_exchangeDevice": _exchange,
        "_cuda_maybeExchangeDevice": _maybe_exchange,
        "_cuda_getDeviceCount": lambda: library.simulated_device_count(),
        "_cuda_getCurrentRawStream": lambda index: library.simulated_current_stream(index),
        "_cuda_getCurrentStream": lambda index: (library.simulated_current_stream(_given(index)), _given(index), CUDA),
        "_cuda_getDefaultStream": lambda index: (0, _given(index), CUDA),
        "_cuda_getStreamFromExternal": lambda pointer, index: (pointer, _given(index), CUDA),
        "_cuda_setStream": _set_stream,
        "_cuda_synchronize": _synchronize,
        "_cuda_isCurrentStreamCapturing": is_capturing,
        "_cuda_set_sync_debug_mode": _set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": lambda: device.sync_debug_mode,
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_emptyCache": lambda: None,
        "_cuda_hostMemoryStats": dict,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_getCompiledVersion": lambda: 12080,
        "_CudaStreamBase": torch.Stream,
        "_CudaEventBase": torch.Event,
        "_graph_pool_handle": lambda: (0, 1),
        "_host_emptyCache": lambda: None,
    }
    for name, value in low.items():
        setattr(C, name, value)
    high = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: library.simulated_device_count(),
        "_lazy_init": lambda: None,
        "_initialized": True,
        "_is_compiled": lambda: True,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _maybe_exchange,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "MemPool": MemPool,
        "use_mem_pool": use_mem_pool,
        "get_device_properties": lambda index=None: _properties(_index(index)),
        "get_device_name": lambda index=None: "simulated GPU",
        "get_device_capability": lambda index=None: (9, 0),
        "is_current_stream_capturing": is_capturing,
        "empty_cache": lambda: None,
        "default_generators": tuple(torch.Generator() for _ in range(library.simulated_device_count())),
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    for name, value in high.items():
        setattr(cuda, name, value)
    for name in ("Stream", "ExternalStream", "Event"):
        setattr(cuda.streams, name, high[name])
    cuda.memory.CUDAPluggableAllocator = PluggableAllocator
    cuda.graphs.is_current_stream_capturing = is_capturing
    cuda.graphs._cuda_isCurrentStreamCapturing = is_capturing
    cuda.graphs._graph_pool_handle = low["_graph_pool_handle"]
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = Graph
    torch.UntypedStorage.resize_ = _resize
    torch.Tensor.numpy = _on_host("numpy", True)  # an array can be written
    torch.Tensor.tolist = _on_host("tolist", False)


def is_capturing() -> bool:
    index = device.library.simulated_current_device()
    return graphs.capture_id((index << 40) | device.library.simulated_current_stream(index)) is not None


def _given(index) -> int:
    return device.library.simulated_current_device() if index is None or index < 0 else index
