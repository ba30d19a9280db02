"""CyclePause: how long a rank waits before it takes part in a cycle with nothing new."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["CyclePause"]

_SHORTEST = 50e-6  # seconds


class CyclePause:
    """Pause that doubles each time, up to ``longest`` seconds, until `reset`.

    ``active``: whether a thread is in it.
    """

    def __init__(self, longest: float):
        self.active = False
        self._longest = longest or _SHORTEST
        self._seconds = _SHORTEST
        self._ended = threading.Condition()

    def reset(self) -> None:
        """Begin with a short pause again: something was submitted."""
        self._seconds = _SHORTEST

    def end(self) -> None:
        """End the pause; from another thread."""
        with self._ended:
            self._ended.notify()

    def wait(self, unless: Callable[[], bool]) -> None:
        """Block for the pause or until `end`; not where ``unless()`` is true."""
        with self._ended:
            self.active = True
            if not unless():
                self._ended.wait(self._seconds)
            self.active = False
        self._seconds = min(2 * self._seconds, self._longest)
