"""Make DDP faster by one line: ``import collectives.auto``, or ``python -m collectives.auto script.py``.

From its first forward on, each DistributedDataParallel model that has no communication hook is timed over some steps;
then `fused_allreduce` is registered, checked against the process group in its first step, and timed, too. Where plain
DDP was faster, or the check failed on any rank, the hook from then on forwards to the process group. One line of the
log says what was done. A hook that the user registers wins, before and after.

Settings are environment variables, read at import: ``COLLECTIVES_WIRE``, ``COLLECTIVES_STREAMS``,
``COLLECTIVES_BLOCK``, ``COLLECTIVES_ERROR_FEEDBACK``, ``COLLECTIVES_STOCHASTIC_ROUNDING``; ``COLLECTIVES_AUTO=0``
turns all of it off, and `leave_alone` keeps one DDP object as it is. `InvalidArgument` names the variable whose value
is wrong.
"""

from __future__ import annotations

from .install import install, leave_alone
from .settings import read

__all__ = ["leave_alone"]

_settings = read()
if _settings is not None:
    install(_settings)
