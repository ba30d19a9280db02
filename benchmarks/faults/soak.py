"""Soak: many operations of all kinds against a rank-ordered oracle, bit for bit; at the end the
process has the file descriptors, mappings and threads, and about the memory, of the beginning.

A trial is 1,000 operations a rank, on 2, 3, 4 or 7 ranks by its seed, all on communicators that are
opened for it, and split.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading

from benchmarks.faults.kills import shorten
from tests.conformance import cases as conformance
from tests.conformance.cases import PIECES, Case, run_cases
from tests.oracle import DTYPES, OPS
from tests.ranks import RankFailure, run_ranks

__all__ = ["make_cases", "run_trial"]

OPERATIONS = 1000
LIMIT = 300.0  # of a trial
SIZES = (0, 1, 2, 7, 64, 1000, 4096, 20_000, 100_000)
OFTEN = (4, 4, 4, 4, 8, 8, 8, 2, 1)  # the oracle takes most of the time, for long arrays
MORE_MEMORY = 64 << 20  # bytes that a process may hold more at the end, of allocators' caches


def make_cases(seed: int, ranks: int, count: int) -> list[Case]:
    """Return the operations of a seed, the same on all ranks."""
    draw = random.Random(seed)
    kinds = [kind for kind in PIECES if kind != "bcast"]

    def case(number: int) -> Case:
        kind, dtype = draw.choice(kinds), draw.choice(list(DTYPES))
        return Case(
            kind, dtype, draw.choices(SIZES, OFTEN)[0], op=draw.choice([*OPS, "premul"]) if "reduce" in kind else "sum",
            root=draw.randrange(ranks), peer=draw.randrange(ranks), inplace=draw.random() < 0.3 and kind != "transfer",
            seed=number,
        )  # fmt: skip

    return [case(number) for number in range(count)]


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row."""
    ranks = (2, 3, 4, 7)[seed % 4]
    row = {"trial": "soak", "seed": seed, "ranks": ranks, "operations": OPERATIONS, "wrong": []}
    try:
        results = run_ranks(take_part, ranks, seed, timeout=LIMIT)
    except RankFailure as failure:
        row["wrong"].append(f"a rank failed or hung: {shorten(failure)}")
        return row
    row["wrong"] += [f"rank {rank}: {text}" for rank, found in enumerate(results) for text in found]
    return row


def take_part(ctx, seed: int) -> list[str]:
    """One rank's part of a trial; return what is wrong."""
    cases = make_cases(seed, ctx.size, OPERATIONS)
    warm = ctx.new_comm()  # what is opened once for a process
    wrong = run_cases(ctx, cases[:50], warm)
    warm.destroy()
    before = measure_process()
    comm = ctx.new_comm()
    wrong += run_cases(ctx, cases[50:600], comm)
    child = comm.split(0, -ctx.rank)
    wrong += run_cases(ctx, make_cases(seed + 1, ctx.size, 100), child)
    child.destroy()
    wrong += run_cases(ctx, cases[600:], comm)
    comm.destroy()
    return wrong + compare(before, measure_process())


def measure_process() -> dict[str, int]:
    """Return how many descriptors, mappings and threads this process has, and its memory in bytes."""
    for cached in (conformance.made, conformance.reduced):  # the oracle's own
        getattr(cached, "cache_clear", lambda: None)()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/maps") as file:
        mappings = len(file.readlines())
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")), "mappings": mappings, "threads": threading.active_count(),
        "memory": resident,
    }  # fmt: skip


def compare(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return what a process has more than before."""
    more = {"descriptors": 0, "mappings": 64, "threads": 0, "memory": MORE_MEMORY}
    grown = [name for name in before if after[name] > before[name] + more[name]]
    return [f"{name}: {before[name]} before, {after[name]} after" for name in grown]
