"""How communicators begin and end: init forms, split, shrink, destroy, abort, threads, many ranks."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.conformance.worlds import WORLDS, check, environment
from tests.rank_process import library_path, open_ranks
from tests.ranks import run_ranks

A_FEW = [Case("all_reduce", "float32", 1000, op="avg"), Case("all_gather", "int8", 5), Case("broadcast", "int64", 3)]


def work_on(ctx, comm, text) -> list[str]:
    return [f"{text}: {problem}" for problem in run_cases(ctx, A_FEW, comm)]


def init_forms(ctx):
    library, n, rank = ctx.library, ctx.size, ctx.rank
    found = []
    config = {"blocking": 1, "minCTAs": 1, "maxCTAs": 4}  # NCCL refuses a minimum without a maximum
    forms = {
        "rank": lambda: library.comm_init_rank(n, ctx.unique_id(), rank),
        "config": lambda: library.comm_init_rank(n, ctx.unique_id(), rank, config=config),
    }
    for name, init in forms.items():
        comm = init()
        if (comm.rank, comm.size) != (rank, n) or not comm.handle or comm.library is not library:
            found.append(f"{name}: says rank {comm.rank} of {comm.size}")
        found += work_on(ctx, comm, name)
        if comm.async_error() != 0:
            found.append(f"{name}: async error {comm.async_error()}")
        comm.destroy()
        if comm.handle:
            found.append(f"{name}: has a handle after destroy")
    return found


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_init_forms(engine, n):
    check(init_forms, engine, n)


def non_blocking(ctx):
    """blocking=0: init may return before the communicator is there; async_error says ncclInProgress (7) until it is."""
    comm = ctx.library.comm_init_rank(ctx.size, ctx.unique_id(), ctx.rank, config={"blocking": 0})
    end = time.monotonic() + 30
    while comm.async_error() == 7:
        if time.monotonic() > end:
            return ["still in progress after 30 s"]
        time.sleep(0.001)
    found = work_on(ctx, comm, "non-blocking")
    comm.destroy()
    return found


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def older_config(ctx):
    """Only as much of a config is read as its size field says, what lies behind it is poison; it has a magic number."""
    raw, comm, found = ctypes.CDLL(library_path(ctx.engine)), ctypes.c_void_p(), []
    raw.ncclGetLastError.restype = ctypes.c_char_p
    for magic, n in ((0x12345678, 1), (0xCAFEBEEF, ctx.size)):
        id_ = UniqueId.from_buffer_copy(ctx.unique_id() if n > 1 else ctx.library.get_unique_id())
        # ncclConfig_t as NCCL 2.14 had it, what an older client passes: size, magic, version, blocking.
        config = ctypes.create_string_buffer(struct.pack("<QIIi", 24, magic, 21400, 1).ljust(512, b"\xff"))
        code = raw.ncclCommInitRankConfig(ctypes.byref(comm), n, id_, ctx.rank if n > 1 else 0, config)
        text = (raw.ncclGetLastError(None) or b"").decode()
        if magic == 0xCAFEBEEF:
            found += [f"a config of 2.14 gives {code}: {text}"] * bool(code or raw.ncclCommDestroy(comm))
        elif code not in (4, 5) or "config" not in text.lower():
            found.append(f"a config without the magic gives {code}: {text}")
    return found


def threads_as_ranks(ctx, n):
    """n ranks as threads of each process: the world is all threads of all processes."""
    library = ctx.library
    unique_id = ctx.unique_id()
    total = n * ctx.size
    results: dict[int, list[str]] = {}

    def work(rank):
        try:
            comm = library.comm_init_rank(total, unique_id, rank)
            results[rank] = work_on(ctx, comm, f"thread rank {rank}")
            comm.destroy()
        except Exception as error:
            results[rank] = [f"thread rank {rank}: {error!r}"]

    threads = [threading.Thread(target=work, args=(ctx.rank * n + k,)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (
        [text for texts in results.values() for text in texts] if len(results) == n else ["a thread gave no result"]
    )


@pytest.mark.parametrize(("processes", "threads"), [(1, 5), (2, 3)])
def test_ranks_as_threads(processes, threads):
    check(threads_as_ranks, "host", processes, threads)


def splits(ctx):
    n, rank = ctx.size, ctx.rank
    found = []

    def expect(comm, members, text):
        if comm.size != len(members) or members[comm.rank] != rank:
            found.append(f"{text}: rank {rank} is {comm.rank} of {comm.size}, want {members}")
            return
        # The members' numbers in the parent, gathered in the part's own order.
        mine, got = np.array([rank], np.int32), np.full(comm.size, -1, np.int32)
        comm.all_gather(mine.ctypes.data, got.ctypes.data, 1, 2)
        if got.tolist() != members:
            found.append(f"{text}: members {got.tolist()}, want {members}")
        found.extend(work_on(ctx, comm, text))

    parent = ctx.new_comm()
    plain = parent.split(0, rank)
    expect(plain, list(range(n)), "one color")
    turned = parent.split(5, -rank)
    expect(turned, list(range(n))[::-1], "keys downward")
    equal_keys = parent.split(0, 0)
    expect(equal_keys, list(range(n)), "equal keys: order of the parent")
    odd_even = parent.split(rank % 2, n - rank)
    expect(odd_even, [r for r in range(n) if r % 2 == rank % 2][::-1], "odd and even")
    alone = parent.split(rank, 0)
    expect(alone, [rank], "each alone")
    without = parent.split(-1 if rank == 0 else 3, rank)  # NCCL_SPLIT_NOCOLOR
    if rank == 0:
        if without is not None:
            found.append(f"a rank with no color got {without!r}")
    else:
        expect(without, list(range(1, n)), "without rank 0")
    deeper = odd_even.split(0, 0)
    expect(deeper, [r for r in range(n) if r % 2 == rank % 2][::-1], "a part of a part")
    found.extend(work_on(ctx, parent, "the parent"))
    parent.destroy()  # parts live on
    expect(turned, list(range(n))[::-1], "after the parent's end")
    for comm in (plain, turned, equal_keys, odd_even, alone, without, deeper):
        if comm is not None:
            comm.destroy()
    return found


def splits_in_a_group(ctx):
    """Splits of two parents between group_start and group_end."""
    first, second = ctx.new_comm(), ctx.new_comm()
    ctx.library.group_start()
    a = first.split(0, ctx.rank)
    b = second.split(ctx.rank % 2, -ctx.rank)
    ctx.library.group_end()
    found = work_on(ctx, a, "first part") + work_on(ctx, b, "second part")
    for comm in (a, b, first, second):
        comm.destroy()
    return found


def shrinks(ctx, exclude):
    comm = ctx.new_comm()
    if ctx.rank in exclude:
        ctx.barrier()
        comm.destroy()
        return []
    smaller = comm.shrink(exclude)
    members = [r for r in range(ctx.size) if r not in exclude]
    found = []
    if (smaller.rank, smaller.size) != (members.index(ctx.rank), len(members)):
        found.append(f"rank {ctx.rank} is {smaller.rank} of {smaller.size}")
    found += work_on(ctx, smaller, "after the shrink")
    ctx.barrier()
    smaller.destroy()
    comm.destroy()
    return found


@pytest.mark.parametrize(("n", "exclude"), [(2, [0]), (4, [3, 0]), (7, [2, 4, 6])])
def test_shrink(n, exclude):
    check(shrinks, "host", n, exclude)


def destroyed_one_after_the_other(ctx):
    """A rank may end its communicator while the others are still working among themselves on another one."""
    whole, pair = ctx.new_comm(), ctx.new_comm()
    found = work_on(ctx, whole, "whole")
    if ctx.rank == 0:
        whole.destroy()
    found += work_on(ctx, pair, "pair")
    if ctx.rank != 0:
        whole.destroy()
    pair.destroy()
    return found


def destroyed_right_after_the_last_call(ctx):
    """The last collective's result reaches slow ranks although the fast ones have already left."""
    found = []
    for i in range(20):
        comm = ctx.new_comm()
        found += run_cases(ctx, [Case("all_reduce", "float32", 9000, seed=i)], comm)
        comm.destroy()
    return found


