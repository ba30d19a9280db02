"""Execution plan: a schedule with its memory and kernels, for any arrays of one size and dtype."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE, TORCH_DTYPES
from ...kernels import abi
from ...kernels.dtypes import FLOATING
from ...kernels.execution import run as run_kernel
from ...kernels.reduction import kernel_of
from ...layout import TILE
from ..group import run_grouped
from .schedule import Reduction, Schedule, schedule

__all__ = ["CallKey", "ExecutionPlan", "PlanCache", "issue_transfers", "round_to_dtype", "sums_in_fp32"]

_F32 = DTYPES["float32"]
_SUM, _PROD, _AVG = OPS["sum"], OPS["prod"], OPS["avg"]
_EXACT = (OPS["max"], OPS["min"])  # they round nothing, so they need no wider type for partial results

_MAX_PLANS = 128
_FEW_SOURCES = 32  # whose addresses are filled in by Python: torch needs 30 us for any number of them
_PADDED_BLOCK = 1 << 16  # elements of a reduction on the host that reads zeros, which then stay in a cache
_BASES = {"in": 0, "out": 1}  # indices of base addresses; all other spans are in scratch
_SCRATCH, _TABLE = 2, 3


class CallKey(NamedTuple):
    """All that a plan depends on, besides the communicator.

    `name`, `algorithm`, `count`, `in_place`, `separate_out`, `starts`, `root`: as in `schedule`;
    `code`: of the dtype; `op`: code of the reduction; `scaled`: whether it is a premultiplied sum;
    `out_code`: of the result's dtype, None for `code`; `average_over`: what an average divides by,
    None for the number of ranks.
    """

    name: str
    algorithm: str
    count: int | tuple[int, ...]
    code: int
    op: int = _SUM
    scaled: bool = False
    in_place: bool = False
    separate_out: bool = False
    starts: tuple[int, ...] | None = None
    root: int = 0
    out_code: int | None = None
    average_over: int | None = None


def round_to_dtype(value, code: int):
    """Return a premultiplied sum's factor rounded to the array's dtype, as the engines use it."""
    return torch.tensor(value, dtype=TORCH_DTYPES[code], device="cpu").item() if code in FLOATING else value


def sums_in_fp32(code: int, op: int) -> bool:
    """Return whether partial results are fp32: those of the narrower types, if the op rounds."""
    return code in FLOATING and ITEMSIZE[code] < 4 and op not in _EXACT


def issue_transfers(native, ops, bases, stream: int) -> None:
    """Issue sends and receives as one group.

    `native`: anything with send, recv and a library with groups; `ops`: tuples of (method, index in
    `bases`, offset in bytes, count, dtype code, peer).
    """
    run_grouped(
        native.library,
        [
            (getattr(native, method), (bases[base] + offset, count, code, peer, stream))
            for method, base, offset, count, code, peer in ops
        ],
    )


@dataclass(slots=True)
class KernelTask:
    """A reduction, ready to run except for the addresses of the caller's arrays and the factor.

    `launches`: (arguments, index of the first source in the table, offset of the result).
    """

    launches: list[tuple]
    kernel: Any
    base: int
    scaled: bool
    number: int  # among the reductions, from 1
    after: int
    signals: bool = False  # a transfer waits for its event

    def run(self, bases, factor, device, launch=None) -> None:
        for args, first_source, offset in self.launches:
            args.sources = bases[_TABLE] + 8 * first_source
            args.out = bases[self.base] + offset
            if self.scaled and factor is not None:
                args.scale = factor
            (launch or run_kernel)(self.kernel, args, device)


@dataclass(slots=True)
class TransferTask:
    """A group of sends and receives, ready to issue. `ops`: as in `issue_transfers`."""

    ops: tuple[tuple, ...]
    number: int
    after: int
    signals: bool = False  # a kernel waits for its event


class ExecutionPlan:
    """A schedule with its scratch memory, for all calls with one `CallKey`, on any arrays.

    One call uses it at a time. Partial sums are accumulated in fp32 for the narrower types, so that
    they are rounded once, at the end, by both algorithms. `get_scratch`: a function that returns
    scratch memory of so many bytes.
    """

    def __init__(
        self, key: CallKey, rank: int, size: int, device: torch.device, chunk: int,
        get_scratch: Callable[[int], torch.Tensor],
    ):  # fmt: skip
        self.device = device
        code = key.code
        wide = key.name in ("all_reduce", "reduce_scatter") and sums_in_fp32(code, key.op)
        self._code = code
        self._out_code = code if key.out_code is None else key.out_code
        self._sum_code = _F32 if wide else code
        # There is no kernel that scales integers: they are multiplied.
        self._factor_fills = key.scaled and code not in FLOATING
        made = schedule(
            key.name, key.algorithm, rank=rank, size=size, count=key.count, itemsize=ITEMSIZE[code], chunk=chunk,
            wide=wide, scaled=key.scaled, in_place=key.in_place, separate_out=key.separate_out, starts=key.starts,
            root=key.root,
        )  # fmt: skip
        self._allocate_scratch(made, get_scratch)
        self._pad = None
        self._sources: list[tuple[int, int | None]] = []  # offset and its base, or an address and None
        self._tasks = []
        counts = [0, 0]
        for task in made.tasks:
            reduction = isinstance(task, Reduction)
            counts[reduction] += 1
            prepare = self._prepare_kernel if reduction else self._prepare_transfer
            self._tasks.append(prepare(task, counts[reduction], key, size))
        self._build_source_table()
        self._events = {}
        of_kind = {kind: [task for task in self._tasks if type(task) is kind] for kind in (TransferTask, KernelTask)}
        for task in self._tasks:
            if task.after:
                of_kind[TransferTask if type(task) is KernelTask else KernelTask][task.after - 1].signals = True

    def _allocate_scratch(self, made: Schedule, get_scratch) -> None:
        """Lay out the scratch: chunks of the array's dtype, then of the sums' dtype, the factor."""
        raw = -(-made.raw * ITEMSIZE[self._code] // 64) * 64
        wide = -(-made.wide * ITEMSIZE[self._sum_code] // 64) * 64
        fill = made.longest * ITEMSIZE[self._code] if self._factor_fills else 0
        self._pad_count = min(made.longest, _PADDED_BLOCK) if self.device.type == "cpu" else made.longest
        self._scratch = get_scratch(raw + wide + fill) if raw + wide + fill else None
        self._starts = {"raw": 0, "wide": raw}
        self._factor_at = raw + wide
        self._fill = fill

    def _locate(self, span) -> tuple[int, int, int]:
        """Return (index of its base address, offset, dtype code) of a span."""
        code = {"wide": self._sum_code, "out": self._out_code}.get(span.where, self._code)
        offset = span.start * ITEMSIZE[code]
        if span.where in _BASES:
            return _BASES[span.where], offset, code
        return _SCRATCH, self._starts[span.where] + offset, code

    def _prepare_transfer(self, task, number: int, key, size) -> TransferTask:
        ops = []
        for method, messages in (("send", task.sends), ("recv", task.recvs)):
            for peer, span in messages:
                base, offset, code = self._locate(span)
                ops.append((method, base, offset, span.count, code, peer))
        return TransferTask(tuple(ops), number, task.after)

    def _prepare_kernel(self, task, number: int, key: CallKey, size: int) -> KernelTask:
        sources = []
        for span in task.sources:
            base, address, source_code = self._locate(span)
            sources.append((address, base))
        base, offset, out_code = self._locate(task.out)
        op, scale, count = key.op, 1.0, task.out.count
        scaled, block = task.scaled, count
        divisor = key.average_over or size
        if len(sources) == 1:
            op = _SUM
            if scaled and self._factor_fills:
                sources.append((self._factor_at, _SCRATCH))
                op, scaled = _PROD, False
        elif op == _AVG and not (task.final and len(sources) == divisor):
            op = _SUM
            if task.final and source_code in FLOATING and not divisor & (divisor - 1):
                scale = 1.0 / divisor  # the same bits as the division
            elif task.final:
                # The kernel divides by the number of its sources: zeros, which change nothing, are
                # added up to the divisor.
                op = _AVG
                sources += [(self._zero_source(source_code), None)] * (divisor - len(sources))
                block = min(count, self._pad_count)
        launches = []
        for start in range(0, count, block):
            first = len(self._sources)
            self._sources += [
                (at if origin is None else at + start * ITEMSIZE[source_code], origin) for at, origin in sources
            ]
            part = min(block, count - start)
            args = abi.ReduceArgs(
                abi.Work(-(-part // TILE), 0, 0), 0, len(sources), 0, part, 0, scale, op, source_code, out_code, 0
            )
            launches.append((args, first, offset + start * ITEMSIZE[out_code]))
        return KernelTask(launches, kernel_of(source_code, out_code), base, scaled, number, task.after)

    def _zero_source(self, code: int) -> int:
        """Return the address of an array of zeros that is as long as the longest launch."""
        if self._pad is None:
            zero = -0.0 if code in FLOATING else 0  # -0.0 changes no sign
            self._pad = self._to_device(torch.full((self._pad_count,), zero, dtype=TORCH_DTYPES[code], device="cpu"))
        return self._pad.data_ptr()

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, queued on the current stream."""
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _build_source_table(self) -> None:
        """Build the table of the reductions' sources; a call adds the address of its array."""
        scratch = 0 if self._scratch is None else self._scratch.data_ptr()
        fixed = [at + (scratch if base == _SCRATCH else 0) for at, base in self._sources]
        columns = [fixed, *([int(base in which) for _, base in self._sources] for which in ((0, 1), (_SCRATCH,)))]
        self._fixed, self._of_caller, self._of_scratch = self._to_device(
            torch.tensor(columns, dtype=torch.int64, device="cpu")
        ).unbind()
        self._table = torch.empty_like(self._fixed)
        self._last_input: int | None = None  # whose address is in the table, on the host
        self._words, self._fixed_words = None, fixed
        if self.device.type == "cpu" and len(fixed) <= _FEW_SOURCES:
            self._words = (ctypes.c_int64 * len(fixed)).from_address(self._table.data_ptr())

    def _bases(self, inp: int, out: int, scratch, table) -> tuple[int, int, int, int]:
        return inp, out, 0 if scratch is None else scratch.data_ptr(), table.data_ptr()

    def _fill_arguments(self, inp: int, factor, scratch, table) -> None:
        """Fill in a call's address and factor: at most 2 small kernels on a GPU, no host copy."""
        if self._words is not None and scratch is self._scratch:
            inputs = (0 if origin not in (0, 1) else inp for _, origin in self._sources)
            self._words[:] = [at + base for at, base in zip(self._fixed_words, inputs, strict=True)]
        elif self._sources:
            torch.add(self._fixed, self._of_caller, alpha=inp, out=table)
            if scratch is not self._scratch:
                table.add_(self._of_scratch, alpha=scratch.data_ptr() - self._scratch.data_ptr())
        if self._fill:
            integers = {1: torch.int8, 4: torch.int32, 8: torch.int64}[ITEMSIZE[self._code]]
            into = scratch[self._factor_at : self._factor_at + self._fill].view(integers)
            bits = 8 * into.element_size()
            wrapped = (factor + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
            into.fill_(wrapped)

    def run(self, native, inp: int, out: int, factor, launch: Callable | None = None) -> None:
        """Run the tasks in this thread, one after the other.

        `native`: as in `issue_transfers`; `launch`: runs a kernel, None: `kernels.execution.run`.
        """
        bases = self._bases(inp, out, self._scratch, self._table)
        if self._fill or self._last_input != inp:
            self._fill_arguments(inp, factor, self._scratch, self._table)
            self._last_input = inp
        for task in self._tasks:
            if type(task) is TransferTask:
                issue_transfers(native, task.ops, bases, 0)
            else:
                task.run(bases, factor, self.device, launch)

    def run_on_streams(self, native, inp, out, factor, outer, transfers, kernels, *, own_memory: bool = False) -> None:
        """Queue the tasks: transfers on one stream, kernels on the other, ordered with `outer`.

        Both are ordered after what `outer` has now, and before what it gets next. `own_memory`: use
        memory of the CUDA graph that is being captured, from its pool, since the graph may be
        replayed on any stream, concurrently with calls that use the plan's memory.
        """
        kernels.wait_stream(outer)
        # Calls share scratch, and an earlier one may have been ordered on a stream that `outer` has
        # not waited for. Its kernels must have read what the transfers now write, and the other way
        # round.
        transfers.wait_stream(kernels)
        kernels.wait_stream(transfers)
        with torch.cuda.stream(kernels):
            scratch, table = self._scratch, self._table
            if own_memory:
                scratch = None if scratch is None else torch.empty_like(scratch)
                table = torch.empty_like(table)
            bases = self._bases(inp, out, scratch, table)
            self._fill_arguments(inp, factor, scratch, table)
            for task in self._tasks:
                message = type(task) is TransferTask
                own = transfers if message else kernels
                if task.after:
                    own.wait_event(self._events[not message, task.after])
                if message:
                    issue_transfers(native, task.ops, bases, own.cuda_stream)
                else:
                    task.run(bases, factor, self.device)
                if task.signals:
                    event = self._events.get((message, task.number))
                    if event is None:
                        event = self._events[message, task.number] = torch.cuda.Event()
                    event.record(own)
            if own_memory:
                kernels.wait_stream(transfers)  # the memory returns to the pool as this stream's
        outer.wait_stream(transfers)
        outer.wait_stream(kernels)


class PlanCache:
    """The plans of one rank's calls, and the scratch memory that they share.

    `chunk`: bytes of one message, the same on all ranks. Calls must run one after the other.
    """

    def __init__(self, rank: int, size: int, device: torch.device, chunk: int):
        self._place = rank, size, device, chunk
        self._plans: OrderedDict[CallKey, ExecutionPlan] = OrderedDict()
        self._scratch: dict[int, torch.Tensor] = {}

    def __contains__(self, key: CallKey) -> bool:
        return key in self._plans

    def get(self, key: CallKey) -> ExecutionPlan:
        """Return the plan of a call, made at the first one; the plans used last are kept."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = ExecutionPlan(key, *self._place, self._get_scratch)
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def _get_scratch(self, nbytes: int) -> torch.Tensor:
        size = 1 << max(12, (nbytes - 1).bit_length())
        if size not in self._scratch:
            self._scratch[size] = torch.empty(size, dtype=torch.uint8, device=self._place[2])
        return self._scratch[size]

    def clear(self) -> None:
        """Free everything; nothing may be in flight."""
        self._plans.clear()
        self._scratch.clear()
