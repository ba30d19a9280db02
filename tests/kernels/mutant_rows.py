"""Which errors test_mutants.py plants, and the cases that must notice them."""

from __future__ import annotations

import torch

from collectives import kernels

from . import mutant_rows_others, optimizer_mutants
from .mutants import TYPES, Arena, Rows, plant

__all__ = ["rows"]


# ---- pack and unpack.
COUNTS = (5, 0, 0, 4096, 4097, 12300, 1, 1023, 9001, 4095, 2)


def some_tensors(arena: Arena, *dtypes: torch.dtype, counts=COUNTS) -> list[torch.Tensor]:
    return [arena.normal(n, dtypes[i % len(dtypes)], skip=(0, 1, 3)[i % 3]) for i, n in enumerate(counts)]


def pack_into(arena: Arena, tensors: list[torch.Tensor], dtype: torch.dtype, skip: int = 0, **options) -> None:
    statistics = kernels.Statistics()
    flat = arena.empty(kernels.Table(tensors, dtype).total, dtype, skip)
    kernels.pack(tensors, flat, statistics=statistics, **options)
    arena.keep(statistics.sum_of_squares, statistics.nonfinite)


def pack_mixed(arena: Arena) -> None:
    tensors = some_tensors(arena, torch.float32, torch.bfloat16, torch.float8_e5m2)
    tensors[7][77], tensors[3][4000] = 3e38, float("nan")
    tensors[3][3000] = 2.72e38  # scaled it is a number in fp32, and infinity in bf16
    tensors[4][10:4000:100] = 3e38  # finite until it is scaled; many in one tile
    pack_into(arena, tensors, torch.bfloat16, skip=1, scale=1.25)
    order = torch.zeros(4096)  # 2^24 and two ones, which count if they are added up first
    order[0], order[128], order[384] = 4096, 1, 1
    pack_into(arena, [tensors[9], tensors[8], arena.put(order)], torch.float8_e5m2)


def pack_wide(arena: Arena) -> None:
    pack_into(arena, some_tensors(arena, *TYPES), torch.float64, scale=-0.7)


def unpack_adding(arena: Arena) -> None:
    tensors = some_tensors(arena, *TYPES)
    flat = arena.normal(kernels.Table(tensors, torch.float32).total)
    kernels.unpack(flat, tensors, scale=0.37, add=True)


def unpack_mixed(arena: Arena) -> None:
    tensors = some_tensors(arena, *TYPES)
    flat = arena.normal(kernels.Table(tensors, torch.bfloat16).total, torch.bfloat16, skip=3)
    kernels.unpack(flat, tensors, scale=arena.put(torch.tensor([2.0])))


def pack_pairs(arena: Arena) -> None:
    tensors = some_tensors(arena, torch.float32)
    tensors[8][4100:8100:100] = 3e38
    pack_into(arena, tensors, torch.bfloat16, skip=1, scale=arena.put(torch.tensor([1.25])))
    pack_into(arena, tensors, torch.float32, skip=2, scale=0.37)
    pack_into(arena, some_tensors(arena, torch.bfloat16), torch.float32)


def unpack_pairs(arena: Arena) -> None:
    for add in (True, False):
        tensors = some_tensors(arena, torch.float32)
        flat = arena.normal(kernels.Table(tensors, torch.bfloat16).total, torch.bfloat16, skip=1)
        kernels.unpack(flat, tensors, add=add, scale=0.37)


def pack_copies(arena: Arena) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.int64):
        for skip in (0, 1, 2):
            values = torch.randint(-100, 100, (9001,), generator=arena.random).to(dtype)
            tensors = [arena.put(values, skip), arena.put(values[:5]), arena.put(values[:4097], 1)]
            kernels.pack(tensors, arena.empty(kernels.Table(tensors, dtype).total, dtype))


def long_sums(arena: Arena) -> None:
    """More tiles than lanes, so that the lanes of the last step get several each."""
    values = arena.normal(3 * 2500)
    statistics = kernels.Statistics()
    tensors = [values[i : i + 3] for i in range(0, 3 * 2500, 3)]
    tensors.append(arena.normal(1, torch.bfloat16))
    kernels.pack(tensors, arena.empty(2501 * 4, torch.float32), statistics=statistics)
    arena.keep(statistics.sum_of_squares, statistics.nonfinite)


def pack_big(arena: Arena) -> None:
    """Past the size from which the host stores past the caches, at all offsets in a line."""
    pack_into(arena, [arena.normal(33_333), arena.normal(5), arena.normal(4_000)], torch.bfloat16, skip=5, scale=0.5)
    values = arena.normal(33_333)
    for skip in (0, 1, 7):
        kernels.pack([values, values[:1025]], arena.empty(33_336 + 1028, torch.float32, skip))


ANY = (pack_mixed, pack_wide, unpack_adding, unpack_mixed)
PAIRS = (pack_pairs, unpack_pairs, pack_copies)
SUMS = (pack_mixed, pack_wide, long_sums)


