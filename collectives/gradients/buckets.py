"""GradientBuckets: averaging gradients without DDP, for training loops of any shape.

Gradients are packed into flat buckets, reduced, and unpacked to where they were. A bucket may be sent while a backward
still runs (overlap). Then each rank sends every bucket once, in one order, whatever its own backward did, and a small
exchange of flags in `all_reduce()` finds the buckets whose gradients some rank has changed since: all send those again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..comm.liveness import announce
from ..compression.base import Bucket, Factor, Plain
from ..compression.by_name import make_wire
from ..errors import CollectivesError, InvalidArgument, InvalidUsage, Mismatch
from ..parameter_names import names_of
from ..rendezvous.process_groups import drop_communicator, get_communicator, get_default_group
from ..tracing import recording
from .bucket import GradientBucket, called, check_apart, fill, read_params
from .round_flags import RoundFlags
from .streams import has_spare_cores

__all__ = ["BucketInfo", "GradientBuckets"]

_OP = "GradientBuckets"
_MIB = 1 << 20


class BucketInfo(NamedTuple):
    """What a bucket holds: names of its parameters, elements and bytes on the way (padding included), dtype, device."""

    names: tuple[str, ...]
    elements: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device


class GradientBuckets:
    """Average the gradients of parameters over all ranks: `all_reduce()` between the last backward and the step.

    `params`: parameters, (name, parameter) pairs as ``model.named_parameters()`` gives them, or an optimizer's
    ``param_groups``; those that need no gradient are left out; the same on all ranks, in the same order.
    `bucket_cap_mb`, `first_bucket_mb`: sizes in MiB that a bucket, and the first one, don't pass, unless one parameter
    does; on the host one of 1 MiB and more is alone, and without overlap its gradient isn't packed. `comm`: a
    `Communicator`; or `process_group`: a torch process group over whose ranks one is opened at first use; with neither,
    the default group. `average`: False leaves the sum. `wire`: "fp32", each gradient in its own dtype, or a compressed
    one with `block`, `error_feedback` and `stochastic_rounding`, as `HookState` takes them. `overlap`: send a bucket as
    soon as a backward has made all of its gradients; None: on CUDA, and on the host where every rank has cores to spare
    beside those that torch computes with; not with a compressed wire. It begins after the first `all_reduce()` and
    takes a communicator of its own, split off then.

    Gradients may have been made by any number of backwards, or assigned. On CUDA the host doesn't wait where this rank
    has all gradients, and none was changed after it was sent: then what is wrong on another rank is raised here by a
    later call, and a gradient that is changed after it was sent must be so on all ranks. Raises `InvalidArgument` for
    parameters and settings that won't do. Holds the parameters, as an optimizer does; use it as a context manager, or
    `close()` it.
    """

    def __init__(
        self, params: Iterable, bucket_cap_mb: float = 25, *, comm: Communicator | None = None, process_group=None,
        average: bool = True, wire: str = "fp32", block: int = 256, error_feedback: bool = False,
        stochastic_rounding: bool = False, overlap: bool | None = None, first_bucket_mb: float = 1,
    ):  # fmt: skip
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
                f"average must be True or False and overlap True, False or None, not {average!r:.40} and "
                f"{overlap!r:.40}",
                op=_OP,
            )
        made = make_wire(wire, block=block, error_feedback=error_feedback, stochastic_rounding=stochastic_rounding)
        compressed = None if isinstance(made, Plain) else made
        if compressed is not None and overlap:
            raise InvalidArgument("a compressed wire reduces inside of all_reduce(): leave out overlap=True", op=_OP)
        caps = _cap(first_bucket_mb, "first_bucket_mb"), _cap(bucket_cap_mb, "bucket_cap_mb")
        members = read_params(params)
        if comm is None:
            announce()
        else:
            for number, (name, param) in enumerate(members):
                if param.device != comm.device:
                    raise InvalidArgument(
                        f"{called(name, number, param)} is on {param.device}, the communicator on {comm.device}: move "
                        f"the model there before you give its parameters, .to({str(comm.device)!r})",
                        op=_OP,
                    )
        self._given = comm
        self._group = process_group
        self._average = average
        self._factor_op = "avg" if average else "sum"
        self._wire = compressed
        self._wish = False if compressed is not None else overlap
        self._buckets = fill(members, caps)
        self._devices = list(dict.fromkeys(bucket.device for bucket in self._buckets))
        self._order = [param for _, param in members]
        self._settings = f"bucket caps {caps} bytes, average={average}, overlap={overlap}, wire {wire}"
        self._comms: dict[torch.device, Communicator] = {}  # as given, or over the process group
        self._lanes: dict[torch.device, Communicator] = {}  # that buckets go through: with overlap, split off
        self._overlap: bool | None = None  # None: not agreed on yet
        self._next = 0  # the bucket that is to be started next
        self._lock = threading.RLock()  # autograd has a thread for each GPU
        self._gate = _Gate()
        self._handles: list = []
        self._closed = False
        self._sent = 0  # bytes since the last round
        self._bytes = 0  # in the last round
        self._end = weakref.finalize(self, _let_go, self._handles, self._lanes, self._comms)
        self._end.atexit = False

    # ---- What it is.

    @property
    def buckets(self) -> list[BucketInfo]:
        """The buckets, in the order in which they are sent."""
        names_of(self._order)  # one search for all of them
        return [
            BucketInfo(tuple(b.called()), b.total, b.total * b.dtype.itemsize, b.dtype, b.device)
            for b in self._buckets
        ]  # fmt: skip

    @property
    def overlap(self) -> bool | None:
        """Whether buckets are sent while a backward runs; None before the first `all_reduce()`."""
        return self._overlap

    @property
    def bytes_on_wire(self) -> int:
        """Bytes of gradients that this rank sent for the last `all_reduce()`: 2(n-1)/n of a bucket for n ranks."""
        return self._bytes

    def __repr__(self):
        nbytes = sum(b.total * b.dtype.itemsize for b in self._buckets)
        over = self._given or self._group or "default group"
        state = "closed" if self._closed else f"overlap={self._wish if self._overlap is None else self._overlap}"
        return (
            f"<GradientBuckets of {len(self._order)} parameters in {len(self._buckets)} buckets, "
            f"{nbytes / _MIB:.2f} MiB, average={self._average}, {state}, over {over}>"
        )

    def __reduce__(self):
        raise InvalidUsage("GradientBuckets can't be pickled or copied: make them of the copy's parameters", op=_OP)

    # ---- Use.

    @contextlib.contextmanager
    def no_sync(self):
        """Start no bucket in the backwards inside: for all but the last one that go into a step.

        It saves traffic. Without it the gradients are the same.
        """
        self._gate.shut += 1
        try:
            yield
        finally:
            self._gate.shut -= 1

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Average every parameter's ``.grad`` over the ranks, in place; all ranks call it.

        A parameter without a gradient counts as one of zeros, and gets a gradient where another rank has one. Blocks
        until it is done; on CUDA it waits for what all backwards have made, and the averages are ordered on the current
        stream. A gradient that can't be averaged (sparse, of another dtype or shape than the parameter's was, sharing
        memory with another one) raises `InvalidArgument` on all ranks and leaves the gradients as they are; so does
        `Mismatch`, at the first call, where the ranks' parameters differ. (On CUDA, ranks without a problem of their
        own go on, and raise `InvalidUsage` in a later call.)
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
        """Remove the hooks and free the buffers. Blocks while buckets are under way. Harmless when called again."""
        if not self._closed:
            self._closed = True
            self._unhook()
            for device, lane in self._lanes.items():
                if lane is not self._comms[device]:
                    lane.close()
            self._rewind()
            self._free()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            for device, lane in self._lanes.items():
                if lane is not self._comms[device] and not lane.closed and lane._lane.busy():
                    lane.abort()  # what is in flight may never end
        self.close()

    # ---- The ranks meet.

    def _open(self) -> None:
        """Find the communicators; where they are new ones, compare the ranks' parameters and agree on overlap."""
        comms = {device: self._given or get_communicator(self._own_group(), device) for device in self._devices}
        for comm in comms.values():
            comm._alive("all_reduce")
        if self._overlap is not None and all(self._comms[device] is comm for device, comm in comms.items()):
            return
        self._drop(failed=False)
        self._comms.update(comms)
        first = next(iter(comms.values()))
        wishes = [_spare_cores(comm) if self._wish is None else self._wish for comm in comms.values()]
        overlap = self._agree(first, all(wishes))
        for device, comm in comms.items():
            self._lanes[device] = comm.split(0) if overlap else comm
        self._flags = RoundFlags(first, len(self._buckets), len(self._order))
        self._make_flats(shared=not overlap)
        self._overlap = overlap
        if overlap:
            self._hook()

    def _own_group(self):
        if self._group is not None:
            return self._group
        return get_default_group("these buckets'", "pass comm=collectives.init()", op=_OP)

    def _agree(self, comm: Communicator, wish: bool) -> bool:
        """Raise `Mismatch` where the ranks' parameters or settings differ; tell whether all ranks wish to overlap."""
        strides = {id(param): each for b in self._buckets for param, each in zip(b.params, b.strides, strict=True)}
        described = [
            f"shape {tuple(param.shape)}, {param.dtype}, on {param.device.type}, strides {strides[id(param)]}"
            for param in self._order
        ]
        elements = sum(param.numel() for param in self._order)
        digests = [_digest(each) for each in described]
        own = [len(self._order), elements, _digest((digests, self._settings)), int(wish)]
        rows = _gathered(comm, own)
        if all(row[:3] == rows[0][:3] for row in rows):
            return all(row[3] for row in rows)
        told = "\n".join(f"  rank {rank}: {row[0]} parameters, {row[1]} elements" for rank, row in enumerate(rows))
        if len({row[0] for row in rows}) == 1:
            columns = list(zip(*_gathered(comm, digests), strict=True))
            unlike = next((at for at, column in enumerate(columns) if len(set(column)) > 1), None)
            if unlike is None:
                told += f"\nThe parameters are alike, the settings are not; here: {self._settings}"
            else:
                names = {
                    id(param): name for b in self._buckets for param, name in zip(b.params, b.called(), strict=True)
                }
                name = names[id(self._order[unlike])]
                told += f"\nThe first that differs is {name}, here of {described[unlike]}"
        raise Mismatch(
            f"the ranks' GradientBuckets differ in number, order, shapes, strides, dtypes or settings:\n{told}",
            op=_OP, rank=comm.rank, peers=[rank for rank, row in enumerate(rows) if row[:3] != own[:3]],
        )  # fmt: skip

    def _make_flats(self, shared: bool) -> None:
        """Give each bucket its transport buffer.

        `shared`: one for all of a device, since they go one by one; a single gradient on the host needs none, as nobody
        writes to it meanwhile.
        """
        in_place = [
            shared and self._wire is None and len(bucket.params) == 1 and bucket.device.type == "cpu"
            for bucket in self._buckets
        ]
        packed = [bucket for bucket, without in zip(self._buckets, in_place, strict=True) if not without]
        largest: dict[torch.device, int] = {}
        for bucket in packed if shared else ():
            nbytes = bucket.total * bucket.dtype.itemsize
            largest[bucket.device] = max(largest.get(bucket.device, 0), nbytes)
        memory = {device: self._comms[device].empty(nbytes, torch.uint8) for device, nbytes in largest.items()}
        for bucket in packed:
            if shared:
                nbytes = bucket.total * bucket.dtype.itemsize
                bucket.flat = memory[bucket.device][:nbytes].view(bucket.dtype)
            else:
                bucket.flat = self._comms[bucket.device].empty(bucket.total, bucket.dtype)

    # ---- One round: what lies between two calls of all_reduce().

    def _reduce(self) -> None:
        buckets = self._buckets
        self._flags.look()
        if self._wire is not None:
            self._wire.begin()
        problem = None
        if self._overlap:
            while self._next < len(buckets):
                self._start_next()
        again = [not self._overlap or bucket.changed() for bucket in buckets]
        for bucket in itertools.compress(buckets, again):
            try:
                bucket.look()
            except InvalidArgument as error:
                problem = problem or error
        if problem is None:
            try:
                check_apart(buckets)
            except InvalidArgument as error:
                problem = error
        have = [False] * len(self._order) if problem else [each for bucket in buckets for each in bucket.has]
        # On CUDA two communicators at once might deadlock; on the host the flags needn't wait for the buckets.
        comms = self._lanes if buckets[0].device.type == "cuda" else self._comms
        again = [bool(self._overlap) and each for each in again]
        found = self._flags.exchange(comms[buckets[0].device], problem is not None, again, have)
        if found is not None:  # else all is as usual here, and nobody waits
            again, have = found.again, found.used
            if found.failing is not None or found.apart:
                self._give_up(found)
                raise problem or found.error()
        rest = iter(have)
        parts = [list(itertools.islice(rest, len(bucket.params))) for bucket in buckets]
        if self._overlap:
            for bucket in itertools.compress(buckets, again):
                with self._telling(bucket):
                    bucket.pack(watch=False)
                    self._send(bucket)
        for bucket, part in zip(buckets, parts, strict=True):
            with self._telling(bucket):
                if not self._overlap and any(part):
                    bucket.pack(watch=False)
                    self._send(bucket)
                if any(part):
                    bucket.unpack(part)
                bucket.settle()
        self._bytes = self._sent

    def _give_up(self, found) -> None:
        """Do what ranks that haven't waited for the flags go on to do, with zeros, and end what is under way."""
        for bucket in self._buckets:
            with self._telling(bucket):
                bucket.settle()
                if found.goes_on and not self._overlap:
                    flat = torch.empty(bucket.total, dtype=bucket.dtype) if bucket.flat is None else bucket.flat
                    bucket.sending = flat.zero_()
                    self._send(bucket)
                    bucket.settle()

    def _send(self, bucket: GradientBucket) -> None:
        before, begun = self._sent, time.perf_counter_ns()
        self._reduce_one(bucket)
        recorder = recording.active
        if recorder is not None and not self._overlap and bucket.device.type == "cpu":  # else it only begins here
            what = {"bucket": bucket.index, "bytes": self._sent - before, "parameters": bucket.describe()}
            recorder.add("lane 0", f"all_reduce {bucket.sending.nbytes} B", begun, time.perf_counter_ns(), **what)

    def _reduce_one(self, bucket: GradientBucket) -> None:
        comm = self._lanes[bucket.device]
        if self._wire is not None:
            way = Bucket(bucket.sending, bucket.params, list(bucket.offsets), bucket.index)
            self._sent += self._wire.reduce(comm, way, Factor(over=comm.size if self._average else 0))
            return
        bucket.work = comm.all_reduce(bucket.sending, self._factor_op, async_op=bool(self._overlap))
        self._sent += 2 * (comm.size - 1) * bucket.sending.nbytes // comm.size

    def _start_next(self) -> None:
        """Send the next bucket, whatever its gradients are: the order must be the same on all ranks."""
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.settle()  # of a round that was interrupted
        try:
            bucket.look()
            bucket.pack(watch=True)
        except InvalidArgument:
            bucket.forget()  # so that all_reduce() looks again, and tells
            bucket.sending = bucket.flat.zero_()
        self._send(bucket)

    def _advance(self) -> None:
        """Send the buckets whose turn it is and whose gradients are there. Called by the hooks."""
        with self._lock, torch.no_grad():
            buckets = self._buckets
            while self._next < len(buckets) and not buckets[self._next].missing:
                if self._lanes[buckets[self._next].device].closed:  # in a forked child, say: all_reduce() tells
                    return
                self._start_next()

    def _rewind(self) -> None:
        self._next = self._sent = 0
        for bucket in self._buckets:
            bucket.forget()
            bucket.missing.update(range(len(bucket.params)))

    @contextlib.contextmanager
    def _telling(self, bucket: GradientBucket):
        """Let errors say what the bucket holds."""
        try:
            yield
        except CollectivesError as error:
            raise type(error)(
                f"{error.message} -- in gradient bucket {bucket.index}, of {bucket.describe()}",
                code=error.code, op=error.op, rank=error.rank, peers=error.peers, seq=error.seq, nbytes=error.nbytes,
                detail=error.detail,
            ) from error  # fmt: skip

    # ---- Hooks, and the end.

    def _hook(self) -> None:
        self._rewind()
        for bucket in self._buckets:
            for at, param in enumerate(bucket.params):
                hook = _hook(bucket.missing, at, self._gate, weakref.ref(self))
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _free(self) -> None:
        self._lanes.clear()
        self._comms.clear()
        for bucket in self._buckets:
            bucket.free()

    def _drop(self, failed: bool = True) -> None:
        """Give communicators up, failed ones or those of before; the next call finds or opens others."""
        self._unhook()
        for device, comm in self._comms.items():
            lane = self._lanes.get(device, comm)
            if lane is not comm:
                lane.abort()
            if failed and self._given is None:
                drop_communicator(comm)
        self._overlap = None
        self._free()


