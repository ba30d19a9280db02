"""Saved state of a HookState: what is pickled on each rank, and what any number of ranks can load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from ..compression import all_reduce_average
from ..errors import InvalidUsage

if TYPE_CHECKING:
    from .state import HookState

__all__ = ["common_state", "load_common_state", "pickled_state", "restore_pickled_state"]


def pickled_state(state: HookState) -> dict:
    """Return what this rank needs to go on with as many ranks."""
    size = state.pickled_size
    if state.comm is not None:
        size = state.comm.size
    elif state.process_group is not None and state.process_group is not dist.group.WORLD:
        size = state.process_group.size()
    pipeline = state.pipeline
    step = pipeline.optimizer_step
    return {
        "options": vars(state.options),
        "size": size,
        "wire": state.compressor.state_dict(),
        "optimizer": state.saved_optimizer if step is None else step.state_dict(full=False),
        "totals": pipeline.totals,
    }


def restore_pickled_state(state: HookState, saved: dict) -> None:
    """Restore a `pickled_state` in a new state of its options."""
    state.pickled_size = saved["size"]
    state.pipeline.load_wire(saved["wire"])
    state.saved_optimizer = saved["optimizer"]
    state.pipeline.totals.update(saved["totals"])


def common_state(state: HookState) -> dict:
    """Return the state of all ranks, the same on each: a mean of residuals, and the optimizer's full
    state. A collective.
    """
    wire, comm_streams = state.compressor.state_dict(), state.pipeline.comm_streams
    residuals = wire.get("residuals", {})
    if residuals and not comm_streams:
        raise InvalidUsage("residuals that were loaded wait for their parameters: call it after a backward")
    for name in sorted(residuals):
        mean = residuals[name].to(comm_streams[0].comm.device)
        all_reduce_average(comm_streams[0].comm, mean)
        residuals[name] = mean.cpu()
    return {
        "wire": wire,
        "size": comm_streams[0].comm.size if comm_streams else None,
        "optimizer": None if state.optimizer is None else state.optimizer_state_dict(),
    }


def load_common_state(state: HookState, saved: dict) -> None:
    """Load a `common_state`, the same on every rank; a local call."""
    wire = dict(saved["wire"])
    if wire.get("residuals") and not state.average:
        # A sum must still receive the residuals of all ranks: of fewer ranks, each keeps more.
        size = state.comm.size if state.comm is not None else state.get_process_group().size()
        factor = saved["size"] / size
        wire["residuals"] = {name: residual * factor for name, residual in wire["residuals"].items()}
    state.pipeline.load_wire(wire)
    if saved["optimizer"] is not None:
        if state.optimizer is None:
            state.saved_optimizer = saved["optimizer"]
        else:
            state.load_optimizer_state_dict(saved["optimizer"])