def cast_on_cuda() -> Rows:
    whole = "first + (COLL_ROWS - 1) * COLL_LANES + COLL_PACK <= count"
    return [
        *plant(
            "cuda/tile.cuh", "cuda/cast.cu", SUMS,
            ("by >= 1; by /= 2) {\n    COLL_UNROLL", "by > 1; by /= 2) {\n    COLL_UNROLL"),
            ("packs[(2 * k + 4) * COLL_WARP]", "packs[(2 * k + 2) * COLL_WARP]"),
            ("a.at[j] + b.at[j]", "a.at[j] + c.at[j]"),
            ("(even[0].at[j] + even[1].at[j]) + (odd[0]", "(even[0].at[j] + odd[0].at[j]) + (even[1]"),
            ("(sums[0] + sums[2]) + (sums[1] + sums[3])", "(sums[0] + sums[1]) + (sums[2] + sums[3])"),
            ("space->bad[threadIdx.x] = 0;", ""),
            ("space->bad[own] = 0;", ""),
            ("if (own_bad) atomicAdd(&space->bad[own], own_bad);", "if (own_bad) space->bad[own] = own_bad;"),
            ("own_bad);\n  __syncthreads();", "own_bad);"),
            ("*turn = kSets - 1 - own;", "*turn = own;"),
            ("if (coll_is_bad(coll_bits_float((uint32_t)most), limit))", "if (!coll_finite_bits(most))"),
            ("work.sums[tile] = ", "work.sums[0] = "),
            ("work.bad[tile] = space", "work.bad[tile] += space"),
            # A table by value, and one of 2,501 rows.
            ("return there ? there :", "return"),
            ("return there ? there : (const Row*)launch.rows", "return there"),
        ),
        *plant(
            "cuda/cast.cu", "", SUMS,
            ("start += kTurns * COLL_LANES", "start += COLL_LANES"),
            ("&& i < a.shares;", "&& i < a.shares - 1;"),
            ("start + turn * COLL_LANES", "start + turn * COLL_LANES / 2"),
            ("if (threadIdx.x == 0) bad = 0;", ""),
            ("bad = 0;\n  __syncthreads();", "bad = 0;"),
            ("if (own) atomicAdd(&bad, own);", "if (own) bad = own;"),
            ("lane < COLL_LANES; lane += kLanes * blockDim.x", "lane < COLL_LANES; lane += COLL_LANES"),
        ),
        *plant(
            "cuda/cast.cu", "", ANY,
            ("int first = threadIdx.x * COLL_PACK;", "int first = threadIdx.x;"),
            ("first < COLL_LANES; first += blockDim.x * COLL_PACK", "first < COLL_LANES; first += COLL_LANES"),
            ("first < COLL_LANES; first +=", "first < COLL_LANES - COLL_PACK; first +="),
            ("coll_cast_is_wide(s)", "s.from_type == COLL_F64"),
            ("cast_tile<float>(a, s, tile, (float)scale", "cast_tile<float>(a, s, tile, 1.0f"),
            ("if (a.work.sums) coll_leave_share<A>(a.work, tile, space, turn, own_bad);", ""),
        ),
        *plant(
            "cuda/cast_pairs.cu", "", PAIRS,
            ("int first = threadIdx.x * COLL_PACK;", "int first = blockIdx.x * COLL_PACK;"),
            ("first < COLL_LANES; first += blockDim.x * COLL_PACK", "first < COLL_LANES; first += COLL_LANES"),
            ("(s.count - 1) % COLL_TILE) + 1", "s.count % COLL_TILE)"),
            ("from += COLL_TILE * sizeof(S);", ""),
            ("bool add = a.flags & COLL_ADD;", "bool add = a.flags & COLL_FROM_FLAT;"),
            ("uint32_t own_bad = 0;", "uint32_t own_bad = threadIdx.x;"),
        ),
        *plant(
            "cuda/cast.cuh", "cuda/cast_pairs.cu", PAIRS,
            # Tiles and blocks.
            ("int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x", "int64_t tile = 0"),
            ("(int64_t)blockIdx.x / gridDim.x;", "(int64_t)blockIdx.x / gridDim.x + 1;"),
            ("a.work.tiles * ((int64_t)blockIdx.x + 1)", "(a.work.tiles - 1) * ((int64_t)blockIdx.x + 1)"),
            ("coll_tensor_of(tensors, a.count, tile)", "coll_tensor_of(tensors, a.count, tile + 1)"),
            ("if (tile >= end) {", "if (tile > end) {"),
            ("(end < last ? end : last) - tile", "last - tile"),
            # Rows and packs.
            ("src + first + row * COLL_LANES", "src + first + row * COLL_PACKS"),
            ("src % sizeof(coll_pack_of<S>) == 0 &&", "src % sizeof(S) == 0 &&"),
            (f"src % sizeof(coll_pack_of<S>) == 0 && {whole}", "src % sizeof(coll_pack_of<S>) == 0"),
            ("values[row][j] = 0;", "values[row][j] = scale;"),
            ("if (i < count) values", "if (i <= count) values"),
            ("dst % sizeof(coll_pack_of<D>) == 0 &&", "dst % (2 * sizeof(D)) == 0 &&"),
            (f"sizeof(coll_pack_of<D>) == 0 && {whole}", f"sizeof(coll_pack_of<D>) == 0 && {whole} + 1"),
            ("if (i + j < count) dst", "if (i + j <= count) dst"),
            ("old[row][j] + values[row][j]", "values[row][j]"),
            ("(lanes + first) = sums", "(lanes) = sums"),
            # Copies, padding.
            ("i + 3 * step < words; i += 4 * step", "i + 3 * step <= words; i += 4 * step"),
            ("i + 3 * step < words; i += 4 * step", "i + 3 * step < words; i += 5 * step"),
            ("i < words; i += step", "i < words - 1; i += step"),
            ("(int64_t)sizeof(W) + threadIdx.x; i < nbytes", "(int64_t)sizeof(W) + threadIdx.x; i < nbytes - 1"),
            ("(uint64_t)to | (uint64_t)from", "(uint64_t)to"),
            ("address % 16 == 0", "address % 8 == 0"),
            ("(s.count + s.padding) * width", "s.count * width + s.padding"),
        ),
    ]  # fmt: skip


