"""Adasum reducer of a DistributedOptimizer: reduces the changes of each rank's own step."""

from __future__ import annotations

import torch

from .basics import current
from .messages import DTYPE_NAMES, Request, TensorTableEntry, cached_request
from .operations import Adasum

__all__ = ["AdasumReducer"]


class AdasumReducer:
    """Reduces the changes that a step makes to parameters, instead of gradients.

    Each rank keeps its optimizer state. ``names``: name of each parameter by its id. ``passes``:
    backwards before a step; it is only stored.
    """

    steps_locally = True
    op = Adasum

    def __init__(self, names: dict, compression, passes: int, process_set):
        self.passes = passes
        self.skip_reduction = False
        self.synchronized = False
        self._names = names
        self._compression = compression
        self._process_set = process_set

    def register_hooks(self, optimizer) -> None:
        """Do nothing: no gradient is reduced."""

    @property
    def backward_ran(self) -> bool:
        """Whether a reduction is under way: none outlives a step."""
        return False

    def reset(self) -> None:
        """Do nothing: no reduction is under way."""

    drain = reset

    def set_passes(self, passes: int) -> None:
        """Set the number of backwards."""
        self.passes = passes

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
            for controller, entry in self._reduce(params, sent):
                controller.wait(entry)
            for param, old, small, context in zip(params, before, sent, contexts, strict=True):
                change = self._compression.decompress(small, context)
                param.copy_(old + (torch.view_as_complex(change.contiguous()) if old.is_complex() else change))
        return result

    def _reduce(self, params, sent):
        """Start one operation for each device, of all tensors there.

        Return (controller, entry) of each.
        """
        controller = current().controller(self._process_set)
        started = []
        for device in dict.fromkeys(tensor.device for tensor in sent):
            chosen = [tensor for tensor in sent if tensor.device == device]
            first = next(param for param, tensor in zip(params, sent, strict=True) if tensor.device == device)
            request = Request(
                "allreduce", f"changes of {self._names.get(id(first), 'parameters')} and what follows",
                tuple(DTYPE_NAMES[tensor.dtype] for tensor in chosen),
                tuple(tuple(tensor.shape) for tensor in chosen), device.type, op="adasum",
            )  # fmt: skip
            entry = TensorTableEntry(cached_request(request), chosen, chosen)
            controller.submit(entry, waits=True)
            started.append((controller, entry))
        return started
