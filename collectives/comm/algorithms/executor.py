"""The ring and direct algorithms on both engines: schedules of ``schedule.py`` carried out by send, receive and the
reduction kernels.

An algorithm sees the engine's binding (send, recv, groups, all_gather) and `kernel_of`'s kernels; it never sees a
transport. On the host the transfers go over a communicator of their own, since the steps of one call must not mix with
the calls around it; each call begins by comparing what the ranks call. On CUDA they are put on two streams, one that
transfers and one that reduces; nothing waits, and after the first call of a kind nothing is allocated, so that it can
be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from typing import NamedTuple

import torch

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE, TORCH_CODES, Place
from ...cuda_state import is_capturing, stream_from_address
from ...errors import Aborted, CollectivesError, InternalError, InvalidArgument, InvalidUsage
from ...kernels import abi
from ...kernels.execution import run as run_kernel
from ...kernels.reduction import kernel_of
from ...layout import TILE
from ..fingerprint import PREMUL, compare, row
from ..group import run_grouped
from ..memory import memory_of
from ..multinode.comm import another
from ..work import Work
from .schedule import Reduction, Schedule, schedule

__all__ = ["Algorithms", "run_by"]

_F32 = DTYPES["float32"]
_INT64 = DTYPES["int64"]
_SUM, _PROD, _AVG = OPS["sum"], OPS["prod"], OPS["avg"]
_EXACT = (OPS["max"], OPS["min"])  # nothing is rounded, so nothing wider is needed on the way
_MOST_PLANS = 128
_TORCH = {code: dtype for dtype, code in TORCH_CODES.items()}
_FLOATING = {code for code, dtype in _TORCH.items() if dtype.is_floating_point}
_WORDS = 5  # of a call's row
_ID_WORDS = 16  # int64 in a unique id


class _Key(NamedTuple):
    """All that a plan depends on, beside the communicator."""

    name: str
    algorithm: str
    count: int
    code: int
    op: int
    scaled: bool
    in_place: bool


class Algorithms:
    """What one communicator needs for its algorithms: plans, scratch memory, streams or a communicator of their own.

    `chunk`: bytes of one message, the same on all ranks. Made at the first call that is not native.
    """

    def __init__(self, comm, chunk: int):
        self._comm = comm
        self._chunk = chunk
        self._native = None if comm._on_host else comm._native  # what carries the steps
        self._dead: CollectivesError | None = None
        self._closed = False
        self._plans: OrderedDict[_Key, _Plan] = OrderedDict()
        self._kept: list[_Plan] = []  # a CUDA graph reads their memory
        self._scratch: dict[int, torch.Tensor] = {}
        self._streams = None
        self._lock = threading.RLock()
        self._turn = threading.RLock()  # of the host's calls, which share memory: held while one makes its steps

    def run(
        self, name: str, algorithm: str, to: Place, of: Place, code: int, scalar, held: tuple, result,
        async_op: bool, stream,
    ) -> Work | None:  # fmt: skip
        """Carry out one checked call; as the communicator's own operations, it blocks on the host and not on CUDA.

        `to`, `of`: the result and the input, the same for an all-reduce; `code`: of the op, and `scalar` a
        premultiplied sum's (value, dtype code); `stream`: the caller's, or None.
        """
        comm = self._comm
        reduces = name != "all_gather"
        key = _Key(
            name, algorithm, of.units if name == "all_gather" else to.count, to.code, code if reduces else 0,
            scalar is not None, name == "all_gather" and of.ptr == to.part(comm.rank, comm.size),
        )  # fmt: skip
        if not comm._on_host and reduces and (to.ptr | of.ptr) % ITEMSIZE[to.code]:
            raise InvalidArgument(
                f"algorithm {algorithm!r} needs arrays that begin at a multiple of their elements' "
                f"{ITEMSIZE[to.code]} bytes: copy them, or use algorithm='native'",
                op=name, rank=comm.rank,
            )  # fmt: skip
        factor = None if scalar is None else _as_stored(*scalar)
        label = f"{name} by {algorithm}"
        words = row(label, dtype=of.tag, count=key.count, op=(PREMUL if scalar else code) if reduces else -1)
        comm._agree([words])
        current = comm._current(stream)
        nbytes = max(to.nbytes, of.nbytes)
        if not async_op:
            if not comm._on_host:
                self._on_streams(key, of.ptr, to.ptr, factor, current)
                return None
            meeting = _Meeting(self, label, words)
            meeting.call(0)
            self._finish(meeting, key, of.ptr, to.ptr, factor)
            return None
        work = Work(name, nbytes, result)
        lane = comm._lane
        target = lane.begin(None if stream is None else current)
        try:
            if comm._on_host:
                outcome = self._queue_up(lane, target, _Meeting(self, label, words), key, of.ptr, to.ptr, factor)
                verdict = outcome.get
            else:
                verdict = None
                self._on_streams(key, of.ptr, to.ptr, factor, target)
        except BaseException:
            lane.cancel(label, held)
            raise
        lane.end(label, held, (work,), verdict)
        return work

    # ---- Plans and their memory.

    def _plan(self, key: _Key, capturing: bool = False) -> _Plan:
        plan = self._plans.get(key)
        if plan is None:
            comm = self._comm
            if capturing:
                raise InvalidUsage(
                    "a call of this kind was not made before, and its memory can't be allocated while a CUDA graph is "
                    "captured: make the same call once before the capture",
                    op=key.name, rank=comm.rank,
                )  # fmt: skip
            plan = self._plans[key] = _Plan(key, comm, self._chunk, self._borrow)
            if len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def _borrow(self, nbytes: int) -> torch.Tensor:
        """Give scratch memory, which calls share: they run one after the other. It is kept until the end."""
        size = 1 << max(12, (nbytes - 1).bit_length())
        if size not in self._scratch:
            self._scratch[size] = torch.empty(size, dtype=torch.uint8, device=self._comm.device)
        return self._scratch[size]

    # ---- On the host.

    def _finish(self, meeting: _Meeting, key: _Key, inp: int, out: int, factor) -> None:
        """Do the steps of a call whose ranks have met, in this thread; those of other threads' calls wait for them."""
        meeting.check()
        with self._turn:
            self._make_steps(meeting, key, inp, out, factor)

    def _make_steps(self, meeting: _Meeting, key: _Key, inp: int, out: int, factor) -> None:
        label = meeting.label
        if self._dead is not None:
            raise InvalidUsage(
                f"the algorithms of this communicator are out of use since an earlier call failed: {self._dead}",
                op=label, rank=self._comm.rank, peers=self._dead.peers,
            )  # fmt: skip
        try:
            native = self._open(meeting)
            native.set_timeout(self._comm._timeout)
            plan = self._plan(key)
            if key.name == "all_gather" or not (inp | out) % ITEMSIZE[key.code]:
                plan.run(native, inp, out, factor)
            else:
                self._run_on_a_copy(plan, native, key, inp, out, factor)
        except BaseException as error:
            self._die(error, label)
            raise

    def _run_on_a_copy(self, plan: _Plan, native, key: _Key, inp: int, out: int, factor) -> None:
        """Run a plan for arrays that don't begin at a multiple of their elements' size, as the kernels need them to.

        This rank alone knows of it, and the ranks that have met can't be left waiting: so it is no error.
        """
        nbytes = key.count * ITEMSIZE[key.code]
        scatters = key.name == "reduce_scatter"
        copy = torch.empty(nbytes * (self._comm.size if scatters else 1), dtype=torch.uint8)
        begin = copy.data_ptr()
        result = begin + nbytes * self._comm.rank if scatters else begin
        ctypes.memmove(begin, inp, copy.numel())
        plan.run(native, begin, result, factor)
        ctypes.memmove(out, result, nbytes)

    def _queue_up(self, lane, handle: int, meeting: _Meeting, key, inp, out, factor) -> _Outcome:
        """Put a call into the communicator's queue."""
        comm = self._comm
        outcome = _Outcome()
        meeting.call(handle)
        queue = lane._queue
        ticket = queue.record()

        def steps():
            try:
                queue.done(ticket)  # raises what the ranks' meeting failed with
                self._finish(meeting, key, inp, out, factor)
            except CollectivesError as error:
                outcome.error = error
            except BaseException as error:
                outcome.error = InternalError(f"{type(error).__name__}: {error}", op=meeting.label, rank=comm.rank)
                outcome.error.__cause__ = error

        try:
            queue.call(steps)
        finally:
            # A message to oneself, of nothing: the calls that come after this one wait for its last step.
            _grouped(
                comm.engine.library, comm._native,
                (("send", 0, 0, 0, _INT64, comm.rank), ("recv", 0, 0, 0, _INT64, comm.rank)), (0,), handle,
            )  # fmt: skip
        return outcome

    def _open(self, meeting: _Meeting):
        """Give the communicator that carries the steps; the first call makes it, with the id that rank 0 sent along."""
        with self._lock:
            native = self._native
        if native is None:
            comm = self._comm
            native = another(comm, meeting.unique_id())
            with self._lock:
                self._native = native
                gone = self._closed
            if gone:
                native.abort()
                raise Aborted("the communicator was aborted", op=meeting.label, rank=comm.rank)
        return native

    def _die(self, error: BaseException, label: str) -> None:
        """After a failed step: the peers wait for steps that won't come, so tell them."""
        if isinstance(error, CollectivesError):
            error.op = label
            self._dead = error
        else:
            self._dead = InternalError(f"{type(error).__name__}: {error}", op=label, rank=self._comm.rank)
        self.abort(closing=False)

    # ---- On CUDA.

    def _on_streams(self, key: _Key, inp: int, out: int, factor, handle: int) -> None:
        comm = self._comm
        with self._lock, comm._guard():
            if self._streams is None:
                self._streams = torch.cuda.Stream(comm.device), torch.cuda.Stream(comm.device)
            transfers, kernels = self._streams
            outer = stream_from_address(handle, comm.device)
            capturing = is_capturing(outer)
            with torch.cuda.stream(kernels):  # whose memory a plan's is; it is let go of in that stream's order
                plan = self._plan(key, capturing)
            if capturing and plan not in self._kept:
                self._kept.append(plan)
            plan.run_on_streams(comm._native, inp, out, factor, outer, transfers, kernels, own_memory=capturing)

    # ---- The end.

    def pending(self):
        """Give what a step waits for now, or None."""
        native = self._native
        return native.pending() if self._comm._on_host and native is not None and native.handle else None

    def abort(self, closing: bool = True) -> None:
        """End the steps under way, from any thread. Called before the communicator's queue is drained."""
        with self._lock:
            self._closed = self._closed or closing
            native = self._native
        if self._comm._on_host and native is not None and native.handle:
            native.abort()

    def close(self) -> None:
        """Free everything; nothing may be in flight."""
        with self._lock:
            self._closed = True
            native = self._native
        if self._comm._on_host and native is not None and native.handle:
            native.destroy()
        self._plans.clear()
        self._kept.clear()
        self._scratch.clear()


