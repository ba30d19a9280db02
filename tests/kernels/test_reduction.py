"""reduce_n: the host's kernels and the text of the CUDA kernels, bit for bit as NumPy has it; guard zones; refusals."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
from typing import NamedTuple

import numpy as np
import pytest
import torch

from collectives.errors import InvalidArgument
from collectives.kernels import Sources, Statistics, reduce_n
from tests import oracle
from tests.buffers import Guarded, memory_of
from tests.oracle import DTYPES

from .bucket_cases import check_statistics
from .ways import HOSTS, TEXTS

FP8 = {"float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
TORCH = {name: getattr(torch, FP8.get(name, name)) for name in DTYPES}
FLOATS = [name for name, each in DTYPES.items() if each.is_float]
SIZES = (0, 1, 3, 1023, 4095, 4096, 4097, 10007)
LONG = 33 * 4096 + 5  # more tiles than one thread's part


HOST = [*HOSTS[::2], HOSTS[-1]]
WAYS = pytest.mark.parametrize("way", [HOST[-1], TEXTS[1]], ids=lambda way: way[0])


class Case(NamedTuple):
    source: str
    out: str
    op: str
    n: int
    count: int
    scale: float = 1.0
    at: float | None = None  # a scale of one element, too
    skip: int = 0  # elements past a 64-byte boundary: of out, and one more of each source
    in_place: int | None = None  # this source is out
    statistics: bool = False

    @property
    def wide(self) -> bool:
        return "float64" in (self.source, self.out)


# ---- What must come out.
def fold(values: list[np.ndarray], op: str) -> np.ndarray:
    """From the left. Of equal values (0 and -0) min and max keep the first."""
    result = values[0]
    for value in values[1:]:
        if op in ("min", "max"):
            takes = (value < result if op == "min" else value > result) | np.isnan(value)
            result = np.where(np.isnan(result) | ~takes, result, value)
        else:
            result = result * value if op == "prod" else result + value
    return result


@functools.cache
def inputs(case: Case) -> list[np.ndarray]:
    return [oracle.make(DTYPES[case.source], case.count, seed=k) for k in range(case.n)]


@functools.cache
def before_rounding(case: Case) -> np.ndarray:
    """Floats: the reduced, averaged and scaled values in the accumulator's type."""
    work = np.float64 if case.wide else np.float32
    with np.errstate(all="ignore"):
        values = fold([oracle.decode(DTYPES[case.source], x).astype(work) for x in inputs(case)], case.op)
        if case.op == "avg":
            values = values / work(case.n)
        scale = case.scale * (1.0 if case.at is None else float(np.float32(case.at)))
        return values * work(scale)


@functools.cache
def wanted(case: Case) -> np.ndarray:
    if not DTYPES[case.source].is_float:
        return oracle.rank_ordered(DTYPES[case.source], case.op, inputs(case))
    return oracle.encode(DTYPES[case.out], before_rounding(case))


# ---- Running.
def tensor_of(buffer: Guarded, dtype: str) -> torch.Tensor:
    block = buffer.block if isinstance(buffer.block, torch.Tensor) else torch.from_numpy(buffer.block)
    return block[buffer.start : buffer.start + buffer.nbytes].view(TORCH[dtype])


def check(case: Case, engine: str = "host") -> None:
    """Run a case between guard zones and compare with what must come out."""
    memory, source, out = memory_of(engine), DTYPES[case.source], DTYPES[case.out]
    buffers = []
    for k, bits in enumerate(inputs(case)):
        buffers.append(Guarded(memory, case.count * source.itemsize, (case.skip * (k + 2)) * source.itemsize))
        buffers[-1].write(bits)
    if case.in_place is None:
        buffers.append(Guarded(memory, case.count * out.itemsize, case.skip * out.itemsize))
        result = buffers[-1]
    else:
        result = buffers[case.in_place]
    sources = [tensor_of(each, case.source) for each in buffers[: case.n]]
    device = sources[0].device
    scale = case.scale if case.at is None else torch.tensor([case.at], device=device)
    if case.at is not None:
        assert case.scale == 1
    statistics = Statistics(device) if case.statistics else None
    reduce_n(sources, tensor_of(result, case.out), op=case.op, scale=scale, statistics=statistics)
    memory.synchronize()
    got = result.values(out.storage)
    wrong = np.nonzero(~oracle.same(out, got, wanted(case)))[0]
    assert not wrong.size, f"{case}: {wrong.size} wrong, at {wrong[:5]}: {got[wrong[:5]]} for {wanted(case)[wrong[:5]]}"
    assert all(each.guards_intact() for each in buffers), case
    for each, bits in zip(buffers, inputs(case), strict=False):
        if each is not result:
            assert each.bytes().tobytes() == bits.tobytes(), f"{case}: a source was written"
    if statistics is not None:
        check_statistics(statistics, [before_rounding(case)], [out])


