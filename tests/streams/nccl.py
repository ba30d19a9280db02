"""NCCL on the simulated GPU: a library with its ABI in front of the host engine; its operations for the checker."""

from __future__ import annotations

import ctypes
import os
import traceback

from collectives._nccl import CONFIG_FIELDS, UNDEF_INT

from . import build, device, graphs, late
from .checker import checker, shown_site, site

KINDS = "reduce broadcast all_reduce reduce_scatter all_gather all_to_all gather scatter send recv".split()
DTYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 fp8_e4m3 fp8_e5m2".split()


class Operation(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in "comm stream send send_bytes recv recv_bytes count".split()),
        *((name, ctypes.c_int32) for name in "kind dtype op peer device ranks".split()),
    ]

    @property
    def key(self) -> int:
        return (self.device << 40) | self.stream

    def accesses(self) -> list:
        shape = f"{DTYPES[self.dtype]}[{self.count}]"
        found = []
        if self.send_bytes:
            found.append((self.send, self.send + self.send_bytes, False, shape))
        if self.recv_bytes:
            found.append((self.recv, self.recv + self.recv_bytes, True, shape))
        return found


OPERATIONS = ctypes.CFUNCTYPE(None, ctypes.POINTER(Operation), ctypes.c_int64)
DEVICE = ctypes.CFUNCTYPE(ctypes.c_int)
MEMORY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
REGISTERED = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4, ctypes.c_int32)
ENDED = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int32)
WRONG = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
LATE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Recorder(ctypes.Structure):
    _fields_ = [
        ("operations", OPERATIONS), ("device", DEVICE), ("memory", MEMORY), ("registered", REGISTERED),
        ("ended", ENDED), ("wrong", WRONG), ("late", LATE),
    ]  # fmt: skip


class Config(ctypes.Structure):
    """ncclConfig_t"""

    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        *((name, ctypes.c_char_p if name in ("netName", "commName") else ctypes.c_int) for name in CONFIG_FIELDS),
    ]  # fmt: skip


_library: ctypes.CDLL | None = None


def _record(operations) -> None:
    """Operations that are launched together: on one stream after the other, where they use several."""
    for each in operations:
        late.finish_stream(each.key)
    where, known, thread = site(), device.known(), device.thread_kind()
    streams = list(dict.fromkeys(each.key for each in operations))
    captures = [capture for each in streams if (capture := graphs.capture_id(each)) is not None]
    for each in operations:
        op = f"nccl {KINDS[each.kind]}"
        for capture in captures[:1]:
            capture.uses(each.accesses(), op, each.key, where)
        checker.submit(checker.communication, op, each.comm, each.key, each.accesses(), where, known, thread)
    for stream in streams:  # NCCL has all streams of a group wait for its one kernel
        for other in streams:
            if other != stream:
                checker.submit(_join_streams, stream, other)
    if captures:
        copies = (Operation * len(operations))(*operations)
        captures[0].calls.append(lambda: _library.recorder_run(copies, len(copies)))


def _join_streams(stream: int, other: int) -> None:
    clock, its = checker.clock_of(stream), checker.clock_of(other)
    for key, count in its.items():
        if clock.get(key, 0) < count:
            clock[key] = count


@OPERATIONS
def _operations(array, count):
    try:
        _record([Operation.from_buffer_copy(array[index]) for index in range(count)])
    except BaseException:
        traceback.print_exc()
        checker.report("error", f"the simulation itself failed: {traceback.format_exc()}")


@LATE
def _late(index, stream, queue, ticket):
    late.start((index << 40) | stream, queue, ticket)


@DEVICE
def _device():
    return device.library.simulated_current_device()


@MEMORY
def _memory(address, nbytes):
    if nbytes:
        index = device.library.simulated_current_device()
        device.library.simulated_add_memory(address, nbytes, index)
        allocations.append(nbytes)
        checker.submit(checker.allocate, address, nbytes, index << 40, "nccl", site())
    else:
        checker.submit(checker.free, address, site(), device.known())
        device.library.simulated_remove_memory(address)


@REGISTERED
def _registered(comm, handle, address, nbytes, window):
    if nbytes:
        checker.submit(checker.register, comm, handle, address, nbytes, bool(window), site())
    else:
        checker.submit(checker.deregister, comm, handle)


@ENDED
def _ended(comm, aborted):
    checker.submit(checker.end_communicator, comm, bool(aborted), site())


@WRONG
def _wrong(text):
    checker.submit(checker.report, "window", f"{text.decode()}, at {shown_site(site())}")


allocations: list[int] = []  # the bytes of each call of ncclMemAlloc
_recorder = Recorder(_operations, _device, _memory, _registered, _ended, _wrong, _late)


def config_of(comm) -> dict:
    """Give the fields of ncclConfig_t that were set when one of our communicators was made."""
    config = Config()
    _library.recorder_config(comm._native.handle, ctypes.byref(config))
    found = {name: getattr(config, name) for name in CONFIG_FIELDS}
    return {name: value for name, value in found.items() if value not in (UNDEF_INT, None)}


def load(host_library: str) -> None:
    """Have engine "nccl" find the recorder."""
    global _library
    path = build.nccl_library()
    _library = ctypes.CDLL(str(path))
    _library.recorder_config.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
    _library.recorder_wait.argtypes = [ctypes.c_int64] * 3
    late.wait_for = _library.recorder_wait
    _library.recorder_run.argtypes = [ctypes.POINTER(Operation), ctypes.c_int64]
    if not _library.recorder_open(host_library.encode(), _recorder):
        raise RuntimeError(f"{host_library} could not be loaded")
    os.environ["COLLECTIVES_NCCL_LIBRARY"] = str(path)
