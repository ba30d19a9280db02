"""SGD, Adam and AdamW in one pass over parameters, gradients and state: unscale, clip, step, round,
or skip the step.

The order of operations is that of torch.optim's foreach form. The result of an element depends on
that element's values alone, so that any sharding computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from .parameters import ParameterTable

__all__ = ["adam_step", "sgd_step"]


def sgd_step(
    param,
    grad,
    momentum=None,
    *,
    master=None,
    lr,
    momentum_factor: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    step=None,
    grad_scale=1.0,
    clip=1.0,
    found_nonfinite=None,
    seed: int | None = None,
    position: int | Sequence[int] = 0,
) -> None:
    """Step parameters by SGD with torch.optim.SGD's rules.

    Each of ``param``, ``grad``, ``momentum`` and ``master`` is an array, or a sequence with an
    array for each tensor; all are done in one launch. All of a parameter's arrays are contiguous
    (or dense with the same strides) and have the same number of elements. ``param``: fp32, bf16,
    fp16 or fp64. ``grad``: fp32, bf16 or fp16, and fp64 where the parameter is. ``momentum`` (with
    ``momentum_factor``) and ``master``: fp32, momentum fp64 with fp64 parameters. With a master, a
    bf16 or fp16 parameter is only written: it is the master, rounded. All is written by pointer:
    autograd's version counters don't move.

    The gradient is multiplied by ``grad_scale`` times ``clip``. ``lr``, ``grad_scale`` and ``clip``
    are numbers or tensors of one element on the arrays' device (fp32, fp64 or int64), which the
    kernel reads: no wait for the GPU. Where ``found_nonfinite`` (such a tensor, a number or a
    `Statistics`) isn't 0, nothing at all is written. ``step``: the number of this step, from 1
    (one, or one a tensor; also as such a tensor); on step 1 the momentum buffer becomes the
    gradient, whatever it held. Without it the buffer counts as filled.

    ``seed``: round bf16 parameters at random by Philox4x32-10, with a mean that is the unrounded
    value. Element i draws by ``position`` + i, by the seed and by ``step``: pass a shard's place in
    the whole, and another seed for each call without ``step``. ``position`` is the first tensor's,
    and the others follow it; or one for each.

    Blocks on the host; on a GPU it is queued on torch's current stream. Raises ``InvalidArgument``.
    """
    table = ParameterTable(
        "sgd_step", *_listed(param, grad, momentum, master), steps=_many(step, param), positions=_many(position, param)
    )
    table.sgd(
        lr=lr,
        momentum=momentum_factor,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        grad_scale=grad_scale,
        clip=clip,
        found_nonfinite=found_nonfinite,
        seed=seed,
    )


def adam_step(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    *,
    master=None,
    max_exp_avg_sq=None,
    lr,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
    step,
    grad_scale=1.0,
    clip=1.0,
    found_nonfinite=None,
    seed: int | None = None,
    position: int | Sequence[int] = 0,
) -> None:
    """Step parameters by Adam with torch.optim.Adam's rules, or by AdamW's (``decoupled``).

    ``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq`` (which asks for amsgrad): fp32, fp64 where
    the parameter is. The rest is as in `sgd_step`; ``step`` must be given. The bias corrections are
    worked out in the kernel, in fp64.

    On CPUs with FMA the state has the bits of torch.optim's foreach form, and so have about 99 of
    100 parameters. The others differ by torch's square root (MKL's), which is not always the
    nearest number: by 2 units in the last place of max(|p|, lr) at most, as long as the step is not
    longer than lr.
    """
    table = ParameterTable(
        "adam_step",
        *_listed(param, grad, exp_avg, master, exp_avg_sq, max_exp_avg_sq),
        steps=_many(step, param),
        positions=_many(position, param),
    )
    table.adam(
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        grad_scale=grad_scale,
        clip=clip,
        found_nonfinite=found_nonfinite,
        seed=seed,
    )


def _listed(param, *others):
    """All arguments as lists: one array is a list of one."""
    if isinstance(param, list | tuple):
        return (param, *others)
    return [param], *(None if each is None else [each] for each in others)


def _many(value, param):
    return value if value is None or (isinstance(param, list | tuple) and isinstance(value, list | tuple)) else [value]
