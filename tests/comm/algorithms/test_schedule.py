"""The schedules of ring and direct: all ranks' tasks are run here in pure Python, in any order that they allow."""

from __future__ import annotations

import random

import pytest

from collectives.comm.algorithms.schedule import LINE, OPS, Reduction, Transfer, schedule, shard_bounds

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
given, settings = hypothesis.given, hypothesis.settings

COUNTS = st.one_of(st.integers(0, 70), st.integers(0, 3000), st.sampled_from([127, 128, 129, 997, 1009, 2048]))
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
SIZES = st.integers(1, 6)
CHUNKS = st.sampled_from([1, 64, 128, 192, 1024, 1 << 20])


@given(count=COUNTS, parts=st.integers(1, 9), itemsize=ITEMSIZES)
def test_pieces_cover_everything_in_order_and_lie_on_boundaries(count, parts, itemsize):
    bounds = shard_bounds(count, parts, itemsize)
    assert len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == count
    assert list(bounds) == sorted(bounds)
    for bound in bounds[:-1]:
        assert bound == count or bound * itemsize % 16 == 0
    longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    assert longest <= -(-count // parts) + 64 // itemsize
    if count * itemsize >= parts * 64 * 16:
        assert all(bound == count or bound * itemsize % LINE == 0 for bound in bounds)
        assert longest <= (count / parts) * 1.07 + 1


class Rank:
    """One rank's memory and where it is in its tasks. Elements are lists of (rank, index) that have been summed."""

    def __init__(self, op, rank, size, count, plan, in_place, memory=None):
        self.rank, self.plan, self.op = rank, plan, op
        self.memory = {"raw": [None] * plan.raw, "wide": [None] * plan.wide}
        if memory is not None:
            self.memory.update(memory)
        elif op == "all_reduce":
            self.memory["out"] = [[(rank, i)] for i in range(count)]
        else:
            given = [[(rank, i)] for i in range(count * size if op == "reduce_scatter" else count)]
            self.memory["in"] = given
            self.memory["out"] = [None] * (count if op == "reduce_scatter" else count * size)
            if op == "all_gather" and in_place:
                self.memory["out"][rank * count : (rank + 1) * count] = given
        self.transfers = [task for task in plan.tasks if isinstance(task, Transfer)]
        self.reductions = [task for task in plan.tasks if isinstance(task, Reduction)]
        self.done = [0, 0]
        self.sent: set = set()  # of the transfer that is under way
        self.got: set = set()

    def read(self, span):
        assert span.count > 0 and span.start >= 0
        values = self.memory[span.where][span.start : span.start + span.count]
        assert len(values) == span.count and None not in values, (span, "read before it was written")
        return list(values)

    def write(self, span, values):
        assert len(values) == span.count and span.start + span.count <= len(self.memory[span.where])
        self.memory[span.where][span.start : span.start + span.count] = values

    def current(self):
        """The transfer that may be under way now."""
        if self.done[0] == len(self.transfers):
            return None
        task = self.transfers[self.done[0]]
        return task if task.after <= self.done[1] else None

    def reduce(self, size) -> bool:
        if self.done[1] == len(self.reductions):
            return False
        task = self.reductions[self.done[1]]
        if task.after > self.done[0]:
            return False
        columns = [self.read(span) for span in task.sources]
        if task.scaled:
            assert len(columns) == 1
            columns = [[[("scaled", *term) for term in terms] for terms in columns[0]]]
        self.write(task.out, [[term for terms in row for term in terms] for row in zip(*columns, strict=True)])
        assert task.final == (task.out.where == "out")
        kinds = {span.where if span.where == "wide" else "array" for span in task.sources}
        assert len(kinds) == 1 or not self.wide  # a kernel takes sources of one dtype
        self.done[1] += 1
        return True

    def finish_transfer(self) -> bool:
        task = self.current()
        if task is None or len(self.sent) < len(task.sends) or len(self.got) < len(task.recvs):
            return False
        self.sent, self.got = set(), set()
        self.done[0] += 1
        return True


def simulate(op, algorithm, size, count, itemsize, chunk, seed, memories=None, **flags):
    """Run all ranks' tasks: a send waits for its receive, the parts of a group go side by side, and of what may happen
    next one thing is picked at random. `memories`: each rank's arrays, where they are not the usual ones."""
    in_place = flags.pop("in_place", False)
    ranks = []
    for r in range(size):
        plan = schedule(
            op, algorithm, rank=r, size=size, count=count, itemsize=itemsize, chunk=chunk, in_place=in_place, **flags
        )
        ranks.append(Rank(op, r, size, count, plan, in_place, memories and memories[r]))
        ranks[-1].wide = flags.get("wide", False)
    pick = random.Random(seed)

    def deliver(a):
        """Match one send of a rank with its receive. Messages of a pair are matched in the order they are posted."""
        task = ranks[a].current()
        if task is None:
            return False
        for i, (peer, span) in enumerate(task.sends):
            other = ranks[peer].current()
            if (
                i in ranks[a].sent
                or other is None
                or peer in {task.sends[j][0] for j in range(i) if j not in ranks[a].sent}
            ):
                continue
            for j, (source, place) in enumerate(other.recvs):
                if source == a and j not in ranks[peer].got:
                    assert place.count == span.count, "a send and its receive differ"
                    ranks[peer].write(place, ranks[a].read(span))
                    ranks[a].sent.add(i)
                    ranks[peer].got.add(j)
                    return True
        return False

    while True:
        moves = [(deliver, r) for r in range(size)]
        moves += [(lambda r: ranks[r].reduce(size), r) for r in range(size)]
        moves += [(lambda r: ranks[r].finish_transfer(), r) for r in range(size)]
        pick.shuffle(moves)
        if not any(move(r) for move, r in moves):
            break
    for rank in ranks:
        assert rank.done == [len(rank.transfers), len(rank.reductions)], "a deadlock"
    return ranks


def expected(op, size, count, rank, scaled):
    def term(r, i):
        return ("scaled", r, i) if scaled else (r, i)

    if op == "all_gather":
        return [[(r, i)] for r in range(size) for i in range(count)]
    start = rank * count if op == "reduce_scatter" else 0
    return [[term(r, start + i) for r in range(size)] for i in range(count)]


@settings(max_examples=120, deadline=None)
@given(
    op=st.sampled_from(OPS), algorithm=st.sampled_from(["ring", "direct"]), size=SIZES, count=COUNTS,
    itemsize=ITEMSIZES, chunk=CHUNKS, kind=st.sampled_from(["plain", "wide", "scaled", "both"]), in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_every_rank_gets_every_element_once(op, algorithm, size, count, itemsize, chunk, kind, in_place, seed):
    reduces = op != "all_gather"
    wide, scaled = reduces and kind in ("wide", "both"), reduces and kind in ("scaled", "both")
    if count * itemsize // chunk > 400:  # too long to simulate, and nothing new
        chunk = 1024
    ranks = simulate(
        op, algorithm, size, count, itemsize, chunk, seed, wide=wide, scaled=scaled, in_place=in_place and not reduces
    )
    for rank in ranks:
        got, want = rank.memory["out"], expected(op, size, count, rank.rank, scaled)
        if algorithm == "direct" or not reduces:
            assert got == want  # in rank order
        else:
            assert [sorted(terms) for terms in got] == want  # each rank's exactly once
    if algorithm == "ring" and reduces and size > 1:
        bounds = shard_bounds(count, size, itemsize) if op == "all_reduce" else None
        for rank in ranks:
            for i, terms in enumerate(rank.memory["out"]):
                piece = max(p for p in range(size) if bounds[p] <= i) if bounds else rank.rank
                order = [term[-2] for term in terms]
                assert order == [(piece + 1 + k) % size for k in range(size)]  # whatever the chunks are


BETWEEN = {"size": st.integers(2, 5), "itemsize": ITEMSIZES, "chunk": CHUNKS, "seed": st.integers(0, 2**32)}


@settings(max_examples=60, deadline=None)
@given(algorithm=st.sampled_from(["one-shot", "direct"]), count=COUNTS, separate=st.booleans(), **BETWEEN)
def test_reductions_between_nodes(algorithm, count, separate, size, itemsize, chunk, seed):
    chunk = max(chunk, 1024)
    memories = None
    if separate:
        memories = [{"in": [[(r, i)] for i in range(count)], "out": [None] * count} for r in range(size)]
    for rank in simulate("all_reduce", algorithm, size, count, itemsize, chunk, seed, memories, separate_out=separate):
        assert rank.memory["out"] == expected("all_reduce", size, count, 0, False)
        assert not separate or rank.memory["in"] == [[(rank.rank, i)] for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(algorithm=st.sampled_from(["one-shot", "direct"]), count=COUNTS, root=st.integers(0, 4), **BETWEEN)
def test_broadcasts_between_nodes(algorithm, count, root, size, itemsize, chunk, seed):
    root = min(root, size - 1)
    memories = [{"out": [[i] for i in range(count)] if r == root else [None] * count} for r in range(size)]
    ranks = simulate("broadcast", algorithm, size, count, itemsize, chunk, seed, memories, root=root)
    assert all(rank.memory["out"] == [[i] for i in range(count)] for rank in ranks)
    assert all(len(rank.transfers) <= (1 if algorithm == "one-shot" else 2) for rank in ranks)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 200), min_size=2, max_size=5), algorithm=st.sampled_from(["ring", "direct"]),
       seed=st.integers(0, 2**32))  # fmt: skip