def named_ids(ctx):
    library = ctx.library
    name = b"job 17 of " + str(ctx.pids).encode()
    assert library.named_unique_id(name) == library.named_unique_id(name)
    assert library.named_unique_id(name) != library.named_unique_id(name + b"x")
    assert library.get_unique_id() != library.get_unique_id()
    comm = library.comm_init_rank(ctx.size, library.named_unique_id(name), ctx.rank)
    found = work_on(ctx, comm, "named id")
    comm.destroy()
    return found


def open_many(ctx):
    """Communicators come and go without leaving memory or descriptors behind."""
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    comm = ctx.new_comm()
    comm.destroy()
    ctx.barrier()
    before = descriptors(), ctx.library.memory_in_use()
    for _ in range(40):
        comm = ctx.new_comm()
        part = comm.split(ctx.rank % 2, 0)
        run_cases(ctx, A_FEW[:1], part)
        part.destroy()
        comm.destroy()
    ctx.barrier()
    after = descriptors(), ctx.library.memory_in_use()
    return [] if after == before else [f"rank {ctx.rank}: (descriptors, bytes) {before} before, {after} after"]


@pytest.mark.parametrize("n", [1, 3])
def test_nothing_is_left_of_closed_communicators(n):
    check(open_many, "host", n, chunk=None)


