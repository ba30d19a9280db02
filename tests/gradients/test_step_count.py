"""A rank that leaves out an optimizer's step: the next gradients raise on all ranks, with the steps and the ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import collectives
from collectives.errors import Mismatch
from collectives.sharded import fully_shard
from tests.ddp.training import over_gloo, run


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sharded(mesh=None):
    model = net()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_hook(ctx):
    ddp = nn.parallel.DistributedDataParallel(net())
    ddp.register_comm_hook(None, collectives.fused_allreduce)
    return ddp, lambda: None


def by_own_class(ctx):
    ddp = collectives.DistributedDataParallel(net())
    ddp.register_comm_hook(collectives.fused_allreduce)
    return ddp, lambda: None


def by_buckets(ctx):
    model = net()
    return model, collectives.GradientBuckets(model.parameters(), comm=ctx.communicator().split(0)).all_reduce


def by_shards(ctx):
    return sharded(), lambda: None


def by_replicated_shards(ctx):
    return sharded(init_device_mesh("cpu", (ctx.size, 1))), lambda: None


WAYS = {"hook": by_hook, "own class": by_own_class, "buckets": by_buckets, "shards": by_shards}
WAYS["replicated shards"] = by_replicated_shards


def train(ctx, model, reduce, optimizer, steps, left_out=None):
    """Train; the last rank leaves out one optimizer step. Returns the step that raised, and the error."""
    for step in range(steps):
        optimizer.zero_grad()
        try:
            model(torch.randn(4, 6)).square().sum().backward()
            reduce()
        except Mismatch as error:
            return step, str(error), error.peers
        if step != left_out or ctx.rank < ctx.size - 1:
            optimizer.step()
    return None


@over_gloo
def leaves_out_a_step(ctx):
    found = {}
    for name, make in WAYS.items():
        for left_out in (0, 3):
            model, reduce = make(ctx)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            found[name, left_out] = train(ctx, model, reduce, optimizer, 6, left_out)
            if "shards" in name:  # they go on once all ranks have raised
                found["after", name] = train(ctx, model, reduce, optimizer, 4)
    return found


def test_a_rank_leaves_out_a_step(tmp_path):
    size = 3
    for rank, found in enumerate(run(leaves_out_a_step, size, str(tmp_path / "store"))):
        assert [found.pop(key) for key in list(found) if key[0] == "after"] == [None, None]
        for (name, left_out), raised in found.items():
            assert raised is not None and raised[0] == left_out + 1, (name, left_out, raised)
            _, text, peers = raised
            assert "different steps" in text and f"rank {size - 1}: " in text, text
            steps = {int(line.split("step=")[1].split()[0]) for line in text.splitlines() if "step=" in line}
            assert len(steps) == 2 and max(steps) == min(steps) + 1, text
            assert set(peers) == ({size - 1} if rank < size - 1 else set(range(size - 1))), peers


@over_gloo
def usual(ctx):
    """What ranks may do: accumulation, several optimizers, ZeRO, steps of other models on one rank."""
    ddp, _ = by_hook(ctx)
    layers = list(ddp.module)
    optimizers = [torch.optim.SGD(layers[0].parameters(), 0.1), torch.optim.Adam(layers[2].parameters())]
    optimizers.append(ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1))
    other = net()
    probe = torch.optim.SGD(other.parameters(), 0.1)
    for step in range(4):
        for micro in range(2):
            if micro or step % 2:
                ddp(torch.randn(4, 6)).sum().backward()
            else:
                with ddp.no_sync():
                    ddp(torch.randn(4, 6)).sum().backward()
        optimizers[step % 3].step()
        optimizers[0].step()
        if ctx.rank:
            other(torch.randn(4, 6)).sum().backward()
            probe.step()
    return {"done": True}


def test_what_ranks_may_do(tmp_path):
    assert run(usual, 2, str(tmp_path / "store")) == [{"done": True}] * 2


@over_gloo
def usual_in_shards(ctx):
    """What ranks may do with shards: accumulation, a second step on one rank, evaluations, loading."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(6):
        for _ in range(1 + step % 2):
            model(torch.randn(4, 6)).square().sum().backward()
        if step == 2 and ctx.rank:
            optimizer.step()  # of the same gradients, twice: one step more of this rank's, and of no other
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(4, 6))
        if step == 4:
            saved = model.state_dict()
            model(torch.randn(4, 6)).square().sum().backward()
            if ctx.rank:  # another rank has caught an exception
                optimizer.step()
            model.load_state_dict(saved)
    return True


def test_what_ranks_may_do_with_shards(tmp_path):
    assert run(usual_in_shards, 2, str(tmp_path / "store")) == [True, True]
