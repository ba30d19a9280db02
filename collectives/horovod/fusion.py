"""Executor of negotiated operations: fusion buffers, unequal parts, zeros of joined ranks."""

from __future__ import annotations

import itertools
from operator import is_

import torch

from ..comm.communicator import Communicator
from ..compression import Bucket, Compressor, ReductionPlan, Scaling, make_compressor, plan_average
from ..cuda_state import new_comm_stream, on_stream
from ..kernels import pack, unpack
from ..kernels.reusable_table import ReusableTable
from ..layout import ALIGNMENT, bucket_layout
from ..torch_compat import flatten_dense_tensors as flatten
from .adasum import adasum_
from .message_table import FusedResponse, Response
from .messages import CAST_DTYPES, Request, TensorTableEntry
from .one_call import is_one_call, make_call

__all__ = ["Executor"]

_MAX_TABLES = 256


class Executor:
    """Carries out the operations of one process set, in the order that all ranks have negotiated.

    ``comms``: a communicator for each device type. ``control``: one on host memory, for a few
    numbers.
    """

    def __init__(self, comms: dict[str, Communicator], control: Communicator):
        self.comms = comms
        self.control = control
        self.size = control.size
        self.rank = control.rank
        self._fusion_buffers: dict[str, torch.Tensor] = {}  # by device type: bytes
        self._fusion_views: dict[str, torch.Tensor] = {}  # by device type: the last view of the buffer
        self._compressors: dict[str, Compressor] = {}
        self._tables: dict[tuple, ReusableTable] = {}  # by use, dtype and the tensors' sizes
        self._streams = {name: new_comm_stream(comm.device) for name, comm in comms.items() if name == "cuda"}

    def run(self, item: FusedResponse, entries: list[TensorTableEntry | None]) -> None:
        """Carry out one item and set the results of this rank's entries.

        An entry is None where this rank has joined.
        """
        if item.one_call is None:
            item.one_call = len(item.responses) == 1 and is_one_call(item.responses[0])
        if item.one_call and not torch.is_inference_mode_enabled():
            make_call(self.comms["cpu"], item.request, entries[0])
            return
        with torch.no_grad(), torch.inference_mode(False):
            if item.request.device == "cpu":
                self._perform(item, entries)
            else:
                self._perform_on_stream(item, entries)

    def _perform_on_stream(self, item: FusedResponse, entries: list[TensorTableEntry | None]) -> None:
        """Carry out an item on the communication stream of a GPU."""
        device = item.request.device
        stream = self._streams[device]
        mine = [each for each in entries if each is not None]
        # The device is set, too: leaving a stream of another device sets the thread's former
        # device.
        with torch.cuda.device(stream.device), on_stream(stream):
            for each in mine:
                stream.wait_event(each.ready_event)
                # The caller may drop them as soon as this is enqueued.
                for tensor in each.tensors():
                    tensor.record_stream(stream)
            self._perform(item, entries)
            finished = stream.record_event()
        for each in mine:
            each.finish_event = finished

    def _perform(self, item: FusedResponse, entries: list[TensorTableEntry | None]) -> None:
        request = item.request
        if request.kind != "allreduce":
            getattr(self, f"_{request.kind}")(item.responses[0], entries[0])
        elif not (item.small and self._allreduce_small(request, entries)):
            self._allreduce(item.responses, entries)

    # ---- Reductions.

    def _allreduce(self, responses: list[Response], entries: list[TensorTableEntry | None]) -> None:
        first = responses[0].request
        comm = self.comms[first.device]
        inputs, outputs = [], []
        for response, entry in zip(responses, entries, strict=True):
            if entry is None:
                zeros = _zeros(response.request, comm.device)
                inputs += zeros
                outputs += zeros
                continue
            inputs += entry.inputs
            if entry.outputs is None:
                entry.outputs = [torch.empty_like(tensor) for tensor in entry.inputs]
            outputs += entry.outputs
            entry.results = entry.outputs
        for mine, theirs in _by_dtype(inputs, outputs):
            self._reduce(comm, first, mine, theirs)

    def _allreduce_small(self, first: Request, entries: list[TensorTableEntry | None]) -> bool:
        """Reduce small tensors by torch's own flattening; their results are views of one tensor.

        Returns False where it does nothing. It takes a fifth of the time of pack and unpack. It is
        used where its bytes are those of a fusion buffer, which other ranks may use, and so few
        that one result may keep the memory of all.
        """
        if None in entries or first.wire:
            return False
        inputs = [tensor for entry in entries for tensor in entry.inputs]
        in_place = [entry.outputs is not None for entry in entries]
        if any(in_place) and (not all(in_place) or _contiguous_view(inputs) is not None):
            return False
        flat = _scale(flatten(inputs), first.prescale)
        _all_reduce(self.comms[first.device], flat, first.op)
        parts = _scale(flat, first.postscale).split([tensor.numel() for tensor in inputs])
        if in_place[0]:
            shaped = [part if to.dim() == 1 else part.view(to.shape) for part, to in zip(parts, inputs, strict=True)]
            torch._foreach_copy_(inputs, shaped)
            for entry in entries:
                entry.results = entry.outputs
            return True
        at = 0
        for entry in entries:
            count = len(entry.inputs)
            # Each has a version counter of its own: autograd must not take a write to one for a
            # write to another.
            entry.results = [
                part.view(like.shape).data if like.dim() != 1 else part.data
                for part, like in zip(parts[at : at + count], entry.inputs, strict=True)
            ]
            at += count
        return True

    def _reduce(self, comm, request, inputs, outputs) -> None:
        """Reduce tensors of one dtype."""
        op, prescale, postscale = request.op, request.prescale, request.postscale
        if op == "adasum" or inputs[0].dtype in CAST_DTYPES:
            self._reduce_unsupported(comm, request, inputs, outputs)
            return
        if request.wire and inputs[0].dtype in (torch.float32, torch.float64):
            self._reduce_compressed(comm, request, inputs, outputs)
            return
        if len(inputs) > 1 and inputs[0].device == comm.device:
            self._reduce_fused(comm, op, prescale, postscale, inputs, outputs)
            return
        for tensor, out in zip(inputs, outputs, strict=True):
            if out is tensor:
                _all_reduce(comm, _scale(out, prescale), op)
            elif prescale == 1.0:
                _all_reduce(comm, tensor, op, out)
            else:
                _all_reduce(comm, _scale(out.copy_(tensor), prescale), op)
            _scale(out, postscale)

    def _reduce_fused(self, comm, op, prescale, postscale, inputs, outputs) -> None:
        flat = _contiguous_view(inputs) if all(map(is_, inputs, outputs)) else None
        if flat is not None:  # they are contiguous, as in a fusion buffer
            _scale(flat, prescale)
            _all_reduce(comm, flat, op)
            _scale(flat, postscale)
            return
        dtype = inputs[0].dtype
        floating = dtype.is_floating_point
        flat = self._buffer(comm, bucket_layout([tensor.numel() for tensor in inputs], dtype.itemsize).total, dtype)
        source = table = self._table("inputs", inputs, dtype)
        pack(source, flat, scale=prescale if floating else 1.0)
        if not floating:
            _scale(flat, prescale)
        plan, factor = _plan(comm, op, dtype).fold_after()
        plan.before(flat)
        comm.all_reduce(flat, plan.op)
        plan.after(flat)
        if not floating:
            _scale(flat, postscale)
        if not all(map(is_, inputs, outputs)):
            table = self._table("outputs", outputs, dtype)
        unpack(flat, table, scale=postscale * factor if floating else 1.0)
        source.release()
        table.release()

    def _table(self, use: str, tensors: list[torch.Tensor], dtype: torch.dtype) -> ReusableTable:
        """Return the table of a batch's tensors; batches of the same sizes share one."""
        key = use, dtype, *[tensor.numel() for tensor in tensors]
        table = self._tables.get(key)
        if table is None or not table.replace(tensors):
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = ReusableTable(tensors, dtype)
        return table

    def _reduce_compressed(self, comm, request, inputs, outputs) -> None:
        """Reduce fp32 or fp64 by a compressed wire, on which the sum is taken in fp32."""
        if request.wire not in self._compressors:
            self._compressors[request.wire] = make_compressor(request.wire)
        compressor, dtype = self._compressors[request.wire], inputs[0].dtype
        total = bucket_layout([tensor.numel() for tensor in inputs], dtype.itemsize).total
        if not total:
            return
        flat = _contiguous_view(inputs) if len(inputs) > 1 and all(map(is_, inputs, outputs)) else None
        packed = flat is None
        if packed:
            flat = self._buffer(comm, total, dtype)
            pack(inputs, flat)
        divisor = self.size if request.op == "avg" else 0
        # A compressor keeps state by a parameter: here by a tensor that stays, the fusion buffer or
        # the first gradient.
        key = self._fusion_buffers[comm.device.type] if packed else inputs[0]
        compressor.begin_backward()
        compressor.reduce(comm, Bucket(flat, [key], [0], 0), Scaling(request.prescale, divisor, request.postscale))
        if packed:
            unpack(flat, outputs)

    def _reduce_unsupported(self, comm, request, inputs, outputs) -> None:
        """Reduce by Adasum, or in dtypes whose sums the engine doesn't have."""
        for tensor, out in zip(inputs, outputs, strict=True):
            if out is not tensor:
                out.copy_(tensor)
            _scale(out, request.prescale)
        if request.op == "adasum":
            adasum_(comm, outputs)
        else:
            for out in outputs:
                if out.dtype == torch.bool:  # the sum of booleans is a boolean
                    op = {"sum": "max", "prod": "min"}.get(request.op, request.op)
                    comm.all_reduce(out.view(torch.uint8), op)
                else:
                    wide = out.to(torch.int32)
                    comm.all_reduce(wide, request.op)
                    out.copy_(wide)
        for out in outputs:
            _scale(out, request.postscale)

    def _reducescatter(self, response: Response, entry: TensorTableEntry) -> None:
        request = response.request
        comm = self.comms[request.device]
        entry.results = []
        for tensor in entry.inputs:
            least, more = divmod(tensor.shape[0], self.size)
            rows = [least + (rank < more) for rank in range(self.size)]
            inner = tensor.shape[1:]
            if min(rows) == max(rows):
                whole = tensor if request.prescale == 1.0 else _scale(tensor.clone(), request.prescale)
                out = torch.empty((rows[0], *inner), dtype=tensor.dtype, device=tensor.device)
                _reduce_scatter(comm, out, whole.contiguous(), request.op)
            else:  # each rank's part is padded to the longest
                whole = torch.zeros((self.size, rows[0], *inner), dtype=tensor.dtype, device=tensor.device)
                for part, source in zip(whole, tensor.split(rows), strict=True):
                    part[: len(source)] = source
                _scale(whole, request.prescale)
                out = torch.empty((rows[0], *inner), dtype=tensor.dtype, device=tensor.device)
                _reduce_scatter(comm, out, whole, request.op)
                out = out[: rows[self.rank]].clone()
            entry.results.append(_scale(out, request.postscale))

    # ---- Copies.

    def _allgather(self, response: Response, entry: TensorTableEntry | None) -> None:
        comm = self.comms[response.request.device]
        inputs = _zeros(response.request, comm.device, rows=0) if entry is None else entry.inputs
        results = []
        for index, tensor in enumerate(inputs):
            rows = [0 if each is None else each.request.shapes[index][0] for each in response.cached_requests]
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
        if entry is not None:
            entry.results = results

    def _broadcast(self, response: Response, entry: TensorTableEntry) -> None:
        request = response.request
        comm = self.comms[request.device]
        if entry.outputs is None:
            entry.outputs = [torch.empty_like(tensor) for tensor in entry.inputs]
        for tensor, out in zip(entry.inputs, entry.outputs, strict=True):
            if out is not tensor and self.rank == request.root:
                out.copy_(tensor)
            comm.broadcast(out, request.root)
        entry.results = entry.outputs

    def _alltoall(self, response: Response, entry: TensorTableEntry) -> None:
        comm = self.comms[response.request.device]
        tensor, splits = entry.inputs[0], entry.splits
        if splits is None:
            splits = [tensor.shape[0] // self.size] * self.size
        sent = torch.tensor(splits, dtype=torch.int64, device="cpu")
        received = torch.empty_like(sent)
        self.control.all_to_all(received, sent)
        rows = received.tolist()
        out = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=comm.device)
        comm.all_to_all(out, tensor[: sum(splits)].contiguous(), rows, list(splits))
        entry.results = [out, received.int()]

    def _barrier(self, response: Response, entry: TensorTableEntry | None) -> None:
        if entry is not None:
            entry.results = []  # nothing remains to be done once all ranks have submitted it

    # ---- Memory.

    def _buffer(self, comm, total: int, dtype: torch.dtype) -> torch.Tensor:
        kind, nbytes = comm.device.type, total * dtype.itemsize
        buffer = self._fusion_buffers.get(kind)
        if buffer is None or buffer.numel() < nbytes:
            self._fusion_views.pop(kind, None)
            self._fusion_buffers[kind] = buffer = None  # freed before the larger one is allocated
            self._fusion_buffers[kind] = buffer = comm.empty(1 << max(16, (nbytes - 1).bit_length()), torch.uint8)
        view = self._fusion_views.get(kind)
        if view is None or view.numel() != total or view.dtype != dtype:
            view = self._fusion_views[kind] = buffer[:nbytes].view(dtype)
        return view


