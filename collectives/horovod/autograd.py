"""Blocking operations. Those that aren't in place are differentiable, as in Horovod.

Horovod's gradients are those of a loss that is the ranks' average: the gradient of an allgather or
a broadcast is the average of the ranks' gradients, and the gradient of an allreduce is reduced as
its values were.
"""

from __future__ import annotations

import torch

from . import operations as ops
from .compression import Compression
from .operations import Adasum, Average, Max, Min, Product, Sum, synchronize
from .process_sets import global_process_set

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]


def _needs_autograd(tensors) -> bool:
    """Return whether autograd must record an operation on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                return True
    return False


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, *tensors):
        ctx.options = options
        return tuple(synchronize(ops.grouped_allreduce_async(tensors, **options, _waits=True)))

    @staticmethod
    def backward(ctx, *grads):
        op = ctx.options["op"]
        if op in (Min, Max, Product, Adasum):
            raise NotImplementedError(
                f"allreduce by {ops.ReduceOp(op).name} has no gradient here: Sum and Average have"
            )
        return None, *_grouped_allreduce({**ctx.options, "name": None}, grads)


def _grouped_allreduce(options, tensors):
    """Reduce a list of tensors.

    Differentiable where autograd records, as in a backward with create_graph.
    """
    if _needs_autograd(tensors):
        return _Allreduce.apply(options, *tensors)
    return synchronize(ops.grouped_allreduce_async(tensors, **options, _waits=True))


def _options(average, name, op, prescale_factor, postscale_factor, process_set, compression) -> dict:
    if op is None and average is None:
        op = Average
    return {
        "average": average, "name": name, "op": op, "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor, "process_set": process_set, "_compression": compression,
    }  # fmt: skip


def allreduce(
    tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set,
):  # fmt: skip
    """Reduce a tensor over the ranks and return the result, a new tensor; blocks.

    Args:
        tensor: The tensor, as in `allreduce_async`.
        average: The deprecated form of ``op``.
        name: As in `allreduce_async`.
        compression: A class of `Compression`, for what is sent.
        op: The reduction. None: `Average`.
        prescale_factor: What the tensor is multiplied by before the reduction.
        postscale_factor: What the result is multiplied by.
        process_set: The ranks that take part.
    """
    if compression is Compression.none and not _needs_autograd((tensor,)):
        handle = ops.allreduce_async(
            tensor, average, name, op, prescale_factor, postscale_factor, process_set, _waits=True
        )  # fmt: skip
        return synchronize(handle)
    options = _options(average, name, op, prescale_factor, postscale_factor, process_set, compression)
    return _compressed_allreduce([tensor], compression, options)[0]


def grouped_allreduce(
    tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set,
):  # fmt: skip
    """Reduce a list of tensors together and return a list of new ones; blocks.

    Args:
        tensors: The tensors, each as in `allreduce_async`.
        average: The deprecated form of ``op``.
        name: As in `allreduce_async`.
        compression: A class of `Compression`, for what is sent.
        op: The reduction. None: `Average`.
        prescale_factor: What the tensors are multiplied by before the reduction.
        postscale_factor: What the results are multiplied by.
        process_set: The ranks that take part.
    """
    options = _options(average, name, op, prescale_factor, postscale_factor, process_set, compression)
    return _compressed_allreduce(tensors, compression, options)


def _compressed_allreduce(tensors, compression, options) -> list:
    if isinstance(tensors, torch.Tensor):
        raise ValueError("grouped_allreduce takes a list of tensors, not Tensor")
    sent, contexts = [], []
    for tensor in tensors:
        small, context = compression.compress(tensor)
        sent.append(small)
        contexts.append(context)
    if _needs_autograd(sent):
        if options["average"] is not None:
            options["op"] = Average if options["average"] else Sum
            options["average"] = None
        got = _Allreduce.apply(options, *sent)
    else:
        got = synchronize(ops.grouped_allreduce_async(sent, **options, _waits=True))
    return [compression.decompress(each, context) for each, context in zip(got, contexts, strict=True)]


def allreduce_(
    tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set,
):  # fmt: skip
    """Reduce a tensor in place; blocks.

    Args:
        tensor: The tensor, as in `allreduce_async`.
        average: The deprecated form of ``op``.
        name: As in `allreduce_async`.
        op: The reduction. None: `Average`.
        prescale_factor: What the tensor is multiplied by before the reduction.
        postscale_factor: What the result is multiplied by.
        process_set: The ranks that take part.
    """
    synchronize(
        ops.allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set, _waits=True)
    )
    return tensor


def grouped_allreduce_(
    tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=global_process_set,
):  # fmt: skip
    """Reduce a list of tensors in place; blocks. The arguments are those of `grouped_allreduce`."""
    options = _options(average, name, op, prescale_factor, postscale_factor, process_set, None)
    synchronize(ops.grouped_allreduce_async_(tensors, **options, _waits=True))
    return list(tensors)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, process_set, *tensors):
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        ctx.process_set = process_set
        return tuple(synchronize(ops.grouped_allgather_async(tensors, name, process_set, _waits=True)))

    @staticmethod
    def backward(ctx, *grads):
        process_set = ctx.process_set
        reduced = _grouped_allreduce({"op": Average, "process_set": process_set}, grads)
        rows = synchronize(ops.allgather_async(torch.tensor([ctx.rows], device="cpu"), None, process_set, _waits=True))
        before = rows[: process_set.rank()].sum(0).tolist()
        parts = [grad.narrow(0, at, own) for grad, at, own in zip(reduced, before, ctx.rows, strict=True)]
        return None, None, *parts


def allgather(tensor, name=None, process_set=global_process_set):
    """Concatenate the ranks' tensors along dimension 0, in rank order; blocks.

    Args:
        tensor: The tensor, as in `allgather_async`.
        name: As in `allreduce_async`.
        process_set: The ranks that take part.
    """
    if _needs_autograd((tensor,)):
        return _Allgather.apply(name, process_set, tensor)[0]
    return synchronize(ops.allgather_async(tensor, name, process_set, _waits=True))


def grouped_allgather(tensors, name=None, process_set=global_process_set):
    """Concatenate the ranks' tensors, for each tensor of a list; blocks."""
    if _needs_autograd(tensors):
        return list(_Allgather.apply(name, process_set, *tensors))
    return synchronize(ops.grouped_allgather_async(tensors, name, process_set, _waits=True))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, root_rank, name, process_set):
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(ops.broadcast_async(tensor, root_rank, name, process_set, _waits=True))

    @staticmethod
    def backward(ctx, grad):
        reduced = allreduce(grad, op=Average, process_set=ctx.process_set)
        if ctx.process_set.ranks[ctx.process_set.rank()] != ctx.root_rank:
            reduced.zero_()
        return reduced, None, None, None


