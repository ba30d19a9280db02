"""Reading a peer's memory by the kernel: a rank that dies meanwhile, and arrays that are new in each call."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from collectives.errors import CollectivesError
from tests.ranks import Died, run_ranks

COUNT = 1 << 20  # floats of a rank: 8 MiB with two ranks, read by the kernel


def until_killed(ctx):
    comm = ctx.new_communicator(timeout=30.0)
    mine, whole = torch.full((COUNT,), float(ctx.rank)), torch.zeros(ctx.size * COUNT)
    comm.all_gather(whole, mine)
    if ctx.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(CollectivesError) as caught:
        while True:
            comm.all_gather(whole, mine)
    comm.abort()
    return type(caught.value).__name__, caught.value.peers


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_dies_while_it_is_read(n):
    found = run_ranks(until_killed, n, deaths=[1], fresh=True)
    assert found.pop(1) == Died(signal.SIGKILL, 0)
    assert all(name == "RemoteError" and 1 in peers for name, peers in found), found


def of_fresh_arrays(ctx):
    """Each call's arrays are new, and the last ones freed: what is read is of this call."""
    comm, wrong = ctx.communicator(), 0
    for step in range(60):
        mine = torch.full((COUNT // 4 + step,), float(100 * ctx.rank + step))
        whole = torch.empty(ctx.size * mine.numel())
        comm.all_gather(whole, mine)
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
