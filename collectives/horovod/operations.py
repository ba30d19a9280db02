"""Asynchronous operations, which return handles, and what is done with handles and process sets."""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
import warnings
import weakref
from collections.abc import Sequence
from enum import IntEnum

import torch

from ..arrays import TORCH_CODES, TORCH_NAMES
from ..cuda_state import has_completed
from .basics import World, current
from .controller import Controller
from .exceptions import HorovodInternalError
from .messages import CAST_DTYPES, CachedRequest, Request, TensorTableEntry, cached_request
from .process_sets import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "OP_NAMES",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter_async",
    "remove_process_set",
    "sparse_allreduce_async",
    "synchronize",
]


class ReduceOp(IntEnum):
    """Reductions, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp
# In a `Request`.
OP_NAMES = {Average: "avg", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "prod"}


# ---- Handles.

_handle_ids = itertools.count(1)
_handles: dict[int, tuple[Controller | None, TensorTableEntry, bool]] = {}  # True: the result is a list
_handles_world: weakref.ref | None = None  # the world of the handles


def _submit(controller: Controller, entry: TensorTableEntry, grouped: bool, waits: bool = False):
    """Submit an operation and return its handle.

    ``waits``: the caller synchronizes it next, and then it has no number, but is its handle itself.
    """
    world = current()
    if _handles_world is None or _handles_world() is not world:
        _drop_ended_jobs(world)
    controller.submit(entry, waits)
    if waits:
        return controller, entry, grouped
    handle = next(_handle_ids)
    _handles[handle] = controller, entry, grouped
    return handle


def _drop_ended_jobs(world: World) -> None:
    """Drop the handles of ended jobs that were not synchronized.

    For failed operations the error's text is kept.
    """
    global _handles_world
    _handles_world = weakref.ref(world)
    for handle, (controller, entry, _) in list(_handles.items()):
        if controller is None:
            continue
        if entry.error is None:
            _handles.pop(handle, None)
        else:  # its traceback and causes would keep the controller with its buffers
            entry.error = HorovodInternalError(str(entry.error))
            _handles[handle] = None, entry, False


def poll(handle: int) -> bool:
    """Return whether an operation has ended, so that `synchronize` won't block. Never blocks."""
    known = _handles.get(handle)
    if known is None:
        raise ValueError(f"handle {handle} is unknown, or was synchronized before")
    finished = known[1].finish_event
    return known[1].done and (finished is None or has_completed(finished))


def synchronize(handle: int):
    """Wait for an operation and return its result.

    Blocks on the host, and on CUDA makes the current stream wait.

    Args:
        handle: The operation's handle.

    Returns:
        The result; None for a handle that was synchronized before.

    Raises:
        HorovodInternalError: Where the operation failed.
    """
    if handle.__class__ is tuple:  # of a blocking operation
        controller, entry, grouped = handle
    elif callable(handle):  # a handle of sparse_allreduce_async
        return handle()
    else:
        known = _handles.pop(handle, None)
        if known is None:
            return None
        controller, entry, grouped = known
    if controller is None:
        raise entry.error
    controller.wait(entry)
    results = entry.results
    if entry.request.kind == "alltoall":
        return tuple(results)
    return results if grouped else results[0] if results else None


# ---- Checks of arguments.


def _check_tensors(kind: str, tensors, in_place: bool = False) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise ValueError(f"grouped_{kind} takes a list of tensors, not {type(tensors).__name__}")
    return [_check_tensor(kind, each, in_place) for each in tensors]


