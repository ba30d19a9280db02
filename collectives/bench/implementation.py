"""Interface of measured implementations; base class of those that our processes call.

All are measured in the same way. A turn is: a barrier, ``warmup`` calls, then ``batches`` times
``calls`` calls in a row. The clock is read once before and after each batch, and nothing else runs
between the calls. With new data in every call (`rotation`) the clock is read before and after each
call. The C loop of the MPI peers does the same.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch

from .buffers import Buffers, allocate_buffers
from .cases import Case, Layout

__all__ = ["Implementation", "InProcessImplementation", "PeerMissing", "Plan", "time_fresh", "time_on_host"]


@dataclass(frozen=True)
class Plan:
    """Calls of a turn: ``warmup`` calls, then ``batches`` of ``calls``.

    ``blocking``: wait for each call (GPUs). ``fresh``: write the next array before each call, not
    timed.
    """

    warmup: int
    calls: int
    batches: int
    blocking: bool = False
    fresh: bool = False


class PeerMissing(Exception):
    """A peer is not installed, or can't be started here.

    The text says why and how to install it.
    """


class Implementation:
    """One library, used in one way. All ranks make the same calls on it.

    ``turn`` and ``check`` return a list with an entry for this rank; or, where the library's ranks
    are other processes, all entries on rank 0 and none on the other ranks.
    """

    name = ""  # of its rows
    peer = True  # not ours: its failure ends only its own rows
    caller = "python"
    binds = True  # to cores, where the run binds ranks
    fields: dict = {}  # fields of its rows: engine, algorithm, zero_copy, wire, versions

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        """Return why it doesn't have an operation; None where it has. The same on all ranks."""
        raise NotImplementedError

    def prepare(self, case: Case, in_place: bool, arrays: int = 1) -> None:
        """Allocate the arrays, which turns and checks use until `release`.

        ``arrays``: how many a turn with fresh data goes through; any other turn uses the first.
        """
        raise NotImplementedError

    def turn(self, plan: Plan) -> list[list[float]]:
        """Return the time of one call in us, for each batch."""
        raise NotImplementedError

    def check(self) -> list[int]:
        """Make one call on new data, and return the number of wrong elements.

        After turns with fresh data the results that these have left in the arrays count, too.
        """
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End the processes or groups that the implementation has started."""


class InProcessImplementation(Implementation):
    """Implementation whose ranks are our rank processes.

    A subclass defines `make_call` and `barrier`.
    """

    device = torch.device("cpu")

    def __init__(self, rank: int):
        self.rank = rank
        self._arrays: list[tuple[Buffers, Callable[[], object]]] = []  # with the call on them
        self._next = 0  # of the arrays, in turns with fresh data
        self._written: set[int] = set()  # arrays with the result of such a turn

    def make_call(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Return the function that is timed; it takes no arguments."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for all ranks so that they start together."""
        raise NotImplementedError

    def allocate(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=dtype, device=self.device)

    def layout(self, case: Case, in_place: bool) -> Layout:
        """Return where the library has a rank's arrays."""
        return case.layout(self.rank)

    def prepare(self, case: Case, in_place: bool, arrays: int = 1) -> None:
        layout = self.layout(case, in_place)
        buffers = allocate_buffers(case, self.rank, in_place, self.allocate, layout, arrays)
        self._arrays = [(each, self.make_call(case, each)) for each in buffers]
        self._next, self._written = 0, set()

    def turn(self, plan: Plan) -> list[list[float]]:
        self.barrier()
        collecting = gc.isenabled()
        gc.disable()
        try:
            if plan.fresh:
                return [time_fresh(self._next_array, self.barrier, plan)]
            call = self._arrays[0][1]
            return [time_on_host(call, plan) if self.device.type == "cpu" else time_on_gpu(call, plan)]
        finally:
            if collecting:
                gc.enable()

    def _next_array(self) -> Callable[[], object]:
        """Write the next array, and return the call on it."""
        buffers, call = self._arrays[self._next]
        self._written.add(self._next)
        self._next = (self._next + 1) % len(self._arrays)
        buffers.write()
        return call

    def check(self) -> list[int]:
        wrong = sum(self._arrays[index][0].wrong() for index in self._written)
        self._written = set()
        buffers, call = self._arrays[self._next]
        buffers.reset()
        self.barrier()  # no array may be reset while a peer's call reads or writes it
        call()
        if self.device.type != "cpu":
            torch.cuda.synchronize()
        return [wrong + buffers.wrong()]

    def release(self) -> None:
        self._arrays = []


def time_fresh(next_call: Callable[[], Callable[[], object]], barrier: Callable[[], None], plan: Plan) -> list[float]:
    """Return the time of a call on fresh data in us, for each batch of the plan: the mean over its
    calls, each of which is timed alone.

    ``next_call`` writes the data, and returns the call on them. ``barrier``: of all ranks, after it.
    """
    clock, times = time.perf_counter_ns, []
    for _ in repeat(None, plan.warmup):
        call = next_call()
        barrier()
        call()
    for _ in repeat(None, plan.batches):
        spent = 0
        for _ in repeat(None, plan.calls):
            call = next_call()
            barrier()
            before = clock()
            call()
            spent += clock() - before
        times.append(spent / plan.calls / 1e3)
    return times


def time_on_host(call: Callable[[], object], plan: Plan) -> list[float]:
    """Return the time of a function in us per call, for each batch of the plan, by the host's
    clock.
    """
    clock, marks = time.perf_counter_ns, []
    for _ in repeat(None, plan.warmup):
        call()
    marks.append(clock())
    for _ in repeat(None, plan.batches):
        for _ in repeat(None, plan.calls):
            call()
        marks.append(clock())
    return [(after - before) / plan.calls / 1e3 for before, after in zip(marks, marks[1:], strict=False)]


def time_on_gpu(call, plan: Plan) -> list[float]:
    if plan.blocking:

        def waited():
            call()
            torch.cuda.synchronize()

        return time_on_host(waited, plan)
    for _ in repeat(None, plan.warmup):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(plan.batches + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in repeat(None, plan.calls):
            call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 / plan.calls for before, after in zip(marks, marks[1:], strict=False)]
