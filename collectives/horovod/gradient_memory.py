"""Where gradients lie while they are reduced: one flat piece of memory for each unit of parameters that go as one.

Once a unit has memory that the engine uses with no staging, each ``.grad`` becomes a view of its place there, so that
nothing is copied back; a gradient that a backward has made elsewhere is copied to its place once.
"""

from __future__ import annotations

import operator

import torch

from ..gradients.bucket import GradientBucket
from ..kernels import pack
from .compression import BF16Compressor, Compressor, FP16Compressor, Int8Compressor, NoneCompressor
from .messages import DTYPE_NAMES, Signature, Submission, request_of
from .operations import sparse_allreduce_async

__all__ = ["Compressed", "Member", "Sparse", "Unit", "can_pack", "element_type"]

# Bytes. A gradient from here on is copied to its place as soon as it is there: so malloc gives its memory to the next
# one, and needn't have it from the system, page by page. Smaller ones are copied together.
_LARGE = 256 << 10
_PACKED = (NoneCompressor, FP16Compressor, BF16Compressor, Int8Compressor)


class Member:
    """A parameter, its name, and how many more backwards are to make its gradient before it is reduced.

    ``sparse``: whether its gradients are; None until some rank has had one. ``unit``: that it travels in. ``seen``: the
    gradient as the last of the backwards left it. ``slot``: its place, where it is to be copied there by itself.
    """

    __slots__ = ("left", "name", "param", "seen", "slot", "sparse", "unit", "version")

    def __init__(self, name: str, param: torch.Tensor, passes: int):
        self.name = name
        self.param = param
        self.left = passes
        self.sparse: bool | None = None
        self.unit: Unit | None = None
        self.seen: torch.Tensor | None = None
        self.slot: torch.Tensor | None = None

    def move(self) -> None:
        """Copy a large gradient to its place."""
        slot, grad = self.slot, self.param.grad
        if grad is not slot and not grad.is_sparse and grad.shape == slot.shape and grad.dtype is slot.dtype:
            slot.copy_(grad)
            self.param.grad = slot

    def see(self) -> None:
        """Remember the gradient as it is."""
        self.seen = grad = self.param.grad
        self.version = grad._version

    def touched(self) -> bool:
        """Tell whether the gradient was written to or replaced since it was seen."""
        seen = self.seen
        return seen is not None and (self.param.grad is not seen or seen._version != self.version)


def can_pack(compression) -> bool:
    """Tell whether the copy to a unit's memory does all that a compression does beforehand."""
    return compression in _PACKED


def element_type(param: torch.Tensor, compression) -> torch.dtype:
    """Give the dtype in which the elements of a parameter's gradient travel."""
    dtype = getattr(param, "grad_dtype", None) or param.dtype
    dtype = dtype.to_real() if dtype.is_complex else dtype
    return getattr(compression, "dtype", dtype) if can_pack(compression) and dtype.is_floating_point else dtype


class _Sent:
    """What is submitted as one operation, and waited for."""

    submission: Submission | None = None
    sequence = -1  # of the operation, once it is done: the same on all ranks
    pending = 1  # members whose gradients aren't ready
    apart = True  # whether what is reduced is a copy of the gradients, or has another version counter

    def wait(self, coordinator) -> None:
        """Block until the reduction is done; on CUDA order the current stream after it."""
        coordinator.wait(self.submission)
        self.sequence = self.submission.sequence

    def ready(self) -> bool:
        """Take note that the backward has made one more gradient; tell whether it was the last one."""
        self.pending -= 1
        return not self.pending

    def present(self) -> list[bool]:
        """Tell of each member whether it has a gradient now."""
        return [param.grad is not None for param in self.params]


