"""Broadcasts of parameters, optimizer state and objects before a training; gathers of objects.

A user's objects are pickled, as in Horovod, and unpickling runs code. The data comes from the same
program's other ranks, which the same user has started. Nothing else is unpickled: descriptions of
parameters, which the ranks compare, are JSON.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..arrays import TORCH_NAMES
from ..comm.agree import ComparedValue, verify_same
from ..errors import Mismatch
from ..secret import read_secret, seal, unseal
from ..torch_compat import tree_map
from .basics import current
from .operations import ReduceOp, allgather_async, allreduce_async_, broadcast_async_, synchronize
from .process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

_PURPOSE = "horovod/object"

_MAX_INLINE = 1024  # bytes; CPU tensors up to this size (step counts) are sent inside of the pickled structure


# ---- Objects.


def broadcast_object(obj, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set):
    """Return one rank's object on all ranks, as a copy on the others; blocks.

    It is pickled, by cloudpickle where plain pickle can't and cloudpickle is installed.

    Args:
        obj: The object; only that of ``root_rank`` is used.
        root_rank: The rank whose object is sent.
        name: The ranks' calls are matched by it. None: by their order, whatever the object's type.
        process_set: The ranks that take part.

    Raises:
        ValueError: On all ranks, where the object can't be pickled.
    """
    current().controller(process_set)
    mine = process_set.ranks[process_set.rank()] == root_rank
    picklable, data = _seal_pickle(obj) if mine else (True, torch.empty(0, dtype=torch.uint8, device="cpu"))
    head = torch.tensor([picklable, data.numel()], dtype=torch.int64, device="cpu")
    synchronize(broadcast_async_(head, root_rank, name and f"{name}.sz", process_set, _waits=True))
    picklable, nbytes = head.tolist()
    if not mine:
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    synchronize(broadcast_async_(data, root_rank, name and f"{name}.t", process_set, _waits=True))
    if not picklable:
        raise ValueError(f"broadcast_object: rank {root_rank}'s object can't be pickled: {_to_text(data)}")
    return obj if mine else _unpickle(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function of one argument, the object, that calls `broadcast_object` with these
    arguments.
    """
    return functools.partial(broadcast_object, root_rank=root_rank, name=name, process_set=process_set)


def allgather_object(obj, name: str | None = None, process_set: ProcessSet = global_process_set) -> list:
    """Return a list of all ranks' objects, in rank order; blocks.

    Pickles as `broadcast_object` does.

    Args:
        obj: This rank's object.
        name: As in `broadcast_object`.
        process_set: The ranks that take part.

    Raises:
        ValueError: On all ranks, where one rank's object can't be pickled.
    """
    picklable, data = _seal_pickle(obj)
    head = torch.tensor([[picklable, data.numel()]], dtype=torch.int64, device="cpu")
    heads = synchronize(allgather_async(head, name and f"{name}.sz", process_set, _waits=True)).tolist()
    joined = synchronize(allgather_async(data, name and f"{name}.t", process_set, _waits=True))
    parts = joined.split([nbytes for _, nbytes in heads])
    for rank, (picklable, _), part in zip(process_set.ranks, heads, parts, strict=True):
        if not picklable:
            raise ValueError(f"allgather_object: rank {rank}'s object can't be pickled: {_to_text(part)}")
    return [_unpickle(part) for part in parts]


def try_pickle(obj) -> tuple[bool, torch.Tensor]:
    """Return (True, the pickle's bytes) or (False, the reason's bytes), as uint8 tensors."""
    try:
        data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the object's own __reduce__ may raise anything
        try:
            import cloudpickle

            data = cloudpickle.dumps(obj)
        except ImportError:
            reason = f"{type(obj).__name__}: {error} (with the package cloudpickle installed more can be)"
            return False, _to_tensor(reason.encode())
        except Exception as second:
            return False, _to_tensor(f"{type(obj).__name__}: {second}".encode())
    return True, _to_tensor(data)