def test_parts_of_different_sizes(counts, algorithm, seed):
    size, total = len(counts), sum(counts)
    begins = [sum(counts[:r]) for r in range(size)]
    memories = [{"in": [[(r, i)] for i in range(total)], "out": [None] * counts[r]} for r in range(size)]
    for r, rank in enumerate(simulate("reduce_scatter", algorithm, size, counts, 4, 256, seed, memories)):
        found = [sorted(terms) for terms in rank.memory["out"]]
        assert found == [[(s, begins[r] + i) for s in range(size)] for i in range(counts[r])]

    def gathered(r=None):  # the parts lie apart from each other, the last one first
        parts = [[[(s, i)] if r in (None, s) else None for i in range(n)] + [None] for s, n in enumerate(counts)]
        return [each for part in reversed(parts) for each in part]

    starts = [sum(n + 1 for n in counts[s + 1 :]) for s in range(size)]
    memories = [{"out": gathered(r)} for r in range(size)]
    ranks = simulate("all_gather", "direct", size, counts, 4, 256, seed, memories, in_place=True, starts=starts)
    assert all(rank.memory["out"] == gathered() for rank in ranks)


def test_inputs_are_left_alone():
    for op in ("reduce_scatter", "all_gather"):
        for algorithm in ("ring", "direct"):
            for rank in simulate(op, algorithm, 4, 100, 4, 64, 1):
                assert rank.memory["in"] == [[(rank.rank, i)] for i in range(len(rank.memory["in"]))]


