"""The operations in their asynchronous forms: tensors in, a handle out; and what is done with handles."""

from __future__ import annotations

import itertools
import math
import numbers
import warnings
import weakref
from collections.abc import Sequence
from enum import IntEnum

import torch

from ..cuda_state import has_completed
from .basics import World, current
from .controller import Coordinator
from .exceptions import HorovodInternalError
from .messages import DTYPE_NAMES as _DTYPE_NAMES
from .messages import Request, Signature, Submission, can_reduce, request_of
from .process_sets import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
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
    "name_of_op",
    "poll",
    "reducescatter_async",
    "remove_process_set",
    "sparse_allreduce_async",
    "synchronize",
]


class ReduceOp(IntEnum):
    """The reductions, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp
_OURS = {Average: "avg", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "prod"}


def name_of_op(op: ReduceOp) -> str:
    """Give a reduction's name in a `Signature`."""
    return _OURS[op]


# ---- Handles.

_numbers = itertools.count(1)
_handles: dict[int, tuple[Coordinator | None, Submission, bool]] = {}  # with whether the result is a list
_job: weakref.ref | None = None  # the world that they are of


def _submit(process_set: ProcessSet, submission: Submission, grouped: bool, waits: bool = False) -> int:
    world = current()
    coordinator = world.coordinator(process_set)
    if _job is None or _job() is not world:
        _forget_ended(world)
    coordinator.submit(submission, waits=waits)
    handle = next(_numbers)
    _handles[handle] = coordinator, submission, grouped
    return handle


def _forget_ended(world: World) -> None:
    """Drop what nobody has asked for in the jobs before this one; of operations that failed the text is kept."""
    global _job
    _job = weakref.ref(world)
    for handle, (coordinator, submission, _) in list(_handles.items()):
        if coordinator is None:
            continue
        if submission.error is None:
            _handles.pop(handle, None)
        else:  # whose traceback and causes would keep the coordinator with its buffers
            submission.error = HorovodInternalError(str(submission.error))
            _handles[handle] = None, submission, False


def poll(handle: int) -> bool:
    """Tell whether an operation has ended, so that `synchronize` won't block. Never blocks."""
    entry = _handles.get(handle)
    if entry is None:
        raise ValueError(f"handle {handle} is unknown, or was synchronized before")
    finished = entry[1].finished
    return entry[1].done and (finished is None or has_completed(finished))


def synchronize(handle: int):
    """Wait for an operation and give its result; blocks on the host, and on CUDA orders the current stream after it.

    A handle that was synchronized before gives None. Raises `HorovodInternalError` where the operation failed.
    """
    if callable(handle):  # of sparse_allreduce_async
        return handle()
    entry = _handles.pop(handle, None)
    if entry is None:
        return None
    coordinator, submission, grouped = entry
    if coordinator is None:
        raise submission.error
    coordinator.wait(submission)
    results = submission.results
    if submission.signature.kind == "alltoall":
        return tuple(results)
    return results if grouped else results[0] if results else None


# ---- Reading arguments.


def _tensors(kind: str, given, in_place: bool = False) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor) or not isinstance(given, Sequence):
        raise ValueError(f"grouped_{kind} takes a list of tensors, not {type(given).__name__}")
    return [_tensor(kind, each, in_place) for each in given]


def _tensor(kind: str, tensor, in_place: bool = False) -> torch.Tensor:
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
    if tensor.is_neg() or tensor.is_conj():  # whose memory holds other values
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


def _request(kind: str, process_set, tensors, name, **rest) -> Request:
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name must be a str, not {name!r}")
    device = "cpu"
    if tensors:
        place = tensors[0].device
        if len(tensors) > 1 and len(devices := {tensor.device for tensor in tensors}) > 1:
            raise ValueError(f"{kind}: a group's tensors must be on one device, not on {sorted(map(str, devices))}")
        device = place.type
        comms = current().coordinator(process_set).comms
        if device not in comms or (device != "cpu" and place != comms[device].device):
            there = ", ".join(str(comm.device) for comm in comms.values())
            raise ValueError(
                f"{kind}: the tensor is on {place}, this rank works on {there}: move it there (on GPUs "
                "torch.cuda.set_device(hvd.local_rank()) before anything is made)"
            )
    dtypes, shapes = tuple([_DTYPE_NAMES[t.dtype] for t in tensors]), tuple([tuple(t.shape) for t in tensors])
    return request_of(Signature(kind, name or "", dtypes, shapes, device, **rest))


