"""CUDA's state of threads and streams: the thread's current device, and captures of CUDA graphs.

A thread begins with device 0. Its first CUDA call opens a context there (about 0.5 GB), and so does
``with torch.cuda.stream()`` when it restores the previous device. While a stream is captured,
neither it nor an event of the capture can be queried, and no thread may query any event outside of
`queries_allowed`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import warnings

import torch

from .errors import CudaError, InvalidUsage

__all__ = [
    "capture_id",
    "current_stream",
    "has_completed",
    "is_capturing",
    "new_comm_stream",
    "on_stream",
    "queries_allowed",
    "queries_are_allowed",
    "refuse_capture",
    "set_first_device",
    "set_thread_device",
    "stream_from_address",
    "wait_for_stream",
]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_HIGH_PRIORITY = -1  # 0 is the default; the lower the number, the higher the priority
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_state = threading.local()


def set_thread_device(device: torch.device) -> None:
    """Set this thread's current device to a rank's. No-op for a CPU.

    Each thread of this package calls it first.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def set_first_device(device: torch.device) -> None:
    """Set the current device to a rank's, if CUDA is still unused.

    It is what programs do by ``torch.cuda.set_device``. If the program already uses CUDA with
    another current device, that may be intended: a `RuntimeWarning` names both.
    """
    if device.type != "cuda":
        return
    if not torch.cuda.is_initialized():
        torch.cuda.set_device(device)
    elif torch.cuda.current_device() != device.index:
        warnings.warn(
            f"this rank's device is {device}, but torch's current one is cuda:{torch.cuda.current_device()}: what is "
            "made on 'cuda' goes there, and `with torch.cuda.stream()` goes back there and opens a context (about "
            f"0.5 GB). Call torch.cuda.set_device({device.index}) at the beginning of the program",
            RuntimeWarning,
            stacklevel=3,
        )


def stream_from_address(address: int, device: torch.device):
    """Return torch's stream with an address; 0: the default stream.

    ``ExternalStream(0)`` would make a new one.
    """
    return torch.cuda.ExternalStream(address, device) if address else torch.cuda.default_stream(device)


def new_comm_stream(device: torch.device):
    """Return a new CUDA stream for communication on a device, of high priority.

    The GPU starts waiting blocks of its kernels before those of streams of the default priority, so
    that a collective begins while a kernel of the computation fills the GPU, and does not wait for
    that kernel's last block. What runs already is not interrupted.
    """
    return torch.cuda.Stream(device, priority=_HIGH_PRIORITY)


_known_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # by their numbers in torch


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the thread's current stream of a device that has an index, as torch.cuda.current_stream
    does in several times the time: it makes a new object in each call.
    """
    try:
        numbers = torch._C._cuda_getCurrentStream(device.index)
    except AttributeError:  # a build without CUDA
        return torch.cuda.current_stream(device)
    stream = _known_streams.get(numbers)
    if stream is None:
        stream = _known_streams[numbers] = torch.cuda.current_stream(device)
    return stream


class on_stream:  # noqa: N801, as a function is called
    """Context in which a stream is the current one, as torch.cuda.stream makes it in several times
    the time.

    ``ready_event``: an event of that device, which no other thread uses. The stream first waits by
    it for the work that is queued on the stream which was current before. None: it doesn't wait.
    """

    __slots__ = ("_before", "_ready_event", "_stream", "_torchs")

    def __init__(self, stream: torch.cuda.Stream, ready_event: torch.cuda.Event | None = None):
        self._stream = stream
        self._ready_event = ready_event

    def __enter__(self):
        stream, ready_event = self._stream, self._ready_event
        if ready_event is not None:
            ready_event.record(current_stream(stream.device))
            ready_event.wait(stream)
        index = stream.device_index
        self._torchs = None
        if torch._C._cuda_getDevice() != index:  # then torch's own sets the former device again, too
            self._torchs = torch.cuda.stream(stream)
            self._torchs.__enter__()
            return
        self._before = torch._C._cuda_getCurrentStream(index)
        torch._C._cuda_setStream(stream.stream_id, index, stream.device_type)

    def __exit__(self, *error):
        if self._torchs is not None:
            self._torchs.__exit__(*error)
            return
        number, index, kind = self._before
        torch._C._cuda_setStream(number, index, kind)


def is_capturing(stream) -> bool:
    """Return whether a torch stream is part of a capture; None: the current stream."""
    if stream is None or stream == current_stream(torch.device("cuda", torch.cuda.current_device())):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def capture_id(stream) -> int | None:
    """Return the id of the capture that a torch stream is part of; None: it isn't captured.

    The id is unique in the process. ``stream`` None: the current stream.
    """
    driver = _driver()
    if driver is None:
        return 0 if is_capturing(stream) else None
    handle = (torch.cuda.current_stream() if stream is None else stream).cuda_stream
    status, number = ctypes.c_int(), ctypes.c_uint64()
    asked = handle, ctypes.byref(status), ctypes.byref(number), None, None, None
    code = driver.cuStreamGetCaptureInfo_v2(*asked)
    if code == _NO_CONTEXT:  # a thread's first call: the runtime takes the device's context, the driver doesn't
        is_capturing(stream)
        code = driver.cuStreamGetCaptureInfo_v2(*asked)
    _check(code)
    return number.value if status.value == _ACTIVE else None


def refuse_capture(device: torch.device, why: str, **about) -> None:
    """Raise `InvalidUsage` where the device's current stream is captured; no-op on a CPU. `why`: the
    text after the colon. `about`: the error's other arguments.
    """
    if device.type == "cuda" and is_capturing(current_stream(device)):
        raise InvalidUsage(f"this can't be captured in a CUDA graph: {why}", **about)


def wait_for_stream(stream) -> None:
    """Make the current stream wait for all work that is queued on another stream of its device. The
    host doesn't wait.

    A stream that is captured waits only for streams of the same capture: CUDA refuses the others,
    and a capture begins when nothing runs.
    """
    here = current_stream(stream.device)
    if here == stream:
        return
    capture = capture_id(here)
    if capture is None or capture_id(stream) == capture:
        here.wait_stream(stream)


@contextlib.contextmanager
def queries_allowed():
    """Let this thread query events that are part of no capture, while other threads capture.

    Without it ``cudaEventQuery`` fails, and the capture fails with it, while any thread captures in
    the mode of ``torch.cuda.graph``.
    """
    if queries_are_allowed():
        yield
        return
    driver = _driver()
    mode = ctypes.c_int(_RELAXED)
    if driver is not None:
        _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    _state.depth = 1
    try:
        yield
    finally:
        _state.depth = 0
        if driver is not None:
            _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))


def queries_are_allowed() -> bool:
    """Return whether this thread is inside of `queries_allowed`."""
    return bool(getattr(_state, "depth", 0))


def has_completed(event) -> bool:
    """Return whether an event that is part of no capture has completed.

    Works while other threads capture.
    """
    with queries_allowed():
        return event.query()


@functools.cache
def _driver():
    """Return the CUDA driver's library; None on a build of torch without CUDA.

    A process that uses CUDA has loaded it.
    """
    if torch.version.cuda is None:
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuStreamGetCaptureInfo_v2.argtypes = [ctypes.c_void_p] * 6
    driver.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.c_void_p]
    return driver


def _check(code: int) -> None:
    if code:
        raise CudaError(f"the CUDA driver gave CUresult {code} when it was asked for a stream's or thread's capture")
