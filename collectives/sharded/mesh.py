"""Which ranks share a module (a stand-in until the real one comes)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..comm.communicator import Communicator
from ..rendezvous.process_groups import get_communicator, get_default_group

__all__ = ["Ranks", "resolve_mesh"]


class Ranks(NamedTuple):
    mesh: object
    comm: Communicator
    world: Communicator
    replicas: Communicator | None
    device: torch.device


def resolve_mesh(module, comm=None, mesh=None, *, group=None, shape=None) -> Ranks:
    device = torch.device("cpu")
    if mesh is None:
        group = get_default_group("a sharded module's", "give fully_shard a comm or mesh", op="fully_shard")
        mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),))
    shard = get_communicator(mesh.get_group(mesh.ndim - 1), device)
    if mesh.ndim == 1:
        return Ranks(mesh, shard, shard, None, device)
    whole = dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()
    return Ranks(mesh, shard, get_communicator(whole, device), get_communicator(mesh.get_group(0), device), device)