def _seal_pickle(obj) -> tuple[bool, torch.Tensor]:
    """Return what `try_pickle` does, a pickle with the HMAC of the job's secret where there is one."""
    picklable, data = try_pickle(obj)
    if picklable and read_secret() is not None:
        data = _to_tensor(seal(data.numpy().tobytes(), _PURPOSE))
    return picklable, data


def _unpickle(data: torch.Tensor):
    """Return the object of a pickle, verified first where the job has a secret."""
    if read_secret() is None:
        return pickle.loads(memoryview(data.numpy()))
    return pickle.loads(unseal(data.numpy().tobytes(), _PURPOSE))


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode(errors="replace")


# ---- Parameters.


def broadcast_parameters(params, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Broadcast one rank's values of parameters and buffers to all ranks, in place; blocks.

    Any dtype, device and strides.

    Args:
        params: A state dict, ``model.named_parameters()``, ``model.parameters()``, or a list of
            tensors or of (name, tensor). None is skipped. Any other value that isn't a tensor is
            pickled, and replaced in a dict.
        root_rank: The rank whose values are sent.
        process_set: The ranks that take part.

    Raises:
        ValueError: On all ranks, where they have different names, shapes or dtypes; it names the
            differences.
    """
    current().controller(process_set)
    entries = _named_entries(params)
    tensors = [(name, value) for name, value in entries if isinstance(value, torch.Tensor)]
    objects = [name for name, value in entries if value is not None and not isinstance(value, torch.Tensor)]
    if objects and not isinstance(params, dict):
        raise ValueError(f"broadcast_parameters: {objects[0]!r} isn't a tensor: in a dict it could be")
    described = [(name, _describe(value)) for name, value in tensors] + [(name, "an object") for name in objects]
    _verify_same("broadcast_parameters", described, process_set)
    _broadcast_tensors([value for _, value in tensors], [name for name, _ in tensors], root_rank, process_set)
    if objects:
        params.update(broadcast_object({name: params[name] for name in objects}, root_rank, None, process_set))


def _named_entries(params) -> list[tuple[str, Any]]:
    if isinstance(params, dict):
        return sorted(params.items(), key=lambda entry: str(entry[0]))
    if isinstance(params, torch.Tensor) or isinstance(params, str | bytes) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}: it must be a dict, or tensors or (name, tensor)")
    listed = [each if isinstance(each, tuple) else (f"parameter {i}", each) for i, each in enumerate(params)]
    wrong = next((each for each in listed if len(each) != 2), None)
    if wrong is not None:
        raise ValueError(f"broadcast_parameters takes tensors or (name, tensor), not tuples of {len(wrong)}")
    return listed


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {TORCH_NAMES[tensor.dtype]} on {tensor.device.type}"


class NegotiatedComm:
    """A process set, with the calls of a `Communicator` that `comm.agree` makes.

    They are negotiated like the user's operations, in the order of the ranks' calls, because other
    threads' operations may be under way. Raises `HorovodInternalError` as these do.
    """

    device = torch.device("cpu")

    def __init__(self, process_set: ProcessSet):
        self._process_set = process_set
        self.rank = process_set.rank()
        self.size = process_set.size()

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        synchronize(allreduce_async_(tensor, op=ReduceOp[op.capitalize()], process_set=self._process_set, _waits=True))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        out.copy_(synchronize(allgather_async(inp, None, self._process_set, _waits=True)))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        root_rank = self._process_set.ranks[root]
        synchronize(broadcast_async_(tensor, root_rank, None, self._process_set, _waits=True))


def _verify_same(what: str, described: list[tuple[str, str]], process_set: ProcessSet) -> None:
    """Raise `ValueError` on all ranks where their lists of (name, description) differ."""
    text = f"{what}: the ranks don't have the same"
    try:
        verify_same(NegotiatedComm(process_set), text, ComparedValue(described), ranks=process_set.ranks)
    except Mismatch as error:
        raise ValueError(error.message) from None


def _broadcast_tensors(tensors: list[torch.Tensor], names: list[str], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast tensors in place, all of them at once; blocks."""
    handles, copies = [], []
    with torch.no_grad():
        for number, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            sent = tensor.detach()
            if not sent.is_contiguous():
                sent = sent.contiguous()
                copies.append((tensor, sent))
            handles.append(broadcast_async_(sent, root_rank, f"parameters.{number}.{name}", process_set))
        for handle in handles:
            synchronize(handle)
        for tensor, sent in copies:
            tensor.copy_(sent)
    # The engine has written by pointer. Autograd and our optimizers' master weights look at the
    # version.
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


# ---- Optimizers.


@dataclass(frozen=True)
class _TensorPlaceholder:
    """Placeholder for a tensor in a structure that is sent without it."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: str

    def empty(self, device: torch.device) -> torch.Tensor:
        where = device if self.device == device.type else torch.device("cpu")
        if self.strides is not None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=where)
        return torch.empty(self.shape, dtype=self.dtype, device=where)


def _zero_gradients(optimizer) -> None:
    """Give trainable parameters zero gradients: sparse ones for SparseAdam, which takes no others."""
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for param in (each for group in optimizer.param_groups for each in group["params"]):
        if param.requires_grad and sparse:
            param.grad = torch.sparse_coo_tensor(param.shape, dtype=param.dtype, device=param.device)
        elif param.requires_grad:
            param.grad = torch.zeros_like(param)


def broadcast_optimizer_state(optimizer, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Broadcast one rank's optimizer state and options (learning rates, ...) to all ranks; blocks.

    The others may have other state, or none yet, as after a resume on one rank. No step is taken,
    so that parameters don't change. Numbers, lists and dicts in the state keep their types. As in
    Horovod, where an optimizer has no state yet its trainable parameters have zero gradients
    afterwards.

    Args:
        optimizer: The optimizer.
        root_rank: The rank whose state is sent.
        process_set: The ranks that take part.

    Raises:
        ValueError: For LBFGS; and on all ranks, where the optimizers' classes, groups or parameters
            differ: it names the differences.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: its state_dict() goes by hvd.broadcast_object")
    world = current()
    world.controller(process_set)
    described = [("the class", type(optimizer).__name__)]
    for number, group in enumerate(optimizer.param_groups):
        forms = ((f"parameter {i} of group {number}", _describe(param)) for i, param in enumerate(group["params"]))
        described += [(f"group {number}", f"of {len(group['params'])} parameters"), *forms]
    _verify_same("broadcast_optimizer_state", described, process_set)
    if not optimizer.state:
        _zero_gradients(optimizer)
    mine = world.rank == root_rank
    tensors: list[torch.Tensor] = []

    def remove_tensor(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_sparse or (leaf.device.type == "cpu" and leaf.nbytes <= _MAX_INLINE):
            return leaf.detach().clone()  # the pickle of a view has its whole storage
        tensors.append(leaf.detach())
        dense = torch.ops.aten.is_non_overlapping_and_dense(leaf)
        strides = tuple(leaf.stride()) if dense else None
        return _TensorPlaceholder(len(tensors) - 1, tuple(leaf.shape), strides, leaf.dtype, leaf.device.type)

    def allocate_tensor(leaf):
        if not isinstance(leaf, _TensorPlaceholder):
            return leaf
        tensors.append(leaf.empty(world.comm.device))
        return tensors[-1]

    structure = tree_map(remove_tensor, optimizer.state_dict()) if mine else None
    structure = broadcast_object(structure, root_rank, None, process_set)
    state = None if mine else tree_map(allocate_tensor, structure)
    _broadcast_tensors(tensors, [f"state {number}" for number in range(len(tensors))], root_rank, process_set)
    if not mine:
        optimizer.load_state_dict(state)
