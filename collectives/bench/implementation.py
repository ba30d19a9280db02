"""What the bench measures: the interface of an implementation, and those that our rank processes call.

All are measured in the same way, from Python. A turn is: a barrier, ``warmup`` calls, then
``batches`` times ``calls`` calls in a row. The clock is read before and after each batch, and
nothing else runs between the calls. With fresh data the clock is read before and after each call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch

from .buffers import Buffers
from .cases import Case, Layout

__all__ = ["Implementation", "InProcessImplementation", "PeerMissing", "Plan", "Unsupported"]


@dataclass(frozen=True)
class Plan:
    """Calls of a turn: ``warmup`` calls, then ``batches`` of ``calls``.

    ``blocking``: wait for each call (GPUs). ``fresh``: write the input of the next array, not timed,
    before each call.
    """

    warmup: int
    calls: int
    batches: int
    blocking: bool = False
    fresh: bool = False


class PeerMissing(Exception):
    """A peer is not installed, or can't be started here. The text says why and how to install it."""


class Unsupported(Exception):
    """An implementation doesn't have a case, on any rank. The text says why."""


class Implementation:
    """One library, used in one way. All ranks make the same calls on it.

    ``time_turn`` and ``check`` return a list with an entry for this rank; or, where the library's
    ranks are other processes, all entries on rank 0 and none on the other ranks.
    """

    name = ""  # of its rows
    is_ours = False
    is_bound = True  # to cores, where the run binds ranks
    fields: dict = {}  # fields of its rows: engine, algorithm, zero_copy, versions

    def prepare(self, case: Case, in_place: bool, arrays: int = 1) -> None:
        """Allocate the arrays, which turns and checks use until `release`, and make one call.

        ``arrays``: how many a turn with fresh data goes through; any other turn uses the first.
        Raises `Unsupported` on all ranks.
        """
        raise NotImplementedError

    def time_turn(self, plan: Plan) -> list[list[float]]:
        """Return the time of one call in us, for each batch."""
        raise NotImplementedError

    def check(self) -> list[int]:
        """Make one call on new data, and return the number of wrong elements.

        The results that turns with fresh data have left in the arrays count, too.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Free the arrays."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes or groups that the implementation has started."""


class InProcessImplementation(Implementation):
    """Implementation whose ranks are our rank processes.

    A subclass defines `make_call`, `barrier`, and whatever it has in another way.
    """

    device = torch.device("cpu")

    def __init__(self, rank: int):
        self.rank = rank
        self._arrays: list[tuple[Buffers, Callable[[], object]]] = []  # with the call on them
        self._next = 0  # index of the array that the next call with fresh data takes
        self._written: set[int] = set()  # arrays with the result of such a call

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        """Return why it doesn't have a case; None where it may have. The same on all ranks."""
        return None

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

    def make_first_call(self, call: Callable[[], object]) -> None:
        """Make a case's first call. Raises `Unsupported` where the library refuses it on all ranks."""
        call()

    def prepare(self, case: Case, in_place: bool, arrays: int = 1) -> None:
        reason = self.unsupported_reason(case, in_place)
        if in_place and not case.op.in_place:
            reason = f"{case.op.name} has no form in place"
        if reason:
            raise Unsupported(reason)
        layout = self.layout(case, in_place)
        buffers = [Buffers(case, self.rank, in_place, self.allocate, layout) for _ in range(arrays)]
        self._arrays = [(array, self.make_call(case, array)) for array in buffers]
        self._next, self._written = 0, set()
        self.make_first_call(self._arrays[0][1])
        self._synchronize()

    def time_turn(self, plan: Plan) -> list[list[float]]:
        self.barrier()
        collecting = gc.isenabled()
        gc.disable()
        try:
            if plan.fresh:
                return [self._time_fresh(plan)]
            call = self._arrays[0][1]
            return [_time_on_host(call, plan) if self.device.type == "cpu" else _time_on_gpu(call, plan)]
        finally:
            if collecting:
                gc.enable()

    def _time_fresh(self, plan: Plan) -> list[float]:
        """Return the mean time of a call for each batch; each call is timed alone, after a barrier."""
        clock, times = time.perf_counter_ns, []
        for calls in (plan.warmup, *repeat(plan.calls, plan.batches)):
            spent = 0
            for _ in repeat(None, calls):
                buffers, call = self._arrays[self._next]
                self._written.add(self._next)
                self._next = (self._next + 1) % len(self._arrays)
                buffers.write_input()
                self.barrier()
                before = clock()
                call()
                spent += clock() - before
            times.append(spent / max(1, calls) / 1e3)
        return times[1:]

    def check(self) -> list[int]:
        wrong = sum(self._arrays[index][0].count_wrong() for index in self._written)
        self._written = set()
        buffers, call = self._arrays[self._next]
        buffers.reset()
        self.barrier()  # no array may be reset while a peer's call reads or writes it
        call()
        self._synchronize()
        return [wrong + buffers.count_wrong()]

    def release(self) -> None:
        self._arrays = []

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)


def _time_on_host(call: Callable[[], object], plan: Plan) -> list[float]:
    """Return the time of a call in us, for each batch of the plan, by the host's clock."""
    clock = time.perf_counter_ns
    for _ in repeat(None, plan.warmup):
        call()
    marks = [clock()]
    for _ in repeat(None, plan.batches):
        for _ in repeat(None, plan.calls):
            call()
        marks.append(clock())
    return [(after - before) / plan.calls / 1e3 for before, after in zip(marks, marks[1:], strict=False)]


def _time_on_gpu(call: Callable[[], object], plan: Plan) -> list[float]:
    """Return the time of a call in us, for each batch of the plan, by events of the GPU's."""
    if plan.blocking:

        def call_and_wait():
            call()
            torch.cuda.synchronize()

        return _time_on_host(call_and_wait, plan)
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
