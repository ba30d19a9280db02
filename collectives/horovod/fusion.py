"""Carrying out what all ranks have submitted: fused buffers, gathers of unequal parts, and what joined ranks give."""

from __future__ import annotations

import itertools
from operator import is_

import torch

from ..comm.communicator import Communicator
from ..compression import Bucket, Compressor, Scaling, make_compressor
from ..kernels import pack, unpack
from ..layout import ALIGNMENT, bucket_layout
from ..torch_compat import flatten_dense_tensors as flatten
from .adasum import adasum_
from .messages import Signature, Submission, dtype_of
from .negotiation import Batch, Ready

__all__ = ["Executor", "adjacent", "rows_of_part"]


def rows_of_part(rows: int, size: int, rank: int) -> int:
    """Give the rows of a reducescatter's result: where they don't come out even, the first ranks have one more."""
    return rows // size + (rank < rows % size)


class Executor:
    """Carries out operations over the ranks of one process set, in the order that all ranks have agreed on.

    ``comms``: a communicator for each device type; ``control``: one on host memory, for a few numbers.
    """

    def __init__(self, comms: dict[str, Communicator], control: Communicator):
        self.comms = comms
        self.control = control
        self.size = control.size
        self.rank = control.rank
        self._fusion: dict[str, torch.Tensor] = {}  # by device type: bytes
        self._wires: dict[str, Compressor] = {}
        self._streams = {name: torch.cuda.Stream(comm.device) for name, comm in comms.items() if name == "cuda"}

    def run(self, item: Ready | Batch, own: list[Submission | None]) -> None:
        """Carry out one item and give this rank's submissions of it their results; None: this rank has joined."""
        device = (item.members[0] if isinstance(item, Batch) else item).any.device
        if device == "cpu":
            self._do(item, own)
            return
        stream = self._streams[device]
        mine = [each for each in own if each is not None]
        # The device, too: a stream of another one would be left by making the thread's former device current.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            for each in mine:
                stream.wait_event(each.ready)
                # Whoever submitted them may drop them as soon as this is queued.
                for tensor in each.tensors():
                    tensor.record_stream(stream)
            self._do(item, own)
            finished = stream.record_event()
        for each in mine:
            each.finished = finished

    def _do(self, item: Ready | Batch, own: list[Submission | None]) -> None:
        if isinstance(item, Batch):
            if not (item.small and self._allreduce_small(item.members[0].any, own)):
                self._allreduce(item.members, own)
        else:
            getattr(self, f"_{item.any.kind}")([item], own)

    def _device(self, signature) -> torch.device:
        return self.comms[signature.device].device

    # ---- Reductions.

    def _allreduce(self, members: list[Ready], own: list[Submission | None]) -> None:
        first = members[0].any
        comm = self.comms[first.device]
        inputs, outputs = [], []
        for member, submission in zip(members, own, strict=True):
            if submission is None:
                zeros = self._zeros(member.any)
                inputs += zeros
                outputs += zeros
                continue
            inputs += submission.inputs
            if submission.outputs is None:
                submission.outputs = [torch.empty_like(tensor) for tensor in submission.inputs]
            outputs += submission.outputs
            submission.results = submission.outputs
        for mine, theirs in _by_dtype(inputs, outputs):
            self._reduce(comm, first, mine, theirs)

    def _allreduce_small(self, first: Signature, own: list[Submission | None]) -> bool:
        """Reduce a batch of little by torch's own flattening, in which results are views of one piece of memory.

        That costs a fifth of packing and unpacking. It is taken where it is the same bytes as a fusion buffer, which
        other ranks may use, and so little that it doesn't matter if one of the results keeps all of it.
        """
        if None in own or first.wire:
            return False
        inputs = [tensor for submission in own for tensor in submission.inputs]
        in_place = [submission.outputs is not None for submission in own]
        if any(in_place) and (not all(in_place) or adjacent(inputs) is not None):
            return False
        flat = _scale(flatten(inputs), first.prescale)
        self.comms[first.device].all_reduce(flat, first.op)
        parts = _scale(flat, first.postscale).split([tensor.numel() for tensor in inputs])
        if in_place[0]:
            shaped = [part if to.dim() == 1 else part.view(to.shape) for part, to in zip(parts, inputs, strict=True)]
            torch._foreach_copy_(inputs, shaped)
            for submission in own:
                submission.results = submission.outputs
            return True
        at = 0
        for submission in own:
            count = len(submission.inputs)
            # Each with a version counter of its own: autograd must not take a write to one for a write to another.
            submission.results = [
                part.view(like.shape).data if like.dim() != 1 else part.data
                for part, like in zip(parts[at : at + count], submission.inputs, strict=True)
            ]
            at += count
        return True

    def _reduce(self, comm, signature, inputs, outputs) -> None:
        """Reduce tensors of one dtype."""
        op, before, after = signature.op, signature.prescale, signature.postscale
        if op == "adasum" or inputs[0].dtype in (torch.bool, torch.int16):
            self._reduce_otherwise(comm, signature, inputs, outputs)
            return
        if signature.wire and inputs[0].dtype in (torch.float32, torch.float64):
            self._reduce_on_wire(comm, signature, inputs, outputs)
            return
        if len(inputs) > 1 and inputs[0].device == comm.device:
            self._reduce_fused(comm, op, before, after, inputs, outputs)
            return
        for tensor, out in zip(inputs, outputs, strict=True):
            if out is tensor:
                comm.all_reduce(_scale(out, before), op)
            elif before == 1.0:
                comm.all_reduce(tensor, op, out=out)
            else:
                comm.all_reduce(_scale(out.copy_(tensor), before), op)
            _scale(out, after)

    def _reduce_fused(self, comm, op, before, after, inputs, outputs) -> None:
        flat = adjacent(inputs) if all(map(is_, inputs, outputs)) else None
        if flat is not None:  # they lie in one piece of memory as in a fusion buffer
            _scale(flat, before)
            comm.all_reduce(flat, op)
            _scale(flat, after)
            return
        dtype = inputs[0].dtype
        floating = dtype.is_floating_point
        flat = self._buffer(comm, bucket_layout([tensor.numel() for tensor in inputs], dtype.itemsize).total, dtype)
        pack(inputs, flat, scale=before if floating else 1.0)
        if not floating:
            _scale(flat, before)
        comm.all_reduce(flat, op)
        if not floating:
            _scale(flat, after)
        unpack(flat, outputs, scale=after if floating else 1.0)

    def _reduce_on_wire(self, comm, signature, inputs, outputs) -> None:
        """Reduce fp32 or fp64 by a compressed wire, on which the sum is taken in fp32."""
        if signature.wire not in self._wires:
            self._wires[signature.wire] = make_compressor(signature.wire)
        wire, dtype = self._wires[signature.wire], inputs[0].dtype
        total = bucket_layout([tensor.numel() for tensor in inputs], dtype.itemsize).total
        if not total:
            return
        flat = adjacent(inputs) if len(inputs) > 1 and all(map(is_, inputs, outputs)) else None
        packed = flat is None
        if packed:
            flat = self._buffer(comm, total, dtype)
            pack(inputs, flat)
        over = self.size if signature.op == "avg" else 0
        # What the wire keeps for a bucket goes by a tensor that stays: the fusion buffer, or the first gradient.
        kept = self._fusion[comm.device.type] if packed else inputs[0]
        wire.begin_backward()
        wire.reduce(comm, Bucket(flat, [kept], [0], 0), Scaling(signature.prescale, over, signature.postscale))
        if packed:
            unpack(flat, outputs)

    def _reduce_otherwise(self, comm, signature, inputs, outputs) -> None:
        """Reduce by Adasum, or dtypes that the engine knows no sums of."""
        for tensor, out in zip(inputs, outputs, strict=True):
            if out is not tensor:
                out.copy_(tensor)
            _scale(out, signature.prescale)
        if signature.op == "adasum":
            adasum_(comm, outputs)
        else:
            for out in outputs:
                if out.dtype == torch.bool:  # a sum of truths is a truth
                    op = {"sum": "max", "prod": "min"}.get(signature.op, signature.op)
                    comm.all_reduce(out.view(torch.uint8), op)
                else:
                    wide = out.to(torch.int32)
                    comm.all_reduce(wide, signature.op)
                    out.copy_(wide)
        for out in outputs:
            _scale(out, signature.postscale)

    def _reducescatter(self, members, own) -> None:
        signature, submission = members[0].any, own[0]
        comm = self.comms[signature.device]
        submission.results = []
        for tensor in submission.inputs:
            rows = [rows_of_part(tensor.shape[0], self.size, rank) for rank in range(self.size)]
            inner = tensor.shape[1:]
            if min(rows) == max(rows):
                whole = tensor if signature.prescale == 1.0 else _scale(tensor.clone(), signature.prescale)
                out = torch.empty((rows[0], *inner), dtype=tensor.dtype, device=tensor.device)
                comm.reduce_scatter(out, whole.contiguous(), signature.op)
            else:  # each part is padded to the longest
                whole = torch.zeros((self.size, rows[0], *inner), dtype=tensor.dtype, device=tensor.device)
                for part, source in zip(whole, tensor.split(rows), strict=True):
                    part[: len(source)] = source
                _scale(whole, signature.prescale)
                out = torch.empty((rows[0], *inner), dtype=tensor.dtype, device=tensor.device)
                comm.reduce_scatter(out, whole, signature.op)
                out = out[: rows[self.rank]].clone()
            submission.results.append(_scale(out, signature.postscale))

    # ---- Copies.

    def _allgather(self, members, own) -> None:
        ready, submission = members[0], own[0]
        comm = self.comms[ready.any.device]
        inputs = self._zeros(ready.any, rows=0) if submission is None else submission.inputs
        results = []
        for index, tensor in enumerate(inputs):
            rows = [0 if each is None else each.signature.shapes[index][0] for each in ready.requests]
            out = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=comm.device)
            if min(rows) == max(rows):
                comm.all_gather(out, tensor.contiguous())
            else:
                parts = out.split(rows)
                parts[self.rank].copy_(tensor)
                with comm.group():
                    for rank, part in enumerate(parts):
                        if part.numel():
                            comm.broadcast(part, rank)
            results.append(out)
        if submission is not None:
            submission.results = results

    def _broadcast(self, members, own) -> None:
        signature, submission = members[0].any, own[0]
        comm = self.comms[signature.device]
        if submission.outputs is None:
            submission.outputs = [torch.empty_like(tensor) for tensor in submission.inputs]
        for tensor, out in zip(submission.inputs, submission.outputs, strict=True):
            if out is not tensor and self.rank == signature.root:
                out.copy_(tensor)
            comm.broadcast(out, signature.root)
        submission.results = submission.outputs

    def _alltoall(self, members, own) -> None:
        ready, submission = members[0], own[0]
        comm = self.comms[ready.any.device]
        tensor, splits = submission.inputs[0], submission.splits
        given = torch.zeros(self.size, dtype=torch.int64)
        if splits is None:
            splits = [tensor.shape[0] // self.size] * self.size
        given.copy_(torch.tensor(splits, dtype=torch.int64))
        received = torch.empty_like(given)
        self.control.all_to_all(received, given)
        rows = received.tolist()
        out = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=comm.device)
        comm.all_to_all(out, tensor[: sum(splits)].contiguous(), rows, list(splits))
        submission.results = [out, received.int()]

    def _barrier(self, members, own) -> None:
        if own[0] is not None:
            own[0].results = []  # that all have submitted it is all there is to it

    # ---- Memory.

    def _zeros(self, signature, rows: int | None = None) -> list[torch.Tensor]:
        """Give what a rank that has joined takes part with."""
        device = self._device(signature)
        return [
            torch.zeros(shape if rows is None else (rows, *shape[1:]), dtype=dtype_of(dtype), device=device)
            for dtype, shape in zip(signature.dtypes, signature.shapes, strict=True)
        ]

    def _buffer(self, comm, total: int, dtype: torch.dtype) -> torch.Tensor:
        kind, nbytes = comm.device.type, total * dtype.itemsize
        buffer = self._fusion.get(kind)
        if buffer is None or buffer.numel() < nbytes:
            self._fusion[kind] = buffer = None  # before the larger one is made
            self._fusion[kind] = buffer = comm.empty(1 << max(16, (nbytes - 1).bit_length()), torch.uint8)
        return buffer[:nbytes].view(dtype)


def adjacent(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Give one flat view of tensors that lie one after the other as in a fusion buffer; None: they don't.

    None, too, where a fusion buffer pads one of them to 16 bytes: what lies there in the user's memory isn't to be
    touched.
    """
    first = tensors[0]
    itemsize = first.itemsize
    at = begin = first.data_ptr()
    if at % ALIGNMENT or tensors[1].data_ptr() != at + first.nbytes:
        return None
    for tensor in tensors:
        if tensor.data_ptr() != at or tensor.nbytes % ALIGNMENT:
            return None
        at += tensor.nbytes
    storage = first.untyped_storage()
    if at > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided(((at - begin) // itemsize,), (1,))


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place; integers by way of fp64, cut off towards 0."""
    if factor != 1.0:
        if tensor.dtype.is_floating_point:
            tensor.mul_(factor)
        else:
            tensor.copy_((tensor.double() * factor).trunc())
    return tensor


def _by_dtype(inputs: list, outputs: list):
    if len({tensor.dtype for tensor in inputs}) == 1:
        yield inputs, outputs
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
        chosen = [tensor.dtype == dtype for tensor in inputs]
        yield list(itertools.compress(inputs, chosen)), list(itertools.compress(outputs, chosen))
