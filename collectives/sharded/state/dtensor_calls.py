"""DTensor's calls on the shards of parameters, gradients and optimizer state.

What FSDP2's programs call on a DTensor (``full_tensor()``, ``to_local()``, ``placements``,
``device_mesh``) is an attribute of torch.Tensor from the first sharded module on, and an
AttributeError for every tensor that isn't a shard. A class of their own would cost each operation:
torch takes tensors and Parameters themselves through a shorter path than subclasses, and an AdamW
step of 144 small parameters takes 1.2 to 1.6 times as long with these.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from ...errors import InvalidUsage
from ...torch_compat import disabled_torch_function
from ...torch_patches import patch_attribute
from ..scheduler import known_units
from .dtensor import shard_mesh
from .shard_tensor import ShardTensor

__all__ = ["FlatShard", "LocalShard", "ShardPlace", "as_pieces", "find_place", "patch_tensor_calls"]


class FlatShard(Placement):
    """Placement of a tensor whose elements are split as the unit's flat buffer is: each rank has an
    interval of them, in their order.

    ``is_shard()`` is True and ``is_shard(dim)`` False, since no dimension is split.
    """

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it is sharded along a dimension; None: at all."""
        return dim is None

    def is_replicate(self) -> bool:
        """Return False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return False."""
        return False

    def __eq__(self, other) -> bool:
        return isinstance(other, FlatShard)

    def __hash__(self) -> int:
        return hash(FlatShard)

    def __repr__(self) -> str:
        return "FlatShard()"


class ShardPlace:
    """Place of this rank's shard in a parameter: elements ``[start, start + count)`` of `name`,
    whose whole shape is `shape`.
    """

    __slots__ = ("_param", "_unit", "count", "name", "shape", "start")

    def __init__(self, unit, param):
        self._unit, self._param = weakref.ref(unit), weakref.ref(param)
        self.name, self.shape, self.start, self.count = param.name, param.shape, param.start, param.shard.numel()

    def __deepcopy__(self, memo):
        return self

    def __str__(self) -> str:
        return f"[{self.start}:{self.start + self.count}] of {self.name} {list(self.shape)}"

    def same(self, other: ShardPlace | ShardTensor) -> bool:
        """Whether another shard is of the same elements of a tensor of the same shape."""
        count = other.count if isinstance(other, ShardPlace) else other.local.numel()
        return (self.shape, self.start, self.count) == (other.shape, other.start, count)

    def find_unit(self, op: str):
        """Return the unit and its `ShardedParam`; raise `InvalidUsage` where the module is gone, or
        its communicator closed.
        """
        unit, param = self._unit(), self._param()
        if unit is None or param is None or unit.scheduler.comm.closed:
            raise InvalidUsage(
                f"the sharded module of {self.name} is gone, or its communicator is closed, and this rank has elements "
                f"{self}",
                op=op,
            )
        return unit, param


class LocalShard(torch.Tensor):
    """This rank's shard of an entry of optimizer state, as ``optimizer.state_dict()`` returns it: a
    plain tensor of the shard's shape and memory, with DTensor's calls.

    Operations return plain tensors, and it is pickled as one.
    """

    __torch_function__ = disabled_torch_function

    @staticmethod
    def of(tensor: torch.Tensor, place: ShardPlace) -> LocalShard:
        """Return a view of a tensor as a shard."""
        made = tensor.detach()
        made.__class__ = LocalShard
        made._place = place
        return made

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = LocalShard.of(self.detach().clone(), self._place)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.detach().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        return f"LocalShard({self._place}, {self.detach()!r})"


def find_place(tensor: torch.Tensor) -> ShardPlace | None:
    """Return the place of a parameter's shard, its gradient, or an entry of optimizer state; None
    for any other tensor.
    """
    if type(tensor) is LocalShard:
        return tensor._place
    of_params = isinstance(tensor, nn.Parameter)
    for unit in known_units():
        for param in unit.params:
            if tensor is (param.shard if of_params else param.shard.grad):
                return ShardPlace(unit, param)
    return None


def as_pieces(values: list) -> list:
    """Return values with each shard that is split over ranks as an entry of a state dict, of the
    same memory.
    """
    split = [unit for unit in known_units() if unit.ranks.shard is not None]
    owners = {
        id(shard): param
        for unit in split
        for param in unit.params
        for shard in (param.shard, param.shard.grad)
        if shard is not None
    }

    def convert(value):
        if type(value) is LocalShard and value._place.find_unit("torch.distributed.checkpoint")[0] in split:
            return ShardTensor(value, value._place.shape, value._place.start)
        param = owners.get(id(value))
        return value if param is None else ShardTensor(value, param.shape, param.start)

    return [convert(value) for value in values]


