"""torch.distributed.checkpoint's save and load of shards themselves: of ``named_parameters()`` and
of ``optimizer.state_dict()``.

torch would take one rank's shard for the whole tensor, and save one of them. Its planners, and the
stagers that copy for an asynchronous save, get pieces of the same memory instead.
"""

from __future__ import annotations

from ...errors import InvalidUsage
from ...torch_compat import tree_flatten, tree_unflatten
from ...torch_patches import patch_checkpoint
from .dtensor_calls import as_pieces
from .shard_tensor import ShardTensor

__all__ = ["patch_torch_checkpoint"]


def patch_torch_checkpoint() -> None:
    """Let torch's checkpoints take shards."""
    patch_checkpoint(_after_set_up, DefaultStager=_stage, BlockingAsyncStager=_stage_local)


def _after_set_up(planner) -> None:
    """Replace the shards in a planner's state dict, a flat one."""
    made = dict(zip(planner.state_dict, as_pieces(list(planner.state_dict.values())), strict=True))
    if any(made[key] is not value for key, value in planner.state_dict.items()):
        if not planner.flatten_state_dict:
            raise InvalidUsage(
                "a planner with flatten_state_dict=False can't take shards: save and load what "
                "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns",
                op="torch.distributed.checkpoint",
            )
        planner.state_dict = made


def _stage(own, state_dict, *args, **kwargs):
    """Stage pieces in place of shards."""
    leaves, spec = tree_flatten(state_dict)
    return own(tree_unflatten(as_pieces(leaves), spec), *args, **kwargs)


def _stage_local(own, state_dict, *args, **kwargs):
    """Stage pieces, for a stager that allocates its copies by their shapes: it gets what is local."""
    leaves, spec = tree_flatten(state_dict)
    leaves = as_pieces(leaves)
    local = [each.local if isinstance(each, ShardTensor) else each for each in leaves]
    staged, spec = tree_flatten(own(tree_unflatten(local, spec), *args, **kwargs))
    pairs = zip(leaves, staged, strict=True)
    return tree_unflatten([each.like(copy) if isinstance(each, ShardTensor) else copy for each, copy in pairs], spec)
