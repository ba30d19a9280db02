"""pack and unpack against the definition in NumPy, bit for bit: every instruction set, and the CUDA kernels' text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.layout import bucket_layout
from tests.oracle import DTYPES, decode, encode, make

from .bucket_cases import (
    FLOATS,
    LANES,
    POISON,
    SCALE,
    SIZES,
    TILE,
    array,
    arrays,
    check,
    check_packed,
    check_statistics,
    tensors_of,
    values_of,
)
from .ways import HOSTS, TEXTS

HOST = dict(HOSTS[::2])
MODES = HOST | dict(TEXTS[:3])


@pytest.fixture(params=MODES)
def mode(request):
    with MODES[request.param]():
        yield request.param


# ---- All pairs of types.
def every_pair() -> list:
    """(mode, source, to): all pairs in one mode; in others each type once on each side, the rest thorough."""
    names, found = list(FLOATS), []
    for number, mode in enumerate(MODES):
        for i, source in enumerate(names):
            for j, to in enumerate(names):
                often = number == 0 or (j - i - number) % len(names) == 0
                found.append(pytest.param(mode, source, to, marks=[] if often else pytest.mark.thorough))
    return found


@pytest.mark.parametrize(("mode", "source", "to"), every_pair(), indirect=["mode"])
def test_pack_all_types(mode, source, to):
    sizes = SIZES if mode in HOST else SIZES[:-2]
    for specials in (True, False):
        sources = arrays(source, sizes, 1, specials=specials)
        table = kernels.Table(tensors_of(sources), FLOATS[to])
        flat = array(to, table.total)
        found = kernels.Statistics()
        kernels.pack(table, flat.tensor, scale=SCALE, statistics=found)
        check_packed(sources, flat, table.offsets, SCALE, found)
        assert specials or 0 < found.sum_of_squares.item() < np.inf
        flat = array(to, table.total)
        kernels.pack(table, flat.tensor, scale=SCALE)
        check_packed(sources, flat, table.offsets, SCALE, None)


@pytest.mark.parametrize(("mode", "source", "to"), every_pair(), indirect=["mode"])
@pytest.mark.parametrize("add", [False, True])
def test_unpack_all_types(mode, source, to, add):
    sizes = SIZES if mode in HOST else SIZES[:-2]
    offsets, total = bucket_layout(sizes, DTYPES[source].itemsize)
    flat = array(source, make(DTYPES[source], total, 2))
    targets = arrays(to, sizes, 3)
    before = [target.bits for target in targets]
    found = kernels.Statistics()
    kernels.unpack(flat.tensor, tensors_of(targets), scale=SCALE, add=add, statistics=found)
    pieces = []
    for index, (target, offset, old) in enumerate(zip(targets, offsets, before, strict=True)):
        pieces.append(values_of(flat.dtype, flat.bits[offset : offset + old.size], target.dtype, SCALE))
        result = pieces[-1]
        if add:
            with np.errstate(all="ignore"):
                result = decode(target.dtype, old).astype(result.dtype) + result
        check(target.dtype, target.bits, encode(target.dtype, result), f"tensor {index}")
        assert target.intact()
    assert flat.intact()
    check_statistics(found, pieces, [target.dtype for target in targets])


@pytest.mark.parametrize("to", FLOATS)
def test_mixed_types_in_one_table(mode, to):
    sources = [array(name, make(DTYPES[name], 5000 + i, 4 + i), i) for i, name in enumerate(list(FLOATS) * 2)]
    table = kernels.Table(tensors_of(sources), FLOATS[to])
    flat = array(to, table.total + 5, shift=1)
    found = kernels.Statistics()
    kernels.pack(table, flat.tensor, statistics=found)
    check_packed(sources, flat, table.offsets, 1.0, found)
    kernels.pack(table, flat.tensor)  # tensors of the same type are copied
    for source, offset in zip(sources, table.offsets, strict=True):
        want = encode(flat.dtype, values_of(source.dtype, source.bits, flat.dtype, 1.0))
        check(flat.dtype, flat.bits[offset : offset + want.size], want, source.dtype.name)


PAIRS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float8e5m2")]


@pytest.mark.parametrize("source, to", PAIRS)
def test_unaligned_views(mode, source, to):
    sources = arrays(source, (4099, 1, 2050, 15, 8191), 5, shift=1)
    table = kernels.Table(tensors_of(sources), FLOATS[to])
    for shift in (1, 3):
        flat = array(to, table.total, shift)
        found = kernels.Statistics()
        kernels.pack(table, flat.tensor, scale=-2.5, statistics=found)
        check_packed(sources, flat, table.offsets, -2.5, found)
        targets = [array(source, each.bits.size, 2) for each in sources]
        kernels.unpack(flat.tensor, tensors_of(targets))
        for target, offset in zip(targets, table.offsets, strict=True):
            piece = flat.bits[offset : offset + target.bits.size]
            want = encode(target.dtype, values_of(flat.dtype, piece, target.dtype, 1.0))
            check(target.dtype, target.bits, want, "back")
            assert target.intact()


@pytest.mark.parametrize("pair", [("float32", "bfloat16"), ("float64", "float16"), ("float32", "float32")])
def test_own_offsets_leave_the_gaps_alone(mode, pair):
    source, to = pair
    sources = arrays(source, (10, 0, 4097, 3), 6)
    offsets = (4200, 7, 11, 4111)
    flat = array(to, 4300)
    found = kernels.Statistics()
    kernels.pack(tensors_of(sources), flat.tensor, offsets=offsets, scale=SCALE, statistics=found)
    check_packed(sources, flat, offsets, SCALE, found, pads=False)
    targets = [array(source, each.bits.size) for each in sources]
    kernels.unpack(flat.tensor, tensors_of(targets), offsets=offsets)
    for target, offset in zip(targets, offsets, strict=True):
        piece = flat.bits[offset : offset + target.bits.size]
        check(target.dtype, target.bits, encode(target.dtype, values_of(flat.dtype, piece, target.dtype, 1.0)), "back")


# ---- Copies.
ANY = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
ANY += [torch.uint64, torch.complex64, torch.complex128, *FLOATS.values()]


@pytest.mark.parametrize("dtype", ANY, ids=lambda dtype: str(dtype)[6:])
def test_copies_keep_every_bit(mode, dtype):
    """Signalling NaN and their payloads, too; the padding becomes 0."""
    rng = np.random.default_rng(7)
    end = 2 if dtype is torch.bool else 256
    images = [rng.integers(0, end, n * dtype.itemsize, dtype=np.uint8) for n in (5, 4097, 0, 9000)]
    tensors = [torch.from_numpy(image.copy()).view(dtype) for image in images if image.size]
    tensors.insert(2, torch.empty(0, dtype=dtype))
    table = kernels.Table(tensors, dtype)
    flat = array("uint8", table.nbytes + 32)
    kernels.pack(table, flat.tensor.view(dtype))
    want = np.full(flat.guarded.nbytes, POISON, np.uint8)
    for image, offset in zip(images, table.offsets, strict=True):
        start = offset * dtype.itemsize
        want[start : start + image.size] = image
        want[start + image.size : start - -image.size // 16 * 16] = 0
    assert (flat.bits == want).all() and flat.intact()
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0)
    kernels.unpack(flat.tensor.view(dtype), table)
    assert all((t.view(torch.uint8).numpy() == image).all() for t, image in zip(tensors, images, strict=True))


def test_a_raw_table_takes_every_type(mode):
    """The state of a module in one buffer of bytes."""
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).half()
    state = [*module.state_dict().values(), torch.ones(3, dtype=torch.bool), torch.randn(3, dtype=torch.complex128)]
    table = kernels.Table(state, torch.uint8)
    assert table.total % 16 == 0 and all(offset % 16 == 0 for offset in table.offsets)
    flat = array("uint8", table.total)
    kernels.pack(table, flat.tensor)
    for tensor, offset in zip(state, table.offsets, strict=True):
        assert (flat.bits[offset : offset + tensor.nbytes] == tensor.reshape(-1).view(torch.uint8).numpy()).all()
    others = [torch.zeros_like(tensor) for tensor in state]
    kernels.unpack(flat.tensor, others)
    assert all(torch.equal(a, b) for a, b in zip(state, others, strict=True))


# ---- Scales.
def test_a_scale_on_the_device(mode):
    sources = arrays("float32", (5000, 3), 8)
    scale = torch.tensor([0.1], dtype=torch.float32)
    for given in (scale, scale.numpy(), scale[0], np.float32(0.1), np.float64(0.1), np.int64(2), -0.0, 1e-45, 3e38):
        flat = array("bfloat16", 5008)
        found = kernels.Statistics()
        kernels.pack(tensors_of(sources), flat.tensor, scale=given, statistics=found)
        check_packed(sources, flat, (0, 5000), torch.as_tensor(given).item(), found)
    scale.fill_(1.0)
    flat = array("float32", 5004)
    kernels.pack(tensors_of(sources), flat.tensor, scale=scale)
    check_packed(sources, flat, (0, 5000), 1.0, None)


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float8e4m3", "float8e5m2"])
def test_fp64_is_rounded_once(mode, to):
    """Just above and below the middle between two values, by less than fp32 can tell."""
    dtype = DTYPES[to]
    values = decode(dtype, np.arange(1, 96, dtype=dtype.storage))
    middles = (values[1:] + values[:-1]) / 2
    near = np.concatenate([middles, middles * (1 + 2.0**-40), middles * (1 - 2.0**-40), -middles * (1 + 2.0**-40)])
    source = array("float64", near)
    flat = array(to, -(-near.size // 16) * 16)
    kernels.pack([source.tensor], flat.tensor)
    check_packed([source], flat, (0,), 1.0, None)


# ---- Statistics.
def test_statistics_name_what_overflows(mode):
    inside = {"float16": 65519.9, "bfloat16": 3.38e38, "float32": 3.4e38, "float8e4m3": 1e30, "float8e5m2": 1e30}
    beyond = {"float16": 65520.0, "bfloat16": 3.3961775292304601e38, "float32": 3.5e38}
    for to, value in inside.items():
        source = array("float64", np.array([value, -value, 1.0, 0.0]))
        found = kernels.Statistics()
        kernels.pack([source.tensor], array(to, 16).tensor, statistics=found)
        assert found.nonfinite.item() == 0, to
    for to, value in beyond.items():
        source = array("float64", np.array([value, -value, 1.0, np.nan, np.inf, -np.inf]))
        found = kernels.Statistics()
        flat = array(to, 8)
        kernels.pack([source.tensor], flat.tensor, statistics=found)
        assert found.nonfinite.item() == 5, to
        assert (~np.isfinite(decode(flat.dtype, flat.bits).astype(np.float64))).sum() == 5
    many = np.zeros(24 * TILE)  # several tiles for each block
    many[::TILE] = np.inf
    source, found = array("float64", many), kernels.Statistics()
    kernels.pack([source.tensor], array("float32", many.size).tensor, statistics=found)
    assert found.nonfinite.item() == 24


def touchy(count: int, seed: int) -> np.ndarray:
    """Few values, of which the small ones' squares count only where they are added up before the large ones come."""
    rng = np.random.default_rng(seed)
    values = np.zeros(count, np.float32)
    lane = rng.integers(0, min(LANES, count), 24)
    where = lane[rng.integers(0, 24, 48)] + LANES * rng.integers(0, max(1, count // LANES), 48)
    values[where[where < count]] = rng.choice([1e4, 1.75, -1.5, 3e3, 0.4], int((where < count).sum()))
    return values


@pytest.mark.parametrize("to", ["float32", "bfloat16", "float8e5m2", "float64"])
def test_the_order_of_the_sums(mode, to):
    """Any other order gives other sums for such values."""
    for seed in range(8):
        sources = [array("float32", touchy(count, seed)) for count in (3 * TILE, 2 * TILE + 700, 5000, 300, 5)]
        table = kernels.Table(tensors_of(sources), FLOATS[to])
        flat = array(to, table.total)
        found = kernels.Statistics()
        kernels.pack(table, flat.tensor, statistics=found)
        check_packed(sources, flat, table.offsets, 1.0, found)


def test_statistics_are_near_the_exact_norm(mode):
    values = np.random.default_rng(10).standard_normal(70_001).astype(np.float32)
    source = array("float32", values)
    found = kernels.Statistics()
    kernels.pack([source.tensor], array("bfloat16", 70_008).tensor, scale=SCALE, statistics=found)
    exact = np.sqrt(((values.astype(np.float64) * np.float32(SCALE)) ** 2).sum())
    assert abs(found.norm.item() - exact) <= 16 * 2.0**-24 * exact


def test_statistics_of_nothing_are_zero(mode):
    found = kernels.Statistics()
    kernels.pack([torch.ones(3)], torch.empty(4), statistics=found)
    assert found.sum_of_squares.item() == 3.0
    kernels.pack([torch.empty(0)], torch.empty(0), statistics=found)
    assert found.sum_of_squares.item() == 0.0 and found.nonfinite.item() == 0
    kernels.unpack(torch.full((5,), torch.nan), [], statistics=found)
    assert found.sum_of_squares.item() == 0.0 and found.nonfinite.item() == 0


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_scale_that_is_not_finite_counts_no_more_than_there_is(mode, to):
    """A loss scale that overflowed: what a GPU's thread holds behind a tensor's end must stay 0."""
    tensors = [torch.ones(5), torch.ones(4097), torch.ones(1)]
    for value, expected in ((math.inf, math.inf), (math.nan, math.nan)):
        found = kernels.Statistics()
        flat = torch.zeros(5000, dtype=to)
        kernels.pack(tensors, flat, scale=torch.tensor([value]), statistics=found)
        assert found.nonfinite.item() == 4103
        assert found.sum_of_squares.item() == pytest.approx(expected, nan_ok=True)


# ---- Sizes, threads, places.


@pytest.fixture(scope="module")
def many():
    return torch.randn(7 << 20, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("isa", HOST)
@pytest.mark.parametrize("names, shift", [(("float32", "float32"), 3), (("float32", "bfloat16"), 0)])
def test_stores_past_the_caches(isa, names, shift, many):
    """A table that moves more than the last-level cache holds: 42 MiB and more."""
    source, to = (FLOATS[name] for name in names)
    values = many.to(source)[shift:]
    cuts = (0, 1000, 1005, 3_000_000, values.numel())
    tensors = [values[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    table = kernels.Table(tensors, to)
    for scale in (1.0, 0.5):
        flat = array(names[1], table.total, shift)
        found = kernels.Statistics() if scale != 1.0 else None
        with HOST[isa]():
            kernels.pack(table, flat.tensor, scale=scale, statistics=found)
        for tensor, offset in zip(tensors, table.offsets, strict=True):
            got, want = flat.tensor[offset : offset + tensor.numel()], (tensor.float() * scale).to(to)
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), offset
        assert flat.intact()
        if found is not None:
            check_statistics(found, [(t.float() * scale).numpy() for t in tensors], [flat.dtype] * len(tensors))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64", "float8e4m3"])
def test_tensors_at_their_own_places(mode, name):
    """DDP's gradients may be views into the bucket: nothing is copied, but scale and norm are there."""
    dtype = FLOATS[name]
    flat = array(name, make(DTYPES[name], 5008, 13))
    before = flat.bits
    views = [flat.tensor[:4097], flat.tensor[4104:5003]]
    table = kernels.Table([views[0], flat.tensor[:0], views[1]], dtype, offsets=(0, 3, 4104))
    kernels.pack(table, flat.tensor)
    assert (flat.guarded.bytes() == before.view(np.uint8)).all()
    found = kernels.Statistics()
    for scale in (SCALE, 1e30):  # with the latter many values are bad after it, and were not before
        before = flat.bits
        kernels.unpack(flat.tensor, table, scale=scale, statistics=found)
        pieces = [values_of(flat.dtype, before[a:b], flat.dtype, scale) for a, b in ((0, 4097), (4104, 5003))]
        check(flat.dtype, flat.bits[:4097], encode(flat.dtype, pieces[0]), "first")
        check(flat.dtype, flat.bits[4104:5003], encode(flat.dtype, pieces[1]), "second")
        check_statistics(found, pieces, [flat.dtype] * 2)
        assert flat.intact()


def test_numpy_arrays(mode):
    sources = [np.arange(5, dtype=np.float32), np.ones((2, 3), dtype=np.float64)]
    flat = np.full(16, -1, dtype=np.float32)
    kernels.pack(sources, flat)
    assert flat.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    targets = [np.zeros(5, dtype=np.float16), np.zeros((2, 3), dtype=np.float32)]
    kernels.unpack(flat, targets, scale=2.0)
    assert targets[0].tolist() == [0, 2, 4, 6, 8] and (targets[1] == 2).all()


# ---- On a GPU: the bits of the host.
@pytest.mark.gpu
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_gpu_pack_and_unpack(source, to):
    scale_at = torch.tensor([SCALE], device="cuda")
    sources = arrays(source, (*SIZES, 50 * TILE + 3), 17, shift=1, engine="cuda")
    table = kernels.Table(tensors_of(sources), FLOATS[to])
    for scale, found in ((1.0, None), (SCALE, kernels.Statistics("cuda")), (scale_at, kernels.Statistics("cuda"))):
        flat = array(to, table.total + 3, engine="cuda")
        kernels.pack(table, flat.tensor, scale=scale, statistics=found)
        torch.cuda.synchronize()
        check_packed(sources, flat, table.offsets, float(scale), found)
        host = [torch.zeros(each.tensor.shape, dtype=FLOATS[source]) for each in sources]
        there = [each.cuda() for each in host]
        for add in (False, True, True):
            kernels.unpack(flat.tensor, there, scale=0.7, add=add)
            kernels.unpack(flat.tensor.cpu(), host, scale=0.7, add=add)
        for a, b in zip(there, host, strict=True):
            got, want = (t.view(torch.uint8).numpy().view(DTYPES[source].storage) for t in (a.cpu(), b))
            check(DTYPES[source], got, want, "unpacked")


# ---- Statistics alone.
@pytest.mark.parametrize("wide", [False, True])
def test_measure(mode, wide):
    """Tensors of several types, read and not written; the rule of the sums is that of pack."""
    names = [name for name in FLOATS if wide or name != "float64"]
    made = [
        array(name, make(DTYPES[name], size, 7 + size))
        for name, size in zip(names, (10007, 4096, 3, 0, 1023, 5)[: len(names)], strict=True)
    ]
    to = DTYPES["float64" if wide else "float32"]
    pieces = [values_of(each.dtype, each.bits, to, 1.0) for each in made]
    before = [each.bits.tobytes() for each in made]
    statistics = kernels.Statistics()
    kernels.measure(tensors_of(made), statistics)
    check_statistics(statistics, pieces, [to] * len(pieces))
    assert all(old == each.bits.tobytes() and each.intact() for old, each in zip(before, made, strict=True))
