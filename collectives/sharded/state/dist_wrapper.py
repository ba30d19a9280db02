"""DistWrapper: a call that all ranks make together, in which one rank's failure raises on all of
them.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ... import errors
from ...comm.agree import all_gather_bytes, all_gather_object
from ...errors import CollectivesError, InvalidUsage, RemoteError
from ..scheduler import Scheduler, schedulers_in
from .shard_tensor import ShardTensor

__all__ = ["DistWrapper", "broadcast_from_rank0", "get_module_scheduler", "no_dist"]


def get_module_scheduler(module: nn.Module) -> Scheduler | None:
    """Return the scheduler of a module's units; None where nothing in it is sharded.

    Raises `InvalidUsage` where its units are over several communicators.
    """
    schedulers = schedulers_in(module)
    if len(schedulers) > 1:
        raise InvalidUsage("its units are over different communicators: call this for each part by itself")
    return next(iter(schedulers), None)


@contextlib.contextmanager
def no_dist():
    """Call DCP's functions with ``no_dist=True`` in the block: what failed in them is raised as it
    is, and their warning that this is meant for one process is silent.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            (failure, _), *_ = error.failures.values()
            raise failure  # noqa: B904 its own traceback is what says where


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
        self._in_step = True  # the last exchange has succeeded: the other ranks wait at the next one
        if not alone:
            scheduler.agreement.barrier(f"{op}({what})")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._control is not None:
            self._exchange(self._control.barrier)

    def _exchange(self, function: Callable, *args) -> Any:
        """Call a collective, and note whether it has succeeded."""
        self._in_step = False
        result = function(*args)
        self._in_step = True
        return result

    def run_on_all(self, what: str, function: Callable[[], Any]) -> list:
        """Call a function on each rank and return all results. Where it raises on one rank, all
        ranks raise and name it.

        An error of this package is raised on all ranks as it is; others as `RemoteError` on the
        ranks that had none. The function may call this again: where it raises on one rank, that
        rank raises at the others' next call. Results are pickled, as torch.distributed.checkpoint's
        own are: they are its plans, and what users have in their state dicts. Failures are not.
        """
        failed = result = None
        try:
            result = function()
            data = pickle.dumps(result)
        except Exception as error:
            if self.failed or not self._in_step:
                raise  # from a call inside of it: the other ranks have raised, too
            failed = error
        if self._control is None:
            self.failed = failed is not None
            if failed is not None:
                raise failed
            return [result]
        problem = None
        if failed is not None:
            kind = type(failed).__name__ if isinstance(failed, CollectivesError) else None
            problem = kind, failed.message if kind else f"{type(failed).__name__}: {failed}"
        problems = self._exchange(all_gather_object, self._control, problem)
        self.failed = any(each is not None for each in problems)
        if failed is not None:
            raise failed
        for rank, each in enumerate(problems):
            if each is not None:
                kind, text = each
                text = f"on rank {rank}: {text}" if kind else f"rank {rank} could not {what}: {text}"
                kind = getattr(errors, kind) if kind in errors.__all__ else RemoteError
                raise kind(text, op=self.op, rank=self.rank, peers=(rank,))
        return [pickle.loads(each) for each in self._exchange(all_gather_bytes, self._control, data)]

    def run_on_rank0(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0 alone and return its result on all ranks; raises as
        `run_on_all` does.
        """
        return self.run_on_all(what, function if self.rank == 0 else lambda: None)[0]

    def all_to_all_bytes(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Send part r, uint8 on the host, to rank r, and return what the ranks have sent to this one.
        `sizes`: how many bytes each has for it.
        """
        if self._control is None:
            return parts
        received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        counts = [part.numel() for part in parts]
        self._exchange(self._control.all_to_all, received, torch.cat(parts), sizes, counts)
        return list(received.split(sizes))

    def scatter_from_rank0(self, read: Callable[[], dict], take: Callable[[Any, torch.Tensor], Any]) -> dict:
        """Return on all ranks the entries that `read` returns on rank 0, of each tensor what
        ``take(key, tensor)`` makes of it here. The tensors are broadcast one by one.
        """
        given: dict = {}

        def outline() -> dict:
            given.update(read())
            if any(isinstance(value, ShardTensor | DTensor) for value in given.values()):
                raise InvalidUsage("broadcast_from_rank0 takes full tensors, and these are one rank's pieces")
            return {
                key: torch.empty(value.shape, dtype=value.dtype, device="meta")
                if isinstance(value, torch.Tensor)
                else value
                for key, value in given.items()
            }

        made = self.run_on_rank0("read the state dict", outline)
        for key, entry in made.items():
            if isinstance(entry, torch.Tensor):
                whole = given[key] if self.rank == 0 else torch.empty_like(entry, device="cpu")
                made[key] = take(key, whole if self.comm is None else broadcast_from_rank0(whole, self.comm))
        return made


def broadcast_from_rank0(tensor: torch.Tensor, comm) -> torch.Tensor:
    """Return the tensor of a communicator's rank 0, of this shape and dtype, on the communicator's
    device. A collective.
    """
    there = tensor.detach().to(comm.device).contiguous()
    if there.numel():
        comm.broadcast(there.view(-1).view(torch.uint8))
    return there
