"""Compressors by the name of their wire format."""

from __future__ import annotations

import secrets

from ..errors import InvalidArgument
from ..layout import WIRE_BLOCKS
from ..parameter_names import ParameterNames
from .base import Compressor, NoCompression, parse_wire
from .quantized import Quantized

__all__ = ["make_compressor"]


def make_compressor(
    wire: str, *, block: int = 256, error_feedback: bool = False, stochastic_rounding: bool = False,
    algorithm: str | None = None, deterministic: bool = False, parameter_names: ParameterNames | None = None,
) -> Compressor:  # fmt: skip
    """Make the compressor of a wire: "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2" or "int8".

    `algorithm` and `deterministic` apply to fp32 alone. `parameter_names`: the names by which
    residuals are saved. Raises `InvalidArgument` for other names, and for options that the wire
    doesn't have.
    """
    name = parse_wire(wire)
    if isinstance(block, bool) or not isinstance(block, int) or block not in WIRE_BLOCKS:
        raise InvalidArgument(f"block must be one of {', '.join(map(str, WIRE_BLOCKS))}, not {block!r:.60}")
    if name == "fp32":
        for asked, option in ((error_feedback, "error_feedback"), (stochastic_rounding, "stochastic_rounding")):
            if asked:
                raise InvalidArgument(
                    f"{option}: the fp32 wire sends gradients as they are and loses nothing: choose a compressed one "
                    f"(wire='bf16' or wire='int8', say), or leave {option} out"
                )
        return NoCompression(algorithm, deterministic=deterministic)
    # Each rank draws its own seed, so that the ranks' roundings are independent.
    seed = secrets.randbits(62) if stochastic_rounding else None
    return Quantized(name, block, error_feedback=error_feedback, seed=seed, parameter_names=parameter_names)
