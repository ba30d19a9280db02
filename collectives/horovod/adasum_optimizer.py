"""The optimizer's step as what the ranks add up by Adasum: each steps by its own gradients, the changes are reduced."""

from __future__ import annotations

import torch

from .basics import current
from .messages import DTYPE_NAMES, Signature, Submission, request_of
from .operations import Adasum

__all__ = ["AdasumReducer"]


class AdasumReducer:
    """Reduces what a step has changed, instead of gradients; the optimizer's state stays each rank's own.

    ``named``: name of each parameter by its id; ``passes``: backwards before a step, for the count alone.
    """

    steps_locally = True
    op = Adasum

    def __init__(self, named: dict, compression, passes: int, process_set):
        self.passes = passes
        self.skips = False
        self.synchronized = False
        self._named = named
        self._compression = compression
        self._process_set = process_set

    def attach(self, optimizer) -> None:
        """Do nothing: no gradient is reduced."""

    @property
    def fired(self) -> bool:
        """Whether a reduction is under way: none outlives a step."""
        return False

    def begin_again(self) -> None:
        """Forget what is under way: nothing."""

    forget = begin_again

    def set_passes(self, passes: int) -> None:
        """Take another number of backwards."""
        self.passes = passes

    def synchronize(self, optimizer) -> None:
        """Do nothing, as in Horovod: `step` reduces."""

    def step(self, optimizer, stepping):
        """Step by ``stepping()``, and put the ranks' Adasum of the changes in the place of this rank's."""
        current().check(self._process_set)
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
            for start in self._reduce(params, sent):
                coordinator, submission = start
                coordinator.wait(submission)
            for param, old, small, context in zip(params, before, sent, contexts, strict=True):
                change = self._compression.decompress(small, context)
                param.copy_(old + (torch.view_as_complex(change.contiguous()) if old.is_complex() else change))
        return result

    def _reduce(self, params, sent):
        """Start one operation for each device, of all tensors there; give what is to be waited for."""
        coordinator = current().coordinator(self._process_set)
        started = []
        for device in dict.fromkeys(tensor.device for tensor in sent):
            chosen = [tensor for tensor in sent if tensor.device == device]
            first = next(param for param, tensor in zip(params, sent, strict=True) if tensor.device == device)
            signature = Signature(
                "allreduce", f"changes of {self._named.get(id(first), 'parameters')} and what follows",
                tuple(DTYPE_NAMES[tensor.dtype] for tensor in chosen),
                tuple(tuple(tensor.shape) for tensor in chosen), device.type, op="adasum",
            )  # fmt: skip
            submission = Submission(request_of(signature), chosen, chosen)
            coordinator.submit(submission, waits=True)
            started.append((coordinator, submission))
        return started
