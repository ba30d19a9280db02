"""Options of a `HookState`: a frozen record that checks its values and their combinations."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import os

from .. import optim
from ..arrays import kind_of
from ..compression import Compressor, make_compressor, parse_wire
from ..environment import parse_whole_number
from ..errors import InvalidArgument
from ..layout import WIRE_FORMATS
from ..optim import FusedOptimizer

__all__ = ["HookOptions", "parse_streams"]

_ALGORITHMS = ("native", "ring", "direct")


@dataclasses.dataclass(frozen=True)
class HookOptions:
    """Options of a `HookState`, by the names of its arguments; `HookState` says what each does.

    Raises `InvalidArgument` for a value that an option doesn't take, and, with the reason, for
    options that don't go together.
    """

    wire: str = "fp32"
    block: int = 256
    error_feedback: bool = False
    stochastic_rounding: bool = False
    average: bool = True
    predivide: float | None = None
    algorithm: str = "native"
    deterministic: bool = False
    streams: int | None = None  # a number in every record
    max_norm: float | None = None
    norm_type: float = 2
    check_finite: bool = False
    zero_copy: bool = True
    gather: str | None = None
    parameters_as_bucket_view: bool = False

    def __post_init__(self):
        object.__setattr__(self, "streams", parse_streams(self.streams))
        flags = (
            "error_feedback", "stochastic_rounding", "average", "deterministic", "check_finite", "zero_copy",
            "parameters_as_bucket_view",
        )  # fmt: skip
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"{name} must be True or False, not {getattr(self, name)!r}")
        wire = parse_wire(self.wire)
        if self.gather is not None and (not isinstance(self.gather, str) or self.gather not in WIRE_FORMATS):
            formats = ", ".join(map(repr, WIRE_FORMATS))
            raise InvalidArgument(f"gather must be None or one of {formats}, not {self.gather!r:.60}")
        if not isinstance(self.algorithm, str) or self.algorithm not in _ALGORITHMS:
            shown = ", ".join(map(repr, _ALGORITHMS))
            raise InvalidArgument(f"algorithm must be one of {shown}, not {self.algorithm!r:.60}")
        for name in ("predivide", "max_norm"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        _check_positive("norm_type", self.norm_type, infinite=True)
        _refuse(self._combinations(wire))

    def _combinations(self, wire: str) -> list[tuple[bool, str]]:
        """Return the combinations that are refused: whether these options are one, and the reason."""
        return [
            (self.predivide is not None and not self.average,
             "predivide splits the division of an average in two, and average=False divides nothing"),
            (self.algorithm != "native" and wire != "fp32",
             f"a wire of {wire} is always an all-to-all and an all-gather with fused kernels: leave algorithm out"),
            (self.algorithm == "ring" and self.deterministic,
             "a ring's order of summing depends on where in a bucket an element lies: use 'direct' or 'native'"),
            (self.deterministic and wire not in ("fp32", "bf16", "fp16"),
             f"the bits of {wire} depend on where buckets begin and end: deterministic takes fp32, bf16 and fp16"),
            (self.deterministic and self.stochastic_rounding,
             "random bits are drawn by the place in a bucket: deterministic can't be had with stochastic_rounding"),
        ]  # fmt: skip

    def check_optimizer(self, optimizer) -> None:
        """Raise `InvalidArgument` for an optimizer that can't be stepped inside of the backward with
        these options.
        """
        if not isinstance(optimizer, FusedOptimizer):
            raise InvalidArgument(
                "optimizer must be a collectives.optim SGD, Adam or AdamW, whose kernels step parts of parameters, not "
                f"{kind_of(optimizer)}{_describe_replacement(optimizer)}"
            )
        _refuse([
            (self.deterministic and self.max_norm is not None,
             "a sharded optimizer's norm is of parts, whose places depend on buckets: deterministic takes max_norm "
             "without optimizer"),
        ])  # fmt: skip

    @property
    def needs_stats(self) -> bool:
        """Whether every backward needs the gradient's norm or the number of its non-finite values."""
        return self.max_norm is not None or self.check_finite

    def make_compressor(self, parameter_names) -> Compressor:
        """Return a new compressor of these options' wire, whose state is saved by `parameter_names`."""
        return make_compressor(
            self.wire, block=self.block, error_feedback=self.error_feedback,
            stochastic_rounding=self.stochastic_rounding, deterministic=self.deterministic,
            algorithm=None if self.algorithm == "native" else self.algorithm, parameter_names=parameter_names,
        )  # fmt: skip

    def changed(self) -> dict:
        """Return the options that have other values than the defaults, by name; `streams`: than 1."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)} | {"streams": 1}
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


def _describe_replacement(optimizer) -> str:
    """Return the line to write in place of one of torch's optimizers; "" where there is none."""
    if isinstance(getattr(optimizer, "optimizer", None), FusedOptimizer):
        return ", which holds one: pass its .optimizer"
    name = type(optimizer).__name__
    ours = getattr(optim, name, None) if type(optimizer).__module__.startswith("torch.optim.") else None
    if not (isinstance(ours, type) and issubclass(ours, FusedOptimizer)):
        return ""
    if optimizer.defaults.get("differentiable"):
        return "; differentiable=True is torch's alone"
    parameters = inspect.signature(ours).parameters
    changed = [
        f"{key}={value!r}" for key, value in optimizer.defaults.items()
        if key in parameters and key not in ("foreach", "fused", "capturable") and value != parameters[key].default
    ]  # fmt: skip
    arguments = ", ".join(["parameters", *changed])
    return (
        f". Write optimizer=collectives.optim.{name}({arguments}): it takes the same arguments and state_dict"
    )


def _refuse(combinations: list[tuple[bool, str]]) -> None:
    for wrong, reason in combinations:
        if wrong:
            raise InvalidArgument(reason)


def parse_streams(value) -> int:
    """Return the number of streams; None: COLLECTIVES_STREAMS, else 1."""
    if value is None:
        named = os.environ.get("COLLECTIVES_STREAMS", "").strip() or "1"
        number = parse_whole_number(named, 1, 64)
        if number is None:
            raise InvalidArgument(f"COLLECTIVES_STREAMS={named}: must be a whole number from 1 to 64")
        return number
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