def _check_tensor(kind: str, tensor, in_place: bool = False) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{kind} takes a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not _STRIDED or tensor.is_quantized or tensor.is_meta:
        if tensor.is_sparse:
            raise ValueError(f"{kind} of a sparse tensor: sparse_allreduce_async takes it, or .to_dense()")
        raise ValueError(f"{kind} takes plain tensors, not one of {tensor.layout}, {tensor.dtype}, {tensor.device}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    elif tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    if tensor.is_neg() or tensor.is_conj():  # its memory holds other values
        if in_place:
            raise ValueError(f"{kind} in place: the tensor is a lazy view: pass .resolve_neg().resolve_conj() of it")
        tensor = tensor.resolve_neg().resolve_conj()
    if tensor.is_contiguous():
        return tensor
    if in_place:
        raise ValueError(
            f"{kind} in place: the tensor must be contiguous, not of shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}: pass .contiguous(), or use the form that isn't in place"
        )
    return tensor.contiguous()


def _make_request(kind: str, controller: Controller, tensors, name, **rest) -> CachedRequest:
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name must be a str, not {name!r}")
    device = "cpu"
    if tensors:
        place = tensors[0].device
        if len(tensors) > 1 and len(devices := {tensor.device for tensor in tensors}) > 1:
            raise ValueError(f"{kind}: a group's tensors must be on one device, not on {sorted(map(str, devices))}")
        device = place.type
        comms = controller.comms
        if device not in comms or (device != "cpu" and place != comms[device].device):
            there = ", ".join(str(comm.device) for comm in comms.values())
            raise ValueError(
                f"{kind}: the tensor is on {place}, this rank works on {there}: move it there (on GPUs "
                "torch.cuda.set_device(hvd.local_rank()) before anything is made)"
            )
    dtypes, shapes = tuple([TORCH_NAMES[t.dtype] for t in tensors]), tuple([tuple(t.shape) for t in tensors])
    return cached_request(Request(kind, name or "", dtypes, shapes, device, **rest))


def _reduction_options(kind: str, tensors, average, op, prescale, postscale, compression=None) -> dict:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        op = Average if average else Sum
    ours = "avg" if op is None else OP_NAMES.get(op) if isinstance(op, int) and not isinstance(op, bool) else None
    if ours is None:
        raise ValueError(f"{kind}: op must be hvd.Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    if kind == "reducescatter" and op == Adasum:
        raise RuntimeError("reducescatter by Adasum: Adasum is of allreduce alone")  # Horovod's class of error
    for what, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if factor != 1.0 and not (isinstance(factor, numbers.Real) and math.isfinite(factor)):
            raise ValueError(f"{kind}: {what} must be a finite number, not {factor!r}")
    for tensor in tensors:
        if tensor.dtype is torch.float32:
            continue
        if tensor.dtype not in TORCH_CODES and (kind == "reducescatter" or tensor.dtype not in CAST_DTYPES):
            raise ValueError(f"{kind}: elements of {tensor.dtype} can't be reduced")
        if ours == "adasum" and not tensor.dtype.is_floating_point:
            raise ValueError(f"{kind}: Adasum takes floating types, not {tensor.dtype}")
        if ours == "avg" and tensor.dtype == torch.bool:
            raise ValueError(f"{kind}: there is no average of {tensor.dtype}: use Sum, Min, Max or Product")
    wire = "" if compression is None else getattr(compression, "wire", "")
    return {"op": ours, "prescale": float(prescale), "postscale": float(postscale), "wire": wire}


# ---- The operations.


_STRIDED = torch.strided
_MAX_KNOWN_REQUESTS = 4096
_OP_TYPES = (type(None), int, ReduceOp)  # 1.0 and True would be found as the op that is 1


def _known_request(controller: Controller, arguments: tuple) -> CachedRequest | None:
    """Return the request of an operation on one tensor that was called with these arguments before.

    An argument that can't be hashed isn't valid, and was never kept.
    """
    try:
        return controller.known_requests.get(arguments)
    except TypeError:
        return None


def _keep_request(controller: Controller, arguments: tuple, cached: CachedRequest) -> None:
    known = controller.known_requests
    if len(known) >= _MAX_KNOWN_REQUESTS:
        known.clear()
    known[arguments] = cached


def _allreduce(
    tensors, average, name, op, prescale, postscale, process_set, in_place, grouped, waits, compression=None
):  # fmt: skip
    controller = current().controller(process_set)
    if grouped:
        checked = _check_tensors("allreduce", tensors, in_place)
        reduction = _reduction_options("allreduce", checked, average, op, prescale, postscale, compression)
        cached = _make_request("allreduce", controller, checked, name, **reduction)
        return _submit(controller, TensorTableEntry(cached, checked, checked if in_place else None), True, waits)
    tensor = _check_tensor("allreduce", tensors, in_place)
    arguments = name, tensor.dtype, tensor.shape, tensor.device, op, prescale, postscale, compression
    plain = average is None and op.__class__ in _OP_TYPES
    cached = _known_request(controller, arguments) if plain else None
    if cached is None:
        reduction = _reduction_options("allreduce", [tensor], average, op, prescale, postscale, compression)
        cached = _make_request("allreduce", controller, [tensor], name, **reduction)
        if plain:
            _keep_request(controller, arguments, cached)
    return _submit(controller, TensorTableEntry(cached, [tensor], [tensor] if in_place else None), False, waits)


def allreduce_async(
    tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set, *, _waits=False, _compression=None,
):  # fmt: skip
    """Start to reduce a tensor over the ranks; `synchronize` returns the result, a new tensor.

    Doesn't block. C: ncclAllReduce.

    Args:
        tensor: The tensor, of NCCL's dtypes, int16 or bool, with the same shape and dtype on all
            ranks.
        average: The deprecated form of ``op``.
        name: The ranks' operations are matched by it, in any order. None: they are matched in the
            order of the calls.
        op: The reduction. None: `Average`.
        prescale_factor: What the tensor is multiplied by before the reduction.
        postscale_factor: What the result is multiplied by.
        process_set: The ranks that take part.

    Returns:
        A handle, for `synchronize` and `poll`.
    """
    return _allreduce(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, False, False, _waits, _compression
    )


def allreduce_async_(
    tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set, *, _waits=False, _compression=None,
):  # fmt: skip
    """As `allreduce_async`, in place: don't use the tensor before `synchronize`."""
    return _allreduce(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, True, False, _waits, _compression
    )


def grouped_allreduce_async(
    tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set, *, _waits=False, _compression=None,
):  # fmt: skip
    """As `allreduce_async` for a list of tensors, which are reduced together, or not at all.

    The result is a list. The other arguments are those of `allreduce_async`.
    """
    return _allreduce(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, False, True, _waits, _compression
    )


def grouped_allreduce_async_(
    tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set, *, _waits=False, _compression=None,
):  # fmt: skip
    """As `grouped_allreduce_async`, in place."""
    return _allreduce(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, True, True, _waits, _compression
    )


def sparse_allreduce_async(tensor, name, op, process_set=global_process_set):
    """Start to reduce a sparse tensor; its result has all ranks' entries.

    The number of entries may differ between the ranks. Sends indices and values, by allgather.

    Args:
        tensor: The tensor (``torch.sparse_coo``).
        name: As in `allreduce_async`.
        op: `Sum` or `Average`.
        process_set: The ranks that take part.

    Returns:
        A function, which `synchronize` accepts: it waits and returns the coalesced result.
    """
    if not tensor.is_sparse:
        raise ValueError(f"sparse_allreduce_async takes a sparse tensor, not one of {tensor.layout}")
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors are reduced by hvd.Average or hvd.Sum, not {op!r}")
    entries = tensor.detach().coalesce()
    # Indices have a column for each entry; they are gathered as rows.
    indices = allgather_async(entries.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(entries.values(), f"{name}.values", process_set)
    size = process_set.size()

    def finish() -> torch.Tensor:
        rows, elements = synchronize(indices), synchronize(values)
        if op == Average:
            elements = elements / size if elements.is_floating_point() else elements // size
        return torch.sparse_coo_tensor(
            rows.t(), elements, tensor.shape, check_invariants=False, device=tensor.device
        ).coalesce()

    return finish


def _allgather(tensors, name, process_set, grouped, waits):
    controller = current().controller(process_set)
    checked = _check_tensors("allgather", tensors) if grouped else [_check_tensor("allgather", tensors)]
    arguments = None if grouped else ("allgather", name, checked[0].dtype, checked[0].shape, checked[0].device)
    cached = _known_request(controller, arguments)
    if cached is None:
        for tensor in checked:
            if not tensor.dim():
                text = "allgather joins tensors along their first dimension, and a scalar has none: use [None]"
                raise ValueError(text)
        cached = _make_request("allgather", controller, checked, name)
        if arguments:
            _keep_request(controller, arguments, cached)
    return _submit(controller, TensorTableEntry(cached, checked), grouped, waits)


def allgather_async(tensor, name=None, process_set=global_process_set, *, _waits=False):
    """Start to concatenate the ranks' tensors along dimension 0, in rank order.

    C: ncclAllGather, ncclBroadcast.

    Args:
        tensor: The tensor, of any dtype. Shapes are the same on all ranks but for the first
            dimension, which may be 0.
        name: As in `allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        A handle, for `synchronize` and `poll`.
    """
    return _allgather(tensor, name, process_set, False, _waits)


def grouped_allgather_async(tensors, name=None, process_set=global_process_set, *, _waits=False):
    """As `allgather_async` for a list of tensors; the result is a list."""
    return _allgather(tensors, name, process_set, True, _waits)


def _broadcast(tensor, root_rank, name, process_set, in_place, waits):
    controller = current().controller(process_set)
    checked = _check_tensor("broadcast", tensor, in_place)
    arguments = "broadcast", name, checked.dtype, checked.shape, checked.device, root_rank
    cached = _known_request(controller, arguments) if root_rank.__class__ is int else None
    if cached is None:
        ranks = process_set.ranks
        if isinstance(root_rank, bool) or not isinstance(root_rank, numbers.Integral) or root_rank not in ranks:
            raise ValueError(f"broadcast: root_rank must be one of the ranks {ranks}, not {root_rank!r}")
        cached = _make_request("broadcast", controller, [checked], name, root=ranks.index(root_rank))
        if root_rank.__class__ is int:
            _keep_request(controller, arguments, cached)
    return _submit(controller, TensorTableEntry(cached, [checked], [checked] if in_place else None), False, waits)


def broadcast_async(tensor, root_rank, name=None, process_set=global_process_set, *, _waits=False):
    """Start to send one rank's tensor to all; the result is a new tensor. C: ncclBroadcast.

    Args:
        tensor: The tensor, of any dtype.
        root_rank: The rank whose tensor is sent.
        name: As in `allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        A handle, for `synchronize` and `poll`.
    """
    return _broadcast(tensor, root_rank, name, process_set, False, _waits)


def broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set, *, _waits=False):
    """As `broadcast_async`, in place."""
    return _broadcast(tensor, root_rank, name, process_set, True, _waits)


def alltoall_async(tensor, splits=None, name=None, process_set=global_process_set, *, _waits=False):
    """Start to send rows of a tensor to each rank.

    `synchronize` returns the received rows, concatenated in rank order, and the number of rows from
    each rank, int32. C: ncclSend and ncclRecv in a group.

    Args:
        tensor: The tensor, of any dtype.
        splits: The number of rows for each rank, a list or an integer tensor. None: equal parts.
        name: As in `allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        A handle, for `synchronize` and `poll`.
    """
    controller = current().controller(process_set)
    checked = _check_tensor("alltoall", tensor)
    if not checked.dim():
        raise ValueError("alltoall sends rows along the first dimension, and a scalar has none")
    try:
        splits = _parse_splits(checked.shape[0], splits, controller.size)
    except ValueError as error:
        _refuse("alltoall", controller, checked, name, error)
        raise
    cached = _make_request("alltoall", controller, [checked], name)
    return _submit(controller, TensorTableEntry(cached, [checked], splits=splits), False, _waits)


def _parse_splits(available: int, splits, size: int) -> list[int] | None:
    """Return the rows for each of `size` ranks, of those that are available; None for equal parts."""
    if splits is None:
        if available % size:
            raise ValueError(f"alltoall: {available} rows can't be shared evenly by {size} ranks: pass splits")
        return None
    splits = splits.tolist() if hasattr(splits, "tolist") else list(splits)  # a tensor or a NumPy array
    whole = all(isinstance(rows, int) and not isinstance(rows, bool) and rows >= 0 for rows in splits)
    if not whole or len(splits) != size:
        raise ValueError(f"alltoall: splits must be {size} numbers of rows from 0 up, not {splits}")
    if sum(splits) > available:
        raise ValueError(f"alltoall: splits add up to {sum(splits)}, and there are {available} rows")
    return splits


def _refuse(kind: str, controller: Controller, tensor: torch.Tensor, name, error: ValueError) -> None:
    """Tell the other ranks why this one can't take part in an operation; blocks until they have submitted it."""
    cached = _make_request(kind, controller, [tensor], name, refusal=f"{type(error).__name__}: {error}"[:400])
    entry = TensorTableEntry(cached, [])
    controller.submit(entry, True)
    with contextlib.suppress(HorovodInternalError):  # the caller raises this rank's own error
        controller.wait(entry)


def _reducescatter(tensors, name, op, process_set, prescale, postscale, grouped, waits):
    controller = current().controller(process_set)
    checked = _check_tensors("reducescatter", tensors) if grouped else [_check_tensor("reducescatter", tensors)]
    for tensor in checked:
        if not tensor.dim():
            raise ValueError("reducescatter shares out the first dimension, and a scalar has none")
    reduction = _reduction_options("reducescatter", checked, None, op, prescale, postscale)
    cached = _make_request("reducescatter", controller, checked, name, **reduction)
    return _submit(controller, TensorTableEntry(cached, checked), grouped, waits)


def reducescatter_async(
    tensor, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0, *,
    _waits=False,
):  # fmt: skip
    """Start to reduce a tensor and scatter its rows.

    The first ranks get one more row where the rows can't be split evenly. C: ncclReduceScatter.

    Args:
        tensor: The tensor, of NCCL's dtypes, with the same shape and dtype on all ranks.
        name: As in `allreduce_async`.
        op: The reduction.
        process_set: The ranks that take part.
        prescale_factor: What the tensor is multiplied by before the reduction.
        postscale_factor: What the result is multiplied by.

    Returns:
        A handle, for `synchronize` and `poll`.
    """
    return _reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor, False, _waits)


def grouped_reducescatter_async(
    tensors, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0, *,
    _waits=False,
):  # fmt: skip
    """As `reducescatter_async` for a list of tensors; the result is a list."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, True, _waits)


_BARRIER = cached_request(Request("barrier"))


def barrier(process_set=global_process_set) -> None:
    """Block until all ranks of the process set have called it."""
    synchronize(_submit(current().controller(process_set), TensorTableEntry(_BARRIER, []), True, True))


def join(device=-1) -> int:
    """Declare that this rank has no more data; take part with zeros until all have joined.

    For inputs of uneven length: ranks that have joined contribute zeros to allreduce (an average is
    still over all ranks) and no rows to allgather. broadcast, alltoall, reducescatter and Adasum
    fail with `HorovodInternalError` on the ranks that call them.

    Args:
        device: Accepted, and not used.

    Returns:
        The rank that joined last.
    """
    return current().controller(global_process_set).join()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; all ranks of the job call it. Blocks until they have.

    Args:
        process_set: The process set, or a list of its ranks.

    Raises:
        ValueError: For ranks that don't exist, or where a set of the same ranks exists.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    current().add_process_set(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call it.

    Args:
        process_set: The process set.

    Returns:
        True; False for the global one, and one not in use.
    """
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    current().remove_process_set(process_set)
    return True
