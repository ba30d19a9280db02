"""The checker: vector clocks of streams, the last uses of each block of memory, and reports of what is wrong.

A stream's clock says how much of every stream is known to have ended before what the stream does next. An operation is
reported where it uses memory that an operation without an order to it uses, and one of the two writes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import sys
import threading
from collections import deque
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
HOME_MASK = (1 << 40) - 1
QUERIES = 2  # an event says this often that it hasn't completed


@dataclasses.dataclass(frozen=True)
class Report:
    """One thing that is wrong. ``kind``: "race", "freed", "order", "window", "host wait", "device" or "capture"."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclasses.dataclass(slots=True)
class Use:
    """An operation's use of a range of memory."""

    low: int
    high: int
    writes: bool
    stream: int
    count: int
    what: What


@dataclasses.dataclass(slots=True)
class What:
    """An operation, for a message."""

    op: str
    stream: int
    shape: str
    site: tuple

    def __str__(self) -> str:
        return f"{self.op} {self.shape} on {stream_name(self.stream)} at {shown_site(self.site)}"


class Block:
    """An allocation. ``kind``: "device" (torch's caching allocator), "nccl" (ncclMemAlloc) or "pinned"."""

    __slots__ = ("base", "home", "kind", "nbytes", "recorded", "serial", "site", "uses")

    def __init__(self, base, nbytes, home, kind, serial, site):
        self.base, self.nbytes, self.home, self.kind, self.serial, self.site = base, nbytes, home, kind, serial, site
        self.uses: list[Use] = []
        self.recorded: set[int] = set()


def stream_name(key: int) -> str:
    stream = f"stream {key & HOME_MASK}" if key & HOME_MASK else "the default stream"
    return f"{stream} of cuda:{key >> 40}"


_shown: dict[str, bool] = {}  # whether a file's lines stand in reports


