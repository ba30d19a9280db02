"""compile_gradient_kernels: compiles the kernels that a front end's options need, before the first backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..kernels.compilation import compile_kernels
from ..layout import WIRE_FORMATS

__all__ = ["compile_gradient_kernels"]


def compile_gradient_kernels(
    params: Iterable[torch.Tensor], *, options=None, steps: bool = False, packs: bool = False, wire: str = "fp32",
    dtypes: Iterable[torch.dtype | None] = (), device: torch.device | None = None,
) -> None:  # fmt: skip
    """Compile and load what the reduction of some parameters' gradients launches on their GPUs.

    ``options``: `HookOptions`, or None for none. ``steps``: an optimizer is stepped in the backward.
    ``packs``: gradients are copied into buckets. ``wire``: as an option. ``dtypes``: other dtypes,
    beside those of the parameters, in which they are sent or reduced. ``device``: where the
    parameters will be, if that isn't where they are. Blocks for as long as the compiler takes; on
    the CPU there is nothing to do. Raises as `compile_kernels`.
    """
    found: dict[torch.device, set[torch.dtype]] = {}
    for param in params:
        dtype = param.dtype.to_real() if param.dtype.is_complex else param.dtype
        found.setdefault(device or param.device, {each for each in dtypes if isinstance(each, torch.dtype)}).add(dtype)
    families = {"wire"} if wire in WIRE_FORMATS else set()
    if packs:
        families.add("cast")
    if steps:
        families |= {"cast", "optimizer", "reduce", "statistics"}
    if options is not None:
        if options.wire in WIRE_FORMATS or options.gather is not None:
            families.add("wire")
        if options.max_norm is not None or options.check_finite:
            families.add("statistics")
        if options.deterministic or options.algorithm != "native":
            families.add("reduce")
    for place, kinds in found.items():
        if place.type == "cuda" and families:
            compile_kernels(place, families, kinds)
