"""Communicator operations on the simulated GPU: the host engine's numbers, and nothing to report."""

from __future__ import annotations

import torch

from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation


def all_reduce(ctx):
    comm = ctx.communicator()
    tensor = (torch.arange(10, dtype=torch.float32) + ctx.rank).to(ctx.device)
    with steps(ctx):
        comm.all_reduce(tensor)
        work = comm.all_reduce(tensor, async_op=True)
        work.wait()
        tensor.mul_(2)
    return tensor.tolist()


def test_all_reduce():
    assert run_ranks(all_reduce, 2, device="simulated") == run_ranks(all_reduce, 2)
