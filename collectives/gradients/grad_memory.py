"""Dtypes, strides, memory and versions of gradients: what a copy between gradients and a flat buffer
must know of them.
"""

from __future__ import annotations

import torch

from ..torch_compat import TensorBase

__all__ = [
    "flat_memory",
    "grad_dtype",
    "overlaps_itself",
    "read_versions",
    "real_dtype",
    "view_in_flat",
]

_version, _data_ptr = TensorBase._version.__get__, TensorBase.data_ptr


def grad_dtype(param) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype  # torch 2.10 lets it differ from the parameter's


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def overlaps_itself(tensor) -> bool:
    """Return whether two elements may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def flat_memory(tensor) -> torch.Tensor:
    """View a dense tensor's elements in the order of its memory.

    Complex numbers are viewed as pairs of real ones.
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def read_versions(grads) -> list:
    """Return version and address of each gradient.

    An inference tensor has no version, and never compares equal.
    """
    try:
        return list(zip(map(_version, grads), map(_data_ptr, grads), strict=True))
    except (TypeError, RuntimeError):  # of a missing gradient, and of an inference tensor
        return [
            None if grad is None else object() if grad.is_inference() else (grad._version, grad.data_ptr())
            for grad in grads
        ]  # fmt: skip


def view_in_flat(flat: torch.Tensor, offset: int, param: torch.Tensor, strides) -> torch.Tensor:
    """Return a gradient's view of a flat tensor, with a version counter of its own."""
    dtype = flat.dtype.to_complex() if param.is_complex() else flat.dtype
    if param.is_complex():
        offset //= 2
    view = torch.empty(0, dtype=dtype, device=flat.device)
    if strides is None:
        return view.set_(flat.untyped_storage(), offset, param.shape)
    # A dimension of one element can have any stride: take the parameter's own.
    each = zip(strides, param.stride(), param.shape, strict=True)
    strides = tuple(own if size == 1 else stride for stride, own, size in each)
    return view.set_(flat.untyped_storage(), offset, param.shape, strides)
