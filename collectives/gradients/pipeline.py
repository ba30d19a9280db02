"""Gradient pipeline: what one `HookState` does with the gradients of each backward, whichever front
end brings them.

Each bucket is reduced, on all ranks or to the ranks' shards. Its optimizer is stepped at once where
nothing must come first. After the last bucket the stages run that the options ask for: the ranks
add up the statistics that they found on the way, and all make the same decision on clipping and on
the optimizer's step. Without such options there are no stages. The front ends are adapters:
`DDPReducer` brings DDP's buckets, `ShardedGradReducer` the units of `collectives.sharded`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from ..comm.communicator import Communicator
from ..comm.consensus import verify_same
from ..compression import Bucket, Compressor, NoCompression, Scaling
from ..optimizer_state import clip_coefficient
from .hyperparameters import HyperparameterCheck
from .local_sgd import LocalSGD
from .optimizer_in_backward import OptimizerInBackward
from .options import HookOptions
from .saved_layout import SavedBuckets
from .streams import CommStream, get_comm_streams

__all__ = ["GradientPipeline", "ReducedGradients"]


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


class Stage(Protocol):
    """Something to do after the last bucket of a backward."""

    def end_backward(self, pipeline: GradientPipeline, gradients: ReducedGradients) -> None:
        """Do it. All ranks do."""


class SumStatistics:
    """Adds up the ranks' statistics: the gradient's norm, and the number of its non-finite values."""

    def __init__(self, norm_type: float, deterministic: bool):
        self.norm_type = norm_type
        self.deterministic = deterministic

    def end_backward(self, pipeline, gradients) -> None:
        """Set the pipeline's `norm` and `nonfinite`."""
        comm, total = pipeline.comm, gradients.sum_stats()
        NoCompression().reduce(comm, Bucket(total, [], [], 0), Scaling())
        found_on_the_way = self.norm_type == 2 and not (self.deterministic and gradients.whole)
        norm = total[0].sqrt() if found_on_the_way else gradients.norm(float(self.norm_type))
        pipeline.nonfinite = int(total[1]) if comm._on_host else total[1]
        pipeline.norm = norm.item() if comm._on_host else norm


class ClipGradients:
    """Clips the gradients by their norm, from which a GradScaler's factor is divided out."""

    def __init__(self, max_norm: float):
        self.max_norm = max_norm

    def end_backward(self, pipeline, gradients) -> None:
        """Multiply the gradients, unless it would be by 1."""
        if pipeline.scaler is not None:
            scale = pipeline.scaler._scale
            pipeline.norm = pipeline.norm / (scale.item() if pipeline.comm._on_host else scale.to(torch.float64))
        clip = clip_coefficient(pipeline.norm, self.max_norm)
        if not (isinstance(clip, float) and clip == 1.0):
            gradients.multiply(clip)


class StepOptimizer:
    """Steps the optimizer with the clipped gradients; not where some aren't finite, if that is
    checked.
    """

    def __init__(self, max_norm: float | None, check_finite: bool):
        self.max_norm = max_norm
        self.check_finite = check_finite

    def end_backward(self, pipeline, gradients) -> None:
        """Step what the backward has not stepped."""
        clip = 1.0 if self.max_norm is None else clip_coefficient(pipeline.norm, self.max_norm)
        gradients.step(clip=clip, found=pipeline.nonfinite if self.check_finite else None)


class DeferStep:
    """Leaves the optimizer's step to its GradScaler."""

    def __init__(self, max_norm: float | None):
        self.max_norm = max_norm

    def end_backward(self, pipeline, gradients) -> None:
        """Leave what ``optimizer.step()`` needs."""
        gradients.defer_step(norm=pipeline.norm, max_norm=self.max_norm, found=pipeline.nonfinite)


class AverageModels:
    """Counts the backwards of post-local SGD, which averages the models after some."""

    def __init__(self, local_sgd: LocalSGD):
        self.local_sgd = local_sgd

    def end_backward(self, pipeline, gradients) -> None:
        """Count a backward."""
        self.local_sgd.end_backward()


