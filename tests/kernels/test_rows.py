"""How a table's rows come to a CUDA kernel: by value up to the last byte that fits, else by pinned memory; no wait."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from ctypes import addressof, c_uint64, sizeof

import numpy as np
import pytest
import torch

from collectives import cuda_state, kernels
from collectives.kernels import abi, cuda, rows
from collectives.kernels.rows import Rows
from collectives.layout import wire_layout
from tests.kernels import shim


def most(args, row: int) -> int:
    """How many rows of so many bytes travel with a launch."""
    return (abi.ARGUMENTS - sizeof(args)) // row


# ---- By value and through memory, by the text of the kernels.
def cast(count):
    tensors = [torch.arange(i % 7, dtype=torch.float32) + i for i in range(count)]
    table = kernels.Table(tensors, torch.bfloat16)
    flat = torch.full((table.total,), 7.0, dtype=torch.bfloat16)
    kernels.pack(table, flat, scale=1.5)
    back = [torch.zeros_like(tensor) for tensor in tensors]
    kernels.unpack(flat, back)
    copied = torch.empty(kernels.Table(tensors, torch.float32).total)
    kernels.pack(tensors, copied)
    return [flat, copied, *back]


def reduce(count):
    out, mixed = torch.empty(70), torch.empty(70, dtype=torch.float64)
    kernels.reduce_n([torch.arange(70, dtype=torch.float32) * i for i in range(count)], out, op="avg")
    kernels.reduce_n([torch.arange(70, dtype=torch.bfloat16) * i for i in range(count)], mixed)
    return [out, mixed]


def quantized(count):
    nbytes = wire_layout(300, "int8", 128).nbytes
    wires = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]
    for i, wire in enumerate(wires):
        kernels.quantize(torch.linspace(-i, 1, 300), wire, format="int8", block=128)
    out, again = torch.empty(300), torch.empty(nbytes, dtype=torch.uint8)
    kernels.reduce_wires(wires, out, format="int8", block=128, average_over=count)
    kernels.requantize(wires, again, count=300, format="int8", block=128)
    return [out, again]


def stepped(count):
    params = [torch.full((i % 5,), float(i)) for i in range(count)]
    grads = [torch.arange(i % 5, dtype=torch.float32) for i in range(count)]
    first, second = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    kernels.sgd_step(params, grads, lr=0.1)
    kernels.adam_step(params, grads, first, second, lr=0.1, step=1)
    return [*params, *first, *second]


FAMILIES = {
    "cast": (cast, most(abi.CastArgs, abi.TENSOR.itemsize)),
    "reduce": (reduce, most(abi.ReduceArgs, 8)),
    "reduce_wires": (quantized, most(abi.DequantizeArgs, 8)),
    "requantize": (quantized, most(abi.RequantizeArgs, 8)),
    "sgd": (stepped, most(abi.SgdArgs, abi.PARAMETER.itemsize)),
    "adam": (stepped, most(abi.AdamArgs, abi.PARAMETER.itemsize)),
}


@pytest.mark.parametrize("more", [0, 1], ids=["all that fit", "one more"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_by_value_and_through_memory(family, more, monkeypatch):
    function, fit = FAMILIES[family]
    count = fit + more
    expected = function(count)
    by_memory = set()
    usual = cuda.arguments

    def arguments(kernel, args, table, place):
        def placed():
            by_memory.add(kernel.name.removeprefix("coll_"))
            return place()

        return usual(kernel, args, table, placed)

    monkeypatch.setattr(cuda, "arguments", arguments)
    with shim.cuda_text(grid=2, block=32):
        found = function(count)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    begins = (family, "copy") if family == "cast" else family
    assert any(name.startswith(begins) for name in by_memory) == (more == 1)


def test_what_a_launch_takes():
    """The arguments, the rows behind them, and no address of theirs; nothing of the caller's is written to."""
    array = np.arange(5, dtype=np.uint64)
    table = Rows(array, torch.device("cuda", 0))
    args = abi.ReduceArgs(sources=table.address, n=5)
    taken = bytes(cuda.arguments(abi.REDUCE, args, table, None))
    assert len(taken) == abi.ARGUMENTS < 4096
    copy = abi.ReduceArgs.from_buffer_copy(taken)
    assert (copy.sources, copy.n, args.sources) == (0, 5, table.address)
    assert taken[sizeof(args) :][: array.nbytes] == array.tobytes()
    # Rows that the caller has placed; and a kernel that reads none.
    assert abi.ReduceArgs.from_buffer_copy(cuda.arguments(abi.REDUCE, args, None, None)).sources == table.address
    assert len(cuda.arguments(abi.FINISH, abi.FinishArgs(), None, None)) == sizeof(abi.FinishArgs)


@pytest.mark.parametrize("kernel", [each for each in vars(abi).values() if isinstance(each, abi.Kernel)], ids=str)
def test_where_the_address_of_the_rows_lies(kernel):
    """Just where the struct has a pointer to its table."""
    names = dict.fromkeys(("coll_reduce_wires", "coll_dequantize", "coll_requantize"), "wires")
    names |= {"coll_cast": "tensors", "coll_reduce": "sources"}  # the first one that a name begins with counts
    if kernel.rows_at is None:
        assert kernel in (abi.FINISH, abi.QUANTIZE, abi.QUANTIZE_FEEDBACK)
        return
    args = kernel.args()
    c_uint64.from_address(addressof(args) + kernel.rows_at).value = 77
    inside = getattr(args, "from", getattr(args, "update", args))
    names |= {"coll_sgd": "parameters", "coll_adam": "parameters", "coll_copy": "tensors"}
    name = next(names[each] for each in names if kernel.name.startswith(each))
    assert getattr(inside, name) == 77