def run_by(comm, algorithm: str, name: str, to: Place, of: Place, held, result, op, async_op, stream) -> Work | None:
    """Carry out a communicator's checked call by an algorithm of ours; `op`: as the caller gave it."""
    comm._alive(name)
    code, scalar = (0, None) if name == "all_gather" else comm._op(op, of.code, name)
    if comm._algorithms is None:
        comm._algorithms = Algorithms(comm, comm._policy.chunk)
    held = (*held, *map(memory_of, held)) if async_op else held
    return comm._algorithms.run(name, algorithm, to, of, code, scalar, held, result, async_op, stream)


class _Outcome:
    """How the steps in a queue ended."""

    __slots__ = ("error",)

    def __init__(self):
        self.error: CollectivesError | None = None

    def get(self) -> CollectivesError | None:
        return self.error


class _Meeting:
    """The beginning of a call on the host: every rank tells what it calls, in the order of the communicator's calls.

    A rank that calls something else, the native algorithm included, is found here by the engine or by `check`, before a
    step is made, so that the communicator stays usable.
    """

    def __init__(self, owner: Algorithms, label: str, words: tuple[int, ...]):
        comm = owner._comm
        self.comm = comm
        self.label = label
        self._words = words
        mine = [*words, *[0] * _ID_WORDS]
        self._mine = (ctypes.c_int64 * len(mine))(*mine)
        if owner._native is None and comm.rank == 0:
            unique_id = comm.engine.library.get_unique_id()
            ctypes.memmove(ctypes.addressof(self._mine) + 8 * _WORDS, unique_id, 8 * _ID_WORDS)
        self._all = (ctypes.c_int64 * (len(mine) * comm.size))()

    def call(self, stream: int) -> None:
        label = self.comm.engine.library.label
        name, _, algorithm = self.label.partition(" by ")
        label(f"{name} ({algorithm})", "row of the call")
        try:
            count = len(self._mine)
            self.comm._native.all_gather(
                ctypes.addressof(self._mine), ctypes.addressof(self._all), count, _INT64, stream
            )
        finally:
            label()

    def check(self) -> None:
        """Raise `Mismatch` unless all ranks told the same."""
        each = len(self._mine)
        compare([[tuple(self._all[r * each : r * each + _WORDS])] for r in range(self.comm.size)], self.comm.rank)

    def unique_id(self) -> bytes:
        return bytes(self._all)[8 * _WORDS : 8 * (_WORDS + _ID_WORDS)]


