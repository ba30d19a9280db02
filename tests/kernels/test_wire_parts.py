"""Parts of an array with a wire buffer each: the bits of a call for each part, by one launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidArgument
from collectives.kernels import WireParts
from collectives.layout import wire_layout

from .ways import HOSTS, TEXTS, Place, bits, made
from .wire_cases import SEED, residual_of

FILL = 0xA5
# Parts, elements of one, elements from one to the next, elements of the array.
SHAPES = [
    (3, 8192, 8192, 3 * 8192),  # full tiles
    (3, 5000, 5000, 2 * 5000 + 77),  # the last one is shorter
    (4, 512, 512, 700),  # two are empty, the second is shorter
    (3, 4999, 5001, 2 * 5001 + 999),  # each at another address modulo a pack
    (2, 4096, 9000, 9000 + 4096),  # with elements between them that nobody sends
    (2, 256, 300, 290),  # the array ends between two parts
    (2, 256, 256, 0),
]
WAYS = [HOSTS[0], HOSTS[-1], TEXTS[1], TEXTS[2]]


def spans(shape):
    """Give the first and the last element of each part."""
    n, numel, stride, total = shape
    return [(min(p * stride, total), min(p * stride + numel, total)) for p in range(n)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_calls_of_their_own(shape, way):
    n, numel, stride, total = shape
    for format, seed, kept_in, dtype in (
        ("int8", None, torch.float32, torch.float32), ("fp8_e4m3", SEED, torch.bfloat16, torch.bfloat16),
        ("fp8_e5m2", None, None, torch.float64), ("bf16", SEED, torch.float32, torch.float32),
        ("fp16", None, None, torch.float16),
    ):  # fmt: skip
        width = wire_layout(numel, format, 128).nbytes + (16 if stride % 4 == 0 else 4)
        place, parts = Place(), WireParts(n, numel, width, stride)
        source, residual = place.copy(made(total).to(dtype)), residual_of(total, kept_in)
        left = None if residual is None else place.copy(residual)
        wires, want = place.empty(n * width, torch.uint8), torch.full((n * width,), FILL, dtype=torch.uint8)
        wires.fill_(FILL)
        out, one = place.empty(total, torch.float32), torch.zeros(total)
        out.zero_()
        found, sums = kernels.Statistics(), torch.zeros(2, dtype=torch.float64)
        how = {"format": format, "block": 128}
        with way[1]():
            kernels.quantize(source, wires, scale=0.37, residual=left, seed=seed, position=5, parts=parts, **how)
            kernels.dequantize(wires, out, scale=0.5, add=True, statistics=found, parts=parts, **how)
        for p, (first, last) in enumerate(spans(shape)):
            wire = want[p * width : p * width + wire_layout(last - first, format, 128).nbytes]
            kept = None if residual is None else residual[first:last]
            kernels.quantize(source[first:last], wire, scale=0.37, residual=kept, seed=seed, position=5 + first, **how)
            own = kernels.Statistics()
            kernels.dequantize(wire, one[first:last], scale=0.5, add=True, statistics=own, **how)
            sums += torch.cat([own.sum_of_squares, own.nonfinite.double()])
        assert torch.equal(wires, want), format
        assert residual is None or np.array_equal(bits(left), bits(residual)), format
        assert torch.allclose(out, one, rtol=0, atol=0, equal_nan=True), format
        assert found.nonfinite.item() == sums[1] and torch.allclose(found.sum_of_squares, sums[:1], equal_nan=True)
        place.check()


def test_parts_are_checked():
    x, wires = torch.zeros(1000), torch.zeros(4 * 528, dtype=torch.uint8)

    def refused(match, *parts, wire=wires, source=x):
        with pytest.raises(InvalidArgument, match=match):
            kernels.quantize(source, wire, format="int8", parts=WireParts(*parts))
        with pytest.raises(InvalidArgument, match=match):
            kernels.dequantize(wire, source, format="int8", parts=WireParts(*parts))

    refused("parts.count must be a whole number from 1", 0, 500, 528)
    refused("parts.numel must be a whole number from 0, not 1.5", 2, 1.5, 528)
    refused("parts.stride is 400 elements, less than the 500", 2, 500, 528, 400)
    refused("the array has 1000 elements, 2 parts of 400, 400 apart, end at 800", 2, 400, 528)
    refused("500 values as int8 need 528", 2, 500, 512)
    refused("multiple of 4", 2, 500, 530)
    refused("wire has 528 bytes", 2, 500, 528, wire=wires[:528])
    with pytest.raises(InvalidArgument, match="parts must be a WireParts, not tuple"):
        kernels.quantize(x, wires, format="int8", parts=(2, 500, 528))
