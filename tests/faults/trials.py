"""What the kinds of fault trials have in common: how their ranks are run, where they are, and what they call."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from tests.hosts import apart
from tests.rank_process import bind_submodules
from tests.ranks import RankFailure, run_ranks

__all__ = ["OPS", "SOON", "Arrays", "make_call", "on_machines", "open_comm", "run_on_ranks", "wrong_sum"]

SOON = 5.0  # seconds in which an error has come: what is promised
OPS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "ring", "barrier")


def run_on_ranks(take_part, plan: SimpleNamespace, *args, **how) -> tuple[dict, list]:
    """Run a plan's trial; return its row, whose "wrong" has what ranks have found, and the results: none after a hang.

    `take_part`: one rank's part, which returns a dictionary with what it has found "wrong". `how`: as `run_ranks` has.
    """
    row = {**vars(plan), "wrong": []}
    try:
        results = run_ranks(take_part, plan.ranks, plan, *args, **how)
    except RankFailure as failure:
        text = str(failure)
        shown = text if len(text) < 8000 else f"{text[:5000]}\n...\n{text[-3000:]}"
        row["wrong"].append(f"a rank failed or hung: {shown}")
        return row, []
    for rank, found in enumerate(results):
        if isinstance(found, dict):  # and not one that was to die
            row["wrong"] += [f"rank {rank}: {text}" for text in found["wrong"]]
    return row, results


# ---- On each rank.


@contextlib.contextmanager
def on_machines(ctx, machines: str):
    """Let the ranks open communicators on such machines, "" for one, in processes that have opened others before."""
    import collectives.rendezvous.world as world

    bind_submodules()
    world._generation, world._world = 0, None
    with apart(ctx, machines) if machines else contextlib.nullcontext():
        yield


def open_comm(ctx, machines: str, seconds: float = 60.0, unique_id: bytes | None = None, **options):
    """Open a communicator of all ranks within some seconds; `unique_id`: of ranks that have exchanged it before."""
    import collectives
    from collectives.comm.engine import get_engine

    if machines:
        return collectives.init(timeout=seconds)
    engine = get_engine("host")
    engine.library.set_init_timeout(seconds)
    try:
        options |= {"device": "cpu", "local_rank": ctx.rank, "local_size": ctx.size}
        return collectives.Communicator(engine, unique_id or ctx.unique_id(), ctx.rank, ctx.size, **options)
    finally:
        engine.library.set_init_timeout(60.0)


def wrong_sum(comm) -> list[str]:
    """Sum over the ranks; return what is wrong with that."""
    x, total = torch.full((1000,), float(comm.rank + 1)), comm.size * (comm.size + 1) / 2
    comm.all_reduce(x)
    return [] if set(x.tolist()) == {total} else [f"a wrong sum: {x[:4]} and not {total}"]


@dataclass
class Arrays:
    """A rank's part and all ranks' parts, to send and to receive into."""

    mine: torch.Tensor
    every: torch.Tensor
    part_out: torch.Tensor
    every_out: torch.Tensor


def make_call(comm, op: str, arrays: Arrays, root: int, **options):
    """Return one of OPS as a function."""

    def ring() -> None:
        with comm.group():
            comm.send(arrays.mine, (comm.rank + 1) % comm.size)
            comm.recv(arrays.part_out, (comm.rank - 1) % comm.size)

    return {
        "all_reduce": lambda: comm.all_reduce(arrays.mine, **options),
        "reduce": lambda: comm.reduce(arrays.mine, root, **options),
        "reduce_scatter": lambda: comm.reduce_scatter(arrays.part_out, arrays.every, **options),
        "all_gather": lambda: comm.all_gather(arrays.every_out, arrays.mine, **options),
        "broadcast": lambda: comm.broadcast(arrays.mine, root, **options),
        "all_to_all": lambda: comm.all_to_all(arrays.every_out, arrays.every, **options),
        "ring": ring,
        "barrier": comm.barrier,
    }[op]
