"""Ranks that share a module's parameters: shard ranks, replicas, all of them; and the module's
device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..errors import InvalidArgument
from ..rendezvous.process_groups import get_communicator, get_default_group

__all__ = ["Ranks", "resolve_device", "resolve_ranks"]


def resolve_ranks(
    module: nn.Module, comm: Communicator | None, mesh, *, group=None, replicated: bool = False, device=None
) -> Ranks:
    """Return the ranks over which to shard a module. Opens communicators at first use, which
    blocks.

    `replicated`: each rank has all of it. `device`: where it computes; None: where its parameters
    are.
    """
    if comm is not None and mesh is not None:
        raise InvalidArgument("comm and mesh both say which ranks share the parameters: give one", op="fully_shard")
    if comm is not None:
        if not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm must be a collectives.Communicator, not {kind_of(comm)}", op="fully_shard")
        return Ranks(None if replicated or comm.size == 1 else comm, None, comm)
    if mesh is None:
        if group is None:
            group = get_default_group("a sharded module's", "give fully_shard a comm or mesh", op="fully_shard")
        if not isinstance(group, dist.ProcessGroup):  # NON_GROUP_MEMBER is what new_group gives to the others
            raise InvalidArgument(
                f"process_group must be a group of torch.distributed that this rank is a member of, not {group!r:.60}",
                op="ShardedDataParallel",
            )
        world = get_communicator(group, device or resolve_device(module, None))
        return Ranks(None if replicated or world.size == 1 else world, None, world, group)
    if not hasattr(mesh, "get_group") or mesh.ndim > 2:
        raise InvalidArgument(f"mesh must be a DeviceMesh of one or two dimensions, not {mesh!r:.80}", op="fully_shard")
    device = device or resolve_device(module, mesh.device_type)
    if mesh.ndim == 1:
        world = get_communicator(mesh.get_group(), device)
        return Ranks(None if replicated or world.size == 1 else world, None, world, mesh.get_group(), mesh)
    whole = dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()
    world = get_communicator(whole, device)
    shards, replicas = get_communicator(mesh.get_group(1), device), get_communicator(mesh.get_group(0), device)
    return Ranks(
        None if shards.size == 1 else shards, None if replicas.size == 1 else replicas, world, mesh.get_group(1)
    )


def resolve_device(module: nn.Module, kind: str | None) -> torch.device:
    """Return the device of a module's parameters; for parameters on the meta device, a GPU if there
    is one.
    """
    for param in module.parameters():
        if param.device.type != "meta" and kind in (None, param.device.type):
            return param.device
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument('mesh is of GPUs, and this torch sees none: make a mesh of "cpu"', op="fully_shard")
    if kind == "cuda" or (kind is None and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Ranks(NamedTuple):
    """The ranks that hold a unit.

    `shard`: the ranks that own a shard each; None: this rank has all of it. `replicas`: the ranks
    with the same shard; None: there are none. `world`: all ranks, over which gradients are
    averaged. `group`: torch's process group of `shard`'s ranks, where it is known, for custom
    collectives and DTensors. `mesh`: the one-dimensional DeviceMesh that was given for them.
    """

    shard: Communicator | None
    replicas: Communicator | None
    world: Communicator
    group: object = None
    mesh: object = None

    @property
    def rank(self) -> int:
        return 0 if self.shard is None else self.shard.rank

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first one that holds its shard, where several ranks hold the same."""
        replicas = self.world if self.shard is None else self.replicas
        return replicas is None or replicas.rank == 0

    @property
    def size(self) -> int:
        return 1 if self.shard is None else self.shard.size
