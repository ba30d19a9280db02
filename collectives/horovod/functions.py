"""Rank 0's parameters, optimizer state and objects on all ranks: the broadcasts before a training.

Objects are pickled, as Horovod does it, and unpickling runs code: what arrives is what the same program's other ranks,
started by the same user, have sent. Nothing else is ever unpickled here.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..torch_compat import tree_map
from .basics import current
from .messages import DTYPE_NAMES
from .operations import allgather_async, broadcast_async_, synchronize
from .process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

_INLINE = 1024  # bytes; CPU tensors up to this size (step counts) go with the pickled structure around them
_SHOWN = 5  # differences in one message


# ---- Objects.


def broadcast_object(obj, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set):
    """Give ``root_rank``'s object on all ranks, where it is a copy; blocks.

    It is pickled (by cloudpickle, where plain pickle can't and it is installed). ``name``: the ranks' calls meet by it;
    None: in the order of the calls, whatever the object's type. `ValueError` on all ranks where it can't be pickled.
    """
    current().coordinator(process_set)
    mine = process_set.ranks[process_set.rank()] == root_rank
    good, data = pickled(obj) if mine else (True, torch.empty(0, dtype=torch.uint8))
    head = torch.tensor([good, data.numel()], dtype=torch.int64)
    synchronize(broadcast_async_(head, root_rank, name and f"{name}.sz", process_set, _waits=True))
    good, nbytes = head.tolist()
    if not mine:
        data = torch.empty(nbytes, dtype=torch.uint8)
    synchronize(broadcast_async_(data, root_rank, name and f"{name}.t", process_set, _waits=True))
    if not good:
        raise ValueError(f"broadcast_object: rank {root_rank}'s object can't be pickled: {_text(data)}")
    return obj if mine else pickle.loads(memoryview(data.numpy()))


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Give a function of an object alone that does `broadcast_object`."""

    def broadcast(obj):
        return broadcast_object(obj, root_rank, name, process_set)

    return broadcast


def allgather_object(obj, name: str | None = None, process_set: ProcessSet = global_process_set) -> list:
    """Give a list of all ranks' objects, in rank order; blocks. Pickles as `broadcast_object` does.

    `ValueError` on all ranks where one's object can't be pickled.
    """
    good, data = pickled(obj)
    head = torch.tensor([[good, data.numel()]], dtype=torch.int64)
    heads = synchronize(allgather_async(head, name and f"{name}.sz", process_set, _waits=True)).tolist()
    joined = synchronize(allgather_async(data, name and f"{name}.t", process_set, _waits=True))
    parts = joined.split([nbytes for _, nbytes in heads])
    for rank, (good, _), part in zip(process_set.ranks, heads, parts, strict=True):
        if not good:
            raise ValueError(f"allgather_object: rank {rank}'s object can't be pickled: {_text(part)}")
    return [pickle.loads(memoryview(part.numpy())) for part in parts]


def pickled(obj) -> tuple[bool, torch.Tensor]:
    """Give whether it could be pickled, and the pickle's bytes, or those of the reason."""
    try:
        data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # of the object's own __reduce__, too
        try:
            import cloudpickle

            data = cloudpickle.dumps(obj)
        except ImportError:
            reason = f"{type(obj).__name__}: {error} (with the package cloudpickle installed more can be)"
            return False, _bytes(reason.encode())
        except Exception as second:
            return False, _bytes(f"{type(obj).__name__}: {second}".encode())
    return True, _bytes(data)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode(errors="replace")


# ---- Parameters.


def broadcast_parameters(params, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give all ranks ``root_rank``'s values of parameters and buffers, in place; blocks.

    ``params``: a state dict, ``model.named_parameters()``, ``model.parameters()``, or a list of tensors or of (name,
    tensor). None is left out. What else isn't a tensor is pickled, and replaced in a dict. Any dtype, device and
    strides. `ValueError` on all ranks that names what differs where they don't have the same names, shapes and dtypes.
    """
    current().coordinator(process_set)
    entries = _entries(params)
    tensors = [(name, value) for name, value in entries if isinstance(value, torch.Tensor)]
    objects = [name for name, value in entries if value is not None and not isinstance(value, torch.Tensor)]
    if objects and not isinstance(params, dict):
        raise ValueError(f"broadcast_parameters: {objects[0]!r} isn't a tensor: in a dict it could be")
    told = [(name, _form(value)) for name, value in tensors] + [(name, "an object") for name in objects]
    _compare("broadcast_parameters", told, process_set)
    _send([value for _, value in tensors], [name for name, _ in tensors], root_rank, process_set)
    if objects:
        params.update(broadcast_object({name: params[name] for name in objects}, root_rank, None, process_set))


def _entries(params) -> list[tuple[str, Any]]:
    if isinstance(params, dict):
        return sorted(params.items(), key=lambda entry: str(entry[0]))
    if isinstance(params, torch.Tensor) or isinstance(params, str | bytes) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}: it must be a dict, or tensors or (name, tensor)")
    listed = [each if isinstance(each, tuple) else (f"parameter {i}", each) for i, each in enumerate(params)]
    wrong = next((each for each in listed if len(each) != 2), None)
    if wrong is not None:
        raise ValueError(f"broadcast_parameters takes tensors or (name, tensor), not tuples of {len(wrong)}")
    return listed


def _form(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {DTYPE_NAMES[tensor.dtype]} on {tensor.device.type}"


def _compare(what: str, told: list[tuple[str, str]], process_set: ProcessSet) -> None:
    """Raise `ValueError` on all ranks where they don't have the same list of (name, what it is)."""
    digest = hashlib.sha256(repr(told).encode()).digest()
    rows = synchronize(allgather_async(_bytes(digest)[None], None, process_set, _waits=True))
    if bool((rows == rows[0]).all()):
        return
    lists = allgather_object(told, None, process_set)
    first = process_set.ranks[0]
    for rank, theirs in zip(process_set.ranks[1:], lists[1:], strict=True):
        if theirs != lists[0]:
            raise ValueError(f"{what}: ranks {first} and {rank} don't have the same: {_unlike(lists[0], theirs)}")


def _unlike(ours: list, theirs: list) -> str:
    mine, other = dict(ours), dict(theirs)
    found = [f"{name!r} is {form} and {other[name]}" for name, form in ours if other.get(name, form) != form]
    found += [f"{name!r} is on the first alone" for name in mine if name not in other]
    found += [f"{name!r} is on the second alone" for name in other if name not in mine]
    if not found:
        pairs = zip(ours, theirs, strict=False)
        at = next((i for i, (one, two) in enumerate(pairs) if one != two), min(len(ours), len(theirs)))
        found = [f"the order, from number {at} on, or how often a name is there"]
    return "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _send(tensors: list[torch.Tensor], names: list[str], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast all of them side by side."""
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
    # What was written by pointer must be seen by what looks at the version: autograd, and our optimizers' masters.
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


# ---- Optimizers.


@dataclass(frozen=True)
class _Hole:
    """Where a tensor goes in a structure that is sent without it."""

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


def broadcast_optimizer_state(optimizer, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give all ranks ``root_rank``'s optimizer state and options (learning rates, ...); blocks.

    The others may have other state, or none yet, as after a resume on one rank; no step is taken for it, so that
    parameters stay as they are. Numbers, lists and dicts in the state keep their types. `ValueError` for LBFGS, and on
    all ranks that names what differs where the optimizers are of different classes, groups or parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: its state_dict() goes by hvd.broadcast_object")
    world = current()
    world.coordinator(process_set)
    told = [("the class", type(optimizer).__name__)]
    for number, group in enumerate(optimizer.param_groups):
        forms = ((f"parameter {i} of group {number}", _form(param)) for i, param in enumerate(group["params"]))
        told += [(f"group {number}", f"of {len(group['params'])} parameters"), *forms]
    _compare("broadcast_optimizer_state", told, process_set)
    mine = world.rank == root_rank
    tensors: list[torch.Tensor] = []

    def take_out(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_sparse or (leaf.device.type == "cpu" and leaf.nbytes <= _INLINE):
            return leaf.detach().clone()  # a view would take its whole storage along
        tensors.append(leaf.detach())
        dense = torch.ops.aten.is_non_overlapping_and_dense(leaf)
        strides = tuple(leaf.stride()) if dense else None
        return _Hole(len(tensors) - 1, tuple(leaf.shape), strides, leaf.dtype, leaf.device.type)

    def put_in(leaf):
        if not isinstance(leaf, _Hole):
            return leaf
        tensors.append(leaf.empty(world.comm.device))
        return tensors[-1]

    structure = tree_map(take_out, optimizer.state_dict()) if mine else None
    structure = broadcast_object(structure, root_rank, None, process_set)
    state = None if mine else tree_map(put_in, structure)
    _send(tensors, [f"state {number}" for number in range(len(tensors))], root_rank, process_set)
    if not mine:
        optimizer.load_state_dict(state)
