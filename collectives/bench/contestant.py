"""Who is measured: the interface, and those that run in the rank processes themselves, called from Python.

All are measured alike. A turn is: all ranks meet, ``warmup`` calls, then ``batches`` times ``calls`` calls in a row
with one look at the clock before and after each batch, and nothing else between the calls. The C loop of the MPI peers
does the same.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch

from .buffers import Buffers
from .cases import Case

__all__ = ["Contestant", "LocalContestant", "Plan", "time_on_host"]


@dataclass(frozen=True)
class Plan:
    """How often a turn calls: ``warmup`` calls, then ``batches`` of ``calls``; ``blocking``: wait for each (GPUs)."""

    warmup: int
    calls: int
    batches: int
    blocking: bool = False


class Contestant:
    """One library, in one way of using it. All ranks make the same calls on it.

    ``turn`` and ``check`` give a list with an entry for each rank that this process speaks for: its own, or all ranks'
    on rank 0 and none elsewhere where the ranks are processes of their own.
    """

    name = ""  # what rows are headed with
    peer = True  # not ours: its failure ends its own rows only
    caller = "python"
    binds = True  # its ranks are bound to cores where the run binds
    fields: dict = {}  # of its rows: engine, algorithm, zero_copy, wire, versions

    def refuses(self, case: Case, in_place: bool) -> str | None:
        """Tell why it has no such operation; None where it has. The same on all ranks."""
        raise NotImplementedError

    def prepare(self, case: Case, in_place: bool) -> None:
        """Make the arrays; the turns and checks until `release` use them."""
        raise NotImplementedError

    def turn(self, plan: Plan) -> list[list[float]]:
        """Give the time of one call in us, for each batch."""
        raise NotImplementedError

    def check(self) -> list[int]:
        """Make one call on fresh data, and count the wrong elements."""
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End what the contestant has started."""


class LocalContestant(Contestant):
    """One whose ranks are our rank processes. A subclass gives `bind` and `meet`."""

    device = torch.device("cpu")

    def __init__(self, rank: int):
        self.rank = rank
        self.buffers: Buffers | None = None
        self._call: Callable[[], object] | None = None

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Make the function that is timed, of no arguments."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait for all ranks, in the way that lets them start together."""
        raise NotImplementedError

    def allocate(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=dtype, device=self.device)

    def prepare(self, case: Case, in_place: bool) -> None:
        self.buffers = Buffers(case, self.rank, in_place, self.allocate)
        self._call = self.bind(case, self.buffers)

    def turn(self, plan: Plan) -> list[list[float]]:
        self.meet()
        collecting = gc.isenabled()
        gc.disable()
        try:
            return [time_on_host(self._call, plan) if self.device.type == "cpu" else _on_gpu(self._call, plan)]
        finally:
            if collecting:
                gc.enable()

    def check(self) -> list[int]:
        self.buffers.reset()
        self.meet()  # nobody's array may be poisoned while a peer's call is reading or writing it
        self._call()
        if self.device.type != "cpu":
            torch.cuda.synchronize()
        return [self.buffers.wrong()]

    def release(self) -> None:
        self.buffers = self._call = None


def time_on_host(call: Callable[[], object], plan: Plan) -> list[float]:
    """Time a function as `Plan` says, in us a call, with the clock of the processor."""
    clock, marks = time.perf_counter_ns, []
    for _ in repeat(None, plan.warmup):
        call()
    marks.append(clock())
    for _ in repeat(None, plan.batches):
        for _ in repeat(None, plan.calls):
            call()
        marks.append(clock())
    return [(after - before) / plan.calls / 1e3 for before, after in zip(marks, marks[1:], strict=False)]


def _on_gpu(call, plan: Plan) -> list[float]:
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
