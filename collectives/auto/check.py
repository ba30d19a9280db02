"""Error bounds between our reduced bucket and the process group's, from rounding alone."""

from __future__ import annotations

import torch

from ..compression.base import parse_wire
from ..layout import WIRE_FORMATS

__all__ = ["count_different", "error_bound"]

# Factor of a WireFormat's bounds for rounding to nearest; for stochastic rounding twice as much.
_NEAREST = 1 + 2.0**-14
_BLOCK = 512  # elements of the longest block with one scale: its bound holds for shorter blocks


def error_bound(values: torch.Tensor, settings: dict, size: int) -> torch.Tensor:
    """Return this rank's term of the bound, elementwise, fp32 or fp64.

    `count_different` takes the mean over ranks. `values`: the bucket before its reduction over
    `size` ranks. Two sums of n terms in any orders, in the values' dtype at worst, differ by less
    than 2 n eps mean|x|. A compressed wire adds the error of each rank's quantization.
    """
    magnitude = values.detach().abs().to(torch.promote_types(values.dtype, torch.float32))
    rounding = torch.finfo(values.dtype)
    bound = magnitude * (2 * (size + 2) * rounding.eps) + rounding.tiny
    return bound + _wire_error(magnitude, settings)


def count_different(ours: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, settings: dict) -> int:
    """Return the number of elements of the reduced bucket that are outside of the bound.

    It waits for the GPU. `bound`: the mean of all ranks' `error_bound`. Elements whose bound isn't
    finite (an overflow in the gradients, which a GradScaler may look for) must not be finite in
    `ours` unless a block's scale could have made them so.
    """
    ours, reference = ours.to(bound.dtype), reference.to(bound.dtype)
    bound = bound + _wire_error(reference.abs() + bound, settings)
    wrong = (ours - reference).abs() > bound
    wrong |= bound.isfinite() & ~(ours.isfinite() & reference.isfinite())
    if settings.get("wire", "fp32") == "fp32":
        wrong |= ours.isfinite() & ~reference.isfinite()
    return int(wrong.sum())


def _wire_error(magnitude: torch.Tensor, settings: dict):
    """Return the largest error of quantizing values of these magnitudes."""
    format = parse_wire(settings.get("wire", "fp32"))
    if format not in WIRE_FORMATS:
        return 0.0
    wire = WIRE_FORMATS[format]
    factor = 2 * _NEAREST if settings.get("stochastic_rounding") else _NEAREST
    scale = _largest_in_block(magnitude) / wire.limit if wire.scaled else 1.0
    return factor * (wire.relative * magnitude + wire.absolute * scale) + 2.0**-149


def _largest_in_block(magnitude: torch.Tensor) -> torch.Tensor:
    """Return for each element the largest value of any block of up to 512 elements that may contain
    it.
    """
    count = magnitude.numel()
    chunks = torch.nn.functional.pad(magnitude, (0, -count % _BLOCK)).view(-1, _BLOCK).amax(1)
    around = torch.nn.functional.pad(chunks, (1, 1)).unfold(0, 3, 1).amax(1)
    return around.repeat_interleave(_BLOCK)[:count]
