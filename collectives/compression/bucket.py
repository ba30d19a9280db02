"""Bucket and Scaling: a flat buffer of gradients, and the factors that its reduction applies."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from ..parameter_names import ParameterNames, find_names

__all__ = ["Bucket", "Scaling"]


class Scaling(NamedTuple):
    """Factors of a reduction: each value times `prescale`, the sum divided by `divisor`, times
    `postscale`.

    A `divisor` of 0 doesn't divide. The division is by the number itself, in fp32, as in an
    average; it is not a product with the reciprocal.
    """

    prescale: float = 1.0
    divisor: int = 0
    postscale: float = 1.0


class Bucket:
    """A flat buffer of gradients that is reduced in place: one-dimensional, contiguous, of a
    floating dtype.

    `params`: the parameters whose gradients the buffer holds, or a function that returns them at
    the first use. `offsets`: the element at which each parameter's gradient begins; None: one
    directly after the other. `index`: the bucket's position in the backward, the same on all ranks.
    `parameter_names`: the source of names in messages; None: the modules that have the parameters.
    """

    __slots__ = ("_offsets", "_parameter_names", "_params", "flat", "index")

    def __init__(
        self, flat: torch.Tensor, params, offsets: list[int] | None, index: int,
        parameter_names: ParameterNames | None = None,
    ):  # fmt: skip
        self.flat = flat
        self.index = index
        self._params = params
        self._offsets = offsets
        self._parameter_names = parameter_names

    @property
    def params(self) -> list:
        """The parameters, in the order of the buffer."""
        params = self._params
        if type(params) is not list and callable(params):
            params = self._params = params()
        return params

    @property
    def offsets(self) -> list[int]:
        """The first element of each parameter's gradient in `flat`.

        A complex number counts as two elements.
        """
        if self._offsets is None:
            counts = [param.numel() << param.is_complex() for param in self.params[:-1]]
            self._offsets = [0, *itertools.accumulate(counts)]
        return self._offsets

    def parts(self) -> list[torch.Tensor]:
        """Return a view of each parameter's gradient in `flat`, up to the next one's."""
        ends = [*self.offsets[1:], self.flat.numel()]
        return [self.flat[begin:end] for begin, end in zip(self.offsets, ends, strict=True)]

    def names(self) -> list[str]:
        """Look up the parameters' names now; a parameter without a name gets its shape."""
        found = self._find_names()
        return [name or f"shape {tuple(param.shape)}" for name, param in zip(found, self.params, strict=True)]

    def _find_names(self) -> list[str | None]:
        if self._parameter_names is None:
            return find_names(self.params)
        return self._parameter_names.lookup(self.params)

    def describe(self, most: int = 8) -> str:
        """Return the first `most` names and the number of the others, for a message."""
        names = self.names()
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