def _as_stored(value, code: int):
    """Give a premultiplied sum's factor as the array's dtype holds it, which is how the engines use it."""
    return torch.tensor(value, dtype=_TORCH[code]).item() if code in _FLOATING else value


def _grouped(library, native, ops, bases, stream: int) -> None:
    """Issue sends and receives as one; each is (method, number of its base, offset, count, dtype code, peer)."""
    run_grouped(
        library,
        [
            (getattr(native, method), (bases[base] + offset, count, code, peer, stream))
            for method, base, offset, count, code, peer in ops
        ],
    )


# ---- One call, prepared.

_BASES = {"in": 0, "out": 1}  # the rest lies in scratch
_SCRATCH, _TABLE = 2, 3


class _Kernel:
    """A reduction, ready to run but for the addresses of the caller's arrays and the factor."""

    __slots__ = ("after", "args", "base", "first", "kernel", "number", "offset", "scaled", "signals")

    def __init__(self, args, kernel, first: int, base: int, offset: int, scaled: bool, number: int, after: int):
        self.args = args
        self.first = first  # of its sources in the table
        self.kernel = kernel
        self.base = base
        self.offset = offset
        self.scaled = scaled
        self.number = number  # among the reductions, from 1
        self.after = after
        self.signals = False  # a transfer waits for it

    def run(self, bases, factor, device) -> None:
        self.args.sources = bases[_TABLE] + 8 * self.first
        self.args.out = bases[self.base] + self.offset
        if self.scaled and factor is not None:
            self.args.scale = factor
        run_kernel(self.kernel, self.args, device)


