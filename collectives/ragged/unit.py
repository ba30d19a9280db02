"""Unit: parameters that are all-gathered together, and whose gradients are reduced together."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ..rendezvous.process_groups import get_communicator
from .arena import Arena
from .param import ParamGroup, ShardedParam

__all__ = ["Unit"]

_arenas: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Unit:
    """Parameters of one or several modules, sharded over the last dimension of a mesh."""

    def __init__(self, found, mesh, *, gather_dtype=None, reduce_dtype=None, block: int = 1):
        group = mesh.get_group(mesh.ndim - 1)
        device = found[0][2].device
        self.comm = get_communicator(group, device)
        arena = _arenas.setdefault(self.comm, Arena(self.comm))
        kinds: dict[tuple, list] = {}
        for names, places, param in found:
            members = kinds.setdefault((param.dtype, param.requires_grad), [])
            members.append((ShardedParam(names, places, param.shape), param))
        self.groups = [
            ParamGroup(members, mesh, self.comm, arena, gather_dtype=gather_dtype, reduce_dtype=reduce_dtype, block=block)
            for members in kinds.values()
        ]
        self.params = [param for group in self.groups for param in group.params]
        self.is_unsharded = True
        self.reshard_after_forward = True
        self.reshard()

    @torch.no_grad()
    def unshard(self) -> None:
        """Gather the parameters, and have the modules hold the full ones. A collective."""
        for group in self.groups:
            group.all_gather()
        if not self.is_unsharded:
            for param in self.params:
                param.register(param.full)
            self.is_unsharded = True

    def reshard(self) -> None:
        """Have the modules hold the shards, and free the gathered buffers. A local call."""
        if self.is_unsharded:
            for param in self.params:
                param.register(param.sharded)
            self.is_unsharded = False
        for group in self.groups:
            group.free()

    def has_grads(self) -> bool:
        return any(group.has_grads() for group in self.groups)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the full gradients into those of the shards. A collective."""
        for group in self.groups:
            if group.requires_grad:
                group.reduce_grads("avg")
