"""pack and unpack by their definition in NumPy: arrays between guard zones, the flat buffer's bits, the statistics."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from collectives import kernels
from tests.buffers import Guarded, memory_of
from tests.oracle import DTYPES, DType, decode, encode, make, same

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8e4m3": torch.float8_e4m3fn,
    "float8e5m2": torch.float8_e5m2,
}
TILE, LANES = 4096, 1024
SIZES = (0, 1, 3, 1023, 0, 4095, 4096, 4097, 10007, 0)
SCALE = 1.0 / 3.0
POISON = 0x5C


# ---- Memory between guard zones, as torch sees it.
@dataclasses.dataclass
class Array:
    """Elements of a type of the oracle between guard zones."""

    dtype: DType
    guarded: Guarded
    tensor: torch.Tensor

    @property
    def bits(self) -> np.ndarray:
        return self.guarded.values(self.dtype.storage)

    def intact(self) -> bool:
        return self.guarded.guards_intact()


def array(name: str, values: np.ndarray | int, shift: int = 0, engine: str = "host") -> Array:
    """``values``: stored elements, or how many poisoned ones. ``shift``: elements past a 64-byte boundary."""
    dtype = DTYPES[name]
    count = values if isinstance(values, int) else values.size
    guarded = Guarded(memory_of(engine), count * dtype.itemsize, shift * dtype.itemsize)
    if not isinstance(values, int):
        guarded.write(values)
    block = guarded.block if isinstance(guarded.block, torch.Tensor) else torch.from_numpy(guarded.block)
    piece = block[guarded.start : guarded.start + guarded.nbytes]
    torch_dtype = FLOATS.get(name) or getattr(torch, name)
    empty = torch.empty(0, dtype=torch_dtype, device=piece.device)
    return Array(dtype, guarded, piece.view(torch_dtype) if count else empty)


def arrays(
    name: str, sizes, seed: int, *, shift: int = 0, engine: str = "host", specials: bool = True
) -> list[Array]:
    """``specials``: NaN, subnormals and the like among the values; without them the sum of squares is a number."""
    return [
        array(name, make(DTYPES[name], size, seed + index, specials=specials), shift * (index % 3), engine)
        for index, size in enumerate(sizes)
    ]


def tensors_of(made: list[Array]) -> list[torch.Tensor]:
    return [each.tensor for each in made]


# ---- What the kernels must do, from the definition.
def values_of(dtype: DType, bits: np.ndarray, to: DType, scale: float) -> np.ndarray:
    """The elements in fp32 or fp64, scaled."""
    work = np.float64 if "float64" in (dtype.name, to.name) else np.float32
    with np.errstate(all="ignore"):
        return decode(dtype, bits).astype(work) * work(scale)


LIMITS = {"float16": 65520.0, "bfloat16": float.fromhex("0x1.ffp127"), "float32": float.fromhex("0x1.ffffffp127")}


def count_bad(values: np.ndarray, to: DType) -> int:
    """Values that are not finite, or that round to infinity."""
    limit = LIMITS.get(to.name, np.inf)
    with np.errstate(invalid="ignore"):
        return int((~(np.abs(values.astype(np.float64)) < limit)).sum())


def fold(lanes: np.ndarray):
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def sum_of(values: np.ndarray):
    """Value i goes to lane i % 1024; a lane adds in order; the lanes are folded in halves."""
    lanes = np.zeros(LANES, values.dtype)
    for start in range(0, values.size, LANES):
        row = values[start : start + LANES]
        lanes[: row.size] += row
    return fold(lanes)


def sum_of_squares(pieces: list[np.ndarray]) -> np.float64:
    with np.errstate(all="ignore"):
        tiles = [
            np.float64(sum_of(piece[start : start + TILE] ** 2))
            for piece in pieces
            for start in range(0, piece.size, TILE)
        ]
        return sum_of(np.array(tiles, dtype=np.float64))


def check(dtype: DType, got: np.ndarray, want: np.ndarray, what: str) -> None:
    wrong = np.flatnonzero(~same(dtype, got, want))
    first = wrong[:1]
    assert not wrong.size, f"{what}: {wrong.size} of {got.size} differ, first {first}: {got[first]} {want[first]}"


def check_statistics(found: kernels.Statistics, pieces: list[np.ndarray], to: list[DType]) -> None:
    got, want = found.sum_of_squares.cpu().numpy()[0], sum_of_squares(pieces)
    assert got == want or (np.isnan(got) and np.isnan(want)), (got, want)
    assert found.nonfinite.item() == sum(count_bad(*each) for each in zip(pieces, to, strict=True))


def check_packed(sources: list[Array], flat: Array, offsets, scale: float, found, *, pads: bool = True) -> None:
    """The whole flat buffer: tensors, zeros up to the next 16 bytes, poison everywhere else."""
    want = np.full(flat.guarded.nbytes, POISON, np.uint8).view(flat.dtype.storage)
    pieces = []
    for source, offset in zip(sources, offsets, strict=True):
        pieces.append(values_of(source.dtype, source.bits, flat.dtype, scale))
        end = offset + source.bits.size
        want[offset:end] = encode(flat.dtype, pieces[-1])
        if pads:
            want[end : -(-end * flat.dtype.itemsize // 16) * 16 // flat.dtype.itemsize] = 0
    check(flat.dtype, flat.bits, want, "flat")
    assert flat.intact() and all(source.intact() for source in sources)
    if found is not None:
        check_statistics(found, pieces, [flat.dtype] * len(pieces))
