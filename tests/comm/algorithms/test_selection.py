"""Which algorithm a call uses, and the settings on which a communicator's ranks agree when it is opened."""

from __future__ import annotations

import os

import pytest
import torch

from collectives._nccl import OPS
from collectives.comm.algorithms.schedule import ALGORITHMS
from collectives.comm.algorithms.selection import allowed_algorithms
from collectives.errors import InvalidArgument, InvalidUsage, Mismatch
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation


@pytest.mark.parametrize("engine", ["host", "nccl"])
def test_the_default_is_native_and_in_rank_order_where_that_is_asked_for(engine):
    ordered = {"host": ("native", "direct"), "nccl": ("direct",)}[engine]
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        for name, code in OPS.items():
            assert allowed_algorithms(op, code, engine, 4, False) == ALGORITHMS
            assert allowed_algorithms(op, code, engine, 1, True) == ALGORITHMS
            exact = op == "all_gather" or name in ("max", "min")
            assert allowed_algorithms(op, code, engine, 4, True) == (ALGORITHMS if exact else ordered)


def in_rank_order(ctx):
    """On a simulated GPU: the bits of the sum in rank order by default, and nothing else is taken."""
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(ctx.size)]
    total = sum(values[1:], values[0].clone())
    with ctx.new_communicator(deterministic=True) as comm, comm.split(0) as child:
        for each in (comm, child):
            assert each.deterministic
            x = values[ctx.rank].to(ctx.device)
            each.all_reduce(x)
            assert torch.equal(x.cpu(), total) and each._algorithms is not None
            part = torch.empty(1000, device=ctx.device)
            each.reduce_scatter(part, values[ctx.rank].repeat(ctx.size).to(ctx.device), async_op=True).wait()
            assert torch.equal(part.cpu(), total)
            for algorithm in ("native", "ring"):
                for options in ({}, {"async_op": True}, {"op": "avg"}):
                    with pytest.raises(InvalidUsage, match=f"'{algorithm}' doesn't reduce in rank order.*'direct'"):
                        each.all_reduce(x, algorithm=algorithm, **options)
            with pytest.raises(InvalidUsage, match="'direct', the default with deterministic=True, is several steps"):
                with each.group():
                    each.all_reduce(x)
        calls = len(comm._algorithms._plans._plans)
        largest = torch.full((3,), float(ctx.rank), device=ctx.device)
        gathered = torch.empty(3 * ctx.size, device=ctx.device)
        for _ in range(2):
            comm.all_reduce(largest, "max")  # exact in any order: by the library
            comm.all_gather(gathered, largest)
        with comm.group():
            comm.all_reduce(largest, "min")
            comm.all_gather(gathered, largest)
        assert gathered.eq(ctx.size - 1).all() and len(comm._algorithms._plans._plans) == calls


@needs_simulation
def test_deterministic_on_nccl():
    run_ranks(in_rank_order, 3, device="simulated")


def opened(ctx, chunks, **options):
    """The bytes of a message of a new communicator and of its child; `chunks`: each rank's variable."""
    os.environ["COLLECTIVES_CHUNK"] = chunks[ctx.rank]
    try:
        with ctx.new_communicator(**options) as comm, comm.split(0) as child:
            assert child._chunk == comm._chunk
            return comm._chunk
    finally:
        del os.environ["COLLECTIVES_CHUNK"]


def test_the_bytes_of_a_message_are_rank_0s():
    assert run_ranks(opened, 2, ["4096", "nonsense"]) == [4096] * 2
    assert run_ranks(opened, 2, ["", "4096"]) == [256 << 10] * 2


def unlike(ctx):
    for wrong in ("63", "1e6", "-1"):
        with pytest.raises(InvalidArgument, match=f"COLLECTIVES_CHUNK={wrong}: must be") as caught:
            opened(ctx, [wrong, "", ""])
        assert caught.value.rank == ctx.rank and caught.value.op == "init"
    with pytest.raises(Mismatch, match=f"deterministic={ctx.rank == 1} here") as caught:
        ctx.new_communicator(deterministic=ctx.rank == 1)
    return caught.value.peers


def test_what_is_wrong_is_raised_on_all_ranks():
    assert run_ranks(unlike, 3) == [(1,), (0, 2), (1,)]
