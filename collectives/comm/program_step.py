"""The program's step, which the ranks of a host communicator compare with each collective."""

from __future__ import annotations

from .common_memory import is_on_one_host

__all__ = ["set_step"]


def set_step(comm, step: int) -> None:
    """Set the step of a communicator's calls from now on, 0 for none: where the ranks' steps differ, a
    collective raises `Mismatch` on all of them, with the steps and the ranks.

    The comparison costs no message. Nothing is compared by NCCL, and between nodes.
    """
    if comm.size > 1 and is_on_one_host(comm) and not comm.closed:
        comm._native.set_step(step)
