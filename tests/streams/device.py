"""The simulated device's library as Python has it: its functions, and what each call back means to the checker."""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback

from . import build, graphs, late
from .checker import checker, shown_site, site


class Access(ctypes.Structure):
    """simulated::Access"""

    _fields_ = [
        ("low", ctypes.c_int64),
        ("high", ctypes.c_int64),
        ("writes", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 4),
    ]


DTYPES = "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool".split()
BFLOAT16 = 15
CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p,
    ctypes.POINTER(Access), ctypes.c_int64,
)  # fmt: skip
REFUSED, SYNCHRONIZES = -1, -2

library: ctypes.CDLL | None = None
sync_debug_mode = 0


def accesses_of(array, count: int) -> list:
    found = []
    for index in range(count):
        each = array[index]
        dtype = DTYPES[each.dtype] if each.dtype < len(DTYPES) else "bfloat16" if each.dtype == BFLOAT16 else "fp8"
        shape = f"{dtype}{[*each.sizes[: min(each.dims, 4)]]}"
        found.append((each.low, each.high, bool(each.writes), shape))
    return found


def refuse(text: str, where) -> None:
    checker.submit(checker.report, "capture", f"{text} while a stream is capturing, at {shown_site(where)}")


def host_waits(text: str, where, warns: bool = True) -> int:
    """Note that the host waits; give what the library returns for it. `warns`: torch's sync debug mode looks at it."""
    if graphs.capturing():
        refuse(text, where)
        return REFUSED
    checker.submit(checker.host_wait, text, where)
    if sync_debug_mode == 2 and warns:
        return SYNCHRONIZES
    return 0


def known() -> dict:
    return dict(checker.known_to_thread())


def record(event_stream, event, *_):
    graphs.recorded(event_stream, event)
    late.record(event_stream, event)
    checker.submit(checker.record, event_stream, event, known())
    return 0


def block(stream, event, *_):
    if not graphs.waits(stream, event):
        return REFUSED
    late.block(stream, event)
    checker.submit(checker.block_stream, stream, event)
    return 0


def sync_event(event, *_):
    answer = host_waits("the host waits for an event", site(), warns=False)
    late.finish_event(event)
    checker.submit(checker.sync_event, event)
    return answer


def sync_stream(stream, *_):
    answer = host_waits("the host waits for a stream", site())
    late.finish_stream(stream)
    checker.submit(checker.sync_stream, stream)
    return answer


def sync_device(device, *_):
    where = site()
    answer = host_waits("the host waits for the device", where, warns=False)
    checker.submit(checker.check_device, device, "the host waits for all", where)
    late.finish_device(device)
    checker.submit(checker.sync_device, device)
    return answer


def query_event(event, *_):
    if graphs.capturing() and not _queries_allowed():
        refuse("an event is queried", site())
        return REFUSED
    return int(late.event_has_ended(event) and checker.query_event(event))


def _queries_allowed() -> bool:
    """Whether this thread has called cudaThreadExchangeStreamCaptureMode, which allows queries beside a capture."""
    state = sys.modules.get("collectives.cuda_state")
    return state is not None and state.queries_are_allowed()


def query_stream(stream, *_):
    if graphs.capturing():
        refuse("a stream is queried", site())
        return REFUSED
    return int(late.stream_has_ended(stream) and checker.query_stream(stream))


def record_stream(address, stream, *_):
    checker.submit(checker.record_stream, address, stream)
    return 0


def allocate(address, nbytes, stream, *_):
    checker.submit(checker.allocate, address, nbytes, stream, "device", site())
    graphs.allocated(address, stream)
    return 0


def free(address, *_):
    if graphs.keeps(address):
        return 1
    checker.submit(checker.free, address, site(), known())
    return 0


def operation(stream, waits, pageable, text, array, count):
    late.finish_stream(stream)
    op, where = text.decode(), site()
    accesses = accesses_of(array, count)
    capture = graphs.capture_id(stream)
    if waits:
        what = f"{op} of {accesses[0][3] if accesses else 'nothing'}"
        what += ": a copy from or to pageable memory" if pageable else ""
        answer = host_waits(f"the host waits in {what}", where)
        if answer:
            return answer
    if capture is not None:
        capture.uses(accesses, op, stream, where)
    checker.submit(checker.operation, op, stream, accesses, where, known())
    if waits:
        checker.submit(checker.sync_stream, stream)
    return int(capture is not None)


def on_host(_a, _b, _c, text, array, count):
    checker.submit(checker.host_access, text.decode(), accesses_of(array, count), site(), known())
    return 0


def pin(address, nbytes, *_):
    checker.submit(checker.allocate, address, nbytes, 0, "pinned", site())
    return 0


def unpin(address, *_):
    checker.submit(checker.free, address, site(), known())
    return 0


def set_device(device, *_):
    where = site()
    if where:  # torch's backward threads make every device the current one of their own
        checker.submit(checker.check_device, device, "a thread sets its device, which makes a context", where)
    return 0


def destroy_event(event, *_):
    return 0


def captured(number, *_):
    graphs.captured(number)
    return 0


HANDLERS = [
    record, block, sync_event, sync_stream, sync_device, query_event, query_stream, record_stream, allocate, free,
    operation, on_host, pin, unpin, set_device, destroy_event, captured,
]  # fmt: skip


def _called(kind, a, b, c, text, accesses, count):
    try:
        return HANDLERS[kind](a, b, c, text, accesses, count)
    except BaseException:
        traceback.print_exc()
        checker.report("error", f"the simulation itself failed: {traceback.format_exc()}")
        return 0


_callback = CALLBACK(_called)


def load(devices: int) -> ctypes.CDLL:
    """Register the simulated GPUs; before anything imports torch."""
    global library
    if library is None:
        library = build.load_device()
        library.simulated_current_stream.restype = ctypes.c_int64
        library.simulated_current_stream.argtypes = [ctypes.c_int]
        library.simulated_set_current_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.simulated_replay.argtypes = library.simulated_forget.argtypes = [ctypes.c_int64]
        library.simulated_resize_storage.argtypes = [ctypes.c_int64, ctypes.c_int64]
        library.simulated_use_pool.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.simulated_add_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        library.simulated_remove_memory.argtypes = library.simulated_release.argtypes = [ctypes.c_void_p]
        library.simulated_set_device_count(devices)
        library.simulated_set_callback(_callback)
    return library


def thread_kind():
    """What stands for this thread in the order of communicators' calls; torch's backward threads follow the main."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
        return "main"
    return thread.ident
