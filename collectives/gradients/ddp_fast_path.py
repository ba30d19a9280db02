"""FastPath: the buckets of a DDP module whose backward is as its last one was.

`DDPReducer` has the full path, which takes every option and looks up what a bucket doesn't say. The
fast one averages a bucket where nothing has changed since the last backward on the full path, on the
host in the hook's call and on CUDA on the bucket's communication stream. It leaves every other bucket
to the full path.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..compression import Bucket, NoCompression, ReductionPlan, ring_bytes
from ..cuda_state import on_stream, wait_for_stream
from ..recorder import Recorder, recording
from ..torch_patches import count_hook_registrations, find_hooked_ddps
from .bucket_trace import begin_trace, end_trace
from .step_count import find_step_count
from .streams import CommStream, keep_for_caller

__all__ = ["FastPath"]


class _KnownBucket(NamedTuple):
    """A bucket of the last backward: its buffer, how it is averaged, and what the hook returns."""

    buffer: torch.Tensor
    address: int
    comm_stream: CommStream
    plan: ReductionPlan
    algorithm: str | None
    sent: int  # bytes
    as_fp32: int
    future: torch.futures.Future  # complete, of `buffer`: a new one takes as long as all else here

    def reduce(self, ready_event: torch.cuda.Event | None) -> None:
        """Reduce the buffer; on CUDA on the bucket's stream, which first waits by the event, if there is
        one, for the current stream.
        """
        comm, stream = self.comm_stream.comm, self.comm_stream.stream
        if stream is None:  # the engine divides by itself
            comm.all_reduce(self.buffer, self.plan.op, algorithm=self.algorithm)
            return
        with on_stream(stream, ready_event):
            self.plan.before(self.buffer)
            comm.all_reduce(self.buffer, self.plan.op, algorithm=self.algorithm)
            self.plan.after(self.buffer)

    def reduce_traced(self, ready_event: torch.cuda.Event | None, recorder: Recorder, bucket: Bucket) -> None:
        """Reduce the buffer as `reduce` does, and add that to a trace."""
        stream = self.comm_stream.stream
        with contextlib.nullcontext() if stream is None else on_stream(stream, ready_event):
            begun = begin_trace(self.comm_stream)
            self.reduce(None)
            end_trace(recorder, self.comm_stream, begun, f"all_reduce {self.buffer.nbytes} B", bucket, self.sent)


class FastPath:
    """The fast path of one `HookState`.

    It is open after two backwards of one module on the full path with the same buffers, if these
    were plain, and if all buffers are registered that will be. Then it takes buckets as long as the
    module, its ranks, its options and its buffers are the same; the first difference closes it. It
    holds the buffers while it is open, at most until the module is freed.

    On CUDA its futures don't wait for the communication streams: the last bucket makes the current
    stream wait for them, as on the full path. So it serves a module whose hook is `fused_allreduce`
    itself, since a hook around that would use the bucket before.
    """

    __slots__ = (
        "__weakref__", "_addresses", "_buckets", "_callers", "_count", "_ddp", "_ddp_group", "_group", "_hooks",
        "_other_comms", "_owner", "_streams", "_unjoined", "comm", "is_open",
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
        self._streams: list[torch.cuda.Stream] = []  # on which the buckets are averaged; on the host none
        self._unjoined: list[torch.cuda.Stream] = []  # those that the current stream must wait for
        self._callers: set[torch.cuda.Stream] = set()  # for which the buffers' memory is kept

    def close(self, *, failed: bool = False) -> None:
        """Leave the next buckets to the full path. `failed`: the collectives are ended in another way."""
        self.is_open = False
        if failed:
            self._unjoined = []
        self._join_streams()
        self._buckets, self._callers = [], set()

    def _join_streams(self) -> None:
        """Make the current stream wait for the buckets on their way."""
        streams, self._unjoined = self._unjoined, []
        for stream in streams:
            wait_for_stream(stream)

    def _record_buffers(self, stream: torch.cuda.Stream) -> None:
        """Keep the buffers' memory for a stream; once is enough, until it is freed."""
        if stream not in self._callers:
            self._callers.add(stream)
            for known in self._buckets:
                known.buffer.record_stream(stream)

    # ---- The full path.

    def remember(self, state, bucket: Bucket, buffer, future: torch.futures.Future, last: bool) -> None:
        """Record a bucket that the full path has averaged, its buffer, and the future that the hook
        returns; opens the fast path after the last bucket.
        """
        if bucket.index == 0:
            self.close()
            if not self._remember_module(state, bucket.params[0]):
                return
        pipeline = state.pipeline
        if bucket.index != len(self._buckets) or pipeline.comm is not self.comm:
            self.close()
            return
        comm_stream = pipeline.comm_streams[bucket.index % len(pipeline.comm_streams)]
        comm = comm_stream.comm
        plan, algorithm = pipeline.compressor.plan(comm, pipeline.scaling, buffer.dtype)
        if bucket.flat is not buffer:  # a complex one
            self.close()
            return
        if comm_stream.stream is not None:
            future = torch.futures.Future()  # without a device, so that it costs DDP no events
            future.set_result(buffer)
        counts = ring_bytes(buffer, comm.size, 2), state.reducer.count_fp32_bytes(bucket)
        known = _KnownBucket(buffer, buffer.data_ptr(), comm_stream, plan, algorithm, *counts, future)
        self._buckets.append(known)
        if last:
            before, self._addresses = self._addresses, [each.address for each in self._buckets]
            settled = not state.shares_memory or state._registrations.is_settled()
            self.is_open = settled and before == self._addresses
            if not self.is_open:
                self.close()

    def _remember_module(self, state, param) -> bool:
        """Record the module of a backward, and its ranks; False where it isn't one for this path."""
        pipeline, reducer = state.pipeline, state.reducer
        if not (reducer.is_plain and reducer.only_ddp_waits):
            return False
        if not isinstance(pipeline.compressor, NoCompression):
            return False
        (ddp,), count, path = find_hooked_ddps(param), find_step_count(param), weakref.ref(self)

        def release_buffers(reference):
            if (found := path()) is not None and found._ddp is reference:
                found.is_open = False
                if not found._unjoined:  # else the buffers are in use, until `close`
                    found._buckets = []

        self._owner, self._ddp_group = weakref.ref(param), weakref.ref(ddp.process_group)
        self._ddp = weakref.ref(ddp, release_buffers)
        self._group = None if state.comm is not None else weakref.ref(state.get_process_group())
        self._count, self._hooks, self.comm = count, count_hook_registrations(), pipeline.comm
        self._other_comms = [each.comm for each in pipeline.comm_streams if each.comm is not self.comm]
        self._streams = [each.stream for each in pipeline.comm_streams if each.stream is not None]
        return True

    # ---- The fast path.

    def takes(self, state, bucket: dist.GradBucket, index: int, buffer: torch.Tensor) -> bool:
        """Return whether a bucket is as in the last backward; `reduce` must follow then.

        If not, the path is closed. The first bucket begins the backward.
        """
        if index < len(self._buckets) and not self.comm.closed:
            known = self._buckets[index]
            if buffer is known.buffer and buffer.data_ptr() == known.address:
                if index or self._begin_backward(state, bucket):
                    return True
        self.close()
        return False

    def reduce(self, state, bucket: dist.GradBucket, index: int) -> torch.futures.Future:
        """Average a bucket that it `takes`, in place; blocks on the host. Raises what
        `Communicator.all_reduce` does.
        """
        begun = time.perf_counter_ns()
        pipeline, known, recorder = state.pipeline, self._buckets[index], recording.active
        device = known.buffer.device
        ready_event = state.reducer.ready_event(device) if device.type == "cuda" else None
        if recorder is None:
            known.reduce(ready_event)
        else:
            names = state.parameter_names if state.registered else None
            known.reduce_traced(ready_event, recorder, Bucket(known.buffer, bucket.parameters, None, index, names))
        pipeline.count(1, known.sent, known.as_fp32)
        last = bucket.is_last()
        if last:
            if ready_event is not None:
                self._join_streams()
                keep_for_caller(self._record_buffers, device)
            pipeline.end_backward(state.reducer.gradients)
        ended = time.perf_counter_ns()
        pipeline.totals["seconds_in_hook"] += (ended - begun) * 1e-9
        if recorder is not None:
            recorder.add("hook", f"bucket {index}", begun, ended)
            if last:
                recorder.step()
        return known.future

    def _begin_backward(self, state, bucket: dist.GradBucket) -> bool:
        """Begin a backward if module, ranks and options are those of the last one; else False."""
        self._join_streams()  # of a backward that was interrupted
        pipeline, ddp, comm, count = state.pipeline, self._ddp(), self.comm, self._count
        if ddp is None or self._hooks != count_hook_registrations() or count.replaced:
            return False
        if bucket.parameters()[0] is not self._owner():
            return False
        if ddp._join_config.enable or ddp.process_group is not self._ddp_group():
            return False
        if pipeline.comm is not comm or pipeline.comm_streams[0].stopped:
            return False
        if pipeline.stages or not self._has_same_ranks(state):
            return False
        self._unjoined = self._streams
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
