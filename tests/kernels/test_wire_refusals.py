"""What the wire formats' functions refuse, and that they have written nothing then; layouts; kinds of arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidArgument
from collectives.layout import WIRE_FORMATS, wire_layout

from . import wire_oracle
from .ways import bits, made

FORMATS = tuple(WIRE_FORMATS)


# ---- Layout.
def test_layout():
    assert wire_layout(5, "int8", 128) == (5, 16, 1, 32)
    assert wire_layout(4096, "fp8_e4m3", 128) == (4096, 4096, 32, 4224)
    assert wire_layout(129, "fp8_e5m2", 128) == (129, 144, 2, 160)
    assert wire_layout(9, "bf16", 128) == (18, 32, 0, 32)
    assert wire_layout(2**33 + 1, "fp16")[3] == 2**34 + 16
    for format in FORMATS:
        assert wire_layout(0, format) == (0, 0, 0, 0)
    for wrong, match in (
        ((3, "int4"), "format must be one of 'fp16', .*'int8', not 'int4'"),
        ((3, "int8", 64), "block must be one of 128, 256, 512, not 64"),
        ((-1, "int8"), "count must be 0 or more"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            wire_layout(*wrong)


# ---- Refusals.
def refuse(match, call, *arguments, **options):
    """It raises, and has written nothing."""
    written = [each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor) and each.is_cpu]
    written = [each for each in written if each.layout == torch.strided]
    before = [bits(each).copy() for each in written]
    with pytest.raises(InvalidArgument, match=match) as caught:
        call(*arguments, **options)
    assert all(np.array_equal(bits(each), old) for each, old in zip(written, before, strict=True))
    assert caught.value.op == call.__name__


WIRE = wire_layout(100, "int8").nbytes
X, W = torch.ones(100), torch.zeros(WIRE, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("match", "source", "wire", "options"),
    [
        ("source is int32: only floating dtypes", X.int(), W, {}),
        ("source is complex64: only floating", X.to(torch.complex64), W, {}),
        ("wire is float32: a wire buffer is uint8", X, torch.zeros(WIRE // 4), {}),
        (r"wire has 96 bytes, 100 values as int8 in blocks of 256 need 128", X, W[:96], {}),
        ("wire has 128 bytes, 100 values as fp16 need 208", X, W, {"format": "fp16"}),
        ("wire begins at an address that is no multiple of 4", X, torch.zeros(WIRE + 2, dtype=torch.uint8)[2:], {}),
        ("wire of shape .* isn't contiguous", X, torch.zeros(2 * WIRE, dtype=torch.uint8)[::2], {}),
        ("format must be one of .*, not 'int4'", X, W, {"format": "int4"}),
        ("block must be one of 128, 256, 512, not 100", X, W, {"block": 100}),
        ("block must be one of 128, 256, 512, not 256.0", X, W, {"block": 256.0}),
        ("format this int and block 256", X, W, {"format": 10**5000}),
        ("position must be a whole number .* not this int", X, W, {"position": 10**5000}),
        (r"scale 1e\+39 is infinite in fp32", X, W, {"scale": 1e39}),
        ("residual has 128 elements, source 100", X, W, {"residual": torch.zeros(128)}),
        ("residual is float64: it must be float32 or bfloat16", X, W, {"residual": torch.zeros(100).double()}),
        ("residual overlaps source", X, W, {"residual": X}),
        ("seed must be a whole number from 0 to 18446744073709551615, not -1", X, W, {"seed": -1}),
        ("seed must be a whole number", X, W, {"seed": 1.5}),
        ("seed must be a whole number", X, W, {"seed": True}),
        ("position must be a whole number from 0", X, W, {"position": -1}),
        ("position must be a whole number", X, W, {"position": (1 << 63) - 100}),
        ("scale must be a number", X, W, {"scale": "1"}),
        ("scale is float32 of 2 elements", X, W, {"scale": torch.ones(2)}),
        ("scale must be finite, not 1000", X, W, {"scale": 10**400}),
        ("scale must be finite, not nan", X, W, {"scale": math.nan}),
        ("wire overlaps scale", X, W, {"scale": W.view(torch.float32)[3:4]}),
    ],
)
def test_quantize_refuses(match, source, wire, options):
    refuse(match, kernels.quantize, source, wire, **({"format": "int8"} | options))


def test_quantize_refuses_overlaps():
    whole = torch.zeros(1000)
    inside = whole.view(torch.uint8)
    refuse("wire overlaps source", kernels.quantize, whole[:100], inside[:WIRE], format="int8")
    refuse("wire overlaps source", kernels.quantize, whole[:100], inside[396 : 396 + WIRE], format="int8")
    kernels.quantize(whole[:100], inside[400 : 400 + WIRE], format="int8")
    for residual in (whole[131:231], whole[50:150]):
        refuse(
            "residual overlaps", kernels.quantize, whole[:100], inside[400 : 400 + WIRE], format="int8",
            residual=residual,
        )  # fmt: skip
    read_only = W.numpy().copy()
    read_only.flags.writeable = False
    refuse("wire is a read-only NumPy array", kernels.quantize, X, read_only, format="int8")


def test_the_wires_are_looked_at():
    good, out = [torch.zeros(WIRE, dtype=torch.uint8) for _ in range(4)], torch.zeros(100)
    reduce = kernels.reduce_wires
    refuse("wires must be a sequence", reduce, good[0], out, format="int8")
    refuse("wires must be a sequence", reduce, None, out, format="int8")
    refuse("wires is empty", reduce, [], out, format="int8")
    refuse("wire 2 has 96 bytes, wire 0 has 128", reduce, [*good[:2], good[2][:96]], out, format="int8")
    refuse("wire 0 has 128 bytes, 100 values as bf16 need 208", reduce, good, out, format="bf16")
    refuse("wire 3 is int8: a wire buffer is uint8", reduce, [*good[:3], good[3].view(torch.int8)], out, format="int8")
    refuse("wire 1 is a meta tensor", reduce, [good[0], good[1].to("meta")], out, format="int8")
    refuse("out overlaps wire 1", reduce, [good[0], out.view(torch.uint8)[:WIRE]], out, format="int8")
    refuse("out is int64: only floating", reduce, good, out.long(), format="int8")
    refuse("average_over must be a whole number from 1", reduce, good, out, format="int8", average_over=0)
    refuse("the statistics are on", reduce, good, out, format="int8", statistics=kernels.Statistics("meta"))
    refuse("wire has 64 bytes, 100 values", kernels.dequantize, good[0][:64], out, format="int8")
    refuse("statistics must be a Statistics, not list", kernels.dequantize, good[0], out, format="int8", statistics=[])
    refuse("out overlaps wire:", kernels.dequantize, out.view(torch.uint8)[:WIRE], out, format="int8")
    again = kernels.requantize
    own = good[3]
    refuse("out has 64 bytes, 100 values", again, good[:3], own[:64], count=100, format="int8")
    refuse("residual has 99 elements, each wire 100", again, good[:3], own, count=100, format="int8", residual=X[:99])
    refuse("count must be a whole number from 0", again, good[:3], own, count=-1, format="int8")
    refuse("count must be a whole number", again, good[:3], own, count=1.0, format="int8")
    shifted = torch.zeros(2 * WIRE, dtype=torch.uint8)
    refuse("out overlaps wire 1", again, [good[0], shifted[:WIRE]], shifted[16 : 16 + WIRE], count=100, format="int8")
    twenty = [torch.zeros(80, dtype=torch.uint8) for _ in range(2)]
    refuse(
        "residual overlaps wire 1", again, [each[:48] for each in twenty], twenty[0][:48], count=20, format="int8",
        residual=twenty[1].view(torch.float32),
    )  # fmt: skip


def test_a_scale_in_a_wire_that_is_written():
    own = W.clone()
    for first in (0, 4, 64):
        scale = own[first : first + 4].view(torch.float32)
        refuse("out overlaps scale", kernels.requantize, [own, W], own, count=100, format="int8", scale=scale)


def test_numpy_arrays():
    x = made(1000, specials=False).numpy()
    wire, out = np.zeros(wire_layout(1000, "int8").nbytes, np.uint8), np.zeros(1000, np.float32)
    kernels.quantize(x, wire, format="int8", residual=np.zeros(1000, np.float32))
    kernels.dequantize(wire, out, format="int8")
    assert np.array_equal(out, wire_oracle.encoded(x, "int8", 256).carried)
