"""Memory of an optimizer: its state and the temporaries of a step, measured on tiny parameters on the host."""

from __future__ import annotations

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .. import optim
from ..errors import InvalidArgument
from ..torch_compat import TorchDispatchMode, tree_leaves

__all__ = ["OptimizerCost"]

_COUNT = 60  # elements of a tiny parameter; no state has this size by itself
_NAMED = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}


class OptimizerCost:
    """Bytes that an optimizer needs beside parameters and gradients.

    Args:
        optimizer: An instance, a class, a function of parameters, a name, or None.
        on_gpu: Whether it steps on a GPU, where torch's optimizers work on all parameters at once.
    """

    def __init__(self, optimizer, *, on_gpu: bool):
        self._on_gpu = on_gpu
        self._settings: dict = {}
        if isinstance(optimizer, torch.optim.Optimizer):
            self._settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            optimizer = type(optimizer)
        elif isinstance(optimizer, str):
            if optimizer not in _NAMED:
                raise InvalidArgument(
                    f"optimizer must be {', '.join(map(repr, _NAMED))}, an optimizer, its class, or a function of "
                    f"parameters, not {optimizer!r:.60}",
                    op="memory_plan",
                )
            optimizer = _NAMED[optimizer]
        elif optimizer is not None and not callable(optimizer):
            raise InvalidArgument(f"optimizer must be an optimizer, not {optimizer!r:.60}", op="memory_plan")
        self._make = optimizer

    def of(self, params: list[nn.Parameter], shards: int) -> tuple[int, int]:
        """Return the bytes of state, and of temporaries, for this rank's shards of parameters."""
        if self._make is None or not params:
            return 0, 0
        state = of_all = of_one = 0.0
        known = {dtype: self._measure(dtype) for dtype in {param.dtype for param in params}}
        for param in params:
            its_state, its_all, its_one = known[param.dtype]
            count = -(-param.numel() // shards)
            state += its_state * count
            of_all += its_all * count
            of_one = max(of_one, its_one * count)
        return int(state), int(of_all + of_one)

    def _measure(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """Return bytes an element: of state, of temporaries for all parameters, and for one after the other."""
        optimizer, one = self._step(1, dtype)
        _, two = self._step(2, dtype)
        _, four = self._step(4, dtype)
        (param,) = optimizer.param_groups[0]["params"]
        tensors = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
        state = sum(value.nbytes for value in tensors if value.numel() >= _COUNT)
        of_all = (four - two) / 2
        return state / _COUNT, of_all / _COUNT, max(0.0, two - 2 * of_all, one - of_all) / _COUNT

    def _step(self, count: int, dtype: torch.dtype) -> tuple[torch.optim.Optimizer, int]:
        """Make two steps; return the optimizer, and the peak of temporary bytes in the second one."""
        params = [nn.Parameter(torch.ones(_COUNT, dtype=dtype, device="cpu")) for _ in range(count)]
        optimizer = self._build(params)
        for group in optimizer.param_groups:
            group.update({key: value for key, value in self._settings.items() if key != "capturable"})
            if self._on_gpu and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            with _Temporaries() as made:
                optimizer.step()
        return optimizer, made.most

    def _build(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        error = None
        for more in ({}, {"lr": 1e-3}):
            try:
                made = self._make(params, **more)
            except TypeError as found:
                error = found
                continue
            if not isinstance(made, torch.optim.Optimizer):
                raise InvalidArgument(f"{made!r:.60} is no optimizer", op="memory_plan")
            return made
        raise InvalidArgument(
            f"{self._make!r:.60} can't be made from parameters alone ({error}): give memory_plan a function of "
            "parameters that makes the optimizer",
            op="memory_plan",
        ) from error


class _Temporaries(TorchDispatchMode):
    """Counts the bytes of storages that operations make inside it, while they live. `most`: at one time."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}
        made = function(*args, **(kwargs or {}))
        self._live = {key: live for key, live in self._live.items() if not live[0].expired()}
        for storage in _storages(made):
            if storage._cdata not in given and storage.nbytes() >= _COUNT:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return made


def _storages(tree) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
