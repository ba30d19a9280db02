"""Gradient pipeline: what one `HookState` does with the gradients of each backward, whichever front
end brings them.

Each bucket is reduced, on all ranks or to the ranks' shards. Its optimizer is stepped at once where
nothing must come first. After the last bucket the stages run that the options ask for: the ranks
add up the statistics that they found on the way, and all make the same decision on clipping and on
the optimizer's step. Without such options there are no stages. The front ends are adapters:
`DDPReducer` brings DDP's buckets, `HookReducer` the units of `collectives.sharded`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from ..comm.agree import verify_same
from ..comm.communicator import Communicator
from ..compression import Bucket, NoCompression, Scaling
from ..errors import InvalidArgument
from ..optimizer_state import clip_coefficient
from ..parameter_names import ParameterNames
from .hyperparameters import HyperparameterCheck
from .optimizer_in_backward import OptimizerInBackward
from .options import HookOptions
from .streams import CommStream, get_comm_streams

__all__ = ["GradientPipeline", "ReducedGradients"]

_BACKWARDS_TO_WARN = 3  # backwards after which loaded state that matches no parameter is named
_MAX_NAMES = 8  # in a message


class ReducedGradients(Protocol):
    """Reduced gradients of one backward, as a front end gives them to the stages."""

    whole: bool  # whether each rank has all of them

    def sum_stats(self) -> torch.Tensor:
        """Return this rank's [sum of squares, number of non-finite values], fp64; the ranks' sum is
        that of the gradient.
        """

    def norm(self, p: float) -> torch.Tensor:
        """Return the p-norm of the whole gradient, where `sum_stats` doesn't give it. A collective."""

    def multiply(self, factor) -> None:
        """Multiply the gradients by a factor: a float, or a tensor of one element."""

    def step(self, *, clip, found) -> None:
        """Step the optimizer for all that was not stepped in the backward; `found`: not if this
        isn't 0.
        """

    def defer_step(self, *, norm, max_norm, found) -> None:
        """Leave the optimizer's updates to ``optimizer.step()``, which clips them."""


# ---- The stages: functions of a pipeline and what a backward has reduced. All ranks run them.


def _sum_statistics(pipeline: GradientPipeline, gradients: ReducedGradients) -> None:
    """Add up the ranks' statistics: set the pipeline's `norm` and `nonfinite`."""
    comm, options, total = pipeline.comm, pipeline.options, gradients.sum_stats()
    NoCompression().reduce(comm, Bucket(total, [], [], 0), Scaling())
    found_on_the_way = options.norm_type == 2 and not (options.deterministic and gradients.whole)
    norm = total[0].sqrt() if found_on_the_way else gradients.norm(float(options.norm_type))
    pipeline.nonfinite = int(total[1]) if comm._on_host else total[1]
    pipeline.norm = norm.item() if comm._on_host else norm


def _clip(pipeline: GradientPipeline, gradients: ReducedGradients) -> None:
    """Clip the gradients by their norm, from which a GradScaler's factor is divided out."""
    if pipeline.scaler is not None:
        scale = pipeline.scaler._scale
        pipeline.norm = pipeline.norm / (scale.item() if pipeline.comm._on_host else scale.to(torch.float64))
    clip = clip_coefficient(pipeline.norm, pipeline.options.max_norm)
    if not (isinstance(clip, float) and clip == 1.0):
        gradients.multiply(clip)


def _step_optimizer(pipeline: GradientPipeline, gradients: ReducedGradients) -> None:
    """Step with the clipped gradients; not where some aren't finite, if that is checked."""
    options = pipeline.options
    clip = 1.0 if options.max_norm is None else clip_coefficient(pipeline.norm, options.max_norm)
    gradients.step(clip=clip, found=pipeline.nonfinite if options.check_finite else None)


def _defer_step(pipeline: GradientPipeline, gradients: ReducedGradients) -> None:
    """Leave the optimizer's step to its GradScaler."""
    gradients.defer_step(norm=pipeline.norm, max_norm=pipeline.options.max_norm, found=pipeline.nonfinite)


