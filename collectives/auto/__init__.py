"""Make DDP faster by one line: ``import collectives.auto``, or ``python -m collectives.auto
script.py``.

Each DistributedDataParallel model without a communication hook is timed over some steps from its
first forward on. Then `fused_allreduce` is registered, checked against the process group in its
first step, and timed, too. Where plain DDP was faster, or the check failed on any rank, the hook
forwards to the process group from then on. One line of the log reports the outcome. A hook that the
user registers takes precedence, before and after.

Settings are environment variables, read at import: ``COLLECTIVES_WIRE``, ``COLLECTIVES_STREAMS``,
``COLLECTIVES_BLOCK``, ``COLLECTIVES_ERROR_FEEDBACK``, ``COLLECTIVES_STOCHASTIC_ROUNDING``;
``COLLECTIVES_AUTO=0`` turns everything off, and `leave_alone` leaves one DDP object unchanged.
`InvalidArgument` names the variable whose value is wrong.
"""

from __future__ import annotations

from .install import install, leave_alone
from .settings import read_settings

__all__ = ["leave_alone"]

_settings = read_settings()
if _settings is not None:
    install(_settings)
