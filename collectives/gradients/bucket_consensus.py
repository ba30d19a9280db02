"""Check that the ranks' `GradientBuckets` have the same parameters and settings."""

from __future__ import annotations

from ..comm.agree import all_gather_object, verify_same
from ..comm.communicator import Communicator

__all__ = ["verify_same_buckets"]


def verify_same_buckets(comm: Communicator, params: list, buckets: list, settings: str, overlap: bool) -> bool:
    """Raise `Mismatch` where the ranks' parameters or settings differ.

    Returns whether all ranks want to overlap. A collective that blocks. `params`: in the order that
    the user gave; `buckets`: the `GradientBucket` of each; `overlap`: this rank's wish.
    """
    strides = {id(param): each for b in buckets for param, each in zip(b.params, b.strides, strict=True)}
    names = {id(param): name for b in buckets for param, name in zip(b.params, b.names(), strict=True)}
    compared: dict[str, object] = {"parameters": len(params), "elements": sum(param.numel() for param in params)}
    compared["settings"] = settings
    labels = {}
    for number, param in enumerate(params):
        key = f"parameter {number}"
        compared[key] = tuple(param.shape), param.dtype, param.device.type, strides[id(param)]
        labels[key] = f"shape, dtype, device and strides of {names[id(param)]}"  # another rank may call it otherwise
    verify_same(
        comm, "the ranks' GradientBuckets differ", compared,
        "give all ranks the same parameters, in the same order, and the same arguments", op="GradientBuckets",
        labels=labels,
    )  # fmt: skip
    return all(all_gather_object(comm, overlap))
