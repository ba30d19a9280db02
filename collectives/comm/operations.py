"""Operations of a communicator on arrays: each checks its arguments and launches the call.

This is the full path of an operation, which takes every argument. `_nccl.ArrayCalls` is the short
one, of blocking calls on plain arrays. The methods of `Communicator` with the same names document
what the operations do.
"""

from __future__ import annotations

from threading import get_ident

from ..arrays import Buffer
from ..errors import InvalidUsage
from .algorithms.executor import run_algorithm
from .algorithms.selection import select_algorithm
from .arguments import (
    check_overlap,
    check_same_dtype,
    check_size,
    invalid,
    parse_peer,
    parse_reduction,
    parse_row_splits,
    read_on_root,
    read_pair,
    stats_address,
)
from .fingerprint import PREMUL, fingerprint_of
from .group import open_groups
from .launch import launch
from .steps import all_to_all_steps, gather_or_scatter_steps
from .work import Work

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather_or_scatter",
    "reduce",
    "reduce_scatter",
    "send_or_recv",
]


# ---- Reductions.


def all_reduce(comm, array, op, async_op: bool, algorithm, stream, share, out) -> Work | None:
    """Reduce an array over all ranks, in place or into `out`."""
    name = "all_reduce"
    if out is None:
        dst = src = comm._reader.read(array, name, writes=True)
        held = (array,)
    else:
        dst, src = read_pair(comm, out, array, name)
        check_size(comm, dst, src, 1, name, "out", "the array")
        check_overlap(comm, dst, src, name, None, "leave out `out` for the form in place")
        held = (out, array)
    return _reduce_over_all(comm, name, dst, src, held, op, async_op, algorithm, stream, share)


def reduce_scatter(comm, out, inp, op, async_op: bool, algorithm, stream, share) -> Work | None:
    """Reduce `inp` over all ranks, part r into rank r's `out`."""
    name = "reduce_scatter"
    dst, src = read_pair(comm, out, inp, name)
    check_size(comm, src, dst, comm.size, name, "inp", "out")
    check_overlap(comm, src, dst, name, comm.rank, "the only form in place is out == part `rank` of inp")
    return _reduce_over_all(comm, name, dst, src, (out, inp), op, async_op, algorithm, stream, share)


def _reduce_over_all(
    comm, name: str, dst: Buffer, src: Buffer, held: tuple, op, async_op: bool, algorithm, stream, share
) -> Work | None:
    """Launch a reduction whose arrays are checked.

    `held`: the arrays, the output first; `share`: 2 float64, to which the statistics of this rank's
    share are added, or None.
    """
    if src.label:
        comm._reader.check_reducible(src, name)
    if share is not None:
        return _reduce_with_stats(comm, name, dst, src, held, op, async_op, algorithm, stream, share)
    code, scalar = parse_reduction(comm, op, src.code, name)
    if algorithm is not None or comm.deterministic:
        selected = select_algorithm(comm, name, algorithm, code)
        if selected != "native":
            if name == "all_reduce" and dst is not src:  # the other algorithms reduce in place
                held[0][...] = held[1]
                src = dst
            return run_algorithm(comm, selected, name, dst, src, held, code, scalar, async_op, stream)
    steps = ((name, (src.ptr, dst.ptr, dst.count, dst.code, code)),)
    fingerprint = comm._checks_calls and fingerprint_of(
        name, dtype=dst.code, count=dst.count, op=PREMUL if scalar else code
    )
    return launch(comm, name, steps, held, held[0], src.nbytes, fingerprint, async_op, stream, scalar)


def _reduce_with_stats(comm, name, dst, src, held, op, async_op, algorithm, stream, share) -> Work | None:
    if not comm._on_host:
        raise InvalidUsage("share is of the host engine: leave it out here", op=name, rank=comm.rank)
    code, scalar = parse_reduction(comm, op, src.code, name)
    if algorithm is not None and select_algorithm(comm, name, algorithm, code) != "native":
        text = f"share is of the native algorithm, not of {algorithm!r}: leave out one of the two"
        raise InvalidUsage(text, op=name, rank=comm.rank)
    stats = stats_address(comm, share, src, name)
    if dst is not src:
        stats_address(comm, share, dst, name)
    steps = ((f"{name}_share", (src.ptr, dst.ptr, dst.count, dst.code, code, stats)),)
    return launch(comm, name, steps, (*held, share), held[0], src.nbytes, None, async_op, stream, scalar)


def reduce(comm, array, root, op, async_op: bool, stream) -> Work | None:
    """Reduce an array over all ranks, in place on `root`."""
    name = "reduce"
    root = parse_peer(comm, root, "root", name)
    src = comm._reader.read(array, name, writes=comm.rank == root)
    comm._reader.check_reducible(src, name)
    code, scalar = parse_reduction(comm, op, src.code, name)
    steps = ((name, (src.ptr, src.ptr if comm.rank == root else 0, src.count, src.code, code, root)),)
    fingerprint = comm._checks_calls and fingerprint_of(
        name, dtype=src.code, count=src.count, op=PREMUL if scalar else code, root=root
    )
    return launch(comm, name, steps, (array,), array, src.nbytes, fingerprint, async_op, stream, scalar)


# ---- Collectives that move data.


