"""Errors for test_mutants.py in the launchers of reduce_n and of the wire formats."""

from __future__ import annotations

import torch

from collectives import kernels
from collectives.layout import wire_layout

from .mutants import Arena, Rows, plant

__all__ = ["rows"]

TAIL = 3 * 4096 + 5  # elements: three full tiles and a short one


# ---- reduce_n.
def reduce(arena: Arena, n: int, dtype, out, op="sum", count=TAIL, skips=(0,), scale=1.0) -> None:
    if dtype.is_floating_point:
        sources = [arena.normal(count, dtype, skips[k % len(skips)]) for k in range(n)]
        statistics = kernels.Statistics()
    else:
        whole = torch.randint(-100, 100, (n, count), generator=arena.random).to(dtype)
        sources, statistics = [arena.put(each, skips[k % len(skips)]) for k, each in enumerate(whole)], None
    target = sources[out] if isinstance(out, int) else arena.empty(count, out, skips[0])
    kernels.reduce_n(sources, target, op=op, scale=scale, statistics=statistics)
    if statistics:
        arena.keep(statistics.sum_of_squares, statistics.nonfinite)


def reduce_floats(arena: Arena) -> None:
    for n in (1, 2, 3, 7, 8):
        reduce(arena, n, torch.float32, torch.bfloat16, scale=1.37)
    reduce(arena, 3, torch.float32, torch.float32, "avg", skips=(0, 0, 1))
    reduce(arena, 5, torch.float32, torch.float32, "max", skips=(2,))
    reduce(arena, 5, torch.float32, torch.float8_e5m2, "prod", skips=(1,))
    reduce(arena, 4, torch.bfloat16, torch.float32, "min")


def reduce_rest(arena: Arena) -> None:
    reduce(arena, 3, torch.float64, torch.float64, scale=0.1)
    reduce(arena, 3, torch.int32, torch.int32, skips=(0, 1))
    reduce(arena, 6, torch.int64, torch.int64, "max")
    reduce(arena, 3, torch.uint8, torch.uint8, "avg")
    reduce(arena, 7, torch.float8_e5m2, torch.float32, "avg")
    reduce(arena, 3, torch.float8_e5m2, torch.float32, count=777)  # too small to be stored past the caches
    reduce(arena, 2, torch.float32, torch.float32, scale=3e38)  # not finite, many of them


def reduce_in_place(arena: Arena) -> None:
    for target in (0, 4, 6):
        reduce(arena, 7, torch.float32, target, "avg")
        reduce(arena, 7, torch.int32, target)


def reduction() -> Rows:
    return [
        *plant(
            "cuda/reduce.cu", "", (reduce_floats, reduce_rest, reduce_in_place),
            ("k < a.n; k += 2", "k < a.n - 1; k += 2"),
            ("bool both = k + 1 < a.n;", "bool both = k + 2 < a.n;"),
            ("a.sources[both ? k + 1 : k]", "a.sources[k]"),
            ("COLL_LANES;\n    if (kPack > 1) packs", "COLL_PACKS;\n    if (kPack > 1) packs"),
            ("else if (at < count) to[at]", "else if (at <= count) to[at]"),
            ("i < COLL_TILE; i += kRows * COLL_LANES", "i < COLL_TILE; i += COLL_LANES"),
            ("lane += blockDim.x * kPack", "lane += COLL_BLOCK * kPack"),
            ("addresses % 16 == 0", "addresses % 8 == 0"),
            ("k < a.n; ++k) addresses", "k < a.n - 1; ++k) addresses"),
            ("if (packs && count == COLL_TILE) reduce_float", "if (packs) reduce_float"),
            ("a.op == COLL_AVG", "a.op == COLL_PROD"),
            ("sums[j] += values", "sums[j] = values"),
            ("lanes[lane + j] = sums[j]", "lanes[lane] = sums[j]"),
            ("at < COLL_TILE; at += kRows", "at < COLL_TILE - COLL_LANES; at += kRows"),
            ("<T, T, kRows, kPack>(a, values, tile * COLL_TILE", "<T, T, kRows, kPack>(a, values, 0"),
        ),
        *plant(
            "host/reduce.cpp", "", (reduce_floats, reduce_rest, reduce_in_place),
            ("last * COLL_TILE < a.count ? last * COLL_TILE : a.count", "a.count"),
            ("for (; k + 4 <= n; k += 4)", "for (; k + 4 < n; k += 4)"),
            ("(values, job, k, at, len), k += 2;", "(values, job, k, at, len);"),
            ("if (k < n) gather_some", "if (k < n - 1) gather_some"),
            ("row_of<S>(job, source + k, at)", "row_of<S>(job, source, at)"),
            ("len - start < kStrip ? len - start : kStrip", "kStrip"),
            ("(values + start, strips, n)", "(values, strips, n)"),
            ("(job.n); k < job.n; ++k) {", "(job.n); k < 0; ++k) {"),
            ("bad += add_squares", "bad = add_squares"),
            ("bad += coll_is_bad", "bad |= coll_is_bad"),
            ("len * sizeof(A)", "len * sizeof(A) - 1"),
            ("static_cast<A*>(out) + at, values, len * ", "static_cast<A*>(out), values, len * "),
            ("end - at < row ? (int)(end - at) : row", "row"),
            ("if (job.scale != 1)", "if (job.scale < 1)"),
            ("store(job.out, values, at, len);", "store(job.out, values, at, len - 1);"),
            ("job.over > 0", "job.over > 3"),
            ("sums.finish(*job.work, tile,", "sums.finish(*job.work, 0,"),
        ),
    ]  # fmt: skip


