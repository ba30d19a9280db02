"""Parsing of FSDP2's policies, which are torch's own: in which dtypes a unit computes, and whether
its shards are offloaded to the host.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ..errors import InvalidArgument

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "check_floating",
    "dtypes_of",
    "parse_mp_policy",
    "parse_offload_policy",
]


def check_floating(policy, *names: str) -> None:
    """Raise `InvalidArgument` for attributes that are neither a floating dtype nor None."""
    for name in names:
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InvalidArgument(f"{name} must be a floating torch.dtype or None, not {dtype!r:.60}")


def parse_mp_policy(given) -> MixedPrecisionPolicy:
    """Return the policy for `mp_policy`, a `MixedPrecisionPolicy` or None.

    A unit's shards, and so the optimizer, keep the parameters' own dtype. Without a `param_dtype` a
    unit computes in it, and gradients are reduced in `reduce_dtype`, else `param_dtype`.
    """
    if given is None:
        return MixedPrecisionPolicy()
    if not isinstance(given, MixedPrecisionPolicy):
        raise InvalidArgument(f"mp_policy must be a MixedPrecisionPolicy, not {given!r:.60}", op="fully_shard")
    check_floating(given, "param_dtype", "reduce_dtype", "output_dtype")
    return given


def dtypes_of(
    dtype: torch.dtype, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """Return in which dtypes parameters are gathered, and their gradients reduced, for a policy's two dtypes."""
    if not dtype.is_floating_point:
        return dtype, dtype
    return param_dtype or dtype, reduce_dtype or param_dtype or dtype


def parse_offload_policy(given) -> CPUOffloadPolicy | None:
    """Return the policy for `offload_policy`, an `OffloadPolicy` or None; None where nothing is
    offloaded.
    """
    if given is None or type(given) is OffloadPolicy:
        return None
    if not isinstance(given, CPUOffloadPolicy):
        raise InvalidArgument(f"offload_policy must be a CPUOffloadPolicy or None, not {given!r:.60}", op="fully_shard")
    return given
