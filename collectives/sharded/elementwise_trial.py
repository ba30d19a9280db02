"""Trial of an optimizer: whether it gives the same results for parameters that are cut into shards as
for whole ones.

An optimizer of the same class and options steps tiny whole parameters on the host; two others step
the two parts of the same parameters, as two ranks do. What works element by element gives the same
numbers. What uses a norm, rows, a product of matrices, or all parameters together gives others.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

__all__ = ["differs_on_shards"]

_STEPS = 3
_LR = 0.01
_TOLERANCE = 1e-4  # of the largest update; optimizers may compute in fp32, in another order for other shapes
_SHAPES = ((), (13,), (5, 7), (3, 4, 3), (2, 3, 2, 3), (2, 2, 2, 2, 3))  # by the number of dimensions
_SEED = 17


def differs_on_shards(optimizer: torch.optim.Optimizer, dims: list[set[int]]) -> bool | None:
    """Return whether an optimizer steps shards otherwise than whole parameters; None where that can't
    be tried: it can't be made again from its options, steps nothing without more than gradients, or
    isn't deterministic.

    `dims`: for each of its param groups, the numbers of dimensions of the parameters to try. A local
    call on the host, of some ms, whose results are the same on all ranks.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(_SEED)
        shapes = [[_SHAPES[min(dim, len(_SHAPES) - 1)] for dim in sorted(each) if dim] for each in dims]
        values = [[_random(shape) for shape in each] for each in shapes]
        grads = [[[_random(shape) for shape in each] for each in shapes] for _ in range(_STEPS)]
        try:
            whole = _train(optimizer, values, grads)
            again = _train(optimizer, values, grads)
        except Exception:
            return None
        largest = _largest_difference(whole, values)
        if not largest > 0 or _largest_difference(whole, again) > 0:  # of other random numbers each time
            return None
        try:
            parts = [
                _train(optimizer, _cut(values, last), [_cut(each, last) for each in grads]) for last in (False, True)
            ]
        except Exception:
            return True  # it takes whole parameters, and not these
        cut = [
            [torch.cat([a.flatten(), b.flatten()]).view(value.shape) for a, b, value in zip(*each, strict=True)]
            for each in zip(*parts, values, strict=True)
        ]
        return not _largest_difference(whole, cut) <= _TOLERANCE * largest


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random numbers, of other sizes in each row."""
    made = torch.randn(shape, dtype=torch.float64)
    if shape:
        made *= torch.logspace(-1, 1, shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    return made


def _cut(values: list[list[torch.Tensor]], last: bool) -> list[list[torch.Tensor]]:
    """Return the shards of tensors on the first or the last of two ranks, shaped as `ShardedParam`'s."""
    made = []
    for each in values:
        flats = [value.flatten() for value in each]
        parts = [flat[(flat.numel() + 2) // 2 :] if last else flat[: (flat.numel() + 2) // 2] for flat in flats]
        made.append([p.view([1] * (v.dim() - 1) + [-1]) for p, v in zip(parts, each, strict=True)])
    return made


def _train(optimizer, values, grads) -> list[list[torch.Tensor]]:
    """Return the values after some steps of an optimizer that is made as this one is."""
    params = [[nn.Parameter(value.clone()) for value in each] for each in values]
    made = _make(optimizer, params)
    for step in grads:
        for params_of, grads_of in zip(params, step, strict=True):
            for param, grad in zip(params_of, grads_of, strict=True):
                param.grad = grad.clone()
        made.step()
    return [[param.detach().clone() for param in each] for each in params]


def _make(optimizer: torch.optim.Optimizer, params: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """Make an optimizer of the same class, defaults and groups' options for other parameters."""
    groups = []
    for group, members in zip(optimizer.param_groups, params, strict=True):
        options = {key: _on_host(value) for key, value in group.items() if key not in ("params", "param_names")}
        options |= {"lr": _LR} if "lr" in options else {}  # a schedule may begin with 0
        options |= {"capturable": False} if options.get("capturable") else {}
        groups.append({**options, "params": members})
    groups = [group for group in groups if group["params"]]
    takes = inspect.signature(type(optimizer)).parameters
    defaults = {key: _on_host(value) for key, value in optimizer.defaults.items() if key in takes}
    defaults |= {"lr": _LR} if "lr" in defaults else {}
    defaults |= {"capturable": False} if defaults.get("capturable") else {}
    return type(optimizer)(copy.deepcopy(groups, {id(p): p for group in groups for p in group["params"]}), **defaults)


def _on_host(value):
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _largest_difference(a, b) -> float:
    return max(
        ((x - y).abs().max().item() for ours, theirs in zip(a, b, strict=True) for x, y in zip(ours, theirs)),  # noqa: B905
        default=0.0,
    )
