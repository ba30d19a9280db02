"""FastPath: the buckets of a DDP module whose backward is as its last one was.

`DDPReducer` has the full path, which takes every option and looks up what a bucket doesn't say. The
short one averages a bucket in the hook's call, on the host, where nothing has changed since the
last backward on the full path, and leaves every other bucket to that.
"""

from __future__ import annotations

import time
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..compression import Bucket, NoCompression, ring_bytes
from ..recorder import recording
from ..torch_patches import count_hook_registrations, find_hooked_ddps
from .step_count import find_step_count

__all__ = ["FastPath"]


class _KnownBucket(NamedTuple):
    """A bucket of the last backward: its buffer, how it is averaged, and what the hook returns."""

    buffer: torch.Tensor
    address: int
    comm: Communicator
    op: str
    algorithm: str | None
    sent: int  # bytes
    as_fp32: int
    future: torch.futures.Future  # complete, of `buffer`: a new one takes as long as all else here


class FastPath:
    """The fast path of one `HookState`.

    It is open after two backwards of one module on the full path with the same buffers, if these
    had no stages and kept no buckets, and if all buffers are registered that will be. Then it takes
    buckets as long as the module, its ranks, its options and its buffers are the same; the first
    difference closes it. It holds the buffers while it is open, at most until the module is freed.
    """

    __slots__ = (
        "__weakref__", "_addresses", "_buckets", "_count", "_ddp", "_ddp_group", "_group", "_hooks", "_other_comms",
        "_owner", "comm", "is_open",
    )  # fmt: skip

    def __init__(self):
        self.is_open = False
        self.comm: Communicator | None = None  # of the module's process group, or the state's
        self._owner = None  # reference to the first parameter of the first bucket
        self._ddp = None  # reference to the module
        self._ddp_group = None  # reference to its process group
        self._group = None  # reference to the process group of `comm`; None: the state names a communicator
        self._count = None  # the module's StepCount
        self._hooks = 0  # hooks that were registered so far in this process
        self._other_comms: list[Communicator] = []  # of streams
        self._buckets: list[_KnownBucket] = []
        self._addresses: list[int] = []  # of the buffers in the backward before

    def close(self) -> None:
        """Leave the next buckets to the full path."""
        self.is_open = False
        self._buckets = []

    # ---- The full path.

    def remember(self, state, bucket: Bucket, future: torch.futures.Future, last: bool) -> None:
        """Record a bucket that the full path has averaged; opens the short one after the last."""
        if bucket.index == 0:
            self.close()
            if not self._remember_module(state, bucket.params[0]):
                return
        pipeline, buffer = state.pipeline, bucket.flat
        if bucket.index != len(self._buckets) or pipeline.comm is not self.comm:
            self.close()
            return
        comm = pipeline.comm_streams[bucket.index % len(pipeline.comm_streams)].comm
        plain = pipeline.compressor.plain_reduction(comm, pipeline.scaling, buffer.dtype)
        if plain is None or future.value() is not buffer:  # else a complex one
            self.close()
            return
        counts = ring_bytes(buffer, comm.size, 2), state.reducer.count_fp32_bytes(bucket)
        self._buckets.append(_KnownBucket(buffer, buffer.data_ptr(), comm, *plain, *counts, future))
        if last:
            before, self._addresses = self._addresses, [each.address for each in self._buckets]
            settled = not state.shares_memory or state._registrations.is_settled()
            self.is_open = settled and before == self._addresses
            if not self.is_open:
                self.close()

    def _remember_module(self, state, param) -> bool:
        """Record the module of a backward, and its ranks; False where it isn't one for this path."""
        pipeline, ddps = state.pipeline, find_hooked_ddps(param)
        count = find_step_count(param)
        if not state.reducer.is_plain or len(ddps) != 1 or count is None:
            return False
        if not isinstance(pipeline.compressor, NoCompression) or pipeline.buckets.warn_in:
            return False
        ddp, path = ddps[0], weakref.ref(self)

        def release_buffers(reference):
            if (found := path()) is not None and found._ddp is reference:
                found.close()

        self._owner, self._ddp_group = weakref.ref(param), weakref.ref(ddp.process_group)
        self._ddp = weakref.ref(ddp, release_buffers)
        self._group = None if state.comm is not None else weakref.ref(state.get_process_group())
        self._count, self._hooks, self.comm = count, count_hook_registrations(), pipeline.comm
        self._other_comms = [each.comm for each in pipeline.comm_streams if each.comm is not self.comm]
        return True

    # ---- The fast path.

    def takes(self, state, bucket: dist.GradBucket, index: int, buffer: torch.Tensor) -> bool:
        """Return whether a bucket is as in the last backward; `reduce` must follow then.

        If not, the path is closed. The first bucket begins the backward.
        """
        if index < len(self._buckets) and recording.active is None and not self.comm.closed:
            known = self._buckets[index]
            if buffer is known.buffer and buffer.data_ptr() == known.address:
                if index or self._begin_backward(state, bucket):
                    return True
        self.close()
        return False

    def reduce(self, state, bucket: dist.GradBucket, index: int) -> torch.futures.Future:
        """Average a bucket that it `takes`, in place; blocks. Raises what `Communicator.all_reduce` does."""
        begun = time.perf_counter_ns()
        pipeline, known = state.pipeline, self._buckets[index]
        known.comm.all_reduce(known.buffer, known.op, algorithm=known.algorithm)
        pipeline.count(1, known.sent, known.as_fp32)
        if bucket.is_last():
            pipeline.end_backward(state.reducer.gradients)
        pipeline.totals["seconds_in_hook"] += (time.perf_counter_ns() - begun) * 1e-9
        return known.future

    def _begin_backward(self, state, bucket: dist.GradBucket) -> bool:
        """Begin a backward if module, ranks and options are those of the last one; else False."""
        pipeline, ddp, comm, count = state.pipeline, self._ddp(), self.comm, self._count
        if ddp is None or self._hooks != count_hook_registrations() or count.replaced:
            return False
        if bucket.parameters()[0] is not self._owner():
            return False
        if ddp._join_config.enable or ddp.process_group is not self._ddp_group():
            return False
        if pipeline.comm is not comm or pipeline.comm_streams[0].stopped:
            return False
        if pipeline.stages or pipeline.buckets.warn_in or not self._has_same_ranks(state):
            return False
        pipeline.bytes_on_wire = 0
        count.begin_backward(comm, *self._other_comms)
        return True

    def _has_same_ranks(self, state) -> bool:
        if state.comm is not None:
            return state.comm is self.comm
        if self._group is None:
            return False
        group = dist.group.WORLD if state.process_group is None else state.get_process_group()
        return group is not None and group is self._group()
