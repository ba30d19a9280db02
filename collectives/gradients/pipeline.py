"""Gradient pipeline: reduces the buckets of each backward on its communication streams, then does
what needs them all.

Bucket i goes to stream i modulo their number, on all ranks. With the last bucket the ranks add up
the statistics that they found on the way (the gradient's norm, non-finite values), and all make the
same decision on clipping and on the optimizer's step.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref

import torch

from ..comm.communicator import Communicator
from ..comm.consensus import verify_same
from ..compression import Bucket, Compressor, NoCompression, Scaling
from ..errors import CollectivesError, InvalidUsage
from ..parameter_names import ParameterNames, find_ddp
from ..recorder import recording
from ..torch_compat import current_graph_task_id
from .ddp_checks import check_join
from .grad_norm import clip_coefficient, norm_by_parameter, norm_of_shards
from .hyperparameters import HyperparameterCheck
from .saved_layout import SavedBuckets
from .streams import CommStream, get_comm_streams, should_overlap
from .unused_parameters import find_unused_parameters

__all__ = ["BucketError", "GradReducer"]


class BucketError(CollectivesError):
    """A collective's error with the bucket that it belongs to, for the front end that raises it to
    the user.
    """

    def __init__(self, error: CollectivesError, bucket: Bucket):
        super().__init__(str(error))
        self.error = error
        self.bucket = bucket


class PendingBucket:
    """A bucket on its communication stream. Its future completes with `buffer`."""

    __slots__ = ("bucket", "buffer", "comm_stream", "done", "error", "future", "nbytes")

    def __init__(self, bucket, buffer, comm_stream):
        self.bucket = bucket
        self.buffer = buffer
        self.comm_stream = comm_stream
        self.future = torch.futures.Future(devices=None if comm_stream.stream is None else [comm_stream.comm.device])
        self.done: threading.Event | None = None  # set by the stream's thread
        self.error: BaseException | None = None
        self.nbytes = 0  # sent by this rank

    def complete(self) -> None:
        """Complete the future with the buffer."""
        self.future.set_result(self.buffer)


class GradReducer:
    """Reduces the buckets of a `HookState`, whose checked options it gets.

    `sharded_step`: steps the optimizer on this rank's shards, or None. `local_sgd`: post-local SGD,
    or None. `find_scaler`: a function that returns the GradScaler in use, or None.
    `describe_options`: a function that returns the options that must be the same on all ranks, by
    name. `parameter_names`: the names by which state is saved.
    """

    def __init__(
        self, compressor: Compressor, *, average, predivide, streams, max_norm, norm_type, check_finite, deterministic,
        sharded_step, local_sgd, find_scaler, describe_options=None, parameter_names=None,
    ):  # fmt: skip
        self.compressor = compressor
        self.average = average
        self.predivide = predivide
        self.streams = streams
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.check_finite = check_finite
        self.deterministic = deterministic
        self.sharded_step = sharded_step
        self.local_sgd = local_sgd
        self.find_scaler = find_scaler
        self.describe_options = describe_options
        self.parameter_names = parameter_names or ParameterNames()
        self._verified: weakref.WeakSet = weakref.WeakSet()  # communicators on which the ranks' options were compared
        self.norm = None  # of the last backward: a number, or a float64 tensor on a GPU
        self.nonfinite = None
        self.bytes_on_wire = 0
        self.totals = {"backwards": 0, "buckets": 0, "bytes_on_wire": 0, "bytes_as_fp32": 0, "seconds_in_hook": 0.0}
        self.comm_streams: list[CommStream] = []
        self._pending: list[PendingBucket] = []
        self._owner = None  # weak reference to the first parameter of the backward under way
        self._overlaps = False
        self._grad_stats: dict[CommStream, torch.Tensor] = {}
        self._scaler = None
        # False: buckets need more than the compressor. Else True, or the communicator that was last
        # checked for that.
        alone = max_norm is None and not check_finite and local_sgd is None and predivide is None and streams == 1
        self._inline = alone and isinstance(compressor, NoCompression)
        self._uses_saved_layout = False
        self._finds_unused = False
        self._task = -1  # id of the autograd graph task of the backward under way
        self.buckets = SavedBuckets(self.parameter_names)  # of earlier backwards, and of a saved run
        self.world_size = 0  # in the last backward
        self._saved = None  # the saved layout that this backward uses
        self._hyperparameters = HyperparameterCheck()

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
        if self._inline and self.sharded_step is None and recording.active is None and self._can_reduce_inline(comm):
            return self._reduce_inline(comm, bucket, buffer, last, begun)
        try:
            if bucket.index == 0:
                self._begin_backward(comm, bucket)
            elif self._owner is None and self._needs_all_buckets():
                raise InvalidUsage("the first bucket of this backward was not seen: build the DDP object again")
            pending = PendingBucket(bucket, buffer, self.comm_streams[bucket.index % self.streams])
            self._pending.append(pending)
            self._start(comm, pending, last)
            if last:
                self._reduce_saved_layout(comm) if self._uses_saved_layout else self._finish_backward(comm)
        except CollectivesError as error:
            raise self._first_error(error, bucket) from error
        except BaseException:
            self._reset()
            raise
        finally:
            ended = time.perf_counter_ns()
            self.totals["seconds_in_hook"] += (ended - begun) * 1e-9
            if recording.active is not None:
                recording.active.add("hook", f"bucket {bucket.index}", begun, ended)
                if last:
                    recording.active.step()
        return pending.future

    def _start(self, comm, pending: PendingBucket, last: bool) -> None:
        """Reduce a bucket where its stream runs: on a CUDA stream, on a thread, or here."""
        comm_stream = pending.comm_stream
        if self.local_sgd is not None and not self.local_sgd.observe_bucket(comm, pending.bucket):
            pass  # this rank steps on its own gradients
        elif self._uses_saved_layout:
            pass  # until all buckets have come
        elif comm_stream.stream is not None:
            self._reduce_on_stream(pending)
        elif self._overlaps and not last:
            pending.done = comm_stream.submit(functools.partial(self._reduce_one, pending))
        else:
            if self._overlaps:
                self._wait_for_threads(comm_stream)  # a communicator's operations have one order on all ranks
            self._reduce_one(pending)
            if pending.error is not None:
                raise pending.error

    # ---- Without any option, on the host: no state between two buckets.

    def _can_reduce_inline(self, comm) -> bool:
        if self._pending or not comm._on_host:
            return False
        if self._inline is not comm:  # a new one
            self.verify_options(comm)
            self._overlaps = should_overlap(comm)
            self._inline = comm
        return not self._overlaps

    def verify_options(self, comm) -> None:
        """Compare the ranks' options, once for each communicator.

        Raises on all ranks where they differ.
        """
        if comm not in self._verified:
            self.buckets.check_world_size(comm.size)
            if self.describe_options is not None:
                verify_same(
                    comm, "the ranks' HookStates differ", self.describe_options(),
                    "give all ranks the same arguments, and the same COLLECTIVES_* variables",
                )  # fmt: skip
            self._verified.add(comm)
        self.buckets.warn_unmatched(self.compressor)

    def _reduce_inline(self, comm, bucket, buffer, last, begun) -> torch.futures.Future:
        """Reduce a bucket in the calling thread by one all-reduce; return its completed future."""
        if bucket.index == 0:
            self._check_join(bucket.params)
        try:
            nbytes = self.compressor.reduce(comm, bucket, Scaling(divisor=comm.size) if self.average else Scaling())
        except CollectivesError as error:
            raise BucketError(error, bucket) from error
        future = torch.futures.Future()
        future.set_result(buffer)
        totals = self.totals
        if bucket.index == 0:
            self.bytes_on_wire = 0
        self.bytes_on_wire += nbytes
        totals["backwards"] += last
        totals["buckets"] += 1
        totals["bytes_on_wire"] += nbytes
        totals["bytes_as_fp32"] += 8 * (comm.size - 1) * bucket.flat.numel() // comm.size
        totals["seconds_in_hook"] += (time.perf_counter_ns() - begun) * 1e-9
        return future

    # ---- The first bucket of a backward.

    def _begin_backward(self, comm, bucket) -> None:
        owner = bucket.params[0]
        if self._pending:
            before = self._owner() if self._owner is not None else None
            together = self._task == current_graph_task_id()  # else the earlier one was interrupted
            if before is not None and before is not owner and together and self._needs_all_buckets():
                raise InvalidUsage(
                    "two modules' backwards interleave on one HookState, which looks at a backward as a whole "
                    "(max_norm, check_finite, optimizer, local_steps): give each module a state of its own"
                )
            # An earlier backward was interrupted, or two modules' backwards interleave.
            self._join_streams(comm)
            self._complete()
        self._owner = weakref.ref(owner)
        self._task = current_graph_task_id()
        self.verify_options(comm)
        self.comm_streams = get_comm_streams(comm, self.streams)
        self._overlaps = comm._on_host and should_overlap(comm)
        self.bytes_on_wire = 0
        self._scaler = self.find_scaler() if self.max_norm is not None or self.sharded_step is not None else None
        self._check_join(bucket.params)
        self._grad_stats = {}
        if self._needs_stats():
            self._grad_stats = {
                each: torch.zeros(2, dtype=torch.float64, device=comm.device) for each in self.comm_streams
            }
        self._saved = None
        if not (self.compressor.exact and not self._needs_stats()):
            self._saved = self.buckets.find(comm, bucket.params)
        self._uses_saved_layout = self._saved is not None and self._saved.layout is not None
        self.compressor.begin_backward()
        if self.sharded_step is not None:
            self.sharded_step.begin()
            self.compare_hyperparameters(comm)
            ddp = find_ddp(bucket.params)
            self._finds_unused = ddp is not None and (ddp.find_unused_parameters or ddp.static_graph)

    def compare_hyperparameters(self, comm) -> None:
        """Raise `Mismatch` where the ranks would step the optimizer with different learning rates
        and the like.
        """
        self._hyperparameters.compare(comm, self.sharded_step.optimizer)

    def _check_join(self, params) -> None:
        defers_step = self.sharded_step is not None and self._scaler is not None
        check_join(params, average=self.average, defers_step=defers_step)

    def _needs_stats(self) -> bool:
        """Return whether the backward needs the gradient's norm or the number of its non-finite
        values.
        """
        sharded_by_scaler = self.sharded_step is not None and self._scaler is not None
        return self.max_norm is not None or self.check_finite or sharded_by_scaler

    def _needs_all_buckets(self) -> bool:
        return bool(self._needs_stats() or self.sharded_step is not None or self.local_sgd is not None)

    # ---- One bucket.

    def get_scaling(self, size: int) -> Scaling:
        """Return the factors of a reduction over `size` ranks."""
        if not self.average:
            return Scaling()
        if self.predivide is None:
            return Scaling(divisor=size)
        return Scaling(prescale=1.0 / self.predivide, postscale=self.predivide / size)

    def _reduce_on_stream(self, pending: PendingBucket) -> None:
        stream = pending.comm_stream.stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._reduce_one(pending)
            if pending.error is not None:
                raise pending.error
            if not self._needs_all_buckets():
                pending.complete()

    def _reduce_one(self, pending: PendingBucket) -> None:
        """Reduce one bucket on its communication stream; keep an error in `pending`."""
        bucket, comm = pending.bucket, pending.comm_stream.comm
        recorder = recording.active
        begun = None if recorder is None else _begin_trace(pending)
        try:
            scaling, grad_stats = self.get_scaling(comm.size), self._grad_stats.get(pending.comm_stream)
            if self.sharded_step is None:
                pending.nbytes = self.compressor.reduce(comm, bucket, scaling, grad_stats=grad_stats)
            else:
                shard_numel = self._shard_spec(comm, bucket).shard_numel
                pending.nbytes = self.compressor.reduce_scatter(
                    comm, bucket, scaling, shard_numel, grad_stats=grad_stats
                )
                if not self._step_waits():
                    pending.nbytes += self._step_bucket(comm, bucket)
        except CollectivesError as error:
            pending.error = error
        except BaseException as error:
            if pending.done is None and not self._overlaps:
                raise
            pending.error = error
        if recorder is not None and pending.error is None:
            # A timeline's report goes by the name's first word, which must be that of a collective.
            name = f"all_reduce {bucket.flat.nbytes} B"
            if self.sharded_step is not None:
                name = f"reduce_scatter {bucket.flat.nbytes} B{'' if self._step_waits() else ', step, all_gather'}"
            _end_trace(recorder, pending, begun, name)

    def _shard_spec(self, comm, bucket):
        return self.sharded_step.shard_spec(bucket, comm.size, comm.rank, self.compressor.align or None)

    def _step_bucket(self, comm, bucket, **options) -> int:
        """Step the optimizer for a bucket, without the parameters that no rank has used.

        Returns the bytes sent.
        """
        unused, maybe_unused = self._find_unused(comm, bucket) if self._finds_unused else ((), None)
        return self.sharded_step.update(
            comm, bucket, align=self.compressor.align or None, unused=unused, maybe_unused=maybe_unused, **options
        )  # fmt: skip

    def _find_unused(self, comm, bucket) -> tuple[set, dict | None]:
        return find_unused_parameters(comm, bucket)

    def _step_waits(self) -> bool:
        """Return whether the optimizer's step must wait for the last bucket."""
        return self._needs_stats() or self._scaler is not None

    # ---- All buckets.

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

    def _join_streams(self, comm) -> None:
        """Wait for all buckets; on CUDA only the current stream does.

        DDP's next operation, such as the all-reduce of its map of unused parameters on the process
        group's own communicator, then comes after them: two communicators with no order between
        them can deadlock.
        """
        if comm._on_host:
            self._wait_for_threads()
        else:
            for each in self.comm_streams:
                torch.cuda.current_stream(comm.device).wait_stream(each.stream)

    def _finish_backward(self, comm) -> None:
        """Clip or step after the last bucket, count the backward, and complete the futures."""
        self._join_streams(comm)
        self.norm = self.nonfinite = None
        self.bytes_on_wire = sum(pending.nbytes for pending in self._pending)
        clip = self._reduce_stats(comm) if self._needs_stats() else None
        if self.sharded_step is not None and self._step_waits():
            found = self.nonfinite if self.check_finite else None
            for pending in self._pending:
                if self._scaler is not None:
                    align = self.compressor.align or None
                    self.sharded_step.defer(comm, pending.bucket, self.norm, self.max_norm, self.nonfinite, align=align)
                else:
                    clip = 1.0 if clip is None else clip
                    self.bytes_on_wire += self._step_bucket(comm, pending.bucket, clip=clip, found=found)
        elif clip is not None and not (isinstance(clip, float) and clip == 1.0):
            torch._foreach_mul_([pending.bucket.flat for pending in self._pending], clip)
        if self.local_sgd is not None:
            self.local_sgd.end_backward()
        self.buckets.remember([pending.bucket.params for pending in self._pending], self._saved)
        self.world_size = comm.size
        totals = self.totals
        totals["backwards"] += 1
        totals["buckets"] += len(self._pending)
        totals["bytes_on_wire"] += self.bytes_on_wire
        totals["bytes_as_fp32"] += sum(
            2 * (comm.size - 1) * pending.bucket.flat.numel() * 4 // comm.size for pending in self._pending
        )
        self._complete()

    def _reduce_saved_layout(self, comm) -> None:
        """Reduce in the buckets of a saved backward, so that training goes on bit for bit."""
        held, self._pending = self._pending, []
        gradients = {}  # id of a parameter -> the parameter, its gradient in DDP's bucket
        for pending in held:
            ends = [*pending.bucket.offsets[1:], pending.bucket.flat.numel()]
            for param, begin, end in zip(pending.bucket.params, pending.bucket.offsets, ends, strict=True):
                gradients[id(param)] = (param, pending.bucket.flat[begin:end])
        layout = self._saved.regroup([pending.bucket.params for pending in held], self.parameter_names)
        copies = []
        for index, params in enumerate(layout):
            members = [gradients[id(param)] for param in params]
            flat = torch.cat([part for _, part in members])
            offsets = [0, *itertools.accumulate(part.numel() for _, part in members[:-1])]
            bucket = Bucket(flat, [param for param, _ in members], offsets, index, self.parameter_names)
            copies.append((bucket, [part for _, part in members]))
            pending = PendingBucket(bucket, None, self.comm_streams[index % self.streams])
            self._pending.append(pending)
            if pending.comm_stream.stream is not None:
                self._reduce_on_stream(pending)
            else:
                self._reduce_one(pending)
        self._finish_backward(comm)
        for bucket, parts in copies:
            torch._foreach_copy_(parts, [*bucket.flat.split([part.numel() for part in parts])])
        for pending in held:
            pending.complete()

    def _reduce_stats(self, comm):
        """Add up the ranks' statistics; return the coefficient that clips, or None."""
        total = sum(self._grad_stats.values())
        NoCompression().reduce(comm, Bucket(total, [], [], 0), Scaling())
        on_host = comm._on_host
        self.nonfinite = int(total[1]) if on_host else total[1]
        if self.norm_type == 2 and not (self.deterministic and self.sharded_step is None):
            norm = total[0].sqrt()
        elif self.norm_type == 2:
            norm = norm_by_parameter([pending.bucket for pending in self._pending])
        else:
            norm = norm_of_shards(comm, self._own_shards(comm), self.norm_type)
        self.norm = norm.item() if on_host else norm
        if self.max_norm is None:
            return None
        if self._scaler is not None and self.sharded_step is None:
            scale = self._scaler._scale
            self.norm = self.norm / (scale.item() if on_host else scale.to(torch.float64))
        return clip_coefficient(self.norm, self.max_norm)

    def _own_shards(self, comm) -> list[torch.Tensor]:
        """Return this rank's part of each bucket; the parts of all ranks make up the buckets."""
        shards = []
        for pending in self._pending:
            flat = pending.bucket.flat
            shard_numel = -(-flat.numel() // comm.size)
            if self.sharded_step is not None:
                shard_numel = self._shard_spec(comm, pending.bucket).shard_numel
                if comm.rank == 0:
                    shards.append(flat[comm.size * shard_numel :])
            shards.append(flat[comm.rank * shard_numel : (comm.rank + 1) * shard_numel])
        return shards

    # ---- The end of a backward.

    def _complete(self) -> None:
        """Forget the buckets and complete their futures."""
        done = self._pending
        self._reset()
        for pending in done:
            if not pending.future.done():
                pending.complete()

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
        self._owner = self._scaler = None


# ---- Traces.


def _begin_trace(pending: PendingBucket):
    """Return the start of a bucket's reduction: a CUDA event on its stream, or nanoseconds on the
    host.
    """
    stream = pending.comm_stream.stream
    if stream is None:
        return time.perf_counter_ns()
    return stream.record_event(torch.cuda.Event(enable_timing=True))


def _end_trace(recorder, pending: PendingBucket, begun, name: str) -> None:
    """Add a bucket's reduction, which ends here on its stream, to the trace."""
    bucket, comm_stream = pending.bucket, pending.comm_stream
    details = {"bucket": bucket.index, "bytes": pending.nbytes, "parameters": bucket.describe()}
    if comm_stream.stream is None:
        recorder.add(comm_stream.trace_row, name, begun, time.perf_counter_ns(), **details)
    else:
        end = comm_stream.stream.record_event(torch.cuda.Event(enable_timing=True))
        recorder.add_cuda(comm_stream.trace_row, name, begun, end, **details)