def _zeros(request: Request, device: torch.device, rows: int | None = None) -> list[torch.Tensor]:
    """Return the tensors with which a rank that has joined takes part; ``rows``: of each, if not its own."""
    return [
        torch.zeros(shape if rows is None else (rows, *shape[1:]), dtype=getattr(torch, dtype), device=device)
        for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    ]


def _contiguous_view(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat view of tensors that are contiguous in memory as in a fusion buffer, else
    None.

    None, too, where a fusion buffer would pad one of them to 16 bytes: the user's memory at the
    padding must not be written.
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


def _plan(comm, op: str, dtype: torch.dtype) -> ReductionPlan:
    return plan_average(comm, dtype) if op == "avg" else ReductionPlan(op)


def _all_reduce(comm, tensor: torch.Tensor, op: str, out: torch.Tensor | None = None) -> None:
    """All-reduce a tensor in place, or into `out`; averages as `plan_average` says."""
    plan = _plan(comm, op, tensor.dtype)
    if out is not None and plan.divisor_before != 1:
        tensor, out = out.copy_(tensor), None
    plan.before(tensor)
    comm.all_reduce(tensor, plan.op, out=out)
    plan.after(tensor if out is None else out)


def _reduce_scatter(comm, out: torch.Tensor, whole: torch.Tensor, op: str) -> None:
    plan = _plan(comm, op, whole.dtype)
    if plan.divisor_before != 1:
        whole = whole / plan.divisor_before
    comm.reduce_scatter(out, whole, plan.op)
    plan.after(out)


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place; integers by way of fp64, rounded towards 0."""
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