# ---- Wire formats.
def wire(arena: Arena, count: int, format: str, block: int = 128) -> torch.Tensor:
    return arena.empty(wire_layout(count, format, block).nbytes, torch.uint8)


def filled(arena: Arena, n: int, count: int, format: str, block: int = 128) -> list[torch.Tensor]:
    wires = [wire(arena, count, format, block) for _ in range(n)]
    for each in wires:
        kernels.quantize(arena.normal(count), each, format=format, block=block)
    return wires


def quantize_scaled(arena: Arena) -> None:
    for count, block, dtype, skip in (
        (TAIL, 128, torch.float32, 0), (4096 + 777, 512, torch.bfloat16, 1), (3, 256, torch.float64, 0),
    ):  # fmt: skip
        for format, residual in (("int8", torch.float32), ("fp8_e5m2", torch.bfloat16)):
            left, values = arena.normal(count, residual, skip), arena.normal(count, dtype, skip)
            values[500::1000] = float("inf")
            kernels.quantize(
                values, wire(arena, count, format, block), format=format, block=block, residual=left, scale=1.5
            )  # fmt: skip


def quantize_plain(arena: Arena) -> None:
    count = 4096 + 777
    for seed in (None, 7):
        left, to = arena.normal(count, skip=1), wire(arena, count, "bf16")
        kernels.quantize(arena.normal(count), to, format="bf16", residual=left, seed=seed, position=4096)
        to = wire(arena, count, "int8", 256)
        kernels.quantize(arena.normal(count), to, format="int8", block=256, seed=seed, position=3 * 4096)


    count = 4096 + 776  # no padding behind it
    kernels.quantize(arena.normal(count), wire(arena, count, "bf16"), format="bf16")


