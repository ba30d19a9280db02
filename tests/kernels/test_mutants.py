"""The test of the tests: errors planted in the launchers, each of which the comparison of the two texts must catch.

A new family adds its cases and its rows. Rows are chosen so that the change is no equivalent one.
"""

from __future__ import annotations

import pytest
import torch

from collectives import kernels

from .mutants import TYPES, Arena, Case, Mutant, compile_soon, outcome, text_of

# ---- pack and unpack.
def some_tensors(arena: Arena, dtypes=TYPES) -> list[torch.Tensor]:
    counts = (5, 0, 4096, 4097, 12300, 1, 1023, 9001, 4095, 2)
    return [arena.normal(n, dtypes[i % len(dtypes)], skip=(0, 1, 3)[i % 3]) for i, n in enumerate(counts)]


def pack_statistics(arena: Arena) -> None:
    tensors = some_tensors(arena)
    tensors[3][77], tensors[4][12299] = float("inf"), float("nan")
    tensors[7][4100:8100:100] = 3e38  # finite until it is scaled; many in one tile
    flat = arena.empty(kernels.Table(tensors, torch.bfloat16).total, torch.bfloat16, skip=1)
    statistics = kernels.Statistics()
    kernels.pack(tensors, flat, scale=1.25, statistics=statistics)
    arena.keep(statistics.sum_of_squares, statistics.nonfinite)
    sums = kernels.Statistics()
    kernels.pack([tensors[7]], arena.empty(9016, torch.bfloat16), statistics=sums)
    arena.keep(sums.sum_of_squares, sums.nonfinite)


def pack_wide(arena: Arena) -> None:
    tensors = some_tensors(arena)
    statistics = kernels.Statistics()
    flat = arena.empty(kernels.Table(tensors, torch.float64).total, torch.float64)
    kernels.pack(tensors, flat, scale=-0.7, statistics=statistics)
    arena.keep(statistics.sum_of_squares, statistics.nonfinite)


def pack_copies(arena: Arena) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.int64):
        for skip in (0, 1, 2):
            values = torch.randint(-100, 100, (9001,), generator=arena.random).to(dtype)
            tensors = [arena.put(values, skip), arena.put(values[:5]), arena.put(values[:4097], 1)]
            kernels.pack(tensors, arena.empty(kernels.Table(tensors, dtype).total, dtype))


def unpack_adding(arena: Arena) -> None:
    tensors = some_tensors(arena)
    flat = arena.normal(kernels.Table(tensors, torch.float32).total)
    kernels.unpack(flat, tensors, scale=0.37, add=True)


def unpack_plain(arena: Arena) -> None:
    tensors = some_tensors(arena)
    flat = arena.normal(kernels.Table(tensors, torch.bfloat16).total, torch.bfloat16, skip=3)
    kernels.unpack(flat, tensors, scale=2.0)


def long_sums(arena: Arena) -> None:
    """More tiles than lanes, so that the finish kernel's lanes get several each."""
    values = arena.normal(3 * 2500)
    tensors = [values[i : i + 3] for i in range(0, 3 * 2500, 3)]
    statistics = kernels.Statistics()
    kernels.pack(tensors, arena.empty(2500 * 4, torch.float32), statistics=statistics)
    arena.keep(statistics.sum_of_squares, statistics.nonfinite)


CAST: tuple[Case, ...] = (pack_statistics, pack_wide, pack_copies, unpack_adding, unpack_plain)
SUMS: tuple[Case, ...] = (pack_statistics, pack_wide, long_sums)