def broadcast(tensor, root_rank, name=None, process_set=global_process_set):
    """Return one rank's tensor on all ranks, as a new tensor; blocks.

    Args:
        tensor: The tensor, of any dtype.
        root_rank: The rank whose tensor is sent.
        name: As in `allreduce_async`.
        process_set: The ranks that take part.
    """
    if _needs_autograd((tensor,)):
        return _Broadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(ops.broadcast_async(tensor, root_rank, name, process_set, _waits=True))


def broadcast_(tensor, root_rank, name=None, process_set=global_process_set):
    """Send one rank's tensor to all, in place; blocks.

    Args:
        tensor: The tensor, of any dtype.
        root_rank: The rank whose tensor is sent.
        name: As in `allreduce_async`.
        process_set: The ranks that take part.
    """
    synchronize(ops.broadcast_async_(tensor, root_rank, name, process_set, _waits=True))
    return tensor


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, splits, name, process_set):
        ctx.process_set, ctx.rows = process_set, tensor.shape[0]
        out, ctx.received = synchronize(ops.alltoall_async(tensor, splits, name, process_set, _waits=True))
        ctx.mark_non_differentiable(ctx.received)
        return out, ctx.received

    @staticmethod
    def backward(ctx, grad, _):
        back, _ = alltoall(grad, ctx.received, None, ctx.process_set)
        unsent = ctx.rows - back.shape[0]
        if unsent:  # rows after the last split
            back = torch.cat([back, back.new_zeros((unsent, *back.shape[1:]))])
        return back, None, None, None


def alltoall(tensor, splits=None, name=None, process_set=global_process_set):
    """Send rows of a tensor to each rank and return the received rows; blocks.

    Args:
        tensor: The tensor, of any dtype.
        splits: As in `alltoall_async`.
        name: As in `allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        The received rows; with ``splits`` also the number of rows from each rank.
    """
    if _needs_autograd((tensor,)):
        out, received = _Alltoall.apply(tensor, splits, name, process_set)
    else:
        out, received = synchronize(ops.alltoall_async(tensor, splits, name, process_set, _waits=True))
    return out if splits is None else (out, received)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, *tensors):
        ctx.options = options
        return tuple(synchronize(ops.grouped_reducescatter_async(tensors, **options, _waits=True)))

    @staticmethod
    def backward(ctx, *grads):
        op = ctx.options["op"]
        if op not in (Sum, Average):
            raise NotImplementedError(
                f"reducescatter by {ops.ReduceOp(op).name} has no gradient here: Sum and Average have"
            )
        process_set = ctx.options["process_set"]
        factor = ctx.options["prescale_factor"] * ctx.options["postscale_factor"]
        factor *= process_set.size() if op == Sum else 1
        gathered = grouped_allgather([grad * factor for grad in grads], process_set=process_set)
        return None, *gathered


def reducescatter(
    tensor, name=None, compression=Compression.none, op=Average, process_set=global_process_set, prescale_factor=1.0,
    postscale_factor=1.0,
):  # fmt: skip
    """Reduce a tensor and return this rank's rows of the result; blocks.

    Args:
        tensor: The tensor, as in `reducescatter_async`.
        name: As in `allreduce_async`.
        compression: A class of `Compression`, for what is sent.
        op: The reduction.
        process_set: The ranks that take part.
        prescale_factor: What the tensor is multiplied by before the reduction.
        postscale_factor: What the result is multiplied by.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]  # fmt: skip


def grouped_reducescatter(
    tensors, name=None, compression=Compression.none, op=Average, process_set=global_process_set, prescale_factor=1.0,
    postscale_factor=1.0,
):  # fmt: skip
    """Reduce a list of tensors and return this rank's rows of each; blocks.

    Args:
        tensors: The tensors, each as in `reducescatter_async`.
        name: As in `allreduce_async`.
        compression: A class of `Compression`; only those that change the dtype have an effect.
        op: The reduction.
        process_set: The ranks that take part.
        prescale_factor: What the tensors are multiplied by before the reduction.
        postscale_factor: What the results are multiplied by.
    """
    sent, contexts = zip(*map(compression.compress, tensors), strict=True) if tensors else ((), ())
    options = {
        "name": name, "op": op, "process_set": process_set, "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }  # fmt: skip
    if _needs_autograd(sent):
        got = _Reducescatter.apply(options, *sent)
    else:
        got = synchronize(ops.grouped_reducescatter_async(sent, **options, _waits=True))
    return [compression.decompress(each, context) for each, context in zip(got, contexts, strict=True)]
