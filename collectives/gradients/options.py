"""Options of a `HookState`: a frozen record that checks its values and their combinations."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
import os
from typing import TYPE_CHECKING

from .. import optim
from ..arrays import kind_of
from ..compression import Compressor, make_compressor, parse_wire
from ..environment import parse_whole_number
from ..errors import InvalidArgument
from ..layout import WIRE_FORMATS
from ..optim import FusedOptimizer

if TYPE_CHECKING:
    from ..argument_types import Algorithm, Compressed, Wire

__all__ = ["HookOptions", "check_names", "list_options", "parse_streams"]

_ALGORITHMS = ("native", "ring", "direct")


@dataclasses.dataclass(frozen=True)
class HookOptions:
    """Options of a `HookState`, which takes them as keyword arguments. They don't change
    afterwards.

    On every wire sums are taken in fp32, in rank order, and rounded to the wire once.

    Args:
        wire: The format in which gradients are sent: "fp32", no compression, or "bf16", "fp16",
            "fp8_e4m3", "fp8_e5m2" or "int8", which round the gradients.
        block: The number of values of an 8-bit wire that share a scale: 128, 256 or 512.
        error_feedback: Keep rounding errors in fp32, by parameter, and add them in the next step.
        stochastic_rounding: Round at random, with the unrounded value as the mean.
        average: Divide by the number of ranks, in fp32. False: leave the sum.
        algorithm: "native", the engine's own; "ring" or "direct" for fp32 alone.
        deterministic: Make the bits depend on the ranks' gradients alone, not on buckets, streams
            or engine; clipping then takes an extra pass for the norm.
        streams: The number of communicators, each with a CUDA stream (on the host a thread), over
            which buckets are spread. None: COLLECTIVES_STREAMS, else 1.
        max_norm: Clip the gradient of all parameters to this norm, as
            ``torch.nn.utils.clip_grad_norm_`` does after the backward. None: don't clip.
        norm_type: The p of the norm, or infinity. 2 is found in the reduction's own pass.
        check_finite: Count non-finite values. Only with HookState's `optimizer` is a step with such
            values left out.
        parameters_as_bucket_view: With `optimizer`, make the parameters of a bucket views of one
            allocation, to gather them in place (4 bytes of memory traffic less for each bf16
            parameter). ``optimizer.step()`` exchanges ``param.data``, once: the parameters stay the
            same objects with the same values. Where another tensor shares their memory, or the node
            has no memory left, they stay there, with a warning; CUDA graphs captured before would
            read freed memory. On the host the ranks of a node share the allocation, so that a child
            process that is forked then may see later steps of the parent. ``torch.save`` of one
            parameter alone saves its bucket.
        zero_copy: On the host, allocate the buckets that DDP keeps in memory that the ranks of a
            node share, so that they are averaged with no staging copy; the state's repr says how
            many are shared. A child process that is forked then can't change them and must not read
            them: it may see what the parent writes later. On a GPU DDP's buckets are made in memory
            of ncclMemAlloc (torch.cuda.MemPool) and registered with NCCL. False: buckets stay as
            torch makes them, but with ``find_unused_parameters``, whose buckets DDP makes before it
            has a hook.
        gather: For `fully_shard` alone: the format, one of the 16-bit and 8-bit wires', in which
            parameters are gathered, while the rank that owns them keeps them as they are. None: the
            parameters' dtype.

    Raises:
        InvalidArgument: For a value that an option doesn't take, and, with the reason, for options
            that don't go together.
    """

    wire: Wire = "fp32"
    block: int = 256
    error_feedback: bool = False
    stochastic_rounding: bool = False
    average: bool = True
    algorithm: Algorithm = "native"
    deterministic: bool = False
    streams: int | None = None  # a number in every record
    max_norm: float | None = None
    norm_type: float = 2
    check_finite: bool = False
    parameters_as_bucket_view: bool = False
    zero_copy: bool = True
    gather: Compressed | None = None

    def __post_init__(self):
        object.__setattr__(self, "streams", parse_streams(self.streams))
        for field in dataclasses.fields(self):
            if isinstance(field.default, bool) and not isinstance(getattr(self, field.name), bool):
                raise InvalidArgument(f"{field.name} must be True or False, not {getattr(self, field.name)!r}")
        wire = parse_wire(self.wire)
        if self.gather is not None and (not isinstance(self.gather, str) or self.gather not in WIRE_FORMATS):
            formats = ", ".join(map(repr, WIRE_FORMATS))
            raise InvalidArgument(f"gather must be None or one of {formats}, not {self.gather!r:.60}")
        if not isinstance(self.algorithm, str) or self.algorithm not in _ALGORITHMS:
            shown = ", ".join(map(repr, _ALGORITHMS))
            raise InvalidArgument(f"algorithm must be one of {shown}, not {self.algorithm!r:.60}")
        if self.max_norm is not None:
            _check_positive("max_norm", self.max_norm)
        _check_positive("norm_type", self.norm_type, infinite=True)
        _refuse(self._combinations(wire))

    def _combinations(self, wire: str) -> list[tuple[bool, str]]:
        """Return the combinations that are refused: whether these options are one, and the reason."""
        return [
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


def list_options(function) -> inspect.Signature:
    """Return the signature of a function that takes the options as ``**options``, with each of them."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in dataclasses.fields(HookOptions)
    ]
    return signature.replace(parameters=parameters)


def check_names(called: str, function, options: dict) -> None:
    """Raise TypeError for a name that is no option, as Python does, with the nearest one of a function's
    arguments.

    `called`: the name by which the function is called.
    """
    known = [field.name for field in dataclasses.fields(HookOptions)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, inspect.signature(function).parameters, 1)
            hint = f": did you mean {near[0]!r}?" if near else f". It takes {', '.join(known)}"
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")


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
