"""Where the parameters of a unit lie in its flat buffer, which has one part of equal size for each rank.

A parameter is cut only where a part ends. The plan places parameters so that these cuts fall between
rows (or between blocks of rows), since a shard of whole rows is a matrix that optimizers, checkpoints
and quantizers understand. Where that would leave too much of the buffer empty, parameters with the
largest blocks are cut between rows instead, and those with the largest rows between any two elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["MOST_PADDING", "MOST_PADDING_OF_BLOCKS", "Layout", "plan_layout"]

MOST_PADDING = 0.015
MOST_PADDING_OF_BLOCKS = 0.02  # where blocks of rows are asked for
ALIGNMENT = 16  # bytes: what vector loads of kernels want of a parameter's first element
_MOST_TRIES = 512  # sizes of a part that are tried for one granularity


class Layout(NamedTuple):
    """A plan of a flat buffer.

    `part`: elements of each rank's part. `offsets`: the first element of each parameter in the whole
    buffer. `by_rows`: for each parameter, whether its cuts fall between rows; `by_grains`: whether they
    fall between the blocks that were asked for.
    """

    part: int
    offsets: tuple[int, ...]
    by_rows: tuple[bool, ...]
    by_grains: tuple[bool, ...]

    def cuts(self, index: int, size: int, ranks: int) -> tuple[int, ...]:
        """Return the first element of each rank in a parameter, and its size: ``ranks + 1`` numbers."""
        offset = self.offsets[index]
        return tuple(min(max(rank * self.part - offset, 0), size) for rank in range(ranks + 1))


def plan_layout(
    sizes: Sequence[int], grains: Sequence[int], ranks: int, *, rows: Sequence[int] | None = None, itemsize: int = 4,
    multiple: int = 1,
) -> Layout:  # fmt: skip
    """Plan the flat buffer of a unit.

    Args:
        sizes: Elements of each parameter, in the unit's order.
        grains: For each parameter the elements that stay together: those of a row, or of a block of rows.
        ranks: The number of equal parts.
        rows: For each parameter the elements of a row, of which its grain is a multiple. None: the grains.
        itemsize: Bytes of an element. Parameters and parts begin at multiples of 16 bytes.
        multiple: A part has a multiple of so many elements.

    Returns:
        The layout whose padding is at most `MOST_PADDING`, or `MOST_PADDING_OF_BLOCKS` (or 16 bytes for
        each parameter and rank, or a `multiple` for each rank), and which cuts as few parameters as it
        can inside of a grain: those with the largest grains.
    """
    align = max(1, ALIGNMENT // itemsize)
    rows = grains if rows is None else rows
    total = sum(sizes)
    if not total:
        every = (True,) * len(sizes)
        return Layout(math.lcm(align, multiple), (0,) * len(sizes), every, every)
    share = MOST_PADDING if list(rows) == list(grains) else MOST_PADDING_OF_BLOCKS
    most = max(share * total, align * (len(sizes) + ranks), ranks * multiple)
    for largest in sorted({*grains, *rows, 1}, reverse=True):
        kept = [next(each for each in (*pair, 1) if each <= largest) for pair in zip(grains, rows, strict=True)]
        found = _plan_by_grains(sizes, kept, ranks, align, multiple)
        if found is not None and (found[0] * ranks - total <= most or largest == 1):
            break
    layout = Layout(*found, (), ())

    def is_cut_between(units):
        return tuple(
            all(cut % unit == 0 or cut == size for cut in layout.cuts(index, size, ranks))
            for index, (size, unit) in enumerate(zip(sizes, units, strict=True))
        )

    return layout._replace(by_rows=is_cut_between(rows), by_grains=is_cut_between(grains))


def _plan_by_grains(sizes, grains, ranks: int, align: int, multiple: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the smallest part that is found and the offsets in it; None where none is found."""
    least = _round_up(-(-sum(sizes) // ranks), align)
    best = None
    for unit in sorted({math.lcm(align, multiple, grain) for grain in (1, *grains, math.lcm(*grains))}):
        part = _round_up(least, unit)
        step = unit if unit > align else max(align, _round_up(part // 1024, align))
        for _ in range(_MOST_TRIES):
            if best is not None and part >= best[0]:
                break
            offsets = _place(sizes, grains, part, align)
            if offsets is not None and offsets[-1] + sizes[-1] <= part * ranks:
                best = part, tuple(offsets)
                break
            part += step
    return best


def _place(sizes, grains, part: int, align: int) -> list[int] | None:
    """Place parameters one after the other in parts of this size; None where a cut would fall inside a grain."""
    offsets, at = [], 0
    for size, grain in zip(sizes, grains, strict=True):
        start = _round_up(at, align)
        end = (start // part + 1) * part  # of the part that has the next element
        if start + size > end:
            start += (end - start) % grain  # the first cut is between grains
            is_cut_again = start + size > end + part
            if start % align or (is_cut_again and part % grain):
                if size > part:
                    return None
                start = end  # a part of its own, whole
        offsets.append(start)
        at = start + size
    return offsets


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
