"""What all kernels refuse alike, by name and before anything is written: arrays, scales, statistics, old tables."""

from __future__ import annotations

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidArgument
from collectives.layout import wire_layout

COUNT = 8


def ones(dtype=torch.float32):
    return torch.ones(COUNT, dtype=dtype)


def resized(nbytes, skip=0, count=COUNT):
    tensor = torch.ones(count + skip)[skip:]
    tensor.untyped_storage().resize_(nbytes)
    return tensor


# What is wrong with an array of 8 fp32 values, and what is said of it.
ARRAYS = {
    "a list": (lambda: [1.0] * COUNT, "must be a torch tensor, a NumPy array or a CuPy array, not list"),
    "strides": (lambda: torch.ones(2 * COUNT)[::2], "of shape (8,) and strides (2,) isn't contiguous"),
    "expanded": (lambda: torch.ones(1).expand(COUNT), "of shape (8,) and strides (0,) isn't contiguous"),
    "strides of NumPy": (lambda: np.ones((4, 4), np.float32)[:, :2], "of shape (4, 2) and strides (16, 4) isn't"),
    "meta": (lambda: ones().to("meta"), "is a meta tensor"),
    "sparse": (lambda: ones().to_sparse(), "is a sparse_coo tensor"),
    "freed": (lambda: resized(0), "has no memory"),
    "a view of what was freed": (lambda: resized(0, 3), "has no memory: its storage holds 0 bytes of the 44"),
    "shrunk": (lambda: resized(8), "'s storage has 8 bytes, it needs 32"),
    "an odd address": (lambda: np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float32), "begins at a"),
    "masked": (lambda: np.ma.masked_array(np.ones(COUNT, np.float32)), "is a masked array"),
    "negated": (lambda: torch._neg_view(ones()), "is a lazy"),
}
WIRE = torch.zeros(wire_layout(COUNT, "int8").nbytes, dtype=torch.uint8)
# Where an array is given: the function, what it is called there, and the call.
PLACES = {
    "pack: tensor 1": lambda a: kernels.pack([ones(), a], torch.zeros(64)),
    "pack: the flat buffer": lambda a: kernels.pack([torch.ones(1)], a),
    "unpack: tensor 1": lambda a: kernels.unpack(torch.zeros(64), [ones(), a]),
    "Table: tensor 1": lambda a: kernels.Table([ones(), a], torch.float32),
    "reduce_n: source 1": lambda a: kernels.reduce_n([ones(), a], ones()),
    "reduce_n: out": lambda a: kernels.reduce_n([ones()], a),
    "quantize: source": lambda a: kernels.quantize(a, WIRE, format="int8"),
    "quantize: residual": lambda a: kernels.quantize(ones(), WIRE, format="int8", residual=a),
    "dequantize: out": lambda a: kernels.dequantize(WIRE, a, format="int8"),
    "sgd_step: param 0": lambda a: kernels.sgd_step([a], [ones()], lr=0.1),
    "sgd_step: grad 0": lambda a: kernels.sgd_step([ones()], [a], lr=0.1),
    "adam_step: exp_avg 0": lambda a: kernels.adam_step([ones()], [ones()], [a], [ones()], lr=0.1, step=1),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_array_that_no_kernel_takes(place):
    for kind, (make, message) in ARRAYS.items():
        with pytest.raises(InvalidArgument, match=f"^{re.escape(place)}.*{re.escape(message)}"):
            PLACES[place](make())
            pytest.fail(f"{place}: {kind} was taken")
    assert not WIRE.any()


def test_read_only_arrays_are_read_alone():
    constant = np.frombuffer(ones().numpy().tobytes(), np.float32)
    for place in (
        "pack: the flat buffer",
        "unpack: tensor 1",
        "reduce_n: out",
        "quantize: residual",
        "dequantize: out",
    ):
        with pytest.raises(InvalidArgument, match=f"^{place}.*is a read-only NumPy array"):
            PLACES[place](constant)
    for place in ("pack: tensor 1", "reduce_n: source 1", "quantize: source"):
        PLACES[place](constant)
    WIRE.zero_()


# ---- Scales.
SCALES = [
    (math.nan, "must be finite, not nan"),
    (math.inf, "must be finite, not inf"),
    (10**400, "must be finite, not 1000"),
    (-(10**5000), "must be finite, not this int"),
    (1e39, "1e+39 is infinite in fp32"),
    (-3.4028235677973366e38, "-3.4028235677973366e+38 is infinite in fp32"),
    (np.float32("nan"), "must be finite"),
    (True, "must be a number or an fp32 tensor of one element, not bool"),
    (1j, "must be a number or an fp32 tensor of one element, not complex"),
    ("2", "must be a number or an fp32 tensor of one element, not str"),
    (None, "must be a number or an fp32 tensor of one element, not NoneType"),
    (np.True_, "must be a number or an fp32 tensor of one element, not bool"),
    (torch.ones(2), "has 2 elements of float32"),
    (torch.ones(1, dtype=torch.float64), "has 1 elements of float64"),
    (np.ones(0, np.float32), "has 0 elements of float32"),
    (torch.ones(1, device="meta"), "is a meta tensor"),
    (resized(2, count=1), "'s storage has 2 bytes, it needs 4"),
]


def test_scales_that_no_kernel_takes():
    flat = torch.full((COUNT,), 7.0)
    for op, call in (
        ("pack", lambda scale: kernels.pack([ones()], flat, scale=scale)),
        ("unpack", lambda scale: kernels.unpack(ones(), [flat], scale=scale)),
        ("reduce_n", lambda scale: kernels.reduce_n([ones()], flat, scale=scale)),
    ):
        for scale, message in SCALES:
            gap = "" if message.startswith("'") else " "
            with pytest.raises(InvalidArgument, match=re.escape(f"{op}: the scale{gap}{message}")):
                call(scale)
                pytest.fail(f"{op}: {message}: was taken")
        with pytest.raises(InvalidArgument, match="the scale lies inside of (what is written|out)"):
            call(flat[3:4])
    assert (flat == 7).all()


# ---- Statistics.
def test_statistics_that_no_kernel_takes():
    elsewhere, shrunk, found = kernels.Statistics("meta"), kernels.Statistics(), kernels.Statistics()
    shrunk.nonfinite.untyped_storage().resize_(4)
    wire, wide = torch.zeros(wire_layout(1, "int8").nbytes, dtype=torch.uint8), torch.ones(1, dtype=torch.float64)
    for op, call in (
        ("pack", lambda out, given: kernels.pack([torch.ones(1)], out, offsets=[0], statistics=given)),
        ("unpack", lambda out, given: kernels.unpack(torch.ones(2, dtype=torch.float64), [out], statistics=given)),
        ("reduce_n", lambda out, given: kernels.reduce_n([wide], out, statistics=given)),
        ("dequantize", lambda out, given: kernels.dequantize(wire, out, format="int8", statistics=given)),
        ("measure", lambda out, given: kernels.measure([wide], given)),
    ):
        for given, message in (
            (shrunk, "the statistics' nonfinite's storage has 4 bytes, it needs 8"),
            (True, "statistics must be a Statistics, not bool"),
            ({}, "statistics must be a Statistics, not dict"),
            (elsewhere, "the statistics are on meta, the arrays on cpu"),
        ):
            if op == "measure" and given is elsewhere:
                message = "tensor 0 is on cpu"
            with pytest.raises(InvalidArgument, match=f"^{op}: {message}"):
                call(wide.clone(), given)
        for own in (found.sum_of_squares, found.nonfinite.view(torch.float64)) if op != "measure" else ():
            with pytest.raises(InvalidArgument, match="the statistics' .* lies inside of what is written"):
                call(own, found)


# ---- Tables whose arrays have moved.
def packing(arrays):
    table = kernels.Table(arrays, torch.float32)
    return table, lambda table: kernels.pack(table, torch.zeros(1 << 17))


def unpacking(arrays):
    return packing(arrays)[0], lambda table: kernels.unpack(torch.zeros(1 << 17), table)


def reducing(arrays):
    return kernels.Sources(arrays), lambda table: kernels.reduce_n(table, torch.zeros(arrays[0].size))


def decoding(arrays):
    out = torch.zeros(64)
    return kernels.WireTable(arrays), lambda table: kernels.reduce_wires(table, out, format="int8")


def requantizing(arrays):
    out = torch.zeros(80, dtype=torch.uint8)
    return kernels.WireTable(arrays), lambda table: kernels.requantize(table, out, count=64, format="int8")


def stepping(arrays):
    table = kernels.ParameterTable("sgd_step", arrays, [torch.ones(each.shape) for each in arrays])
    return table, lambda table: table.sgd(lr=0.5)


# The elements' type, how many there are, the table with a use of it, and what is said of array 1.
TABLES = {
    "pack": (torch.float32, 1 << 16, packing, "tensor 1 doesn't lie where it did when the table was made"),
    "unpack": (torch.float32, 1 << 16, unpacking, "tensor 1 doesn't lie where it did when the table was made"),
    "reduce_n": (torch.float32, 1 << 16, reducing, "source 1 was freed or got other memory since this table was made"),
    "reduce_wires": (torch.uint8, 80, decoding, "wire 1 has been freed or has moved"),
    "requantize": (torch.uint8, 80, requantizing, "wire 1 has been freed or has moved"),
    "sgd_step": (torch.float32, 1 << 16, stepping, "param 1 doesn't lie where it did"),
}
MOVES = {
    "other data": lambda tensor: setattr(tensor, "data", torch.zeros(8, dtype=tensor.dtype)),
    "other memory": lambda tensor: tensor.set_(torch.zeros(8, dtype=tensor.dtype)),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "shrunk": lambda tensor: tensor.untyped_storage().resize_(1),
    "shorter": lambda tensor: tensor.resize_(1, 3),
    "longer": lambda tensor: tensor.resize_(1 << 20),
    "transposed": lambda tensor: tensor.t_(),
}


@pytest.mark.parametrize("use", TABLES)
def test_arrays_that_have_moved(use):
    dtype, count, make, message = TABLES[use]
    for kind, move in MOVES.items():
        for as_parameter in (False, True):
            tensors = [torch.zeros(2, count // 2, dtype=dtype) for _ in range(2)]
            if as_parameter:
                tensors[1] = torch.nn.Parameter(tensors[1], requires_grad=False)
            table, call = make([tensors[0].numpy(), tensors[1]])
            call(table)
            move(tensors[1])
            with pytest.raises(InvalidArgument, match=f"^{use}: {message}"):
                call(table)
                pytest.fail(f"{kind}: was not seen")
    arrays = [np.zeros(count, str(dtype)[6:]) for _ in range(2)]
    table, call = make(arrays)
    arrays[1].resize(4, refcheck=False)
    with pytest.raises(InvalidArgument, match=f"^{use}: {message}"):
        call(table)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_copies_of_tables(again):
    """They are of their own arrays, which may lie elsewhere."""
    x, wires = ones(), [np.zeros(wire_layout(COUNT, "int8").nbytes, np.uint8) for _ in range(2)]
    for wire in wires:
        kernels.quantize(x, wire, format="int8")
    table, out = again(kernels.WireTable(wires)), torch.zeros(COUNT)
    del wires
    kernels.reduce_wires(table, out, format="int8")
    assert (out == 2).all()
    table = again(kernels.Sources([np.full(COUNT, 5, np.float32), ones()]))
    table.arrays[0][:] = 1
    kernels.reduce_n(table, out)
    assert (out == 2).all()
    for offsets in (None, [4, 0]):
        table = again(kernels.Table([torch.ones(3), np.full(2, 2.0)], torch.float32, offsets=offsets))
        table.tensors[0].zero_()
        out.fill_(9)
        kernels.pack(table, out)
        assert out[:7].tolist() == ([0, 0, 0, 0, 2, 2, 0] if offsets is None else [2, 2, 9, 9, 0, 0, 0])


# ---- On a GPU.
@pytest.mark.gpu
def test_arrays_on_other_devices():
    here, there = ones(), ones().cuda()
    wire = torch.zeros(wire_layout(COUNT, "int8").nbytes, dtype=torch.uint8)
    on_gpu = wire.cuda()
    for call, message in (
        (lambda: kernels.pack([there, here], there), "tensor 1 is on cpu, the flat buffer on cuda:0"),
        (lambda: kernels.Table([there, here], torch.float32), "tensor 1 is on cpu, tensor 0 on cuda:0"),
        (lambda: kernels.pack([there], here), "tensor 0 is on cuda:0, the flat buffer on cpu"),
        (lambda: kernels.pack(kernels.Table([there], torch.float32), here), "the flat buffer is on cpu, the tensors"),
        (lambda: kernels.pack([there], there.clone(), scale=here[:1]), "the scale is on cpu"),
        (lambda: kernels.measure([there], kernels.Statistics()), "the statistics are on cpu, the arrays on cuda:0"),
        (lambda: kernels.reduce_n([here, there], here), "source 1 is on cuda:0, source 0 on cpu"),
        (lambda: kernels.reduce_n([there], here), "out is on cpu, source 0 on cuda:0"),
        (lambda: kernels.reduce_n([there], there, scale=here[:1]), "the scale is on cpu, source 0 on cuda:0"),
        (lambda: kernels.quantize(there, wire, format="int8"), "wire is on cpu, source on cuda:0"),
        (lambda: kernels.quantize(there, on_gpu, format="int8", residual=here), "residual is on cpu"),
        (lambda: kernels.quantize(there, on_gpu, format="int8", scale=here[:1]), "scale is on cpu"),
        (lambda: kernels.reduce_wires([on_gpu, wire], there, format="int8"), "wire 1 is on cpu, wire 0 on cuda:0"),
        (lambda: kernels.reduce_wires([on_gpu], here, format="int8"), "out is on cpu, the wires on cuda:0"),
        (lambda: kernels.sgd_step(there, here, lr=0.5), "grad 0 is on cpu"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            call()
    table = kernels.Table([there, torch.ones(5, device="cuda")], torch.float32)
    table.tensors[1].data = torch.ones(5, device="cuda")
    with pytest.raises(InvalidArgument, match="tensor 1 doesn't lie where it did"):
        kernels.pack(table, torch.zeros(64, device="cuda"))
