"""Steps of the operations that older libraries carry out as sends and receives in one group.

A step is a pair of a method of the binding and its arguments without the stream. `out`, `inp`: the
arrays' `Buffer`.
"""

from __future__ import annotations

from ..arrays import ITEMSIZE, Buffer

__all__ = ["all_to_all_steps", "gather_or_scatter_steps"]


def all_to_all_steps(out: Buffer, inp: Buffer, send_units: list[int], recv_units: list[int]) -> list:
    """Send and receive so many units to and from each rank."""
    steps = []
    itemsize = ITEMSIZE[inp.code]
    sent = received = 0
    for peer, (send, recv) in enumerate(zip(send_units, recv_units, strict=True)):
        steps.append(("send", (inp.ptr + sent * itemsize, send, inp.code, peer)))
        steps.append(("recv", (out.ptr + received * itemsize, recv, out.code, peer)))
        sent += send
        received += recv
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
