"""Session of the bench: measures each case, out of place and in place, with all implementations in turn."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from ..comm.communicator import Communicator
from ..comm.multinode.topology import read_host_id
from .cases import Case
from .control import Control
from .implementation import Implementation, PeerMissing, Plan, Unsupported
from .options import Options, UsageError
from .ours import OurImplementation
from .peers import open_peer
from .provenance import where_and_when
from .report import Report

__all__ = ["Session"]

_FRESH_BYTES = 64 << 20  # of all arrays of a rank, with --fresh


def count_calls(nbytes: int) -> int:
    """Return the number of calls between two reads of the clock, which costs about as much as the
    smallest calls.
    """
    return 16 if nbytes <= 16 << 10 else 4 if nbytes <= 256 << 10 else 1


class Session:
    """One run on all ranks. ``report``: the `Report` on rank 0, None on other ranks."""

    def __init__(self, options: Options, comm: Communicator, control: Control, report: Report | None):
        self.options, self.comm, self.control, self.report = options, comm, control, report
        self.failed: list[str] = []  # names of peers that failed
        self.implementations: list[Implementation] = []
        self._unsupported: dict[str, str] = {}  # why implementations don't have the case that is measured
        self._all_cores = os.sched_getaffinity(0)
        ranks_here = comm.size if read_host_id() else comm.local_size
        bind = options.bind == "core" or options.bind is None and ranks_here <= len(self._all_cores)
        self.bound = bind and comm.device.type == "cpu"  # on GPUs the host's part is small
        self._own_core = {_choose_core(comm.local_rank)}
        self._where = where_and_when()
        if options.fresh and comm.device.type != "cpu":
            raise UsageError("--fresh is measured on host memory only: --engine host")

    def open(self) -> None:
        """Open our implementations and start the peers; report which are missing."""
        options = self.options
        for zero_copy in options.zero_copy:
            for algorithm in options.algorithm:
                self.implementations.append(OurImplementation(self.comm, algorithm, zero_copy))
        for name in options.peers:
            try:
                self.implementations.append(open_peer(name, self.comm, self.control, self.bound))
            except PeerMissing as error:
                self._note(f"{name}: {error}")

    def run(self) -> None:
        """Measure all cases. Raises our own errors; a peer's failure ends that peer."""
        if self.report:
            self.report.begin([each.name for each in self.implementations], self.bound)
        measured = False
        for case in self.options.cases(self.comm.size):
            rows: dict[str, dict[bool, dict]] = {each.name: {} for each in self.implementations}
            self._unsupported = {}
            for in_place in (False, True):
                for implementation, row in self._measure(case, in_place):
                    rows[implementation.name][in_place] = row
                    measured |= implementation.is_ours
            for name, reason in self._unsupported.items():
                if not rows[name]:  # a single form that is missing shows as dashes
                    self._note(f"{name}: {reason}")
            if self.report:
                self.report.add(case, {name: places for name, places in rows.items() if places})
        if not measured:
            raise UsageError("nothing of ours could be measured: see the lines above")

    def close(self) -> None:
        """End the peers."""
        for implementation in self.implementations:
            implementation.close()

    def _measure(self, case: Case, in_place: bool) -> list[tuple[Implementation, dict]]:
        """Measure a case on all implementations that have it; return their rows."""
        options = self.options
        calls = options.calls or count_calls(case.nbytes)
        plan = Plan(options.warmup, calls, options.iters, bool(options.blocking), options.fresh)
        arrays = 1
        if options.fresh:
            arrays = max(1, min(plan.warmup + calls * plan.batches, _FRESH_BYTES // max(1, case.nbytes)))
        times: dict[Implementation, list[float]] = {}
        for implementation in list(self.implementations):
            # Not bound: the threads that a first call starts inherit the affinity of the calling thread.
            done = self._call_on_all(implementation, implementation.prepare, case, in_place, arrays, bind=False)
            if done is not None:
                times[implementation] = []
        for _ in range(options.turns):
            for implementation in list(times):
                ranks = self._call_on_all(implementation, implementation.time_turn, plan)
                if ranks is None:
                    del times[implementation]
                else:
                    times[implementation] += [max(batch) for batch in zip(*ranks, strict=True)]
        rows = []
        for implementation in list(times):
            wrong = None if not options.check else 0
            for _ in range(options.check):
                counts = self._call_on_all(implementation, implementation.check)
                wrong = None if counts is None or wrong is None else wrong + sum(counts)
            if implementation not in self.implementations:
                continue
            with contextlib.suppress(ChildProcessError):  # a peer's job has ended: its next call raises
                implementation.release()
            row = self._make_row(implementation, case, in_place, plan, times[implementation], wrong)
            rows.append((implementation, row | {"fresh": options.fresh, "arrays": arrays}))
        return rows

    def _call_on_all(
        self, implementation: Implementation, method: Callable[..., list | None], *arguments, bind: bool = True
    ) -> list | None:
        """Make a call on all ranks and concatenate their lists.

        Returns None, on all ranks, without a result: of a case that the implementation doesn't
        have, or of a peer that raises, which is ended. Any other error of ours is raised: the other
        ranks get it through the engine, or are ended.
        """
        result, unsupported, error = [], None, None
        if implementation not in self.implementations:
            return None
        # Only this thread is bound: threads that a library has started stay unbound. The scheduler
        # puts unbound ranks that wake each other on one core where others are busy, and then each
        # call waits for its time slice.
        if self.bound and bind and implementation.is_bound:
            os.sched_setaffinity(0, self._own_core)
        try:
            result = method(*arguments) or []
        except Unsupported as raised:
            unsupported = str(raised)
        except Exception as raised:
            if implementation.is_ours:
                raise
            error = f"{type(raised).__name__}: {raised}"
        os.sched_setaffinity(0, self._all_cores)
        answers = self.control.gather([result, unsupported, error])
        errors = [f"rank {rank}: {error}" for rank, (*_, error) in enumerate(answers) if error]
        if errors:
            self.implementations.remove(implementation)
            self.failed.append(implementation.name)
            self._note(f"{implementation.name}: failed and is left out from here on: {errors[0]}")
            implementation.close()
            return None
        reason = next((reason for _, reason, _ in answers if reason), None)
        if reason:
            self._unsupported[implementation.name] = reason
            return None
        return [entry for entries, *_ in answers for entry in entries]

    def _note(self, text: str) -> None:
        if self.report:
            self.report.note(text)

    def _make_row(
        self, implementation: Implementation, case: Case, in_place: bool, plan: Plan, times: list[float], wrong
    ) -> dict:
        times = sorted(times)
        median = statistics.median(times)
        algbw = case.nbytes / median / 1e3
        fields = {"engine": "", "algorithm": None, "zero_copy": False, "versions": {}} | implementation.fields
        versions = fields.pop("versions")
        return {
            "op": case.op.name,
            "name": implementation.name,
            "ours": implementation.is_ours,
            **fields,
            "dtype": case.kind.name,
            "redop": case.redop,
            "root": case.root,
            "ranks": case.ranks,
            "nodes": len(self.comm.machines or ()) or 1,
            "bytes": case.nbytes,
            "count": case.count,
            "in_place": in_place,
            "time_us": _round(median),
            "mean_us": _round(statistics.fmean(times)),
            "min_us": _round(times[0]),
            "p95_us": _round(_quantile(times, 95)),
            "p99_us": _round(_quantile(times, 99)),
            "algbw_gbs": _round(algbw),
            "busbw_gbs": _round(algbw * case.op.busbw(case.ranks)),
            "wrong": wrong,
            "turns": self.options.turns,
            "iters": plan.batches,
            "calls": plan.calls,
            "warmup": plan.warmup,
            "bound": self.bound and implementation.is_bound,
            **self._where,
            "versions": versions,
        }


def _choose_core(index: int) -> int:
    """Return a processor for the ``index``-th rank: a core of its own while there are any, then
    second hyper-threads.
    """
    allowed = sorted(os.sched_getaffinity(0))
    order = sorted(allowed, key=lambda cpu: (_hyper_thread(cpu, allowed), cpu))
    return order[index % len(order)]


def _hyper_thread(cpu: int, allowed: list[int]) -> int:
    """Return the index of a processor among its core's allowed hyper-threads."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:  # no sysfs in this container
        return 0
    bounds = [[int(number) for number in re.findall(r"\d+", part)] for part in text.split(",")]
    siblings = [number for part in bounds for number in range(part[0], part[-1] + 1)]
    return [number for number in siblings if number in allowed].index(cpu)


def _quantile(ordered: list[float], percent: int) -> float:
    """Return the nearest-rank percentile of sorted numbers."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _round(number: float) -> float:
    return float(f"{number:.5g}")
