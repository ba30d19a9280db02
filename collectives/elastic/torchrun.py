"""Entry point of torchrun: ``torchrun --rdzv-backend collectives`` starts elastic jobs.

torch loads this module in each torchrun, while it imports its own elastic modules. So what needs
these is imported when a job is started.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["get_handler"]


def get_handler() -> Callable:
    """Return the function that makes the rendezvous handler, for ``torchrun.handlers``."""
    return _make_handler


def _make_handler(params):
    from .agent import install_agent
    from .agent_rendezvous import AgentRendezvous

    install_agent()
    return AgentRendezvous(params)