def cases_of(source: str) -> list[Case]:
    """Every operation at every size; what else there is to vary goes round beside it."""
    floating = source in FLOATS
    n = itertools.cycle((1, 2, 3, 4, 5, 6, 8, 9))
    skip = itertools.cycle((0, 0, 1))
    outs = itertools.cycle([source, *FLOATS] if floating else [source])
    some = [(1.0, None), (0.3, None), (1.0, -1.7), (2.0**-140, None), (1e30, None)]
    scales = itertools.cycle(some if floating else some[:1])
    statistics = itertools.cycle((True, False, True) if floating else (False,))
    cases = []
    for op, count in itertools.product(oracle.OPS, SIZES):
        cases.append(Case(source, next(outs), op, next(n), count, *next(scales), next(skip), None, next(statistics)))
    for op, k in itertools.product(oracle.OPS, range(5)):
        cases.append(Case(source, source, op, 5, 5001, skip=k % 2, in_place=k, statistics=floating and k % 2 == 0))
    return cases


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("way", [*HOST[:-2], HOST[-1], TEXTS[1]], ids=lambda way: way[0])
def test_bits(way, source):
    with way[1]():
        for case in cases_of(source):
            check(case)


@pytest.mark.parametrize("way", [*HOST, TEXTS[1]], ids=lambda way: way[0])
def test_many_tiles(way):
    with way[1]():
        check(Case("float32", "bfloat16", "sum", 3, LONG, statistics=True))
        check(Case("bfloat16", "float32", "avg", 3, LONG, statistics=True))
        check(Case("int64", "int64", "prod", 3, LONG))


@pytest.mark.parametrize("way", HOST, ids=lambda way: way[0])
@pytest.mark.parametrize("skip", [0, 1])
def test_buffers_beyond_the_caches(way, skip):
    """From some size on the output is stored past the caches: here with one of 32 MiB or less."""
    count = (2 << 20) + 5
    buffers = [Guarded(memory_of("host"), 4 * count, 4 * skip * k) for k in range(4)]
    *sources, out = (tensor_of(each, "float32") for each in buffers)
    for k, each in enumerate(sources):
        each.copy_(torch.arange(count) % (k + 7))
    want = sources[0] + sources[1] + sources[2]
    with way[1]():
        reduce_n(sources, out)
        assert torch.equal(out, want)
        reduce_n(sources, sources[1])
        assert torch.equal(sources[1], want)
    assert all(each.guards_intact() for each in buffers)


@pytest.mark.parametrize("way", HOST + TEXTS[:3], ids=lambda way: way[0])
def test_every_pair_of_floating_types(way):
    """One source: a copy with scale and cast. Sums near a tie of the narrower type are rounded once, not twice."""
    with way[1]():
        for source, out in itertools.product(FLOATS, FLOATS):
            check(Case(source, out, "sum", 1, 4099, 0.7, statistics=True))
            check(Case(source, out, "sum", 2, 4099))


@pytest.mark.parametrize("way", HOST + TEXTS[:3], ids=lambda way: way[0])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8e4m3", "float8e5m2"])
def test_fp64_is_rounded_once(way, name):
    """Values next to the midpoint of two neighbours, where rounding by way of fp32 goes wrong."""
    values, middles = oracle._rounding(DTYPES[name])
    middles = np.concatenate([middles, values])
    close = np.concatenate([middles, np.nextafter(middles, np.inf), np.nextafter(middles, 0.0)])
    close = np.concatenate([close, -close, [np.inf, -np.inf, np.nan, 1e300, 2.0**-1074]])
    out = torch.empty(len(close), dtype=TORCH[name])
    with way[1]():
        reduce_n([close], out)
    got = out.view(torch.uint8 if DTYPES[name].itemsize == 1 else torch.uint16).numpy()
    assert oracle.same(DTYPES[name], got, oracle.encode(DTYPES[name], close)).all()


@WAYS
def test_numpy_arrays_and_tables_are_used_as_they_lie(way):
    sources = [np.arange(5, dtype=np.float32) * k for k in range(4)]
    table = Sources(sources)
    assert (table.count, table.dtype, table.nbytes, len(table.arrays)) == (5, torch.float32, 20, 4)
    out = np.zeros(5, dtype=np.float32)
    with way[1]():
        reduce_n(table, out)
        assert out.tolist() == [0, 6, 12, 18, 24]
        sources[1][:] = 0
        reduce_n(table, out, op="max")
        assert out.tolist() == [0, 3, 6, 9, 12]
        reduce_n(iter(sources), torch.from_numpy(out), op="min")
        assert out.tolist() == [0] * 5
        reduce_n([torch.ones(5), np.ones(5, np.float32), sources[0], sources[0]], out)
        assert out.tolist() == [2, 2, 2, 2, 2]


