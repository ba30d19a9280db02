"""Schedules of the ring and direct algorithms: one rank's sends, receives and reductions.

Schedules are pure functions of rank, size and counts. A `Schedule` is a list of tasks of two kinds:
a `Transfer` is a group of sends and receives, a `Reduction` is one kernel. The tasks of each kind
run in the order of the list. A task's `after` is the number of tasks of the other kind that must
have ended before it. So one thread can run the list in its order, or two streams can, which
overlaps the reduction of one chunk with the transfer of the next one.

Every array is divided into one shard for each rank, and a shard into chunks, which are messages. A
column is the place of one chunk in all shards: (start, elements). Counts and starts are in
elements.

Between nodes there is a third algorithm, one-shot, for short arrays and for two ranks: each rank
sends its whole array to all others, and each rank reduces all of it, in rank order as direct does.
It is one step where direct takes two.

Sources: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009 (ring); R. Rabenseifner, "Optimization of collective reduction operations", 2004
(direct: reduce-scatter, then all-gather).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

__all__ = [
    "ALGORITHMS",
    "DEPTH",
    "LINE",
    "OPS",
    "Reduction",
    "Schedule",
    "Span",
    "Transfer",
    "shard_bounds",
    "schedule",
]

ALGORITHMS = ("native", "ring", "direct")
OPS = ("all_reduce", "reduce_scatter", "all_gather")
LINE = 64  # bytes of a cache line
DEPTH = 4  # chunks of a shard that a ring has in flight
_PACK = 16  # bytes that a GPU loads at once
_MANY_LINES = 16  # a shard of so many cache lines has bounds at line boundaries: at most 1/16 more for one rank


class Span(NamedTuple):
    """A range of elements in memory.

    `where`: "in" and "out" are the caller's arrays (an all-reduce in place and a broadcast have
    "out" only); "raw" and "wide" are scratch, of the array's dtype and of the dtype that sums are
    accumulated in.
    """

    where: str
    start: int
    count: int


class Transfer(NamedTuple):
    """Sends and receives of one group: pairs of a peer and a `Span`. None of them is empty."""

    sends: tuple[tuple[int, Span], ...]
    recvs: tuple[tuple[int, Span], ...]
    after: int = 0  # reductions that must have ended


class Reduction(NamedTuple):
    """A reduction of `sources`, which have one dtype, in their order into `out`.

    `scaled`: multiply by this rank's factor of a premultiplied sum. `final`: `out` is the result,
    so that an average is divided here. A `Reduction` of one source casts or copies.
    """

    sources: tuple[Span, ...]
    out: Span
    scaled: bool = False
    final: bool = False
    after: int = 0  # transfers that must have ended


class Schedule(NamedTuple):
    """Tasks of one rank, and the elements of scratch that they use of each kind."""

    tasks: tuple[Transfer | Reduction, ...]
    raw: int
    wide: int
    longest: int  # elements of the longest reduction


def shard_bounds(count: int, parts: int, itemsize: int) -> tuple[int, ...]:
    """Divide `count` elements into `parts` shards; return the `parts` + 1 bounds.

    Shard i is from bound i to bound i + 1. All bounds but the last are multiples of 64 bytes, of 16
    bytes where the shards are short; the last shards may be shorter or empty.
    """
    unit = max(1, LINE // itemsize)
    if count < parts * unit * _MANY_LINES:
        unit = max(1, _PACK // itemsize)
    each = -(-count // (parts * unit)) * unit
    return tuple(min(i * each, count) for i in range(parts + 1))


def schedule(
    op: str, algorithm: str, *, rank: int, size: int, count: int | Sequence[int], itemsize: int, chunk: int,
    wide: bool = False, scaled: bool = False, in_place: bool = False, separate_out: bool = False,
    starts: Sequence[int] | None = None, root: int = 0,
) -> Schedule:  # fmt: skip
    """Return one rank's schedule.

    `op`: one of `OPS`, or "broadcast" (direct and one-shot only); `algorithm`: "ring", "direct" or,
    for all_reduce and broadcast, "one-shot"; `count`: elements of the array in an all-reduce and a
    broadcast, and of one part otherwise, or a sequence with the elements of each rank's part;
    `itemsize`: bytes of an element; `chunk`: bytes of an array in one message, at most, and at
    least one line. `wide`: partial sums have another dtype than the array; `scaled`: it is a
    premultiplied sum; `in_place`: for all_gather, whether "in" is part `rank` of "out";
    `separate_out`: for all_reduce, whether the result goes to another array than the input's;
    `starts`: where the parts begin in the array that has them all, None for one behind the other;
    `root`: of a broadcast. All ranks must pass the same except for `rank`, `in_place` and `starts`.
    """
    builder = _ScheduleBuilder(op, algorithm, rank, size, count, itemsize, chunk, wide, scaled, separate_out, starts)
    if op == "all_gather":
        (builder.ring_all_gather if algorithm == "ring" else builder.direct_all_gather)(in_place)
    elif op == "broadcast":
        builder.broadcast(root)
    elif size == 1:
        builder.reduce_alone()
    elif algorithm == "ring":
        builder.ring()
    else:
        builder.direct()
    return builder.build()


class _ScheduleBuilder:
    """Builder of one rank's schedule.

    Scratch slots have the length of a chunk each and are counted by kind.
    """

    def __init__(self, op, algorithm, rank, size, count, itemsize, chunk, wide, scaled, separate_out, starts):
        self.op = op
        self.algorithm = algorithm
        self.rank = rank
        self.size = size
        self.wide = wide
        self.scaled = scaled
        self.input = "in" if op != "all_reduce" or separate_out else "out"
        if algorithm == "one-shot":  # the shards are the whole array
            self.starts, self.lengths = [0] * size, [count] * size
        else:
            if op in ("all_reduce", "broadcast"):
                self.lengths = [b - a for a, b in pairwise(shard_bounds(count, size, itemsize))]
            else:
                self.lengths = [count] * size if isinstance(count, int) else list(count)
            self.starts = list(accumulate(self.lengths[:-1], initial=0)) if starts is None else list(starts)
        line = max(1, LINE // itemsize)
        longest = max(self.lengths)
        self.chunk = max(line, min(chunk // itemsize // line * line, -(-longest // line) * line))
        self.columns = [(start, min(self.chunk, longest - start)) for start in range(0, longest, self.chunk)]
        self.slots = {"raw": 0, "wide": 0}
        self.tasks: list[Transfer | Reduction] = []
        self.done = [0, 0]  # transfers, reductions so far
        # By each span's start: the number of the last task of each kind that writes it, and that
        # reads it.
        self.last_writes: dict[tuple[str, int], list[int]] = {}
        self.last_reads: dict[tuple[str, int], list[int]] = {}

    # ---- Memory.

    def chunk_length(self, shard: int, column: tuple[int, int]) -> int:
        """Return the elements of a shard's chunk in a column."""
        return max(0, min(column[1], self.lengths[shard] - column[0]))

    def array_span(self, where: str, shard: int, column: tuple[int, int]) -> Span:
        """Return a shard's chunk in an array that holds all shards.

        "in" is "out" where the operation is in place.
        """
        if where == "in":
            where = self.input
        return Span(where, self.starts[shard] + column[0], self.chunk_length(shard, column))

    def result_span(self, column: tuple[int, int]) -> Span:
        """Return a chunk of this rank's own shard of the result."""
        if self.op == "reduce_scatter":
            return Span("out", column[0], self.chunk_length(self.rank, column))
        return self.array_span("out", self.rank, column)

    def scratch_span(self, kind: str, number: int, count: int) -> Span:
        """Return `count` elements in slot `number` of scratch of a kind."""
        self.slots[kind] = max(self.slots[kind], number + 1)
        return Span(kind, number * self.chunk, count)

    # ---- Tasks, with their dependencies across the two kinds.

    def find_dependency(self, kind: int, reads, writes) -> int:
        """Return how many tasks of the other kind must end before a new task.

        `kind`: 0 a transfer, 1 a reduction.
        """
        other = 1 - kind
        number = self.done[kind] = self.done[kind] + 1
        need = 0
        for span in reads:
            key = span[:2]
            need = max(need, self.last_writes.get(key, (0, 0))[other])
            self.last_reads.setdefault(key, [0, 0])[kind] = number
        for span in writes:
            key = span[:2]
            need = max(need, self.last_writes.get(key, (0, 0))[other], self.last_reads.get(key, (0, 0))[other])
            self.last_writes.setdefault(key, [0, 0])[kind] = number
        return need

    def transfer(self, sends, recvs) -> None:
        sends = tuple((peer, span) for peer, span in sends if span.count)
        recvs = tuple((peer, span) for peer, span in recvs if span.count)
        if sends or recvs:
            after = self.find_dependency(0, [span for _, span in sends], [span for _, span in recvs])
            self.tasks.append(Transfer(sends, recvs, after))

    def reduce(self, sources, out: Span, scaled: bool = False, final: bool = False) -> None:
        if out.count:
            self.tasks.append(Reduction(tuple(sources), out, scaled, final, self.find_dependency(1, sources, (out,))))

    def cast_and_scale(self, source: Span, slot: int) -> Span:
        """Copy own elements to a slot of the accumulation dtype, times this rank's factor."""
        span = self.scratch_span("wide", slot, source.count)
        self.reduce((source,), span, scaled=self.scaled)
        return span

    # ---- The algorithms.

    def reduce_alone(self) -> None:
        """Reduce with one rank."""
        for column in self.columns:
            self.reduce((self.array_span("in", 0, column),), self.result_span(column), self.scaled, final=True)

    def ring(self) -> None:
        """Reduce-scatter on a ring; for an all-reduce an all-gather follows."""
        for first in range(0, len(self.columns), DEPTH):
            columns = self.columns[first : first + DEPTH]
            self.ring_reduce_scatter(columns)
            if self.op == "all_reduce":
                for step in range(self.size - 1):
                    for column in columns:
                        self.ring_all_gather_step(step, column)

    def ring_reduce_scatter(self, columns) -> None:
        """Pass partial sums around the ring.

        Shard p starts at rank p + 1 and is complete at rank p.
        """
        size, rank = self.size, self.rank
        next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
        partial, own_slots = 0, 2 * DEPTH  # first slots of partial sums (of even, then odd steps), and of own elements
        for step in range(size - 1):
            out_shard, in_shard = (rank - 1 - step) % size, (rank - 2 - step) % size
            for k, column in enumerate(columns):
                if step:
                    sent = self.scratch_span(
                        "wide", partial + (step - 1) % 2 * DEPTH + k, self.chunk_length(out_shard, column)
                    )
                else:
                    sent = self.array_span("in", out_shard, column)
                    if self.scaled:
                        sent = self.cast_and_scale(sent, own_slots + k)
                place = self.scratch_span("wide", partial + step % 2 * DEPTH + k, self.chunk_length(in_shard, column))
                own = self.array_span("in", in_shard, column)
                # The first step receives a part of the neighbour's array, which is not a partial
                # sum yet.
                narrow = self.wide and not self.scaled and not step
                received = self.scratch_span("raw", k, own.count) if narrow else place
                self.transfer([(next_rank, sent)], [(previous_rank, received)])
                if self.scaled or (self.wide and not narrow):
                    own = self.cast_and_scale(own, own_slots + DEPTH + k) if own.count else own
                final = step == size - 2
                self.reduce((received, own), self.result_span(column) if final else place, final=final)

    def ring_all_gather_step(self, step: int, column) -> None:
        """Add one step of a ring all-gather among the shards of "out"."""
        size, rank = self.size, self.rank
        sent = self.array_span("out", (rank - step) % size, column)
        received = self.array_span("out", (rank - step - 1) % size, column)
        self.transfer([((rank + 1) % size, sent)], [((rank - 1) % size, received)])

    def direct(self) -> None:
        """All-to-all, reduce in rank order, all-gather; one-shot needs no all-gather.

        The next chunk is transferred while one is reduced.
        """
        gathers = self.op == "all_reduce" and self.algorithm == "direct"
        for k, column in enumerate(self.columns):
            self.direct_reduce_scatter(k % 2, column)
            if k and gathers:
                self.direct_all_gather_step(self.columns[k - 1])
        if self.columns and gathers:
            self.direct_all_gather_step(self.columns[-1])

    def direct_reduce_scatter(self, parity: int, column) -> None:
        size, rank = self.size, self.rank
        mine = [self.array_span("in", shard, column) for shard in range(size)]
        if self.scaled:
            mine = [
                self.cast_and_scale(span, (2 + parity) * size + i) if span.count else span
                for i, span in enumerate(mine)
            ]
        kind = "wide" if self.scaled else "raw"
        others = [peer for peer in range(size) if peer != rank]
        received = {
            peer: self.scratch_span(kind, parity * len(others) + i, self.chunk_length(rank, column))
            for i, peer in enumerate(others)
        }
        self.transfer([(peer, mine[peer]) for peer in others], [(peer, received[peer]) for peer in others])
        sources = tuple(mine[rank] if peer == rank else received[peer] for peer in range(size))
        self.reduce(sources, self.result_span(column), final=True)

    def direct_all_gather_step(self, column) -> None:
        others = [peer for peer in range(self.size) if peer != self.rank]
        own = self.array_span("out", self.rank, column)
        self.transfer(
            [(peer, own) for peer in others], [(peer, self.array_span("out", peer, column)) for peer in others]
        )

    def ring_all_gather(self, in_place: bool) -> None:
        for column in self.columns:
            own = Span("in", column[0], self.chunk_length(self.rank, column))
            keep = [(self.rank, self.array_span("out", self.rank, column))] if not in_place else []
            if self.size == 1:
                self.transfer([(0, own)] if keep else [], keep)
            for step in range(self.size - 1):
                if step:
                    self.ring_all_gather_step(step, column)
                    continue
                received = self.array_span("out", (self.rank - 1) % self.size, column)
                sends = [((self.rank + 1) % self.size, own), *((peer, own) for peer, _ in keep)]
                self.transfer(sends, [((self.rank - 1) % self.size, received), *keep])

    def direct_all_gather(self, in_place: bool) -> None:
        whole = (0, max(self.lengths))
        peers = [peer for peer in range(self.size) if peer != self.rank or not in_place]
        own = self.array_span("out", self.rank, whole) if in_place else Span("in", 0, self.lengths[self.rank])
        self.transfer([(peer, own) for peer in peers], [(peer, self.array_span("out", peer, whole)) for peer in peers])

    def broadcast(self, root: int) -> None:
        """Send each rank its shard from the root, then all shards to all ranks.

        One-shot needs the first step only.
        """
        whole = (0, max(self.lengths))
        shards = [self.array_span("out", shard, whole) for shard in range(self.size)]
        others = [peer for peer in range(self.size) if peer not in (self.rank, root)]
        own = shards[self.rank]
        if self.rank == root:
            self.transfer([(peer, shards[peer]) for peer in others], [])
        else:
            self.transfer([], [(root, own)])
        if self.algorithm == "direct":
            receives = [] if self.rank == root else [(peer, shards[peer]) for peer in (root, *others)]
            self.transfer([(peer, own) for peer in others], receives)

    def build(self) -> Schedule:
        longest = max((task.out.count for task in self.tasks if isinstance(task, Reduction)), default=0)
        return Schedule(tuple(self.tasks), self.slots["raw"] * self.chunk, self.slots["wide"] * self.chunk, longest)