def _reduction(kind: str, tensors, average, op, prescale, postscale, compression=None) -> dict:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        op = Average if average else Sum
    ours = "avg" if op is None else _OURS.get(op) if isinstance(op, int) and not isinstance(op, bool) else None
    if ours is None:
        raise ValueError(f"{kind}: op must be hvd.Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    if kind == "reducescatter" and op == Adasum:
        raise ValueError("reducescatter by Adasum: Adasum is of allreduce alone")
    for what, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if factor != 1.0 and not (isinstance(factor, numbers.Real) and math.isfinite(factor)):
            raise ValueError(f"{kind}: {what} must be a finite number, not {factor!r}")
    for tensor in tensors:
        if tensor.dtype is torch.float32:
            continue
        if not can_reduce(tensor.dtype) or (kind == "reducescatter" and tensor.dtype in (torch.bool, torch.int16)):
            raise ValueError(f"{kind}: elements of {tensor.dtype} can't be reduced")
        if ours == "adasum" and not tensor.dtype.is_floating_point:
            raise ValueError(f"{kind}: Adasum takes floating types, not {tensor.dtype}")
        if ours == "avg" and tensor.dtype == torch.bool:
            raise ValueError(f"{kind}: there is no average of {tensor.dtype}: use Sum, Min, Max or Product")
    wire = "" if compression is None else getattr(compression, "wire", "")
    return {"op": ours, "prescale": float(prescale), "postscale": float(postscale), "wire": wire}


# ---- The operations.


_STRIDED = torch.strided
_requests: dict[tuple, Request] = {}  # what allreduces of one tensor were checked before
_MOST_REQUESTS = 4096


def _allreduce(
    tensors, average, name, op, prescale, postscale, process_set, in_place, grouped, waits, compression=None
):  # fmt: skip
    if grouped:
        read = _tensors("allreduce", tensors, in_place)
        reduction = _reduction("allreduce", read, average, op, prescale, postscale, compression)
        request = _request("allreduce", process_set, read, name, **reduction)
        return _submit(process_set, Submission(request, read, read if in_place else None), True, waits)
    read = _tensor("allreduce", tensors, in_place)
    known = (name, read.dtype, read.shape, read.device, op, prescale, postscale, compression, process_set)
    try:
        request = _requests.get(known) if average is None and not isinstance(op, bool) else None
    except TypeError:  # something that can't be a key, and isn't valid
        request = None
    if request is None:
        reduction = _reduction("allreduce", [read], average, op, prescale, postscale, compression)
        request = _request("allreduce", process_set, [read], name, **reduction)
        if average is None:
            if len(_requests) >= _MOST_REQUESTS:
                _requests.clear()
            _requests[known] = request
    return _submit(process_set, Submission(request, [read], [read] if in_place else None), False, waits)


def allreduce_async(
    tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set, *, _waits=False, _compression=None,
):  # fmt: skip
    """Start to reduce a tensor over the ranks; `synchronize` gives the result, a new tensor.

    ``op``: default `Average`; ``average`` is its deprecated form. ``name``: the ranks' operations meet by it, in any
    order; without one, in the order of submission. The result is postscale * op(prescale * tensor). dtypes: NCCL's,
    int16 and bool; shape and dtype the same on all ranks. Doesn't block. C: ncclAllReduce.
    """
    return _allreduce(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, False, False, _waits, _compression
    )


def allreduce_async_(
    tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set, *, _waits=False, _compression=None,
):  # fmt: skip
    """As `allreduce_async`, in place: the tensor is to be left alone until `synchronize`."""
    return _allreduce(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, True, False, _waits, _compression
    )


def grouped_allreduce_async(
    tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set, *, _waits=False, _compression=None,
):  # fmt: skip
    """As `allreduce_async` for a list of tensors, which are reduced together, or not at all; gives a list."""
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
    """Start to reduce a sparse tensor (``torch.sparse_coo``) by `Sum` or `Average`; its result has all ranks' entries.

    Gives a function, which `synchronize` takes as well: it waits and gives the coalesced result. Each rank may have
    another number of entries. Sends indices and values, by allgather.
    """
    if not tensor.is_sparse:
        raise ValueError(f"sparse_allreduce_async takes a sparse tensor, not one of {tensor.layout}")
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors are reduced by hvd.Average or hvd.Sum, not {op!r}")
    entries = tensor.detach().coalesce()
    # Indices have a column for each entry: gathered as rows.
    indices = allgather_async(entries.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(entries.values(), f"{name}.values", process_set)
    size = process_set.size()

    def finish() -> torch.Tensor:
        rows, elements = synchronize(indices), synchronize(values)
        if op == Average:
            elements = elements / size if elements.is_floating_point() else elements // size
        return torch.sparse_coo_tensor(rows.t(), elements, tensor.shape, check_invariants=False).coalesce()

    return finish


def _allgather(tensors, name, process_set, grouped, waits):
    read = _tensors("allgather", tensors) if grouped else [_tensor("allgather", tensors)]
    for tensor in read:
        if not tensor.dim():
            raise ValueError("allgather joins tensors along their first dimension, and a scalar has none: use [None]")
    request = _request("allgather", process_set, read, name)
    return _submit(process_set, Submission(request, read), grouped, waits)


def allgather_async(tensor, name=None, process_set=global_process_set, *, _waits=False):
    """Start to join the ranks' tensors along dimension 0, in rank order.

    Takes any dtype; shapes alike but for the first dimension, which may be 0. C: ncclAllGather, ncclBroadcast.
    """
    return _allgather(tensor, name, process_set, False, _waits)


def grouped_allgather_async(tensors, name=None, process_set=global_process_set, *, _waits=False):
    """As `allgather_async` for a list of tensors; gives a list."""
    return _allgather(tensors, name, process_set, True, _waits)


def _broadcast(tensor, root_rank, name, process_set, in_place, waits):
    read = _tensor("broadcast", tensor, in_place)
    ranks = process_set.ranks or [root_rank]
    if isinstance(root_rank, bool) or not isinstance(root_rank, numbers.Integral) or root_rank not in ranks:
        raise ValueError(f"broadcast: root_rank must be one of the ranks {ranks}, not {root_rank!r}")
    request = _request("broadcast", process_set, [read], name, root=ranks.index(root_rank))
    return _submit(process_set, Submission(request, [read], [read] if in_place else None), False, waits)


def broadcast_async(tensor, root_rank, name=None, process_set=global_process_set, *, _waits=False):
    """Start to send ``root_rank``'s tensor to all; gives a new tensor. Takes any dtype. C: ncclBroadcast."""
    return _broadcast(tensor, root_rank, name, process_set, False, _waits)


def broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set, *, _waits=False):
    """As `broadcast_async`, in place."""
    return _broadcast(tensor, root_rank, name, process_set, True, _waits)


def alltoall_async(tensor, splits=None, name=None, process_set=global_process_set, *, _waits=False):
    """Start to send rows of a tensor to each rank.

    ``splits``: rows for each rank (a list or an integer tensor); None: equal parts. `synchronize` gives what was
    received, joined in rank order, and how many rows came from each rank, int32. Takes any dtype.
    C: ncclSend and ncclRecv in a group.
    """
    read = _tensor("alltoall", tensor)
    if not read.dim():
        raise ValueError("alltoall sends rows along the first dimension, and a scalar has none")
    size = process_set.size() or 1
    if splits is None:
        if read.shape[0] % size:
            raise ValueError(f"alltoall: {read.shape[0]} rows can't be shared evenly by {size} ranks: pass splits")
    else:
        splits = splits.tolist() if hasattr(splits, "tolist") else list(splits)  # a tensor, or NumPy's
        whole = all(isinstance(rows, int) and not isinstance(rows, bool) and rows >= 0 for rows in splits)
        if not whole or len(splits) != size:
            raise ValueError(f"alltoall: splits must be {size} numbers of rows from 0 up, not {splits}")
        if sum(splits) > read.shape[0]:
            raise ValueError(f"alltoall: splits add up to {sum(splits)}, and there are {read.shape[0]} rows")
    request = _request("alltoall", process_set, [read], name)
    return _submit(process_set, Submission(request, [read], splits=splits), False, _waits)


def _reducescatter(tensors, name, op, process_set, prescale, postscale, grouped, waits):
    read = _tensors("reducescatter", tensors) if grouped else [_tensor("reducescatter", tensors)]
    for tensor in read:
        if not tensor.dim():
            raise ValueError("reducescatter shares out the first dimension, and a scalar has none")
    reduction = _reduction("reducescatter", read, None, op, prescale, postscale)
    request = _request("reducescatter", process_set, read, name, **reduction)
    return _submit(process_set, Submission(request, read), grouped, waits)


def reducescatter_async(
    tensor, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0, *,
    _waits=False,
):  # fmt: skip
    """Start to reduce a tensor and to share out its rows; the first ranks get one more where they don't come out even.

    dtypes: NCCL's; shape and dtype the same on all ranks. C: ncclReduceScatter.
    """
    return _reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor, False, _waits)


def grouped_reducescatter_async(
    tensors, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0, *,
    _waits=False,
):  # fmt: skip
    """As `reducescatter_async` for a list of tensors; gives a list."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, True, _waits)


_BARRIER = request_of(Signature("barrier"))


def barrier(process_set=global_process_set) -> None:
    """Block until all ranks of the process set have called it."""
    synchronize(_submit(process_set, Submission(_BARRIER, []), True, True))


def join(device=-1) -> int:
    """Say that this rank has no more data, and take part with zeros until all ranks have said so.

    Gives the rank that joined last. ``device`` is taken, and isn't needed. For inputs of uneven length: allreduce gets
    zeros from the ranks that have joined (an average is still over all), allgather no rows; broadcast, alltoall,
    reducescatter and Adasum fail with `HorovodInternalError` on the ranks that call them.
    """
    return current().coordinator(global_process_set).join()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Put a process set in use, or a list of ranks as one; all ranks of the job call it. Blocks until they have.

    Raises `ValueError` for ranks that there are not, or a set of the same ranks.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    current().add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of use; all ranks of the job call it. False for the global one, and one not in use."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    current().remove(process_set)
    return True
