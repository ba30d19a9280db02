"""The ring and direct algorithms as data: who sends, receives and reduces what, and in which order.

Pure functions of rank, ranks and counts. A `Schedule` is a list of tasks of two kinds: a `Transfer` is a group of sends
and receives that go together, a `Reduction` is one kernel. Each kind runs in the order of the list; across the kinds a
task says how many of the other kind must have ended before it (`after`). So the list can be run as it stands by one
thread, or by two streams, which overlaps the reduction of one chunk with the transfer of the next one.

Units: counts and starts are elements. Sources: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009 (ring); R. Rabenseifner, "Optimization of collective reduction operations", 2004
(direct: reduce-scatter, then all-gather).
"""

from __future__ import annotations

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
    "piece_bounds",
    "schedule",
]

ALGORITHMS = ("native", "ring", "direct")
OPS = ("all_reduce", "reduce_scatter", "all_gather")
LINE = 64  # bytes of a cache line
DEPTH = 4  # chunks of a piece that a ring has under way
_PACK = 16  # bytes that a GPU loads at once
_MANY_LINES = 16  # lines of a piece from which on its bounds lie on lines: a sixteenth more for one rank, at most


class Span(NamedTuple):
    """A piece of memory. `where`: "in" and "out" are the caller's arrays (an all-reduce is in place, and has "out"
    only); "raw" and "wide" are scratch, of the array's dtype and of the dtype that sums are carried in."""

    where: str
    start: int
    count: int


class Transfer(NamedTuple):
    """Sends and receives that go together: pairs of a peer and a `Span`. None of them is empty."""

    sends: tuple[tuple[int, Span], ...]
    recvs: tuple[tuple[int, Span], ...]
    after: int = 0  # reductions that must have ended


class Reduction(NamedTuple):
    """Reduce `sources`, which have one dtype, in their order into `out`.

    `scaled`: multiply by this rank's factor of a premultiplied sum. `final`: `out` is the result, so that an average is
    divided here. A `Reduction` of one source casts or copies.
    """

    sources: tuple[Span, ...]
    out: Span
    scaled: bool = False
    final: bool = False
    after: int = 0  # transfers that must have ended


class Schedule(NamedTuple):
    """Tasks of one rank, and the elements of scratch that they use."""

    tasks: tuple[Transfer | Reduction, ...]
    raw: int
    wide: int
    longest: int  # elements of the longest reduction


