"""The measuring: every case, out of place and in place, all contestants in turn."""

from __future__ import annotations

import contextlib
import os
import statistics

from ..comm.communicator import Communicator
from ..comm.multinode.topology import read_host_id
from ..errors import InvalidArgument
from .cases import Case
from .contestant import Contestant, Plan
from .control import Control
from .options import Options, UsageError
from .ours import Ours
from .peers import PeerMissing, open_peer
from .processes import core_of
from .provenance import where_and_when

__all__ = ["Session", "calls_in_a_row"]

_FIRST_CALL = Plan(warmup=1, calls=1, batches=0)


def calls_in_a_row(nbytes: int) -> int:
    """Choose how many calls one look at the clock is for: a look costs about what the smallest calls do."""
    return 16 if nbytes <= 16 << 10 else 4 if nbytes <= 256 << 10 else 1


class Session:
    """One run on all ranks. ``report`` is told of everything on rank 0, and is None elsewhere."""

    def __init__(self, options: Options, comm: Communicator, control: Control, report):
        self.options, self.comm, self.control, self.report = options, comm, control, report
        self.failed: list[str] = []  # peers that broke
        self.contestants: list[Contestant] = []
        self.bound = _binds(options, comm)
        self._free = os.sched_getaffinity(0)
        self._core = {core_of(comm.local_rank)} if self.bound else self._free
        self._where = where_and_when()

    def open(self) -> None:
        """Open ours and start the peers; say which are not there."""
        options = self.options
        for zero_copy in options.zero_copy:
            for wire in options.wires:
                for algorithm in options.algorithms:
                    self.contestants.append(Ours(self.comm, algorithm, zero_copy, wire))
        for name in options.peers:
            try:
                self.contestants.append(open_peer(name, self.comm, self.control, self.bound))
            except PeerMissing as error:
                self._note(f"{name}: {error}")

    def run(self) -> None:
        """Measure everything. Raises our own errors; a peer's failure ends that peer."""
        places = (False, True)
        cases = self.options.cases(self.comm.size)
        if self.report:
            self.report.begin(self.contestants, cases, self.bound)
        measured = 0
        for case in cases:
            rows = {}
            self._name_refusals(case)
            for in_place in places:
                for contestant, row in self._measure(case, in_place):
                    rows.setdefault(contestant.name, {})[in_place] = row
                    measured += not contestant.peer
            if self.report:
                self.report.add(case, rows)
        if not measured:
            raise UsageError("nothing of ours could be measured: see the lines above")

    def close(self) -> None:
        """End the peers."""
        for contestant in self.contestants:
            contestant.close()

    def _measure(self, case: Case, in_place: bool) -> list[tuple[Contestant, dict]]:
        options = self.options
        entered = []
        for contestant in list(self.contestants):
            if contestant.refuses(case, in_place) is not None:
                continue
            if self._each(contestant, contestant.prepare, case, in_place) is None:
                continue
            # The threads that a first call starts have the affinity of the thread that makes it.
            if self._each(contestant, contestant.turn, _FIRST_CALL, free=True) is not None:
                entered.append(contestant)
        calls = options.calls or calls_in_a_row(case.nbytes)
        plan = Plan(options.warmup, calls, options.iters, options.blocking)
        times: dict[str, list[float]] = {contestant.name: [] for contestant in entered}
        for _ in range(options.turns):
            for contestant in list(entered):
                ranks = self._each(contestant, contestant.turn, plan)
                if self.report and self.report.progress:
                    self.report.progress.update()
                if ranks is None:
                    entered.remove(contestant)
                else:
                    times[contestant.name] += [max(each) for each in zip(*ranks, strict=True)]
        found = []
        for contestant in list(entered):
            wrong = None if not options.check else 0
            for _ in range(options.check):
                counts = self._each(contestant, contestant.check)
                wrong = None if counts is None or wrong is None else wrong + sum(counts)
            if contestant in self.contestants:
                with contextlib.suppress(ChildProcessError):  # a peer's job has ended: its next call says so
                    contestant.release()
            if self.report and contestant in self.contestants:
                found.append((contestant, self._row(contestant, case, in_place, plan, times[contestant.name], wrong)))
            elif contestant in self.contestants:
                found.append((contestant, {}))
        return found

    def _each(self, contestant: Contestant, call, *args, free: bool = False) -> list | None:
        """Make a call on all ranks and join their lists; None, on all ranks, where it was refused, or a peer broke.

        Ours refuses by `InvalidArgument`, on all ranks and before anything is sent: this case is left out. A peer that
        raises is ended. ``free``: not bound to a core. Raises any other error of ours: the other ranks see it through
        the engine, or are ended.
        """
        entries, error = [], None
        if contestant not in self.contestants:
            return None
        # This thread alone: those that a library has started stay free. Unbound, ranks that wake each other are put on
        # one core where others are busy, and then each call waits for a turn of the scheduler.
        os.sched_setaffinity(0, self._core if contestant.binds and not free else self._free)
        try:
            entries = call(*args) or []
        except Exception as raised:
            if not contestant.peer and not isinstance(raised, InvalidArgument):
                raise
            error = f"{type(raised).__name__}: {raised}"
        os.sched_setaffinity(0, self._free)
        answers = self.control.gather([entries, error])
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        if not errors:
            return [entry for entries, _ in answers for entry in entries]
        if not contestant.peer:
            self._note(f"{contestant.name}: {errors[0].partition(': ')[2]}")
            return None
        self.contestants.remove(contestant)
        self.failed.append(contestant.name)
        self._note(f"{contestant.name}: failed and is left out from here on: {errors[0]}")
        contestant.close()
        return None

    def _name_refusals(self, case: Case) -> None:
        """Say who has no such operation at all; out of place or in place alone, the row's dashes do."""
        for contestant in self.contestants:
            refusals = [contestant.refuses(case, in_place) for in_place in (False, True)]
            if None not in refusals:
                self._note(f"{contestant.name}: {refusals[case.op.in_place]}")

    def _note(self, text: str) -> None:
        if self.report:
            self.report.note(text)

    def _row(self, contestant: Contestant, case: Case, in_place: bool, plan: Plan, times: list[float], wrong) -> dict:
        times = sorted(times)
        median = statistics.median(times)
        algbw = case.nbytes / median / 1e3
        fields = {"engine": "", "algorithm": None, "zero_copy": False, "wire": None, "versions": {}}
        fields |= contestant.fields
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
            "caller": contestant.caller,
            "turns": self.options.turns,
            "iters": plan.batches,
            "calls": plan.calls,
            "warmup": plan.warmup,
            "bound": self.bound and contestant.binds,
            **self._where,
            "versions": versions,
        }


def _binds(options: Options, comm: Communicator) -> bool:
    """Whether each rank is bound to a core of its own. On GPUs what the processor does hardly counts."""
    here = comm.size if read_host_id() else comm.local_size
    return comm.device.type == "cpu" and options.binds(here, len(os.sched_getaffinity(0)))


def _quantile(ordered: list[float], percent: int) -> float:
    """The nearest rank: the smallest that at least so many percent are not above."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _digits(number: float) -> float:
    return float(f"{number:.5g}")
