"""GradientBuckets: averaging gradients without DDP, for training loops of any shape.

Gradients are packed into flat buckets, reduced, and unpacked to where they were. A bucket may be
reduced while a backward still runs (overlap). Then each rank sends every bucket once, in one order,
whatever its own backward did. An exchange of flags in `all_reduce()` finds the buckets whose
gradients some rank has changed since; all ranks send those again.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..comm.liveness import publish_process
from ..compression import NoCompression, Scaling, make_compressor, plan_reduction
from ..errors import CollectivesError, InvalidArgument, InvalidUsage
from ..parameter_names import find_names
from ..recorder import recording
from ..torch_compat import untraced
from .bucket import GradientBucket, allocate_flats
from .bucket_assignment import assign_buckets, check_devices, check_no_overlap, read_params, split_by_bucket
from .bucket_cap import default_bucket_cap_mb
from .bucket_comms import BucketComms
from .bucket_consensus import verify_same_buckets
from .bucket_filler import BucketFiller
from .compilation import compile_gradient_kernels
from .round_flags import RoundFlags
from .step_count import count_steps, find_step_count

if TYPE_CHECKING:
    from ..argument_types import Wire

__all__ = ["BucketInfo", "GradientBuckets"]

_OP = "GradientBuckets"
_MIB = 1 << 20


class BucketInfo(NamedTuple):
    """A bucket's contents: names of its parameters, elements and bytes on the wire (with padding),
    dtype, device.
    """

    names: tuple[str, ...]
    elements: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device


@untraced
class GradientBuckets:
    """Averages the gradients of parameters over all ranks: `all_reduce()` between the last backward
    and the step.

    Gradients may have been made by any number of backwards, or assigned. On CUDA the host doesn't
    wait if this rank has all gradients and none was changed after it was sent. Then a later call
    raises what is wrong on another rank, and a gradient that is changed after it was sent must be
    changed on all ranks. Holds the parameters, as an optimizer does; use it as a context manager,
    or `close()` it.

    Args:
        params: Parameters, (name, parameter) pairs as ``model.named_parameters()`` yields, or an
            optimizer's ``param_groups``, the same on all ranks, in the same order. Parameters that
            need no gradient are left out.
        bucket_cap_mb: The largest size of a bucket, in MiB; a larger parameter has a bucket alone.
            None: 25, or as DistributedDataParallel takes on more than 10 GPUs. On the host each
            parameter of 1 MiB and more has a bucket alone, and without overlap its gradient isn't
            packed.
        comm: The communicator of the ranks that average. None: see `process_group`.
        process_group: A torch process group, over whose ranks a communicator is opened at first
            use. None: that of `comm`, and without one the default group.
        average: Divide by the number of ranks. False: leave the sum.
        wire: "fp32", each gradient in its own dtype, or a compressed wire, as in `HookState`.
        block: The number of values of an 8-bit wire that share a scale, as in `HookState`.
        error_feedback: As in `HookState`.
        stochastic_rounding: As in `HookState`.
        overlap: Send a bucket as soon as a backward has made all of its gradients; not with a
            compressed wire. It begins after the first `all_reduce()`, which splits off a
            communicator for it. None: on CUDA, and on the host where every rank has more cores than
            torch computes with.
        first_bucket_mb: The largest size of the first bucket, in MiB.

    Raises:
        InvalidArgument: For unsuitable parameters and settings.
    """

    def __init__(
        self, params: Iterable, bucket_cap_mb: float | None = None, *, comm: Communicator | None = None,
        process_group: dist.ProcessGroup | None = None, average: bool = True, wire: Wire = "fp32", block: int = 256,
        error_feedback: bool = False, stochastic_rounding: bool = False, overlap: bool | None = None,
        first_bucket_mb: float = 1,
    ):  # fmt: skip
        _check_arguments(comm, process_group, average, overlap)
        compressor = make_compressor(
            wire, block=block, error_feedback=error_feedback, stochastic_rounding=stochastic_rounding
        )
        self._compressor = None if isinstance(compressor, NoCompression) else compressor
        if self._compressor is not None and overlap:
            raise InvalidArgument("a compressed wire reduces inside of all_reduce(): leave out overlap=True", op=_OP)
        members = read_params(params)
        caps = _parse_caps(first_bucket_mb, bucket_cap_mb, members, comm, process_group)
        if comm is None:
            publish_process()
        else:
            check_devices(members, comm)
        self._average = average
        self._wanted_overlap = False if self._compressor is not None else overlap
        self._buckets = assign_buckets(members, caps)
        self._params = [param for _, param in members]
        count_steps(self._params)
        compile_gradient_kernels(self._params, packs=True, wire=wire)
        self._settings = f"bucket caps {caps} bytes, average={average}, overlap={overlap}, wire {wire}"
        devices = list(dict.fromkeys(bucket.device for bucket in self._buckets))
        self._comms = BucketComms(self, devices, comm, process_group)
        self._filler = BucketFiller(self)
        self._overlap: bool | None = None  # None: not agreed on yet
        self._next, self._closed = 0, False  # the index of the bucket to start next
        self._lock = threading.RLock()  # autograd has a thread for each GPU
        self._sent = self._bytes = 0  # bytes since the last round, and in it

    # ---- Properties.

    @property
    def buckets(self) -> list[BucketInfo]:
        """The buckets, in the order in which they are sent."""
        find_names(self._params)  # one search for all of them
        return [
            BucketInfo(tuple(b.names()), b.total, b.total * b.dtype.itemsize, b.dtype, b.device) for b in self._buckets
        ]

    @property
    def overlap(self) -> bool | None:
        """Whether buckets are sent while a backward runs; None before the first `all_reduce()`."""
        return self._overlap

    @property
    def bytes_on_wire(self) -> int:
        """Bytes of gradients that this rank sent for the last `all_reduce()`: 2(n-1)/n of a bucket
        for n ranks.
        """
        return self._bytes

    def __repr__(self):
        nbytes = sum(b.total * b.dtype.itemsize for b in self._buckets)
        state = (
            "closed" if self._closed else f"overlap={self._wanted_overlap if self._overlap is None else self._overlap}"
        )
        return (
            f"<GradientBuckets of {len(self._params)} parameters in {len(self._buckets)} buckets, "
            f"{nbytes / _MIB:.2f} MiB, average={self._average}, {state}, over {self._comms}>"
        )

    def __reduce__(self):
        raise InvalidUsage("GradientBuckets can't be pickled or copied: make them of the copy's parameters", op=_OP)

    # ---- Use.

    @contextlib.contextmanager
    def no_sync(self):
        """Start no bucket in the backwards inside: for all backwards of a step but the last one.

        It saves traffic. Without it the gradients are the same.
        """
        self._filler.closed += 1
        try:
            yield
        finally:
            self._filler.closed -= 1

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Average every parameter's ``.grad`` over the ranks, in place; all ranks call it.

        A parameter without a gradient counts as one of zeros, and gets a gradient where another
        rank has one. Blocks until it is done; on CUDA it waits for the gradients of all backwards,
        and the averages are ordered on the current stream.

        An error is raised on all ranks and leaves the gradients as they are. (On CUDA, ranks
        without a problem of their own go on, and raise `InvalidUsage` in a later call.)

        Raises:
            InvalidArgument: For a gradient that can't be averaged: sparse, of another dtype or
                shape than the parameter's was, or sharing memory with another one.
            Mismatch: At the first call, where the ranks' parameters differ.
        """
        if self._closed:
            raise InvalidUsage("all_reduce() after close()", op=_OP)
        begun = time.perf_counter_ns()
        try:
            with self._lock:
                self._open()
                self._reduce()
            if (recorder := recording.active) is not None:
                recorder.add("hook", "GradientBuckets.all_reduce", begun, time.perf_counter_ns())
                recorder.step()
        except CollectivesError as error:
            if not isinstance(error, InvalidArgument):
                self._drop()
            raise
        finally:
            self._rewind()

    def close(self) -> None:
        """Remove the hooks and free the buffers.

        Blocks while buckets are in flight. A second call does nothing.
        """
        if not self._closed:
            self._closed = True
            self._filler.remove_hooks()
            self._comms.close()
            self._rewind()
            self._free()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self._comms.abort_busy()
        self.close()

    # ---- Communicators.

    def _open(self) -> None:
        """Open the communicators.

        Over new communicators the ranks compare their parameters and agree on overlap.
        """
        comms, found = self._comms, self._comms.find()
        if self._overlap is not None and comms.are(found):
            return
        self._drop(failed=False)
        comms.over_ranks.update(found)
        wanted = comms.gain_by_overlap() if self._wanted_overlap is None else self._wanted_overlap
        overlap = verify_same_buckets(comms.first, self._params, self._buckets, self._settings, wanted)
        comms.split(overlap)
        self._flags = RoundFlags(comms.first, len(self._buckets), len(self._params))
        allocate_flats(self._buckets, comms.over_ranks, shared=not overlap, in_place=self._compressor is None)
        self._overlap = overlap
        if overlap:
            self._rewind()
            for param in self._params:
                self._filler.watch(param)
            self._filler.attach(self._buckets)

    def _drop(self, failed: bool = True) -> None:
        """Drop the communicators, which failed or were replaced; the next call opens others."""
        self._filler.remove_hooks()
        self._comms.drop(failed=failed)
        self._overlap = None
        self._free()

    def _free(self) -> None:
        for bucket in self._buckets:
            bucket.free()

    # ---- A round: everything between two calls of all_reduce().

    def _reduce(self) -> None:
        buckets = self._buckets
        self._flags.check_earlier_rounds()
        if self._compressor is not None:
            self._compressor.begin_backward()
        problem = None
        if self._overlap:
            while self._next < len(buckets):
                self._start_next()
        resend = [not (self._overlap and bucket.recorded) or bucket.find_changed() is not None for bucket in buckets]
        for bucket in itertools.compress(buckets, resend):
            try:
                bucket.read_grads()
            except InvalidArgument as error:
                problem = problem or error
        if problem is None:
            try:
                check_no_overlap(buckets)
            except InvalidArgument as error:
                problem = error
        have = [False] * len(self._params) if problem else [each for bucket in buckets for each in bucket.has]
        resend = [bool(self._overlap) and each for each in resend]
        found = self._flags.exchange(self._comms.for_flags, problem is not None, resend, have)
        if found is not None:  # else this rank's round is usual, and it doesn't wait
            resend, have = found.resend, found.used
            if found.failing is not None or found.inconsistent:
                self._end_round(found)
                raise problem or found.error()
        parts = split_by_bucket(have, buckets)
        if self._overlap:
            for bucket in itertools.compress(buckets, resend):
                with _naming_bucket(bucket):
                    bucket.wait_for_work()
                    bucket.pack(record=False)
                    self._send(bucket)
        for bucket, part in zip(buckets, parts, strict=True):
            with _naming_bucket(bucket):
                if not self._overlap and any(part):
                    bucket.pack(record=False)
                    self._send(bucket)
                bucket.wait_for_work()
                if any(part):
                    bucket.unpack(part)
        self._bytes = self._sent

    def _end_round(self, found) -> None:
        """Wait for operations in flight, and take part, with zeros, in the operations of ranks that
        didn't wait for the flags.
        """
        for bucket in self._buckets:
            with _naming_bucket(bucket):
                bucket.wait_for_work()
                if found.some_go_on and not self._overlap:
                    flat = bucket.flat
                    if flat is None:
                        flat = torch.empty(bucket.total, dtype=bucket.dtype, device=bucket.device)
                    bucket.sending = flat.zero_()
                    self._send(bucket)
                    bucket.wait_for_work()

    def _send(self, bucket: GradientBucket) -> None:
        before, begun = self._sent, time.perf_counter_ns()
        self._reduce_one(bucket)
        recorder = recording.active
        if recorder is not None and not self._overlap and bucket.device.type == "cpu":  # else it only starts here
            recorder.about["engine"] = self._comms.reducing[bucket.device].engine.name
            _record_sending(recorder, bucket, begun, self._sent - before)

    def _reduce_one(self, bucket: GradientBucket) -> None:
        comm = self._comms.reducing[bucket.device]
        if bucket is self._buckets[0] and (count := find_step_count(bucket.params[0])) is not None:
            count.begin_backward(comm)
        scaling = Scaling(divisor=comm.size if self._average else 0)
        if self._compressor is not None:
            self._sent += self._compressor.reduce(comm, bucket, scaling)
            return
        bucket.plan = plan_reduction(comm, scaling, bucket.dtype)
        bucket.plan.before(bucket.sending)
        bucket.work = comm.all_reduce(bucket.sending, bucket.plan.op, async_op=bool(self._overlap))
        self._sent += 2 * (comm.size - 1) * bucket.sending.nbytes // comm.size

    def _start_next(self) -> None:
        """Send the next bucket, with whatever gradients there are: the order must be the same on
        all ranks.
        """
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.wait_for_work()  # of a round that was interrupted
        try:
            bucket.read_grads()
            bucket.pack(record=True)
        except InvalidArgument:
            bucket.forget()  # so that all_reduce() reads the gradients again, and raises
            bucket.sending = bucket.flat.zero_()
        self._send(bucket)

    def bucket_ready(self, _bucket: GradientBucket) -> None:
        """Send the next buckets whose gradients are there. Called by the parameters' hooks."""
        with self._lock, torch.no_grad():
            buckets = self._buckets
            while self._next < len(buckets) and not buckets[self._next].missing:
                comm = self._comms.reducing[buckets[self._next].device]
                if comm.closed:  # in a forked child, say: all_reduce() raises
                    return
                self._start_next()

    def _rewind(self) -> None:
        self._next = self._sent = 0
        self._filler.rewind(self._buckets)


