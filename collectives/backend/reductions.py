"""Reductions as torch.distributed names them: what the engine does itself, and what it doesn't.

The engines know sum, product, min, max, average and the premultiplied sum of numbers. Bools and
complex numbers are reduced as other dtypes of the same memory. Bitwise reductions gather all ranks'
arrays and reduce them here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import InvalidArgument

__all__ = ["Reduction", "bitwise", "parse_reduction"]

_OP = dist.ReduceOp
_NAMES = {_OP.SUM: "sum", _OP.PRODUCT: "prod", _OP.MIN: "min", _OP.MAX: "max", _OP.AVG: "avg"}
_BITWISE = {
    _OP.BAND: torch.bitwise_and,
    _OP.BOR: torch.bitwise_or,
    _OP.BXOR: torch.bitwise_xor,
}
_OF_BOOLS = {_OP.SUM: "max", _OP.MAX: "max", _OP.BOR: "max", _OP.PRODUCT: "min", _OP.MIN: "min", _OP.BAND: "min"}
_LINEAR = (_OP.SUM, _OP.AVG, _OP.PREMUL_SUM)


class Reduction(NamedTuple):
    """How a reduction is done: by the engine's `op`, or by `bitwise` on gathered arrays.

    `view_as`: the function that gives a tensor the dtype in which it is reduced; None: its own.
    """

    op: object = None
    bitwise: object = None
    view_as: object = None


def parse_reduction(op, dtype: torch.dtype, name: str, rank: int) -> Reduction:
    """Return how a ``ReduceOp`` of a dtype is done.

    Raises `InvalidArgument`, a ValueError, for what has no meaning, such as the maximum of complex
    numbers.
    """
    kind = op.op if isinstance(op, _OP) else op
    found = _find(kind, dtype, name, rank)
    return _find_premul(op, dtype, name, rank) if found is None else found


def _find_premul(op, dtype, name, rank) -> Reduction:
    if dtype is torch.bool:
        raise _refuse(op, dtype, name, rank)
    return Reduction(op, None, torch.view_as_real if dtype.is_complex else None)


@functools.cache
def _find(kind, dtype: torch.dtype, name: str, rank: int) -> Reduction | None:
    """Return how a kind of reduction is done; None for the premultiplied sum, whose factor is the call's."""
    if kind == _OP.PREMUL_SUM:
        return None
    if dtype is torch.bool:
        if kind == _OP.BXOR:
            return Reduction(bitwise=torch.bitwise_xor)
        if kind not in _OF_BOOLS:
            raise _refuse(kind, dtype, name, rank)
        return Reduction(_OF_BOOLS[kind], None, _as_bytes)
    if dtype.is_complex:
        if kind not in _LINEAR:
            raise _refuse(kind, dtype, name, rank)
        return Reduction(_NAMES[kind], None, torch.view_as_real)
    if kind in _BITWISE:
        if dtype.is_floating_point:
            raise _refuse(kind, dtype, name, rank)
        return Reduction(bitwise=_BITWISE[kind])
    if kind not in _NAMES:
        raise _refuse(kind, dtype, name, rank)
    return Reduction(_NAMES[kind])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _refuse(kind, dtype, name, rank) -> InvalidArgument:
    op = getattr(kind, "name", kind)
    return InvalidArgument(f"ReduceOp.{op} doesn't exist for {dtype}", op=name, rank=rank)


def bitwise(function, gathered: torch.Tensor, ranks: int, out: torch.Tensor) -> None:
    """Reduce what all ranks have sent, one part of `gathered` for each, into `out`."""
    parts = gathered.view(ranks, *out.shape)
    out.copy_(functools.reduce(function, parts.unbind(0)))