@pytest.mark.parametrize(("algorithm", "messages"), [("ring", 2 * 7), ("direct", 2 * 7)])
def test_numbers_of_messages_and_of_bytes(algorithm, messages):
    """What docs/algorithms.md says of 8 ranks: each sends 2 (n-1)/n of the array, in steps of one piece."""
    plan = schedule("all_reduce", algorithm, rank=3, size=8, count=8192, itemsize=4, chunk=1 << 20)
    transfers = [task for task in plan.tasks if isinstance(task, Transfer)]
    assert sum(len(task.sends) for task in transfers) == messages == sum(len(task.recvs) for task in transfers)
    assert len(transfers) == (14 if algorithm == "ring" else 2)
    assert sum(span.count for task in transfers for _, span in task.sends) == 8192 * 14 // 8


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_scratch_does_not_grow_with_the_array(algorithm):
    small, large = (
        schedule("all_reduce", algorithm, rank=1, size=4, count=count, itemsize=2, chunk=1 << 14, wide=True)
        for count in (1 << 18, 1 << 22)
    )
    assert (small.raw, small.wide) == (large.raw, large.wide)


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_a_reduction_overlaps_the_next_transfer(algorithm):
    """With more than one chunk, a transfer doesn't wait for the reduction just before it."""
    plan = schedule("reduce_scatter", algorithm, rank=0, size=3, count=1 << 14, itemsize=4, chunk=1 << 13)
    done = 0
    waits = []
    for task in plan.tasks:
        if isinstance(task, Reduction):
            done += 1
        else:
            waits.append(done - task.after)
    assert len(waits) > 8 // 2 and all(slack >= 1 for slack in waits[1:]), waits


@pytest.mark.parametrize("break_it", ["after", "source"])
def test_the_simulation_can_fail(monkeypatch, break_it):
    """A schedule with no dependencies, or with a wrong shard, must not pass."""
    import collectives.comm.algorithms.schedule as module

    if break_it == "after":
        monkeypatch.setattr(module._ScheduleBuilder, "find_dependency", lambda self, kind, reads, writes: 0)
    else:
        real = module._ScheduleBuilder.array_span
        monkeypatch.setattr(
            module._ScheduleBuilder,
            "array_span",
            lambda s, w, shard, column: real(s, w, shard % max(1, s.size - 1), column),
        )
    wrong = 0
    for seed in range(10):
        try:
            for rank in simulate("all_reduce", "ring", 3, 500, 4, 64, seed):
                wrong += [sorted(terms) for terms in rank.memory["out"]] != expected("all_reduce", 3, 500, 0, False)
        except AssertionError:
            wrong += 1
    assert wrong
