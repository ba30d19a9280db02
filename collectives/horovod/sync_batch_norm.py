"""Batch normalisation by the statistics of all ranks' batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..torch_compat import BatchNorm
from .basics import current
from .operations import Sum, allgather_async, allreduce_async, synchronize
from .process_sets import global_process_set

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(BatchNorm):
    """Normalises as torch.nn.BatchNorm1d to 3d; training uses all ranks' mean and variance.

    Arguments, parameters and state dicts are those of torch's. Input: [N, C, ...] of 2 dimensions
    or more, floating, on the CPU or a GPU; N may differ between the ranks, and be 0. In training
    the forward and the backward block until all ranks have called them, so all ranks must call them
    equally often, in the same order. In evaluation nothing is sent. The gradients of weight and
    bias are those of this rank's batch; DistributedOptimizer reduces them. Raises `ValueError`
    where all batches together have one value per channel. Source: Ioffe and Szegedy 2015.
    """

    def _check_input_dim(self, input):
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, not {input.shape[1]}")

    def forward(self, input):
        """Return the normalised input, of the same shape and dtype."""
        self._check_input_dim(input)
        if not self.training or current().size == 1:
            return super().forward(input)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        out, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats and self.running_mean is not None:
            weight = self.momentum
            if weight is None:  # a tensor: the host doesn't wait for it
                weight = (1.0 / self.num_batches_tracked.double()).to(self.running_mean.dtype)
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
        return out

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace each batch normalisation of a module by a SyncBatchNorm with its state."""
        converted = module
        if isinstance(module, BatchNorm) and not isinstance(module, cls):
            converted = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            converted.weight, converted.bias = module.weight, module.bias
            converted.running_mean, converted.running_var = module.running_mean, module.running_var
            converted.num_batches_tracked = module.num_batches_tracked
            converted.train(module.training)
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child))
        return converted


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Normalise(torch.autograd.Function):
    """Returns the output, and the statistics of all ranks' batches.

    These are the mean, the biased variance (float64) and the number of values.
    """

    @staticmethod
    def forward(ctx, input, weight, bias, eps):
        channels = input.shape[1]
        over = [d for d in range(input.dim()) if d != 1]
        wide = input.to(_wide(input.dtype))
        count = input.numel() // channels if channels else 0
        # Each rank's mean and sum of squared distances from it: sums of squares would cancel out
        # (Chan et al. 1979).
        own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
        if count:
            variance, mean = torch.var_mean(wide, over, correction=0)
            own[:1].fill_(count)  # an assignment would copy the number from the host, which waits
            own[1 : 1 + channels] = mean
            own[1 + channels :] = variance.double() * count
        rows = synchronize(allgather_async(own[None], None, global_process_set, _waits=True))
        counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
        total = counts.sum()
        if not total.is_cuda or count < 2:  # else there are enough values, and the host needn't wait for their number
            total = total.item()
        if not isinstance(total, torch.Tensor) and total < 2:
            raise ValueError(
                f"expected more than 1 value per channel when training, got {total:g} on all ranks together "
                f"(here input of size {list(input.shape)})"
            )
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        ctx.total, ctx.over = total, over
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.mark_non_differentiable(mean, variance, *([total] if isinstance(total, torch.Tensor) else ()))
        if not count:
            return torch.empty_like(input), mean, variance, total
        parameters = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
        out = F.batch_norm(wide, mean.to(wide.dtype), variance.to(wide.dtype), *parameters, False, 0.0, eps)
        return out.to(input.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        input, weight, mean, inverse = ctx.saved_tensors
        over, dtype = ctx.over, _wide(input.dtype)
        shape = [1, -1] + [1] * (input.dim() - 2)
        mean, inverse = mean.to(dtype), inverse.to(dtype)
        grad = grad.to(dtype)
        normal = (input.to(dtype) - mean.view(shape)) * inverse.view(shape)
        of_bias, of_weight = grad.sum(over), (grad * normal).sum(over)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([of_bias, of_weight])
            sums = synchronize(allreduce_async(sums, op=Sum, process_set=global_process_set, _waits=True)) / ctx.total
            first, second = sums.view(2, -1)
            scale = inverse if weight is None else inverse * weight.to(dtype)
            of_input = (grad - first.view(shape) - normal * second.view(shape)).mul_(scale.view(shape))
            of_input = of_input.to(input.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        of_weight = of_weight.to(weight.dtype) if needs_weight else None
        of_bias = of_bias.to(weight.dtype) if needs_bias else None
        return of_input, of_weight, of_bias, None
