"""GradientBucket: parameters whose gradients are reduced together, and the copies between these
gradients and the bucket's flat buffer.

`GradientBuckets` and Horovod's DistributedOptimizer reduce such buckets. DDP fills the buckets of
its own; those come to the hook as a ready-made `Bucket`.
"""

from __future__ import annotations

import operator

import torch
from torch.autograd.graph import increment_version

from ..arrays import kind_of
from ..compression import Bucket, ReductionPlan
from ..cuda_state import current_stream, wait_for_stream
from ..errors import InvalidArgument
from ..kernels import pack, unpack
from ..kernels.parameter_arrays import dense_strides
from ..kernels.reusable_table import ReusableTable
from ..layout import bucket_layout
from ..torch_compat import cuda_current_raw_stream, is_traceable_wrapper_subclass
from .grad_memory import (
    flat_memory,
    grad_dtype,
    overlaps_itself,
    read_versions,
    real_dtype,
    view_in_flat,
)

__all__ = ["GradientBucket", "allocate_flats"]

_OP = "GradientBuckets"
# Bytes. A gradient of this size or more is copied to its view of the bucket as soon as the backward
# has made it: malloc then reuses its memory for the next one, and needn't get pages from the system.
# Smaller ones are copied together.
_COPY_EARLY_BYTES = 256 << 10


