"""A peer's memory read and written by the kernel: a rank that dies meanwhile, arrays that are new in each call."""

from __future__ import annotations

import os
import signal
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
