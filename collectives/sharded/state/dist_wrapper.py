"""DistWrapper: a call that all ranks make together, in which one rank's failure raises on all of
them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

from ...errors import CollectivesError, InvalidUsage, RemoteError
from ..scheduler import Scheduler

__all__ = ["DistWrapper", "get_module_scheduler"]


def get_module_scheduler(module: nn.Module) -> Scheduler | None:
    """Return the scheduler of a module's units; None where nothing in it is sharded.

    Raises `InvalidUsage` where its units are over several communicators.
    """
    schedulers = {id(each._scheduler): each._scheduler for each in module.modules() if hasattr(each, "_scheduler")}
    if len(schedulers) > 1:
        raise InvalidUsage("its units are over different communicators: call this for each part by itself")
    return next(iter(schedulers.values()), None)


class DistWrapper:
    """Runs functions on all ranks that make the same call of `op` with the same `what`; blocks
    until all do.

    `scheduler`: of the ranks; None: this process alone. Raises `InvalidUsage` on all ranks where
    they make other calls.
    """

    def __init__(self, scheduler: Scheduler | None, op: str, what: str = ""):
        self.op = op
        alone = scheduler is None or scheduler.agreement.control is None
        self._control = None if alone else scheduler.agreement.control
        self.rank = 0 if alone else scheduler.comm.rank
        self.size = 1 if alone else scheduler.comm.size
        self.comm = None if alone else scheduler.comm
        self.failed = False  # one rank has failed, and all have raised
        if not alone:
            scheduler.agreement.barrier(f"{op}({what})")

    def all_gather_object(self, value: Any) -> list:
        """Return all ranks' values, in rank order; they are pickled. A collective."""
        if self._control is None:
            return [value]
        text = pickle.dumps(value)
        lengths = numpy.zeros(self.size, dtype=numpy.int64)
        lengths[self.rank] = len(text)
        self._control.all_reduce(lengths, "max")
        ends = numpy.cumsum(lengths).tolist()
        table = numpy.zeros(ends[-1], dtype=numpy.uint8)
        table[ends[self.rank] - len(text) : ends[self.rank]] = numpy.frombuffer(text, dtype=numpy.uint8)
        self._control.all_reduce(table, "max")
        begins = [0, *ends[:-1]]
        return [pickle.loads(table[begin:end].tobytes()) for begin, end in zip(begins, ends, strict=True)]

    def run_on_all(self, what: str, function: Callable[[], Any]) -> list:
        """Call a function on each rank and return all results. Where it raises on one rank, all
        ranks raise and name it.

        An error of this package is raised on all ranks as it is; others as `RemoteError` on the
        ranks that had none.
        """
        failed = result = None
        try:
            result = function()
        except Exception as error:
            failed = error
        portable = failed if isinstance(failed, CollectivesError) else None
        outcomes = self.all_gather_object((failed is not None, portable, f"{type(failed).__name__}: {failed}", result))
        self.failed = any(has_failed for has_failed, *_ in outcomes)
        if failed is not None:
            raise failed
        for rank, (has_failed, error, text, _) in enumerate(outcomes):
            if error is not None:
                raise type(error)(f"on rank {rank}: {error.message}", op=self.op, rank=self.rank, peers=(rank,))
            if has_failed:
                raise RemoteError(
                    f"rank {rank} could not {what}: {text}", op=self.op, rank=self.rank, peers=(rank,)
                )  # fmt: skip
        return [result for *_, result in outcomes]

    def run_on_rank0(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0 alone and return its result on all ranks; raises as
        `run_on_all` does.
        """
        return self.run_on_all(what, function if self.rank == 0 else lambda: None)[0]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, of this shape and dtype, on the communicator's device."""
        if self.comm is None:
            return tensor
        there = tensor.detach().to(self.comm.device).contiguous()
        if there.numel():
            self.comm.broadcast(there.view(-1).view(torch.uint8))
        return there
