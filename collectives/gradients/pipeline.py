"""One backward after another: the buckets of each on their lanes, and what is known only when the last has come.

Bucket i goes to lane i modulo their number, on all ranks alike. When the last one has come, the ranks add up what they
found on the way (the gradient's norm, non-finite values), and decide alike on clipping or on the step.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
import weakref

import torch

from ..comm.communicator import Communicator
from ..comm.consensus import verify_same_options
from ..compression.base import Bucket, Factor, Plain, Wire
from ..errors import CollectivesError, InvalidUsage
from ..parameter_names import Names, module_of
from ..recorder import recording
from ..torch_compat import current_graph_task_id
from .hyperparameters import Hyperparameters
from .saved_layout import SavedBuckets
from .streams import Lane, lanes_of, overlaps

__all__ = ["Failed", "Reduction"]


class Failed(CollectivesError):
    """A bucket's error on its way to who tells the user."""

    def __init__(self, error: CollectivesError, bucket: Bucket):
        super().__init__(str(error))
        self.error = error
        self.bucket = bucket


class _Sent:
    """A bucket that was given to its lane."""

    __slots__ = ("bucket", "buffer", "done", "error", "future", "lane", "nbytes")

    def __init__(self, bucket, buffer, lane):
        self.bucket = bucket
        self.buffer = buffer  # what the future gives
        self.lane = lane
        self.future = torch.futures.Future(devices=None if lane.stream is None else [lane.comm.device])
        self.done: threading.Event | None = None
        self.error: BaseException | None = None
        self.nbytes = 0


# ---- Backwards.


