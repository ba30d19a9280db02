"""Torch's own data parallelism and sharded modules: neither takes a module of the other one.

Both register their own forms of a module's parameters and reduce their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..errors import InvalidUsage
from ..torch_patches import patch_data_parallel
from .managed_params import units_in

__all__ = ["check_no_torch_wrapper", "refuse_sharded_modules"]

_NAMES = {
    FSDPModule: "torch.distributed.fsdp.fully_shard", FullyShardedDataParallel: "FullyShardedDataParallel",
    DistributedDataParallel: "DistributedDataParallel",
}  # fmt: skip


def refuse_sharded_modules() -> None:
    """Let torch's DistributedDataParallel, FullyShardedDataParallel and ``fully_shard`` refuse modules
    with units.
    """
    patch_data_parallel(_refuse_units)


def _refuse_units(module, name: str, ignored: Iterable[nn.Parameter]) -> None:
    if not isinstance(module, nn.Module):
        return  # torch says so
    known = set(map(id, ignored))
    for each_name, each in module.named_modules():
        for unit in units_in(each, recurse=False):
            if any(id(param.full if unit.is_registered else param.sharded) not in known for param in unit.params):
                inside = f"{each_name or 'it'}, a {type(each).__name__}"
                raise InvalidUsage(
                    f"{name} can't take this {type(module).__name__}: {inside}, was sharded by collectives.sharded, "
                    "whose backward reduces its gradients already. Use fully_shard, or ShardedDataParallel, of "
                    "collectives.sharded for the outer module, too, or torch's for all of them",
                    op=name, rank=unit.world.rank,
                )  # fmt: skip


def check_no_torch_wrapper(module: nn.Module, ignored: Iterable[nn.Parameter], op: str) -> None:
    """Raise `InvalidUsage` where a module that is to be sharded is or contains one of torch's data
    parallelism, unless all its parameters are ignored.
    """
    known = set(map(id, ignored))
    for name, each in module.named_modules():
        for cls, torchs in _NAMES.items():
            if isinstance(each, cls) and any(id(param) not in known for param in each.parameters()):
                raise InvalidUsage(
                    f"this {type(module).__name__} can't be sharded: {name or 'it'} is under torch's {torchs}, which "
                    "reduces its gradients already: leave that out, or give its parameters to ignored_params",
                    op=op,
                )
