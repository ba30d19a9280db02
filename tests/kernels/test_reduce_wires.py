"""dequantize, reduce_wires, requantize: all bits against the oracle; the sum's bound; all of it on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.layout import wire_layout

from . import wire_oracle
from .bucket_cases import check_statistics
from .ways import HOSTS, TEXTS, Place, bits, made
from .wire_cases import (
    FLOATING,
    FORMATS,
    MANY,
    SCALED,
    SEED,
    left_over,
    made_as,
    oracle_type,
    residual_of,
    rounded,
    rounding_of,
    same_or_nan,
    same_wire,
    send,
)


# ---- Dequantize, reduce_wires.
@pytest.mark.parametrize(("dtype", "add"), [(dtype, number % 2 == 0) for number, dtype in enumerate(FLOATING)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_reduce_wires(format, dtype, add):
    for count, block, n in ((0, 128, 1), (1, 512, 2), (4097, 128, 3), (9973, 256, 4), (1023, 512, 1), (MANY, 256, 2)):
        wires = [send(made(count, seed, specials=seed == 0), format, block) for seed in range(n)]
        average_over, scale = (None, 1.0) if count == 4097 else (n, 0.3)
        values = wire_oracle.carried_by([bits(wire) for wire in wires], count, format, block, average_over, scale)
        before = made(count, 77, specials=False).to(dtype)
        wide = torch.from_numpy(values).to(torch.float64 if dtype == torch.float64 else torch.float32)
        if add:
            wide = before.to(wide.dtype) + wide
        want = rounded(wide, dtype)
        ways = HOSTS if count == MANY else [*HOSTS[::2], *TEXTS[1:3]]
        for offset, (name, way) in enumerate(ways):
            place = Place(offset=offset % 3)
            out, own = place.copy(before), [place.copy(wire) for wire in wires]
            statistics = kernels.Statistics()
            with way():
                kernels.reduce_wires(
                    own, out, format=format, block=block, scale=scale, average_over=average_over, add=add,
                    statistics=statistics,
                )  # fmt: skip
            assert same_or_nan(out, want), name
            assert all(np.array_equal(bits(mine), bits(wire)) for mine, wire in zip(own, wires, strict=True))
            place.check()
            check_statistics(statistics, [values], [oracle_type(dtype)])


@pytest.mark.parametrize("way", [*HOSTS[::2], TEXTS[2]], ids=lambda way: way[0])
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_is_reduce_of_one(format, way):
    """And all elements are read, those that quantize never writes too."""
    if format in SCALED:
        payload = torch.arange(1024, dtype=torch.int64).to(torch.uint8)
        wire = torch.cat([payload, torch.tensor([1.0, -0.37, 1e-30, 0.0]).view(torch.uint8)])
        count = 1024
    else:
        count = 65536
        wire = torch.arange(count, dtype=torch.int64).to(torch.int16).view(torch.uint8)
    want = torch.from_numpy(wire_oracle.decoded(bits(wire), count, format, 256))
    outs = [torch.empty(count) for _ in range(2)]
    with way[1]():
        kernels.dequantize(wire, outs[0], format=format)
        kernels.reduce_wires([wire], outs[1], format=format)
    assert same_or_nan(outs[0], want) and same_or_nan(outs[1], want)


# ---- Requantize.
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=["plain", "fp32", "bf16"])
@pytest.mark.parametrize("seed", [None, SEED], ids=rounding_of)
@pytest.mark.parametrize("format", FORMATS)
def test_requantize(format, seed, residual):
    """The bits of reduce_wires and quantize one after the other; in place too."""
    for count, block, n, average_over in ((1, 512, 1, None), (4097, 128, 3, 3), (9973, 256, 5, 7), (MANY, 512, 2, 2)):
        wires = [send(made(count, k, specials=k == 1), format, block) for k in range(n)]
        x = wire_oracle.carried_by([bits(wire) for wire in wires], count, format, block, average_over, 0.9)
        before = residual_of(count, residual)
        with np.errstate(all="ignore"):
            x = x if before is None else x + before.float().numpy()
        sent = wire_oracle.encoded(x, format, block, seed, 5)
        left = left_over(x, sent, before)
        ways = HOSTS[::2] if count == MANY else [*HOSTS, TEXTS[3], TEXTS[1]]  # of both kinds some are in place
        for number, (name, way) in enumerate(ways):
            place = Place(offset=number % 3)
            own = [place.copy(wire) for wire in wires]
            out = own[-1] if number % 2 else place.empty(wires[0].numel(), torch.uint8)
            mine = None if before is None else place.copy(before)
            with way():
                kernels.requantize(
                    kernels.WireTable(own), out, count=count, format=format, block=block, scale=0.9,
                    average_over=average_over, residual=mine, seed=seed, position=5,
                )  # fmt: skip
            assert same_wire(format, bits(out), sent.wire), name
            assert before is None or np.array_equal(bits(mine), bits(left)), name
            place.check()


# ---- On a GPU: the same calls, the same bits.
@pytest.mark.gpu
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=["plain", "fp32", "bf16"])
@pytest.mark.parametrize("seed", [None, SEED], ids=rounding_of)
@pytest.mark.parametrize("format", FORMATS)
def test_on_a_gpu(format, seed, residual):
    for (count, block), source_dtype in zip(
        ((1, 128), (4097, 256), (9973, 512), (MANY, 128), (0, 128), (5_000_011, 256)), FLOATING, strict=True
    ):
        source = made_as(count, source_dtype)
        before = residual_of(count, residual)
        results = []
        for engine in ("host", "nccl"):
            place = Place(engine, offset=count % 3)
            left = None if before is None else place.copy(before)
            nbytes = wire_layout(count, format, block).nbytes
            wires = [place.empty(nbytes, torch.uint8) for _ in range(3)]
            own = place.copy(source)
            scale = torch.tensor([0.37], device=own.device)
            for k, wire in enumerate(wires):
                kernels.quantize(
                    own, wire, format=format, block=block, scale=scale, residual=left if k == 0 else None,
                    seed=None if seed is None else seed - k, position=k,
                )  # fmt: skip
            middle, out = place.empty(nbytes, torch.uint8), place.copy(made(count, 8, specials=False).bfloat16())
            table = kernels.WireTable(wires)
            kernels.requantize(
                table, middle, count=count, format=format, block=block, average_over=3, residual=left, seed=seed
            )
            statistics = kernels.Statistics(own.device)
            kernels.reduce_wires(table, out, format=format, block=block, add=True, statistics=statistics)
            place.check()
            sent = [bits(each) for each in (*wires, middle)]
            kept = None if left is None else bits(left)
            results.append((sent, kept, out.cpu(), statistics.sum_of_squares.cpu(), statistics.nonfinite.cpu()))
        ours, theirs = results
        assert all(same_wire(format, a, b) for a, b in zip(ours[0], theirs[0], strict=True))
        assert residual is None or np.array_equal(ours[1], theirs[1])
        assert same_or_nan(ours[2], theirs[2]) and same_or_nan(ours[3], theirs[3]) and torch.equal(ours[4], theirs[4])
