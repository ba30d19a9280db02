"""Our DistributedDataParallel without a hook: it registers `fused_allreduce` itself, or says why not."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import collectives
from collectives.ddp.fitness import has_hook
from collectives.errors import InvalidUsage
from tests.backend.groups import over
from tests.ddp.training import over_gloo
from tests.ranks import run_ranks


def step(ddp, rank):
    ddp.zero_grad()
    ddp(torch.full((2, 4), rank + 1.0)).sum().backward()
    return [param.grad.tolist() for param in ddp.module.parameters()]


def hook_of(ddp):
    return ddp._get_ddp_logging_data().get("comm_hook")


def registered(ctx):
    """The hook comes with the first forward that has gradients; a copy and a loaded object get it, too."""
    torch.manual_seed(0)
    ddp = collectives.DistributedDataParallel(nn.Linear(4, 3))
    with torch.no_grad():
        ddp(torch.zeros(1, 4))
    assert not has_hook(ddp)
    grads = step(ddp, ctx.rank)
    assert "fused_allreduce" in hook_of(ddp)
    with pytest.raises(InvalidUsage, match="before the first forward"):
        ddp.register_comm_hook(None, allreduce_hook)
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert not has_hook(other)
        assert step(other, ctx.rank) == grads and "fused_allreduce" in hook_of(other)
    return grads


def own_choice(ctx):
    """A hook of the program's stays, and so does torch's all-reduce where the program asks for it."""
    hooked, plain = (collectives.DistributedDataParallel(nn.Linear(4, 3)) for _ in range(2))
    hooked.register_comm_hook(None, allreduce_hook)
    plain.default_hook = False
    for ddp in (hooked, plain):
        step(ddp, ctx.rank)
    return hook_of(hooked), has_hook(plain)


def refused(ctx):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = collectives.DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
        for _ in range(2):
            ddp(torch.tensor([ctx.rank])).sum().backward()
    assert not has_hook(ddp)
    return [str(each.message) for each in caught if "keeps torch's own" in str(each.message)]


def joined(ctx):
    """A rank without a batch has no forward in join(): no rank registers the hook, then or later."""
    ddp = collectives.DistributedDataParallel(nn.Linear(4, 3))
    with ddp.join():
        for _ in range(2 * ctx.rank):
            step(ddp, ctx.rank)
    step(ddp, ctx.rank)
    return has_hook(ddp)


FUNCTIONS = {"registered": registered, "own_choice": own_choice, "refused": refused, "joined": joined}


def on_backend(ctx, path, name):
    return over("collectives")(FUNCTIONS[name])(ctx, path)


def on_gloo(ctx, path, name):
    return over_gloo(FUNCTIONS[name])(ctx, path)


@pytest.mark.parametrize("run", [on_backend, on_gloo])
def test_the_hook_registers_itself(tmp_path, run):
    first, second = run_ranks(run, 2, tmp_path / "store", "registered")
    assert first == second == [[[1.5 * 2] * 4] * 3, [2.0] * 3]


def test_the_programs_choice_stays(tmp_path):
    for hook, plain_has_one in run_ranks(on_gloo, 2, tmp_path / "store", "own_choice"):
        assert hook == "allreduce_hook" and not plain_has_one


def test_no_rank_registers_it_in_join(tmp_path):
    assert run_ranks(on_gloo, 2, tmp_path / "store", "joined") == [False, False]


def test_it_says_why_it_does_not(tmp_path):
    for messages in run_ranks(on_gloo, 2, tmp_path / "store", "refused"):
        assert messages == ["DistributedDataParallel keeps torch's own all-reduce: it has sparse gradients"]
