"""send and recv: pairs, rings, all to all by hand, many to the same peer, to oneself, in the order of the calls."""

from __future__ import annotations

import pytest

from tests.buffers import memory_of
from tests.conformance.cases import Case, PreMulOps, Prepared, run_cases, sizes
from tests.conformance.worlds import WORLDS, check
from tests.oracle import DTYPES


def run_group(ctx, comm, cases, order=None) -> list[str]:
    """All cases in one group, posted in ``order`` (indices) or as they come."""
    memory = memory_of(ctx.engine)
    premul = PreMulOps([comm])
    prepared = [Prepared(case, comm, memory, premul, ctx.engine == "host") for case in cases]
    ctx.library.group_start()
    for i in order or range(len(prepared)):
        prepared[i].issue()
    ctx.library.group_end()
    memory.synchronize()
    found = [text for p in prepared for text in p.problems()]
    premul.destroy()
    return found


def pairs(ctx):
    """Every ordered pair, every type, blocking and one after the other."""
    n = ctx.size
    chunk = 4096 // 4
    cases = [
        Case("transfer", dtype, count, root=source, peer=(source + 1) % n, offset=DTYPES[dtype].itemsize)
        for dtype in DTYPES
        for source in range(n)
        for count in sizes(n, chunk)
    ]
    return run_cases(ctx, cases)


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_pairs(engine, n):
    check(pairs, engine, n)


def rings(ctx):
    n = ctx.size
    found = []
    for count in (0, 1, 97, 1023, 1024, 1025, 5000, 70_000):
        for step in {1, n - 1, n // 2}:
            cases = [Case("transfer", "float32", count, root=r, peer=(r + step) % n, seed=step + 1) for r in range(n)]
            found += run_group(ctx, ctx.comm(), cases)
            found += run_group(ctx, ctx.comm(), cases, order=list(reversed(range(n))))  # some ranks receive first
    return found


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_rings_in_a_group(engine, n):
    check(rings, engine, n)


def everyone_to_everyone(ctx):
    n = ctx.size
    found = []
    for count in (1, 1500):
        cases = [
            Case("transfer", "int64", count + source + target, root=source, peer=target, seed=2 + source * n + target)
            for source in range(n)
            for target in range(n)
        ]
        order = list(range(len(cases)))
        turned = order[ctx.rank * n :] + order[: ctx.rank * n]  # each rank begins somewhere else
        found += run_group(ctx, ctx.comm(), cases, turned)
    return found


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_everyone_to_everyone_and_oneself(engine, n):
    check(everyone_to_everyone, engine, n)


def several_to_one_peer(ctx):
    """Sends to the same peer match its receives in the order of the calls, in one group and one by one."""
    n = ctx.size
    counts = [5, 3000, 0, 1, 2049, 12]
    cases = [
        Case("transfer", "int32", count, root=source, peer=(source + 1) % n, seed=10 + i)
        for i, count in enumerate(counts)
        for source in range(n)
    ]
    return run_group(ctx, ctx.comm(), cases) + run_cases(ctx, cases)


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_several_to_one_peer_keep_their_order(engine, n):
    check(several_to_one_peer, engine, n)


def all_sends_before_all_receives(ctx):
    n = ctx.size
    memory = memory_of(ctx.engine)
    premul = PreMulOps([ctx.comm()])
    cases = [Case("transfer", "float32", 40_000, root=s, peer=t, seed=s + 9) for s in range(n) for t in range(n)]
    prepared = [Prepared(case, ctx.comm(), memory, premul, True) for case in cases]
    comm = ctx.comm()
    ctx.library.group_start()
    for p in prepared:
        if p.sends:
            comm.send(p.send.address, p.case.count, p.dtype.code, p.case.peer)
    for p in prepared:
        if p.receives:
            comm.recv(p.recv.address, p.case.count, p.dtype.code, p.case.root)
    ctx.library.group_end()
    memory.synchronize()
    return [text for p in prepared for text in p.problems()]


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_all_sends_before_all_receives_in_a_group(engine, n):
    check(all_sends_before_all_receives, engine, n)
