"""The collectives of a process group that move data, in the forms in which torch calls them.

Each checks what torch leaves unchecked, makes the arrays that a `Communicator` takes, and calls it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..comm.parts import compare_parts, refusing
from ..errors import InvalidArgument
from .launching import Launching, make_options, refuses
from .tensors import as_dense, gather_buffer, join, run_all, single, store_back
from .work import completed_work

__all__ = ["DataOps"]

_c10d = dist.distributed_c10d


class DataOps(Launching):
    """Mixin of a process group: its collectives that move data."""

    @refuses
    def broadcast(self, tensors, opts=None, timeout=None, *, root=0):
        """Send the root's tensor to all ranks, in place."""
        tensor = single(tensors, "broadcast", self._rank)
        opts = make_options(_c10d.BroadcastOptions, opts, "rootRank", root, timeout)
        comm, root = self.communicator(tensor.device), opts.rootRank
        data = as_dense(tensor)
        finish = None if self._rank == root else store_back(tensor, data)
        return self._launch(opts, [tensor], lambda a: comm.broadcast(data, root, async_op=a), finish)

    @refuses
    def all_gather_single(self, out, inp, opts=None):
        """Gather every rank's `inp` into `out`, in rank order."""
        comm, data, target = self.communicator(inp.device), as_dense(inp), as_dense(out)
        return self._launch(opts, [out], lambda a: comm.all_gather(target, data, async_op=a), store_back(out, target))

    _allgather_base = all_gather_single

    @refuses
    def all_gather_single_coalesced(self, outs, inps, opts=None):
        """Gather several tensors as one operation."""
        if not outs:
            return completed_work([])
        comm = self.communicator(inps[0].device)
        pairs = [(as_dense(out), as_dense(inp)) for out, inp in zip(outs, inps, strict=True)]

        def launch(asynchronous):
            return [comm.all_gather(out, inp, async_op=asynchronous) for out, inp in pairs]

        finish = run_all(store_back(out, target) for out, (target, _) in zip(outs, pairs, strict=True))
        return self._launch_grouped(comm, opts, list(outs), launch, finish)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @refuses
    def allgather(self, outputs, inputs, opts=None, timeout=None):
        """Gather every rank's tensor into a list of tensors, of unlike sizes if need be."""
        opts = make_options(_c10d.AllgatherOptions, opts, timeout=timeout)
        inp = single(inputs, "all_gather", self._rank)
        comm, data = self.communicator(inp.device), as_dense(inp)
        outs = self._parts(outputs, "all_gather", comm)
        if len({each.numel() for each in outs}) == 1:
            flat, store = gather_buffer(outs)
            return self._launch(opts, outs, lambda a: comm.all_gather(flat, data, async_op=a), store)
        kind, arrays = "uneven all_gather", [as_dense(each) for each in outs]
        with refusing(comm, kind, data.dtype), torch.no_grad():
            arrays[self._rank].copy_(data.view(arrays[self._rank].shape))
        sends, receives = [data.numel()] * self._size, [each.numel() for each in arrays]

        def launch(asynchronous):
            compared = compare_parts(comm, kind, data, sends, receives, asynchronous)
            return compared + [comm.broadcast(each, root, async_op=asynchronous) for root, each in enumerate(arrays)]

        finish = run_all(map(store_back, outs, arrays))
        return self._launch_grouped(comm, opts, outs, launch, finish)

    @refuses
    def allgather_coalesced(self, output_lists, inputs, opts=None):
        """Gather several tensors into lists; `output_lists`: for each rank the list of its tensors."""
        lists, inputs = [list(each) for each in output_lists], list(inputs)
        if not inputs:
            return completed_work([])
        comm = self.communicator(inputs[0].device)
        buffers = [gather_buffer(outs) for outs in zip(*lists, strict=True)]
        data = [as_dense(each) for each in inputs]

        def launch(asynchronous):
            return [
                comm.all_gather(flat, each, async_op=asynchronous)
                for (flat, _), each in zip(buffers, data, strict=True)
            ]

        outs = [each for tensors in lists for each in tensors]
        return self._launch_grouped(comm, opts, outs, launch, run_all(store for _, store in buffers))

    @refuses
    def gather(self, outputs, inputs, opts=None, timeout=None, *, root=0):
        """Gather every rank's tensor into the root's list."""
        inp = single(inputs, "gather", self._rank)
        opts = make_options(_c10d.GatherOptions, opts, "rootRank", root, timeout)
        comm, root, data = self.communicator(inp.device), opts.rootRank, as_dense(inp)
        if self._rank != root:
            return self._launch(opts, [], lambda a: comm.gather(None, data, root, async_op=a))
        outs = self._parts(outputs, "gather", comm)
        flat, store = gather_buffer(outs)
        return self._launch(opts, outs, lambda a: comm.gather(flat, data, root, async_op=a), store)

    @refuses
    def scatter(self, outputs, inputs, opts=None, timeout=None, *, root=0):
        """Send the r-th tensor of the root's list to rank r."""
        out = single(outputs, "scatter", self._rank)
        opts = make_options(_c10d.ScatterOptions, opts, "rootRank", root, timeout)
        comm, root, target = self.communicator(out.device), opts.rootRank, as_dense(out)
        flat = join(self._parts(inputs, "scatter", comm)) if self._rank == root else None
        return self._launch(
            opts, [out], lambda a: comm.scatter(target, flat, root, async_op=a), store_back(out, target)
        )

    @refuses
    def all_to_all_single(self, out, inp, output_split_sizes=(), input_split_sizes=(), opts=None, timeout=None):
        """Send rows of `inp` to the ranks and receive theirs into `out`; no sizes: equal parts."""
        opts = make_options(_c10d.AllToAllOptions, opts, timeout=timeout)
        comm, data, target = self.communicator(inp.device), as_dense(inp), as_dense(out)
        splits = list(output_split_sizes) or None, list(input_split_sizes) or None
        return self._launch(
            opts, [out], lambda a: comm.all_to_all(target, data, *splits, async_op=a), store_back(out, target)
        )

    alltoall_base = all_to_all_single

    @refuses
    def alltoall(self, outputs, inputs, opts=None, timeout=None):
        """Send the r-th tensor of a list to rank r, and receive its tensor for this rank."""
        if not (outputs or inputs):
            raise InvalidArgument("takes lists of tensors, not two empty ones", op="all_to_all", rank=self._rank)
        comm = self.communicator((inputs or outputs)[0].device)
        outs, inps = self._parts(outputs, "all_to_all", comm), self._parts(inputs, "all_to_all", comm)
        targets, data = [as_dense(each) for each in outs], [as_dense(each) for each in inps]
        finish = run_all(map(store_back, outs, targets))
        return self._launch(opts, outs, lambda a: comm.all_to_all(targets, data, async_op=a), finish)
