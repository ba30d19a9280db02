"""Sends and receives that end after their call has returned: which streams and events stand behind them."""

from __future__ import annotations

import threading
import time

NEVER_S = 60.0  # a wait that is longer is an error of the program that is tested

_lock = threading.Lock()
_streams: dict[int, set] = {}  # of each stream: what it has to wait for, (queue, ticket)
_events: dict[int, set] = {}
wait_for = None  # of the recorder: waits for a ticket at most so many ns; 1: it has ended


def start(stream: int, queue: int, ticket: int) -> None:
    """Note what was begun on a stream."""
    with _lock:
        _streams.setdefault(stream, set()).add((queue, ticket))


def record(stream: int, event: int) -> None:
    with _lock:
        _events[event] = set(_streams.get(stream, ()))


def block(stream: int, event: int) -> None:
    with _lock:
        if found := _events.get(event):
            _streams.setdefault(stream, set()).update(found)


def finish_stream(stream: int) -> None:
    """Wait for what a stream has to wait for, as what runs on it next does."""
    with _lock:
        found = set(_streams.get(stream, ()))
    _finish(found)
    with _lock:
        if stream in _streams:
            _streams[stream] -= found


def finish_event(event: int) -> None:
    with _lock:
        found = set(_events.get(event, ()))
    _finish(found)


def finish_device(device: int) -> None:
    for stream in [each for each in list(_streams) if each >> 40 == device]:
        finish_stream(stream)


def stream_has_ended(stream: int) -> bool:
    return all(wait_for(*each, 0) for each in set(_streams.get(stream, ())))


def event_has_ended(event: int) -> bool:
    return all(wait_for(*each, 0) for each in set(_events.get(event, ())))


def _finish(found: set) -> None:
    until = time.monotonic() + NEVER_S
    for each in found:
        while not wait_for(*each, 10_000_000):
            if time.monotonic() > until:
                raise TimeoutError("a send or a receive on the simulated GPU has not ended")