def piece_bounds(count: int, parts: int, itemsize: int) -> tuple[int, ...]:
    """Cut `count` elements into `parts` pieces; give the `parts` + 1 bounds.

    Piece i is from bound i to bound i + 1. All bounds but the last lie on multiples of 64 bytes, of 16 bytes where the
    pieces are short; the last pieces may be shorter or empty.
    """
    unit = max(1, LINE // itemsize)
    if count < parts * unit * _MANY_LINES:
        unit = max(1, _PACK // itemsize)
    each = -(-count // (parts * unit)) * unit
    return tuple(min(i * each, count) for i in range(parts + 1))


def schedule(
    op: str, algorithm: str, *, rank: int, size: int, count: int, itemsize: int, chunk: int,
    wide: bool = False, scaled: bool = False, in_place: bool = False,
) -> Schedule:  # fmt: skip
    """Give one rank's tasks.

    `op`: one of `OPS`; `algorithm`: "ring" or "direct"; `count`: elements of the array in an all-reduce, and of one
    part otherwise; `itemsize`: bytes of an element; `chunk`: bytes of an array in one message, at most, and at least
    one line. `wide`: partial sums have another dtype than the array; `scaled`: it is a premultiplied sum; `in_place`:
    for all_gather, whether "in" is part `rank` of "out". All ranks must give the same but for `rank` and `in_place`.
    """
    plan = _Plan(op, rank, size, count, itemsize, chunk, wide, scaled)
    if op == "all_gather":
        (plan.ring_gather if algorithm == "ring" else plan.direct_gather)(in_place)
    elif size == 1:
        plan.alone()
    elif algorithm == "ring":
        plan.ring()
    else:
        plan.direct()
    return plan.finish()


class _Plan:
    """A schedule in the making. `scratch` slots have the length of a chunk each and are counted by kind."""

    def __init__(self, op, rank, size, count, itemsize, chunk, wide, scaled):
        self.op = op
        self.rank = rank
        self.size = size
        self.wide = wide
        self.scaled = scaled
        if op == "all_reduce":
            self.bounds = piece_bounds(count, size, itemsize)
        else:
            self.bounds = tuple(i * count for i in range(size + 1))
        line = max(1, LINE // itemsize)
        longest = self.bounds[1]
        self.chunk = max(line, min(chunk // itemsize // line * line, -(-longest // line) * line))
        self.columns = [(start, min(self.chunk, longest - start)) for start in range(0, longest, self.chunk)]
        self.slots = {"raw": 0, "wide": 0}
        self.tasks: list[Transfer | Reduction] = []
        self.done = [0, 0]  # transfers, reductions so far
        # Of every span by its beginning: the number of the last task of each kind that wrote it, and that read it.
        self.written: dict[tuple[str, int], list[int]] = {}
        self.seen: dict[tuple[str, int], list[int]] = {}

    # ---- Memory.

    def length(self, piece: int, column: tuple[int, int]) -> int:
        """Elements of a piece that lie in a column: one chunk's place in all pieces."""
        return max(0, min(column[1], self.bounds[piece + 1] - self.bounds[piece] - column[0]))

    def user(self, where: str, piece: int, column: tuple[int, int]) -> Span:
        """A piece's chunk in an array that holds all pieces; "in" is "out" where the operation is in place."""
        if self.op == "all_reduce":
            where = "out"
        return Span(where, self.bounds[piece] + column[0], self.length(piece, column))

    def result(self, column: tuple[int, int]) -> Span:
        """This rank's own piece of the result."""
        if self.op == "reduce_scatter":
            return Span("out", column[0], self.length(self.rank, column))
        return self.user("out", self.rank, column)

    def slot(self, kind: str, number: int, count: int) -> Span:
        self.slots[kind] = max(self.slots[kind], number + 1)
        return Span(kind, number * self.chunk, count)

    # ---- Tasks, with their dependencies across the two kinds.

    def after(self, kind: int, reads, writes) -> int:
        """Give how many tasks of the other kind come before; `kind`: 0 a transfer, 1 a reduction."""
        other = 1 - kind
        number = self.done[kind] = self.done[kind] + 1
        need = 0
        for span in reads:
            key = span[:2]
            need = max(need, self.written.get(key, (0, 0))[other])
            self.seen.setdefault(key, [0, 0])[kind] = number
        for span in writes:
            key = span[:2]
            need = max(need, self.written.get(key, (0, 0))[other], self.seen.get(key, (0, 0))[other])
            self.written.setdefault(key, [0, 0])[kind] = number
        return need

    def transfer(self, sends, recvs) -> None:
        sends = tuple((peer, span) for peer, span in sends if span.count)
        recvs = tuple((peer, span) for peer, span in recvs if span.count)
        if sends or recvs:
            after = self.after(0, [span for _, span in sends], [span for _, span in recvs])
            self.tasks.append(Transfer(sends, recvs, after))

    def reduce(self, sources, out: Span, scaled: bool = False, final: bool = False) -> None:
        if out.count:
            self.tasks.append(Reduction(tuple(sources), out, scaled, final, self.after(1, sources, (out,))))

    def load(self, source: Span, slot: int) -> Span:
        """Put this rank's own elements into a slot of the dtype that is summed in, times its factor."""
        span = self.slot("wide", slot, source.count)
        self.reduce((source,), span, scaled=self.scaled)
        return span

    # ---- The algorithms.

    def alone(self) -> None:
        for column in self.columns:
            self.reduce((self.user("in", 0, column),), self.result(column), self.scaled, final=True)

    def ring(self) -> None:
        for first in range(0, len(self.columns), DEPTH):
            columns = self.columns[first : first + DEPTH]
            self.ring_reduce(columns)
            if self.op == "all_reduce":
                for step in range(self.size - 1):
                    for column in columns:
                        self.pass_on(step, column)

    def ring_reduce(self, columns) -> None:
        """Pass partial sums on: piece p begins at rank p + 1, and is whole when it has come round to rank p."""
        size, rank = self.size, self.rank
        to, of = (rank + 1) % size, (rank - 1) % size
        partial, loads = 0, 2 * DEPTH  # slots: partial sums of even and odd steps, then own elements
        for step in range(size - 1):
            out_piece, in_piece = (rank - 1 - step) % size, (rank - 2 - step) % size
            for k, column in enumerate(columns):
                if step:
                    sent = self.slot("wide", partial + (step - 1) % 2 * DEPTH + k, self.length(out_piece, column))
                else:
                    sent = self.user("in", out_piece, column)
                    if self.scaled:
                        sent = self.load(sent, loads + k)
                place = self.slot("wide", partial + step % 2 * DEPTH + k, self.length(in_piece, column))
                own = self.user("in", in_piece, column)
                # What comes first is a neighbour's array itself, and not yet a sum.
                narrow = self.wide and not self.scaled and not step
                came = self.slot("raw", k, own.count) if narrow else place
                self.transfer([(to, sent)], [(of, came)])
                if self.scaled or (self.wide and not narrow):
                    own = self.load(own, loads + DEPTH + k) if own.count else own
                final = step == size - 2
                self.reduce((came, own), self.result(column) if final else place, final=final)

    def pass_on(self, step: int, column) -> None:
        """One step of a ring all-gather among the pieces of "out"."""
        size, rank = self.size, self.rank
        sent = self.user("out", (rank - step) % size, column)
        came = self.user("out", (rank - step - 1) % size, column)
        self.transfer([((rank + 1) % size, sent)], [((rank - 1) % size, came)])

    def direct(self) -> None:
        """All-to-all, reduce in rank order, all-gather. The next chunk is under way while one is reduced."""
        for k, column in enumerate(self.columns):
            self.direct_reduce(k % 2, column)
            if k and self.op == "all_reduce":
                self.direct_spread(self.columns[k - 1])
        if self.columns and self.op == "all_reduce":
            self.direct_spread(self.columns[-1])

    def direct_reduce(self, parity: int, column) -> None:
        size, rank = self.size, self.rank
        mine = [self.user("in", piece, column) for piece in range(size)]
        if self.scaled:
            mine = [self.load(span, (2 + parity) * size + i) if span.count else span for i, span in enumerate(mine)]
        kind = "wide" if self.scaled else "raw"
        came = [self.slot(kind, parity * size + peer, self.length(rank, column)) for peer in range(size)]
        others = [peer for peer in range(size) if peer != rank]
        self.transfer([(peer, mine[peer]) for peer in others], [(peer, came[peer]) for peer in others])
        sources = tuple(mine[rank] if peer == rank else came[peer] for peer in range(size))
        self.reduce(sources, self.result(column), final=True)

    def direct_spread(self, column) -> None:
        others = [peer for peer in range(self.size) if peer != self.rank]
        own = self.user("out", self.rank, column)
        self.transfer([(peer, own) for peer in others], [(peer, self.user("out", peer, column)) for peer in others])

    def ring_gather(self, in_place: bool) -> None:
        for column in self.columns:
            own = Span("in", *column)
            keep = [(self.rank, self.user("out", self.rank, column))] if not in_place else []
            if self.size == 1:
                self.transfer([(0, own)] if keep else [], keep)
            for step in range(self.size - 1):
                if step:
                    self.pass_on(step, column)
                    continue
                came = self.user("out", (self.rank - 1) % self.size, column)
                sends = [((self.rank + 1) % self.size, own), *((peer, own) for peer, _ in keep)]
                self.transfer(sends, [((self.rank - 1) % self.size, came), *keep])

    def direct_gather(self, in_place: bool) -> None:
        if not self.columns:
            return
        whole = (0, self.bounds[1])
        peers = [peer for peer in range(self.size) if peer != self.rank or not in_place]
        own = Span("in", *whole)
        self.transfer([(peer, own) for peer in peers], [(peer, self.user("out", peer, whole)) for peer in peers])

    def finish(self) -> Schedule:
        longest = max((task.out.count for task in self.tasks if isinstance(task, Reduction)), default=0)
        return Schedule(tuple(self.tasks), self.slots["raw"] * self.chunk, self.slots["wide"] * self.chunk, longest)
