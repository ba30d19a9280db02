"""DDP, GradientBuckets and sharded modules on two nodes of two ranks: the same steps as on one node."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives import optim
from collectives.comm.multinode.comm import MultiNodeComm
from collectives.rendezvous import process_groups as torch_groups
from collectives.sharded import fully_shard
from tests.ddp.training import make_model, run
from tests.hosts import apart

STEPS = 3


def trained(model, optimizer, rank):
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        model(torch.randn(6, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(model):
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def steps(ctx, path, nodes):
    """Train in four ways; give the parameters of each and what carried the gradients."""
    with apart(ctx, nodes):
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
        try:
            found = []
            for options in ({}, {"wire": "bf16"}):
                net = make_model()
                model = DistributedDataParallel(net, bucket_cap_mb=0.004)
                model.register_comm_hook(collectives.HookState(**options), collectives.fused_allreduce)
                trained(model, torch.optim.SGD(net.parameters(), lr=0.1), ctx.rank)
                found.append(flat(net))
            comm = torch_groups.get_communicator(dist.group.WORLD, torch.device("cpu"))
            net = make_model()
            for layer in net[::2]:
                fully_shard(layer)
            model = fully_shard(net)
            trained(model, optim.SGD(model.parameters(), lr=0.1), ctx.rank)
            found.append(torch.cat([param.full_tensor().reshape(-1) for param in model.parameters()]))
            buckets = collectives.GradientBuckets(make_model().named_parameters(), comm=comm)
            buckets.close()
            dist.barrier()
            return found, type(comm._native) is MultiNodeComm, comm.machines
        finally:
            dist.destroy_process_group()


def test_the_same_steps_on_two_nodes(tmp_path):
    one = run(steps, 4, tmp_path / "one", "aaaa", timeout=100)
    two = run(steps, 4, tmp_path / "two", "aabb", timeout=100)
    assert all(not several and nodes == ((0, 1, 2, 3),) for _, several, nodes in one)
    assert all(several and nodes == ((0, 1), (2, 3)) for _, several, nodes in two)
    for i in range(3):
        for (ours, _, _), (expected, _, _) in zip(two, one, strict=True):
            assert torch.equal(ours[i], two[0][0][i]), "all ranks have the same bits"
            assert torch.allclose(ours[i], expected[i], rtol=1e-5, atol=1e-6 if i != 1 else 1e-3), i
    assert torch.equal(two[0][0][0], two[0][0][2]), "DDP and shards sum in the same order"
