"""CUDA graphs on the simulated GPU: what a capture holds, what it refuses, and its replay.

What is captured runs once at the capture, since later operations need its sizes; at the end memory that was there
before the capture gets its contents back, as if nothing had run.
"""

from __future__ import annotations

import ctypes

from . import device
from .checker import checker, shown_site, site

_captures: list[Capture] = []  # under way
_graphs: list[Capture] = []  # ended, and not forgotten


class Capture:
    """A capture that is under way, and afterwards what the graph holds."""

    def __init__(self, stream: int):
        checker.flush()
        self.stream = stream
        self.streams = {stream}
        self.events: set[int] = set()
        self.calls: list = []
        self.accesses: dict = {}
        self.kept: set[int] = set()  # addresses of memory that the graph keeps
        self.freed: set[int] = set()
        self.before = checker.serial
        self.contents: dict[int, bytes] = {}
        self.last: dict[int, str] = {}  # stream -> its last operation, and where it was called
        self.earlier: dict = {}  # block -> its uses before the capture, which does nothing itself

    def uses(self, accesses, op: str, stream: int, where: tuple) -> None:
        """Note what an operation uses, and keep the contents of older memory that it writes."""
        self.last[stream] = f"{op} at {shown_site(where)}"
        checker.flush()
        for low, high, writes, shape in accesses:
            self.accesses[low, high, writes] = shape
            block = checker.block_at(low)
            if block is not None and block.serial <= self.before and block not in self.earlier:
                self.earlier[block] = block.uses
                block.uses = []
            if writes and block is not None and block.serial <= self.before and block.base not in self.contents:
                self.contents[block.base] = ctypes.string_at(block.base, block.nbytes)

    def restore(self) -> None:
        for base, contents in self.contents.items():
            if base in checker.blocks:
                ctypes.memmove(base, contents, len(contents))
        self.contents = {}
        for block, uses in self.earlier.items():
            block.uses = uses
        for address in self.kept:
            if address in checker.blocks:
                checker.blocks[address].uses = []
        self.earlier = {}


def capturing() -> bool:
    """Whether a stream of this process is capturing."""
    return bool(_captures)


def capture_id(stream: int) -> Capture | None:
    for capture in _captures:
        if stream in capture.streams:
            return capture
    return None


def recorded(stream: int, event: int) -> None:
    for capture in _captures:
        capture.events.discard(event)
        if stream in capture.streams:
            capture.events.add(event)


def waits(stream: int, event: int) -> bool:
    """A stream waits for an event; False where CUDA refuses that."""
    owner = next((each for each in _captures if event in each.events), None)
    own = capture_id(stream)
    if owner is not None:
        owner.streams.add(stream)
    elif own is not None:
        checker.submit(
            checker.report, "capture", f"a capturing stream waits for an event from before the capture, at {site()[:2]}"
        )
        return False
    return True


def allocated(address: int, stream: int) -> None:
    capture = capture_id(stream)
    if capture is not None:
        capture.kept.add(address)


class KeptCall:
    """A call of torch's that the device's library has kept."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self) -> None:
        device.library.simulated_replay(self.number)


def keeps(address: int) -> bool:
    """Whether memory that is freed belongs to a graph's own pool, which keeps it."""
    for capture in [*_captures, *_graphs]:
        if address in capture.kept:
            capture.freed.add(address)
            return True
    return False


def captured(number: int) -> None:
    """The device's library has kept a call for replays."""
    _captures[-1].calls.append(KeptCall(number))


def begin(stream: int) -> Capture:
    capture = Capture(stream)
    _captures.append(capture)
    return capture


def end(capture: Capture) -> list[str]:
    """End a capture; give what is wrong with it."""
    checker.flush()
    _captures.remove(capture)
    capture.restore()
    _graphs.append(capture)
    origin = checker.clock_of(capture.stream)
    wrong = []
    for stream in capture.streams - {capture.stream}:
        if origin.get(stream, 0) < checker.clock_of(stream).get(stream, 0):
            last = capture.last.get(stream, "nothing")
            wrong.append(f"CUDA error: capturing stream has unjoined work (on stream {stream & 0xFFFFFF}, last {last})")
    return wrong


def replay(capture: Capture, stream: int) -> None:
    checker.flush()
    accesses = [(low, high, writes, shape) for (low, high, writes), shape in capture.accesses.items()]
    freed = [low for low, *_ in accesses if checker.block_at(low) is None]
    checker.submit(checker.operation, "a graph's replay", stream, accesses, site(), device.known())
    checker.flush()
    if freed:
        raise RuntimeError("a graph's replay uses memory that was freed")
    for call in capture.calls:
        call()


def forget(capture: Capture) -> None:
    """End a graph: its calls and its memory."""
    if capture not in _graphs:
        return
    _graphs.remove(capture)
    for call in capture.calls:
        if isinstance(call, KeptCall):
            device.library.simulated_forget(call.number)
    for address in capture.freed:
        checker.submit(checker.free, address, (), {})
        checker.flush()
        device.library.simulated_release(address)