def requantize_padding(arena: Arena) -> None:
    """Scales that no block has are read as zeros' factors, whatever they are, and written as 0."""
    count = 4096 + 640
    wires = filled(arena, 2, count, "int8")
    for each in wires:
        each.view(torch.float32)[-(-count // 128 % 4) :] = float("nan")
    kernels.requantize(wires, wire(arena, count, "int8"), count=count, format="int8", block=128)


def dequantize(arena: Arena) -> None:
    for format, out, skip, add in (
        ("int8", torch.float32, 0, False), ("int8", torch.bfloat16, 1, True), ("bf16", torch.float32, 1, True),
    ):  # fmt: skip
        (source,) = filled(arena, 1, TAIL, format)
        statistics = kernels.Statistics()
        kernels.dequantize(
            source, arena.normal(TAIL, out, skip), format=format, block=128, scale=0.7, add=add, statistics=statistics
        )
        arena.keep(statistics.sum_of_squares, statistics.nonfinite)


def reduce_wires(arena: Arena) -> None:
    for n, format, over in ((3, "int8", 3), (5, "fp8_e5m2", None), (2, "bf16", 2)):
        wires = filled(arena, n, TAIL, format)
        kernels.reduce_wires(wires, arena.empty(TAIL, torch.float32), format=format, block=128, average_over=over)
        out, left = wire(arena, TAIL, format), arena.normal(TAIL)
        kernels.requantize(wires, out, count=TAIL, format=format, block=128, average_over=over, residual=left)
    for format in ("int8", "bf16"):
        wires = filled(arena, 3, TAIL, format)
        moved = arena.empty(wires[0].numel(), torch.uint8, skip=4)  # no place for packs of 16-bit elements
        moved.copy_(wires[0])
        kernels.reduce_wires([moved, *wires[1:]], arena.empty(TAIL, torch.float32), format=format, block=128)
        kernels.requantize(wires, wires[1], count=TAIL, format=format, block=128)


def wire_parts(arena: Arena) -> None:
    for format, seed, stride, more in (("int8", 3, 4096 + 308, 0), ("bf16", None, 4096 + 301, 4)):
        numel = 4096 + 300
        count, width = 2 * stride + 77, wire_layout(numel, format, 128).nbytes + more
        parts = kernels.WireParts(3, numel, width, stride)
        wires, left = arena.empty(3 * width, torch.uint8), arena.normal(count)
        kernels.quantize(arena.normal(count), wires, format=format, block=128, residual=left, seed=seed, parts=parts)
        kernels.dequantize(wires, arena.normal(count), format=format, block=128, add=True, parts=parts)


WIRE = (quantize_scaled, quantize_plain, requantize_padding, dequantize, reduce_wires, wire_parts)


def wire_formats() -> Rows:
    return [
        *plant(
            "cuda/wire.cuh", "cuda/quantize.cu", WIRE,
            ("if (live >= COLL_PACK && (uint64_t)to", "if ((uint64_t)to"),
            ("(uint64_t)(coll_width(type) * COLL_PACK - 1)", "(uint64_t)(coll_width(type) - 1)"),
            ("if (j < live) to[j]", "if (j <= live) to[j]"),
            ("(tile + at) >> shift", "(tile + at) >> 8"),
            ("row * kStep >> shift << 2", "row * kStep >> 8 << 2"),
            ("x[row][j] += F::kScaled ? value", "x[row][j] = F::kScaled ? value"),
            ("k + 4 <= wires; k += 4", "k + 4 <= wires; k += 5"),
            ("k + 2 <= wires; k += 2", "k + 2 <= wires; k += 3"),
            ("(average_over & (average_over - 1)) == 0", "average_over > 0"),
            ("addresses |= (uint64_t)wire_of(from, k)", "addresses = (uint64_t)wire_of(from, k)"),
            (
                "for (int w = 0; w < kWires; ++w) {\n    COLL_UNROLL",
                "for (int w = kWires - 1; w >= 0; --w) {\n    COLL_UNROLL",
            ),
        ),
        *plant(
            "cuda/quantize.cu", "", WIRE,
            ("if (j < live) wire[j]", "if (j <= live) wire[j]"),
            ("== row ? most : amax;\n    }\n  }\n  if (!kWhole", "== row ? most : 0;\n    }\n  }\n  if (!kWhole"),
            ("block > by * COLL_STRIP_ROW && other", "other"),
            ("threadIdx.x & COLL_STRIP_ROWS)", "threadIdx.x & 1)"),
            ("strip + row >= count", "strip + row > count"),
            ("x[next - 1][j] = x[next][j]", "x[next][j] = x[next - 1][j]"),
            ("if (left <= strip + COLL_STRIP) clear_padding", "if (left < 0) clear_padding"),
            ("i % 4 != 0; ++i) scales[i]", "i % 2 != 0; ++i) scales[i]"),
            ("(uint64_t)(to.position + at)", "(uint64_t)at"),
            ("lanes[column] = sums;", "lanes[0] = sums;"),
            ("if (packs && strip + COLL_STRIP <= count)", "if (packs)"),
            ("if (part != 0) own = coll_part_of(a, part);", ""),
            ("(int64_t)(tile - part * tiles) * COLL_TILE", "(int64_t)tile * COLL_TILE"),
            ("i += gridDim.x * warps", "i += gridDim.x * warps + 1"),
            ("tile += gridDim.x", "tile += gridDim.x + 1"),
            ("bool several = a.work.tiles != tiles;", "bool several = false;"),
            ("add_residual<kAtOnce>(x + row, kept", "add_residual<kAtOnce>(x, kept"),
            ("scales, row + i) : 1.0f", "scales, row) : 1.0f"),
            ("if (coll_finite_bits(most)) {", "if (true) {"),
        ),
        *plant(
            "cuda/tile.cuh", "cuda/quantize.cu", (dequantize, wire_parts),
            ("if (kSets == 1) __syncthreads();", ""),
        ),
        *plant(
            "host/quantize.cpp", "", WIRE,
            ("int n = count - start < to.block ? count - start : to.block;", "int n = to.block;"),
            ("for (int i = 0; i < n; ++i) residual[i] =", "for (int i = 1; i < n; ++i) residual[i] ="),
            ("(uint64_t)(to.position + at), n)", "(uint64_t)at, n)"),
            ("if (tile == tiles - 1) clear_padding(to);", ""),
            ("k + 1 == from.wire_count", "k + 2 == from.wire_count"),
            ("if (from.average_over > 0)", "if (from.average_over > 3)"),
            ("at / from.block * (int64_t)sizeof(float)", "at / 256 * (int64_t)sizeof(float)"),
            ("(x + start, from, at + start,", "(x + start, from, at,"),
            ("a.from.count - first < COLL_TILE ? a.from.count : first + COLL_TILE", "first + COLL_TILE"),
            ("if (direct) continue;", "if (direct) break;"),
            ("a.out_type == COLL_F32 && !add", "a.out_type == COLL_F32"),
            ("tile = first_tile; tile < last_tile; ++tile) decode", "tile = 0; tile < last_tile; ++tile) decode"),
        ),
        *plant(
            "include/coll/quantize.h", "host/quantize.cpp", (wire_parts,),
            ("return left < count ? left : count;", "return count;"),
            ("a.to.position += first;", ""),
            ("+ first * coll_width(a.to.residual_type)", "+ first"),
            ("(const char*)a.from.wire + part", "(const char*)a.from.wire + 0 * part"),
            ("end = last - begin < tiles ? last - begin : tiles;", "end = last - begin;"),
        ),
    ]  # fmt: skip


def rows() -> Rows:
    return [*reduction(), *wire_formats()]
