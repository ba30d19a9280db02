"""Calls, and groups of calls that are issued as one operation (ncclGroupStart, ncclGroupEnd)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._nccl import DTYPES, GroupCalls, open_groups
from ..cuda_state import stream_from_address
from ..errors import CollectivesError, InvalidUsage
from ..torch_compat import untraced
from .fingerprint import check_calls
from .memory import raw_cuda_memory
from .work import Work

__all__ = ["Call", "Copy", "Group", "issue", "make_copies", "open_groups", "run_grouped"]

_UINT8 = DTYPES["uint8"]


class Copy(NamedTuple):
    """A copy of an array that a call needs before it begins.

    `memory`: what holds the target, None where the call's arrays do.
    """

    source: int
    target: int
    nbytes: int
    memory: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One validated operation, ready to be issued.

    `steps`: pairs of a method of the binding and its arguments without the stream; `scalar`:
    (value, dtype code) of a premultiplied sum, or None; `label`: the dtype's name where the arrays
    travel as bytes, or None; `record`: what it sends and receives, for COLLECTIVES_CHECK, or None;
    `copies`: see `make_copies`.
    """

    comm: Any
    op: str
    steps: Sequence[tuple]
    held: tuple
    nbytes: int
    fingerprint: tuple | None = None
    scalar: tuple | None = None
    stream: int = 0
    work: Work | None = None
    label: str | None = None
    record: Any = None
    copies: Sequence[Copy] = ()


_OP = 4  # position of the op among a reduction's arguments


def issue(calls: list[Call], streams: list[int]) -> None:
    """Issue calls, as one group if they are more than one step: all of them, or none.

    What Python can check, such as a closed communicator, is checked before the library gets any of
    them.
    """
    for call, stream in zip(calls, streams, strict=True):
        if call.copies:
            make_copies(call.comm, call.copies, stream)
    library = calls[0].comm.engine.library
    grouped = len(calls) > 1 or len(calls[0].steps) > 1
    created_ops: list[tuple] = []
    try:
        functions = []
        for call, stream in zip(calls, streams, strict=True):
            functions += _resolve_steps(call, stream, grouped, created_ops)
        try:
            if grouped:
                run_grouped(library, functions)
            else:
                for function, args in functions:
                    function(*args)
        except BaseException:
            if library.is_host:
                library.label()  # an unused label must not be left for the next operation
            raise
    except BaseException:
        for native, op in created_ops:
            try:
                native.destroy_op(op)
            except CollectivesError:
                pass  # the communicator is out of use; the error that is being raised says why
        raise
    for native, op in created_ops:  # legal as soon as the last function that takes the op has returned
        native.destroy_op(op)


def make_copies(comm, copies: Sequence[Copy], stream: int) -> None:
    """Make the copies that a call needs, after all calls before it, which may write what is copied.

    On the host they are messages to oneself, to which the engine gives their place in its order.
    """
    if comm._on_host:
        native = comm._native
        for copy in copies:
            ends = copy.nbytes, _UINT8, comm.rank, stream
            run_grouped(native.library, ((native.send, (copy.source, *ends)), (native.recv, (copy.target, *ends))))
    else:
        with torch.cuda.stream(stream_from_address(stream, comm.device)):
            for copy in copies:
                source = raw_cuda_memory(copy.source, copy.nbytes, comm.device)
                raw_cuda_memory(copy.target, copy.nbytes, comm.device).copy_(source)


def _resolve_steps(call: Call, stream: int, grouped: bool, created_ops: list):
    """Yield a call's steps as (function, arguments).

    Creates the premultiplied sums that they need, and appends them to `created_ops` as pairs of
    the binding object and the op. `grouped`: the steps are part of a group.
    """
    native = call.comm._native
    if grouped:  # an operation of several steps can't stand in a group
        native = getattr(native, "parent", native)
    library = call.comm.engine.library
    for name, args in call.steps:
        if call.scalar is not None:
            op = native.create_premul_sum(*call.scalar)
            created_ops.append((native, op))
            args = (*args[:_OP], op, *args[_OP + 1 :])
        if call.label is not None and library.is_host:
            yield library.label, (None, call.label)
        yield getattr(native, name), (*args, stream)


def run_grouped(library, functions) -> None:
    """Call functions of the binding, pairs of a function and its arguments, as one group.

    If anything is raised, Ctrl-C included, the library launches none of them.
    """
    try:
        library.group_start()
        for function, args in functions:
            function(*args)
        library.group_end()
    except BaseException:
        library.group_cancel()  # does nothing where the group has ended
        raise


@untraced
class Group(GroupCalls):
    """Context manager that collects the calls of a ``with`` block and issues them as one.

    Made by `Communicator.group`. The group is the thread's: calls of other communicators of the
    same engine inside the block belong to it. All its calls are blocking or all have
    ``async_op=True``. If the block raises, none is issued.
    """

    __slots__ = ()

    def has_calls_of(self, comm) -> bool:
        """Return whether the group holds calls of a communicator."""
        return any(call.comm is comm for call in self._calls)

    def add(self, call: Call) -> Work | None:
        """Add a communicator's call; return its Work."""
        if call.comm is not self._comm and call.comm.engine.library is not self._comm.engine.library:
            raise InvalidUsage(
                f"a group of the engine {self._comm.engine.name!r} can't take a call of {call.comm.engine.name!r}: "
                "make two groups",
                op=call.op, rank=call.comm.rank,
            )  # fmt: skip
        if self._calls and (self._calls[0].work is None) != (call.work is None):
            raise InvalidUsage(
                "the calls of one group are all blocking or all async_op=True", op=call.op, rank=call.comm.rank
            )
        self._calls.append(call)
        return call.work

    def _issue(self, calls: list[Call]) -> None:
        for call in calls:
            call.comm._check_open(call.op)
        comms = list({id(call.comm): call.comm for call in calls}.values())
        for comm in comms:
            compared = [call for call in calls if call.comm is comm and call.fingerprint]
            check_calls(comm, [call.fingerprint for call in compared], True, [call.record for call in compared])
        if calls[0].work is None:
            with self._comm._device_guard():
                issue(calls, [call.stream for call in calls])
        else:
            self._issue_async(calls, comms)

    def _issue_async(self, calls: list[Call], comms: list) -> None:
        # One queue takes the whole group on the host; on CUDA each communicator has its own device
        # and stream.
        if self._comm.engine.device_type == "cpu":
            comms = [self._comm]
        comms.sort(key=id)  # two threads take the queues' locks in one order
        queues = {comm: comm._queue for comm in comms}
        own = {comm: [call for call in calls if len(comms) == 1 or call.comm is comm] for comm in comms}
        held = {comm: tuple(array for call in own[comm] for array in call.held) for comm in comms}
        streams = {}  # of the queues with an open submission
        try:
            for comm, queue in queues.items():
                streams[comm] = queue.begin("group")
            with self._comm._device_guard():
                issue(calls, [streams.get(call.comm, streams.get(self._comm)) for call in calls])
            for comm, queue in queues.items():
                del streams[comm]  # `end` ends the submission, also where it raises
                queue.end("group", held[comm], [call.work for call in own[comm]])
        except BaseException:
            for comm in streams:
                queues[comm].cancel("group", held[comm])
            raise
