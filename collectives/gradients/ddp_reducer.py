"""DDP's adapter of the gradient pipeline: buckets that DDP's communication hook gets, on
communication streams.

Bucket i goes to stream i modulo their number, on all ranks. On the host a stream is a thread, where
ranks have cores to spare, or the hook's own call.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref

import torch

from ..comm.communicator import Communicator
from ..compression import Bucket
from ..cuda_state import on_stream, wait_for_stream
from ..errors import CollectivesError, InvalidUsage
from ..parameter_names import find_ddp
from ..recorder import recording
from ..torch_compat import current_graph_task_id
from .bucket_gradients import BucketGradients
from .ddp_checks import check_join, leaves_out_buckets, only_ddp_waits
from .pipeline import GradientPipeline
from .step_count import find_step_count
from .streams import CommStream, keep_for_caller, should_overlap

__all__ = ["BucketError", "DDPReducer"]


class BucketError(CollectivesError):
    """A collective's error with the bucket that it belongs to, for the front end that raises it to
    the user.
    """

    def __init__(self, error: CollectivesError, bucket: Bucket):
        super().__init__(str(error))
        self.error = error
        self.bucket = bucket


class PendingBucket:
    """A bucket on its communication stream. Its future completes with `buffer`.

    `for_ddp`: DDP alone waits for it, after the last bucket, when the current stream has waited for the
    communication streams. Such a future has no device, whose events would take half of the hook's time;
    `keep_for_caller` does the rest of what a device is there for.
    """

    __slots__ = ("bucket", "buffer", "comm_stream", "completed", "done", "error", "for_ddp", "future", "nbytes")

    def __init__(self, bucket, buffer, comm_stream, *, for_ddp: bool):
        self.bucket = bucket
        self.buffer = buffer
        self.comm_stream = comm_stream
        self.for_ddp = for_ddp and comm_stream.stream is not None
        has_device = not (for_ddp or comm_stream.stream is None)
        self.future = torch.futures.Future(devices=[comm_stream.comm.device] if has_device else None)
        self.done: threading.Event | None = None  # set by the stream's thread
        self.error: BaseException | None = None
        self.nbytes = 0  # sent by this rank
        self.completed = False  # whether its future is

    def complete(self) -> None:
        """Complete the future, after the work that is queued on the current stream."""
        self.future.set_result(self.buffer)
        self.completed = True


class DDPReducer:
    """Reduces the buckets of DDP modules by a `GradientPipeline`."""

    def __init__(self, pipeline: GradientPipeline):
        self.pipeline = pipeline
        self.gradients = BucketGradients(pipeline, [])  # of the newest backward
        self._pending: list[PendingBucket] = []
        self._owner = None  # weak reference to the first parameter of the backward under way
        self._task = -1  # id of its autograd graph task
        self._comm: Communicator | None = None  # over which `_overlaps` holds
        self._overlaps = False
        self._keeps = False  # whether buckets are kept until the last one; else each is done when its call returns
        self.only_ddp_waits = False  # see `ddp_checks.only_ddp_waits`, of the newest backward
        self.is_plain = False  # whether nothing but its own reduction was done with each bucket of the newest backward
        # By device: the event by which communication streams wait for gradients.
        self._ready_events: dict[torch.device, torch.cuda.Event] = {}

    def find_communicator(self, device: torch.device) -> Communicator | None:
        """Return the communicator of the backward under way, if it is open and of this device; else
        None.
        """
        comm = self.pipeline.comm
        if self._owner is None or comm is None or comm.device != device or comm.closed:
            return None
        return comm

    @property
    def pending(self) -> int:
        """The number of buckets of an unfinished backward."""
        return len(self._pending)

    def reduce_bucket(self, comm: Communicator, bucket: Bucket, buffer, last: bool) -> torch.futures.Future:
        """Reduce a bucket.

        Returns a future of `buffer`. The last bucket finishes the backward and blocks on the host.
        Raises `BucketError`, with the error and its bucket.
        """
        begun = time.perf_counter_ns()
        pipeline = self.pipeline
        try:
            if bucket.index == 0:
                self._begin_backward(comm, bucket)
            elif comm is not pipeline.comm:
                pipeline.open(comm, pipeline.options.streams)  # of another module, whose backward interleaves
            elif self._owner is None and pipeline.stages:
                raise InvalidUsage("the first bucket of this backward was not seen: build the DDP object again")
            streams = pipeline.comm_streams
            comm_stream = streams[bucket.index % len(streams)]
            if self._keeps:
                # Of a backward whose first bucket didn't come here nothing is known.
                for_ddp = self.only_ddp_waits and self._owner is not None
                pending = PendingBucket(bucket, buffer, comm_stream, for_ddp=for_ddp)
                self._pending.append(pending)
                self._start(pending, last)
                if last:
                    self._end_backward()
                return pending.future
            pipeline.count(1, self.gradients.reduce(bucket, comm_stream), self.count_fp32_bytes(bucket))
            if last:
                pipeline.end_backward(self.gradients)
            future = torch.futures.Future()
            future.set_result(buffer)
            return future
        except CollectivesError as error:
            raise self._first_error(error, bucket) from error
        except BaseException:
            self._reset()
            raise
        finally:
            ended = time.perf_counter_ns()
            pipeline.totals["seconds_in_hook"] += (ended - begun) * 1e-9
            if recording.active is not None:
                recording.active.add("hook", f"bucket {bucket.index}", begun, ended)
                if last:
                    recording.active.step()

    # ---- The first bucket of a backward.

    def _begin_backward(self, comm, bucket) -> None:
        params, pipeline = bucket.params, self.pipeline
        if self._pending:
            self._end_interrupted(params[0])
        self._owner, self._task = weakref.ref(params[0]), current_graph_task_id()
        pipeline.begin_backward(comm, pipeline.options.streams)
        leaves_out = leaves_out_buckets(params[0])
        if leaves_out:
            self._comm, self._overlaps = None, False
        elif comm is not self._comm:
            self._comm, self._overlaps = comm, comm._on_host and should_overlap(comm)
        step = pipeline.optimizer_step
        joins = check_join(
            params, average=pipeline.options.average, defers_step=step is not None and pipeline.scaler is not None
        )
        self._count_step(params[0], comm, joins)
        self.only_ddp_waits = only_ddp_waits(params[0])
        if leaves_out and (pipeline.stages or not pipeline.compressor.exact):
            raise InvalidUsage(
                "with skip_all_reduce_unused_params DDP leaves out buckets, also the last one, after which this "
                "HookState would act (a wire with loss, max_norm, check_finite, optimizer): leave it out"
            )
        waits_for_all = self._overlaps or bool(pipeline.stages)
        self._keeps, self.is_plain = waits_for_all or not comm._on_host, not (waits_for_all or joins)
        ddp = None
        if step is not None:
            pipeline.compare_hyperparameters()
            ddp = find_ddp(params)
        finds_unused = ddp is not None and (ddp.find_unused_parameters or ddp.static_graph)
        counted = pipeline.comm_streams if pipeline.needs_stats else []
        self.gradients = BucketGradients(pipeline, counted, finds_unused=finds_unused)

    def _count_step(self, param, comm, joins: bool) -> None:
        """Compare the ranks' steps; not in `join`, whose ranks end theirs one after the other."""
        count = find_step_count(param)
        if count is None:
            return
        if joins:
            count.reset()
        else:
            count.begin_backward(comm, *(each.comm for each in self.pipeline.comm_streams if each.comm is not comm))

    def _end_interrupted(self, owner) -> None:
        """End a backward that was interrupted, or that another module's interleaves with."""
        before = self._owner() if self._owner is not None else None
        together = self._task == current_graph_task_id()  # else it was interrupted
        if before is not None and before is not owner and together and self.pipeline.stages:
            raise InvalidUsage(
                "two modules' backwards interleave on one HookState, which looks at a backward as a whole "
                "(max_norm, check_finite, optimizer): give each module a state of its own"
            )
        self._join_streams()
        self._complete()
        self._reset()

    # ---- One bucket.

    def _start(self, pending: PendingBucket, last: bool) -> None:
        """Reduce a bucket where its stream runs: on a CUDA stream, on a thread, or here."""
        comm_stream = pending.comm_stream
        if comm_stream.stream is not None:
            self._reduce_on_stream(pending)
        elif self._overlaps and not last:
            pending.done = comm_stream.submit(functools.partial(self._reduce_on_thread, pending))
        else:
            if self._overlaps:
                self._wait_for_threads(comm_stream)  # a communicator's operations have one order on all ranks
            self._reduce_here(pending)

    def _reduce_here(self, pending: PendingBucket) -> None:
        pending.nbytes = self.gradients.reduce(pending.bucket, pending.comm_stream)

    def _reduce_on_stream(self, pending: PendingBucket) -> None:
        comm_stream = pending.comm_stream
        with on_stream(comm_stream.stream, self.ready_event(comm_stream.comm.device)):
            pending.nbytes = self.gradients.reduce(pending.bucket, comm_stream)
            if not (self.pipeline.stages or pending.for_ddp):
                pending.complete()

    def ready_event(self, device: torch.device) -> torch.cuda.Event:
        """Return the event by which a device's communication streams wait for gradients."""
        event = self._ready_events.get(device)
        if event is None:
            event = self._ready_events[device] = torch.cuda.Event()
        return event

    def _reduce_on_thread(self, pending: PendingBucket) -> None:
        """Reduce a bucket; keep an error in `pending`."""
        try:
            self._reduce_here(pending)
        except BaseException as error:
            pending.error = error

    def count_fp32_bytes(self, bucket: Bucket) -> int:
        """Return the bytes that this rank would send for a bucket in fp32."""
        size = self.pipeline.comm.size
        return 2 * (size - 1) * bucket.flat.numel() * 4 // size

    # ---- All buckets.

    def _end_backward(self) -> None:
        """Run the stages after the last bucket, and complete the futures."""
        self._join_streams()
        self.gradients.buckets = [pending.bucket for pending in self._pending]
        self.pipeline.end_backward(self.gradients)
        self._complete()
        self._reset()

    def _wait_for_threads(self, comm_stream: CommStream | None = None) -> None:
        """Wait for the threads of all streams, or of one; raise the first error."""
        begun = time.perf_counter_ns()
        waited = False
        for pending in self._pending:
            if pending.done is not None and (comm_stream is None or pending.comm_stream is comm_stream):
                waited = True
                pending.done.wait()
        if waited and recording.active is not None:
            recording.active.add("wait", "wait", begun, time.perf_counter_ns())
        for pending in self._pending:
            error = pending.error
            if error is not None:
                raise BucketError(error, pending.bucket) if isinstance(error, CollectivesError) else error

    def _join_streams(self) -> None:
        """Wait for all buckets; on CUDA only the current stream does.

        DDP's next operation, such as the all-reduce of its map of unused parameters on the process
        group's own communicator, then comes after them: two communicators with no order between
        them can deadlock.
        """
        comm = self.pipeline.comm
        if comm._on_host:
            self._wait_for_threads()
        else:
            for each in self.pipeline.comm_streams:
                wait_for_stream(each.stream)

    def _complete(self) -> None:
        """Count the buckets and complete their futures."""
        sent = as_fp32 = 0
        for pending in self._pending:
            sent += pending.nbytes
            as_fp32 += self.count_fp32_bytes(pending.bucket)
            if not pending.completed:
                pending.complete()
        if self._pending:
            self.pipeline.count(len(self._pending), sent, as_fp32)
        buffers = [pending.buffer for pending in self._pending if pending.for_ddp]
        if buffers:
            keep_for_caller(lambda stream: [buffer.record_stream(stream) for buffer in buffers], buffers[0].device)

    def _first_error(self, error: CollectivesError, bucket: Bucket) -> BucketError:
        """Wait for the buckets on their way after an error; return the first error of all."""
        failed = error if isinstance(error, BucketError) else BucketError(error, bucket)
        for pending in self._pending:
            if pending.done is not None:
                pending.done.wait()
        first = next((pending for pending in self._pending if pending.error is not None), None)
        if first is not None and isinstance(first.error, CollectivesError):
            failed = BucketError(first.error, first.bucket)
        self._reset()
        return failed

    def _reset(self) -> None:
        self._pending = []
        self.gradients.buckets = []
        self._owner = None