class Fenced:
    """Memory whose last byte is the last before a page that can't be touched, and its first the first after one."""

    def __init__(self, nbytes: int):
        page = mmap.PAGESIZE
        size = -(-nbytes // page) * page
        self.map = mmap.mmap(-1, size + 2 * page)
        whole = np.frombuffer(self.map, dtype=np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for start in (0, page + size):
            if libc.mprotect(ctypes.c_void_p(whole.ctypes.data + start), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        inside = whole[page : page + size]
        self.at_end, self.at_start = inside[size - nbytes :], inside[:nbytes]


@pytest.mark.parametrize("way", HOST + TEXTS[:3], ids=lambda way: way[0])
def test_nothing_outside_of_an_array_is_read(way):
    with way[1]():
        for name, count in itertools.product(("int8", "bfloat16", "float32", "float64"), (1, 3, 1021, 4096, 4097)):
            dtype = TORCH[name]
            fenced = [Fenced(count * dtype.itemsize) for _ in range(6)]
            for place in ("at_end", "at_start"):
                arrays = [torch.from_numpy(getattr(each, place)).view(dtype).fill_(k) for k, each in enumerate(fenced)]
                reduce_n(arrays[:5], arrays[5])
                assert (arrays[5] == 10).all()


def test_nothing_is_there_to_reduce():
    statistics = Statistics()
    statistics.nonfinite.fill_(3)
    reduce_n([torch.empty(0)] * 3, torch.empty(0), statistics=statistics)
    assert statistics.sum_of_squares.item() == 0 and statistics.nonfinite.item() == 0


def test_tensors_that_require_a_gradient():
    leaf = torch.ones(3, requires_grad=True)
    reduce_n([leaf, leaf * 2], leaf)
    assert leaf.tolist() == [3, 3, 3]


# ---- Refusals: a message that names the array, and nothing written.
def ones(count=8, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


SHARED, INT8, INT32 = ones(32), ones(dtype=torch.int8), ones(dtype=torch.int32)
REFUSED = {
    "empty list": ([], ones(), {}, "there is no source: give at least one array"),
    "no list": (1.0, ones(), {}, "the sources must come as a list of arrays, not as float"),
    "none": (None, ones(), {}, "the sources must come as a list of arrays, not as NoneType"),
    "a tensor for a list": (ones().view(2, 4), ones(4), {}, "a list of arrays, not as Tensor"),
    "sizes": ([ones(), ones(), ones(9)], ones(), {}, "source 2 has 9 elements and source 0 has 8: use equal sizes"),
    "dtypes": ([ones(), ones().half()], ones(), {}, "source 1 is float16 and source 0 is float32"),
    "bool": ([ones(dtype=torch.bool)], ones(), {}, "can't reduce bool: reduce array.to"),
    "int16": ([ones(dtype=torch.int16)], ones(), {}, "can't reduce int16: convert it first"),
    "complex": ([ones(dtype=torch.complex64)], ones(), {}, "can't reduce complex64: reduce torch.view_as_real"),
    "out's size": ([ones()], ones(7), {}, "out has 7 elements and source 0 has 8: use equal sizes"),
    "out's dtype": ([ones()], INT32, {}, "out is int32 and the sources are float32: use a floating dtype"),
    "out complex": ([ones()], ones(dtype=torch.complex64), {}, "out is complex64 and the sources are float32"),
    "out's integers": ([INT32], INT32.long(), {}, "out is int64 and the sources are int32: integers must"),
    "out for integers": ([INT32], ones(), {}, "out is float32 and the sources are int32: integers must"),
    "out overlaps": (
        [ones(), SHARED[:8], SHARED[9:17]], SHARED[8:16], {},
        "out overlaps source 2: it may be one of the sources as a whole",
    ),
    "out overlaps from below": ([SHARED[8:16], ones()], SHARED[15:23], {}, "out overlaps source 0"),
    "out wider than its source": ([SHARED.view(torch.bfloat16)[:8]], SHARED[:8], {}, "out overlaps source 0"),
    "op": ([ones()], ones(), {"op": "mean"}, "op must be one of 'sum', 'prod', 'max', 'min', 'avg', not 'mean'"),
    "op of another kind": ([ones()], ones(), {"op": ["sum"]}, "op must be one of"),
    "scale of integers": ([INT8], INT8.clone(), {"scale": 0.5}, "a scale is for floating types"),
    "tensor for integers": ([INT8], INT8.clone(), {"scale": ones(1)}, "a scale is for floating types"),
    "statistics of integers": (
        [INT8], INT8.clone(), {"statistics": Statistics()},
        "statistics are for floating types, and the sources are int8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    sources, out, options, message = REFUSED[name]
    before = out.clone()
    with pytest.raises(InvalidArgument, match=message) as caught:
        reduce_n(sources, out, **options)
    assert caught.value.op == "reduce_n" and torch.equal(out, before)


# ---- On a GPU: the same cases, the same bits.
@pytest.mark.gpu
@pytest.mark.parametrize("source", DTYPES)
def test_bits_on_a_gpu(source):
    for case in cases_of(source):
        check(case, "nccl")


@pytest.mark.gpu
def test_a_gpu_s_other_cases():
    for source, out in itertools.product(FLOATS, FLOATS):
        check(Case(source, out, "sum", 2, LONG, 0.7, statistics=True), "nccl")
    check(Case("bfloat16", "float32", "sum", 1500, 777, statistics=True), "nccl")
    table = Sources([torch.full((5000,), float(k), device="cuda") for k in range(300)])
    out = torch.empty(5000, device="cuda")
    for _ in range(3):
        reduce_n(table, out)
    assert (out == 44850).all()
