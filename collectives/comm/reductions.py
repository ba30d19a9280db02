"""Reductions out of place, and reductions with gradient statistics."""

from __future__ import annotations

from ..arrays import Buffer
from ..errors import InvalidUsage
from .algorithms.policy import select_algorithm
from .arguments import parse_reduction, read_pair
from .fingerprint import PREMUL, fingerprint_of
from .launch import launch
from .work import Work

__all__ = ["all_reduce_out_of_place", "reduce_with_stats"]


def all_reduce_out_of_place(comm, out, array, op, async_op, algorithm, stream, share) -> Work | None:
    """Reduce `array` over all ranks into `out`; see `Communicator.all_reduce`."""
    name = "all_reduce"
    dst, src = read_pair(comm, out, array, name)
    comm._reader.check_reducible(src, name)
    comm._reader.check_size(dst, src, 1, name, "out", "the array")
    comm._reader.check_overlap(dst, src, name, None, "leave out `out` for the form in place")
    if share is not None:
        return reduce_with_stats(comm, name, dst, src, (out, array), op, share, async_op, algorithm, stream)
    if select_algorithm(comm, name, algorithm, src.nbytes, op) != "native":  # the others work in place
        out[...] = array
        return comm.all_reduce(out, op, async_op=async_op, algorithm=algorithm, stream=stream)
    code, scalar = parse_reduction(comm, op, src.code, name)
    steps = ((name, (src.ptr, dst.ptr, src.count, src.code, code)),)
    fingerprint = comm._checks_calls and fingerprint_of(
        name, dtype=src.code, count=src.count, op=PREMUL if scalar else code
    )
    return launch(comm, name, steps, (out, array), out, src.nbytes, fingerprint, async_op, stream, scalar)


def reduce_with_stats(
    comm, name: str, dst: Buffer, src: Buffer, held, op, share, async_op, algorithm, stream
) -> Work | None:
    """Carry out the reduction `name`, and add its statistics to the caller's `share`: 2 float64.

    `dst`, `src`: the output and the input; `held`: the arrays, the output first.
    """
    if not comm._on_host:
        raise InvalidUsage("share is of the host engine: leave it out here", op=name, rank=comm.rank)
    if algorithm is not None and select_algorithm(comm, name, algorithm, src.nbytes, op) != "native":
        text = f"share is of the native algorithm, not of {algorithm!r}: leave out one of the two"
        raise InvalidUsage(text, op=name, rank=comm.rank)
    comm._reader.check_reducible(src, name)
    stats = comm._reader.stats_address(share, src, name)
    if dst is not src:
        comm._reader.stats_address(share, dst, name)
    code, scalar = parse_reduction(comm, op, src.code, name)
    steps = ((f"{name}_share", (src.ptr, dst.ptr, dst.count, dst.code, code, stats)),)
    return launch(comm, name, steps, (*held, share), held[0], src.nbytes, None, async_op, stream, scalar)
