"""Recorder of a step: every operation on the simulated GPU, every kernel of ours, every call to NCCL, every wait."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import math
import traceback
from fractions import Fraction

from benchmarks import echo

BFLOAT16 = 15
COMPUTE = 0  # the default stream, on which the model computes
MADE = 2  # kMade of tests/streams/library/simulated.h
OVERWRITES = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")
RECORD, BLOCK, SYNC_EVENT, SYNC_STREAM, SYNC_DEVICE, ALLOCATE, OPERATION = 0, 1, 2, 3, 4, 8, 10
WHOLE = ("aten::_foreach_", "aten::split_with_sizes_copy", "aten::_chunk_cat")
QUERIES = (5, 6)  # of an event, of a stream
WIDTHS = (1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1)  # of c10's types; behind them are the 8-bit ones, and bfloat16
MEMORY = ("ncclMemAlloc", "ncclCommRegister", "ncclCommWindowRegister")
# torch's operations of process groups, by ours.
C10D = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "broadcast_": "broadcast", "alltoall_base_": "all_to_all",
}  # fmt: skip


@dataclasses.dataclass
class Counts:
    """What one step did. `moved`: bytes that operations of torch and kernels of ours read and write, by name; `wire`:
    bytes that this rank sends, as rings send them; `waits`: of the compute stream for events; `allocated`: by torch's
    allocator; `nccl_memory`: calls that allocate or register memory.
    """

    torch: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    nccl: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    moved: int = 0
    wire: Fraction = Fraction(0)
    host_waits: list = dataclasses.field(default_factory=list)
    waits: int = 0
    allocated: int = 0
    nccl_memory: collections.Counter = dataclasses.field(default_factory=collections.Counter)


def ring_bytes(function: str, whole: int, ranks: int) -> Fraction:
    """Return what a rank of a ring sends for an operation on `whole` bytes: of a gather the result's, of a
    reduce-scatter the argument's.
    """
    part = Fraction(whole * (ranks - 1), ranks)
    return {"all_reduce": 2 * part, "broadcast": Fraction(whole), "send": Fraction(whole)}.get(function, part)


def nbytes_of(access) -> int:
    """Return the bytes of a tensor's elements; of an expanded one those of its memory."""
    extent = access.high - access.low
    if access.dims > 4:
        return extent
    width = WIDTHS[access.dtype] if access.dtype < len(WIDTHS) else 2 if access.dtype == BFLOAT16 else 1
    return min(extent, math.prod(access.sizes[: access.dims]) * width)


def take_whole_operations(library) -> None:
    """Have torch's operations on lists of tensors be one operation each, as CUDA's kernels for them are."""
    import torch

    library.simulated_take.argtypes = [ctypes.c_char_p]
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(WHOLE) and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            library.simulated_take(name.removeprefix("aten::").encode())


class Recorder:
    """Counts while it is on. `start` it before torch is imported. `all_reduce_ranks`: of torch's next all-reduces,
    whose group the simulation doesn't see.
    """

    def __init__(self):
        self.counts: Counts | None = None
        self.all_reduce_ranks = 1
        self.failed = ""
        self._asked = 0

    def start(self, ranks: int) -> None:
        from tests.streams import device

        self._report = device.CALLBACK(self._guarded(self._reported))
        self._operation = echo.OPERATION(self._guarded(self._called))
        echo.start(ranks, self._report, self._operation)
        take_whole_operations(device.library)
        from collectives.kernels import cuda

        launch = cuda.launch

        def recorded(kernel, args, *rest, **options):
            self._launched(kernel, args)
            return launch(kernel, args, *rest, **options)

        cuda.launch = recorded

    def record(self, call) -> Counts:
        """Return what a call does."""
        self.counts, self._asked = (counts := Counts()), 0
        try:
            call()
        finally:
            self.counts = None
        if self.failed:
            raise RuntimeError(f"the recorder itself failed: {self.failed}")
        return counts

    def _guarded(self, function):
        def called(*arguments):
            try:
                return function(*arguments) or 0
            except BaseException:
                self.failed = traceback.format_exc()
                return 0

        return called

    # ---- What is reported.
    def _reported(self, kind, a, b, c, text, accesses, count) -> int:
        counts = self.counts
        if kind in QUERIES:  # in a step an event has mostly not completed: the GPU is behind
            self._asked += 1
            return int(counts is None or self._asked % 3 == 0)
        if counts is None:
            return 0
        if kind == OPERATION:
            self._operated(counts, a, b, c, text.decode(), accesses, count)
        elif kind == BLOCK:
            counts.waits += a == COMPUTE
        elif kind in (SYNC_EVENT, SYNC_STREAM, SYNC_DEVICE):
            counts.host_waits.append(echo.KINDS[kind])
        elif kind == ALLOCATE:
            counts.allocated += 1
        return 0

    def _operated(self, counts, stream, waits, made, name, accesses, count) -> None:
        space, _, short = name.partition("::")
        used = [(nbytes_of(accesses[at]), bool(accesses[at].writes)) for at in range(count)]
        if waits:
            counts.host_waits.append(name)
        if space == "c10d":
            if short in C10D and made != MADE:
                function = C10D[short]
                whole = sum(nbytes for nbytes, _ in used) if function == "all_reduce" else max(n for n, _ in used)
                least = min(nbytes for nbytes, _ in used)
                ranks = self.all_reduce_ranks if function in ("all_reduce", "broadcast") else whole // least
                counts.nccl[function] += 1
                counts.wire += ring_bytes(function, whole, ranks)
            return
        # In place, or into an argument (out=), which is reported once: it is read and written.
        in_place = short.endswith("_") or (made != MADE and all(writes for _, writes in used))
        twice = in_place and short not in OVERWRITES
        moved = sum(nbytes * (1 + (writes and twice)) for nbytes, writes in used)
        if short.startswith("_fused_adam"):  # of parameters, gradients and two states the gradients are not written
            moved = moved * 7 // 8
        counts.moved += moved
        counts.torch[short] += made != MADE

    def _launched(self, kernel, args) -> None:
        counts = self.counts
        if counts is None:
            return
        from tests.streams.kernels import uses_of, width

        uses = uses_of(args)
        updates = type(args).__name__ in ("AdamArgs", "SgdArgs")
        counts.moved += sum((high - low) * (1 + (writes and updates)) for low, high, writes, _ in uses)
        to = getattr(args, "to", None)
        if to is not None and to.residual:  # it is read, too
            counts.moved += to.count * width(to.residual_type)
        counts.kernels[kernel.name] += 1

    def call_of_torch(self, function: str, tensors, ranks: int) -> None:
        """Count a collective that a process group of this package's gets (`ways.EchoGroup`)."""
        if self.counts is not None:
            self.counts.nccl[function] += 1
            self.counts.wire += ring_bytes(function, sum(each.nbytes for each in tensors), ranks)

    def _called(self, function, count, itemsize, op, ranks, stream) -> None:
        counts, function = self.counts, function.decode()
        if counts is None:
            return
        if function in MEMORY:
            counts.nccl_memory[function] += 1
            return
        parts = ranks if function in ("all_gather", "reduce_scatter", "all_to_all") else 1
        counts.nccl[function] += 1
        counts.wire += ring_bytes(function, count * itemsize * parts, ranks)
