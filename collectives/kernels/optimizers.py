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

    All tensors are done in one launch. All of a parameter's arrays are contiguous (or dense with
    the same strides) and have the same number of elements. All is written by pointer: autograd's
    version counters don't move. ``lr``, ``grad_scale`` and ``clip`` are numbers or tensors of one
    element on the arrays' device (fp32, fp64 or int64), which the kernel reads: no wait for the
    GPU. Blocks on the host; on a GPU it is queued on torch's current stream.

    Args:
        param: An array of fp32, bf16, fp16 or fp64, or a sequence with an array for each tensor.
        grad: The gradient, fp32, bf16 or fp16, and fp64 where the parameter is; a sequence where
            ``param`` is.
        momentum: The momentum buffer, fp32, and fp64 with fp64 parameters; for ``momentum_factor``.
        master: The fp32 master. The parameter, bf16 or fp16, is then only written: it is the
            master, rounded.
        lr: The learning rate.
        momentum_factor: torch's ``momentum``.
        dampening: As in torch.optim.SGD.
        weight_decay: As in torch.optim.SGD.
        nesterov: As in torch.optim.SGD.
        maximize: As in torch.optim.SGD.
        step: The number of this step, from 1: one, or one for each tensor; also as a tensor of one
            element. On step 1 the momentum buffer becomes the gradient, whatever it held. None: the
            buffer counts as filled.
        grad_scale: A factor of the gradient.
        clip: Another factor of the gradient.
        found_nonfinite: Where this number, tensor of one element or `Statistics` isn't 0, nothing
            at all is written.
        seed: Round bf16 parameters at random by Philox4x32-10, with a mean that is the unrounded
            value. Element i draws by ``position`` + i, by the seed and by ``step``: pass another
            seed for each call without ``step``. None: round to nearest.
        position: The place of a shard in the whole: the first tensor's, which the others follow, or
            one for each.

    Raises:
        InvalidArgument: For arrays and numbers that can't be used.
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
    """Step parameters by Adam with torch.optim.Adam's rules, or by AdamW's.

    The bias corrections are worked out in the kernel, in fp64. Otherwise as `sgd_step`.

    On CPUs with FMA the state has the bits of torch.optim's foreach form, and so have about 99 of
    100 parameters. The others differ by torch's square root (MKL's), which is not always the
    nearest number: by 2 units in the last place of max(|p|, lr) at most, as long as the step is not
    longer than lr.

    Args:
        param: As in `sgd_step`.
        grad: As in `sgd_step`.
        exp_avg: The average of the gradients, fp32, and fp64 where the parameter is; a sequence
            where ``param`` is.
        exp_avg_sq: The average of their squares, likewise.
        master: As in `sgd_step`.
        max_exp_avg_sq: The largest average of squares, likewise, which asks for amsgrad. None: no
            amsgrad.
        lr: The learning rate.
        betas: As in torch.optim.Adam.
        eps: As in torch.optim.Adam.
        weight_decay: As in torch.optim.Adam.
        decoupled: Decay the weights as AdamW does.
        maximize: As in torch.optim.Adam.
        step: The number of this step, from 1: one, or one for each tensor; also as a tensor of one
            element.
        grad_scale: As in `sgd_step`.
        clip: As in `sgd_step`.
        found_nonfinite: As in `sgd_step`.
        seed: As in `sgd_step`.
        position: As in `sgd_step`.
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
