"""Telling of operations that some ranks have submitted and others have not, and ending them in the end."""

from __future__ import annotations

import logging
import threading
import weakref

from ..errors import CollectiveTimeout
from .controller import Coordinator
from .settings import Settings

__all__ = ["Watch"]

_LOG = logging.getLogger("collectives.horovod")
_SHOWN = 20  # names in one message
_OFTEN = 10.0  # seconds between two looks, at most


class Watch:
    """A thread that looks at coordinators from time to time."""

    def __init__(self, settings: Settings, rank: int):
        self._settings = settings
        self._rank = rank
        self._coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
        self._stop = threading.Event()
        times = [seconds for seconds in (settings.stall_check, settings.stall_shutdown) if seconds]
        self._thread = None
        if times:
            pause = min(_OFTEN, *(seconds / 4 for seconds in times))
            self._thread = threading.Thread(target=self._run, args=(pause,), name="collectives stall", daemon=True)

    def add(self, coordinator: Coordinator) -> None:
        """Watch one more."""
        self._coordinators.add(coordinator)
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self, pause: float) -> None:
        while not self._stop.wait(pause):
            for coordinator in list(self._coordinators):
                if coordinator.broken is None:
                    self._look(coordinator)

    def _look(self, coordinator: Coordinator) -> None:
        check, shutdown = self._settings.stall_check, self._settings.stall_shutdown
        if check:
            late = [each for each in coordinator.stalled(check) if not each[0].reported]
            for submission, _, _ in late:
                submission.reported = True
            if late:
                _LOG.warning(
                    "hvd [rank %d]: submitted here more than %g s ago, and not by all ranks:\n%s\nThe ranks named are "
                    "busy with something else, have ended, or took another branch: each operation must be submitted by "
                    "all ranks of its process set, under the same name",
                    self._rank, check, _told(late),
                )  # fmt: skip
        if shutdown and (late := coordinator.stalled(shutdown)):
            text = f"not submitted by all ranks within {shutdown:g} s (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS):\n"
            peers = sorted({rank for _, _, ranks in late for rank in ranks})
            coordinator.take_device()
            coordinator.abort(CollectiveTimeout(text + _told(late), op="hvd", rank=self._rank, peers=peers))


def _told(late) -> str:
    lines = [f"  {name} (missing: {_ranks(ranks)})" for _, name, ranks in late[:_SHOWN]]
    if len(late) > _SHOWN:
        lines.append(f"  and {len(late) - _SHOWN} more")
    return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "not known"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))}{' ...' if len(ranks) > 16 else ''}"
