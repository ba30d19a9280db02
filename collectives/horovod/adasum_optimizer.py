"""Adasum reducer of a DistributedOptimizer: reduces the changes of each rank's own step."""

from __future__ import annotations

import torch

from .basics import current
from .operations import Adasum, grouped_allreduce_async_, synchronize

__all__ = ["AdasumReducer"]


class AdasumReducer:
    """Reduces the changes that a step makes to parameters, instead of gradients.

    Each rank keeps its optimizer state. ``names``: name of each parameter by its id.
    """

    steps_locally = True
    backward_ran = False  # as of `GradientReducer`; no reduction outlives a step

    def __init__(self, names: dict, compression, process_set):
        self._names = names
        self._compression = compression
        self._process_set = process_set

    def register_hooks(self, optimizer) -> None:
        """Do nothing: no gradient is reduced."""

    def drain(self) -> None:
        """Do nothing: no reduction is under way."""

    def set_passes(self, passes: int) -> None:
        """Do nothing: any number of backwards may come before a step."""

    def synchronize(self, optimizer) -> None:
        """Do nothing, as in Horovod: `step` reduces."""

    def step(self, optimizer, stepping):
        """Step by ``stepping()``, and replace this rank's changes by the Adasum of all ranks'
        changes.
        """
        current().check_process_set(self._process_set)
        if not self._process_set.included() or self._process_set.size() == 1:
            return stepping()
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        with torch.no_grad():
            before = [param.detach().clone() for param in params]
        result = stepping()
        with torch.no_grad():
            changes = [param.detach() - old for param, old in zip(params, before, strict=True)]
            sent, contexts = [], []
            for change in changes:
                real = torch.view_as_real(change) if change.is_complex() else change
                small, context = self._compression.compress(real.contiguous())
                sent.append(small.contiguous())
                contexts.append(context)
            self._reduce(params, sent)
            for param, old, small, context in zip(params, before, sent, contexts, strict=True):
                change = self._compression.decompress(small, context)
                param.copy_(old + (torch.view_as_complex(change.contiguous()) if old.is_complex() else change))
        return result

    def _reduce(self, params, sent) -> None:
        """Reduce the tensors in place, by one operation for each device."""
        handles = []
        for device in dict.fromkeys(tensor.device for tensor in sent):
            chosen = [tensor for tensor in sent if tensor.device == device]
            first = next(param for param, tensor in zip(params, sent, strict=True) if tensor.device == device)
            name = f"changes of {self._names.get(id(first), 'parameters')} and what follows"
            handles.append(
                grouped_allreduce_async_(chosen, name=name, op=Adasum, process_set=self._process_set, _waits=True)
            )
        for handle in handles:
            synchronize(handle)
