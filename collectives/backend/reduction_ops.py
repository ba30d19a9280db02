"""The reductions of a process group of this backend, in the forms in which torch calls them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..comm.parts import compare_parts, refusing
from ..errors import InvalidArgument
from . import sparse
from .launching import Launching, make_options, refuses
from .reductions import bitwise, parse_reduction
from .tensors import as_dense, join, run_all, single, store_back
from .work import completed_work

__all__ = ["ReductionOps"]

_c10d = dist.distributed_c10d


class ReductionOps(Launching):
    """Mixin of a process group: its reductions."""

    @refuses
    def allreduce(self, tensors, opts=None, timeout=None, *, op=None):
        """Reduce a tensor over all ranks, in place."""
        tensor = single(tensors, "all_reduce", self._rank)
        opts = make_options(_c10d.AllreduceOptions, opts, "reduceOp", op, timeout)
        comm = self.communicator(tensor.device)
        if tensor.layout is not torch.strided:
            self._sequence += 1
            return sparse.all_reduce(comm, tensor, opts.reduceOp)
        data, reduction, finish = self._reducible(tensor, opts.reduceOp, "all_reduce")
        if reduction.bitwise is not None:
            gathered = data.new_empty(self._size * data.numel())

            def reduce():
                bitwise(reduction.bitwise, gathered, self._size, tensor)

            return self._launch(opts, [tensor], lambda a: comm.all_gather(gathered, data, async_op=a), reduce)
        return self._launch(opts, [tensor], lambda a: comm.all_reduce(data, reduction.op, async_op=a), finish)

    def _reducible(self, tensor, op, name):
        """Return the array to reduce, how, and the function that stores it in the tensor."""
        reduction = parse_reduction(op, tensor.dtype, name, self._rank)
        dense = as_dense(tensor)
        finish = store_back(tensor, dense)
        return (dense if reduction.view_as is None else reduction.view_as(dense.detach())), reduction, finish

    @refuses
    def allreduce_coalesced(self, tensors, opts=None):
        """Reduce several tensors over all ranks, in place, as one operation."""
        opts = make_options(_c10d.AllreduceCoalescedOptions, opts)
        tensors = list(tensors)
        parts = [self._reducible(each, opts.reduceOp, "all_reduce_coalesced") for each in tensors]
        if not parts:
            return completed_work(tensors)
        if parts[0][1].bitwise is not None:
            raise InvalidArgument("bitwise reductions can't be coalesced", op="all_reduce_coalesced", rank=self._rank)
        comm = self.communicator(tensors[0].device)

        def launch(asynchronous):
            return [comm.all_reduce(data, reduction.op, async_op=asynchronous) for data, reduction, _ in parts]

        return self._launch_grouped(comm, opts, tensors, launch, run_all(store for _, _, store in parts))

    @refuses
    def reduce(self, tensors, opts=None, op=None, timeout=None, *, root=0):
        """Reduce a tensor over all ranks, in place on the root."""
        tensor = single(tensors, "reduce", self._rank)
        opts = make_options(_c10d.ReduceOptions, opts, "rootRank", root, timeout)
        if op is not None:
            opts.reduceOp = op
        comm, root = self.communicator(tensor.device), opts.rootRank
        data, reduction, finish = self._reducible(tensor, opts.reduceOp, "reduce")
        mine = self._rank == root
        if reduction.bitwise is not None:
            gathered = data.new_empty(self._size * data.numel()) if mine else None

            def reduce():
                bitwise(reduction.bitwise, gathered, self._size, tensor)

            return self._launch(
                opts, [tensor], lambda a: comm.gather(gathered, data, root, async_op=a), reduce if mine else None
            )
        return self._launch(
            opts, [tensor], lambda a: comm.reduce(data, root, reduction.op, async_op=a), finish if mine else None
        )

    @refuses
    def reduce_scatter_single(self, out, inp, opts=None):
        """Reduce `inp` over all ranks; rank r gets part r of it in `out`."""
        opts = make_options(_c10d.ReduceScatterOptions, opts)
        comm = self.communicator(inp.device)
        target, reduction, finish = self._reducible(out, opts.reduceOp, "reduce_scatter")
        source, _, _ = self._reducible(inp, opts.reduceOp, "reduce_scatter")
        if reduction.bitwise is not None:
            exchanged = torch.empty_like(source, memory_format=torch.contiguous_format)

            def reduce():
                bitwise(reduction.bitwise, exchanged, self._size, out)

            return self._launch(opts, [out], lambda a: comm.all_to_all(exchanged, source, async_op=a), reduce)
        return self._launch(
            opts, [out], lambda a: comm.reduce_scatter(target, source, reduction.op, async_op=a), finish
        )

    _reduce_scatter_base = reduce_scatter_single

    @refuses
    def reduce_scatter_single_coalesced(self, outs, inps, opts=None):
        """Reduce and scatter several pairs of tensors as one operation."""
        opts = make_options(_c10d.ReduceScatterOptions, opts)
        targets = [self._reducible(each, opts.reduceOp, "reduce_scatter") for each in outs]
        sources = [self._reducible(each, opts.reduceOp, "reduce_scatter") for each in inps]
        if not targets:
            return completed_work([])
        if targets[0][1].bitwise is not None:
            raise InvalidArgument("bitwise reductions can't be coalesced", op="reduce_scatter", rank=self._rank)
        comm = self.communicator(outs[0].device)

        def launch(asynchronous):
            return [
                comm.reduce_scatter(target, source, reduction.op, async_op=asynchronous)
                for (target, reduction, _), (source, _, _) in zip(targets, sources, strict=True)
            ]

        return self._launch_grouped(comm, opts, list(outs), launch, run_all(store for _, _, store in targets))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @refuses
    def reduce_scatter(self, outputs, inputs, opts=None, timeout=None, *, op=None):
        """Reduce a list of tensors over all ranks; rank r gets the r-th in `outputs`."""
        out = single(outputs, "reduce_scatter", self._rank)
        opts = make_options(_c10d.ReduceScatterOptions, opts, "reduceOp", op, timeout)
        comm = self.communicator(out.device)
        parts = self._parts(inputs, "reduce_scatter", comm)
        if len({each.numel() for each in parts}) == 1:
            return self.reduce_scatter_single(out, join(parts), opts)
        reduction = parse_reduction(opts.reduceOp, out.dtype, "reduce_scatter", self._rank)
        kind, own = "uneven reduce_scatter", parts[self._rank]
        with refusing(comm, kind, out.dtype):
            if reduction.bitwise is not None:
                raise InvalidArgument("bitwise reductions take parts of one size", op="reduce_scatter", rank=self._rank)
            if own.numel() != out.numel():
                text = f"part {self._rank} of the inputs has {own.numel()} elements, and the output {out.numel()}"
                raise InvalidArgument(text, op="reduce_scatter", rank=self._rank)
        copies = [as_dense(each).detach().clone() for each in parts]
        arrays = copies if reduction.view_as is None else [reduction.view_as(each) for each in copies]
        sends, receives = [each.numel() for each in parts], [out.numel()] * self._size

        def launch(asynchronous):
            compared = compare_parts(comm, kind, copies[0], sends, receives, asynchronous)
            reduced = [comm.reduce(each, root, reduction.op, async_op=asynchronous) for root, each in enumerate(arrays)]
            return compared + reduced

        return self._launch_grouped(comm, opts, [out], launch, store_back(out, copies[self._rank]))