class GradientPipeline:
    """Pipeline of the gradients of one `HookState`.

    `parameter_names`: the names by which state is saved. `find_scaler`: a function that returns the
    GradScaler in use, or None. A front end calls `begin_backward`, reduces its buckets, and calls
    `end_backward`.
    """

    def __init__(self, options: HookOptions, parameter_names: ParameterNames, find_scaler: Callable):
        self.options = options
        self.parameter_names = parameter_names
        self.compressor = options.make_compressor(parameter_names)
        self._warn_in = 0  # backwards until `_warn_unclaimed`; 0: nothing was loaded
        self.comm: Communicator | None = None  # of the newest backward
        self.comm_streams: list[CommStream] = []
        self.scaling = Scaling()
        self.scaler = None  # whose factor the gradients of the newest backward have
        self.norm = None  # of the last backward: a number, or a float64 tensor on a GPU
        self.nonfinite = None
        self.bytes_on_wire = 0
        self.totals = {"backwards": 0, "buckets": 0, "bytes_on_wire": 0, "bytes_as_fp32": 0, "seconds_in_hook": 0.0}
        self._find_scaler = find_scaler
        self._verified: weakref.WeakSet = weakref.WeakSet()  # communicators on which the ranks' options were compared
        self._hyperparameters = HyperparameterCheck()
        self.compose(None)

    # ---- The stages.

    def compose(self, step: OptimizerInBackward | None) -> None:
        """Choose the stages. `step`: what steps the optimizer inside of the backward, or None."""
        self.optimizer_step = step
        self._takes_scaler = self.options.max_norm is not None or step is not None
        self._choose(scaled=False)

    def _choose(self, *, scaled: bool) -> None:
        steps = self.optimizer_step is not None
        self.needs_stats = self.options.needs_stats or (scaled and steps)
        self.steps_at_once = steps and not self.needs_stats
        # Gradients that wait for ``optimizer.step()`` stay averages, as a GradScaler reads them.
        self.folds_factor = steps and not scaled and (self.steps_at_once or self.options.norm_type == 2)
        stages = [
            (self.needs_stats, _sum_statistics),
            (not steps and self.options.max_norm is not None, _clip),
            (steps and scaled, _defer_step),
            (steps and not scaled, _step_optimizer),
        ]
        self.stages = tuple(stage for wanted, stage in stages if wanted)

    # ---- The compressor's saved state.

    def load_wire(self, state: dict) -> None:
        """Load the state of the compressor.

        After the third backward from now a warning names what matches no parameter.
        """
        self.compressor.load_state_dict(state)
        self._warn_in = _BACKWARDS_TO_WARN if self.compressor.unclaimed_names() else 0

    def _warn_unclaimed(self) -> None:
        names = self.parameter_names.unmatched(self.compressor.unclaimed_names())
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            warnings.warn(
                f"the loaded HookState has residuals of {', '.join(names[:_MAX_NAMES])}{more}, and no module that is "
                "registered with it has these: they are not used. Was it saved with another model, or, where one "
                "state serves several modules, with these registered in another order?",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip

    # ---- A backward.

    def begin_backward(self, comm: Communicator, streams: int) -> None:
        """Begin a backward over a communicator's ranks, on this number of streams.

        Blocks in the first one over each communicator. Raises `InvalidUsage` where it isn't clear
        which GradScaler is in use, and what `open` raises.
        """
        if comm is not self.comm or self.comm_streams[0].stopped:
            self.open(comm, streams)
        if self._warn_in:
            self._warn_in -= 1
            if not self._warn_in:
                self._warn_unclaimed()
        self.bytes_on_wire = 0
        if self._takes_scaler:
            self.scaler = self._find_scaler()
            self._choose(scaled=self.scaler is not None)
        self.compressor.begin_backward()
        if self.optimizer_step is not None:
            self.optimizer_step.begin()

    def open(self, comm: Communicator, streams: int) -> None:
        """Use a communicator from here on.

        At the first use of each the ranks compare their options, and raise `Mismatch` where these
        differ.
        """
        if comm is not self.comm:
            if self.options.parameters_as_bucket_view and self.optimizer_step is None:
                raise InvalidArgument(
                    "parameters_as_bucket_view is for a HookState that steps an optimizer: give it one"
                )
            if comm not in self._verified:
                verify_same(
                    comm, "the ranks' HookStates differ", self.describe_options(),
                    "give all ranks the same arguments, and the same COLLECTIVES_* variables",
                )  # fmt: skip
                self._verified.add(comm)
            self.comm, self.scaling = comm, self.get_scaling(comm.size)
        self.comm_streams = get_comm_streams(comm, streams)

    def describe_options(self) -> dict:
        """Return the options that must be the same on all ranks, by name."""
        described = {name: value for name, value in vars(self.options).items() if name != "zero_copy"}
        step = self.optimizer_step
        described["optimizer"] = None if step is None else type(step.optimizer).__name__
        return described

    def compare_hyperparameters(self) -> None:
        """Raise `Mismatch` where the ranks would step the optimizer with different learning rates
        and the like.
        """
        self._hyperparameters.compare(self.comm, self.optimizer_step.optimizer)

    def get_scaling(self, size: int) -> Scaling:
        """Return the factors of a reduction over `size` ranks."""
        return Scaling(divisor=size if self.options.average else 0)

    def end_backward(self, gradients: ReducedGradients) -> None:
        """Run the stages after the last bucket. All ranks must call it; blocks as its collectives do."""
        self.norm = self.nonfinite = None
        for stage in self.stages:
            stage(self, gradients)
        self.scaler = None
        self.totals["backwards"] += 1

    def count(self, buckets: int, sent: int, as_fp32: int) -> None:
        """Add reduced buckets to the statistics: their number, the bytes that this rank has sent
        for them, and those that it would have sent in fp32.
        """
        totals = self.totals
        self.bytes_on_wire += sent
        totals["buckets"] += buckets
        totals["bytes_on_wire"] += sent
        totals["bytes_as_fp32"] += as_fp32