def site(most: int = 4) -> tuple:
    """The innermost Python lines that aren't torch's or the simulation's."""
    frame = sys._getframe(1)
    found = []
    while frame is not None and len(found) < most:
        name = frame.f_code.co_filename
        shown = _shown.get(name)
        if shown is None:
            own = name.startswith(HERE) and not Path(name).name.startswith("test_")
            shown = not own and not any(part in name for part in ("/torch/", "/unittest/", "contextlib", "<"))
            _shown[name] = shown
        if shown:
            found.append((name, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def shown_site(frames: tuple) -> str:
    if not frames:
        return "a thread of torch's (the backward)"
    names = []
    for name, line, function in frames:
        short = "/".join(Path(name).parts[-2:])
        names.append(f"{short}:{line} ({function})")
    return " < ".join(names)


class Checker:
    """What is known of streams, events and memory, and what was found.

    Operations come from several threads. Each is put into a queue with its Python lines, and whoever finds the queue
    without a worker works on it: an operation's end may free memory, which comes as another entry.
    """

    def __init__(self):
        self.reports: list[Report] = []
        self.seen: set = set()
        self.clock: dict[int, dict[int, int]] = {}
        self.events: dict[int, dict[int, int]] = {}
        self.queries: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.thread = threading.local()
        self.blocks: dict[int, Block] = {}
        self.bases: list[int] = []
        self.registered: dict[tuple[int, int], tuple[int, int, bool, tuple]] = {}  # by communicator and handle
        self.serial = 0
        self.steps = 0
        self.allowed = 0  # nested allow_waits
        self.own_device: int | None = None
        self.comms: dict[int, tuple[int, int, What, object]] = {}  # last operation of each communicator
        self.sequence: list[tuple[int, str]] = []  # the communicators' operations as they were issued
        self._queue: deque = deque()
        self._working = threading.Lock()

    # ---- The queue.
    def submit(self, function, *args) -> None:
        self._queue.append((function, args))
        self.work()

    def work(self) -> None:
        while self._queue and self._working.acquire(blocking=False):
            try:
                while self._queue:
                    function, args = self._queue.popleft()
                    function(*args)
            finally:
                self._working.release()

    def flush(self) -> None:
        """Wait until what was submitted is worked on."""
        while self._queue or self._working.locked():
            self.work()
            if self._working.acquire(timeout=0.01):
                self._working.release()

    # ---- Results.
    def report(self, kind: str, text: str) -> None:
        if (kind, text) not in self.seen:
            self.seen.add((kind, text))
            self.reports.append(Report(kind, text))

    def take(self) -> list[Report]:
        """Give what was found since the last call."""
        self.flush()
        found, self.reports, self.seen = self.reports, [], set()
        return found

    # ---- Clocks.
    def clock_of(self, stream: int) -> dict[int, int]:
        clock = self.clock.get(stream)
        if clock is None:
            clock = self.clock[stream] = {}
        return clock

    def known_to_thread(self) -> dict[int, int]:
        """What this thread has learnt by asking events; what it has waited for is known to all."""
        known = getattr(self.thread, "known", None)
        if known is None:
            known = self.thread.known = {}
        return known

    def record(self, stream: int, event: int, known: dict) -> None:
        clock = self.clock_of(stream)
        join(clock, self.host)
        join(clock, known)
        self.events[event] = dict(clock)
        self.queries.pop(event, None)

    def block_stream(self, stream: int, event: int) -> None:
        join(self.clock_of(stream), self.events.get(event, {}))

    def sync_event(self, event: int) -> None:
        join(self.host, self.events.get(event, {}))

    def sync_stream(self, stream: int) -> None:
        join(self.host, self.clock_of(stream))

    def sync_device(self, device: int) -> None:
        for stream, clock in self.clock.items():
            if stream >> 40 == device:
                join(self.host, clock)

    def completed(self, clock: dict, known: dict, key) -> bool:
        """Answer a question whether what a clock stands for has ended: the first two times not."""
        if all(self.host.get(s, 0) >= n or known.get(s, 0) >= n for s, n in clock.items()):
            return True
        asked = self.queries[key] = self.queries.get(key, 0) + 1
        if asked <= QUERIES:
            return False
        join(known, clock)
        return True

    def query_event(self, event: int) -> bool:
        self.flush()
        return self.completed(self.events.get(event, {}), self.known_to_thread(), event)

    def query_stream(self, stream: int) -> bool:
        self.flush()
        return self.completed(dict(self.clock_of(stream)), self.known_to_thread(), ("stream", stream))

    # ---- Memory.
    def allocate(self, base, nbytes, home, kind, where) -> None:
        self.serial += 1
        if base not in self.blocks:
            bisect.insort(self.bases, base)
        self.blocks[base] = Block(base, nbytes, home, kind, self.serial, where)
        if kind != "pinned":
            self.check_device(home >> 40, f"memory of {nbytes} bytes is allocated", where)

    def block_at(self, address: int) -> Block | None:
        index = bisect.bisect_right(self.bases, address) - 1
        if index < 0:
            return None
        block = self.blocks[self.bases[index]]
        return block if address < block.base + max(block.nbytes, 1) else None

    def record_stream(self, address: int, stream: int) -> None:
        block = self.block_at(address)
        if block is not None:
            block.recorded.add(stream)

    def free(self, base: int, where, known: dict) -> None:
        block = self.blocks.pop(base, None)
        if block is None:
            return
        index = bisect.bisect_left(self.bases, base)
        del self.bases[index]
        for low, high, window, its_site in self.registered.values():
            if low < base + block.nbytes and base < high:
                what = "window" if window else "buffer"
                self.report(
                    "window",
                    f"{self.name_of(block)} is freed at {shown_site(where)} while it is registered as a {what} at "
                    f"{shown_site(its_site)}",
                )
        home = self.clock_of(block.home) if block.kind == "device" else {}
        for use in block.uses:
            if block.kind == "device" and (use.stream == block.home or use.stream in block.recorded):
                continue
            if block.kind == "pinned" and use.what.op.startswith("aten::"):
                continue  # torch's host allocator records an event for each copy of torch's
            known_count = max(home.get(use.stream, 0), self.host.get(use.stream, 0), known.get(use.stream, 0))
            if known_count < use.count:
                self.report(
                    "freed",
                    f"{self.name_of(block)} is freed at {shown_site(where)} while {use.what} may still use it",
                )
                return

    # ---- Registered memory.
    def register(self, comm: int, handle: int, address: int, nbytes: int, window: bool, where) -> None:
        self.registered[comm, handle] = (address, address + nbytes, window, where)

    def deregister(self, comm: int, handle: int) -> None:
        self.registered.pop((comm, handle), None)

    def end_communicator(self, comm: int, aborted: bool, where) -> None:
        for key in [key for key in self.registered if key[0] == comm]:
            _, _, window, its_site = self.registered.pop(key)
            if window and not aborted:
                self.report(
                    "window",
                    f"a communicator is destroyed at {shown_site(where)} before the window that was registered at "
                    f"{shown_site(its_site)}",
                )

    def name_of(self, block: Block) -> str:
        home = "" if block.kind == "pinned" else f" of {stream_name(block.home)}"
        what = {"device": "memory", "nccl": "memory of ncclMemAlloc", "pinned": "pinned memory"}[block.kind]
        return f"{what}{home}, {block.nbytes} bytes allocated at {shown_site(block.site)},"

    # ---- Operations.
    def operation(self, op: str, stream: int, accesses: list, where: tuple, known: dict) -> int:
        """Add an operation to a stream: check what it uses, and give its number there."""
        clock = self.clock_of(stream)
        join(clock, self.host)
        join(clock, known)
        count = clock[stream] = clock.get(stream, 0) + 1
        self.check_device(stream >> 40, f"{op} runs", where)
        for low, high, writes, shape in accesses:
            what = What(op, stream, shape, where)
            block = self.block_at(low)
            if block is None:
                self.report("freed", f"{what} uses memory that isn't allocated, or was freed")
                continue
            self.access(block, Use(low, high, writes, stream, count, what), clock)
        return count

    def access(self, block: Block, use: Use, clock: dict) -> None:
        kept = []
        for other in block.uses:
            if other.low >= use.high or use.low >= other.high:
                kept.append(other)
                continue
            ordered = clock.get(other.stream, 0) >= other.count
            same = other.stream == use.stream and other.count == use.count
            if not ordered and (use.writes or other.writes) and not same:
                verbs = ("writes" if use.writes else "reads", "writes" if other.writes else "reads")
                self.report(
                    "race",
                    f"{use.what} {verbs[0]} what {other.what} {verbs[1]}, without an order "
                    f"({self.name_of(block)} bytes {use.low - block.base} to {use.high - block.base})",
                )
                continue
            covered = use.low <= other.low and other.high <= use.high
            if not (covered and ordered and (use.writes or not other.writes)) or (same and other.writes):
                kept.append(other)
        kept.append(use)
        block.uses = kept

    def host_access(self, op: str, accesses: list, where: tuple, known: dict) -> None:
        """The host uses pinned memory: all that the GPU does with it must be known to have ended."""
        for low, high, writes, shape in accesses:
            block = self.block_at(low)
            if block is None:
                continue
            for other in block.uses:
                if other.low >= high or low >= other.high or not (writes or other.writes):
                    continue
                if max(self.host.get(other.stream, 0), known.get(other.stream, 0)) < other.count:
                    verb = "writes" if writes else "reads"
                    self.report(
                        "race",
                        f"the host's {op} {shape} at {shown_site(where)} {verb} pinned memory that {other.what} "
                        "may still use: it must wait for the copy first",
                    )
                    return

    def communication(self, op: str, comm: int, stream: int, accesses: list, where: tuple, known: dict, thread) -> None:
        """An operation of NCCL."""
        count = self.operation(op, stream, accesses, where, known)
        clock = self.clock_of(stream)
        what = What(op, stream, accesses[0][3] if accesses else "", where)
        for other, (its_stream, its_count, its_what, its_thread) in self.comms.items():
            if other == comm or its_stream >> 40 != stream >> 40 or its_thread == thread:
                continue
            if clock.get(its_stream, 0) < its_count:
                self.report(
                    "order",
                    f"{what} and {its_what} are of two communicators and come from two threads, without an order: "
                    "ranks may run them in different orders",
                )
        self.comms[comm] = (stream, count, what, thread)
        self.sequence.append((comm, op))

    def check_device(self, device: int, text: str, where: tuple) -> None:
        if self.own_device is not None and device != self.own_device:
            own = f"and this rank's is cuda:{self.own_device}"
            self.report("device", f"{text} on cuda:{device}, {own}, at {shown_site(where)}")

    def host_wait(self, text: str, where: tuple) -> None:
        if self.steps and not self.allowed:
            self.report("host wait", f"{text} at {shown_site(where)}")


def join(clock: dict, other: dict) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


checker = Checker()


@contextlib.contextmanager
def step():
    """A training step: the host must not wait in it."""
    checker.flush()
    checker.steps += 1
    try:
        yield
    finally:
        checker.flush()
        checker.steps -= 1


@contextlib.contextmanager
def waits_allowed():
    """A part of a step in which the host may wait."""
    checker.flush()
    checker.allowed += 1
    try:
        yield
    finally:
        checker.flush()
        checker.allowed -= 1
