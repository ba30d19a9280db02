"""Comparison of what the ranks send to each other, for operations that are made of several others.

An all-to-all of unequal parts is a group of sends and receives, an uneven all-gather one of
broadcasts. The engine compares a send with its receive, and no rank with all others. So such a
group begins with a collective in which the ranks gather records of what each of them sends and
expects: where they differ, or a rank makes another call, all ranks get `Mismatch` at once, and
nothing of the group is sent. A rank that can't make the call, since its own arguments can't be used,
puts the text of its error into its record: the others get it. In the place of any other collective
such a rank makes this one, and the others get its error, too.

On the host each call is compared, on NCCL with ``COLLECTIVES_CHECK=1`` alone, as all calls.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator, Sequence

import torch

from .._nccl import REFUSAL_BYTES
from ..arrays import dtype_tag
from ..errors import CollectivesError
from ..torch_compat import tree_leaves
from .fingerprint import check_calls, fingerprint_of
from .launch import launch
from .waiting import first_line
from .work import Work

__all__ = ["compare_parts", "compares_parts", "comparison", "refuse_call", "refuses", "refusing"]

# Calls that begin with this comparison on every rank.
_COMPARED = ("all_to_all with splits", "uneven all_gather", "uneven reduce_scatter")
_REFUSAL_S = 1.0  # how long a rank that refuses a call waits for the others, which may be late


def compares_parts(comm) -> bool:
    """Return whether a communicator's ranks compare the parts of such calls."""
    return comm.size > 1 and (comm._on_host or comm._checks_calls)


def _make_records(comm, sends: Sequence[int], receives: Sequence[int], refusal: str = "") -> tuple[torch.Tensor, int]:
    """Return memory for the records of all ranks and this rank's own one behind them, and where that begins."""
    pairs = [count for pair in zip(sends, receives, strict=True) for count in pair]
    text = refusal.encode("utf-8", "replace")[: REFUSAL_BYTES - 1]
    begin = comm.size * (REFUSAL_BYTES + 16 * comm.size)
    memory = bytearray(begin + REFUSAL_BYTES + 16 * comm.size)
    struct.pack_into(f"{REFUSAL_BYTES}s{len(pairs)}Q", memory, begin, text, *pairs)
    return torch.frombuffer(memory, dtype=torch.uint8), begin


def comparison(
    comm, name: str, buffer, sends: Sequence[int], receives: Sequence[int], transfers: int
) -> tuple[list[tuple], tuple, torch.Tensor | None]:
    """Return the steps that compare what the ranks send and receive, what they hold, and the record.

    `name`: in `fingerprint.KINDS`; `buffer`: one of the arrays, for its dtype; `sends`, `receives`:
    elements to and from each rank; `transfers`: how many sends and receives behind the steps wait
    for them.
    """
    records, own = _make_records(comm, sends, receives)
    if not comm._on_host:
        return [], (), records[own:]
    address = records.data_ptr()
    args = (address + own, address, transfers, name, buffer.dtype, sum(sends), buffer.code)
    return [("compare_parts", args)], (records,), None


def compare_parts(comm, name: str, array, sends: Sequence[int], receives: Sequence[int], async_op: bool) -> list:
    """Compare what the ranks send and receive at the start of the open group, whose collectives follow.

    `array`: one of theirs, for its dtype. Returns the Works of it: a list of one, or an empty one
    where the call is blocking or nothing is compared.
    """
    if not compares_parts(comm):
        return []
    buffer = comm._reader.read(array, name, writes=False)
    steps, held, record = comparison(comm, name, buffer, sends, receives, 0)
    fingerprint = comm._checks_calls and fingerprint_of(name, dtype=buffer.tag)
    work = launch(comm, name, steps, held, None, 0, fingerprint, async_op, None, record=record)
    return [] if work is None else [work]


def refuse_call(comm, name: str, dtype, error: Exception) -> None:
    """Tell the other ranks of a call why this rank can't make it; the caller raises `error` then.

    `name`: in `fingerprint.KINDS`; `dtype`: of its arrays. The others get `Mismatch` with the text of
    the error when they come to their call, or to another one: on the host this rank waits a moment
    for them, on NCCL until they have come. Does nothing where calls aren't compared, where the error
    was told before, and over several nodes for a call that doesn't begin with a comparison.
    """
    if not compares_parts(comm) or comm.closed or getattr(error, "refused", False):
        return
    if comm._on_host and name not in _COMPARED and len(comm.machines or ()) > 1:
        return
    error.refused = True
    nothing = [0] * comm.size
    records, own = _make_records(comm, nothing, nothing, f"{type(error).__name__}: {first_line(error)}")
    dtype = str(dtype).rpartition(".")[2]
    with contextlib.suppress(CollectivesError):  # what the others get; a communicator that has failed says so itself
        if not comm._on_host:
            check_calls(comm, [fingerprint_of(name, dtype=dtype_tag(dtype))], records=[records[own:]])
            return
        work, queue, address = Work(name, 0, None), comm._queue, records.data_ptr()
        earlier_ended = queue.record_completion(0)
        handle = queue.begin(name)
        try:
            comm._native.compare_parts(address + own, address, 0, name, dtype, 0, 0, handle)
        except BaseException:
            queue.cancel(name, (records,))
            raise
        queue.end(name, (records,), (work,)).reported = True  # `error` is what its caller gets
        comm._refusal = work, earlier_ended
        work.wait(_REFUSAL_S)


@contextlib.contextmanager
def refusing(comm, name: str, dtype) -> Iterator[None]:
    """Make a block that checks a call's arguments: what it raises goes to the other ranks, too."""
    try:
        yield
    except Exception as error:
        refuse_call(comm, name, dtype, error)
        raise


def refuses(function, find_comm: Callable = lambda comm, arrays: comm):
    """Have a collective tell the other ranks what it raises for its arguments, on the host engine of one
    node; a decorator.

    `find_comm`: returns the communicator, or None, from the function's first argument and the arrays
    of the others.
    """

    @functools.wraps(function)
    def call(owner, *args, **options):
        try:
            return function(owner, *args, **options)
        except (ValueError, TypeError) as error:  # `InvalidArgument` is a ValueError
            arrays = [each for each in tree_leaves((args, options)) if hasattr(each, "dtype")]
            comm = find_comm(owner, arrays)
            if comm is not None and comm._on_host:
                refuse_call(comm, "refused call", arrays[0].dtype if arrays else "unknown", error)
            raise

    return call
