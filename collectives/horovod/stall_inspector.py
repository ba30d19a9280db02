"""Stall inspector: reports, and finally ends, operations that not all ranks have submitted."""

from __future__ import annotations

import logging
import threading
import weakref

from ..comm.waiting import format_ranks
from ..errors import CollectiveTimeout
from .controller import Controller
from .settings import Settings

__all__ = ["StallInspector"]

_LOG = logging.getLogger("collectives.horovod")
_SHOWN = 20  # names in one message
_MAX_PAUSE = 10.0  # seconds


class StallInspector:
    """A thread that inspects controllers at intervals."""

    def __init__(self, settings: Settings, rank: int):
        self._settings = settings
        self._rank = rank
        self._controllers: weakref.WeakSet[Controller] = weakref.WeakSet()
        self._stop = threading.Event()
        times = [seconds for seconds in (settings.stall_check, settings.stall_shutdown) if seconds]
        self._thread = None
        if times:
            pause = min(_MAX_PAUSE, *(seconds / 4 for seconds in times))
            self._thread = threading.Thread(target=self._run, args=(pause,), name="collectives stall", daemon=True)

    def add(self, controller: Controller) -> None:
        """Inspect one more controller."""
        self._controllers.add(controller)
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self, pause: float) -> None:
        while not self._stop.wait(pause):
            for controller in list(self._controllers):
                if controller.broken is None:
                    self._inspect(controller)

    def _inspect(self, controller: Controller) -> None:
        check, shutdown = self._settings.stall_check, self._settings.stall_shutdown
        if check:
            late = [each for each in controller.stalled_entries(check) if not each[0].stall_reported]
            for entry, _, _ in late:
                entry.stall_reported = True
            if late:
                _LOG.warning(
                    "hvd [rank %d]: submitted here more than %g s ago, and not by all ranks:\n%s\nThe ranks named are "
                    "busy with something else, have ended, or took another branch: each operation must be submitted by "
                    "all ranks of its process set, under the same name",
                    self._rank, check, _format_stalled(late),
                )  # fmt: skip
        if shutdown and (late := controller.stalled_entries(shutdown)):
            text = f"not submitted by all ranks within {shutdown:g} s (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS):\n"
            peers = sorted({rank for _, _, ranks in late for rank in ranks})
            controller.set_thread_device()
            controller.abort(CollectiveTimeout(text + _format_stalled(late), op="hvd", rank=self._rank, peers=peers))


def _format_stalled(late) -> str:
    lines = [f"  {name} (missing: {format_ranks(ranks) if ranks else 'not known'})" for _, name, ranks in late[:_SHOWN]]
    if len(late) > _SHOWN:
        lines.append(f"  and {len(late) - _SHOWN} more")
    return "\n".join(lines)