def all_gather(comm, out, inp, async_op: bool, algorithm, stream) -> Work | None:
    """Gather every rank's `inp` into `out`, in rank order."""
    name = "all_gather"
    dst, src = read_pair(comm, out, inp, name)
    check_size(comm, dst, src, comm.size, name, "out", "inp")
    check_overlap(comm, dst, src, name, comm.rank, "the only form in place is inp == part `rank` of out")
    if algorithm is not None:
        selected = select_algorithm(comm, name, algorithm)
        if selected != "native":
            return run_algorithm(comm, selected, name, dst, src, (out, inp), 0, None, async_op, stream)
    steps = ((name, (src.ptr, dst.ptr, src.units, src.code)),)
    fingerprint = comm._checks_calls and fingerprint_of(name, dtype=src.tag, count=src.units)
    return launch(comm, name, steps, (out, inp), out, dst.nbytes, fingerprint, async_op, stream, label=src.label)


def broadcast(comm, array, root, async_op: bool, stream) -> Work | None:
    """Send `root`'s array to all ranks, in place."""
    name = "broadcast"
    root = parse_peer(comm, root, "root", name)
    src = comm._reader.read(array, name, writes=comm.rank != root)
    steps = ((name, (src.ptr, src.ptr, src.units, src.code, root)),)
    fingerprint = comm._checks_calls and fingerprint_of(name, dtype=src.tag, count=src.units, root=root)
    return launch(comm, name, steps, (array,), array, src.nbytes, fingerprint, async_op, stream, label=src.label)


def all_to_all(comm, out, inp, output_split_sizes, input_split_sizes, async_op: bool, stream) -> Work | None:
    """Send part r of `inp` to rank r, and receive rank r's into part r of `out`."""
    name = "all_to_all"
    dst, src = read_pair(comm, out, inp, name)
    check_overlap(comm, dst, src, name, None, "all_to_all has no form in place")
    if output_split_sizes is None and input_split_sizes is None:
        steps, fingerprint = _even_all_to_all(comm, dst, src)
    else:
        sends, receives = parse_row_splits(comm, out, dst, output_split_sizes, inp, src, input_split_sizes)
        steps = all_to_all_steps(dst, src, sends, receives)
        fingerprint = comm._checks_calls and fingerprint_of("all_to_all with split sizes", dtype=src.tag)
    return launch(comm, name, steps, (out, inp), out, src.nbytes, fingerprint, async_op, stream, label=src.label)


def _even_all_to_all(comm, dst: Buffer, src: Buffer):
    """Return the steps and the fingerprint of an all_to_all of equal parts."""
    name, size = "all_to_all", comm.size
    if src.count % size:
        text = f"inp has {src.count} elements, which {size} ranks can't share evenly: pass split sizes"
        raise invalid(comm, name, text)
    check_size(comm, dst, src, 1, name, "out", "inp")
    units = src.units // size
    fingerprint = comm._checks_calls and fingerprint_of(name, dtype=src.tag, count=units)
    if comm.engine.library.has("ncclAlltoAll"):
        return ((name, (src.ptr, dst.ptr, units, src.code)),), fingerprint
    return all_to_all_steps(dst, src, [units] * size, [units] * size), fingerprint


def gather_or_scatter(comm, name: str, out, inp, root, async_op: bool, stream) -> Work | None:
    """Gather every rank's `inp` into `root`'s `out` in rank order, or scatter the parts of `root`'s
    `inp`; `name`: "gather" or "scatter".
    """
    root, gathers = parse_peer(comm, root, "root", name), name == "gather"
    array, part_is, whole_is = (inp, "inp", "out") if gathers else (out, "out", "inp")
    part = comm._reader.read(array, name, writes=not gathers, what=part_is)
    whole = read_on_root(comm, out if gathers else inp, root, name, whole_is, writes=gathers)
    if whole is not None:
        check_same_dtype(comm, *((whole, part) if gathers else (part, whole)), name)
        check_size(comm, whole, part, comm.size, name, whole_is, part_is)
        form = f"the only form in place is {part_is} == part `root` of {whole_is}"
        check_overlap(comm, whole, part, name, root, form)
    steps = gather_or_scatter_steps(comm.engine.library, name, whole, part, root, comm.size)
    fingerprint = comm._checks_calls and fingerprint_of(name, dtype=part.tag, count=part.units, root=root)
    held = tuple(each for each in (out, inp) if each is not None)
    return launch(comm, name, steps, held, out, part.nbytes, fingerprint, async_op, stream, label=part.label)


# ---- Between two ranks.


def send_or_recv(comm, name: str, array, peer, async_op: bool, stream) -> Work | None:
    """Send an array to a rank, or receive one from it; `name`: "send" or "recv"."""
    peer = parse_peer(comm, peer, "peer", name)
    buffer = comm._reader.read(array, name, writes=name == "recv")
    if peer == comm.rank and get_ident() not in open_groups:
        raise InvalidUsage(
            f"a {name} with oneself needs its other half in the same `with comm.group():` block", op=name, rank=peer
        )
    steps = ((name, (buffer.ptr, buffer.units, buffer.code, peer)),)
    return launch(comm, name, steps, (array,), array, buffer.nbytes, None, async_op, stream, label=buffer.label)
