"""Buckets of one backward of a DDP module: their reduction, and what the pipeline's stages read and
change.
"""

from __future__ import annotations

import torch

from ..compression import Bucket, measure_grads
from ..recorder import recording
from .bucket_trace import begin_trace, end_trace
from .grad_norm import norm_by_parameter, norm_over_ranks
from .pipeline import GradientPipeline
from .streams import CommStream
from .unused_parameters import find_unused_parameters

__all__ = ["BucketGradients"]


class BucketGradients:
    """Gradients in the buckets of one backward: the `ReducedGradients` of DDP.

    `counted`: the streams whose statistics are needed. On the host the reductions count them, on a
    GPU one kernel at the end. `finds_unused`: whether parameters may have a gradient on no rank.
    """

    def __init__(self, pipeline: GradientPipeline, counted: list[CommStream], *, finds_unused: bool = False):
        self.pipeline = pipeline
        self.buckets: list[Bucket] = []  # that the stages look at, in the order of their reduction
        self._finds_unused = finds_unused
        on_host = [each for each in counted if each.comm._on_host]
        self._grad_stats = {each: torch.zeros(2, dtype=torch.float64, device="cpu") for each in on_host}
        self._factors: dict[torch.dtype, float] = {}  # that the optimizer's step applies

    # ---- One bucket.

    def reduce(self, bucket: Bucket, comm_stream: CommStream) -> int:
        """Reduce one bucket on its communication stream; return the bytes that this rank sends."""
        pipeline, comm = self.pipeline, comm_stream.comm
        step, stats = pipeline.optimizer_step, self._grad_stats.get(comm_stream)
        recorder = recording.active
        begun = None if recorder is None else begin_trace(comm_stream)
        if step is None:
            nbytes = pipeline.compressor.reduce(comm, bucket, pipeline.scaling, grad_stats=stats)
        else:
            shard_numel = self._shard_spec(comm, bucket).shard_numel
            nbytes = pipeline.compressor.reduce_scatter(
                comm, bucket, pipeline.scaling, shard_numel, grad_stats=stats, folded=self._factor(comm, bucket) != 1.0
            )
            if pipeline.steps_at_once:
                nbytes += self._step_bucket(comm, bucket)
        if recorder is not None:
            name = f"all_reduce {bucket.flat.nbytes} B"
            if step is not None:
                name = f"reduce_scatter {bucket.flat.nbytes} B{', step, all_gather' if pipeline.steps_at_once else ''}"
            end_trace(recorder, comm_stream, begun, name, bucket, nbytes, pipeline.options.wire)
        return nbytes

    def _shard_spec(self, comm, bucket):
        align = self.pipeline.compressor.align
        return self.pipeline.optimizer_step.shard_spec(bucket, comm.size, comm.rank, align)

    def _factor(self, comm, bucket: Bucket) -> float:
        """Return the factor, 1/n say, that is left in a bucket's reduced gradients for the
        optimizer's step.
        """
        pipeline, dtype = self.pipeline, bucket.flat.dtype
        if not pipeline.folds_factor:
            return 1.0
        if dtype not in self._factors:
            self._factors[dtype] = pipeline.compressor.folded_factor(comm, pipeline.scaling, dtype)
        return self._factors[dtype]

    def _step_bucket(self, comm, bucket: Bucket, **options) -> int:
        """Step the optimizer for a bucket, without the parameters that no rank has used.

        Returns the bytes sent.
        """
        unused, maybe_unused = find_unused_parameters(comm, bucket) if self._finds_unused else ((), None)
        return self.pipeline.optimizer_step.update(
            comm, bucket, grad_scale=self._factor(comm, bucket), align=self.pipeline.compressor.align, unused=unused,
            maybe_unused=maybe_unused, **options,
        )  # fmt: skip

    # ---- What the stages read and change.

    @property
    def whole(self) -> bool:
        """Whether each rank has all reduced gradients."""
        return self.pipeline.optimizer_step is None

    def sum_stats(self) -> torch.Tensor:
        """Return this rank's statistics, of all streams."""
        comm = self.pipeline.comm
        if comm._on_host:
            return sum(self._grad_stats.values())
        by_factor: dict[float, list] = {}  # that the step applies: one, unless some buckets are fp16
        for bucket in self.buckets:
            by_factor.setdefault(self._factor(comm, bucket), []).append(bucket)
        totals = []
        for factor, buckets in by_factor.items():
            total = measure_grads(self._local_shards(buckets), comm.device)
            if factor != 1.0:
                total[0] *= factor * factor
            totals.append(total)
        return sum(totals[1:], totals[0])

    def norm(self, p: float) -> torch.Tensor:
        """Return the p-norm of all buckets; where each rank has them all, the 2-norm takes the
        parameters one by one.
        """
        if p == 2:
            return norm_by_parameter(self.buckets)
        return norm_over_ranks(self.pipeline.comm, self._local_shards(self.buckets), p, dtype=torch.float64)

    def _local_shards(self, buckets: list[Bucket]) -> list[torch.Tensor]:
        """Return this rank's parts of buckets, which with those of all ranks are the whole gradient:
        each element once.
        """
        comm, parts = self.pipeline.comm, []
        for bucket in buckets:
            flat = bucket.flat
            shard_numel = -(-flat.numel() // (comm.size * 16)) * 16
            if not self.whole:
                shard_numel = self._shard_spec(comm, bucket).shard_numel
                if comm.rank == 0:
                    parts.append(flat[comm.size * shard_numel :])
            parts.append(flat[comm.rank * shard_numel : (comm.rank + 1) * shard_numel])
        return parts

    def multiply(self, factor) -> None:
        """Multiply all buckets."""
        torch._foreach_mul_([bucket.flat for bucket in self.buckets], factor)

    def step(self, *, clip, found) -> None:
        """Step the optimizer for all buckets, where their reduction has not."""
        if not self.pipeline.steps_at_once:
            for bucket in self.buckets:
                self.pipeline.count(0, self._step_bucket(self.pipeline.comm, bucket, clip=clip, found=found), 0)

    def defer_step(self, *, norm, max_norm, found) -> None:
        """Leave the buckets' updates to ``optimizer.step()``."""
        pipeline = self.pipeline
        for bucket in self.buckets:
            item = pipeline.comm, bucket, pipeline.compressor.align
            pipeline.optimizer_step.defer(item, norm, max_norm, found)
