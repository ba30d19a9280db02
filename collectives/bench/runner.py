"""Session of the bench: measures each case, out of place and in place, with all in turn."""

from __future__ import annotations

import contextlib
import os
import statistics

from ..comm.communicator import Communicator
from ..comm.multinode.topology import read_host_id
from ..errors import InvalidArgument
from .cases import Case
from .control import Control
from .implementation import Implementation, PeerMissing, Plan
from .options import Options, UsageError
from .ours import OurImplementation
from .peers import open_peer
from .processes import core_of
from .provenance import where_and_when
from .rotation import count_arrays, last_level_cache

__all__ = ["Session", "calls_per_iteration"]

_FIRST_CALL = Plan(warmup=1, calls=1, batches=0)


def calls_per_iteration(nbytes: int) -> int:
    """Return the number of calls between two reads of the clock, which costs about as much as the
    smallest calls.
    """
    return 16 if nbytes <= 16 << 10 else 4 if nbytes <= 256 << 10 else 1


class Session:
    """One run on all ranks. ``report``: the `Report` on rank 0, None on other ranks."""

    def __init__(self, options: Options, comm: Communicator, control: Control, report):
        self.options, self.comm, self.control, self.report = options, comm, control, report
        self.failed: list[str] = []  # names of peers that failed
        self.implementations: list[Implementation] = []
        self.bound = _binds(options, comm)
        self._free = os.sched_getaffinity(0)
        self._core = {core_of(comm.local_rank)} if self.bound else self._free
        self._where = where_and_when()
        self._cache = control.broadcast_from_rank_0(last_level_cache())  # all ranks have as many arrays
        if options.fresh is not None and comm.device.type != "cpu":
            raise UsageError("--fresh is measured on host memory only: --engine host")

    def open(self) -> None:
        """Open our implementations and start the peers; report which are missing."""
        options = self.options
        for zero_copy in options.zero_copy:
            for wire in options.wires:
                for algorithm in options.algorithms:
                    self.implementations.append(OurImplementation(self.comm, algorithm, zero_copy, wire))
        for name in options.peers:
            try:
                self.implementations.append(open_peer(name, self.comm, self.control, self.bound))
            except PeerMissing as error:
                self._note(f"{name}: {error}")

    def run(self) -> None:
        """Measure all cases. Raises our own errors; a peer's failure ends that peer."""
        cases = self.options.cases(self.comm.size)
        if self.report:
            self.report.begin(self.implementations, cases, self.bound)
        measured = 0
        for case in cases:
            rows = {}
            self._report_unsupported(case)
            for in_place in (False, True):
                for implementation, row in self._measure(case, in_place):
                    rows.setdefault(implementation.name, {})[in_place] = row
                    measured += not implementation.peer
            if self.report:
                self.report.add(case, rows)
        if not measured:
            raise UsageError("nothing of ours could be measured: see the lines above")

    def close(self) -> None:
        """End the peers."""
        for implementation in self.implementations:
            implementation.close()

    def _measure(self, case: Case, in_place: bool) -> list[tuple[Implementation, dict]]:
        options = self.options
        entered = []
        calls = options.calls or calls_per_iteration(case.nbytes)
        fresh = options.fresh is not None
        arrays = 1
        if fresh:
            arrays = count_arrays(case, in_place, options.warmup + calls * options.iters, self._cache, options.fresh)
        for implementation in list(self.implementations):
            if implementation.unsupported_reason(case, in_place) is not None:
                continue
            if self._call_on_all(implementation, implementation.prepare, case, in_place, arrays) is None:
                continue
            # The threads that a first call starts inherit the affinity of the calling thread.
            if self._call_on_all(implementation, implementation.turn, _FIRST_CALL, free=True) is not None:
                entered.append(implementation)
        plan = Plan(options.warmup, calls, options.iters, options.blocking, fresh)
        times: dict[str, list[float]] = {implementation.name: [] for implementation in entered}
        for _ in range(options.turns):
            for implementation in list(entered):
                ranks = self._call_on_all(implementation, implementation.turn, plan)
                if self.report and self.report.progress:
                    self.report.progress.update()
                if ranks is None:
                    entered.remove(implementation)
                else:
                    times[implementation.name] += [max(each) for each in zip(*ranks, strict=True)]
        found = []
        for implementation in list(entered):
            wrong = None if not options.check else 0
            for _ in range(options.check):
                counts = self._call_on_all(implementation, implementation.check)
                wrong = None if counts is None or wrong is None else wrong + sum(counts)
            if implementation not in self.implementations:
                continue
            with contextlib.suppress(ChildProcessError):  # a peer's job has ended: its next call raises
                implementation.release()
            row = {}
            if self.report:
                row = self._row(implementation, case, in_place, plan, times[implementation.name], wrong)
                row |= {"fresh": fresh, "arrays": arrays}
            found.append((implementation, row))
        return found

    def _call_on_all(self, implementation: Implementation, call, *args, free: bool = False) -> list | None:
        """Make a call on all ranks and concatenate their lists.

        Returns None, on all ranks, without a result. Our implementation raises `InvalidArgument` on
        all ranks, before anything is sent, for an unsupported case, which is skipped. A peer that
        raises is ended. ``free``: not bound to a core. Any other error of ours is raised: the other
        ranks get it through the engine, or are ended.
        """
        entries, error = [], None
        if implementation not in self.implementations:
            return None
        # Only this thread is bound: threads that a library has started stay unbound. The scheduler
        # puts unbound ranks that wake each other on one core where others are busy, and then each
        # call waits for its time slice.
        os.sched_setaffinity(0, self._core if implementation.binds and not free else self._free)
        try:
            entries = call(*args) or []
        except Exception as raised:
            if not implementation.peer and not isinstance(raised, InvalidArgument):
                raise
            error = f"{type(raised).__name__}: {raised}"
        os.sched_setaffinity(0, self._free)
        answers = self.control.gather([entries, error])
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        if not errors:
            return [entry for entries, _ in answers for entry in entries]
        if not implementation.peer:
            self._note(f"{implementation.name}: {errors[0].partition(': ')[2]}")
            return None
        self.implementations.remove(implementation)
        self.failed.append(implementation.name)
        self._note(f"{implementation.name}: failed and is left out from here on: {errors[0]}")
        implementation.close()
        return None

    def _report_unsupported(self, case: Case) -> None:
        """Report implementations that have neither form of an operation.

        A missing form shows as dashes in the row.
        """
        for implementation in self.implementations:
            reasons = [implementation.unsupported_reason(case, in_place) for in_place in (False, True)]
            if None not in reasons:
                self._note(f"{implementation.name}: {reasons[case.op.in_place]}")

    def _note(self, text: str) -> None:
        if self.report:
            self.report.note(text)

    def _row(
        self, implementation: Implementation, case: Case, in_place: bool, plan: Plan, times: list[float], wrong
    ) -> dict:
        times = sorted(times)
        median = statistics.median(times)
        algbw = case.nbytes / median / 1e3
        fields = {"engine": "", "algorithm": None, "zero_copy": False, "wire": None, "versions": {}}
        fields |= implementation.fields
        versions = fields.pop("versions")
        return {
            "op": case.op.name,
            **fields,
            "dtype": case.kind.name,
            "redop": case.redop,
            "root": case.root,
            "ranks": case.ranks,
            "bytes": case.nbytes,
            "count": case.count,
            "in_place": in_place,
            "time_us": _digits(median),
            "mean_us": _digits(statistics.fmean(times)),
            "min_us": _digits(times[0]),
            "p50_us": _digits(median),
            "p95_us": _digits(_quantile(times, 95)),
            "p99_us": _digits(_quantile(times, 99)),
            "algbw_gbs": _digits(algbw),
            "busbw_gbs": _digits(algbw * case.op.busbw(case.ranks)),
            "wrong": wrong,
            "caller": implementation.caller,
            "turns": self.options.turns,
            "iters": plan.batches,
            "calls": plan.calls,
            "warmup": plan.warmup,
            "bound": self.bound and implementation.binds,
            **self._where,
            "versions": versions,
        }


def _binds(options: Options, comm: Communicator) -> bool:
    """Return whether each rank is bound to a core of its own.

    Never on GPUs, where the host's part is small.
    """
    here = comm.size if read_host_id() else comm.local_size
    return comm.device.type == "cpu" and options.binds(here, len(os.sched_getaffinity(0)))


def _quantile(ordered: list[float], percent: int) -> float:
    """Return the nearest-rank percentile of sorted numbers."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _digits(number: float) -> float:
    return float(f"{number:.5g}")
