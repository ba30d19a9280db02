"""Buckets of an optimizer's gradients, each of which is one operation of a controller.

`AllreduceBucket` for dense gradients; `CompressedGradient` and `SparseGradient` for those of one
parameter that go in another way.
"""

from __future__ import annotations

import torch

from ..arrays import TORCH_NAMES
from ..gradients.bucket import GradientBucket
from ..gradients.grad_memory import grad_dtype, real_dtype
from .compression import BF16Compressor, Compressor, FP16Compressor, Int8Compressor, NoneCompressor
from .messages import CachedRequest, Request, TensorTableEntry, cached_request
from .operations import sparse_allreduce_async

__all__ = ["AllreduceBucket", "CompressedGradient", "SparseGradient", "can_pack", "wire_dtype"]

_PACKABLE = (NoneCompressor, FP16Compressor, BF16Compressor, Int8Compressor)


def can_pack(compression) -> bool:
    """Return whether the copy into a bucket does all that a compression does before the
    reduction.
    """
    return compression in _PACKABLE


def wire_dtype(param: torch.Tensor, compression) -> torch.dtype:
    """Return the dtype in which the elements of a parameter's gradient are sent."""
    dtype = real_dtype(grad_dtype(param))
    return getattr(compression, "dtype", dtype) if can_pack(compression) and dtype.is_floating_point else dtype


class AllreduceBucket(GradientBucket):
    """Gradients that are reduced as one allreduce.

    ``name``: of the operation. ``reduction``: the fields op, prescale, postscale and wire of its
    `Request`. ``work``: its entry, while it is under way. ``sequence``: its number once it is done,
    the same on all ranks.
    """

    sequence = -1

    def __init__(self, name: str, members: list, dtype: torch.dtype, reduction: dict):
        super().__init__(0, members, dtype, members[0][1].device)
        self._name = name
        self._reduction = reduction
        self._cached: CachedRequest | None = None

    @property
    def changes_gradients(self) -> bool:
        """Whether the reduction moves the gradients' version counters."""
        return self.flat is None

    def _take_grads(self) -> list[torch.Tensor | None]:
        """Return the gradients; sparse ones become dense."""
        for param in self.params:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        return super()._take_grads()

    def _request(self) -> CachedRequest:
        """Return the request of what is packed."""
        if self._cached is None:
            (param, *_) = self.params
            shape = (*param.shape, 2) if param.is_complex() else tuple(param.shape)
            self._cached = self._make_request(shape if self.flat is None else (self.total,))
        return self._cached

    def _make_request(self, shape: tuple[int, ...]) -> CachedRequest:
        dtypes, device = (TORCH_NAMES[self.sending.dtype],), self.sending.device.type
        return cached_request(Request("allreduce", self._name, dtypes, (shape,), device, **self._reduction))

    def submit(self, controller, *, waits: bool) -> None:
        """Start the reduction of what is packed."""
        tensors = [self.sending]
        self.work = TensorTableEntry(self._request(), tensors, tensors)
        controller.submit(self.work, waits=waits)

    def wait(self, controller) -> None:
        """Block until the reduction is done; on CUDA make the current stream wait for it."""
        controller.wait(self.work)
        self.sequence = self.work.sequence

    def rewind(self) -> None:
        """Reset for the next step."""
        super().rewind()
        self.work = None


class _SingleGradient(AllreduceBucket):
    """Gradient of one parameter, which is sent as a tensor of its own."""

    changes_gradients = False
    # A sparse gradient has no address.
    _read_versions = staticmethod(lambda grads: [None if grad is None else grad._version for grad in grads])

    def __init__(self, name: str, member: tuple, reduction: dict):
        super().__init__(name, [member], real_dtype(grad_dtype(member[1])), reduction)

    def read_grads(self) -> None:
        """Take the gradient."""
        self._grads = [self.params[0].grad]


class CompressedGradient(_SingleGradient):
    """Gradient of one parameter with a compression of the user's own."""

    def __init__(self, name: str, member: tuple, compression: type[Compressor], reduction: dict):
        super().__init__(name, member, reduction)
        self._compression = compression

    def _collect(self) -> torch.Tensor:
        """Compress the gradient, or zeros."""
        (grad,), (param,) = self._grads, self.params
        dense = torch.zeros_like(param) if grad is None else grad.detach()
        small, self._context = self._compression.compress(dense.to_dense() if dense.is_sparse else dense)
        # In memory of its own: the gradient stays unchanged until the result is written back.
        return small.clone() if small.data_ptr() == dense.data_ptr() else small.contiguous()

    def _request(self) -> CachedRequest:
        return self._make_request(tuple(self.sending.shape))

    def unpack(self, used: list[bool]) -> None:
        """Write the result to the gradient."""
        if used[0]:
            (param,) = self.params
            result = self._compression.decompress(self.sending, self._context).to(param.dtype).view(param.shape)
            if param.grad is None or param.grad.is_sparse:
                param.grad = result
            else:
                param.grad.copy_(result)

    def forget(self) -> None:
        """Release the gradient."""
        super().forget()
        self._context = None


class SparseGradient(_SingleGradient):
    """Sparse gradient of one parameter, whose entries all ranks gather."""

    def __init__(self, name: str, member: tuple, op, process_set):
        super().__init__(name, member, {})
        self._op, self._process_set = op, process_set

    def _collect(self) -> torch.Tensor:
        """Return the gradient's entries, or none without a gradient."""
        (grad,), (param,) = self._grads, self.params
        if grad is None:
            rows = torch.zeros((1, 0), dtype=torch.int64, device=param.device)
            values = torch.zeros((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
            grad = torch.sparse_coo_tensor(rows, values, param.shape, check_invariants=False, device=param.device)
        return grad if grad.is_sparse else grad.to_sparse(1)

    def submit(self, controller, *, waits: bool) -> None:
        """Start to gather the entries."""
        self.work = sparse_allreduce_async(self.sending, self._name, self._op, self._process_set)

    def wait(self, controller) -> None:
        """Block until all entries are gathered."""
        self._result = self.work()

    def unpack(self, used: list[bool]) -> None:
        """Write the result to the gradient."""
        if used[0]:
            self.params[0].grad = self._result

    def forget(self) -> None:
        """Release the gradient."""
        super().forget()
        self._result = None
