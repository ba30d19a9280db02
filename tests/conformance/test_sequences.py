"""Made sequences of calls and groups, the same on all ranks, compared with the oracle."""

from __future__ import annotations

import dataclasses
import random

import pytest

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

from tests.buffers import memory_of  # noqa: E402
from tests.conformance.cases import COLLECTIVES, REDUCTIONS, Case, PreMulOps, Prepared  # noqa: E402
from tests.conformance.worlds import SMALL_CHUNK, check  # noqa: E402
from tests.oracle import DTYPES, OPS  # noqa: E402

MAX_RANKS = 4
COMMS = 3  # all ranks twice, and half of them


@dataclasses.dataclass(frozen=True)
class Step:
    """Some calls, in one group or one by one. Each rank has its own streams for them: the NULL stream, two queues."""

    cases: tuple[Case, ...]
    grouped: bool
    stream: int
    shuffle: int  # how the calls of a group are posted on the ranks: a seed

    def stream_of(self, i: int, rank: int) -> int:
        return (self.stream + self.shuffle * (i * self.grouped + rank)) % 3


@st.composite
def a_case(draw):
    name = draw(st.sampled_from([*COLLECTIVES, "transfer"]))
    return Case(
        name,
        draw(st.sampled_from(list(DTYPES))),
        draw(st.one_of(st.integers(0, 20), st.sampled_from([97, 1023, 1024, 1025, 2048, 2049, 4096, 4097, 6000]))),
        op=draw(st.sampled_from([*OPS, "premul"])) if name in REDUCTIONS else "sum",
        root=draw(st.integers(0, MAX_RANKS - 1)),
        peer=draw(st.integers(0, MAX_RANKS - 1)),
        inplace=draw(st.booleans()) and name not in ("all_to_all", "transfer"),
        offset=draw(st.sampled_from([0, 1, 8, 16])),
        null=draw(st.booleans()),
        comm=draw(st.integers(0, COMMS - 1)),
        seed=draw(st.integers(1, 9)),
    )


steps = st.builds(
    Step,
    cases=st.lists(a_case(), min_size=1, max_size=5).map(tuple),
    grouped=st.booleans(),
    stream=st.integers(0, 2),
    shuffle=st.integers(0, 99),
)
programs = st.lists(steps, min_size=1, max_size=6)


def posting_order(step: Step, rank: int) -> list[int]:
    """Within a communicator the order of the calls is the same on all ranks; between communicators each has its own."""
    rng = random.Random(step.shuffle * 31 + rank)
    lanes = [[i for i, case in enumerate(step.cases) if case.comm == c] for c in range(COMMS)]
    order = []
    while any(lanes):
        order.append(rng.choice([lane for lane in lanes if lane]).pop(0))
    return order


def run_program(ctx, program):
    comms = communicators(ctx)
    memory, premul, queues = memory_of("host"), PreMulOps(comms), [ctx.library.queue_create() for _ in range(2)]
    streams = [0, *(queue.handle for queue in queues)]
    prepared: list[Prepared] = []
    for step in program:
        calls = []
        for case in step.cases:
            n = comms[case.comm].size
            case = dataclasses.replace(case, root=case.root % n, peer=case.peer % n)
            calls.append(Prepared(case, comms[case.comm], memory, premul, True))
            if case.op == "premul":
                premul.code(case.comm, calls[-1].dtype)
        prepared += calls
        order = posting_order(step, ctx.rank) if step.grouped else range(len(calls))
        if step.grouped:
            ctx.library.group_start()
        for i in order:
            case, stream = calls[i].case, streams[step.stream_of(i, ctx.rank)]
            to_oneself = not step.grouped and case.collective == "transfer" and case.root == case.peer
            if to_oneself:
                ctx.library.group_start()
            calls[i].issue(stream)
            if to_oneself:
                ctx.library.group_end()
        if step.grouped:
            ctx.library.group_end()
    for queue in queues:
        queue.wait(queue.record(), 30)
        queue.close()
    found = [text for p in prepared for text in p.problems()]
    premul.destroy()
    return found


def communicators(ctx):
    """Kept for the life of these processes."""
    key = (ctx.size, tuple(ctx.pids), ctx.comm().chunk_bytes())
    if key not in _kept:
        second = ctx.library.comm_init_rank(ctx.size, ctx.unique_id(), ctx.rank)
        _kept[key] = [ctx.comm(), second, ctx.comm().split(ctx.rank % 2, -ctx.rank)]
    return _kept[key]


_kept: dict = {}


@pytest.mark.parametrize(
    ("n", "examples", "chunk"),
    [
        (2, 30, None),
        (MAX_RANKS, 30, SMALL_CHUNK),
        pytest.param(3, 500, SMALL_CHUNK, marks=pytest.mark.thorough),
    ],
)
def test_sequences(n, examples, chunk):
    @hypothesis.settings(max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(programs)
    def same_as_the_oracle(program):
        check(run_program, "host", n, program, timeout=15, chunk=chunk)

    same_as_the_oracle()