# ---- Through pinned memory, on streams that only count.
class Event:
    def __init__(self, device):
        self.device, self.done, self.stream = device, False, None

    def query(self):
        assert not self.device.capturing, "an event was queried in a capture"
        assert self.device.allowed, "a query that spoils the capture of another thread"
        return self.done

    def record(self, stream):
        assert not self.device.capturing
        self.stream, self.done = stream, False

    def synchronize(self):
        raise AssertionError("the host waits")


class Device:
    """A "GPU" that is host memory."""

    def __init__(self, monkeypatch):
        self.capturing = self.allowed = False
        self.events, self.pinned = [], []
        self.stream = self.new_stream(1)
        for name, value in {
            "device": lambda _: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
            "current_stream": lambda *_: self.stream,
            "Event": self.new_event,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(rows, "_pinned", self.pin)
        for module in (rows, cuda_state):
            monkeypatch.setattr(module, "queries_allowed", self.allow)
        monkeypatch.setattr(rows, "_rings", {})
        monkeypatch.setattr(rows, "_captured", [])

    def new_stream(self, number):
        return types.SimpleNamespace(cuda_stream=number, device_index=0, device=torch.device("cpu"))

    def new_event(self):
        self.events.append(Event(self))
        return self.events[-1]

    @contextlib.contextmanager
    def allow(self):
        self.allowed = True
        yield
        self.allowed = False

    def pin(self, nbytes):
        assert self.allowed or not self.capturing, "taking page-locked memory spoils the capture"
        self.pinned.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.pinned[-1]


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def long_table(first=0, count=700) -> Rows:
    return Rows(np.arange(first, first + count, dtype=np.uint64), torch.device("cuda", 0))


def values(copy: torch.Tensor) -> list[int]:
    return copy.view(torch.int64).tolist()


def test_pinned_memory_is_used_again_only_after_its_copy(device):
    first, second = long_table(), long_table(1000)
    assert values(first.on_device()) == [*range(700)]
    second.on_device()
    assert len(device.pinned) == 2, "the first copy may still read its memory"
    assert values(device.pinned[0][: 8 * 700]) == [*range(700)]
    device.events[0].done = True
    third = long_table(2000)
    assert values(third.on_device()) == [*range(2000, 2700)]
    assert len(device.pinned) == 2 and values(device.pinned[0][: 8 * 700]) == [*range(2000, 2700)]
    assert device.events[0].stream is device.stream and not device.events[0].done
    assert long_table(count=5000).on_device().numel() == 40000 and len(device.pinned) == 3  # of another size


def test_each_stream_has_a_copy_of_its_own(device):
    table, here = long_table(), device.stream
    copy = table.on_device()
    assert table.on_device() is copy and len(device.pinned) == 1
    device.stream = device.new_stream(2)
    other = table.on_device()
    assert other.data_ptr() != copy.data_ptr() and values(other) == values(copy)
    device.stream = here
    assert table.on_device() is copy
    table.array[0] = 5
    table.changed()
    assert values(table.on_device())[0] == 5 and values(copy)[0] == 0


def test_a_capture_gets_memory_that_stays(device):
    table = long_table()
    outside = table.on_device()
    device.events[0].done = True
    device.capturing = True
    inside = table.on_device()
    assert inside is not outside and len(device.pinned) == 2 and rows._captured == device.pinned[1:]
    device.capturing = False
    assert table.on_device() is outside
    for start in range(3):
        long_table(start * 1000).on_device()
        for event in device.events:
            event.done = True
    assert values(device.pinned[1]) == [*range(700)]
    assert all(each.memory is not device.pinned[1] for ring in rows._rings.values() for each in deque(ring))


def test_a_table_that_is_made_and_changed_waits_for_nothing(device, monkeypatch):
    """Making one touches no GPU; what goes by value never does."""
    monkeypatch.setattr(Rows, "on_device", None)
    tensors = [torch.ones(5) for _ in range(3)]
    kernels.Table(tensors, torch.float32)
    kernels.Sources(tensors)
    kernels.WireTable([torch.zeros(128, dtype=torch.uint8) for _ in range(3)])
    kernels.ParameterTable("sgd_step", tensors, [torch.ones(5) for _ in range(3)])
    assert not device.pinned and not device.events


# ---- Statistics.
class Recorded(torch.Tensor):
    """Memory of which is noted on which streams it is used."""

    def record_stream(self, stream):
        self.streams.append(stream)


def test_statistics_on_another_stream_are_recorded_there(monkeypatch):
    statistics = kernels.Statistics()
    names = ("sum_of_squares", "nonfinite", "_sums", "_bad")
    for name in names:
        tensor = getattr(statistics, name).as_subclass(Recorded)
        tensor.streams = []
        setattr(statistics, name, tensor)
    statistics._streams = ["made on"]
    for stream in ("made on", "another", "made on"):
        statistics._record(stream)
    for name in names:
        assert getattr(statistics, name).streams == ["another", "made on"]