def smoke(ctx):
    comm = ctx.comm()
    x = np.full(5000, ctx.rank + 1.0, np.float32)
    for _ in range(3):
        comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, 7, 4)
    mine, got = np.array([ctx.rank], np.int32), np.zeros(ctx.size, np.int32)
    comm.all_gather(mine.ctypes.data, got.ctypes.data, 1, 2)
    good = np.allclose(x, (ctx.size + 1) / 2) and got.tolist() == list(range(ctx.size))
    return good


@pytest.mark.slow
@pytest.mark.thorough
def test_64_ranks():
    assert run_ranks(smoke, 64, timeout=150, fresh=True, env=environment("host")) == [True] * 64


def int8_average_of_many(ctx, n):
    """More ranks than the type can count: the divisor of an average must not be squeezed into the type."""
    library = ctx.library
    comms = open_ranks(library, n)
    found = []
    for name, storage, code in (("int8", np.int8, 0), ("uint8", np.uint8, 1)):
        xs = [np.array([1 if r < 100 else 0, 0], storage) for r in range(n)]
        library.group_start()
        for comm, x in zip(comms, xs, strict=True):
            comm.all_reduce(x.ctypes.data, x.ctypes.data, 2, code, 4)
        library.group_end()
        want = 0  # 100 / n, toward zero
        if any(x.tolist() != [want, 0] for x in xs):
            found.append(f"{name} average over {n} ranks: {xs[0].tolist()}")
    for comm in comms:
        comm.destroy()
    return found


@pytest.mark.parametrize("n", [128, 256])
def test_average_over_more_ranks_than_the_type_can_count(n):
    (found,) = run_ranks(int8_average_of_many, 1, n, timeout=60, env=environment("host"))
    assert not found, found


PROGRAMS = [
    (non_blocking, 1), (non_blocking, 3), (older_config, 1), (older_config, 2), (splits, 1), (splits, 2),
    (splits, 3), (splits, 5), (splits_in_a_group, 1), (splits_in_a_group, 3), (destroyed_one_after_the_other, 2),
    (destroyed_one_after_the_other, 4), (destroyed_right_after_the_last_call, 2),
    (destroyed_right_after_the_last_call, 7), (named_ids, 1), (named_ids, 3),
]  # fmt: skip


@pytest.mark.parametrize(("program", "n"), PROGRAMS, ids=lambda value: getattr(value, "__name__", None))
def test_life(program, n):
    check(program, "host", n)
