"""GradientBucket: one bucket of `GradientBuckets`, and the copies between its gradients and its flat
buffer.
"""

from __future__ import annotations

import functools
import operator

import numpy
import torch
from torch.autograd.graph import increment_version

from ..arrays import kind_of
from ..errors import InvalidArgument
from ..kernels import Table, pack, unpack
from ..kernels.tensor_list import TensorList
from ..layout import bucket_layout
from ..parameter_names import find_names
from ..torch_compat import is_traceable_wrapper_subclass

__all__ = ["GradientBucket", "grad_dtype", "real_dtype"]

_OP = "GradientBuckets"


class _GradientTable(Table):
    """Table whose tensors can be replaced by others of the same sizes and dtypes, which costs less
    than a new table.
    """

    def _fill(self, pointers, counts, types, op) -> None:
        super()._fill(pointers, counts, types, op)
        self._kinds = self._list.counts, self._list.codes
        self._pointers = pointers
        self._lengths = self._ends - self._starts
        self._sizes = self._lengths.tolist()
        self._data = self.rows.array["data"]

    def replace(self, tensors: list) -> bool:
        """Replace the tensors. False: that failed, and the table must not be used any more."""
        found = TensorList.of_plain(tensors, self._list.reader, _OP, self._list.label)
        if found is None or (found.counts, found.codes) != self._kinds:
            return False
        self._list, self.tensors, pointers = found, found.arrays, found.addresses
        if pointers != self._pointers:
            if 0 in self._sizes:
                return False  # an empty tensor has no address
            # Lists, since a call of NumPy's takes longer than a pass over the gradients of a small
            # model.
            ends = list(map(operator.add, pointers, self._sizes))
            if functools.reduce(operator.or_, pointers) % self.itemsize:
                return False
            self._low, self._high = min(pointers), max(ends)
            self._pointers, self._starts = pointers, numpy.array(pointers, dtype=numpy.int64)
            self._ends = self._starts + self._lengths
            self._data[:] = self._starts
            self.rows.changed()
            self._apart_from = None
        return True

    def spans(self) -> tuple[list[int], list[int]]:
        """Return the addresses where the tensors begin and end.

        The caller checks that they don't overlap.
        """
        self._are_destinations = True
        return self._pointers, list(map(operator.add, self._pointers, self._sizes))

    def release(self) -> None:
        """Release the tensors until `replace`: gradients that are set to None must be freed."""
        self.tensors = self._list.arrays = ()

    def verify(self, op: str = _OP) -> None:
        """Do nothing: each use directly follows the bucket's `read_grads`."""


