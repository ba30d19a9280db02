"""Trials of an optimizer on tiny parameters on the host: whether it gives the same results where the
ranks step parts of the parameters, and where they step some of the parameters each.

An optimizer of the same class and options steps all of the tiny parameters, and two others step what
two ranks would have. What works element by element gives the same numbers for parts. What uses a
norm, rows, or a product of matrices gives others for parts, and what uses all parameters together
gives others for some of them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["differs_apart", "differs_on_shards"]

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
    call, of some ms, whose result is the same on all ranks.
    """
    return _try(optimizer, [sorted(each - {0}) for each in dims], _cut, _join)


def differs_apart(optimizer: torch.optim.Optimizer, dims: list[set[int]]) -> bool | None:
    """Return whether an optimizer steps some of the parameters otherwise than all of them; as
    `differs_on_shards`.
    """
    return _try(optimizer, [2 * sorted(each) for each in dims], _choose, _merge)


def _try(optimizer, dims: list[list[int]], split: Callable, merge: Callable) -> bool | None:
    """Compare what an optimizer makes of all parameters with what two make of parts of them.

    `split`: a function of a group's tensors and the rank, 0 or 1, that returns the rank's part;
    `merge`: its inverse, of both parts and the whole tensors, for their shapes.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(_SEED)
        shapes = [[_SHAPES[min(dim, len(_SHAPES) - 1)] for dim in each] for each in dims]
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
        parts = []
        for rank in range(2):
            own_grads = [[split(each, rank) for each in step] for step in grads]
            try:
                parts.append(_train(optimizer, [split(each, rank) for each in values], own_grads))
            except Exception:
                return True  # it takes whole parameters, and not these
        merged = [merge(*both, tensors) for *both, tensors in zip(*parts, values, strict=True)]
        return not _largest_difference(whole, merged) <= _TOLERANCE * largest


def _cut(tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Return the shards of tensors on one of two ranks, shaped as `ShardedParam`'s."""
    made = []
    for each in tensors:
        flat, at = each.flatten(), (each.numel() + 2) // 2
        made.append((flat[at:] if rank else flat[:at]).view([1] * (each.dim() - 1) + [-1]))
    return made


def _join(first: list[torch.Tensor], last: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([a.flatten(), b.flatten()]).view(t.shape) for a, b, t in zip(first, last, tensors, strict=True)]


def _choose(tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Return the first or the second half of the tensors."""
    half = len(tensors) // 2
    return tensors[half:] if rank else tensors[:half]


def _merge(first: list[torch.Tensor], last: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*first, *last]


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random numbers, of other sizes in each row."""
    made = torch.randn(shape, dtype=torch.float64, device="cpu")
    if shape:
        sizes = torch.logspace(-1, 1, shape[0], dtype=torch.float64, device="cpu")
        made *= sizes.view(-1, *[1] * (len(shape) - 1))
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
    takes = inspect.signature(type(optimizer)).parameters
    groups = [
        {**_options(group), "params": members}
        for group, members in zip(optimizer.param_groups, params, strict=True)
        if members
    ]
    defaults = {key: value for key, value in _options(optimizer.defaults).items() if key in takes}
    return type(optimizer)(copy.deepcopy(groups, {id(p): p for group in groups for p in group["params"]}), **defaults)


def _options(given: dict) -> dict:
    """Return a group's options for tiny parameters on the host."""
    options = {key: _on_host(value) for key, value in given.items() if key not in ("params", "param_names")}
    if isinstance(options.get("lr"), float | int | torch.Tensor):  # a schedule may begin with 0
        options["lr"] = _LR
    if options.get("capturable"):
        options["capturable"] = False
    return options


def _on_host(value):
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _largest_difference(a, b) -> float:
    return max(
        ((x - y).abs().max().item() for ours, theirs in zip(a, b, strict=True) for x, y in zip(ours, theirs)),  # noqa: B905
        default=0.0,
    )