class _Messages:
    """A transfer, ready to issue."""

    __slots__ = ("after", "number", "ops", "signals")

    def __init__(self, ops, number: int, after: int):
        self.ops = ops
        self.number = number
        self.after = after
        self.signals = False


class _Plan:
    """A schedule with its memory: a call of one kind, for any arrays. Used by one call at a time.

    Partial sums are carried in fp32 for the narrower types, so that they are rounded once, at the end, on both
    algorithms.
    """

    def __init__(self, key: _Key, comm, chunk: int, borrow):
        self.device = comm.device
        self.library = comm.engine.library
        code, size = key.code, comm.size
        floating = code in _FLOATING
        wide = key.name != "all_gather" and floating and ITEMSIZE[code] < 4 and key.op not in _EXACT
        self._code = code
        self._sum_code = _F32 if wide else code
        self._factor_fills = key.scaled and not floating  # there is no kernel that scales integers: they are multiplied
        made = schedule(
            key.name, key.algorithm, rank=comm.rank, size=size, count=key.count, itemsize=ITEMSIZE[code], chunk=chunk,
            wide=wide, scaled=key.scaled, in_place=key.in_place,
        )  # fmt: skip
        self._lay_out(made, borrow)
        self._pad = None
        self._sources: list[tuple[int, int | None]] = []  # offset and its base, or an address and None
        self._tasks = []
        counts = [0, 0]
        for task in made.tasks:
            reduction = isinstance(task, Reduction)
            counts[reduction] += 1
            prepare = self._prepare_kernel if reduction else self._prepare_messages
            self._tasks.append(prepare(task, counts[reduction], key, size))
        self._fill_table()
        self._events = {}
        of_kind = {kind: [task for task in self._tasks if type(task) is kind] for kind in (_Messages, _Kernel)}
        for task in self._tasks:
            if task.after:
                of_kind[_Messages if type(task) is _Kernel else _Kernel][task.after - 1].signals = True

    def _lay_out(self, made: Schedule, borrow) -> None:
        """Place what is scratch: chunks of the array's dtype, then of the sums' dtype, then the factor's."""
        raw = -(-made.raw * ITEMSIZE[self._code] // 64) * 64
        wide = -(-made.wide * ITEMSIZE[self._sum_code] // 64) * 64
        fill = made.longest * ITEMSIZE[self._code] if self._factor_fills else 0
        self._longest = made.longest
        self._scratch = borrow(raw + wide + fill) if raw + wide + fill else None
        self._starts = {"raw": 0, "wide": raw}
        self._factor_at = raw + wide
        self._fill = fill

    def _locate(self, span) -> tuple[int, int, int]:
        """Give (number of its base, offset, dtype code) of a span."""
        code = self._sum_code if span.where == "wide" else self._code
        offset = span.start * ITEMSIZE[code]
        if span.where in _BASES:
            return _BASES[span.where], offset, code
        return _SCRATCH, self._starts[span.where] + offset, code

    def _prepare_messages(self, task, number: int, key, size) -> _Messages:
        ops = []
        for method, messages in (("send", task.sends), ("recv", task.recvs)):
            for peer, span in messages:
                base, offset, code = self._locate(span)
                ops.append((method, base, offset, span.count, code, peer))
        return _Messages(tuple(ops), number, task.after)

    def _prepare_kernel(self, task, number: int, key: _Key, size: int) -> _Kernel:
        sources = []
        for span in task.sources:
            base, address, source_code = self._locate(span)
            sources.append((address, base))
        base, offset, out_code = self._locate(task.out)
        op, scale = key.op, 1.0
        scaled = task.scaled
        if len(sources) == 1:
            op = _SUM
            if scaled and self._factor_fills:
                sources.append((self._factor_at, _SCRATCH))
                op, scaled = _PROD, False
        elif op == _AVG and not (task.final and len(sources) == size):
            op = _SUM
            if task.final and source_code in _FLOATING and not size & (size - 1):
                scale = 1.0 / size  # the same bits as the division
            elif task.final:
                # The kernel divides by the number of its sources: make it up with zeros, which change nothing.
                op = _AVG
                sources += [(self._zeros(source_code), None)] * (size - len(sources))
        first = len(self._sources)
        self._sources += sources
        args = abi.ReduceArgs(
            abi.Work(-(-task.out.count // TILE), 0, 0), 0, len(sources), 0, task.out.count, 0, scale, op,
            source_code, out_code, 0,
        )  # fmt: skip
        return _Kernel(args, kernel_of(source_code, out_code), first, base, offset, scaled, number, task.after)

    def _zeros(self, code: int) -> int:
        if self._pad is None:
            pad = torch.full((self._longest,), -0.0 if code in _FLOATING else 0, dtype=_TORCH[code])
            self._pad = self._sent(pad)  # -0.0 is what changes no sign
        return self._pad.data_ptr()

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a copy on the device, queued on the current stream."""
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _fill_table(self) -> None:
        """Make the table of the reductions' sources, which a call completes by the address of the caller's array."""
        scratch = 0 if self._scratch is None else self._scratch.data_ptr()
        fixed = [at + (scratch if base == _SCRATCH else 0) for at, base in self._sources]
        columns = [fixed, *([int(base in which) for _, base in self._sources] for which in ((0, 1), (_SCRATCH,)))]
        self._fixed, self._of_caller, self._of_scratch = self._sent(torch.tensor(columns, dtype=torch.int64)).unbind()
        self._table = torch.empty_like(self._fixed)

    def _bases(self, inp: int, out: int, scratch, table) -> tuple[int, int, int, int]:
        return inp, out, 0 if scratch is None else scratch.data_ptr(), table.data_ptr()

    def _begin(self, inp: int, factor, scratch, table) -> None:
        """Fill in what a call brings along: it takes one or two small kernels on a GPU, and no copy from the host."""
        if self._sources:
            torch.add(self._fixed, self._of_caller, alpha=inp, out=table)
            if scratch is not self._scratch:
                table.add_(self._of_scratch, alpha=scratch.data_ptr() - self._scratch.data_ptr())
        if self._fill:
            integers = {1: torch.int8, 4: torch.int32, 8: torch.int64}[ITEMSIZE[self._code]]
            into = scratch[self._factor_at : self._factor_at + self._fill].view(integers)
            bits = 8 * into.element_size()
            wrapped = (factor + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
            into.fill_(wrapped)

    def run(self, native, inp: int, out: int, factor) -> None:
        """Do everything in this thread, one task after the other."""
        bases = self._bases(inp, out, self._scratch, self._table)
        self._begin(inp, factor, self._scratch, self._table)
        for task in self._tasks:
            if type(task) is _Messages:
                _grouped(self.library, native, task.ops, bases, 0)
            else:
                task.run(bases, factor, self.device)

    def run_on_streams(self, native, inp, out, factor, outer, transfers, kernels, *, own_memory: bool = False) -> None:
        """Queue everything: transfers on one stream, kernels on the other, both after and before `outer`.

        `own_memory`: of the graph that is being captured, from its pool. It may be replayed on any stream, beside calls
        that use the plan's.
        """
        kernels.wait_stream(outer)
        # Calls share scratch, and an earlier one may have come from a stream that `outer` knows nothing of. Its kernels
        # must have read what the transfers now write, and the other way round.
        transfers.wait_stream(kernels)
        kernels.wait_stream(transfers)
        with torch.cuda.stream(kernels):
            scratch, table = self._scratch, self._table
            if own_memory:
                scratch = None if scratch is None else torch.empty_like(scratch)
                table = torch.empty_like(table)
            bases = self._bases(inp, out, scratch, table)
            self._begin(inp, factor, scratch, table)
            for task in self._tasks:
                message = type(task) is _Messages
                own = transfers if message else kernels
                if task.after:
                    own.wait_event(self._events[not message, task.after])
                if message:
                    _grouped(self.library, native, task.ops, bases, own.cuda_stream)
                else:
                    task.run(bases, factor, self.device)
                if task.signals:
                    event = self._events.get((message, task.number))
                    if event is None:
                        event = self._events[message, task.number] = torch.cuda.Event()
                    event.record(own)
            if own_memory:
                kernels.wait_stream(transfers)  # the memory goes back to the pool as this stream's
        outer.wait_stream(transfers)
        outer.wait_stream(kernels)
