"""RaggedTensor: a DTensor whose ranks have any number of rows each.

Operations are dispatched in four ways, and nothing else:
- element by element, forward and in place: on the local rows, which need no communication;
- norms and sums of all elements: on the local rows, then one all-reduce; the result is replicated;
- everything that needs the whole tensor (products, views, reductions of a dimension): by DTensor on the
  gathered tensor. What they return is replicated. What is written to a view goes to the shards, too;
- random numbers: each rank draws those of the whole tensor and keeps its own, so that ranks with one
  seed have what one process would have.
Everything that mixes a shard with a plain tensor or with a shard of other bounds raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from ..errors import InvalidUsage
from ..rendezvous.process_groups import get_communicator
from ..torch_compat import DTensorSpec, TensorMeta, foreach_types, optimizer_types
from .placement import RaggedShard

__all__ = ["RaggedTensor"]

aten = torch.ops.aten
_GATHERED_IN_FORWARD = (
    "it is gathered for the forward of its module, and for methods that register_forward_method(module, name) was "
    "called for, such as generate"
)


class RaggedTensor(DTensor):
    """A DTensor with a `RaggedShard` on the last dimension of its mesh, and replicas on the others."""

    def __init__(self, *args, **kwargs):
        pass  # DTensor's does nothing either, but by way of dynamo, which takes longer than all the rest

    # ---- How to make one.

    @staticmethod
    def from_local(
        local: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placement: RaggedShard
    ) -> RaggedTensor:
        """Make a tensor of this rank's part, which it views."""
        stride = torch.empty(shape, device="meta").stride()
        placements = (Replicate(),) * (mesh.ndim - 1) + (placement,)
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype))
        return _wrap_local(local, spec)

    @staticmethod
    def from_full(full: torch.Tensor, mesh: DeviceMesh, placement: RaggedShard) -> RaggedTensor:
        """Make a tensor of a whole one that all ranks have: a copy of this rank's part."""
        local = placement.cut(full.detach(), mesh.get_local_rank(mesh.ndim - 1)).clone()
        return RaggedTensor.from_local(local, full.shape, mesh, placement)

    # ---- What it is.

    @property
    def ragged(self) -> RaggedShard:
        return self._spec.placements[-1]

    @property
    def shard_rank(self) -> int:
        """This rank in the mesh dimension that shards."""
        mesh = self._spec.mesh
        return mesh.get_local_rank(mesh.ndim - 1)

    @property
    def data(self) -> RaggedTensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Copy values: this rank's part stays where it is, in the unit's flat buffer."""
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            raise InvalidUsage(
                f"the data of a sharded parameter, {list(self.shape)} of {self.dtype} on {self.device}, can't become "
                f"{list(values.shape)} of {values.dtype} on {values.device}: use module.to(...), or shard the module "
                "after the change"
            )
        with torch.no_grad():
            self.detach().copy_(values)

    # torch's read the storage, which a DTensor lacks, and crash the process.

    def share_memory_(self):
        raise InvalidUsage("a sharded parameter has no memory of its own: use param.to_local().share_memory_()")

    def is_shared(self) -> bool:
        return self._local_tensor.is_shared()

    def __dlpack__(self, *args, **kwargs):
        raise InvalidUsage("a sharded parameter has no memory of its own: pass param.to_local()")

    def like(self, local: torch.Tensor) -> RaggedTensor:
        """Make a tensor with other values, perhaps of another dtype, and the same bounds."""
        spec = self._spec
        if local.dtype == spec.tensor_meta.dtype:
            return _wrap_local(local, spec)
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        return _wrap_local(local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta))

    def __repr__(self) -> str:
        return f"RaggedTensor({self._local_tensor!r}, shape={list(self.shape)}, placements={self.placements})"

    # ---- The whole tensor.

    def full_tensor(self, *, grad_placements=None) -> torch.Tensor:
        """Return the whole tensor, on every rank. A collective of the ranks of the shards."""
        return _FullTensor.apply(self)

    def redistribute(self, device_mesh=None, placements=None, *, async_op=False, **options) -> DTensor:
        """Return the tensor with other placements, by way of the replicated one. A collective."""
        placements = self.placements if placements is None else tuple(placements)
        if device_mesh in (None, self.device_mesh) and placements == self.placements:
            return self
        full = _dtensor_of(_FullTensor.apply(self), self.device_mesh)
        if any(isinstance(each, RaggedShard) for each in placements):
            return RaggedTensor.from_full(full.to_local(), self.device_mesh, placements[-1])
        return full.redistribute(device_mesh, placements, async_op=async_op, **options)

    # ---- torch.distributed.checkpoint's protocol.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = self.ragged.boxes(self.shape, self.shard_rank)
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size, _ in boxes]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offset, size, span in self.ragged.boxes(self.shape, self.shard_rank):
            if torch.Size(offset) == index.offset:
                return self._local_tensor.view(-1)[span].view(size)
        raise InvalidUsage(f"this rank has no part of {index.fqn} at {index.offset}")

    # ---- Pickles, copies, tracing.

    def __reduce_ex__(self, protocol):
        spec = self._spec
        parts = self._local_tensor.detach(), self.shape, spec.mesh, spec.placements[-1], self.requires_grad
        return _rebuild, parts

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        made = DTensor.__tensor_unflatten__(inner_tensors, context, outer_size, outer_stride)
        return _wrap_local(made._local_tensor, made._spec).requires_grad_(made.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        run = _DISPATCH.get(func)
        if run is None:
            run = _DISPATCH[func] = _choose_way(func)
        return run(func, args, kwargs)


RaggedTensor.__name__ = "DTensor"  # many programs ask for this name, and not for an instance

for _known in (optimizer_types, foreach_types):
    if RaggedTensor not in _known:
        _known.append(RaggedTensor)


class _FullTensor(torch.autograd.Function):
    """The whole tensor; its gradient is this rank's part of the gradient."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.like = tensor.detach()
        return _gather(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.like.like(ctx.like.ragged.cut(grad, ctx.like.shard_rank).clone())


class _GatheredView(DTensor):
    """A view of a gathered tensor: what is written to it is also written to the shards, and the other way round."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if _find(RaggedTensor, args, kwargs or {}) is not None:
            return RaggedTensor.__torch_dispatch__(func, types, args, kwargs)
        return _run_gathered(func, args, kwargs or {})


class _Origin:
    """The tensor of which a view was gathered, and the gathered copy.

    Versions are those that autograd counts, which are the same on all ranks.
    """

    def __init__(self, tensor: RaggedTensor, full: torch.Tensor):
        self.tensor, self.full, self.version = tensor, full, tensor._version

    def refresh(self) -> None:
        """Gather again if the tensor was written to. A collective."""
        if self.tensor._version != self.version:
            _gather(self.tensor, self.full)
            self.version = self.tensor._version

    def write_back(self, view: torch.Tensor) -> None:
        """Write this rank's part of a view of the gathered copy to the tensor, before autograd counts the write."""
        cut, rank, local = self.tensor.ragged.cut, self.tensor.shard_rank, self.tensor._local_tensor
        part = cut(self.full, rank)
        if view.dtype == part.dtype:  # nothing but the view's elements: other views may have written the others
            is_written = torch.zeros_like(self.full, dtype=torch.bool)
            is_written.as_strided(view.size(), view.stride(), view.storage_offset()).fill_(True)
            part = torch.where(cut(is_written, rank), part, local)
        local.copy_(part)
        self.version = self.tensor._version + 1


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _wrap_local(local: torch.Tensor, spec: DTensorSpec) -> RaggedTensor:
    # Not of `local` itself: torch 2.13 takes over its storage offset, and then data_ptr() isn't 0, from
    # which copy.deepcopy and the stager of async_save see that a tensor has no storage.
    kind = local.dtype, local.device
    empty = _EMPTY.get(kind)
    if empty is None:
        empty = _EMPTY[kind] = local.new_empty(0)
    made = RaggedTensor(empty, spec, requires_grad=False)
    made._local_tensor = local
    return made


def _rebuild(local, shape, mesh, placement, requires_grad) -> RaggedTensor:
    return RaggedTensor.from_local(local, shape, mesh, placement).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild, RaggedShard, RaggedTensor])


