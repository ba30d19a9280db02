"""A peer's memory read and written by the kernel: a rank that dies meanwhile, arrays that are new in each call."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import signal
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from collectives.errors import CollectivesError, Mismatch
from tests.ranks import Died, run_ranks
from tests.stopping import give_up, outcome_of

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE = _SETTING.read_text() if _SETTING.exists() else ""
COUNT = 1 << 20  # floats of a rank: 8 MiB with two ranks, read by the kernel


def until_killed(ctx, operation):
    comm = ctx.new_communicator(timeout=30.0)
    mine, whole = torch.full((COUNT,), float(ctx.rank)), torch.zeros(ctx.size * COUNT)
    calls = {
        "all_gather": lambda: comm.all_gather(whole, mine),
        "all_reduce": lambda: comm.all_reduce(whole),
        "reduce_scatter": lambda: comm.reduce_scatter(mine, whole),
        "broadcast from it": lambda: comm.broadcast(mine, 1),
        "broadcast to it": lambda: comm.broadcast(mine, 0),
        "gather": lambda: comm.gather(whole if ctx.rank == 0 else None, mine, 0),
        "scatter": lambda: comm.scatter(mine, whole if ctx.rank == 1 else None, 1),
    }
    call = calls[operation]

    call()
    if ctx.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(CollectivesError) as caught:
        while True:
            call()
    comm.abort()
    return type(caught.value).__name__, caught.value.peers


DEATHS = ["all_gather", "all_reduce", "reduce_scatter", "broadcast from it", "broadcast to it", "gather", "scatter"]


@pytest.mark.parametrize(("n", "operation"), [(2 + i % 2, operation) for i, operation in enumerate(DEATHS)])
def test_a_rank_dies_while_it_is_used(n, operation):
    found = run_ranks(until_killed, n, operation, deaths=[1], fresh=True)
    assert found.pop(1) == Died(signal.SIGKILL, 0)
    assert all(name == "RemoteError" and 1 in peers for name, peers in found), found


def of_fresh_arrays(ctx):
    """Each call's arrays are new, and the last ones freed: what is read is of this call."""
    comm, wrong = ctx.communicator(), 0
    for step in range(30):
        mine = torch.full((COUNT // 4 + step,), float(100 * ctx.rank + step))
        whole = torch.empty(ctx.size * mine.numel())
        comm.all_gather(whole, mine)
        total = whole.clone()
        comm.all_reduce(total)
        wrong += not torch.equal(total, ctx.size * whole)
        want = torch.tensor([100.0 * rank + step for rank in range(ctx.size)]).repeat_interleave(mine.numel())
        wrong += not torch.equal(whole, want)
        out = torch.empty_like(whole)
        comm.all_to_all(out, whole)
        part = mine.numel()
        wrong += not torch.equal(out, whole[ctx.rank * part :][:part].repeat(ctx.size))
    return wrong


def test_arrays_of_each_call():
    assert run_ranks(of_fresh_arrays, 3) == [0] * 3


WRITEV = {"x86_64": 311, "aarch64": 271}.get(platform.machine())  # the system call's number


def forbid(number):
    """Have the system refuse a call of this thread, as a container's filter may."""
    # Four instructions of BPF: load the number, refuse if it is that one, allow the others.
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(text)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    return prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def may_not_write(ctx):
    if not forbid(WRITEV):
        return "no filters here"
    comm = ctx.new_communicator()
    whole = torch.ones(COUNT)
    comm.all_reduce(whole)
    mine = torch.full((COUNT,), float(ctx.rank))
    comm.broadcast(mine, 1)
    comm.close()
    return bool((whole == ctx.size).all() and (mine == 1).all())


@pytest.mark.skipif(WRITEV is None, reason="numbers of system calls are known for two machines")
@pytest.mark.parametrize("n", [2, 3])
def test_a_filter_that_allows_reading_alone(n):
    found = run_ranks(may_not_write, n, fresh=True)
    assert found in ([True] * n, ["no filters here"] * n)


def write_refused(ctx, operation):
    """Rank 1 may not write into the others' memory any more, after calls in which it did."""
    comm = ctx.new_communicator(timeout=20.0)
    whole = torch.zeros(ctx.size, COUNT // 2)
    mine = whole[ctx.rank]
    calls = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "broadcast": lambda: comm.broadcast(mine, 1),
        "gather": lambda: comm.gather(whole if ctx.rank == 0 else None, mine, 0),
        "scatter": lambda: comm.scatter(mine, whole if ctx.rank == 1 else None, 1),
    }
    call = calls[operation]
    call()
    if not all(ctx.exchange(ctx.rank != 1 or forbid(WRITEV))):
        return None
    outcome = outcome_of(call, CollectivesError)
    ctx.barrier()
    return outcome


@pytest.mark.skipif(WRITEV is None, reason="numbers of system calls are known for two machines")
@pytest.mark.parametrize(("n", "operation"), [(3, "all_reduce"), (2, "broadcast"), (3, "gather"), (3, "scatter")])
def test_nobody_succeeds_without_what_a_rank_could_not_write(n, operation):
    found = run_ranks(write_refused, n, operation, fresh=True)
    if None in found:
        pytest.skip("no filters here")
    assert found[:2] == ["RemoteError", "TransportError"], found
    if operation != "gather":  # of which rank 2 gets nothing
        assert set(found[2:]) <= {"RemoteError"}, found


def beside_one_that_must_not(ctx):
    comm = ctx.new_communicator(timeout=20.0)
    array = comm.empty(COUNT // 4) if ctx.rank == 0 else torch.empty(COUNT // 4)
    for call in range(2):
        if call and ctx.rank == 0 and not forbid(WRITEV):
            return "no filters here"
        array.fill_(ctx.rank + 5)
        comm.broadcast(array, 0)
    ctx.barrier()
    return bool((array == 5).all())


@pytest.mark.skipif(WRITEV is None, reason="numbers of system calls are known for two machines")
def test_no_rank_writes_by_the_kernel_where_one_must_not():
    """COLLECTIVES_CMA=0 on one rank counts for all, also where the root's array is shared memory."""
    env = [{"COLLECTIVES_CMA": "0"} if rank == 1 else {} for rank in range(3)]
    assert set(run_ranks(beside_one_that_must_not, 3, fresh=True, env=env)) <= {True, "no filters here"}


F32 = 7


def given_up_while_written(ctx, count):
    """Rank 0 receives a broadcast of which the root writes a half, runs out of time, and uses its array for
    something else while the root, which was stopped in the middle, goes on."""
    comm = ctx.new_comm()
    x = np.full(count, 1 + ctx.rank, np.float32)
    comm.broadcast(x.ctypes.data, x.ctypes.data, count, F32, 1)
    x[:] = 1 + ctx.rank
    ctx.barrier()

    def call():
        comm.broadcast(x.ctypes.data, x.ctypes.data, count, F32, 1)

    if ctx.rank:
        outcome = outcome_of(call)
        ctx.barrier()
        return outcome
    comm.set_timeout(1.5)
    outcome = give_up(ctx, call, lambda: x[count // 2 + 4096] != 1, lambda: x.fill(7))  # where rank 1 begins to write
    ctx.barrier()
    return outcome, int((x != 7).sum())


def test_given_up_while_written():
    (outcome, written), other = run_ranks(given_up_while_written, 2, 64 << 20, fresh=True)
    assert outcome == "CollectiveTimeout" and other == "RemoteError", (outcome, other)
    assert written <= 1 << 17, written  # the part of 512 KiB that it was in when it was stopped


def aborted_while_written(ctx, shared):
    """Once an aborted call has returned nobody writes to its array any more."""
    left = []
    for _ in range(3):
        comm = ctx.new_communicator(timeout=30.0)
        array = comm.empty(4 * COUNT) if shared else torch.empty(4 * COUNT)
        array.fill_(ctx.rank)
        comm.broadcast(array, 1)
        if ctx.rank == 0:
            threading.Timer(0.2, comm.abort).start()
        with pytest.raises(CollectivesError):
            while True:
                array[0] += 1  # what is written differs from what was there
                comm.broadcast(array, 1)
        array.fill_(-1)
        ctx.barrier()
        left.append(bool((array == -1).all()))
        comm.abort()
    return left


@pytest.mark.parametrize(("n", "shared"), [(2, False), (3, True)])
def test_aborted_while_written(n, shared):
    assert run_ranks(aborted_while_written, n, shared, fresh=True) == [[True] * 3] * n


def of_other_calls(ctx):
    """Ranks whose calls differ leave every array as it was, also those that a peer could write to."""
    comm = ctx.new_communicator(timeout=30.0)
    array = torch.full((COUNT,), float(ctx.rank))
    whole = [array.repeat(ctx.size) if ctx.rank == root else None for root in (0, 1)]
    for calls in (
        [lambda: comm.broadcast(array, 0), lambda: comm.broadcast(array, 1)],
        [lambda: comm.broadcast(array, 0), lambda: comm.broadcast(array[1:], 0)],
        [lambda: comm.gather(whole[0], array, 0), lambda: comm.scatter(array, whole[1], 1)],
    ):
        with pytest.raises(Mismatch):
            calls[min(ctx.rank, 1)]()
        assert (array == ctx.rank).all()
    comm.broadcast(array, 1)
    assert (array == 1).all()
    comm.close()


@pytest.mark.parametrize("n", [2, 3])
def test_calls_that_differ(n):
    run_ranks(of_other_calls, n)


def from_all_addresses(ctx):
    """Pieces around the sizes from which peers read and write, at odd addresses, by every root."""
    comm, wrong = ctx.new_communicator(), []
    for nbytes in (65_535, 65_536, 65_537, 131_072 + 4095, 300_001):
        for at in (0, 1, 63):
            whole = torch.empty(ctx.size * nbytes + at, dtype=torch.uint8)[at:]
            mine = torch.empty(nbytes + 7, dtype=torch.uint8)[7:]
            want = [(torch.arange(nbytes) * (3 + r)).to(torch.uint8) for r in range(ctx.size)]
            for root in range(ctx.size):
                mine.copy_(want[ctx.rank])
                comm.broadcast(mine, root)
                wrong += [] if torch.equal(mine, want[root]) else [("broadcast", nbytes, at, root)]
                mine.copy_(want[ctx.rank])
                whole.zero_()
                comm.gather(whole if ctx.rank == root else None, mine, root)
                good = torch.equal(whole, torch.cat(want)) if ctx.rank == root else not whole.any()
                wrong += [] if good else [("gather", nbytes, at, root)]
                whole.copy_(torch.cat(want[root:] + want[:root]))
                comm.scatter(mine, whole if ctx.rank == root else None, root)
                good = torch.equal(mine, want[(root + ctx.rank) % ctx.size])
                wrong += [] if good else [("scatter", nbytes, at, root)]
    comm.close()
    return wrong


@pytest.mark.parametrize("n", [2, 3])
def test_pieces_and_addresses(n):
    assert run_ranks(from_all_addresses, n, fresh=True) == [[]] * n


def huge_bytes(array):
    """Bytes of huge pages in the mappings that hold an array."""
    first, found, inside = array.data_ptr(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        border = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if border:
            inside = int(border[1], 16) < first + array.nbytes and int(border[2], 16) > first
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


def sent_beside_a_fork(ctx, forks):
    """How much of the root's array comes into huge pages, where a forked process may have it, too."""
    comm = ctx.new_communicator()
    private = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = torch.frombuffer(private, dtype=torch.uint8)
    array.fill_(1)
    before = huge_bytes(array)
    child = os.fork() if forks else None
    if child == 0:
        signal.pause()
    for _ in range(40):
        comm.broadcast(array, 0)
    more = huge_bytes(array) - before
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    comm.close()
    return more


@pytest.mark.skipif("[never]" in _HUGE or not _HUGE, reason="no transparent huge pages here")
def test_what_a_forked_process_has_too_is_not_taken_twice():
    alone, forked = (run_ranks(sent_beside_a_fork, 2, forks, fresh=True)[0] for forks in (False, True))
    if not alone:
        pytest.skip("the system makes no huge page on demand")
    # The peer's reading has given the root a page of its own for each that it has read, a half of the array.
    assert alone >= 12 << 20 and forked <= 8 << 20, (alone, forked)