class Unit(_Sent, GradientBucket):
    """Members whose gradients are reduced as one operation.

    ``reduction``: the fields of its `Signature` that say how. ``pending``: members whose gradients aren't ready;
    ``collected``: whether what is to be sent has been; ``submission``: while it is under way.
    """

    def __init__(self, index: int, members: list[Member], name: str, dtype: torch.dtype, reduction: dict):
        first = members[0].param
        super().__init__(index, [(member.name, member.param) for member in members], dtype, first.device)
        self.members = members
        self.pending = len(members)
        self.collected = False
        self._slots: list[torch.Tensor] | None = None
        self._streams: list = []  # on which the backward has made gradients
        shape = (*first.shape, 2) if first.is_complex() else tuple(first.shape)
        self._signature = Signature("allreduce", name, (DTYPE_NAMES[dtype],), (shape,), self.device.type, **reduction)

    def lay_out(self, allocate, *, views: bool) -> None:
        """Take memory by ``allocate(elements, dtype=...)``; ``views``: the gradients are to lie there from now on."""
        self.flat = allocate(self.total, dtype=self.dtype).zero_()
        self._signature = self._signature._replace(shapes=((self.total,),))
        if views and not self.casts:
            self._slots = [
                _place(self.flat, offset, param, strides)
                for offset, param, strides in zip(self.offsets, self.params, self.strides, strict=True)
            ]
            for member, slot in zip(self.members, self._slots, strict=True):
                member.slot = slot if slot.is_cpu and slot.nbytes >= _LARGE else None

    @property
    def apart(self) -> bool:
        """Whether the reduction leaves the gradients' version counters alone."""
        return self.flat is not None

    @property
    def casts(self) -> bool:
        """Whether the elements travel in another dtype."""
        return any(element_type(param, None) != self.dtype for param in self.params)

    def ready(self) -> bool:
        """Take note that the backward has made one more gradient; tell whether it was the last one."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if stream not in self._streams:
                self._streams.append(stream)
        return super().ready()

    def _order(self) -> None:
        """Order the current stream after those on which gradients were made, where a model has run on several."""
        if not self._streams:
            return
        current = torch.cuda.current_stream(self.device)
        others = [stream for stream in self._streams if stream != current]
        for stream in others:
            current.wait_stream(stream)
        if others:
            for param in self.params:
                if param.grad is not None:
                    param.grad.record_stream(current)
        self._streams = []

    def collect(self) -> None:
        """Bring the gradients to where they are sent from, zeros for missing ones."""
        self._order()
        for param in self.params:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        slots = self._slots
        grads = [param.grad for param in self.params]
        if slots is not None and not any(map(operator.is_not, grads, slots)):
            self.has, self._staged = [True] * len(slots), {}
            self.sending = self.flat
        else:
            self.read_grads()
            if self.flat is None:
                (self.sending,) = self._table.tensors
            else:
                pack(self._table, self.flat)
                self.sending = self.flat
            if slots is not None:
                self._table.release()  # so that what the backward made is freed
                for param, slot, has in zip(self.params, slots, self.has, strict=True):
                    if has:
                        param.grad = slot
        self.collected = True

    def submit(self, coordinator, *, waits: bool) -> None:
        """Start the reduction of what was collected."""
        tensors = [self.sending]
        self.submission = Submission(request_of(self._signature), tensors, tensors)
        coordinator.submit(self.submission, waits=waits)

    def finish(self, used: list[bool]) -> None:
        """Hand over the result; a member that some rank has ``used`` and that has no gradient here gets one."""
        if self._slots is None:
            self.unpack(used)
        elif not all(self.has):
            for param, slot, has, use in zip(self.params, self._slots, self.has, used, strict=True):
                if use and not has:
                    param.grad = slot

    def reset(self) -> None:
        """Begin a new round."""
        self.pending = len(self.members)
        self.collected = False
        self.submission = None
        self._streams = []
        self.forget()


class Compressed(_Sent):
    """One parameter whose gradient goes through a compression of the user's own; otherwise as `Unit`."""

    def __init__(self, member: Member, name: str, compression: type[Compressor], reduction: dict):
        self._name = name
        self.members = [member]
        self.params = [member.param]
        self.pending = 1
        self.collected = False
        self.has = [False]
        self._compression = compression
        self._reduction = reduction

    def collect(self) -> None:
        """Compress the gradient, or zeros."""
        grad = self.params[0].grad
        self.has = [grad is not None]
        grad = torch.zeros_like(self.params[0]) if grad is None else grad.detach()
        small, self._context = self._compression.compress(grad.to_dense() if grad.is_sparse else grad)
        # Of its own memory: what it was made of stays as it is until the end.
        self.sending = small.clone() if small.data_ptr() == grad.data_ptr() else small.contiguous()
        self.collected = True

    def submit(self, coordinator, *, waits: bool) -> None:
        """Start the reduction of what was collected."""
        sending = self.sending
        signature = Signature(
            "allreduce", self._name, (DTYPE_NAMES[sending.dtype],), (tuple(sending.shape),), sending.device.type,
            **self._reduction,
        )  # fmt: skip
        self.submission = Submission(request_of(signature), [sending], [sending])
        coordinator.submit(self.submission, waits=waits)

    def finish(self, used: list[bool]) -> None:
        """Hand over the result."""
        if used[0]:
            param = self.params[0]
            result = self._compression.decompress(self.sending, self._context).to(param.dtype).view(param.shape)
            if param.grad is None or param.grad.is_sparse:
                param.grad = result
            else:
                param.grad.copy_(result)

    def reset(self) -> None:
        """Begin a new round."""
        self.pending, self.collected, self.submission = 1, False, None
        self.sending = self._context = None


class Sparse(_Sent):
    """One parameter with sparse gradients, of which the ranks gather all entries; otherwise as `Unit`."""

    def __init__(self, member: Member, name: str, op, process_set):
        self.members = [member]
        self.params = [member.param]
        self.pending = 1
        self.collected = False
        self._name, self._op, self._process_set = name, op, process_set

    def collect(self) -> None:
        """Take the gradient's entries, or none."""
        param = self.params[0]
        grad = param.grad
        if grad is None:
            rows = torch.zeros((1, 0), dtype=torch.int64, device=param.device)
            values = torch.zeros((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
            grad = torch.sparse_coo_tensor(rows, values, param.shape, check_invariants=False)
        self._sending = grad if grad.is_sparse else grad.to_sparse(1)
        self.collected = True

    def submit(self, coordinator, *, waits: bool) -> None:
        """Start to gather what was collected."""
        self.submission = sparse_allreduce_async(self._sending, self._name, self._op, self._process_set)

    def wait(self, coordinator) -> None:
        """Block until all entries are there."""
        self._result = self.submission()

    def finish(self, used: list[bool]) -> None:
        """Hand over the result."""
        if used[0]:
            self.params[0].grad = self._result

    def reset(self) -> None:
        """Begin a new round."""
        self.pending, self.collected, self.submission = 1, False, None
        self._sending = self._result = None


def _place(flat: torch.Tensor, offset: int, param: torch.Tensor, strides) -> torch.Tensor:
    """Give a gradient's place in a flat piece of memory, as a tensor with a version counter of its own."""
    dtype = flat.dtype.to_complex() if param.is_complex() else flat.dtype
    if param.is_complex():
        offset //= 2
    slot = torch.empty(0, dtype=dtype, device=flat.device)
    if strides is None:
        return slot.set_(flat.untyped_storage(), offset, param.shape)
    return slot.set_(flat.untyped_storage(), offset, param.shape, _whole(strides, param))


def _whole(strides, param) -> tuple[int, ...]:
    # Along a single element any stride will do: the parameter's own.
    each = zip(strides, param.stride(), param.shape, strict=True)
    return tuple(own if size == 1 else given for given, own, size in each)
