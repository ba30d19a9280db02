"""Calls that end badly, and a rank that is stopped while it writes to another one's memory."""

from __future__ import annotations

import os
import signal
import threading

__all__ = ["give_up", "outcome_of"]


def outcome_of(call, errors=Exception) -> str:
    """Make a call; return the name of the error that it raises, or "success"."""
    try:
        call()
    except errors as error:
        return type(error).__name__
    return "success"


def give_up(ctx, call, is_written, reuse) -> str:
    """Make a call of which rank 1 writes the result, and stop that rank once it has begun.

    ``is_written``: returns whether it has; ``reuse``: a function that uses the memory for something else. It is called
    when the call has ended, and rank 1 goes on then. Returns the call's outcome.
    """
    pid = ctx.pids[1]

    def stop():
        while not is_written():
            pass
        os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        return outcome_of(call)
    finally:
        thread.join()
        reuse()
        os.kill(pid, signal.SIGCONT)