def rows(file: str, source: str, *changes: tuple[str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(file, before, after, source) for before, after in changes)


CUDA_TILE = rows(
    "cuda/tile.cuh", "cuda/cast.cu",
    ("half >= 1; half /= 2", "half > 1; half /= 2"),
    ("half /= 2) {\n    __syncthreads();", "half /= 2) {"),
    ("i < half; i += blockDim.x", "i < half; i += COLL_BLOCK"),
    ("i < half; i += blockDim.x", "i <= half; i += blockDim.x"),
    ("lanes[i] += lanes[i + half]", "lanes[i] += lanes[i + half - 1]"),
    ("if (threadIdx.x == 0) *bad = 0;", ""),
    ("*bad = 0;\n  __syncthreads();", "*bad = 0;"),
    ("if (own_bad) atomicAdd(bad, own_bad);", "if (own_bad) *bad = own_bad;"),
    ("work.sums[tile] = ", "work.sums[0] = "),
    ("work.bad[tile] = *bad", "work.bad[tile] += *bad"),
)  # fmt: skip
CUDA_CAST = rows(
    "cuda/cast.cu", "",
    # Tiles and blocks.
    ("int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x", "int64_t tile = 0"),
    ("int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x;", "int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x + 1;"),
    ("a.work.tiles * ((int64_t)blockIdx.x + 1)", "(a.work.tiles - 1) * ((int64_t)blockIdx.x + 1)"),
    ("coll_tensor_of(a.tensors, a.count, tile)", "coll_tensor_of(a.tensors, a.count, tile + 1)"),
    ("if (tile >= end) {", "if (tile > end) {"),
    ("(end < last ? end : last) - tile", "last - tile"),
    ("coll_cast_wide(s)", "s.from_type == COLL_F64"),
    # Columns, rows, packs.
    ("column < COLL_PACKS; column += blockDim.x", "column < COLL_PACKS - 1; column += blockDim.x"),
    ("column < COLL_PACKS; column += blockDim.x", "column < COLL_PACKS; column += COLL_BLOCK"),
    ("src + first + row * COLL_LANES", "src + first + row * COLL_PACKS"),
    ("src % sizeof(coll_pack_of<S>) == 0 &&", "src % sizeof(S) == 0 &&"),
    ("src % sizeof(coll_pack_of<S>) == 0 && first + (COLL_ROWS - 1) * COLL_LANES + COLL_PACK <= count", "src % sizeof(coll_pack_of<S>) == 0"),
    ("packs[row].at[j] = S();", ""),
    ("if (i < count) packs", "if (i <= count) packs"),
    ("dst % sizeof(coll_pack_of<D>) == 0 &&", "dst % (2 * sizeof(D)) == 0 &&"),
    ("dst % sizeof(coll_pack_of<D>) == 0 && first + (COLL_ROWS - 1) * COLL_LANES", "dst % sizeof(coll_pack_of<D>) == 0 && first + (COLL_ROWS - 2) * COLL_LANES"),
    ("if (i + j < count) dst", "if (i + j <= count) dst"),
    ("old[row][j] + values[row][j]", "values[row][j]"),
    ("lanes[column * COLL_PACK + j] = sum", "lanes[column + j] = sum"),
    ("store_column<D, A>(s.to, values, column * COLL_PACK, count, a.flags & COLL_ADD)", "store_column<D, A>(s.to, values, column * COLL_PACK, count, false)"),
    # Copies, padding.
    ("i + 3 * step < words; i += 4 * step", "i + 3 * step <= words; i += 4 * step"),
    ("i + 3 * step < words; i += 4 * step", "i + 3 * step < words; i += 5 * step"),
    ("i < words; i += step", "i < words - 1; i += step"),
    ("words * (int64_t)sizeof(W) + threadIdx.x; i < nbytes", "words * (int64_t)sizeof(W) + threadIdx.x; i < nbytes - 1"),
    ("(uint64_t)to | (uint64_t)from", "(uint64_t)to"),
    ("address % 16 == 0", "address % 8 == 0"),
    ("i < (s.count + s.padding) * width", "i < s.count * width + s.padding"),
)  # fmt: skip
CUDA_FINISH = rows(
    "cuda/cast.cu", "",
    ("i < a.shares; i += COLL_LANES", "i < a.shares; i += blockDim.x"),
    ("i < a.shares; i += COLL_LANES", "i < a.shares - 1; i += COLL_LANES"),
    ("if (threadIdx.x == 0) bad = 0;", ""),
    ("bad = 0;\n  __syncthreads();", "bad = 0;"),
    ("if (own) atomicAdd(&bad, own);", "if (own) bad = own;"),
    ("lane < COLL_LANES; lane += blockDim.x", "lane < blockDim.x; lane += blockDim.x"),
)  # fmt: skip

ROWS = [
    *((row, SUMS) for row in CUDA_TILE + CUDA_FINISH),
    *((row, CAST) for row in CUDA_CAST),
]


@pytest.fixture(scope="module", autouse=True)
def compile_ahead(request):
    """Compile those that will be asked for, beside the tests."""
    for item in request.session.items:
        if item.module is request.module and "mutant" in getattr(item, "fixturenames", ()):
            compile_soon(item.callspec.params["mutant"])


@pytest.mark.parametrize(("mutant", "cases"), ROWS, ids=lambda value: str(value) if isinstance(value, Mutant) else "of")
def test_mutants_are_caught(mutant, cases):
    found = outcome(compile_soon(mutant).result(), mutant.launcher, cases)
    print(found.detail)
    assert not found.same, "nothing noticed this error"


@pytest.mark.parametrize("launcher", sorted({row.launcher for row, _ in ROWS}))
def test_what_is_not_changed_passes(launcher):
    cases = tuple(dict.fromkeys(case for row, them in ROWS if row.launcher == launcher for case in them))
    found = outcome(compile_soon(Mutant(launcher, "", "")).result(), launcher, cases)
    assert found.same, found.detail


def test_a_change_of_what_is_not_there_is_an_error():
    for before in ("no such text", "COLL_PACK"):
        with pytest.raises(AssertionError, match="has .* times what this mutant changes"):
            text_of(Mutant("cuda/cast.cu", before, ""))
