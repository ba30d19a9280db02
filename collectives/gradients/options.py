"""Options of a `HookState`: their defaults, and the checks of each and of their combinations."""

from __future__ import annotations

import math
import numbers
import os

from ..arrays import kind_of
from ..compression import parse_wire
from ..errors import InvalidArgument
from ..layout import WIRE_BLOCKS, WIRE_FORMATS
from ..optim import FusedOptimizer

__all__ = ["DEFAULTS", "check_options", "parse_local_steps", "parse_streams"]

_ALGORITHMS = ("native", "ring", "direct")

DEFAULTS = {
    "wire": "fp32", "block": 256, "error_feedback": False, "stochastic_rounding": False, "predivide": None,
    "algorithm": "native", "deterministic": False, "max_norm": None, "norm_type": 2, "check_finite": False,
    "local_steps": None, "hierarchical": "auto", "gather": None,
}  # fmt: skip


def check_options(options: dict, optimizer) -> None:
    """Raise `InvalidArgument` for a value that an option doesn't take, and for options that don't
    go together.
    """
    for name in ("error_feedback", "stochastic_rounding", "average", "deterministic", "check_finite", "zero_copy"):
        if not isinstance(options[name], bool):
            raise InvalidArgument(f"{name} must be True or False, not {options[name]!r}")
    wire, _ = parse_wire(options["wire"])
    block = options["block"]
    if isinstance(block, bool) or not isinstance(block, int) or block not in WIRE_BLOCKS:
        raise InvalidArgument(f"block must be one of {', '.join(map(str, WIRE_BLOCKS))}, not {block!r:.60}")
    gather = options["gather"]
    if gather is not None and (not isinstance(gather, str) or gather not in WIRE_FORMATS):
        formats = ", ".join(map(repr, WIRE_FORMATS))
        raise InvalidArgument(f"gather must be None or one of {formats}, not {gather!r:.60}")
    algorithm = options["algorithm"]
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise InvalidArgument(f"algorithm must be one of {', '.join(map(repr, _ALGORITHMS))}, not {algorithm!r:.60}")
    for name in ("predivide", "max_norm"):
        if options[name] is not None:
            _check_positive(name, options[name])
    _check_positive("norm_type", options["norm_type"], infinite=True)
    hierarchical = options["hierarchical"]
    if not isinstance(hierarchical, bool) and hierarchical != "auto":
        raise InvalidArgument(f"hierarchical must be True, False or 'auto', not {hierarchical!r:.60}")
    if optimizer is not None and not isinstance(optimizer, FusedOptimizer):
        raise InvalidArgument(
            f"optimizer must be a collectives.optim SGD, Adam or AdamW, whose kernels step parts of parameters, not "
            f"{kind_of(optimizer)}"
        )
    if options["local_steps"] is not None:
        parse_local_steps(options["local_steps"])
    _check_combinations(options, wire, optimizer)


def _check_combinations(options: dict, wire: str, optimizer) -> None:
    local, algorithm, hierarchical = options["local_steps"], options["algorithm"], options["hierarchical"]
    combinations = [
        (options["predivide"] is not None and not options["average"],
         "predivide splits the division of an average in two, and average=False divides nothing"),
        (algorithm != "native" and wire != "fp32",
         f"a wire of {wire} is always an all-to-all and an all-gather with fused kernels: leave algorithm out"),
        (algorithm == "ring" and options["deterministic"],
         "a ring's order of summing depends on where in a bucket an element lies: use 'direct' or 'native'"),
        (options["deterministic"] and wire not in ("fp32", "bf16", "fp16"),
         f"the bits of {wire} depend on where buckets begin and end: deterministic takes fp32, bf16 and fp16"),
        (options["deterministic"] and options["stochastic_rounding"],
         "random bits are drawn by the place in a bucket: deterministic can't be had with stochastic_rounding"),
        (local is not None and optimizer is not None,
         "with local_steps the ranks' parameters differ, and a sharded optimizer needs them equal"),
        (local is not None and (options["max_norm"] is not None or options["check_finite"]),
         "with local_steps each rank steps on its own gradients, which the hook doesn't look at: clip them with "
         "torch.nn.utils.clip_grad_norm_"),
        (optimizer is not None and options["deterministic"] and options["max_norm"] is not None,
         "a sharded optimizer's norm is of parts, whose places depend on buckets: deterministic takes max_norm without "
         "optimizer"),
        (hierarchical is True and (algorithm != "native" or options["deterministic"]),
         "hierarchical sums machine by machine, not in rank order and by no other algorithm"),
        (hierarchical is True and (options["error_feedback"] or wire == "powersgd"),
         "hierarchical sends parts of what a machine's ranks have summed: no rank's own error could be fed back, and "
         "no matrix is whole"),
        (hierarchical is True and optimizer is not None,
         "the parts of a sharded optimizer are those of a flat reduce-scatter: leave hierarchical out"),
    ]  # fmt: skip
    for wrong, reason in combinations:
        if wrong:
            raise InvalidArgument(reason)


def parse_local_steps(value) -> tuple[int, int]:
    """Return (every, after) of `local_steps`: k, or (first, k)."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return _check_whole("local_steps[1]", value[1], 1), _check_whole("local_steps[0]", value[0], 0)
    return _check_whole("local_steps", value, 1), 0


def parse_streams(value) -> int:
    """Return the number of streams; None: COLLECTIVES_STREAMS, else 1."""
    if value is None:
        named = os.environ.get("COLLECTIVES_STREAMS", "").strip() or "1"
        if not (named.isascii() and named.isdigit() and 0 < int(named) <= 64):
            raise InvalidArgument(f"COLLECTIVES_STREAMS={named}: must be a whole number from 1 to 64")
        return int(named)
    if _check_whole("streams", value, 1) > 64:
        raise InvalidArgument(f"streams must be at most 64, not {value}")
    return value


def _check_positive(name: str, value, *, infinite: bool = False) -> None:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)
    if not number or value <= 0 or (math.isinf(value) and not infinite):
        raise InvalidArgument(f"{name} must be a number above 0, not {value!r:.60}")


def _check_whole(name: str, value, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"{name} must be a whole number from {least}, not {value!r:.60}")
    return value
