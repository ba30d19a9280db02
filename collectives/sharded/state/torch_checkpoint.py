"""torch.distributed.checkpoint's save and load of shards themselves: of ``named_parameters()`` and
of ``optimizer.state_dict()``.

torch would take one rank's shard for the whole tensor, and save one of them. Its planners get
pieces of the same memory instead, which it saves and loads as what they are.
"""

from __future__ import annotations

from ...errors import InvalidUsage
from ...torch_compat import tree_map
from ...torch_patches import patch_checkpoint
from .dtensor_calls import as_piece

__all__ = ["patch_torch_checkpoint"]


def patch_torch_checkpoint() -> None:
    """Let torch's checkpoints take shards."""
    patch_checkpoint(_after_set_up, lambda state_dict: tree_map(as_piece, state_dict))


def _after_set_up(planner) -> None:
    """Replace the shards in a planner's state dict, a flat one."""
    made = {key: as_piece(value) for key, value in planner.state_dict.items()}
    if any(made[key] is not value for key, value in planner.state_dict.items()):
        if not planner.flatten_state_dict:
            raise InvalidUsage(
                "a planner with flatten_state_dict=False can't take shards: save and load what "
                "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns",
                op="torch.distributed.checkpoint",
            )
        planner.state_dict = made
