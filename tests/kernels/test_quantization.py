"""Wire formats: all bits against the oracle, on every instruction set and by the text for CUDA; bounds; feedback."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.layout import WIRE_BLOCKS, WIRE_FORMATS, wire_layout

from . import wire_oracle
from .ways import HOSTS, TEXTS, Place, bits, made
from .wire_cases import (
    COUNTS,
    FLOATING,
    FORMATS,
    MANY,
    PLAIN,
    SCALED,
    SEED,
    carried_of,
    check_bound,
    left_over,
    made_as,
    residual_of,
    rounding_of,
    same_wire,
    values_in,
)


# ---- Quantize: all bits.
def check_quantize(way, source, format, block, *, scale=1.0, residual=None, seed=None, position=0, offset=0, want=None):
    """Run it and compare wire and residual with the oracle's; gives the oracle's."""
    place = Place(offset=offset)
    own, left = place.copy(source), None if residual is None else place.copy(residual)
    wire = place.empty(wire_layout(source.numel(), format, block).nbytes, torch.uint8)
    with way():
        kernels.quantize(
            own, wire, format=format, block=block, scale=scale, residual=left, seed=seed, position=position
        )
    if want is None:
        x = values_in(source, scale, residual)
        sent = wire_oracle.encoded(x, format, block, seed, position)
        want = sent.wire, left_over(x, sent, residual)
    assert same_wire(format, bits(wire), want[0])
    if residual is not None:
        assert np.array_equal(bits(left), bits(want[1]))
    assert np.array_equal(bits(own), bits(source)), "the source was written to"
    place.check()
    return want


@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=["plain", "fp32", "bf16"])
@pytest.mark.parametrize("seed", [None, SEED], ids=rounding_of)
@pytest.mark.parametrize("block", WIRE_BLOCKS)
@pytest.mark.parametrize("format", FORMATS)
def test_quantize(format, block, seed, residual):
    for count in (*COUNTS, MANY) if block == 256 else COUNTS[-3:]:
        want = None
        for _, way in HOSTS if count in (4097, 9973, MANY) else HOSTS[::2]:
            want = check_quantize(
                way, made(count), format, block, scale=0.37, residual=residual_of(count, residual), seed=seed,
                position=3, offset=count % 3, want=want,
            )  # fmt: skip


@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=["plain", "fp32", "bf16"])
@pytest.mark.parametrize("seed", [None, SEED], ids=rounding_of)
@pytest.mark.parametrize("format", FORMATS)
def test_quantize_by_the_cuda_text(format, seed, residual):
    for (_, way), block, count in zip(TEXTS, (*WIRE_BLOCKS, 128), (4097, 9973, 12289, 1), strict=True):
        check_quantize(
            way, made(count), format, block, scale=0.37, residual=residual_of(count, residual), seed=seed,
            position=count % 4, offset=count % 3,
        )  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
def test_sizes_by_the_cuda_text(count):
    for format, seed in (("int8", None), ("fp8_e4m3", 5), ("bf16", None)):
        check_quantize(TEXTS[1][1], made(count), format, 128, residual=residual_of(count, torch.float32), seed=seed)


@pytest.mark.parametrize("way", [*HOSTS[::2], TEXTS[1]], ids=lambda way: way[0])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_sources_of_every_dtype(dtype, way):
    source = made_as(5003, dtype)
    for format, offset in itertools.product(("int8", "fp16"), (0, 1, 3)):
        check_quantize(way[1], source, format, 256, scale=1 / 3, offset=offset)


@pytest.mark.parametrize("way", [HOSTS[0], TEXTS[0]], ids=lambda way: way[0])
def test_a_scale_on_the_device(way):
    x = made(300, specials=False)
    wires = [torch.empty(wire_layout(300, "int8").nbytes, dtype=torch.uint8) for _ in range(2)]
    with way[1]():
        kernels.quantize(x, wires[0], format="int8", scale=torch.tensor([0.3]))
        kernels.quantize(x, wires[1], format="int8", scale=float(np.float32(0.3)))
    assert torch.equal(*wires)


# ---- The numbers behind the random bits.
def test_philox_known_answers():
    """The vectors of Random123's kat_vectors; the kernels' bits are compared with this Philox everywhere above."""
    ones = 0xFFFFFFFF
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, answer in vectors:
        assert tuple(int(word) for word in wire_oracle.philox(counter, key)) == answer
    words = wire_oracle.philox_words(SEED, 5, 9)
    assert np.array_equal(words, wire_oracle.philox_words(SEED, 0, 14)[5:])


@pytest.mark.parametrize("way", [*HOSTS[::2], TEXTS[3]], ids=lambda way: way[0])
@pytest.mark.parametrize("position", [0, 1, 2, 3, (1 << 34) - 5, (1 << 63) - 3000])
def test_draws_at_any_position(position, way):
    for seed in (0, 1, (1 << 64) - 1):
        check_quantize(way[1], made(999, specials=False), "fp8_e5m2", 128, seed=seed, position=position)


@pytest.mark.parametrize("format", FORMATS)
def test_random_rounding_has_the_right_mean(format):
    """The mean of n draws lies within 5 standard deviations (a draw's: at most half a unit) of x; nearest doesn't."""
    rng = np.random.default_rng(3)
    values = np.append(rng.uniform(-1, 1, 19), 1.0).astype(np.float32)
    n = 20000
    x = torch.from_numpy(np.tile(values, n))  # the scales of all blocks are alike
    wire = torch.empty(wire_layout(len(x), format).nbytes, dtype=torch.uint8)
    out = torch.empty(len(x))
    means = {}
    for seed in (None, 12345):
        kernels.quantize(x, wire, format=format, seed=seed)
        kernels.dequantize(wire, out, format=format)
        means[seed] = out.double().reshape(n, -1).mean(dim=0).numpy()
    spec = WIRE_FORMATS[format]
    unit = 2 * (spec.relative * np.abs(values) + spec.absolute * (1 / spec.limit if spec.scaled else 1))
    off = np.abs(means[12345] - values)
    assert (off <= 5 * unit / 2 / math.sqrt(n) + 2.0**-20 * np.abs(values)).all(), off / unit
    assert (np.abs(means[None] - values) > 5 * unit / 2 / math.sqrt(n)).mean() > 0.5


@pytest.mark.parametrize("way", [*HOSTS[::2], TEXTS[0]], ids=lambda way: way[0])
def test_int8_at_random_stays_in_range(way):
    """x * (127 / max) may be a little more than 127, and the largest draws would carry it to 128, which is -128."""
    amax = np.arange(0x3FFC0000, 0x40000000, dtype=np.uint32).view(np.float32)
    x = amax[amax * (np.float32(127) / amax) > 127][0]
    words = wire_oracle.philox_words(SEED, 0, 1 << 20)
    positions = np.flatnonzero(words >= (1 << 32) - (1 << 15))
    assert len(positions)
    for position in map(int, positions):
        for value in (float(x), -float(x)):
            check_quantize(way[1], torch.tensor([value]), "int8", 128, seed=SEED, position=position)
            assert abs(carried_of(torch.tensor([value]), "int8", 128, SEED)[0] / value - 1) < 2.0**-6


# ---- Bounds.


@pytest.mark.parametrize("seed", [None, SEED], ids=rounding_of)
@pytest.mark.parametrize("format", FORMATS)
def test_bounds_are_met_and_not_much_too_wide(format, seed):
    """Every float of some binades, and largest values all over fp32's range."""
    rng = np.random.default_rng(5)
    x = np.concatenate([
        np.linspace(-1, 1, 200001).astype(np.float32),
        (rng.standard_normal((4000, 128)) * np.exp2(rng.uniform(-125, 120, (4000, 1)))).astype(np.float32).ravel(),
        np.arange(0x3F800000, 0x3F900000, 7, dtype=np.uint32).view(np.float32),
        np.arange(0x7F7F0000, 0x7F800000, 3, dtype=np.uint32).view(np.float32),  # up to the largest
        np.arange(0, 1 << 16, dtype=np.uint32).view(np.float32),  # subnormal
    ])  # fmt: skip
    for block in WIRE_BLOCKS:
        reached = check_bound(x, carried_of(torch.from_numpy(x), format, block, seed).numpy(), format, block, seed)
        assert 0.85 < reached <= 1, reached


# ---- Error feedback.
@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", [None, SEED], ids=rounding_of)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_sent_adds_up(format, seed, kept_in):
    """The sum of T messages is the sum of the inputs less the last residual, but for the documented roundings."""
    count, steps = 3000, 30
    residual = torch.zeros(count, dtype=kept_in)
    wire = torch.empty(wire_layout(count, format).nbytes, dtype=torch.uint8)
    out = torch.empty(count)
    inputs, sent, slack = (np.zeros(count) for _ in range(3))
    for step in range(steps):
        source = made(count, 100 + step, specials=False) * 2.0**-20
        before = residual.double().numpy().copy()
        kernels.quantize(source, wire, format=format, scale=0.7, residual=residual, seed=seed and seed + step)
        kernels.dequantize(wire, out, format=format)
        given = source.double().numpy() * float(np.float32(0.7))
        after = residual.double().numpy()
        inputs, sent = inputs + given, sent + out.double().numpy()
        kept = 2.0**-24 if kept_in == torch.float32 else 2.0**-8
        slack += 2.0**-24 * (np.abs(given) + np.abs(given + before)) + kept * np.abs(after) + 2.0**-140
    off = np.abs(sent + residual.double().numpy() - inputs)
    assert (off <= slack * (1 + 2.0**-20)).all()
    assert np.abs(sent - inputs).max() > 0
    if kept_in == torch.float32:  # without a residual the error grows with the number of steps
        assert np.abs(sent - inputs).max() <= 40 * np.abs(residual.numpy()).max()


@pytest.mark.parametrize("way", [*HOSTS[::2], TEXTS[1]], ids=lambda way: way[0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite(format, bad, way):
    """It takes its block with it, and no residual: the step will be skipped."""
    x = made(1000, specials=False)
    x[300] = bad
    residual = made(1000, 9, specials=False)
    before = residual.clone()
    wire = torch.empty(wire_layout(1000, format).nbytes, dtype=torch.uint8)
    out, statistics = torch.empty(1000), kernels.Statistics()
    with way[1]():
        kernels.quantize(x, wire, format=format, scale=2.0, residual=residual)  # 6.8e38 isn't finite either
        kernels.dequantize(wire, out, format=format, statistics=statistics)
    hit = torch.zeros(1000, dtype=torch.bool)
    hit[256:512] = True
    if format in PLAIN:
        hit[:] = False
        hit[300] = True
        hit |= (x * 2 + before).abs() >= (65520 if format == "fp16" else math.inf)
        assert out[300].isnan() if math.isnan(bad) else out[300] == math.copysign(math.inf, bad)
        assert out[hit].isfinite().sum() == 0
    else:
        assert out[hit].isnan().all()
    assert out[~hit].isfinite().all()
    assert torch.equal(residual[hit], before[hit]) and not torch.equal(residual[~hit], before[~hit])
    assert residual.isfinite().all()
    assert statistics.nonfinite.item() == hit.sum() and not statistics.sum_of_squares.isfinite()


@pytest.mark.parametrize("seed", [None, SEED], ids=rounding_of)
@pytest.mark.parametrize("format", SCALED)
def test_zeros_and_tiny_blocks(format, seed):
    limit = WIRE_FORMATS[format].limit
    least = limit * 2.0**-126
    x = torch.zeros(4 * 128)
    x[128:256] = -0.0
    x[256:384] = np.nextafter(np.float32(least), np.float32(0)).item()
    x[384:] = least
    residual = torch.zeros(512)
    wire = torch.full((wire_layout(512, format, 128).nbytes,), 255, dtype=torch.uint8)
    kernels.quantize(x, wire, format=format, block=128, residual=residual, seed=seed)
    assert wire[:384].eq(0).all() and wire[384:512].ne(0).all()
    assert wire[512:].view(torch.float32).tolist() == [0.0, 0.0, 0.0, 2.0**-126]
    assert torch.equal(residual[:384].abs(), x[:384].abs()) and residual[384:].eq(0).all()
    assert carried_of(x, format, 128, seed)[:384].eq(0).all()


def test_overflow_of_fp16_is_the_same_at_random():
    """Infinity from 65,520 on, however it is rounded; below it never."""
    x = torch.tensor([65519.99, 65520.0, -65519.99, -65520.0, 65504.0] * 200)
    wire = torch.empty(wire_layout(1000, "fp16").nbytes, dtype=torch.uint8)
    for seed in (None, 1, 2):
        residual = torch.full((1000,), 0.0)
        kernels.quantize(x, wire, format="fp16", residual=residual, seed=seed)
        sent = wire.view(torch.float16)[:1000].reshape(200, 5)
        assert torch.equal(sent.isinf(), (x.abs() >= 65520).reshape(200, 5))
        assert residual.reshape(200, 5)[:, [1, 3, 4]].eq(0).all()
