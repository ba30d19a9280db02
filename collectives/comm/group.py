"""Calls, and groups of them that are issued as one."""

from __future__ import annotations

import threading

from ..errors import CollectivesError, InvalidUsage
from .work import Work

__all__ = ["Call", "Group", "issue", "open_groups", "run_grouped"]


class Call:
    """One validated operation, ready to be issued.

    `steps`: pairs of a method of the binding and its arguments, the stream left out.
    """

    __slots__ = ("comm", "held", "label", "nbytes", "op", "row", "scalar", "steps", "stream", "work")

    def __init__(self, comm, op, steps, held, nbytes, row=None, scalar=None, stream=0, work=None, label=None):
        self.comm = comm
        self.op = op
        self.steps = steps
        self.held = held
        self.nbytes = nbytes
        self.row = row
        self.scalar = scalar  # (value, dtype code) of a premultiplied sum
        self.stream = stream
        self.work = work
        self.label = label  # the dtype's name, where the arrays travel as bytes


_OP = 4  # place of the op among a reduction's arguments


def issue(calls: list[Call], streams: list[int]) -> None:
    """Hand calls to the library, as one group where they are more than one step: all of them, or none.

    What Python can find wrong, as a closed communicator, is found before the library has any of them.
    """
    library = calls[0].comm.engine.library
    grouped = len(calls) > 1 or len(calls[0].steps) > 1
    made: list[tuple] = []
    try:
        ready = []
        for call, stream in zip(calls, streams, strict=True):
            ready += _ready(call, stream, grouped, made)
        try:
            if grouped:
                run_grouped(library, ready)
            else:
                for function, args in ready:
                    function(*args)
        except BaseException:
            if library.is_host:
                library.label()  # it may not have been used up
            raise
    except BaseException:
        for native, op in made:
            try:
                native.destroy_op(op)
            except CollectivesError:
                pass  # the communicator is out of use; what is being raised says why
        raise
    for native, op in made:  # legal as soon as the last function that was given the op has returned
        native.destroy_op(op)


def _ready(call: Call, stream: int, grouped: bool, made: list):
    """Give a call's steps as functions with their arguments; ops that they need are made here, and added to `made`."""
    native = call.comm._native
    if grouped:  # what takes several steps can't stand in a group
        native = getattr(native, "parent", native)
    library = call.comm.engine.library
    for name, args in call.steps:
        if call.scalar is not None:
            op = native.create_premul_sum(*call.scalar)
            made.append((native, op))
            args = (*args[:_OP], op, *args[_OP + 1 :])
        if call.label is not None and library.is_host:
            yield library.label, (None, call.label)
        yield getattr(native, name), (*args, stream)


def run_grouped(library, ready) -> None:
    """Make calls, pairs of a function of the binding and its arguments, as one group.

    Whatever is raised on the way, Ctrl-C included, the library launches none of them.
    """
    try:
        library.group_start()
        for function, args in ready:
            function(*args)
        library.group_end()
    except BaseException:
        library.group_cancel()  # nothing where the end has been reached
        raise


open_groups: dict[int, Group] = {}  # by thread, as in the library


class Group:
    """Collect the calls of a ``with`` block and issue them as one. Made by `Communicator.group()`.

    The group is the thread's: calls of other communicators of the same engine inside the block belong to it. All its
    calls are blocking or all have ``async_op=True``. Where the block raises, none is issued.
    """

    def __init__(self, comm):
        self._comm = comm
        self._calls: list[Call] = []
        self._outer: Group | None = None
        self._before = 0
        self._entered = False

    def __enter__(self):
        if self._entered:
            raise InvalidUsage("this group is open already: make another one with comm.group()", rank=self._comm.rank)
        self._entered = True
        thread = threading.get_ident()
        self._outer = open_groups.get(thread)
        if self._outer is None:
            open_groups[thread] = self
        else:
            self._before = len(self._outer._calls)
        return self

    def __exit__(self, kind, error, trace):
        self._entered = False
        outer, self._outer = self._outer, None
        if outer is not None:
            if kind is not None:
                del outer._calls[self._before :]
            return
        del open_groups[threading.get_ident()]
        calls, self._calls = self._calls, []
        if kind is None and calls:
            self._issue(calls)

    def uses(self, comm) -> bool:
        """Tell whether it holds calls of a communicator."""
        return any(call.comm is comm for call in self._calls)

    def add(self, call: Call) -> Work | None:
        """Put a call in; called by the communicators."""
        if call.comm.engine.library is not self._comm.engine.library:
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
        comms = list({id(call.comm): call.comm for call in calls}.values())
        for comm in comms:
            comm._agree([call.row for call in calls if call.comm is comm and call.row], grouped=True)
        if calls[0].work is None:
            with self._comm._guard():
                issue(calls, [call.stream for call in calls])
            return
        # One queue takes the whole group on the host; on CUDA each communicator has its own device and stream.
        if self._comm.engine.device_type == "cpu":
            comms = [self._comm]
        comms.sort(key=id)  # two threads take the lanes' locks in one order
        lanes = {comm: comm._lane for comm in comms}
        held = {
            comm: tuple(array for call in calls if len(comms) == 1 or call.comm is comm for array in call.held)
            for comm in comms
        }
        begun = {}
        try:
            for comm, lane in lanes.items():
                begun[comm] = lane.begin()
            with self._comm._guard():
                issue(calls, [begun.get(call.comm, begun.get(self._comm)) for call in calls])
            for comm, lane in lanes.items():
                del begun[comm]  # `end` closes it, also where it raises
                lane.end("group", held[comm], [call.work for call in calls if len(comms) == 1 or call.comm is comm])
        except BaseException:
            for comm in begun:
                lanes[comm].cancel("group", held[comm])
            raise
