"""Traces and reports: where the time of a step goes, on every rank.

What is recorded becomes one Chrome trace, for https://ui.perfetto.dev or chrome://tracing, and one table. The places
that record look at ``recording.active`` and go on where it is None::

    if (recorder := recording.active) is not None:
        recorder.add("lane 0", "all_reduce 26214400 B", start, time.perf_counter_ns(), bucket=3)

Rows: "lane N" holds a lane's collectives and kernels, told apart by the first word of the name; "hook" and "wait" the
time that the thread of the backward is kept by communication, which is the exposed part of it; all others are shown as
they come.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, InvalidUsage
from ..launcher import detect_launcher
from .report import table
from .trace import lines

__all__ = ["Recorder", "Timeline", "recording", "timeline"]

_MOST_EVENTS = 1_000_000  # a rank; about 500 MB of memory, and 150 MB of file
# A distance between CUDA events is a float32 of milliseconds: of a longer one too few digits would be left.
_LINK_MS = 1000.0


class _Recording:
    """Where the recorder is found: `active` is None, or the one that is recorded into."""

    __slots__ = ("active",)

    def __init__(self):
        self.active: Recorder | None = None


recording = _Recording()


class Recorder:
    """What this rank has recorded. Any thread may add to it."""

    def __init__(self, most: int = _MOST_EVENTS, last_step: int | None = None, at_last_step=None):
        self.events: list[tuple] = []  # (row, name, start, end, arguments), times in ns of time.perf_counter_ns()
        self.marks: list[int] = []  # the ends of the backwards
        self.dropped = 0
        self._cuda: list[tuple] = []  # (row, name, start event, end event, arguments)
        self._anchors: dict[int, tuple] = {}  # device index -> (event, when it was recorded)
        self._most = most
        self._last_step = last_step
        self._at_last_step = at_last_step
        self._lock = threading.Lock()

    def add(self, row: str, name: str, start: int, end: int, **args) -> None:
        """Record what lasted from `start` to `end`, times of ``time.perf_counter_ns()``."""
        if end < start:
            raise InvalidArgument(f"{name!r} in row {row!r} ends {start - end} ns before its start")
        if len(self.events) < self._most:
            self.events.append((row, name, start, end, args))
        else:
            self._drop()

    def add_cuda(self, row: str, name: str, start_event, end_event, **args) -> None:
        """Record what lasted from one CUDA event to the other, both made with ``enable_timing=True`` and recorded.

        They are kept, and read when the trace is written; they must not be recorded again.
        """
        if len(self._cuda) < self._most:
            device = end_event.device
            if device.index not in self._anchors:
                self._anchors[device.index] = _anchor(device)
            self._cuda.append((row, name, start_event, end_event, args))
        else:
            self._drop()

    def step(self) -> None:
        """Mark the end of a backward. It ends a timeline of so many steps, which is a collective call."""
        self.marks.append(time.perf_counter_ns())
        if len(self.marks) == self._last_step:
            self._at_last_step()

    def resolve(self) -> None:
        """Read the CUDA events, waiting for them, and put them among the others."""
        by_device = defaultdict(list)
        taken, self._cuda = self._cuda, []
        for entry in taken:
            by_device[entry[3].device].append(entry)
        for device, entries in by_device.items():
            event, when = self._anchors[device.index]
            ms, found = 0.0, []  # ms: from the anchor to `event`
            for _, _, start, end, _ in entries:
                end.synchronize()
                first = event.elapsed_time(start)
                found.append((ms + first, start.elapsed_time(end)))
                if first > _LINK_MS:
                    event, ms = start, ms + first
            self._anchors[device.index] = now, later = _anchor(device)
            ms += event.elapsed_time(now)
            # The two clocks drift apart. Over a short time that is less than the anchors are sure to.
            scale = (later - when) / ms if ms > _LINK_MS else 1e6  # ns of the host for a ms of the device
            for (row, name, _, _, args), (start, length) in zip(entries, found, strict=True):
                begin = when + round(start * scale)
                self.add(row, name, begin, begin + round(length * scale), **args)

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1


def _anchor(device: torch.device) -> tuple:
    """Tie a device's clock to the host's: by an event on a stream in which there is nothing to wait for."""
    stream, event = torch.cuda.Stream(device), torch.cuda.Event(enable_timing=True)
    event.record(stream)
    event.synchronize()
    return event, time.perf_counter_ns()


class Timeline:
    """A recording under way: a context manager, at whose end the trace is written. Made by `timeline`."""

    def __init__(self, path: Path | None, steps: int | None, *, if_any: bool = False):
        self.path = path
        self._if_any = if_any
        self._began, self._offset = _both_clocks()
        self._place = None
        self._notice()
        self._recorder = Recorder(last_step=steps, at_last_step=self.stop)
        self._text: str | None = None

    def stop(self) -> str:
        """End the recording, write the trace, and give the report; once more: give the report again.

        With torch.distributed initialised this is a collective call over its default group: all ranks make it, rank 0
        writes one file of all, and all get the same report. Without, each rank writes its own, ``trace.rank1.json``.
        Blocks until CUDA has done what was recorded. Raises the ``OSError`` of a file that can't be written.
        """
        return self._finish(together=True)

    def report(self) -> str:
        """Give the table as text: the slowest ranks first; before `stop`, of this rank's steps so far.

        Times are means of a step, which ends where a backward does; what comes before the first such end isn't counted.
        "communication": while any lane was in a collective; "exposed": while it kept the backward waiting; "last to
        come": to how many of the collectives that were found on all ranks this one came last; "waits": for the last
        one to come, a collective.
        """
        if self._text is not None:
            return self._text
        self._recorder.resolve()
        return f"{table([self._taken()])}\nThis rank alone; stop() tells of all."

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._finish(together=kind is None)  # after an error the other ranks may not come

    def __repr__(self):
        state = "recording" if self._text is None else "stopped"
        return f"<Timeline {state}, {len(self._recorder.marks)} steps, {len(self._recorder.events)} events>"

    def _finish(self, together: bool) -> str:
        global _current
        if self._text is not None:
            return self._text
        if recording.active is self._recorder:
            recording.active = None
        _current = None
        self._notice()
        self._recorder.resolve()
        taken = self._taken()
        rank, size = self._place
        if together and size > 1 and _initialised():
            everyone = [None] * size if rank == 0 else None
            dist.gather_object(taken, everyone)
            outcome = [None, None]
            if rank == 0:
                outcome = [table(everyone), None]
                try:
                    self._write(everyone, self.path)
                except Exception as error:  # the other ranks wait for the outcome
                    outcome[1] = error
            dist.broadcast_object_list(outcome)
            self._text, failed = outcome
            if failed is not None:
                raise failed
            return self._text
        self._text = table([taken])
        if taken["events"] or taken["marks"] or not self._if_any:
            path = self.path
            if path is not None and size > 1:
                path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
            self._write([taken], path)
        return self._text

    def _notice(self) -> None:
        """Note the rank while it is known: at the end the process group may be gone."""
        if _initialised():
            self._place = (dist.get_rank(), dist.get_world_size())
        elif self._place is None:
            identity = detect_launcher()
            self._place = (identity.rank, identity.size)

    def _taken(self) -> dict:
        recorder = self._recorder
        return {
            "rank": self._place[0],
            "host": socket.gethostname(),
            "machine": _machine(),
            "offset": self._offset,
            "began": self._began,
            "ended": time.perf_counter_ns(),
            "events": list(recorder.events),
            "marks": list(recorder.marks),
            "dropped": recorder.dropped,
        }

    def _write(self, everyone: list[dict], path: Path | None) -> None:
        if path is None:
            return
        # Of this process, in the same folder: so that it takes the file's place in one step.
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(partial, "w") as file:
                file.writelines(lines(everyone))
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


_current: Timeline | None = None


def timeline(path=None, *, steps: int | None = None) -> Timeline:
    """Record what communication does, and write a Chrome trace to `path`; None: only the report.

    Starts at once and gives a `Timeline`: a context manager, or ``.stop()`` ends it; with `steps` it ends by itself
    after so many backwards. Start and end it on all ranks: at the end they meet. What wasn't stopped is written at
    the interpreter's exit, by each rank for itself; so is what COLLECTIVES_TIMELINE=path records from the import on.
    A rank holds at most 1,000,000 events; how many were dropped stands in file and report. The ranks of one machine
    share a clock; those of several are brought together by the wall clocks, as good as these are. Raises
    `InvalidUsage` while another timeline records, `InvalidArgument` for a path into no folder.
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
    _current = Timeline(path, steps, **options)
    recording.active = _current._recorder
    return _current


# ---- Clocks and places.


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _both_clocks() -> tuple[int, int]:
    """Give the time now, and what the wall clock is ahead of it, in ns."""
    before = time.perf_counter_ns()
    wall = time.time_ns()
    now = time.perf_counter_ns()
    return now, wall - (before + now) // 2


def _machine() -> str:
    """Name the running system: its processes share one monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ---- Forks, the environment, and the end of the interpreter.


def _after_fork() -> None:
    global _current
    _current = recording.active = None  # it is the parent's


def _at_exit() -> None:
    if _current is not None:
        _current._finish(together=False)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
if os.environ.get("COLLECTIVES_TIMELINE"):
    _start(os.environ["COLLECTIVES_TIMELINE"], None, if_any=True)  # a launcher imports this too, and records nothing
