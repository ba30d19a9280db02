"""The first backward with our hook: each bucket is reduced by the process group, a copy by us; they are compared."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ..cuda_state import has_completed
from ..ddp.hook import HookState, fused_allreduce
from ..errors import CollectiveTimeout
from ..gradients.streams import close_lanes
from ..rendezvous.process_groups import drop_communicator, find_communicator, get_communicator
from .check import differing, error_bound

__all__ = ["Trial"]

# Limit of one of our operations meanwhile. All ranks have just met, and the process group's own limit, which must not
# run out before, is 10 minutes (NCCL) or 30 (Gloo) by default.
_SECONDS = 120.0


class Trial:
    """One backward's buckets, reduced twice. After the last one `problem` says what went wrong on any rank, or "".

    DDP's own buffers are reduced by the process group, as without a hook; a copy of each goes through
    `fused_allreduce`. Before each bucket, and after the last, the ranks agree over the process group on whether all is
    well. Once it isn't, ours isn't called any more, and the gradients of this step are plain DDP's on all ranks;
    otherwise they are ours, with which the residuals of a compressed wire go together. Meanwhile the gradients take
    three times their memory.
    """

    def __init__(self, group, state: HookState, settings: dict):
        self._group = group
        self._state = state
        self._settings = settings
        self._buckets = []  # (DDP's buffer, ours, bound)
        self._futures = []
        self._limited = None  # (communicator, its own limit)
        self._own = ""  # what went wrong on this rank
        self.problem = ""

    @property
    def own_problem(self) -> bool:
        """Whether something went wrong on this rank."""
        return bool(self._own)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Reduce a bucket in both ways; blocks. The futures of all buckets are set when the last one's is returned."""
        buffer = bucket.buffer()
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._futures.append((future, buffer))
        ours = bound = None
        if not (self.problem or self._own):
            try:
                bound = error_bound(_real(buffer), self._settings, self._group.size())
                ours = buffer.clone()
            except Exception as error:  # no memory for the copies: then there is no check, and no hook
                self._own = _told(error)
        if not self.problem:
            self._agree(buffer.device)
            if self.problem:
                self._stop(buffer.device)
        dist.all_reduce(buffer.div_(self._group.size()), group=self._group)
        if not self.problem:
            dist.all_reduce(bound.div_(self._group.size()), group=self._group)
            self._buckets.append((buffer, ours, bound))
            bucket.set_buffer(ours)
            self._call(bucket)
        if bucket.is_last():
            self._judge(buffer.device)
        return future

    def _call(self, bucket) -> None:
        device = bucket.buffer().device
        try:
            self._limit(get_communicator(self._group, device))
            done = fused_allreduce(self._state, bucket)
            if device.type == "cuda":
                done.wait()  # the stream; two communicators with no order between them can deadlock
                _wait_at_most(_SECONDS, device)
        except Exception as error:  # whatever it is, the other ranks learn of it, and the log
            self._own = _told(error)
            self._stop(device)

    def _limit(self, comm) -> None:
        if self._limited is None and self._settings.get("streams", 1) == 1:  # others' limits are copies of the first's
            self._limited = (comm, comm.timeout)
            comm.timeout = min(comm.timeout or _SECONDS, _SECONDS)

    def _judge(self, device) -> None:
        if not (self.problem or self._own):
            wrong = sum(
                differing(_real(ours), _real(buffer), bound, self._settings) for buffer, ours, bound in self._buckets
            )
            if wrong:
                self._own = f"{wrong} of its values differ from plain DDP's by more than rounding"
        if not self.problem:
            self._agree(device)
        if not self.problem:
            for buffer, ours, _ in self._buckets:
                buffer.copy_(ours)
        if self._limited is not None and not self._limited[0].closed:
            self._limited[0].timeout = self._limited[1]
        self._buckets, self._limited = [], None
        futures, self._futures = self._futures, []
        for future, buffer in futures:
            future.set_result(buffer)

    def _agree(self, device) -> None:
        """Ask all ranks whether something went wrong."""
        bad = torch.tensor([float(bool(self._own))], device=device)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._group)
        if bad.item():
            self.problem = self._own or "on another rank"

    def _stop(self, device) -> None:
        """End what is under way: for ranks that wait for this one in it, at once."""
        comm = find_communicator(self._group, device)
        if comm is not None:
            close_lanes(comm, abort=True)
            drop_communicator(comm)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def _wait_at_most(seconds: float, device: torch.device) -> None:
    """Wait for the stream: NCCL knows no limit, and a rank that another one left would wait in the next agreement."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    limit = time.monotonic() + seconds
    while not has_completed(event):
        if time.monotonic() > limit:
            raise CollectiveTimeout(f"a bucket was not reduced within {seconds:.0f} s", op="all_reduce")
        time.sleep(1e-4)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