def cast_on_host() -> Rows:
    every = (*ANY, *PAIRS, pack_big)
    return [
        *plant(
            "host/cast.cpp", "", every,
            # Tiles and tensors.
            ("int64_t tile = first; tile < last;", "int64_t tile = first; tile < last - 1;"),
            ("coll_tensor_of(a.tensors, a.count, first)", "coll_tensor_of(a.tensors, a.count, first + 1)"),
            ("(end < last ? end : last) - tile", "last - tile"),
            ("if (s.padding) memset", "if (s.padding > 4) memset"),
            ("s.padding * flat_width);", "s.padding);"),
            # Spans of the common pairs.
            (", ++tile) {\n    int count", ") {\n    int count"),
            ("row < count; row += COLL_LANES", "row + COLL_LANES <= count; row += COLL_LANES"),
            ("D* out = to + start + row;", "D* out = to + row;"),
            ("int i = 0;\n  for (; i + kStrip <= n;", "int i = 0;\n  for (; i + kStrip < n + 8;"),
            ("cast_strip<S, D, kStats, kAdd>(from + i, to + i, n - i, scale, lanes + i);", ""),
            ("if (i > n) i = n;", ""),
            ("cast_strip<S, D, kStats, false>(from, to, i, scale, lanes);", ""),
            ("strip, kStrip, scale, lanes + i)", "strip, kStrip, scale, lanes)"),
            ("strip, kStrip * sizeof(D))", "strip, kStrip * sizeof(S))"),
            ("false>(from + i, to + i, n - i,", "false>(from + i, to + i, n - i - 1,"),
            ("load(to[i]) + value : value", "load(to[i]) : value"),
            ("count_bad(from + start, count, scale, limit)", "count_bad(from, count, scale, limit)"),
            ("if (streams && !kAdd) stream_row", "if (streams) stream_row"),
            # Any pair.
            (", ++tile) {\n    int64_t end", ") {\n    int64_t end"),
            ("s.count - start < COLL_TILE ? s.count : start + COLL_TILE", "s.count"),
            ("end - i < COLL_LANES ? (int)(end - i) : COLL_LANES", "COLL_LANES"),
            ("from += (int64_t)n * from_width", "from += (int64_t)n * to_width"),
            ("if (a.work.sums) sums.add(values, n);", "if (a.work.sums) sums.add(values, n - 1);"),
            # Copies.
            ("(size_t)s.count * coll_width(s.from_type)", "(size_t)s.count * coll_width(s.from_type) - 1"),
        ),
        *plant(
            "host/cast.cpp", "", SUMS,
            ("i < a.shares; ++i", "i < a.shares - 1; ++i"),
            ("lanes[i % COLL_LANES] +=", "lanes[i % COLL_LANES] ="),
            ("bad += a.work.bad[i]", "bad = a.work.bad[i]"),
        ),
        *plant(
            "include/coll/host_kernels.h", "host/cast.cpp", every,
            ("int from = n < used_ ? n : used_;", "int from = n;"),
            ("int i = from; i < n; ++i) lanes_[i] =", "int i = from + 1; i < n; ++i) lanes_[i] ="),
            ("for (int i = used_; i < n; ++i) lanes_[i] = 0;\n    if (n", "if (n"),
            ("for (int i = used_; i < n; ++i) lanes_[i] = 0;\n    return", "return"),
            ("half = n / 2; half >= 1", "half = n / 2; half > 1"),
            ("limit_ ? 0 : count_bad(limit_)", "limit_ ? 0 : 1"),
            ("uintptr_t>(out) % 64;", "uintptr_t>(out) % 8;"),
            ("memcpy(out, in, head);", ""),
            ("nbytes >= kBlock; out += kBlock, in += kBlock", "nbytes >= kBlock; out += kBlock, in += kBlock - 1"),
            ("memcpy(out, in, nbytes);", ""),
        ),
    ]  # fmt: skip


def rows() -> Rows:
    return [*cast_on_cuda(), *cast_on_host(), *mutant_rows_others.rows(), *optimizer_mutants.rows()]
