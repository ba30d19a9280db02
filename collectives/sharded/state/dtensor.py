"""Conversion of whole tensors to DTensors over the ranks of a unit, and back.

The shards themselves are not DTensors: a unit's parameters lie one after the other in a flat buffer
that is cut into equal shards, so a parameter's shard is any interval of its elements, and on most
ranks empty. ``Shard(0)`` splits each parameter's rows by ``torch.chunk``; no placement describes
our intervals. So a DTensor here is a copy of this rank's rows, made from the gathered parameter.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import InvalidUsage
from ..mesh import Ranks

__all__ = ["as_dtensor", "as_full_tensor", "shard_mesh"]


def shard_mesh(ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return the mesh of the ranks that own a unit's shards: the one that was given to
    `fully_shard`, or one that is equal to torch's FSDP2's. A local call.

    Raises `InvalidUsage` where the unit is over a communicator without a process group of torch's.
    """
    if ranks.group is None:
        raise InvalidUsage(
            "a DTensor needs a process group of torch's, and this module was sharded over a communicator alone: shard "
            "it over torch.distributed's group or a mesh, or leave use_dtensor out and take pieces, which "
            "torch.distributed.checkpoint saves and loads, too",
            op="state_dict",
        )
    if ranks.mesh is not None:
        return ranks.mesh
    return DeviceMesh.from_group(ranks.group, device.type)


def as_dtensor(full: torch.Tensor, ranks: Ranks, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that all ranks of a unit have as a DTensor, with memory of its own. A local
    call.

    Its rows are sharded, ``Shard(0)``; it is replicated where the unit isn't sharded, and where it
    has no dimensions.
    """
    if ranks.size == 1 or not full.dim():
        placement, local = Replicate(), full
    else:
        placement, chunks = Shard(0), full.chunk(ranks.size)
        local = chunks[ranks.rank] if ranks.rank < len(chunks) else full[:0]
    local = local.detach().clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())


def as_full_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's whole tensor, whatever its mesh and placements; any other tensor as it is.

    For a DTensor it is a collective of the mesh's ranks.
    """
    if not isinstance(value, DTensor):
        return value
    kind = value.device_mesh.device_type
    return (value if value.device.type == kind else value.to(kind)).full_tensor()
