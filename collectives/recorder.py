"""Recorder of this rank's communication events, from which a timeline makes its trace.

Code that records looks at ``recording.active`` and does nothing where it is None::

    if (recorder := recording.active) is not None:
        recorder.add("lane 0", "all_reduce 26214400 B", start, time.perf_counter_ns(), bucket=3)

The rows of a trace: "lane N" holds the collectives and kernels of communication stream N; the first
word of an event's name tells which. "hook" and "wait" hold the time for which communication blocks
the backward's thread, which is its exposed part. All other rows are shown as they are recorded.
`collectives.tracing` starts a recording, ends it and writes the trace.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from .errors import InvalidArgument

__all__ = ["Recorder", "recording"]

_MAX_EVENTS = 1_000_000  # per rank; about 500 MB of memory, and 150 MB of file
# The time between two CUDA events is a float32 of milliseconds: a longer one has too few digits.
_MAX_GAP_MS = 1000.0


class _Recording:
    """Holder of the active recorder.

    ``active``: None, or the `Recorder` to which events are added. ``start``:
    `collectives.timeline`, which `collectives.tracing` sets when it is imported, for packages of
    lower layers that start a timeline.
    """

    __slots__ = ("active", "start")

    def __init__(self):
        self.active: Recorder | None = None
        self.start: Callable | None = None


recording = _Recording()


class Recorder:
    """Events of this rank. Any thread may add to it.

    ``max_events``: further events are dropped and counted in ``dropped``. ``last_step``: the number
    of backwards after which ``on_last_step()`` is called. ``about``: facts of the run by name, such
    as its engine, which whoever records adds for the head of the trace.
    """

    def __init__(self, max_events: int = _MAX_EVENTS, last_step: int | None = None, on_last_step=None):
        self.events: list[tuple] = []  # (row, name, start, end, arguments), times in ns of time.perf_counter_ns()
        self.marks: list[int] = []  # the ends of the backwards
        self.dropped = 0
        self.about: dict[str, str] = {}
        self._cuda: list[tuple] = []  # (row, name, start event, end event, arguments)
        self._anchors: dict[int, tuple] = {}  # device index -> (event, host time at which it was recorded)
        self._max_events = max_events
        self._last_step = last_step
        self._on_last_step = on_last_step
        self._lock = threading.Lock()

    def add(self, row: str, name: str, start: int, end: int, **args) -> None:
        """Record an event that lasted from `start` to `end`.

        These are times of ``time.perf_counter_ns()``.
        """
        if end < start:
            raise InvalidArgument(f"{name!r} in row {row!r} ends {start - end} ns before its start")
        if len(self.events) < self._max_events:
            self.events.append((row, name, start, end, args))
        else:
            self._drop()

    def add_cuda(self, row: str, name: str, start_event, end_event, **args) -> None:
        """Record what lasted from one CUDA event to another.

        Both were made with ``enable_timing=True`` and are recorded. The recorder keeps them and
        reads them when the trace is written. They must not be recorded again.
        """
        if len(self._cuda) < self._max_events:
            device = end_event.device
            if device.index not in self._anchors:
                self._anchors[device.index] = _anchor(device)
            # The GPU may run it after the host has marked the backward's end, on some ranks only.
            self._cuda.append((row, name, start_event, end_event, {"step": len(self.marks), **args}))
        else:
            self._drop()

    def step(self) -> None:
        """Mark the end of a backward.

        Backward number ``last_step`` ends the timeline, which is a collective call.
        """
        self.marks.append(time.perf_counter_ns())
        if len(self.marks) == self._last_step:
            self._on_last_step()

    def resolve(self) -> None:
        """Convert the CUDA events to events of the host's clock.

        Blocks until the GPU has reached them.
        """
        by_device = defaultdict(list)
        unresolved, self._cuda = self._cuda, []
        for entry in unresolved:
            by_device[entry[3].device].append(entry)
        for device, entries in by_device.items():
            event, when = self._anchors[device.index]
            ms, times = 0.0, []  # ms: from the anchor to `event`
            for _, _, start, end, _ in entries:
                end.synchronize()
                first = event.elapsed_time(start)
                times.append((ms + first, start.elapsed_time(end)))
                if first > _MAX_GAP_MS:
                    event, ms = start, ms + first
            self._anchors[device.index] = now, later = _anchor(device)
            ms += event.elapsed_time(now)
            # The two clocks drift apart. Over a short time the drift is smaller than the error of
            # the anchors.
            scale = (later - when) / ms if ms > _MAX_GAP_MS else 1e6  # ns of the host for a ms of the device
            for (row, name, _, _, args), (start, length) in zip(entries, times, strict=True):
                begin = when + round(start * scale)
                self.add(row, name, begin, begin + round(length * scale), **args)

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1


def _anchor(device: torch.device) -> tuple:
    """Tie a device's clock to the host's, by an event on a stream that has no work to wait for."""
    stream, event = torch.cuda.Stream(device), torch.cuda.Event(enable_timing=True)
    event.record(stream)
    event.synchronize()
    return event, time.perf_counter_ns()
