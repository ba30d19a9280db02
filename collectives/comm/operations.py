"""Operations of a communicator on arrays: each checks its arguments and launches the call.

This is the full path of an operation, which takes every argument. `_nccl.ArrayCalls` is the short
one, of blocking calls on plain arrays. The methods of `Communicator` with the same names document
what the operations do.
"""

from __future__ import annotations

from threading import get_ident

from ..arrays import ITEMSIZE, Buffer, kind_of
from ..errors import InvalidArgument, InvalidUsage
from .algorithms.executor import run_algorithm
from .algorithms.selection import select_algorithm
from .arguments import (
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
from .group import Copy, open_groups
from .launch import launch
from .overlap import separate
from .parts import compares_parts, comparison, refuse_call, refuses
from .steps import all_to_all_steps, gather_or_scatter_steps, split_array
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


@refuses
def all_reduce(comm, array, op, async_op: bool, algorithm, stream, share, out) -> Work | None:
    """Reduce an array over all ranks, in place or into `out`."""
    name = "all_reduce"
    if out is None:
        dst = src = comm._reader.read(array, name, writes=True)
        held, copies = (array,), ()
    else:
        dst, src = read_pair(comm, out, array, name)
        check_size(comm, dst, src, 1, name, "out", "the array")
        src, copies = separate(comm, [dst], src, dst.ptr, stream)
        held = (out, array)
    return _reduce_over_all(comm, name, dst, src, held, op, async_op, algorithm, stream, share, copies)


@refuses
def reduce_scatter(comm, out, inp, op, async_op: bool, algorithm, stream, share) -> Work | None:
    """Reduce `inp` over all ranks, part r into rank r's `out`."""
    name = "reduce_scatter"
    dst, src = read_pair(comm, out, inp, name)
    check_size(comm, src, dst, comm.size, name, "inp", "out")
    src, copies = separate(comm, [dst], src, dst.ptr - comm.rank * dst.nbytes, stream)
    return _reduce_over_all(comm, name, dst, src, (out, inp), op, async_op, algorithm, stream, share, copies)


def _reduce_over_all(
    comm, name: str, dst: Buffer, src: Buffer, held: tuple, op, async_op: bool, algorithm, stream, share, copies
) -> Work | None:
    """Launch a reduction whose arrays are checked.

    `held`: the arrays, the output first; `share`: 2 float64, to which the statistics of this rank's
    share are added, or None; `copies`: as `separate` returns them.
    """
    if src.label:
        comm._reader.check_reducible(src, name)
    if share is not None:
        return _reduce_with_stats(comm, name, dst, src, held, op, async_op, algorithm, stream, share, copies)
    code, scalar = parse_reduction(comm, op, src.code, name)
    if algorithm is not None or comm.deterministic:
        selected = select_algorithm(comm, name, algorithm, code)
        if selected != "native":
            if name == "all_reduce" and dst is not src:  # the other algorithms reduce in place
                copies = (*copies, *([Copy(src.ptr, dst.ptr, src.nbytes)] if src.nbytes else ()))
                src = dst
            return run_algorithm(comm, selected, name, dst, src, held, code, scalar, async_op, stream, copies)
    steps = ((name, (src.ptr, dst.ptr, dst.count, dst.code, code)),)
    fingerprint = comm._checks_calls and fingerprint_of(
        name, dtype=dst.code, count=dst.count, op=PREMUL if scalar else code
    )
    return launch(comm, name, steps, held, held[0], src.nbytes, fingerprint, async_op, stream, scalar, copies=copies)


def _reduce_with_stats(comm, name, dst, src, held, op, async_op, algorithm, stream, share, copies) -> Work | None:
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
    return launch(
        comm, name, steps, (*held, share), held[0], src.nbytes, None, async_op, stream, scalar, copies=copies
    )


@refuses
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


@refuses
def all_gather(comm, out, inp, async_op: bool, algorithm, stream) -> Work | None:
    """Gather every rank's `inp` into `out`, in rank order."""
    name = "all_gather"
    dst, src = read_pair(comm, out, inp, name)
    check_size(comm, dst, src, comm.size, name, "out", "inp")
    src, copies = separate(comm, [dst], src, dst.ptr + comm.rank * src.nbytes, stream)
    held = (out, inp)
    if algorithm is not None:
        selected = select_algorithm(comm, name, algorithm)
        if selected != "native":
            return run_algorithm(comm, selected, name, dst, src, held, 0, None, async_op, stream, copies)
    steps = ((name, (src.ptr, dst.ptr, src.units, src.code)),)
    fingerprint = comm._checks_calls and fingerprint_of(name, dtype=src.tag, count=src.units)
    return launch(
        comm, name, steps, held, out, dst.nbytes, fingerprint, async_op, stream, label=src.label, copies=copies
    )


@refuses
def broadcast(comm, array, root, async_op: bool, stream) -> Work | None:
    """Send `root`'s array to all ranks, in place."""
    name = "broadcast"
    root = parse_peer(comm, root, "root", name)
    src = comm._reader.read(array, name, writes=comm.rank != root)
    steps = ((name, (src.ptr, src.ptr, src.units, src.code, root)),)
    fingerprint = comm._checks_calls and fingerprint_of(name, dtype=src.tag, count=src.units, root=root)
    return launch(comm, name, steps, (array,), array, src.nbytes, fingerprint, async_op, stream, label=src.label)


@refuses
def all_to_all(comm, out, inp, output_split_sizes, input_split_sizes, async_op: bool, stream) -> Work | None:
    """Send part r of `inp` to rank r, and receive rank r's into part r of `out`."""
    name = "all_to_all"
    if isinstance(inp, list | tuple) or output_split_sizes is not None or input_split_sizes is not None:
        return _uneven_all_to_all(comm, out, inp, output_split_sizes, input_split_sizes, async_op, stream)
    dst, src = read_pair(comm, out, inp, name)
    src, copies = separate(comm, [dst], src, None, stream)
    steps, fingerprint = _even_all_to_all(comm, dst, src)
    return launch(
        comm, name, steps, (out, inp), out, src.nbytes, fingerprint, async_op, stream, label=src.label, copies=copies
    )


def _uneven_all_to_all(comm, out, inp, output_split_sizes, input_split_sizes, async_op: bool, stream) -> Work | None:
    """Launch an all_to_all of parts of any size: rows of arrays, or lists of arrays."""
    kind, in_lists = "all_to_all with splits", isinstance(inp, list | tuple)
    try:
        if in_lists:
            buffer, sends, receives, copies = _read_lists(comm, out, inp, output_split_sizes, input_split_sizes, stream)
        else:
            dst, src = read_pair(comm, out, inp, "all_to_all")
            sent, received = parse_row_splits(comm, out, dst, output_split_sizes, inp, src, input_split_sizes)
            src, copies = separate(comm, [dst], src, None, stream)
            buffer, sends, receives = src if src.count else dst, split_array(src, sent), split_array(dst, received)
    except InvalidArgument as error:
        refuse_call(comm, kind, getattr(inp[0] if in_lists and inp else inp, "dtype", ""), error)
        raise
    steps, held, record = all_to_all_steps(buffer.code, sends, receives, comm._on_host and comm.size > 1), (), None
    if compares_parts(comm):
        width = buffer.units // buffer.count if buffer.count else 1  # units of an element
        elements = [[units // width for _, units in each] for each in (sends, receives)]
        first, compared, record = comparison(comm, kind, buffer, *elements, len(steps))
        steps, held = first + steps, compared
    fingerprint = comm._checks_calls and fingerprint_of(kind, dtype=buffer.tag)
    held = (*out, *inp, *held) if in_lists else (out, inp, *held)
    nbytes = sum(units for _, units in sends) * ITEMSIZE[buffer.code]
    return launch(
        comm, "all_to_all", steps, held, out, nbytes, fingerprint, async_op, stream, label=buffer.label, record=record,
        copies=copies,
    )  # fmt: skip


def _read_lists(comm, outs, inps, output_split_sizes, input_split_sizes, stream):
    """Read the lists of an all_to_all: one of its arrays, (address, units) of each part, copies."""
    name, size = "all_to_all", comm.size
    if output_split_sizes is not None or input_split_sizes is not None:
        raise invalid(comm, name, "lists are parts already: leave out the split sizes")
    for each, what in ((inps, "inp"), (outs, "out")):
        is_list = isinstance(each, list | tuple)
        if not is_list or len(each) != size:
            found = f"list of {len(each)}" if is_list else kind_of(each)
            raise invalid(comm, name, f"{what} must be an array, or a list of {size} arrays, one a rank, not {found}")
    read = [read_pair(comm, out, inp, name) for out, inp in zip(outs, inps, strict=True)]
    buffer = next((each for pair in read for each in pair if each.count), read[0][0])
    for pair in read:
        check_same_dtype(comm, pair[0], buffer, name)
    own_out, own_inp = read[comm.rank]
    if own_out.count != own_inp.count:
        text = f"rank {comm.rank} sends {own_inp.count} elements to itself and receives {own_out.count}"
        raise invalid(comm, name, text)
    sends, copies, outputs = [], [], [out for out, _ in read]
    for _, inp in read:
        apart, copy = separate(comm, outputs, inp, None, stream)
        copies += copy
        sends.append((apart.ptr, apart.units))
    return buffer, sends, [(out.ptr, out.units) for out in outputs], copies


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
    parts = [split_array(each, [units] * size) for each in (src, dst)]
    return all_to_all_steps(dst.code, *parts), fingerprint


@refuses
def gather_or_scatter(comm, name: str, out, inp, root, async_op: bool, stream) -> Work | None:
    """Gather every rank's `inp` into `root`'s `out` in rank order, or scatter the parts of `root`'s
    `inp`; `name`: "gather" or "scatter".
    """
    root, gathers = parse_peer(comm, root, "root", name), name == "gather"
    array, part_is, whole_is = (inp, "inp", "out") if gathers else (out, "out", "inp")
    part = comm._reader.read(array, name, writes=not gathers, what=part_is)
    whole = read_on_root(comm, out if gathers else inp, root, name, whole_is, writes=gathers)
    copies = ()
    if whole is not None:
        check_same_dtype(comm, *((whole, part) if gathers else (part, whole)), name)
        check_size(comm, whole, part, comm.size, name, whole_is, part_is)
        if gathers:
            part, copies = separate(comm, [whole], part, whole.ptr + root * part.nbytes, stream)
        else:
            whole, copies = separate(comm, [part], whole, part.ptr - root * part.nbytes, stream)
    steps = gather_or_scatter_steps(comm.engine.library, name, whole, part, root, comm.size)
    fingerprint = comm._checks_calls and fingerprint_of(name, dtype=part.tag, count=part.units, root=root)
    held = tuple(each for each in (out, inp) if each is not None)
    return launch(
        comm, name, steps, held, out, part.nbytes, fingerprint, async_op, stream, label=part.label, copies=copies
    )


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
