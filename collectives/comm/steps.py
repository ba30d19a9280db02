"""Steps of the operations that older libraries carry out as sends and receives in one group.

A step is a pair of a method of the binding and its arguments without the stream. `out`, `inp`: the
arrays' `Buffer`.
"""

from __future__ import annotations

from ..arrays import ITEMSIZE, Buffer

__all__ = ["all_to_all_steps", "gather_steps", "scatter_steps"]


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


def gather_steps(library, out: Buffer | None, inp: Buffer, root: int, size: int) -> list | tuple:
    """Gather `inp` of all ranks; `out` is None but on the root."""
    if library.has("ncclGather"):
        return (("gather", (inp.ptr, out.ptr if out else 0, inp.units, inp.code, root)),)
    steps = [("send", (inp.ptr, inp.units, inp.code, root))]
    if out is not None:
        steps += [("recv", (out.part(r, size), inp.units, inp.code, r)) for r in range(size)]
    return steps


def scatter_steps(library, out: Buffer, inp: Buffer | None, root: int, size: int) -> list | tuple:
    """Scatter the root's `inp` to all ranks; `inp` is None but on the root."""
    if library.has("ncclScatter"):
        return (("scatter", (inp.ptr if inp else 0, out.ptr, out.units, out.code, root)),)
    steps = [("recv", (out.ptr, out.units, out.code, root))]
    if inp is not None:
        steps += [("send", (inp.part(r, size), out.units, out.code, r)) for r in range(size)]
    return steps
