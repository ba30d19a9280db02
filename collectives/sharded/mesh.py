"""Ranks that share a module: the mesh of its DTensors, the communicators of its dimensions, the device."""

from __future__ import annotations

import weakref
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..arrays import kind_of
from ..backend import is_group_over, open_group_over
from ..comm import all_gather_object
from ..comm.communicator import Communicator
from ..errors import InvalidArgument
from ..rendezvous.process_groups import find_group_backend, get_communicator, get_default_group
from .managed_params import units_in

__all__ = ["Ranks", "find_device", "resolve_mesh", "split_comm"]

_NAMES = ("replicate", "shard")
_Shape = Literal["shard", "replicate", "hybrid"]


class Ranks(NamedTuple):
    """The ranks that share a module.

    `mesh`: of one dimension (shard) or two (replicate, shard); `comm`: the communicator of the shard
    dimension; `world`: of all ranks; `replicas`: of the first of two dimensions, else None; `device`:
    where the module computes.
    """

    mesh: DeviceMesh
    comm: Communicator
    world: Communicator
    replicas: Communicator | None
    device: torch.device


def resolve_mesh(
    module: nn.Module, comm: Communicator | None = None, mesh: DeviceMesh | None = None, *, group=None,
    shape: _Shape = "shard",
) -> Ranks:  # fmt: skip
    """Return the ranks that share a module. The first call with some ranks is a collective of them and blocks.

    Args:
        module: The module, whose parameters say the device.
        comm: A communicator, also where torch.distributed isn't initialised: its ranks then become the
            default group, see `collectives.backend.open_group_over`.
        mesh: A mesh of one dimension (shard) or two (replicate, shard), which may be a part of a larger one.
        group: A process group, or the pair of the groups of this rank's shards and of its replicas. With
            none of the three: torch.distributed's default group.
        shape: For one dimension of ranks: "shard" over all of them; "replicate": each rank has all of
            it, a mesh of (ranks, 1); "hybrid": shard over the ranks of a node, and replicate over the nodes.

    Raises:
        InvalidArgument: Where more than one is given, or one of another kind.
        InvalidUsage: Where there is no default group, or it doesn't have the communicator's ranks.
    """
    given = [name for name, each in (("comm", comm), ("mesh", mesh), ("process_group", group)) if each is not None]
    if len(given) > 1:
        raise InvalidArgument(
            f"{' and '.join(given)} all say which ranks share the parameters: give one", op="fully_shard"
        )
    if mesh is not None:
        return _of_mesh(module, mesh, shape)
    if isinstance(group, tuple | list):
        return _of_pair(module, group)
    if comm is not None:
        if not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm must be a collectives.Communicator, not {kind_of(comm)}", op="fully_shard")
        return _of_line(comm, None, shape)
    if group is None:
        group = get_default_group("a sharded module's", "give fully_shard a comm or mesh", op="fully_shard")
    _check_group(group)
    device = find_device(module, None)
    world = _get_communicator(group, device)
    return _of_line(world, DeviceMesh.from_group(group, device.type), shape)


def _check_group(group) -> None:
    if not isinstance(group, dist.ProcessGroup):  # NON_GROUP_MEMBER is what new_group gives to the others
        raise InvalidArgument(
            f"process_group must be a group of torch.distributed that this rank is a member of, not {group!r:.60}",
            op="ShardedDataParallel",
        )


def _of_mesh(module: nn.Module, mesh: DeviceMesh, shape: _Shape) -> Ranks:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2:
        raise InvalidArgument(f"mesh must be a DeviceMesh of one or two dimensions, not {mesh!r:.80}", op="fully_shard")
    device = find_device(module, mesh.device_type)
    if mesh.ndim == 1:
        return _of_line(_get_communicator(mesh.get_group(), device), mesh, shape)
    if shape == "replicate":
        raise InvalidArgument("a mesh of two dimensions has shards: give one of one dimension", op="fully_shard")
    shards, replicas = (_get_communicator(mesh.get_group(dim), device) for dim in (1, 0))
    if mesh.size() == dist.get_world_size():
        group = dist.group.WORLD
    elif 1 in mesh.shape:
        group = mesh.get_group(0 if mesh.shape[1] == 1 else 1)
    else:
        group = mesh._flatten().get_group()
    return Ranks(mesh, shards, _get_communicator(group, device), replicas, device)


