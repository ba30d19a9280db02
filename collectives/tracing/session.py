"""Timeline: one recording of this job, from its start to the trace file and the report."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import socket
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, InvalidUsage
from ..launcher import detect_launcher
from ..recorder import Recorder, recording
from .summary import format_report
from .trace import write_trace

__all__ = ["Timeline", "timeline"]


class Timeline:
    """A running recording: a context manager that writes the trace at its end.

    `timeline` makes it. ``written``: the files that this rank has written, once it has ended.
    """

    def __init__(self, path: Path | None, steps: int | None, *, skip_empty: bool = False):
        self.path = path
        self.written: list[Path] = []
        self._skip_empty = skip_empty
        self._began, self._offset = _read_clocks()
        self._rank_and_size = None
        self._note_rank()
        self._recorder = Recorder(last_step=steps, on_last_step=self.stop)
        self._text: str | None = None

    def stop(self) -> str:
        """End the recording, write the trace and return the report.

        A second call returns the report again. With torch.distributed initialised this is a
        collective call over its default group: all ranks make it, rank 0 writes one file for all of
        them, and all get the same report. Without it each rank writes a file of its own,
        ``trace.rank1.json``; so it does, with a warning, where the ranks' records can't be
        collected because a rank has died, and then raises that error. Blocks until the GPU has done
        what was recorded. Raises the ``OSError`` of a trace that can't be written.
        """
        return self._end(collective=True)

    def report(self) -> str:
        """Return the table as text, the slowest ranks first.

        Before `stop` it is of this rank's steps so far. Times are means over the steps. A step ends
        where a backward ends; the time before the first such end isn't counted. "communication":
        the time in which some communication stream was in a collective. "exposed": the time in
        which communication blocked the backward. "last to come": the number of collectives, of
        those that all ranks recorded, to which this rank came last. "waits": the mean time of a
        collective that this rank waited for the last rank.
        """
        if self._text is not None:
            return self._text
        self._recorder.resolve()
        return f"{format_report([self._snapshot()])}\nThis rank alone; stop() tells of all."

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._end(collective=kind is None)  # after an error the other ranks may not call it

    def __repr__(self):
        state = "recording" if self._text is None else "stopped"
        return f"<Timeline {state}, {len(self._recorder.marks)} steps, {len(self._recorder.events)} events>"

    def _end(self, collective: bool) -> str:
        global _current
        if self._text is not None:
            return self._text
        if recording.active is self._recorder:
            recording.active = None
        _current = None
        self._note_rank()
        self._recorder.resolve()
        record = self._snapshot()
        rank, size = self._rank_and_size
        if collective and size > 1 and _group_initialised():
            return self._end_together(record, rank, size)
        self._text = format_report([record])
        if record["events"] or record["marks"] or not self._skip_empty:
            self._write([record], self._rank_path())
        return self._text

    def _end_together(self, record: dict, rank: int, size: int) -> str:
        records = [None] * size if rank == 0 else None
        outcome = [None, None]
        try:
            dist.gather_object(record, records)
            if rank == 0:
                outcome = [format_report(records), None]
                try:
                    self._write(records, self.path)
                except Exception as error:  # the other ranks wait for the outcome
                    outcome[1] = error
            dist.broadcast_object_list(outcome)
        except Exception as error:  # of torch.distributed: a rank has died, say
            self._text = outcome[0] or format_report([record])
            if outcome[0] is None:
                path = self._rank_path()
                warnings.warn(
                    f"the timelines of {size} ranks can't be brought together ({type(error).__name__}); "
                    f"rank {rank} writes {'none' if path is None else f'its own, {path}'}",
                    RuntimeWarning,
                    stacklevel=4,
                )
                self._write([record], path)
            raise
        self._text, failed = outcome
        if failed is not None:
            raise failed
        return self._text

    def _rank_path(self) -> Path | None:
        """Return the file of this rank alone."""
        rank, size = self._rank_and_size
        if self.path is None or size == 1:
            return self.path
        return self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}")

    def _note_rank(self) -> None:
        """Store rank and size while they are known: at the end the process group may have been
        destroyed.
        """
        if _group_initialised():
            self._rank_and_size = (dist.get_rank(), dist.get_world_size())
        elif self._rank_and_size is None:
            identity = detect_launcher()
            self._rank_and_size = (identity.rank, identity.size)

    def _snapshot(self) -> dict:
        recorder = self._recorder
        return {
            "rank": self._rank_and_size[0],
            "size": self._rank_and_size[1],
            "host": socket.gethostname(),
            "node": _boot_id(),
            "offset": self._offset,
            "began": self._began,
            "ended": time.perf_counter_ns(),
            "events": list(recorder.events),
            "marks": list(recorder.marks),
            "dropped": recorder.dropped,
            "about": {**_describe_program(), **recorder.about},
        }

    def _write(self, records: list[dict], path: Path | None) -> None:
        if path is None:
            return
        write_trace(path, records)
        self.written.append(path)


_current: Timeline | None = None


def timeline(path=None, *, steps: int | None = None) -> Timeline:
    """Record what communication does, and write a Chrome trace.

    https://ui.perfetto.dev shows the trace, and ``python -m collectives.tracing trace.json -o
    trace.png`` draws ranks, buckets, waits and exposed communication. The recording starts at once.
    Start and end it on all ranks: its end is a collective call. A timeline that wasn't stopped is
    written at the interpreter's exit, by each rank for itself; so is the one that
    COLLECTIVES_TIMELINE=path starts at import. A rank holds at most 1,000,000 events; the trace and
    the report say how many were dropped. The ranks of one node share a clock. The clocks of several
    nodes are aligned by their wall clocks, with the error of these.

    Args:
        path: The file of the trace. None: make only the report.
        steps: End by itself after this number of backwards. None: go on until it is stopped.

    Returns:
        A `Timeline`, which is a context manager; ``.stop()`` ends it, too.

    Raises:
        InvalidUsage: While another timeline records.
        InvalidArgument: For a path in a folder that doesn't exist.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise InvalidArgument(f"steps must be an int from 1 up, or None for no limit, not {steps!r}")
    return _start(path, steps)