class GradientPipeline:
    """Pipeline of the gradients of one `HookState`.

    `find_scaler`: a function that returns the GradScaler in use, or None. `describe_options`: a
    function that returns, by name, what must be the same on all ranks. `local_sgd`: post-local SGD,
    or None. A front end calls `begin_backward`, `reduce` for each bucket, and `end_backward`.
    """

    def __init__(
        self, options: HookOptions, compressor: Compressor, buckets: SavedBuckets, *,
        find_scaler: Callable, describe_options: Callable, local_sgd: LocalSGD | None = None,
    ):  # fmt: skip
        self.options = options
        self.compressor = compressor
        self.buckets = buckets  # of earlier backwards, and of a saved run
        self.local_sgd = local_sgd
        self.comm: Communicator | None = None  # of the newest backward
        self.comm_streams: list[CommStream] = []
        self.scaling = Scaling()
        self.scaler = None  # whose factor the gradients of the newest backward have
        self.norm = None  # of the last backward: a number, or a float64 tensor on a GPU
        self.nonfinite = None
        self.bytes_on_wire = 0
        self.world_size = 0  # in the last backward
        self.totals = {"backwards": 0, "buckets": 0, "bytes_on_wire": 0, "bytes_as_fp32": 0, "seconds_in_hook": 0.0}
        self._find_scaler = find_scaler
        self._describe_options = describe_options
        self._verified: weakref.WeakSet = weakref.WeakSet()  # communicators on which the ranks' options were compared
        self._hyperparameters = HyperparameterCheck()
        self.compose(None)

    # ---- The stages.

    def compose(self, step: OptimizerInBackward | None) -> None:
        """Choose the stages of backwards with and without a GradScaler. `step`: what steps the
        optimizer inside of the backward, or None.
        """
        self.optimizer_step = step
        self._takes_scaler = self.options.max_norm is not None or step is not None
        self._compositions = {scaled: self._stages(scaled) for scaled in (False, True)}
        self._choose(scaled=False)

    def _stages(self, scaled: bool) -> tuple[Stage, ...]:
        options, stages = self.options, []
        if options.needs_stats or (scaled and self.optimizer_step is not None):
            stages.append(SumStatistics(options.norm_type, options.deterministic))
        if self.optimizer_step is None and options.max_norm is not None:
            stages.append(ClipGradients(options.max_norm))
        elif self.optimizer_step is not None and scaled:
            stages.append(DeferStep(options.max_norm))
        elif self.optimizer_step is not None:
            stages.append(StepOptimizer(options.max_norm, options.check_finite))
        if self.local_sgd is not None:
            stages.append(AverageModels(self.local_sgd))
        return tuple(stages)

    def _choose(self, *, scaled: bool) -> None:
        self.stages = self._compositions[scaled]
        self.needs_stats = self.options.needs_stats or (scaled and self.optimizer_step is not None)
        self.steps_at_once = self.optimizer_step is not None and not self.needs_stats

    # ---- A backward.

    def begin_backward(self, comm: Communicator, streams: int) -> None:
        """Begin a backward over a communicator's ranks, on this number of streams.

        Blocks in the first one over each communicator. Raises `InvalidUsage` where it isn't clear
        which GradScaler is in use, and what `open` raises.
        """
        if comm is not self.comm or self.comm_streams[0].stopped:
            self.open(comm, streams)
        if self.buckets.warn_in:
            self.buckets.warn_unmatched(self.compressor)
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
            if comm not in self._verified:
                self.buckets.check_world_size(comm.size)
                verify_same(
                    comm, "the ranks' HookStates differ", self._describe_options(),
                    "give all ranks the same arguments, and the same COLLECTIVES_* variables",
                )  # fmt: skip
                self._verified.add(comm)
            self.comm, self.scaling = comm, self.get_scaling(comm.size)
        self.comm_streams = get_comm_streams(comm, streams)

    def compare_hyperparameters(self) -> None:
        """Raise `Mismatch` where the ranks would step the optimizer with different learning rates
        and the like.
        """
        self._hyperparameters.compare(self.comm, self.optimizer_step.optimizer)

    def get_scaling(self, size: int) -> Scaling:
        """Return the factors of a reduction over `size` ranks."""
        options = self.options
        if not options.average:
            return Scaling()
        if options.predivide is None:
            return Scaling(divisor=size)
        return Scaling(prescale=1.0 / options.predivide, postscale=options.predivide / size)

    def end_backward(self, gradients: ReducedGradients) -> None:
        """Run the stages after the last bucket. All ranks must call it; blocks as its collectives do."""
        self.norm = self.nonfinite = None
        for stage in self.stages:
            stage.end_backward(self, gradients)
        self.scaler = None
        self.world_size = self.comm.size
        self.totals["backwards"] += 1

    def join_end_backward(self, gradients: ReducedGradients) -> None:
        """Take part in the collectives of `end_backward`, for the other ranks."""
        for stage in self.stages:
            if isinstance(stage, SumStatistics):
                stage.end_backward(self, gradients)

    def count(self, buckets: int, sent: int, as_fp32: int) -> None:
        """Add reduced buckets to the statistics: their number, the bytes that this rank has sent
        for them, and those that it would have sent in fp32.
        """
        totals = self.totals
        self.bytes_on_wire += sent
        totals["buckets"] += buckets
        totals["bytes_on_wire"] += sent
        totals["bytes_as_fp32"] += as_fp32
