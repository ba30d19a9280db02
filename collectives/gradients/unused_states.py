"""A warning at exit for a `HookState` that no backward has used.

Frameworks may take a hook and its state and leave both unregistered; training then goes on without.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import warnings
import weakref

__all__ = ["forget", "watch"]

_states: weakref.WeakSet = weakref.WeakSet()


def watch(state) -> None:
    """Warn at exit if `state` lives then and was never used."""
    _install_once()
    _states.add(state)


def forget(state) -> None:
    """Don't warn of `state`: it was used, or the program didn't make it."""
    _states.discard(state)


def _warn() -> None:
    if getattr(sys, "last_exc", None) or getattr(sys, "last_value", None):  # the program failed, perhaps before its use
        return
    unused = [state for state in _states if state.units is None and not state.pipeline.totals["backwards"]]
    if not unused:
        return
    state = unused[0]
    what = "no backward has used it" if state.registered else "it was registered nowhere"
    more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
    warnings.warn(
        f"{state!r}{more}: {what}, so its options had no effect. A framework may have left it out: Lightning registers "
        "ddp_comm_hook on CUDA alone; there register it in on_train_start, on self.trainer.strategy.model",
        stacklevel=1,
    )


@functools.cache
def _install_once() -> None:
    atexit.register(_warn)
    os.register_at_fork(after_in_child=_states.clear)
