"""Unit: parameters that are all-gathered together, and whose gradients are reduced together."""

from __future__ import annotations

import weakref

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..rendezvous.process_groups import get_communicator
from .param import ParamGroup, ShardedParam

__all__ = ["Unit"]


class Unit:
    """Parameters of one or several modules, sharded over the last dimension of a mesh."""

    def __init__(self, found, mesh, *, mp_policy: MixedPrecisionPolicy | None = None, block: int = 1):
        from .scheduler import get_scheduler

        group = mesh.get_group(mesh.ndim - 1)
        self.mp_policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
        self.comm = self.world = get_communicator(group, found[0][2].device)
        self.module_group, self.name, self.device, self.mesh = None, "unit", found[0][2].device, mesh
        self.scheduler = get_scheduler(self.comm)
        kinds: dict[tuple, list] = {}
        for names, places, param in found:
            members = kinds.setdefault((param.dtype, param.requires_grad), [])
            members.append((ShardedParam(names, places, param.shape), param))
        self.groups = [
            ParamGroup(
                members, mesh, self.comm, self.scheduler.arena, gather_dtype=self.mp_policy.param_dtype,
                reduce_dtype=self.mp_policy.reduce_dtype, block=block,
            )
            for members in kinds.values()
        ]  # fmt: skip
        self.params = [param for group in self.groups for param in group.params]
        self.requires_grad = any(group.requires_grad for group in self.groups)
        self.frees_memory = any(not group.shares_memory for group in self.groups)
        self.reshard_after_forward = self.reshard_after_backward = self.reduces = True
        self.backwards_left: int | None = None  # in the backward in progress
        self._nodes: list[weakref.ref] = []
        self._versions: list[int] | None = None
        self.is_unsharded = True
        self.reshard()

    # ---- Gathering.

    @torch.no_grad()
    def unshard(self) -> None:
        """Gather the parameters, and have the modules hold the full ones. A collective."""
        if self.is_unsharded:
            return
        for group in self.groups:
            group.all_gather()
        for param in self.params:
            param.register(param.full)
        self.is_unsharded = True
        self._versions = self._read_versions()

    def reshard(self) -> None:
        """Have the modules hold the shards, and free the gathered buffers. A local call."""
        if not self.is_unsharded:
            return
        for param in self.params:
            param.register(param.sharded)
        for group in self.groups:
            group.free()
        self.is_unsharded = False

    def drop_stale(self) -> None:
        """Reshard if the shards were written to since they were gathered."""
        if self.is_unsharded and self._versions != self._read_versions():
            self.reshard()

    def _read_versions(self) -> list[int]:
        return [param.sharded._version for param in self.params]

    def gathered_storages(self) -> set[int]:
        """Return the addresses of the storages that a reshard empties."""
        return {group.full.untyped_storage()._cdata for group in self.groups if not group.shares_memory}

    # ---- Gradients.

    def add_node(self, node) -> None:
        """Note a node of autograd's graph that reports the end of one forward's backward."""
        self._nodes = [each for each in self._nodes if each() is not None]
        self._nodes.append(weakref.ref(node))

    def live_nodes(self) -> list:
        return [node for reference in self._nodes if (node := reference()) is not None]

    def drop_grads(self) -> None:
        for param in self.params:
            param.full.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the full gradients into those of the shards. A collective."""
        for group in self.groups:
            if group.requires_grad:
                group.reduce_grads("avg")