class GradientBucket:
    """Parameters whose gradients are reduced together.

    The elements of a gradient have the order of the parameter's own memory when the buckets were
    made, so that the ranks agree on it whatever strides their gradients have. A gradient with
    another layout goes by a copy.
    """

    def __init__(self, index: int, members: list, dtype: torch.dtype, device: torch.device):
        self.index = index
        self.params = [param for _, param in members]
        self.dtype = dtype  # of the elements on the wire; a complex number is two
        self.device = device
        self.strides = [_dense_strides(param) for param in self.params]
        self.offsets, self.total = bucket_layout(
            [param.numel() * (2 if param.is_complex() else 1) for param in self.params], dtype.itemsize
        )
        self.flat: torch.Tensor | None = None
        self.work = None
        self.missing: set[int] = set()  # parameters whose gradient has not come since the last round; set by hooks
        self._given_names = [name for name, _ in members]
        self._shapes = [param.shape for param in self.params]
        self._kinds = [grad_dtype(param) for param in self.params]
        self._simple = not any(self.strides) and not any(param.is_complex() for param in self.params)
        self._table: _GradientTable | None = None
        self._stream = None
        self.forget()

    # ---- Names.

    def names(self) -> list[str]:
        """Return the names given with the parameters, else those of their modules, else shapes."""
        names = self._given_names
        if None in names:
            names = [given or found for given, found in zip(names, find_names(self.params), strict=True)]
        return [name or f"shape {tuple(shape)}" for name, shape in zip(names, self._shapes, strict=True)]

    def describe(self, most: int = 8) -> str:
        """Return the first `most` names and the number of the others, for a message."""
        names = self.names()
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

    # ---- Gradients.

    def changed(self) -> bool:
        """Return whether any gradient was replaced, moved or written to since it was packed."""
        grads = [param.grad for param in self.params]
        return (
            self._versions is None
            or any(map(operator.is_not, self._grads, grads))
            or self._versions != _versions_of(grads)
        )

    def read_grads(self) -> None:
        """Take the parameters' current gradients.

        Raises `InvalidArgument` for one that can't be averaged.
        """
        self._versions, self._staged = None, {}
        grads = self._grads = [param.grad for param in self.params]
        self.has = [grad is not None for grad in grads]
        table = self._table
        if not self._simple or table is None or not all(self.has) or not table.replace(grads):
            tensors = [self._grad_memory(at, grad) for at, grad in enumerate(grads)]
            if table is None or not table.replace(tensors):
                self._table = None
                self._table = _GradientTable(tensors, self.dtype)

    def _grad_memory(self, at: int, grad: torch.Tensor | None) -> torch.Tensor:
        """Return a gradient's memory, flat and real: its own, or of a copy in the bucket's layout,
        or zeros for None.
        """
        shape, strides, kind = self._shapes[at], self.strides[at], self._kinds[at]
        if grad is not None:
            self._check(at, grad)
            same_layout = grad.is_contiguous() if strides is None else _dense_strides(grad) == strides
            if same_layout and not grad.is_conj() and not grad.is_neg():
                return _memory(grad)
        if strides is None:
            staged = torch.zeros(shape, dtype=kind, device=self.device)
        else:
            staged = torch.empty_strided(shape, strides, dtype=kind, device=self.device).zero_()
        if grad is not None:
            staged.copy_(grad)
        self._staged[at] = staged
        return _memory(staged)

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

    # ---- To the flat buffer and back.

    def wait_for_work(self) -> None:
        """Wait for the operation under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def pack(self, track_writes: bool) -> None:
        """Copy the gradients of `read_grads` into the flat buffer.

        `track_writes`: let `changed` notice later writes. A bucket without a flat buffer is one
        gradient, which is reduced in place.
        """
        self.wait_for_work()
        if self.flat is None:
            (self.sending,) = self._table.tensors
            return
        if self._stream is not None:  # the last one that read the flat buffer
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        pack(self._table, self.flat)
        self.sending = self.flat
        if track_writes:
            self._versions = _versions_of(self._grads)

    def unpack(self, used: list) -> None:
        """Copy the result back.

        A parameter that is `used` on some rank and has no gradient here gets one.
        """
        self.wait_for_work()
        if self.flat is not None:
            unpack(self.flat, self._table)
        elif not self.sending.is_inference():
            increment_version(self.sending)
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        for at, staged in self._staged.items():
            grad = self._grads[at]
            if grad is None:
                if used[at]:
                    self.params[at].grad = staged
            elif _overlaps_itself(grad):  # an expanded gradient can't hold different elements
                self.params[at].grad = staged
            else:
                grad.copy_(staged)

    def forget(self) -> None:
        """Release the gradients."""
        self._grads: list = []
        self.has: list[bool] = []  # for each parameter, whether `read_grads` found a gradient
        self._versions: list | None = None
        self.sending: torch.Tensor | None = None
        self._staged: dict[int, torch.Tensor] = {}
        if self._table is not None:
            self._table.release()

    def free(self) -> None:
        """Free the buffer and the table."""
        self.flat = self.work = self._table = None


# ---- Dtypes, strides and memory.


def grad_dtype(param) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype  # torch 2.10 lets it differ from the parameter's


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _dense_strides(tensor) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor in another order than a contiguous one's.

    None for all others. A dimension of one element has a stride of 0 in the result.
    """
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return None
            expected *= size
    return tuple(stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _overlaps_itself(tensor) -> bool:
    """Return whether two elements may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _memory(tensor) -> torch.Tensor:
    """View a dense tensor's elements in the order of its memory.

    Complex numbers are viewed as pairs of real ones.
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _versions_of(grads) -> list:
    """Return version and address of each gradient.

    An inference tensor has no version, and never compares equal.
    """
    return [
        None if grad is None else object() if grad.is_inference() else (grad._version, grad.data_ptr())
        for grad in grads
    ]  # fmt: skip