def _replicated(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    placements = (Replicate(),) * mesh.ndim
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(full.shape, full.stride(), full.dtype))
    return DTensor(full, spec, requires_grad=False)


def _dtensor_of(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a replicated tensor whose gradient goes back to `full`."""
    return DTensor.from_local(full, mesh, (Replicate(),) * mesh.ndim, run_check=False)


def _communicator(spec: DTensorSpec, device: torch.device):
    return get_communicator(spec.mesh.get_group(spec.mesh.ndim - 1), device)


def _gather(tensor: RaggedTensor, full: torch.Tensor | None = None) -> torch.Tensor:
    """Return the whole tensor, in memory that may be given: each rank broadcasts its part into it."""
    local, placement = tensor._local_tensor.detach(), tensor.ragged
    if full is None:
        full = local.new_empty(tensor.shape)
    if full.is_meta:
        return full
    rank = tensor.shard_rank
    placement.cut(full, rank).copy_(local)
    parts = [(placement.cut(full, peer), peer) for peer in range(len(placement.counts))]
    if len(parts) > 1:
        comm = _communicator(tensor._spec, local.device)
        with comm.group():
            for part, peer in parts:
                if part.numel():
                    comm.broadcast(part, root=peer)
    return full


# ---- Which way an operation takes.

# Element by element, though torch doesn't tag them as pointwise.
_ELEMENTWISE = {
    "detach", "alias", "clone", "copy_", "_to_copy", "zero_", "fill_", "lift_fresh", "empty_like", "zeros_like",
    "ones_like", "full_like", "is_pinned", "pin_memory", "_pin_memory", "positive", "_foreach_copy_",
}  # fmt: skip
_LISTS_NOT_ELEMENTWISE = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


def _choose_way(func) -> Callable:
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _run_random
    if name.startswith(("_foreach_", "_fused_")):
        return _run_gathered if name in _LISTS_NOT_ELEMENTWISE else _run_list
    functional = getattr(aten, name.removesuffix("_"), None)
    same = getattr(functional, func._overloadname, func)
    if torch.Tag.pointwise in func.tags or torch.Tag.pointwise in same.tags or name in _ELEMENTWISE:
        return _run_local
    return _run_gathered


def _is_written(formal) -> bool:
    return formal.alias_info is not None and formal.alias_info.is_write


def _written_args(func, args, kwargs) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes to."""
    formals = func._schema.arguments
    given = [*zip(formals, args, strict=False), *((each, kwargs[each.name]) for each in formals if each.name in kwargs)]
    for formal, arg in given:
        if _is_written(formal):
            yield from arg if isinstance(arg, (list, tuple)) else (arg,)


def _refuse_plain(func, arg: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of at most one element, which is the same on all ranks; raise for any other one."""
    if arg.numel() > 1:
        raise InvalidUsage(
            f"{func._schema.name} of a sharded parameter with a plain tensor {list(arg.shape)}: "
            f"{_GATHERED_IN_FORWARD}, or compute on param.full_tensor()"
        )
    return arg


def _refuse_mix(func, tensor, other, why: str):
    raise InvalidUsage(
        f"{func._schema.name} of a sharded parameter {list(tensor.shape)} with {why} {list(other.shape)}: "
        f"{_GATHERED_IN_FORWARD}; elsewhere use a tensor with the same placements, as torch.zeros_like(param) makes "
        "it, or compute on param.to_local()"
    )


# ---- Element by element.


def _run_local(func, args, kwargs):
    first = args[0]
    like = first if type(first) is RaggedTensor else _find(RaggedTensor, args, kwargs)
    if like is not first and isinstance(first, torch.Tensor) and _is_written(func._schema.arguments[0]):
        if not _is_replicated(first):
            _refuse_mix(func, like, first, "a write to a tensor that is placed otherwise")
        return _run_gathered(func, args, kwargs)
    if any(_is_replicated(each) and _is_larger(each, like) for each in (*args, *kwargs.values())):
        return _run_gathered(func, args, kwargs)
    made = func(
        *[_part_of(func, arg, like) if isinstance(arg, torch.Tensor) else arg for arg in args],
        **{key: _part_of(func, arg, like) if isinstance(arg, torch.Tensor) else arg for key, arg in kwargs.items()},
    )
    if isinstance(made, (list, tuple)):
        return type(made)(map(like.like, made))
    if not isinstance(made, torch.Tensor):
        return made
    returned = func._schema.returns[0].alias_info
    if returned is not None and returned.is_write:
        return kwargs.get("out", first)
    return like.like(made)


def _find(cls, args, kwargs):
    """Return the first argument of a class, also in a list."""
    for arg in (*args, *kwargs.values()):
        if type(arg) is cls:
            return arg
        if isinstance(arg, (list, tuple)) and (found := _find(cls, arg, {})) is not None:
            return found
    return None


def _part_of(func, arg: torch.Tensor, like: RaggedTensor) -> torch.Tensor:
    """Return an argument as a tensor that broadcasts with the local part of `like`."""
    if type(arg) is RaggedTensor:
        spec, own = arg._spec, like._spec
        if spec is own or (spec.placements, spec.mesh, arg.shape) == (own.placements, own.mesh, like.shape):
            return arg._local_tensor
        return _refuse_mix(func, like, arg, f"one of {spec.placements} on {spec.mesh}")
    if isinstance(arg, DTensor):
        if not _is_replicated(arg):
            return _refuse_mix(func, like, arg, f"a DTensor of {arg.placements}")
        arg = _whole(func, arg)
    elif arg.dim():
        return _refuse_mix(func, like, arg, "a plain tensor")
    if not arg.dim():
        return arg
    if not like.ragged.by_rows:
        return like.ragged.cut(arg.expand(like.shape), like.shard_rank)
    if arg.dim() < like.dim() or len(arg) == 1 != len(like):
        return arg  # broadcast over the rows
    return like.ragged.cut(arg, like.shard_rank)


def _count_writes(tensors) -> None:
    """Move the version counters: autograd doesn't for the elements of lists."""
    increment_version([each for each in tensors if isinstance(each, DTensor) and not each.is_inference()])


def _is_larger(arg: torch.Tensor, like: RaggedTensor) -> bool:
    """Return whether the result has another shape than `like` when both are broadcast."""
    if arg.dim() > like.dim():
        return True
    return any(size not in (1, other) for size, other in zip(reversed(arg.shape), reversed(like.shape), strict=False))


def _run_list(func, args, kwargs):
    """Run a foreach or fused operation on lists of local parts."""
    firsts = next(arg for arg in args if isinstance(arg, (list, tuple)))
    specs = [each._spec if type(each) is RaggedTensor else None for each in firsts]

    def locals_of(arg):
        if not isinstance(arg, (list, tuple)):
            return arg._local_tensor if isinstance(arg, DTensor) else arg
        if not arg or not isinstance(arg[0], torch.Tensor):
            return arg
        return [
            each._local_tensor
            if type(each) is RaggedTensor and each._spec is spec
            else _local_of_pair(func, each, first)
            for each, first, spec in zip(arg, firsts, specs, strict=True)
        ]

    made = func(*map(locals_of, args), **{key: locals_of(arg) for key, arg in kwargs.items()})
    written = list(_written_args(func, args, kwargs))
    for each in written:
        if type(each) is _GatheredView:
            each._origin.write_back(each._local_tensor)
    _count_writes(written)
    if made is None:
        return None
    return [_wrap_as(first, each) for each, first in zip(made, firsts, strict=True)]


def _local_of_pair(func, arg, first):
    """Return the local part of a list's element that goes with one of the first list."""
    if type(first) is RaggedTensor:
        if arg is first:
            return arg._local_tensor
        return _part_of(func, arg, first) if isinstance(arg, torch.Tensor) else arg
    if type(arg) is RaggedTensor:
        if not _is_replicated(first):
            _refuse_mix(func, arg, first, "a write to a tensor that is placed otherwise")
        return _gather(arg)
    return _whole(func, arg) if _is_replicated(arg) else arg


def _wrap_as(first, local: torch.Tensor):
    if type(first) is RaggedTensor:
        return first.like(local)
    return _replicated(local, first._spec.mesh) if _is_replicated(first) else local


def _is_replicated(arg) -> bool:
    return isinstance(arg, DTensor) and all(each.is_replicate() for each in arg.placements)


# ---- Norms and sums.


def _reduce_over_shards(tensor: RaggedTensor, values: torch.Tensor, op: str) -> torch.Tensor:
    """All-reduce values of the local parts over the ranks of a tensor's shards, in place."""
    if len(tensor.ragged.counts) > 1:
        _communicator(tensor._spec, values.device).all_reduce(values, op)
    return values


def norms_of(tensors: list[RaggedTensor], order: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the norms of tensors of one dtype that are sharded over the same ranks, as one plain tensor.

    A collective of these ranks. The order is above 0, or infinity.
    """
    parts = [each._local_tensor if each._local_tensor.numel() else each._local_tensor.new_zeros(1) for each in tensors]
    norms = torch.stack(torch._foreach_norm(parts, order, dtype=dtype))
    if order == float("inf"):
        return _reduce_over_shards(tensors[0], norms, "max")
    return (_reduce_over_shards(tensors[0], norms.double() ** order, "sum") ** (1 / order)).to(norms.dtype)


def _vector_norm(func, args, kwargs):
    order = args[1] if len(args) > 1 else 2
    if len(args) > 2 or kwargs.keys() - {"dtype"} or order <= 0:
        return _run_gathered(func, args, kwargs)
    return _replicated(norms_of([args[0]], order, **kwargs)[0], args[0]._spec.mesh)


def _foreach_norm(func, args, kwargs):
    tensors, order = args[0], args[1] if len(args) > 1 else 2
    mesh, dtype = tensors[0]._spec.mesh if type(tensors[0]) is RaggedTensor else None, tensors[0].dtype
    if order > 0 and all(
        type(each) is RaggedTensor and each._spec.mesh is mesh and each.dtype == dtype for each in tensors
    ):
        return [_replicated(norm, mesh) for norm in norms_of(tensors, order, **kwargs).unbind()]
    return [torch.linalg.vector_norm(each, order, **kwargs) for each in tensors]


def _sum(func, args, kwargs):
    total = func(args[0]._local_tensor, **kwargs)
    _reduce_over_shards(args[0], torch.view_as_real(total) if total.is_complex() else total, "sum")
    return _replicated(total, args[0]._spec.mesh)


def _check_finite_and_unscale(func, args, kwargs):
    grads, found_inf, inverse_scale = args
    others = [each for each in grads if type(each) is not RaggedTensor]
    if others:
        func(others, found_inf, inverse_scale)
    sharded = [each for each in grads if type(each) is RaggedTensor]
    func([each._local_tensor for each in sharded], found_inf, inverse_scale)
    for each in {each._spec.mesh: each for each in sharded}.values():
        _reduce_over_shards(each, found_inf, "max")


def _compare(func, args, kwargs):
    """Whether two tensors are equal, or close: the same answer on all ranks."""
    like = _find(RaggedTensor, args, kwargs)
    a, b = (_part_of(func, arg, like) for arg in args[:2])
    differs = torch.tensor([not func(a, b, *args[2:], **kwargs)], dtype=torch.int32, device=a.device)
    return not _reduce_over_shards(like, differs, "max").item()


# ---- The whole tensor.


def _run_gathered(func, args, kwargs):
    """Run an operation on whole tensors, and keep this rank's part of what it writes."""
    full: dict[int, torch.Tensor] = {}
    given: list[DTensor] = []

    def whole(arg):
        if isinstance(arg, (list, tuple)):
            return type(arg)(map(whole, arg))
        if not isinstance(arg, torch.Tensor):
            return arg
        if not isinstance(arg, DTensor):
            return _refuse_plain(func, arg)
        if id(arg) not in full:
            full[id(arg)] = _whole(func, arg)
            given.append(arg)
        return full[id(arg)]

    made = func(*map(whole, args), **{key: whole(arg) for key, arg in kwargs.items()})
    written = list(_written_args(func, args, kwargs))
    for arg in written:
        if type(arg) is RaggedTensor:
            _keep_part(func, arg, full[id(arg)])
        elif type(arg) is _GatheredView:
            arg._origin.write_back(arg._local_tensor)
    if func._schema.name.startswith("aten::_foreach_"):
        _count_writes(written)
    first = given[0]
    is_view = any(each.alias_info is not None for each in func._schema.returns)

    def wrap(each):
        if isinstance(each, (list, tuple)):
            return type(each)(map(wrap, each))
        if not isinstance(each, torch.Tensor):
            return each
        same = next((arg for arg in given if full[id(arg)] is each), None)
        if same is not None:
            return same
        result = _replicated(each, first._spec.mesh)
        if not is_view or type(first) is DTensor:
            return result
        view = _GatheredView(each, result._spec, requires_grad=False)
        view._origin = first._origin if type(first) is _GatheredView else _Origin(first, full[id(first)])
        return view

    return wrap(made)


def _whole(func, arg: DTensor) -> torch.Tensor:
    if type(arg) is RaggedTensor:
        return _gather(arg)
    if not _is_replicated(arg):
        raise InvalidUsage(
            f"{func._schema.name} of a sharded parameter with a DTensor of {arg.placements}: redistribute both first"
        )
    if type(arg) is _GatheredView:
        arg._origin.refresh()
    return arg._local_tensor


def _keep_part(func, tensor: RaggedTensor, full: torch.Tensor) -> None:
    if full.shape != tensor.shape:
        raise InvalidUsage(f"{func._schema.name} would change the shape of a sharded parameter {list(tensor.shape)}")
    tensor._local_tensor.copy_(tensor.ragged.cut(full, tensor.shard_rank))


def _run_random(func, args, kwargs):
    """Draw the numbers of the whole tensor, as one process would, and keep this rank's part."""
    like = _find(RaggedTensor, args, kwargs)
    is_in_place = _is_written(func._schema.arguments[0])

    def whole(arg):
        if type(arg) is not RaggedTensor:
            return arg._local_tensor if isinstance(arg, DTensor) else arg
        if is_in_place and arg is args[0]:  # its values don't matter to those that are drawn
            return torch.empty(arg.shape, dtype=arg.dtype, device=arg._local_tensor.device)
        return _gather(arg)

    def part_of(made):
        if isinstance(made, (list, tuple)):
            return type(made)(map(part_of, made))
        if made.shape != like.shape:
            return _replicated(made, like._spec.mesh)
        return like.like(like.ragged.cut(made, like.shard_rank).clone())

    made = part_of(func(*map(whole, args), **{key: whole(arg) for key, arg in kwargs.items()}))
    return args[0].copy_(made) if is_in_place else made


def _view(func, args, kwargs):
    tensor, size = args
    if tuple(size) != tuple(tensor.shape):
        return _run_gathered(func, args, kwargs)
    return tensor.like(tensor._local_tensor.view_as(tensor._local_tensor))


def _view_complex(func, args, kwargs):
    """View complex rows as real ones, or the other way round."""
    tensor, placement, local = args[0], args[0].ragged, args[0]._local_tensor
    shape = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")).shape
    if placement.by_rows and shape:
        made = func(local)
    elif tensor.is_complex():
        made = func(local).view(-1)
        placement = RaggedShard([2 * bound for bound in placement.bounds], by_rows=False)
    else:  # of what was cut as complex numbers
        made = func(local.reshape(-1, 2))
        placement = RaggedShard([bound // 2 for bound in placement.bounds], by_rows=False)
    return RaggedTensor.from_local(made, shape, tensor._spec.mesh, placement)


def _new(func, args, kwargs):
    tensor, size, *rest = args
    if tuple(size) != tuple(tensor.shape):
        return _replicated(func(tensor._local_tensor, size, *rest, **kwargs), tensor._spec.mesh)
    return tensor.like(func(tensor._local_tensor, tensor._local_tensor.shape, *rest, **kwargs))


_DISPATCH: dict[Any, Callable] = {
    aten.new_empty.default: _new,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_full.default: _new,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.sum.default: _sum,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_finite_and_unscale,
    aten.view.default: _view,
    aten.view_as_real.default: _view_complex,
    aten.view_as_complex.default: _view_complex,
    aten.equal.default: _compare,
    aten.allclose.default: _compare,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
}
