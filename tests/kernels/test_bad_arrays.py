"""Arrays that no kernel takes, wherever they are given: refused by name before anything is written."""

from __future__ import annotations

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


def resized(nbytes, skip=0):
    tensor = torch.ones(COUNT + skip)[skip:]
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