@contextlib.contextmanager
def _naming_bucket(bucket: GradientBucket):
    """Add the bucket's index and parameters to the text of errors raised inside."""
    try:
        yield
    except CollectivesError as error:
        raise error.with_addition(f" -- in gradient bucket {bucket.index}, of {bucket.describe()}") from error


def _record_sending(recorder, bucket: GradientBucket, begun: int, nbytes: int) -> None:
    """Add a bucket's reduction, which ends here, to the trace."""
    dtype = str(bucket.dtype).removeprefix("torch.")
    details = {"bucket": bucket.index, "bytes": nbytes, "dtype": dtype, "parameters": bucket.describe()}
    recorder.add("lane 0", f"all_reduce {bucket.sending.nbytes} B", begun, time.perf_counter_ns(), **details)


def _check_arguments(comm, process_group, average, overlap) -> None:
    if comm is not None and not isinstance(comm, Communicator):
        raise InvalidArgument(f"comm must be a collectives.Communicator or None, not {kind_of(comm)}", op=_OP)
    if comm is not None and process_group is not None:
        raise InvalidArgument("comm and process_group both say which ranks average: give one of them", op=_OP)
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise InvalidArgument(
            f"process_group must be a torch.distributed.ProcessGroup, not {kind_of(process_group)}", op=_OP
        )
    if not isinstance(average, bool) or not (overlap is None or isinstance(overlap, bool)):
        raise InvalidArgument(
            f"average must be True or False and overlap True, False or None, not {average!r:.40} and {overlap!r:.40}",
            op=_OP,
        )


def _parse_caps(first_bucket_mb, bucket_cap_mb, members, comm, process_group) -> tuple[int, int]:
    """Return the bytes of the first bucket, and of the others; None: the default for the ranks."""
    if bucket_cap_mb is None:
        known = process_group is not None or dist.is_initialized()
        ranks = comm.size if comm is not None else dist.get_world_size(process_group) if known else 1
        bucket_cap_mb = default_bucket_cap_mb([param for _, param in members], ranks)
    return _parse_cap(first_bucket_mb, "first_bucket_mb"), _parse_cap(bucket_cap_mb, "bucket_cap_mb")


def _parse_cap(megabytes, name: str) -> int:
    """Return MiB as bytes."""
    number = isinstance(megabytes, int | float) and not isinstance(megabytes, bool)
    if not number or not 0 < megabytes < 1 << 40:
        raise InvalidArgument(f"{name} must be a number of MiB above 0, not {megabytes!r:.40}", op=_OP)
    return int(megabytes * _MIB)