def _start(path, steps, **options) -> Timeline:
    global _current
    if path is not None:
        try:
            path = Path(path).absolute()
        except TypeError as error:
            raise InvalidArgument(f"path must be a path or None, not {path!r}") from error
        if path.is_dir() or not path.parent.is_dir():
            raise InvalidArgument(f"no file can be written at {path}: give a name in a folder that is there")
    if _current is not None:
        raise InvalidUsage("another timeline is recording: stop() it first")
    _install_once()
    _current = Timeline(path, steps, **options)
    recording.active = _current._recorder
    return _current


# ---- The program, clocks and nodes.


def _describe_program() -> dict[str, str]:
    """Return the facts for the head of the trace. No arguments: these may hold secrets."""
    found = {
        "program": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "interactive",
        "collectives": getattr(sys.modules["collectives"], "__version__", "unknown"),
        "torch": getattr(torch, "__version__", "unknown"),
        "python": platform.python_version(),
    }
    return {name: str(value) for name, value in found.items()}


def _group_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _read_clocks() -> tuple[int, int]:
    """Return the time now, and by how much the wall clock is ahead of it, in ns."""
    before = time.perf_counter_ns()
    wall = time.time_ns()
    now = time.perf_counter_ns()
    return now, wall - (before + now) // 2


def _boot_id() -> str:
    """Return the id of the running kernel, whose processes share one monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ---- Forks, the environment, and the end of the interpreter.


def _after_fork() -> None:
    global _current
    _current = recording.active = None  # the recording is the parent's


def _at_exit() -> None:
    if (current := _current) is None:
        return
    current._end(collective=False)
    if current.written and os.environ.get("COLLECTIVES_TIMELINE"):  # no line of the program says where it is
        print(f"collectives.timeline: {' and '.join(map(str, current.written))}", file=sys.stderr)


@functools.cache
def _install_once() -> None:
    os.register_at_fork(after_in_child=_after_fork)
    atexit.register(_at_exit)


recording.start = timeline
if os.environ.get("COLLECTIVES_TIMELINE"):
    # A launcher imports this, too, and records nothing.
    _start(os.environ["COLLECTIVES_TIMELINE"], None, skip_empty=True)