class Reduction:
    """What a `HookState` does with buckets; its options, checked, come from there.

    `sharded`: the optimizer that steps this rank's shards, or None; `local`: post-local SGD, or None; `scaler`: a
    function that gives the GradScaler in use, or None; `told`: one that gives the options by name; `names`: the
    parameters' names, as they are saved.
    """

    def __init__(
        self, wire: Wire, *, average, predivide, streams, max_norm, norm_type, check_finite, deterministic, sharded,
        local, scaler, told=None, names=None,
    ):  # fmt: skip
        self.wire = wire
        self.average = average
        self.predivide = predivide
        self.streams = streams
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.check_finite = check_finite
        self.deterministic = deterministic
        self.sharded = sharded
        self.local = local
        self.scaler = scaler
        self.told = told
        self.names = names or Names()
        self._agreed: weakref.WeakSet = weakref.WeakSet()  # communicators on which the ranks' options were compared
        self.norm = None  # of the last backward: a number, or a float64 tensor on a GPU
        self.nonfinite = None
        self.bytes_on_wire = 0
        self.totals = {"backwards": 0, "buckets": 0, "bytes_on_wire": 0, "bytes_as_fp32": 0, "seconds_in_hook": 0.0}
        self.lanes: list[Lane] = []
        self._sent: list[_Sent] = []
        self._owner = None  # whose backward is under way: its first bucket's first parameter
        self._overlaps = False
        self._health: dict[Lane, torch.Tensor] = {}
        self._scaler = None
        # Whether buckets need nothing but the wire: then the communicator over which that was last looked at.
        alone = max_norm is None and not check_finite and local is None and predivide is None and streams == 1
        self._direct = alone and isinstance(wire, Plain)
        self._replays = False
        self._finds_unused = False
        self._task = -1
        self.buckets = SavedBuckets(self.names)  # those of earlier backwards, and of a saved run
        self.ranks = 0  # in the last backward
        self._saved = None  # what of a saved run this backward goes by
        self._hyperparameters = Hyperparameters()

    @property
    def pending(self) -> int:
        """The number of buckets of a backward that has not come to its end."""
        return len(self._sent)

    def start(self, comm: Communicator, bucket: Bucket, buffer, last: bool) -> torch.futures.Future:
        """Reduce a bucket; the future gives `buffer`. With the last one the backward is finished: blocks on the host.

        Raises `Failed`, with the error and the bucket that it is of.
        """
        begun = time.perf_counter_ns()
        if self._direct and self.sharded is None and recording.active is None and self._goes_directly(comm):
            return self._at_once(comm, bucket, buffer, last, begun)
        try:
            if bucket.index == 0:
                self._begin(comm, bucket)
            elif self._owner is None and self._waits_for_all():
                raise InvalidUsage("the first bucket of this backward was not seen: build the DDP object again")
            lane = self.lanes[bucket.index % self.streams]
            sent = _Sent(bucket, buffer, lane)
            self._sent.append(sent)
            if self.local is not None and not self.local.sees(comm, bucket):
                pass  # this rank steps on its own gradients
            elif self._replays:
                pass  # until all have come
            elif lane.stream is not None:
                self._on_stream(sent)
            elif self._overlaps and not last:
                sent.done = lane.submit(functools.partial(self._reduce, sent))
            else:
                if self._overlaps:
                    self._wait(lane)  # a communicator's operations are in one order on all ranks
                self._reduce(sent)
                if sent.error is not None:
                    raise sent.error
            if last:
                self._replay(comm) if self._replays else self._finish(comm)
        except CollectivesError as error:
            raise self._settled(error, bucket) from error
        except BaseException:
            self._drop()
            raise
        finally:
            ended = time.perf_counter_ns()
            self.totals["seconds_in_hook"] += (ended - begun) * 1e-9
            if recording.active is not None:
                recording.active.add("hook", f"bucket {bucket.index}", begun, ended)
                if last:
                    recording.active.step()
        return sent.future

    # ---- Without any option, on the host: nothing to keep between a bucket and the next.

    def _goes_directly(self, comm) -> bool:
        if self._sent or not comm._on_host:
            return False
        if self._direct is not comm:  # seen for the first time
            self._meet(comm)
            self._overlaps = overlaps(comm)
            self._direct = comm
        return not self._overlaps

    def _meet(self, comm) -> None:
        """Compare the ranks' options, once for each communicator."""
        if comm not in self._agreed:
            self.buckets.check_ranks(comm.size)
            if self.told is not None:
                verify_same_options(comm, self.told())
            self._agreed.add(comm)
        self.buckets.name_unmatched(self.wire)

    def _at_once(self, comm, bucket, buffer, last, begun) -> torch.futures.Future:
        if bucket.index == 0:
            self._look_at_join(bucket.params)
        try:
            nbytes = self.wire.reduce(comm, bucket, Factor(over=comm.size) if self.average else Factor())
        except CollectivesError as error:
            raise Failed(error, bucket) from error
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

    # ---- The parts of it.

    def _begin(self, comm, bucket) -> None:
        owner = bucket.params[0]
        if self._sent:
            before = self._owner() if self._owner is not None else None
            together = self._task == current_graph_task_id()  # else the earlier one was interrupted
            if before is not None and before is not owner and together and self._waits_for_all():
                raise InvalidUsage(
                    "two modules' backwards interleave on one HookState, which looks at a backward as a whole "
                    "(max_norm, check_finite, optimizer, local_steps): give each module a state of its own"
                )
            # An earlier backward was interrupted, or two modules' backwards interleave.
            self._join(comm)
            self._end(comm)
        self._owner = weakref.ref(owner)
        self._task = current_graph_task_id()
        self._meet(comm)
        self.lanes = lanes_of(comm, self.streams)
        self._overlaps = comm._on_host and overlaps(comm)
        self.bytes_on_wire = 0
        self._scaler = self.scaler() if self.max_norm is not None or self.sharded is not None else None
        self._look_at_join(bucket.params)
        self._health = {}
        if self._counts():
            self._health = {lane: torch.zeros(2, dtype=torch.float64, device=comm.device) for lane in self.lanes}
        self._saved = None
        if not (self.wire.exact and not self._counts()):
            self._saved = self.buckets.find(comm, bucket.params)
        self._replays = self._saved is not None and self._saved.layout is not None
        self.wire.begin()
        if self.sharded is not None:
            self.sharded.begin()
            self.compare_steps(comm)
            ddp = module_of(bucket.params)
            self._finds_unused = ddp is not None and (ddp.find_unused_parameters or ddp.static_graph)

    def compare_steps(self, comm) -> None:
        """Raise `Mismatch` where the ranks would step the optimizer with different learning rates and the like."""
        self._hyperparameters.compare(comm, self.sharded.optimizer)

    def _look_at_join(self, params) -> None:
        """Refuse what can't be right in DDP's join(), on all ranks alike: those that have joined call the hook, too."""
        ddp = module_of(params)
        if ddp is None or not ddp._join_config.enable:
            return
        if self.average and not ddp._divide_by_initial_world_size:
            raise InvalidUsage(
                "join(divide_by_initial_world_size=False) divides by the ranks that have not joined, which a hook is "
                "not told: leave it out"
            )
        if self.sharded is not None and self._scaler is not None:
            raise InvalidUsage(
                "with a GradScaler the updates wait for optimizer.step(), which a rank that has joined doesn't call: "
                "in join() step the optimizer after the backward, without HookState's optimizer"
            )

    def _counts(self) -> bool:
        """Whether norm and health are wanted."""
        return self.max_norm is not None or self.check_finite or (self.sharded is not None and self._scaler is not None)

    def _waits_for_all(self) -> bool:
        return bool(self._counts() or self.sharded is not None or self.local is not None)

    def _factor(self, size: int) -> Factor:
        if not self.average:
            return Factor()
        if self.predivide is None:
            return Factor(over=size)
        return Factor(before=1.0 / self.predivide, after=self.predivide / size)

    def _on_stream(self, sent: _Sent) -> None:
        stream = sent.lane.stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._reduce(sent)
            if sent.error is not None:
                raise sent.error
            if not self._waits_for_all():
                sent.future.set_result(sent.buffer)

    def _reduce(self, sent: _Sent) -> None:
        """Reduce one bucket, on its lane; what goes wrong is kept in `sent`."""
        bucket, comm = sent.bucket, sent.lane.comm
        recorder = recording.active
        begun = time.perf_counter_ns() if recorder is not None and sent.lane.stream is None else 0
        event = None
        if recorder is not None and sent.lane.stream is not None:
            event = sent.lane.stream.record_event(torch.cuda.Event(enable_timing=True))
        try:
            factor, health = self._factor(comm.size), self._health.get(sent.lane)
            if self.sharded is None:
                sent.nbytes = self.wire.reduce(comm, bucket, factor, health=health)
            else:
                share = self._owned(comm, bucket).part
                sent.nbytes = self.wire.scatter(comm, bucket, factor, share, health=health)
                if not self._waits_for_norm():
                    sent.nbytes += self._update(comm, bucket)
        except CollectivesError as error:
            sent.error = error
        except BaseException as error:
            if sent.done is None and not self._overlaps:
                raise
            sent.error = error
        if recorder is not None and sent.error is None:
            end = time.perf_counter_ns() if event is None else None
            if event is not None:
                end = sent.lane.stream.record_event(torch.cuda.Event(enable_timing=True))
            what = {"bucket": bucket.index, "bytes": sent.nbytes, "parameters": bucket.describe()}
            # The report goes by the first word: it must be that of a collective.
            name = f"all_reduce {bucket.flat.nbytes} B"
            if self.sharded is not None:
                rest = "" if self._waits_for_norm() else ", step, all_gather"
                name = f"reduce_scatter {bucket.flat.nbytes} B{rest}"
            if event is None:
                recorder.add(sent.lane.row, name, begun, end, **what)
            else:
                recorder.add_cuda(sent.lane.row, name, event, end, **what)

    def _owned(self, comm, bucket):
        return self.sharded.shares(bucket, comm.size, comm.rank, self.wire.align or None)

    def _update(self, comm, bucket, **how) -> int:
        """Step the optimizer for a bucket, without the parameters that no rank has used."""
        unused, doubtful = self._unused(comm, bucket) if self._finds_unused else ((), None)
        return self.sharded.update(
            comm, bucket, align=self.wire.align or None, unused=unused, doubtful=doubtful, **how
        )  # fmt: skip

    def _unused(self, comm, bucket) -> tuple[set, dict | None]:
        """Find which of a bucket's parameters no rank has used: their places, or on CUDA, where nobody waits to know,
        the places of those that this rank has not used, each with a number that is 1 if no rank has.
        """
        here = [param.grad is not None for param in bucket.params]
        used = torch.ones(len(here), dtype=torch.uint8, device=comm.device)
        begin = 0
        for there, run in itertools.groupby(here):  # by value: a copy from the host would wait
            end = begin + len(list(run))
            if not there:
                used[begin:end].zero_()
            begin = end
        comm.all_reduce(used, "max", algorithm="native")
        if comm._on_host:
            return {at for at, each in enumerate(used.tolist()) if not each}, None
        nobody = (used == 0).to(torch.float32)
        return set(), {at: nobody[at : at + 1] for at, each in enumerate(here) if not each}

    def _waits_for_norm(self) -> bool:
        """Whether the optimizer's step must wait for the last bucket."""
        return self._counts() or self._scaler is not None

    def _wait(self, lane: Lane | None = None) -> None:
        """Wait for the lanes' threads; raise the first error."""
        begun = time.perf_counter_ns()
        waited = False
        for sent in self._sent:
            if sent.done is not None and (lane is None or sent.lane is lane):
                waited = True
                sent.done.wait()
        if waited and recording.active is not None:
            recording.active.add("wait", "wait", begun, time.perf_counter_ns())
        for sent in self._sent:
            if sent.error is not None:
                raise Failed(sent.error, sent.bucket) if isinstance(sent.error, CollectivesError) else sent.error

    def _join(self, comm) -> None:
        """Wait for all buckets; on CUDA only the current stream does.

        What DDP does next, as the all-reduce of its map of unused parameters on the process group's own communicator,
        comes after them: two communicators with no order between them can deadlock.
        """
        if comm._on_host:
            self._wait()
        else:
            for lane in self.lanes:
                torch.cuda.current_stream(comm.device).wait_stream(lane.stream)

    def _finish(self, comm) -> None:
        """Do what takes all buckets."""
        self._join(comm)
        self.norm = self.nonfinite = None
        self.bytes_on_wire = sum(sent.nbytes for sent in self._sent)
        clip = None
        if self._counts():
            clip = self._look_at_all(comm)
        if self.sharded is not None and self._waits_for_norm():
            found = self.nonfinite if self.check_finite else None
            for sent in self._sent:
                if self._scaler is not None:
                    align = self.wire.align or None
                    self.sharded.defer(comm, sent.bucket, self.norm, self.max_norm, self.nonfinite, align=align)
                else:
                    clip = 1.0 if clip is None else clip
                    self.bytes_on_wire += self._update(comm, sent.bucket, clip=clip, found=found)
        elif clip is not None and not (isinstance(clip, float) and clip == 1.0):
            torch._foreach_mul_([sent.bucket.flat for sent in self._sent], clip)
        if self.local is not None:
            self.local.end_backward()
        self.buckets.remember([sent.bucket.params for sent in self._sent], self._saved)
        self.ranks = comm.size
        totals = self.totals
        totals["backwards"] += 1
        totals["buckets"] += len(self._sent)
        totals["bytes_on_wire"] += self.bytes_on_wire
        totals["bytes_as_fp32"] += sum(
            2 * (comm.size - 1) * sent.bucket.flat.numel() * 4 // comm.size for sent in self._sent
        )
        self._end(comm)

    def _replay(self, comm) -> None:
        """Reduce in the buckets of a backward that was saved, so that training goes on bit for bit."""
        held, self._sent = self._sent, []
        here = {}
        for sent in held:
            ends = [*sent.bucket.offsets[1:], sent.bucket.flat.numel()]
            for param, begin, end in zip(sent.bucket.params, sent.bucket.offsets, ends, strict=True):
                here[id(param)] = (param, sent.bucket.flat[begin:end])
        members_of = self._saved.members([sent.bucket.params for sent in held], self.names)
        places = []
        for index, members in enumerate(members_of):
            members = [here[id(param)] for param in members]
            flat = torch.cat([part for _, part in members])
            offsets = [0, *itertools.accumulate(part.numel() for _, part in members[:-1])]
            bucket = Bucket(flat, [param for param, _ in members], offsets, index, self.names)
            places.append((bucket, [part for _, part in members]))
            sent = _Sent(bucket, None, self.lanes[index % self.streams])
            self._sent.append(sent)
            if sent.lane.stream is not None:
                self._on_stream(sent)
            else:
                self._reduce(sent)
        self._finish(comm)
        for bucket, parts in places:
            torch._foreach_copy_(parts, [*bucket.flat.split([part.numel() for part in parts])])
        for sent in held:
            sent.future.set_result(sent.buffer)

    def _look_at_all(self, comm):
        """Add up the ranks' shares; give the factor that clips, or None."""
        total = sum(self._health.values())
        Plain().reduce(comm, Bucket(total, [], [], 0), Factor())
        on_host = comm._on_host
        self.nonfinite = int(total[1]) if on_host else total[1]
        if self.norm_type == 2 and not (self.deterministic and self.sharded is None):
            norm = total[0].sqrt()
        elif self.norm_type == 2:
            norm = self._norm_by_parameter()
        else:
            norm = self._other_norm(comm)
        self.norm = norm.item() if on_host else norm
        if self.max_norm is None:
            return None
        scale = 1.0
        if self._scaler is not None and self.sharded is None:
            scale = self._scaler._scale
            scale = scale.item() if on_host else scale.to(torch.float64)
            self.norm = self.norm / scale
        factor = self.max_norm / (self.norm + 1e-6)
        if on_host:
            return min(1.0, factor) if not math.isnan(factor) else math.nan
        return factor.clamp(max=1.0)

    def _norm_by_parameter(self) -> torch.Tensor:
        """The norm, whose bits depend on the gradients alone, and not on where buckets and the engine's pieces begin.

        With a pass of its own over all gradients, on every rank; the parameters' squares are added up exactly.
        """
        squares = []
        for sent in self._sent:
            ends = [*sent.bucket.offsets[1:], sent.bucket.flat.numel()]
            for begin, end in zip(sent.bucket.offsets, ends, strict=True):
                squares.append(torch.linalg.vector_norm(sent.bucket.flat[begin:end], dtype=torch.float64).square())
        squares = torch.stack(squares)
        if squares.is_cuda or not squares.isfinite().all():
            return squares.sum().sqrt()
        return torch.tensor(math.fsum(squares.tolist()), dtype=torch.float64).sqrt()

    def _other_norm(self, comm) -> torch.Tensor:
        """A norm that isn't 2: with a pass of its own over this rank's share of each bucket."""
        p, parts = self.norm_type, []
        for sent in self._sent:
            flat = sent.bucket.flat
            share = -(-flat.numel() // comm.size)
            if self.sharded is not None:
                share = self._owned(comm, sent.bucket).part
                if comm.rank == 0:
                    parts.append(flat[comm.size * share :])
            parts.append(flat[comm.rank * share : (comm.rank + 1) * share])
        norms = [torch.linalg.vector_norm(part, p, dtype=torch.float64) for part in parts if part.numel()]
        found = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=comm.device)
        if p == math.inf:
            found = found.max().reshape(1)
            comm.all_reduce(found, "max", algorithm="native")
            return found[0]
        found = found.pow(p).sum().reshape(1)
        comm.all_reduce(found, "sum", algorithm="native")
        return found[0].pow(1.0 / p)

    def _end(self, comm) -> None:
        """Give the buckets back."""
        sents, self._sent = self._sent, []
        self._owner = self._scaler = None
        for sent in sents:
            if not sent.future.done():
                sent.future.set_result(sent.buffer)

    def _settled(self, error: CollectivesError, bucket: Bucket) -> Failed:
        """After an error: wait for what is on its way, and give the first thing that went wrong."""
        failed = error if isinstance(error, Failed) else Failed(error, bucket)
        for sent in self._sent:
            if sent.done is not None:
                sent.done.wait()
        first = next((sent for sent in self._sent if sent.error is not None), None)
        if first is not None and isinstance(first.error, CollectivesError):
            failed = Failed(first.error, first.bucket)
        self._drop()
        return failed

    def _drop(self) -> None:
        self._sent = []
        self._owner = self._scaler = None
