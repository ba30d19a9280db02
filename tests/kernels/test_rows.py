"""How a table's rows come to a CUDA kernel: by value up to the last byte that fits, else by pinned memory; no wait."""

from __future__ import annotations

from ctypes import sizeof

import pytest
import torch

from collectives import kernels
from collectives.kernels import abi, cuda
from collectives.layout import wire_layout
from tests.kernels import shim
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation, steps


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


# ---- Through pinned memory, on the simulated GPU, which reports memory that is used again too early.
def long_tables(ctx):
    """Tables too long for a launch, whose rows the host copies and changes with no wait: new ones, on two streams."""
    count, side = most(abi.CastArgs, abi.TENSOR.itemsize) + 1, torch.cuda.Stream()
    tensors = [torch.full((4,), float(i), device="cuda") for i in range(count)]
    table, want = kernels.Table(tensors, torch.float32), torch.arange(float(count)).repeat_interleave(4)
    flats = [torch.zeros(4 * count, device="cuda") for _ in range(7)]
    with steps(ctx):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            statistics = kernels.Statistics("cuda")
            kernels.pack(table, flats[6])  # the other stream doesn't wait for this copy of the rows
        for number, flat in enumerate(flats[:4]):
            kernels.pack([each * 2 for each in tensors] if number % 2 else table, flat)
        torch.cuda.current_stream().wait_stream(side)
        kernels.pack(table, flats[4], statistics=statistics)
        del statistics
        with torch.cuda.stream(side):
            kernels.pack(table, flats[5], statistics=kernels.Statistics("cuda"))
        torch.cuda.current_stream().wait_stream(side)
    for number, flat in enumerate(flats):
        assert torch.equal(flat.cpu(), want * (2 if number in (1, 3) else 1)), number
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.pack(table, flats[1])
    for _ in range(3):
        kernels.pack(kernels.Table(tensors[::-1], torch.float32), flats[0])
        torch.cuda.synchronize()
    flats[1].zero_()
    graph.replay()
    assert torch.equal(flats[1].cpu(), want)
    params = [torch.ones(3, device="cuda") for _ in range(most(abi.SgdArgs, abi.PARAMETER.itemsize) + 1)]
    steps_of = kernels.ParameterTable("sgd_step", params, [torch.full_like(each, 0.25) for each in params])
    steps_of.sgd(lr=1.0)
    steps_of.set_grads([torch.full_like(each, 0.5) for each in params])  # in the rows that the first step may read
    steps_of.sgd(lr=1.0)
    assert all((param == 0.25).all() for param in params)


@needs_simulation
def test_long_tables_on_streams_and_in_graphs():
    run_ranks(long_tables, 1, device="simulated")
