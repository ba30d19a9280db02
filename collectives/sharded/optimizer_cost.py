"""Memory of an optimizer: its state and the temporaries of a step, measured on tiny parameters on
the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from .. import optim
from ..errors import InvalidArgument
from .live_bytes import LiveBytes

__all__ = ["Cost", "OptimizerCosts"]

_COUNT = 60  # elements of a tiny parameter; no state has this size by itself
_NAMED = {
    "sgd": (optim.SGD, {}),
    "sgd+momentum": (optim.SGD, {"momentum": 0.9}),
    "adam": (optim.Adam, {}),
    "adamw": (optim.AdamW, {}),
}


class Cost(NamedTuple):
    """Memory of one parameter.

    `states`: bytes an element of each state tensor that is as long as the parameter; `host_bytes`:
    bytes of other state, on the host. Temporaries of a step, in bytes an element: `of_all`: for all
    parameters together; `of_each`: for one parameter after the other; `of_last`: the part of it
    that is freed when the next one's is allocated.
    """

    states: tuple[int, ...] = ()
    host_bytes: int = 0
    of_all: float = 0.0
    of_each: float = 0.0
    of_last: float = 0.0


class OptimizerCosts:
    """Costs of parameters in an optimizer: an instance, a class, a function of parameters, a name,
    or None.

    `gpu`: whether it steps on a GPU, where torch's optimizers work on all parameters at once.
    """

    def __init__(self, optimizer, *, master_weights: bool | None, gpu: bool):
        self._known: dict = {}
        self._gpu = gpu
        more = {} if master_weights is None else {"master_weights": bool(master_weights)}
        self._groups: dict[int, dict] = {}  # by the parameter's id
        self._first: dict = {}
        if isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer)
            for group in optimizer.param_groups:
                settings = {key: group[key] for key in optimizer.defaults if key in group} | more
                self._first = self._first or settings
                self._groups |= {id(param): settings for param in group["params"]}
        elif isinstance(optimizer, str):
            if optimizer not in _NAMED:
                raise InvalidArgument(
                    f"optimizer must be {', '.join(map(repr, _NAMED))}, an optimizer, its class, or a function of "
                    f"parameters, not {optimizer!r:.60}",
                    op="memory_plan",
                )
            kind, self._first = _NAMED[optimizer][0], _NAMED[optimizer][1] | more
        elif optimizer is None or callable(optimizer):
            kind, self._first = optimizer, more
        else:
            raise InvalidArgument(f"optimizer must be an optimizer, not {optimizer!r:.60}", op="memory_plan")
        self._kind = kind

    def has(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether the optimizer holds any of these parameters."""
        return any(id(param) in self._groups for param in params)

    def of(self, param: nn.Parameter, *, known: bool) -> Cost:
        """Return the cost of a parameter; `known`: one that the optimizer doesn't hold costs
        nothing.
        """
        if self._kind is None or (known and id(param) not in self._groups):
            return Cost()
        settings = self._groups.get(id(param), self._first)
        key = id(settings), param.dtype
        if key not in self._known:
            self._known[key] = _probe(self._make(settings), param.dtype)
        return self._known[key]

    def _make(self, settings: dict) -> Callable:
        changes = dict(settings)
        for name in ("lr", "capturable"):  # these may be on a GPU, and change no size
            if isinstance(changes.get(name), torch.Tensor):
                changes[name] = changes[name].item()
        if changes.get("capturable"):
            changes["capturable"] = False

        def make(params):
            given = {} if self._groups else changes  # an instance's groups hold more than its class takes
            try:
                made = self._kind(params, **given)
            except TypeError:
                try:
                    made = self._kind(params, lr=1e-3, **given)
                except TypeError as error:
                    raise InvalidArgument(
                        f"{self._kind!r:.60} can't be made from parameters alone ({error}): give memory_plan a "
                        "function of parameters that makes the optimizer",
                        op="memory_plan",
                    ) from error
            if not isinstance(made, torch.optim.Optimizer):
                raise InvalidArgument(f"{made!r:.60} is no optimizer", op="memory_plan")
            for group in made.param_groups:
                group.update(changes)
                if self._gpu and group.get("foreach", 0) is None and not group.get("fused"):
                    group["foreach"] = True
            return made

        return make


def _probe(make: Callable, dtype: torch.dtype) -> Cost:
    optimizer, one = _step(make, 1, dtype)
    two, four = (_step(make, count, dtype)[1] for count in (2, 4))
    states, host_bytes = [], 0
    (param,) = optimizer.param_groups[0]["params"]
    for value in optimizer.state[param].values():
        if isinstance(value, torch.Tensor):
            if value.numel() == _COUNT:
                states.append(value.element_size())
            else:
                host_bytes += value.nbytes
    of_all = (four - two) / 2
    of_last = two - one - of_all
    return Cost(tuple(states), host_bytes, of_all / _COUNT, (one - of_all) / _COUNT, of_last / _COUNT)


def _step(make: Callable, count: int, dtype: torch.dtype):
    """Make two steps; return the optimizer, and the peak of temporary bytes in the second one."""
    params = [nn.Parameter(torch.ones(_COUNT, dtype=dtype, device="cpu")) for _ in range(count)]
    optimizer = make(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        with LiveBytes(min_bytes=_COUNT) as made:
            optimizer.step()
    return optimizer, made.max_allocated
