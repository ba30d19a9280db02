"""Wire formats: how a bucket of gradients is reduced, and what that costs in bytes and in precision.

A bucket is reduced in two halves: each rank gets its part of the sum, and all get all parts. On a compressed wire the
first half is a quantization, an all-to-all and one fused pass that dequantizes, sums in fp32 in rank order, and
quantizes again; the second an all-gather and a dequantization. So each element is rounded twice, however many ranks
there are (the sum itself once). What is lost can be kept as a residual and added in the next step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import InvalidArgument
from .layout import WIRE_FORMATS
from .names import names_of

__all__ = ["Bucket", "Factor", "Residuals", "parse_wire"]


class Factor(NamedTuple):
    """What a reduction does beside summing: all values times `before`, the sum divided by `over`, times `after`.

    ``over`` 0: not divided. Division is by the number itself, in fp32, as an average is; it isn't a product with its
    reciprocal.
    """

    before: float = 1.0
    over: int = 0
    after: float = 1.0


class Bucket:
    """A flat buffer of gradients on its way: one-dimensional, contiguous, of a floating dtype; reduced in place.

    `params`: the parameters whose gradients it holds; `offsets`: the element at which each one's begins. `index`: its
    place among the buckets of a backward, the same on all ranks.
    """

    __slots__ = ("flat", "index", "offsets", "params")

    def __init__(self, flat: torch.Tensor, params: list, offsets: list[int], index: int):
        self.flat = flat
        self.params = params
        self.offsets = offsets
        self.index = index

    def names(self) -> list[str]:
        """The parameters' names, or their shapes where they have none; looked up now."""
        found = names_of(self.params)
        return [name or f"shape {tuple(param.shape)}" for name, param in zip(found, self.params, strict=True)]

    def describe(self, most: int = 8) -> str:
        """The names as a message shows them."""
        names = self.names()
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def parse_wire(wire) -> tuple[str, int]:
    """Give a wire's format, and its rank ("powersgd:4": "powersgd", 4; else 0); raise `InvalidArgument`."""
    known = ["fp32", *WIRE_FORMATS, "powersgd:RANK"]
    if isinstance(wire, str):
        if wire == "fp32" or wire in WIRE_FORMATS:
            return wire, 0
        name, colon, rank = wire.partition(":")
        if name == "powersgd":
            if not (colon and rank.isascii() and rank.isdigit() and len(rank) < 6 and int(rank) > 0):
                raise InvalidArgument(f"wire {wire!r}: PowerSGD needs a rank from 1 up, as in 'powersgd:2'")
            return name, int(rank)
    raise InvalidArgument(f"wire must be one of {', '.join(map(repr, known))}, not {wire!r:.60}")


class Residuals:
    """What compression has lost of each parameter's gradient so far, in fp32; kept by parameter.

    A bucket's residuals lie in one flat tensor, in the order of the bucket, and move to another one when the buckets
    are made again. What was loaded by name waits until its parameter comes.
    """

    def __init__(self):
        self._flats: dict[tuple, tuple] = {}  # key of a bucket -> (params, offsets, flat)
        self._views: dict[int, tuple] = {}  # id of a parameter -> (parameter, its part of a flat tensor)
        self._loaded: dict[str, torch.Tensor] = {}

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Give the residuals of a bucket's elements: fp32, as long as ``bucket.flat``, on its device; 0 at first."""
        key = (bucket.index, id(bucket.params[0]))  # one state may serve several modules
        known = self._flats.get(key)
        if known is not None and known[1] == bucket.offsets and _alike(known[0], bucket.params):
            if known[2].numel() == bucket.flat.numel() and known[2].device == bucket.flat.device:
                return known[2]
        flat = torch.zeros(bucket.flat.numel(), dtype=torch.float32, device=bucket.flat.device)
        ends = [*bucket.offsets[1:], bucket.flat.numel()]
        names = names_of(bucket.params) if self._loaded else [None] * len(bucket.params)
        for param, name, first, end in zip(bucket.params, names, bucket.offsets, ends, strict=True):
            part = flat[first:end]
            old = self._views.get(id(param))
            if old is not None and old[0] is param and old[1].numel() == part.numel():
                part.copy_(old[1])
            elif name is not None and name in self._loaded:
                given = self._loaded.pop(name)
                if given.numel() != part.numel():
                    raise InvalidArgument(
                        f"the loaded residual of {name} has {given.numel()} elements, its gradient {part.numel()}"
                    )
                part.copy_(given)
            self._views[id(param)] = (param, part)
        self._flats[key] = (list(bucket.params), list(bucket.offsets), flat)
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Give copies by parameter name; `InvalidArgument` where a parameter is in no module that can be found."""
        params = [param for param, _ in self._views.values()]
        found = dict(self._loaded)
        for name, (param, part) in zip(names_of(params), self._views.values(), strict=True):
            if name is None:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(param.shape)} has no name, by which its residual could be saved"
                )
            found[name] = part.detach().cpu().clone()
        return found

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take residuals by parameter name, in place of all that is there."""
        self._flats, self._views = {}, {}
        self._loaded = dict(state)


def _alike(some, others) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
