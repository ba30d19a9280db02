"""How far our reduced bucket may lie from what the process group gives: bounds from rounding alone."""

from __future__ import annotations

import math

import torch

from ..compression.base import parse_wire
from ..layout import WIRE_FORMATS

__all__ = ["differing", "error_bound"]

_NEAREST = 1 + 2.0**-14  # WireFormat: its bounds times this for rounding to nearest, twice this at random
_BLOCK = 512  # elements; the longest block that shares a scale, so that its bound holds for all of them


def error_bound(values: torch.Tensor, settings: dict, size: int) -> torch.Tensor:
    """Give this rank's share of the bound, elementwise, fp32 or fp64: the mean over ranks goes to `differing`.

    `values`: the bucket before it is reduced, over `size` ranks. Two sums of n terms in some order, in the values'
    dtype at worst, differ by less than 2 n eps mean|x|. On a compressed wire comes what quantizing each share loses.
    """
    magnitude = values.detach().abs().to(torch.promote_types(values.dtype, torch.float32))
    rounding = torch.finfo(values.dtype)
    bound = magnitude * (2 * (size + 2) * rounding.eps) + rounding.tiny
    return bound + _wire_error(magnitude, settings)


def differing(ours: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, settings: dict) -> int:
    """Count the elements of the reduced bucket that lie outside of the bound. Blocks until it is there.

    `bound`: the mean of all ranks' `error_bound`. Elements whose bound isn't finite (an overflow in the gradients,
    which a GradScaler may be looking for) must not be finite in `ours` unless a block's scale could carry it there.
    PowerSGD has no elementwise bound: there the whole error must not exceed the gradient itself.
    """
    format, _ = parse_wire(settings.get("wire", "fp32"))
    ours, reference = ours.to(bound.dtype), reference.to(bound.dtype)
    if format == "powersgd":
        error, norm = (ours - reference).norm().item(), reference.norm().item()
        fine = error <= 1.01 * norm + torch.finfo(torch.float32).tiny or not math.isfinite(norm)
        return 0 if fine else ours.numel()
    bound = bound + _wire_error(reference.abs() + bound, settings)
    wrong = (ours - reference).abs() > bound
    wrong |= bound.isfinite() & ~(ours.isfinite() & reference.isfinite())
    if format == "fp32":
        wrong |= ours.isfinite() & ~reference.isfinite()
    return int(wrong.sum())


def _wire_error(magnitude: torch.Tensor, settings: dict):
    """What quantizing values of these magnitudes may lose."""
    format, _ = parse_wire(settings.get("wire", "fp32"))
    if format not in WIRE_FORMATS:
        return 0.0
    wire = WIRE_FORMATS[format]
    factor = 2 * _NEAREST if settings.get("stochastic_rounding") else _NEAREST
    scale = _largest_near(magnitude) / wire.limit if wire.scaled else 1.0
    return factor * (wire.relative * magnitude + wire.absolute * scale) + 2.0**-149


def _largest_near(magnitude: torch.Tensor) -> torch.Tensor:
    """The largest value of any block of up to 512 elements that an element may be in, wherever the blocks begin."""
    count = magnitude.numel()
    chunks = torch.nn.functional.pad(magnitude, (0, -count % _BLOCK)).view(-1, _BLOCK).amax(1)
    around = torch.nn.functional.pad(chunks, (1, 1)).unfold(0, 3, 1).amax(1)
    return around.repeat_interleave(_BLOCK)[:count]
