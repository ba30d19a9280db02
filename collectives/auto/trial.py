"""Trial of our hook in its first backward: compares our buckets with the process group's."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ..cuda_state import has_completed
from ..ddp.hook import HookState, fused_allreduce
from ..errors import CollectiveTimeout
from ..gradients.streams import close_comm_streams
from ..rendezvous.process_groups import drop_communicator, find_communicator, get_communicator
from .check import count_different, error_bound

__all__ = ["Trial"]

# Seconds; limit of one of our operations in the trial. All ranks are at the same step. The process
# group's own limit, which must not end first, is 10 minutes (NCCL) or 30 (Gloo) by default.
_TIMEOUT = 120.0


class Trial:
    """Reduces the buckets of one backward twice.

    After the last one `problem` is the error of any rank, or "", and `own_problem` this rank's. The
    process group reduces DDP's own buffers, as without a hook; `fused_allreduce` reduces a copy of
    each. Before each bucket, and after the last one, the ranks exchange over the process group
    whether any of them has a problem. From then on our hook isn't called any more, and the
    gradients of this step are plain DDP's on all ranks. Without a problem they are ours, because
    the residuals of a compressed wire belong to these. During the trial the gradients take three
    times their memory.
    """

    def __init__(self, group, state: HookState, settings: dict):
        self._group = group
        self._state = state
        self._settings = settings
        self._buckets = []  # (DDP's buffer, ours, bound)
        self._futures = []
        self._limited = None  # (communicator, its own limit)
        self.own_problem = ""  # of this rank
        self.problem = ""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Reduce a bucket in both ways; blocks.

        The futures of all buckets are set when the last one's is returned.
        """
        buffer = bucket.buffer()
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._futures.append((future, buffer))
        ours = bound = None
        if not (self.problem or self.own_problem):
            try:
                bound = error_bound(_real(buffer), self._settings, self._group.size())
                ours = buffer.clone()
            except Exception as error:  # no memory for the copies: then there is no check and no hook
                self.own_problem = _describe_error(error)
        if not self.problem:
            self._exchange_problems(buffer.device)
            if self.problem:
                self._abort_communicator(buffer.device)
        dist.all_reduce(buffer.div_(self._group.size()), group=self._group)
        if not self.problem:
            dist.all_reduce(bound.div_(self._group.size()), group=self._group)
            self._buckets.append((buffer, ours, bound))
            bucket.set_buffer(ours)
            self._reduce_fused(bucket)
        if bucket.is_last():
            self._compare_buckets(buffer.device)
        return future

    def _reduce_fused(self, bucket) -> None:
        device = bucket.buffer().device
        try:
            self._limit_timeout(get_communicator(self._group, device))
            done = fused_allreduce(self._state, bucket)
            if device.type == "cuda":
                done.wait()  # orders the stream: two communicators without an order between them can deadlock
                _wait_at_most(_TIMEOUT, device)
        except Exception as error:  # any error: it goes to the other ranks and to the log
            self.own_problem = _describe_error(error)
            self._abort_communicator(device)

    def _limit_timeout(self, comm) -> None:
        # With several streams the further ones would copy the first one's limit.
        if self._limited is None and self._settings.get("streams", 1) == 1:
            self._limited = (comm, comm.timeout)
            comm.timeout = min(comm.timeout or _TIMEOUT, _TIMEOUT)

    def _compare_buckets(self, device) -> None:
        if not (self.problem or self.own_problem):
            wrong = sum(
                count_different(_real(ours), _real(buffer), bound, self._settings)
                for buffer, ours, bound in self._buckets
            )
            if wrong:
                self.own_problem = f"{wrong} of its values differ from plain DDP's by more than rounding"
        if not self.problem:
            self._exchange_problems(device)
        if not self.problem:
            for buffer, ours, _ in self._buckets:
                buffer.copy_(ours)
        if self._limited is not None and not self._limited[0].closed:
            self._limited[0].timeout = self._limited[1]
        self._buckets, self._limited = [], None
        futures, self._futures = self._futures, []
        for future, buffer in futures:
            future.set_result(buffer)

    def _exchange_problems(self, device) -> None:
        """Set `problem` where any rank has one; blocks."""
        bad = torch.tensor([float(bool(self.own_problem))], device=device)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._group)
        if bad.item():
            self.problem = self.own_problem or "on another rank"

    def _abort_communicator(self, device) -> None:
        """Abort our communicator, so that ranks that wait for this one get an error at once."""
        comm = find_communicator(self._group, device)
        if comm is not None:
            close_comm_streams(comm, abort=True)
            drop_communicator(comm)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def _wait_at_most(seconds: float, device: torch.device) -> None:
    """Wait for the stream with a limit: NCCL has none, and a rank without its peers would wait in
    the next exchange.
    """
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    limit = time.monotonic() + seconds
    while not has_completed(event):
        if time.monotonic() > limit:
            raise CollectiveTimeout(f"a bucket was not reduced within {seconds:.0f} s", op="all_reduce")
        time.sleep(1e-4)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
