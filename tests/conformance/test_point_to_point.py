"""send and recv: pairs, rings, all to all by hand, many to the same peer, to oneself, in the order of the calls."""

from __future__ import annotations

import pytest

from tests.buffers import memory_of
from tests.conformance.cases import Case, PreMulOps, Prepared, run_cases, run_group, sizes
from tests.conformance.worlds import WORLDS, check
from tests.oracle import DTYPES


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


def in_groups(ctx):
    """Rings, everyone to everyone and to oneself, and several to one peer, which match in the order of the calls."""
    n, found = ctx.size, []
    for count in (0, 1, 97, 1023, 1024, 1025, 5000, 70_000):
        for step in {1, n - 1, n // 2}:
            cases = [Case("transfer", "float32", count, root=r, peer=(r + step) % n, seed=step + 1) for r in range(n)]
            found += run_group(ctx, [ctx.comm()], cases)
            found += run_group(ctx, [ctx.comm()], cases, order=list(reversed(range(n))))  # some ranks receive first
    for count in (1, 1500):
        cases = [
            Case("transfer", "int64", count + source + target, root=source, peer=target, seed=2 + source * n + target)
            for source in range(n)
            for target in range(n)
        ]
        order = list(range(len(cases)))
        turned = order[ctx.rank * n :] + order[: ctx.rank * n]  # each rank begins somewhere else
        found += run_group(ctx, [ctx.comm()], cases, turned)
    cases = [
        Case("transfer", "int32", count, root=source, peer=(source + 1) % n, seed=10 + i)
        for i, count in enumerate((5, 3000, 0, 1, 2049, 12))
        for source in range(n)
    ]
    return found + run_group(ctx, [ctx.comm()], cases) + run_cases(ctx, cases)


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_in_groups(engine, n):
    check(in_groups, engine, n)


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
