"""Steps of the operations that are carried out as sends and receives in one group.

A step is a pair of a method of the binding and its arguments without the stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..arrays import ITEMSIZE, Buffer

__all__ = ["all_to_all_steps", "gather_or_scatter_steps", "split_array"]


def split_array(buffer: Buffer, units: Sequence[int]) -> list[tuple[int, int]]:
    """Return (address, units) of an array's parts, which lie one behind the other."""
    starts = itertools.accumulate(units, initial=0)
    return [(buffer.ptr + start * ITEMSIZE[buffer.code], count) for start, count in zip(starts, units, strict=False)]


def all_to_all_steps(code: int, sends: Sequence[tuple], receives: Sequence[tuple], skip_empty=False) -> list:
    """Send and receive one part to and from each rank, given as pairs of an address and units of `code`.

    `skip_empty`: leave out empty ones, as may be done where the ranks have compared them.
    """
    steps = []
    for peer, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        for name, (address, units) in (("send", send), ("recv", receive)):
            if units or not skip_empty:
                steps.append((name, (address, units, code, peer)))
    return steps


def gather_or_scatter_steps(library, name: str, whole: Buffer | None, part: Buffer, root: int, size: int) -> list:
    """Gather `part` of all ranks into the root's `whole`, or scatter that; `name`: "gather" or
    "scatter". `whole` is None but on the root.
    """
    to_root, from_root = ("send", "recv") if name == "gather" else ("recv", "send")
    if library.has(f"nccl{name.capitalize()}"):
        ends = (part.ptr, whole.ptr if whole else 0)
        return [(name, (*(ends if name == "gather" else ends[::-1]), part.units, part.code, root))]
    steps = [(to_root, (part.ptr, part.units, part.code, root))]
    if whole is not None:
        steps += [(from_root, (whole.part(r, size), part.units, part.code, r)) for r in range(size)]
    return steps
