"""A function of run_ranks on the simulated GPU: its device, its reports, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc

from . import start
from .checker import checker, step, waits_allowed

__all__ = ["check", "expect", "simulated", "step", "take", "waits_allowed"]


class StreamErrors(AssertionError):
    """The checker has found something on this rank."""


@contextlib.contextmanager
def simulated(ctx, call):
    """Run a call on this rank's own device; what the checker has found fails it."""
    import torch

    start.start()
    checker.own_device = None
    gc.collect()  # what an earlier function left in cycles is that function's to report
    checker.take()
    torch.cuda.set_device(ctx.rank)
    torch.cuda.set_stream(torch.cuda.default_stream())  # an earlier call of this process may have ended on another
    checker.own_device = ctx.rank
    checker.steps = checker.allowed = 0
    try:
        yield
        check()
    finally:
        checker.own_device = None


def take() -> list:
    """Give what the checker has found since the last call, and forget it: a test of an error looks at it."""
    return checker.take()


def check() -> None:
    """Raise where the checker has found something since the last call."""
    found = checker.take()
    if found:
        raise StreamErrors(f"the checker has {len(found)} report(s):\n" + "\n".join(f"- {each}" for each in found))


def expect(kind: str, *words: str) -> list:
    """Take the reports, and raise unless there is one of this kind with these words."""
    found = take()
    if not any(each.kind == kind and all(word in each.text for word in words) for each in found):
        raise AssertionError(f"no {kind!r} report with {words}; there are {[str(each) for each in found]}")
    return found
