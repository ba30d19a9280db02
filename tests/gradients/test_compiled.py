"""torch.compile and compiled autograd with the hook; backends that need no compiler."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives.gradients.compiled import reduce_tuple
from tests.ddp.training import batch, over_gloo, run


class Net(nn.Module):
    """Its own class: Dynamo compiles no frame of torch's Sequential behind a graph break."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Pair(nn.Module):
    """Two modules that are both used in each step."""

    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x):
        return self.one(x) + self.other(x.flip(0))


def wrong_gradients(ctx, ddp, call, factor=1.0, whole=None):
    """Largest difference to the gradient of all ranks' mean loss, over two steps. `whole`: of one process."""
    whole, worst = Net() if whole is None else whole, 0.0
    for step in range(2):
        ddp.zero_grad()
        whole.zero_grad()
        call(batch(step, ctx.rank)[0]).square().mean().backward()
        (sum(whole(batch(step, rank)[0]).square().mean() for rank in range(ctx.size)) / ctx.size * factor).backward()
        pairs = zip(ddp.parameters(), whole.parameters(), strict=True)
        worst = max(worst, *((a.grad - b.grad).abs().max().item() for a, b in pairs))
    return worst


def with_hook(module, **options):
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(collectives.HookState(**options), collectives.fused_allreduce)
    return ddp


@over_gloo
def compiled_in_every_way(ctx):
    compile = functools.partial(torch.compile, backend="eager")
    found = {}
    ddp = with_hook(Net())
    found["compiled DDP"] = wrong_gradients(ctx, ddp, compile(ddp))
    ddp = with_hook(compile(Net()))
    found["DDP of a compiled module"] = wrong_gradients(ctx, ddp, ddp)
    pair = Pair(with_hook(Net()), with_hook(Net()))
    found["two DDP objects in one function"] = wrong_gradients(ctx, pair, compile(pair), whole=Pair(Net(), Net()))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = with_hook(Net())
        found["pairs, nothing compiled"] = wrong_gradients(ctx, ddp, ddp)
        # Two states, one compiled graph after the other: each must find its own.
        for average, factor in ((True, 1.0), (False, float(ctx.size))):
            ddp = with_hook(Net(), average=average)
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                found[f"compiled autograd, average={average}"] = wrong_gradients(ctx, ddp, ddp, factor)
    return found


def test_compiled_models_get_the_same_gradients(tmp_path):
    for found in run(compiled_in_every_way, 2, tmp_path / "store", timeout=240):
        assert len(found) == 6
        assert max(found.values()) < 1e-6, found


def test_pairs_refuse_what_needs_all_gradients():
    state = collectives.HookState(max_norm=1.0)
    gradient = torch.ones(3)
    with pytest.raises(collectives.errors.InvalidUsage, match="max_norm=1.0 can't be used .* only after the last one"):
        reduce_tuple(state, (gradient, gradient))
    del state
    with pytest.raises(collectives.errors.InvalidUsage, match="a HookState that is gone"):
        torch.ops.collectives.reduce_grad_(gradient, 10**9)
    assert gradient.tolist() == [1, 1, 1]