# ---- The calls. Each takes a shard and its place.


def full_tensor(shard: torch.Tensor, place: ShardPlace) -> torch.Tensor:
    """Return the whole tensor on each rank, in memory of its own, without ``requires_grad``.

    A collective, which blocks: all ranks of the module must call it, for the same parameter. Raises
    `InvalidUsage` on all ranks where they make other calls.
    """
    unit, param = place.find_unit("full_tensor")
    unit.scheduler.agreement.barrier(f"full_tensor() of {place.name} of unit {unit.index}, {shard.dtype}")
    unit.host_copies.wait()
    ranks, flat = unit.ranks, shard.detach().reshape(-1)
    if ranks.shard is None:
        return flat.clone().view(place.shape)
    group = next(group for group in unit.groups if any(each is param for each in group.params))
    full = torch.empty(param.count, dtype=shard.dtype, device=unit.device)
    for rank in range(ranks.size):
        low = rank * group.shard_numel - param.offset
        begin, end = max(low, 0), min(low + group.shard_numel, param.count)
        if begin < end:
            part = full[begin:end]
            if rank == ranks.rank:
                part.copy_(flat)
            ranks.shard.broadcast(part.view(torch.uint8), root=rank)
    return full.to(shard.device).view(place.shape)


def to_local(shard: torch.Tensor, place: ShardPlace) -> torch.Tensor:
    """Return this rank's elements as a plain tensor of the shard's memory and shape, without
    ``requires_grad``.
    """
    return shard.detach()


def redistribute(shard: torch.Tensor, place: ShardPlace, *args, **kwargs):
    """Raise `InvalidUsage`: the layout of shards is the unit's."""
    raise InvalidUsage(
        f"the shard of {place.name} is part of its unit's flat buffer and can't be laid out in another way: "
        "redistribute the DTensors of get_model_state_dict(model, use_dtensor=True) or "
        "get_optimizer_state_dict(model, optimizer, use_dtensor=True)",
        op="redistribute",
    )


def _global_shape(shard: torch.Tensor, place: ShardPlace) -> torch.Size:
    return place.shape


def _placements(shard: torch.Tensor, place: ShardPlace) -> tuple[Placement, ...]:
    return (Replicate() if place.find_unit("placements")[0].ranks.shard is None else FlatShard(),)


def _device_mesh(shard: torch.Tensor, place: ShardPlace):
    unit, _ = place.find_unit("device_mesh")
    return shard_mesh(unit.ranks, unit.device)


@functools.cache
def patch_tensor_calls() -> None:
    """Give shards DTensor's calls, and ``global_shape``, the shape of the whole parameter."""
    methods = {"full_tensor": full_tensor, "to_local": to_local, "redistribute": redistribute}
    calls = {name: functools.partial(functools.partial, call) for name, call in methods.items()}
    calls |= {"global_shape": _global_shape, "placements": _placements, "device_mesh": _device_mesh}
    for name, call in calls.items():
        patch_attribute(
            torch.Tensor, name, _ShardCall(name, call),
            "FSDP2's programs call it on parameters, and a class of their own would slow each operation on shards",
        )  # fmt: skip


class _ShardCall:
    """An attribute that shards have. What a program sets on a tensor by the same name hides it.

    It has ``__set__``, as all of torch.Tensor's have: torch.overrides, and so torch.compile, reads
    it.
    """

    def __init__(self, name: str, call):
        self._name = name
        self._call = call

    def __get__(self, tensor: torch.Tensor | None, owner=None):
        if tensor is None:
            return self
        if self._name in tensor.__dict__:
            return tensor.__dict__[self._name]
        place = find_place(tensor)
        if place is None:
            kind = type(tensor).__name__
            raise AttributeError(f"'{kind}' object has no attribute '{self._name}'", name=self._name, obj=tensor)
        return self._call(tensor, place)

    def __set__(self, tensor: torch.Tensor, value) -> None:
        tensor.__dict__[self._name] = value

    def __delete__(self, tensor: torch.Tensor) -> None:
        if tensor.__dict__.pop(self._name, self) is self:
            raise AttributeError(self._name, name=self._name, obj=tensor)