def _of_pair(module: nn.Module, groups) -> Ranks:
    """Return the ranks of FSDP1's pair of groups: this rank's shards, and its replicas."""
    if len(groups) != 2:
        raise InvalidArgument(
            f"process_group must be one group, or two, of shards and of replicas, not {len(groups)}",
            op="ShardedDataParallel",
        )
    for group in groups:
        _check_group(group)
    device = find_device(module, None)
    shards, replicas = (_get_communicator(group, device) for group in groups)
    rows = all_gather_object(replicas, dist.get_process_group_ranks(groups[0]))
    mesh = DeviceMesh.from_group(list(groups[::-1]), device.type, mesh=rows, mesh_dim_names=_NAMES)
    ranks = sorted(rank for row in rows for rank in row)
    whole = dist.group.WORLD
    if len(ranks) < dist.get_world_size():
        whole = dist.new_group(ranks, use_local_synchronization=True)
    return Ranks(mesh, shards, _get_communicator(whole, device), replicas, device)


def _of_line(world: Communicator, mesh: DeviceMesh | None, shape: _Shape) -> Ranks:
    """Return the ranks of a communicator, with a mesh of one dimension or None, in a shape."""
    if shape == "shard":
        if mesh is None:
            mesh = DeviceMesh.from_group(open_group_over(world), world.device.type)
        return Ranks(mesh, world, world, None, world.device)
    if shape == "replicate":
        return _of_rows(world, tuple((rank,) for rank in range(world.size)))
    if shape != "hybrid":
        raise InvalidArgument(f'shape must be "shard", "replicate" or "hybrid", not {shape!r}', op="fully_shard")
    nodes = world.machines
    if nodes is None or len(set(map(len, nodes))) > 1:
        found = "isn't known" if nodes is None else f"differs: {', '.join(str(len(node)) for node in nodes)}"
        raise InvalidArgument(
            f"shards inside of a node and replicas over the nodes need as many ranks on each node, and the number of "
            f"ranks on a node {found}: give a mesh of two dimensions, or the two process groups",
            op="ShardedDataParallel", rank=world.rank,
        )  # fmt: skip
    return _of_rows(world, nodes)


_splits: dict[tuple[Communicator, tuple], list[Communicator]] = {}  # [replicas, shards] by (world, rows)


def _of_rows(world: Communicator, rows: tuple[tuple[int, ...], ...]) -> Ranks:
    """Return the ranks of a communicator in rows: a row shards, and the ranks of a column are replicas."""
    for key in [key for key in _splits if key[0].closed]:
        del _splits[key]
    whole = dist.get_process_group_ranks(open_group_over(world))
    comms = _splits.get((world, rows))
    if comms is None:
        number = next(number for number, row in enumerate(rows) if world.rank in row)
        column = rows[number].index(world.rank)
        comms = _splits[world, rows] = [
            world if len(rows[0]) == 1 else split_comm(world, column, number),
            world if len(rows) == 1 else split_comm(world, number, column),
        ]
    mesh = DeviceMesh.from_group(
        [open_group_over(comm) for comm in comms], world.device.type,
        mesh=[[whole[rank] for rank in row] for row in rows], mesh_dim_names=_NAMES,
    )  # fmt: skip
    return Ranks(mesh, comms[1], world, comms[0], world.device)


_duplicates: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _get_communicator(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """Return a communicator of a group's ranks for units.

    On groups of the backend "collectives" on the host it isn't the group's own: other threads may use
    that one, as those of torch.distributed.checkpoint.async_save do, and would come between the units'
    calls in another order on each rank.
    """
    comm = get_communicator(group, device)
    if device.type != "cpu" or find_group_backend(group) is None or is_group_over(group):
        return comm
    found = _duplicates.get(comm)
    if found is None or found.closed:
        found = _duplicates[comm] = split_comm(comm, 0, comm.rank)
    return found


def split_comm(world: Communicator, color: int, key: int) -> Communicator:
    """Return a communicator of the ranks with this color, which is closed and aborted with `world`. A collective."""
    child = world.split(color, key)
    world._owned.append(child)
    return child


def find_device(module: nn.Module, kind: str | None) -> torch.device:
    """Return the device of the units inside, whose shards may be elsewhere, or of a module's parameters; for parameters
    on the meta device, a GPU if there is one.
    """
    devices = [each.device for each in (*units_in(module), *module.parameters())]
    for device in devices:
        if device.type != "meta" and kind in (None, device.type):
            return device
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument('mesh is of GPUs, and this torch sees none: make a mesh of "cpu"', op="fully_shard")
    if kind == "cuda" or (kind is None and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
