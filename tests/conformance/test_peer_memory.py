"""A peer's memory read and written by the kernel: a rank that dies meanwhile, arrays that are new in each call."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import threading

import pytest
import torch

from collectives.errors import CollectivesError
from tests.ranks import Died, run_ranks

COUNT = 1 << 20  # floats of a rank: 8 MiB with two ranks, read by the kernel


def until_killed(ctx, operation):
    comm = ctx.new_communicator(timeout=30.0)
    mine, whole = torch.full((COUNT,), float(ctx.rank)), torch.zeros(ctx.size * COUNT)

    def call():
        if operation == "all_gather":
            comm.all_gather(whole, mine)
        else:
            comm.all_reduce(whole)

    call()
    if ctx.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(CollectivesError) as caught:
        while True:
            call()
    comm.abort()
    return type(caught.value).__name__, caught.value.peers


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_dies_while_it_is_used(n, operation):
    env = [{"COLLECTIVES_SHARE_AFTER": "0"}] * n  # its memory stays its own
    found = run_ranks(until_killed, n, operation, deaths=[1], fresh=True, env=env)
    assert found.pop(1) == Died(signal.SIGKILL, 0)
    assert all(name == "RemoteError" and 1 in peers for name, peers in found), found


def of_fresh_arrays(ctx):
    """Each call's arrays are new, and the last ones freed: what is read is of this call."""
    comm, wrong = ctx.communicator(), 0
    for step in range(60):
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


@pytest.mark.parametrize("n", [2, 3])
def test_arrays_of_each_call(n):
    assert run_ranks(of_fresh_arrays, n) == [0] * n


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
    comm.close()
    return bool((whole == ctx.size).all())


@pytest.mark.skipif(WRITEV is None, reason="numbers of system calls are known for two machines")
@pytest.mark.parametrize("n", [2, 3])
def test_a_filter_that_allows_reading_alone(n):
    found = run_ranks(may_not_write, n, fresh=True, env=[{"COLLECTIVES_SHARE_AFTER": "0"}] * n)
    assert found in ([True] * n, ["no filters here"] * n)
