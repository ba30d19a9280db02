"""Buckets of an optimizer's gradients: one flat tensor for each allreduce.

Once a bucket has memory that the engine uses with no staging, each ``.grad`` becomes a view of it,
so that nothing is copied back; a gradient that a backward has made elsewhere is copied into the
bucket once.
"""

from __future__ import annotations

import operator

import torch

from ..gradients.bucket import GradientBucket
from ..kernels import pack
from .compression import BF16Compressor, Compressor, FP16Compressor, Int8Compressor, NoneCompressor
from .messages import DTYPE_NAMES, Request, TensorTableEntry, cached_request
from .operations import sparse_allreduce_async

__all__ = ["AllreduceBucket", "CompressedGradient", "ParameterState", "SparseGradient", "can_pack", "wire_dtype"]

# Bytes. A gradient of this size or more is copied into the bucket as soon as the backward has made
# it: malloc then reuses its memory for the next one, and needn't get pages from the system. Smaller
# ones are copied together.
_COPY_EARLY = 256 << 10
_PACKABLE = (NoneCompressor, FP16Compressor, BF16Compressor, Int8Compressor)


class ParameterState:
    """A parameter and the state of its gradient in this step.

    ``backwards_left``: backwards before the gradient is reduced. ``sparse``: whether its gradients
    are sparse; None until some rank has had one. ``bucket``: the bucket that reduces it.
    ``recorded_grad`` and ``version``: the gradient after the last backward. ``view``: its view of
    the bucket, where the gradient is copied by itself.
    """

    __slots__ = ("backwards_left", "name", "param", "recorded_grad", "view", "sparse", "bucket", "version")

    def __init__(self, name: str, param: torch.Tensor, passes: int):
        self.name = name
        self.param = param
        self.backwards_left = passes
        self.sparse: bool | None = None
        self.bucket: AllreduceBucket | None = None
        self.recorded_grad: torch.Tensor | None = None
        self.view: torch.Tensor | None = None

    def copy_to_view(self) -> None:
        """Copy a large gradient into the bucket."""
        view, grad = self.view, self.param.grad
        if grad is not view and not grad.is_sparse and grad.shape == view.shape and grad.dtype is view.dtype:
            view.copy_(grad)
            self.param.grad = view

    def record_version(self) -> None:
        """Record the gradient and its version."""
        self.recorded_grad = grad = self.param.grad
        self.version = grad._version

    def was_modified(self) -> bool:
        """Return whether the gradient was written or replaced since `record_version`."""
        recorded_grad = self.recorded_grad
        return recorded_grad is not None and (
            self.param.grad is not recorded_grad or recorded_grad._version != self.version
        )


def can_pack(compression) -> bool:
    """Return whether the copy into a bucket does all that a compression does before the
    reduction.
    """
    return compression in _PACKABLE


def wire_dtype(param: torch.Tensor, compression) -> torch.dtype:
    """Return the dtype in which the elements of a parameter's gradient are sent."""
    dtype = getattr(param, "grad_dtype", None) or param.dtype
    dtype = dtype.to_real() if dtype.is_complex else dtype
    return getattr(compression, "dtype", dtype) if can_pack(compression) and dtype.is_floating_point else dtype


class _PendingReduction:
    """Reduction of some parameters' gradients, submitted as one operation."""

    entry: TensorTableEntry | None = None
    sequence = -1  # of the operation once it is done; the same on all ranks
    pending = 1  # parameters whose gradients aren't ready
    separate_versions = True  # the reduced tensor is a copy of the gradients, or has another version counter

    def wait(self, controller) -> None:
        """Block until the reduction is done; on CUDA make the current stream wait for it."""
        controller.wait(self.entry)
        self.sequence = self.entry.sequence

    def mark_ready(self) -> bool:
        """Count one more gradient that the backward has made.

        Return whether it was the last one.
        """
        self.pending -= 1
        return not self.pending

    def has_gradients(self) -> list[bool]:
        """Return for each parameter whether it has a gradient now."""
        return [param.grad is not None for param in self.params]


