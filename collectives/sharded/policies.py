"""FSDP2's policies: in which dtypes a unit computes, and whether its shards are offloaded to the
host.
"""

from __future__ import annotations

import dataclasses

import torch

from ..errors import InvalidArgument

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "check_floating",
    "parse_mp_policy",
    "parse_offload_policy",
]


def check_floating(policy, *names: str) -> None:
    """Raise `InvalidArgument` for attributes that are neither a floating dtype nor None."""
    for name in names:
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InvalidArgument(f"{name} must be a floating torch.dtype or None, not {dtype!r:.60}")


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes; its shards, and so the optimizer, keep the parameters' own.

    `param_dtype`: of the gathered parameters, and so of the computation and the gradients; None:
    the parameters' own. `reduce_dtype`: in which gradients are reduced; None: `param_dtype`.
    `output_dtype`: to which floating outputs are cast; None: they are not cast.
    `cast_forward_inputs`: cast floating inputs to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self):
        check_floating(self, "param_dtype", "reduce_dtype", "output_dtype")


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """Keep the shards on the device that computes."""


@dataclasses.dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep the shards, their gradients, and so the optimizer's state and step, on the host.

    `pin_memory`: in page-locked memory.
    """

    pin_memory: bool = True


def parse_mp_policy(given) -> MixedPrecisionPolicy:
    """Return the policy for `mp_policy`: a policy of ours, torch's own, or None."""
    names = [field.name for field in dataclasses.fields(MixedPrecisionPolicy)]
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given or MixedPrecisionPolicy()
    if not all(hasattr(given, name) for name in names):
        raise InvalidArgument(f"mp_policy must be a MixedPrecisionPolicy, not {given!r:.60}", op="fully_shard")
    return MixedPrecisionPolicy(**{name: getattr(given, name) for name in names})


def parse_offload_policy(given) -> CPUOffloadPolicy | None:
    """Return the policy for `offload_policy`: ours, torch's own, or None where nothing is
    offloaded.
    """
    if given is None or type(given).__name__ == "OffloadPolicy":
        return None
    if not hasattr(given, "pin_memory"):
        raise InvalidArgument(f"offload_policy must be a CPUOffloadPolicy or None, not {given!r:.60}", op="fully_shard")
    return CPUOffloadPolicy(bool(given.pin_memory))
