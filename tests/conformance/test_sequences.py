"""Made sequences of calls and groups, the same on all ranks, compared with the oracle."""

from __future__ import annotations

import dataclasses
import random

import pytest

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

from tests.buffers import memory_of  # noqa: E402
from tests.conformance.cases import COLLECTIVES, REDUCTIONS, Case, PreMulOps, Prepared  # noqa: E402
from tests.conformance.worlds import check  # noqa: E402
from tests.oracle import DTYPES, OPS  # noqa: E402

MAX_RANKS = 4
COMMS = 2


@dataclasses.dataclass(frozen=True)
class Step:
    """Some calls, in one group or one by one; ``stream`` 0 is the NULL stream, 1 and 2 are queues."""

    cases: tuple[Case, ...]
    grouped: bool
    stream: int
    shuffle: int  # how the calls of a group are posted on the ranks: a seed


@st.composite
def a_case(draw):
    name = draw(st.sampled_from([*COLLECTIVES, "transfer"]))
    return Case(
        name,
        draw(st.sampled_from(list(DTYPES))),
        draw(st.one_of(st.integers(0, 20), st.sampled_from([97, 1023, 1024, 1025, 4095, 4096, 4097, 6000]))),
        op=draw(st.sampled_from([*OPS, "premul"])) if name in REDUCTIONS else "sum",
        root=draw(st.integers(0, MAX_RANKS - 1)),
        peer=draw(st.integers(0, MAX_RANKS - 1)),
        inplace=draw(st.booleans()) and name not in ("all_to_all", "transfer"),
        offset=8 * draw(st.integers(0, 2)),
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
    n = ctx.size
    comms = communicators(ctx)
    memory, premul, queues = memory_of("host"), PreMulOps(comms), [ctx.library.queue_create() for _ in range(2)]
    prepared: list[Prepared] = []
    for step in program:
        stream = queues[step.stream - 1].handle if step.stream else 0
        calls = []
        for case in step.cases:
            case = dataclasses.replace(case, root=case.root % n, peer=case.peer % n)
            calls.append(Prepared(case, comms[case.comm], memory, premul, True))
            if case.op == "premul":
                premul.code(case.comm, calls[-1].dtype)
        prepared += calls
        if step.grouped:
            ctx.library.group_start()
            for i in posting_order(step, ctx.rank):
                calls[i].issue(stream)
            ctx.library.group_end()
            continue
        for call in calls:
            to_oneself = call.case.collective == "transfer" and call.case.root == call.case.peer
            if to_oneself:
                ctx.library.group_start()
            call.issue(stream)
            if to_oneself:
                ctx.library.group_end()
    for queue in queues:
        queue.wait(queue.record(), 30)
        queue.close()
    found = [text for p in prepared for text in p.problems()]
    premul.destroy()
    return found


def communicators(ctx):
    """Two of them, kept for the life of these processes."""
    key = (ctx.size, tuple(ctx.pids))
    if key not in _kept:
        _kept[key] = [ctx.comm(), ctx.library.comm_init_rank(ctx.size, ctx.unique_id(), ctx.rank)]
    return _kept[key]


_kept: dict = {}


@pytest.mark.parametrize("n, examples", [(2, 30), (MAX_RANKS, 30), pytest.param(3, 500, marks=pytest.mark.thorough)])
def test_sequences(n, examples):
    @hypothesis.settings(max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(programs)
    def same_as_the_oracle(program):
        check(run_program, "host", n, program, timeout=15)

    same_as_the_oracle()