class _Gate:
    """Whether backwards are to start buckets: `shut` is 0."""

    __slots__ = ("shut",)

    def __init__(self):
        self.shut = 0


def _hook(missing: set, at: int, gate: _Gate, owner: weakref.ref):
    """What a parameter calls when a backward has made its gradient. It must not hold the parameter: they would be a
    cycle that Python's collector may not see.
    """
    discard = missing.discard

    def ready(_param):
        if not gate.shut:
            discard(at)
            if not missing:
                buckets = owner()
                if buckets is not None:
                    buckets._advance()

    return ready


def _let_go(handles, lanes, comms) -> None:
    """End what an object that nobody holds any more has left; never blocks."""
    for handle in handles:
        handle.remove()
    for device, lane in lanes.items():
        # NCCL's destroy may wait for the other ranks; such a communicator stays until the interpreter's end.
        if lane is not comms[device] and lane._on_host and not lane.closed and lane._lane.settled():
            lane.close()


def _cap(megabytes, name: str) -> int:
    number = isinstance(megabytes, int | float) and not isinstance(megabytes, bool)
    if not number or not 0 < megabytes < 1 << 40:
        raise InvalidArgument(f"{name} must be a number of MiB above 0, not {megabytes!r:.40}", op=_OP)
    return int(megabytes * _MIB)


# ---- The ranks.


def _gathered(comm: Communicator, numbers: list[int]) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=comm.device)
    everyone = torch.empty((comm.size, len(numbers)), dtype=torch.int64, device=comm.device)
    comm.all_gather(everyone, own)
    return everyone.tolist()


def _digest(thing) -> int:
    return int.from_bytes(hashlib.sha256(repr(thing).encode()).digest()[:7], "little")


def _spare_cores(comm: Communicator) -> bool:
    """Tell whether a thread that reduces would have a core: beside a busy one it gains nothing."""
    return comm.device.type != "cpu" or has_spare_cores(comm)
