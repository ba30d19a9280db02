"""The communicators that are open in this process: what a fork, and the end of the interpreter, mean for them."""

from __future__ import annotations

import atexit
import os
import sys

from ..errors import CollectivesError, InvalidUsage
from .group import open_groups
from .multinode.comm import MultiNodeComm

__all__ = ["Gone", "kept", "opened"]

_EXIT_SECONDS = 5.0  # how long the interpreter's exit may wait for operations in flight


class Gone:
    """Stand in the place of a binding object that can't be used any more; `error`: what has ended it beside a call."""

    def __init__(self, why: str, rank: int, forked: bool = False, error: CollectivesError | None = None):
        self.why = why
        self.rank = rank
        self.forked = forked
        self.error = error
        self.seen = False  # the error was raised

    def __getattr__(self, name):
        self.refuse(name)

    def refuse(self, name: str):
        """Raise what a call gets now."""
        if self.error is not None:
            self.seen = True
            raise self.error
        raise InvalidUsage(self.why, op=name, rank=self.rank)


# By id, in the order of opening. They stay alive until close(), abort() or the interpreter's end, since an engine's
# threads may still be using the arrays of one that nobody holds any more.
opened: dict = {}
# What must never be freed in this process: a parent's objects in a forked child, and what an aborted queue still uses.
kept: list = []


def _after_fork() -> None:
    open_groups.clear()
    for comm in list(opened.values()):
        kept.append((comm._native, comm._registered, comm._algorithms))
        if isinstance(comm._native, MultiNodeComm):
            comm._native.detach_after_fork()
        comm._algorithms = None
        why = (
            "the communicator was opened in the parent process and can't be used in a forked child: open it in the "
            "children alone, close() it before the fork, or start them by the spawn method"
        )
        comm._native = Gone(why, comm.rank, forked=True)
        comm._registered = set()
        kept.append(comm._lane.leave(comm._native))
    opened.clear()


def _at_exit() -> None:
    """Close what is open. What is still in flight gets a few seconds, then it is aborted: peers may be gone."""
    for comm in list(opened.values()):
        try:
            # NCCL's destroy may wait for peers, its abort doesn't.
            if comm._lane.quiet(_EXIT_SECONDS) and comm._on_host and comm._native.pending() is None:
                comm.close()
            else:
                comm.abort()
        except RuntimeError as error:  # CUDA's too
            print(f"collectives: closing {comm!r} at exit: {error}", file=sys.stderr)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