class AllreduceBucket(_PendingReduction, GradientBucket):
    """Gradients that are reduced as one allreduce.

    ``reduction``: the fields op, prescale, postscale and wire of its `Request`. ``pending``: number
    of gradients that aren't ready. ``collected``: whether the tensor to send is complete.
    ``entry``: the operation, while it is under way.
    """

    def __init__(self, index: int, states: list[ParameterState], name: str, dtype: torch.dtype, reduction: dict):
        first = states[0].param
        super().__init__(index, [(state.name, state.param) for state in states], dtype, first.device)
        self.states = states
        self.pending = len(states)
        self.collected = False
        self._views: list[torch.Tensor] | None = None
        self._streams: list = []  # streams on which the backward has made gradients
        shape = (*first.shape, 2) if first.is_complex() else tuple(first.shape)
        self._request = Request("allreduce", name, (DTYPE_NAMES[dtype],), (shape,), self.device.type, **reduction)

    def allocate(self, empty, *, views: bool) -> None:
        """Allocate the flat tensor by ``empty(elements, dtype=...)``.

        ``views``: gradients become views of it.
        """
        self.flat = empty(self.total, dtype=self.dtype).zero_()
        self._request = self._request._replace(shapes=((self.total,),))
        if views and not self.casts:
            self._views = [
                _bucket_view(self.flat, offset, param, strides)
                for offset, param, strides in zip(self.offsets, self.params, self.strides, strict=True)
            ]
            for state, view in zip(self.states, self._views, strict=True):
                state.view = view if view.is_cpu and view.nbytes >= _COPY_EARLY else None

    @property
    def separate_versions(self) -> bool:
        """Whether the reduction doesn't change the gradients' version counters."""
        return self.flat is not None

    @property
    def casts(self) -> bool:
        """Whether the elements are sent in another dtype."""
        return any(wire_dtype(param, None) != self.dtype for param in self.params)

    def mark_ready(self) -> bool:
        """Count one more gradient that the backward has made.

        Return whether it was the last one.
        """
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if stream not in self._streams:
                self._streams.append(stream)
        return super().mark_ready()

    def _wait_for_streams(self) -> None:
        """Make the current stream wait for the other streams on which a model's backward has made
        gradients.
        """
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
        """Complete the tensor to send: copy gradients into it, and zeros for missing ones."""
        self._wait_for_streams()
        for param in self.params:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        views = self._views
        grads = [param.grad for param in self.params]
        if views is not None and not any(map(operator.is_not, grads, views)):
            self.has, self._staged = [True] * len(views), {}
            self.sending = self.flat
        else:
            self.read_grads()
            if self.flat is None:
                (self.sending,) = self._table.tensors
            else:
                pack(self._table, self.flat)
                self.sending = self.flat
            if views is not None:
                self._table.release()  # frees the gradients that the backward made
                for param, view, has in zip(self.params, views, self.has, strict=True):
                    if has:
                        param.grad = view
        self.collected = True

    def submit(self, controller, *, waits: bool) -> None:
        """Start the reduction of the collected tensor."""
        tensors = [self.sending]
        self.entry = TensorTableEntry(cached_request(self._request), tensors, tensors)
        controller.submit(self.entry, waits=waits)

    def write_back(self, used: list[bool]) -> None:
        """Write the result to the gradients.

        A parameter that some rank has ``used`` gets one where it has none here.
        """
        if self._views is None:
            self.unpack(used)
        elif not all(self.has):
            for param, view, has, use in zip(self.params, self._views, self.has, used, strict=True):
                if use and not has:
                    param.grad = view

    def reset(self) -> None:
        """Reset for the next step."""
        self.pending = len(self.states)
        self.collected = False
        self.entry = None
        self._streams = []
        self.forget()


class CompressedGradient(_PendingReduction):
    """Gradient of one parameter with a compression of the user's own.

    In all else as `AllreduceBucket`.
    """

    def __init__(self, state: ParameterState, name: str, compression: type[Compressor], reduction: dict):
        self._name = name
        self.states = [state]
        self.params = [state.param]
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
        # In memory of its own: the gradient stays unchanged until the result is written back.
        self.sending = small.clone() if small.data_ptr() == grad.data_ptr() else small.contiguous()
        self.collected = True

    def submit(self, controller, *, waits: bool) -> None:
        """Start the reduction of the collected tensor."""
        sending = self.sending
        request = Request(
            "allreduce", self._name, (DTYPE_NAMES[sending.dtype],), (tuple(sending.shape),), sending.device.type,
            **self._reduction,
        )  # fmt: skip
        self.entry = TensorTableEntry(cached_request(request), [sending], [sending])
        controller.submit(self.entry, waits=waits)

    def write_back(self, used: list[bool]) -> None:
        """Write the result to the gradient."""
        if used[0]:
            param = self.params[0]
            result = self._compression.decompress(self.sending, self._context).to(param.dtype).view(param.shape)
            if param.grad is None or param.grad.is_sparse:
                param.grad = result
            else:
                param.grad.copy_(result)

    def reset(self) -> None:
        """Reset for the next step."""
        self.pending, self.collected, self.entry = 1, False, None
        self.sending = self._context = None


class SparseGradient(_PendingReduction):
    """Sparse gradient of one parameter, whose entries all ranks gather.

    In all else as `AllreduceBucket`.
    """

    def __init__(self, state: ParameterState, name: str, op, process_set):
        self.states = [state]
        self.params = [state.param]
        self.pending = 1
        self.collected = False
        self._name, self._op, self._process_set = name, op, process_set

    def collect(self) -> None:
        """Take the gradient's entries, or none without a gradient."""
        param = self.params[0]
        grad = param.grad
        if grad is None:
            rows = torch.zeros((1, 0), dtype=torch.int64, device=param.device)
            values = torch.zeros((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
            grad = torch.sparse_coo_tensor(rows, values, param.shape, check_invariants=False)
        self._sending = grad if grad.is_sparse else grad.to_sparse(1)
        self.collected = True

    def submit(self, controller, *, waits: bool) -> None:
        """Start to gather the entries."""
        self.entry = sparse_allreduce_async(self._sending, self._name, self._op, self._process_set)

    def wait(self, controller) -> None:
        """Block until all entries are gathered."""
        self._result = self.entry()

    def write_back(self, used: list[bool]) -> None:
        """Write the result to the gradient."""
        if used[0]:
            self.params[0].grad = self._result

    def reset(self) -> None:
        """Reset for the next step."""
        self.pending, self.collected, self.entry = 1, False, None
        self._sending = self._result = None


def _bucket_view(flat: torch.Tensor, offset: int, param: torch.Tensor, strides) -> torch.Tensor:
    """Return a gradient's view of a flat tensor, with a version counter of its own."""
    dtype = flat.dtype.to_complex() if param.is_complex() else flat.dtype
    if param.is_complex():
        offset //= 2
    view = torch.empty(0, dtype=dtype, device=flat.device)
    if strides is None:
        return view.set_(flat.untyped_storage(), offset, param.shape)
    return view.set_(flat.untyped_storage(), offset, param.shape, _strides_of(strides, param))


def _strides_of(strides, param) -> tuple[int, ...]:
    # A dimension of one element can have any stride: take the parameter's own.
    each = zip(strides, param.stride(), param.shape, strict=True)
    return tuple(own if size == 1 else stride for stride, own, size in each)
