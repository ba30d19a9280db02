"""Registry of open communicators; it closes them at exit and disables them in forked children."""

from __future__ import annotations

import atexit
import os
import sys

from ..errors import CollectivesError, InvalidUsage
from .group import open_groups
from .multinode.comm import MultiNodeComm

__all__ = ["ClosedHandle", "never_freed", "open_comms"]

_EXIT_SECONDS = 5.0  # how long the interpreter's exit may wait for operations in flight


class ClosedHandle:
    """Stand-in for the binding object of a communicator that is closed, aborted or forked.

    Every call on it raises. `reason`: the message; `error`: the error with which the watchdog has
    ended the communicator, or None.
    """

    tag = 0

    def __init__(self, reason: str, rank: int, forked: bool = False, error: CollectivesError | None = None):
        self.reason = reason
        self.rank = rank
        self.forked = forked
        self.error = error
        self.reported = False  # the error was raised

    def __getattr__(self, name):
        self.raise_closed(name)

    def raise_closed(self, name: str):
        """Raise the error of a call on the communicator: the watchdog's, else `InvalidUsage`."""
        if self.error is not None:
            self.reported = True
            raise self.error
        raise InvalidUsage(self.reason, op=name, rank=self.rank)


# By id, in the order of opening. They stay alive until close(), abort() or the interpreter's end,
# since an engine's threads may still use the arrays of a communicator that the program has dropped.
open_comms: dict = {}
# Objects that must never be freed in this process: the parent's in a forked child, and what an
# aborted queue still uses.
never_freed: list = []


def _after_fork() -> None:
    open_groups.clear()
    for comm in list(open_comms.values()):
        never_freed.append((comm._native, comm._registrations, comm._algorithms))
        if isinstance(comm._native, MultiNodeComm):
            comm._native.detach_after_fork()
        comm._algorithms = None
        reason = (
            "the communicator was opened in the parent process and can't be used in a forked child: open it in the "
            "children alone, close() it before the fork, or start them by the spawn method"
        )
        comm._native = ClosedHandle(reason, comm.rank, forked=True)
        comm._registrations = set()
        never_freed.append(comm._queue.reset_after_fork(comm._native))
    open_comms.clear()


def _at_exit() -> None:
    """Close the open communicators.

    Operations in flight get a few seconds, then abort: their peers may have ended.
    """
    for comm in list(open_comms.values()):
        try:
            # NCCL's destroy may wait for peers, its abort doesn't.
            if comm._queue.drain_all(_EXIT_SECONDS) and comm._on_host and comm._native.pending() is None:
                comm.close()
            else:
                comm.abort()
        except RuntimeError as error:  # CUDA's too
            print(f"collectives: closing {comm!r} at exit: {error}", file=sys.stderr)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