class GradientBucket(Bucket):
    """Parameters whose gradients are reduced together.

    The elements of a gradient have the order of the parameter's own memory when the bucket was
    made, so that the ranks agree on it whatever strides their gradients have. A gradient with
    another layout goes by a copy.

    ``members``: (name or None, parameter) pairs; ``dtype``: of the elements on the wire, where a
    complex number is two. ``missing``: indices of the parameters whose gradients have not come
    since the last round; hooks of a `BucketFiller` remove them. ``sending``: the tensor to reduce,
    from `pack` to `forget`: the flat buffer, or the memory of a gradient. ``work``: the operation
    that reduces it, which the owner starts and waits for. ``plan``: the factors of that reduction, of
    which `unpack` applies those that come after it. ``has``: for each parameter, whether
    `read_grads` found a gradient.
    """

    # Attributes, not the base class's properties: nothing is looked up later.
    params: list = []
    offsets: list = []
    _read_versions = staticmethod(read_versions)

    def __init__(self, index: int, members: list, dtype: torch.dtype, device: torch.device):
        params = [param for _, param in members]
        counts = [param.numel() << param.is_complex() for param in params]
        offsets, self.total = bucket_layout(counts, dtype.itemsize)
        super().__init__(None, params, list(offsets), index)
        self.params, self.offsets = self._params, self._offsets
        self.dtype = dtype
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.strides = [dense_strides(param) for param in params]
        self.work = None
        self.plan = ReductionPlan()
        self._given_names = [name for name, _ in members]
        self._shapes = [param.shape for param in params]
        self._kinds = [grad_dtype(param) for param in params]
        self._simple = not any(self.strides) and not any(param.is_complex() for param in params)
        self._table: ReusableTable | None = None
        self._views: list[torch.Tensor] | None = None
        self._reader = None  # the CUDA stream that read the flat buffer last
        self.missing: set[int] = set()
        self.rewind()

    def _find_names(self) -> list[str | None]:
        names = self._given_names
        if None in names:
            names = [given or found for given, found in zip(names, super()._find_names(), strict=True)]
        return names

    # ---- Memory.

    @property
    def casts(self) -> bool:
        """Whether the elements are sent in another dtype than the gradients'."""
        return any(real_dtype(kind) != self.dtype for kind in self._kinds)

    def allocate(self, empty, *, views: bool = False) -> None:
        """Allocate the flat buffer by ``empty(elements, dtype=...)``.

        ``views``: from the next `pack` on the gradients are views of it, unless they are cast.
        """
        self.flat = empty(self.total, dtype=self.dtype)
        if views and not self.casts:
            self.flat.zero_()
            self._views = [
                view_in_flat(self.flat, offset, param, strides)
                for offset, param, strides in zip(self.offsets, self.params, self.strides, strict=True)
            ]

    def early_views(self) -> list[torch.Tensor | None]:
        """Return each gradient's view, where the gradient is to be copied to it by itself."""
        if self._views is None:
            return [None] * len(self.params)
        return [view if view.is_cpu and view.nbytes >= _COPY_EARLY_BYTES else None for view in self._views]

    def free(self) -> None:
        """Free the buffer and the table."""
        self.flat = self.work = self._table = self._views = None

    # ---- Gradients.

    def read_grads(self) -> None:
        """Take the parameters' current gradients.

        Raises `InvalidArgument` for one that can't be averaged.
        """
        if self._streams:
            self._wait_for_backward()
        self._versions, self._staged = None, {}
        grads = self._grads = self._take_grads()
        views = self._views
        self._in_flat = views is not None and not any(map(operator.is_not, grads, views))
        if self._in_flat:
            self.has = [True] * len(grads)
            return
        self.has = [grad is not None for grad in grads]
        table = self._table
        if not self._simple or table is None or not all(self.has) or not table.replace(grads):
            tensors = [self._grad_memory(at, grad) for at, grad in enumerate(grads)]
            if table is None or not table.replace(tensors):
                self._table = None
                self._table = ReusableTable(tensors, self.dtype)

    def _take_grads(self) -> list[torch.Tensor | None]:
        return [param.grad for param in self.params]

    def _grad_memory(self, at: int, grad: torch.Tensor | None) -> torch.Tensor:
        """Return a gradient's memory, flat and real: its own, or of a copy in the bucket's layout,
        or zeros for None.
        """
        shape, strides, kind = self._shapes[at], self.strides[at], self._kinds[at]
        if grad is not None:
            self._check(at, grad)
            same_layout = grad.is_contiguous() if strides is None else dense_strides(grad) == strides
            if same_layout and not grad.is_conj() and not grad.is_neg():
                return flat_memory(grad)
        if strides is None:
            staged = torch.zeros(shape, dtype=kind, device=self.device)
        else:
            staged = torch.empty_strided(shape, strides, dtype=kind, device=self.device).zero_()
        if grad is not None:
            staged.copy_(grad)
        self._staged[at] = staged
        return flat_memory(staged)

    def _check(self, at: int, grad: torch.Tensor) -> None:
        """Raise `InvalidArgument` for a gradient that doesn't fit the bucket."""
        wrong = None
        if grad.layout is not torch.strided or grad.is_nested:
            layout = "nested" if grad.is_nested else str(grad.layout).removeprefix("torch.")
            wrong = (
                f"is {layout}: only dense ones are averaged; build the embedding with sparse=False, or use .to_dense()"
            )
        elif is_traceable_wrapper_subclass(grad):
            wrong = f"is a {kind_of(grad)}: only plain tensors are averaged"
        elif grad.dtype is not self._kinds[at]:
            wrong = f"is {grad.dtype}, and was to be {self._kinds[at]} when the buckets were made: make them again"
        elif grad.device != self.device:
            wrong = f"is on {grad.device}, the buckets are on {self.device}: make them after moving the model"
        elif grad.shape != self._shapes[at]:
            wrong = (
                f"has shape {tuple(grad.shape)}, the parameter had {tuple(self._shapes[at])} when the buckets were "
                "made: make them again"
            )
        if wrong:
            raise InvalidArgument(f"the gradient of {self.names()[at]} {wrong}", op=_OP)

    def spans(self) -> tuple[list[int], list[int]]:
        """Return the addresses where the memory to be written begins and ends, of each gradient."""
        return self._table.spans()

    @property
    def recorded(self) -> bool:
        """Whether `pack` has recorded the gradients for `find_changed`."""
        return self._versions is not None

    def find_changed(self) -> int | None:
        """Return the index of a gradient that was replaced, moved or written to since `pack`
        recorded it, or None.
        """
        grads = [param.grad for param in self.params]
        versions = self._read_versions(grads)
        if not any(map(operator.is_not, self._grads, grads)) and self._versions == versions:
            return None
        pairs = zip(self._grads, grads, self._versions, versions, strict=True)
        return next(at for at, (old, new, was, now) in enumerate(pairs) if old is not new or was != now)

    # ---- Streams on which a backward makes gradients.

    def add_stream(self) -> None:
        """Record the CUDA stream on which a gradient was just made: that of its forward."""
        raw = cuda_current_raw_stream(self.device.index)
        if raw not in self._streams:
            self._streams[raw] = current_stream(self.device)

    def _wait_for_backward(self) -> None:
        """Make the current stream wait for the other streams on which gradients were made."""
        current = current_stream(self.device)
        for stream in self._streams.values():
            if stream != current:
                current.wait_stream(stream)
        self._use_grads_on(current)

    def _use_grads_on(self, current: torch.cuda.Stream) -> None:
        """Keep the memory of the gradients, some of which other streams made, for this stream."""
        if any(stream != current for stream in self._streams.values()):
            for param in self.params:
                if param.grad is not None:
                    param.grad.record_stream(current)

    # ---- To the flat buffer and back.

    def pack(self, *, record: bool) -> None:
        """Copy the gradients of `read_grads` into the flat buffer; a missing one is zeros.

        ``record``: let `find_changed` notice later writes. A bucket without a flat buffer is one
        gradient, which is reduced in place.
        """
        self.sending = self._collect()
        if record:
            self._versions = self._read_versions(self._grads)

    def _collect(self) -> torch.Tensor:
        """Return the tensor to send, complete."""
        if self.flat is None:
            (grad,) = self._table.tensors
            return grad
        if not self._in_flat:
            if self._reader is not None:
                wait_for_stream(self._reader)
            pack(self._table, self.flat)
            if self._views is not None:
                self._table.release()  # frees the gradients that the backward made
                for at, view in enumerate(self._views):
                    if self.has[at]:
                        self.params[at].grad = self._grads[at] = view
        return self.flat

    def unpack(self, used: list) -> None:
        """Copy the result back, unless the gradients are views of it.

        A parameter that is `used` on some rank and has no gradient here gets one.
        """
        if self.on_cuda:
            self._reader = current_stream(self.device)
            self._use_grads_on(self._reader)
        if self._views is not None:
            if not all(self.has):
                for param, view, has, use in zip(self.params, self._views, self.has, used, strict=True):
                    if use and not has:
                        param.grad = view
            return
        if self.flat is not None:
            plan, factor = self.plan.fold_after()
            plan.after(self.flat)
            unpack(self.flat, self._table, scale=factor)
        elif not self.sending.is_inference():
            increment_version(self.sending)
        for at, staged in self._staged.items():
            grad = self._grads[at]
            if grad is None:
                if used[at]:
                    self.params[at].grad = staged
            elif overlaps_itself(grad):  # an expanded gradient can't hold different elements
                self.params[at].grad = staged
            else:
                grad.copy_(staged)

    # ---- Rounds.

    def wait_for_work(self) -> None:
        """Wait for the operation under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def forget(self) -> None:
        """Release the gradients."""
        self._grads: list = []
        self.has: list[bool] = []
        self._versions: list | None = None
        self.sending: torch.Tensor | None = None
        self._staged: dict[int, torch.Tensor] = {}
        self._in_flat = False  # whether the gradients that were read are the views
        if self._table is not None:
            self._table.release()

    def rewind(self) -> None:
        """Begin a round: release the gradients, and wait for all of them to come."""
        self._streams: dict[int, torch.cuda.Stream] = {}  # by address
        self.missing.update(range(len(self.params)))
        self.forget()


def allocate_flats(buckets: list[GradientBucket], comms: dict, *, shared: bool, in_place: bool) -> None:
    """Allocate the buckets' flat buffers from the communicators of their devices.

    `shared`: one buffer for all buckets of a device, since they are reduced one by one. With
    `shared` and `in_place` a bucket of a single gradient on the host needs no buffer, as nobody
    writes to the gradient meanwhile.
    """
    without = [shared and in_place and len(bucket.params) == 1 and bucket.device.type == "cpu" for bucket in buckets]
    packed = [bucket for bucket, none in zip(buckets, without, strict=True) if not none]
    largest: dict[torch.device, int] = {}
    for bucket in packed if shared else ():
        nbytes = bucket.total * bucket.dtype.itemsize
        largest[bucket.device] = max(largest.get(bucket.device, 0), nbytes)
    memory = {device: comms[device].empty(nbytes, torch.uint8) for device, nbytes in largest.items()}
    for bucket in packed:
        if shared:
            nbytes = bucket.total * bucket.dtype.itemsize
            bucket.flat = memory[bucket.device][:nbytes].view(bucket.dtype)
        else:
            bucket.allocate(comms[bucket.device].empty)
