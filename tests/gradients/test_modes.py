"""Every front end inside of a function that torch.compile compiles, and under another default device: eager's bits."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import collectives
import collectives.horovod as hvd
import collectives.optim
from collectives.sharded import fully_shard
from tests.backend.groups import over
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PROGRAMS = {}


def program(function):
    """Add a program: called with the communicator, it returns a function to repeat, which returns a tensor."""
    PROGRAMS[function.__name__] = function
    return function


def make_net():
    torch.manual_seed(3)
    with CPU:
        return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))


def batch():
    return torch.arange(30.0, device=CPU).view(5, 6) * (dist.get_rank() + 1)


@program
def communicator(comm):
    def step():
        total, parts = batch() + 1, torch.empty(5 * comm.size, 6, device=CPU)
        comm.all_reduce(total, algorithm="ring")
        comm.all_gather(parts, total, async_op=True).wait()
        with comm.group():
            comm.all_reduce(total)
            comm.all_reduce(parts, op=0.5)
        comm.barrier()
        memory = comm.empty(parts.numel(), torch.float32).view(parts.shape)
        memory.copy_(parts)
        comm.broadcast(memory, 0)
        with comm.split(0) as other:
            other.all_reduce(memory)
        return memory[:5] * 2 + total

    return step


@program
def gradient_buckets(comm):
    net = make_net()
    buckets, optimizer = collectives.GradientBuckets(net.parameters(), comm=comm), torch.optim.LBFGS(net.parameters())

    def step():
        def closure():
            optimizer.zero_grad()
            loss = net(batch()).square().mean()
            loss.backward()
            buckets.all_reduce()
            loss = loss.detach()
            comm.all_reduce(loss)  # else the ranks would search along other lines
            return loss

        optimizer.step(closure)
        return net[0].weight.detach()

    return step


@program
def hook_that_steps(comm):
    net = make_net()
    state = collectives.HookState(optimizer=collectives.optim.AdamW(net.parameters(), lr=0.1), max_norm=1.0)
    ddp = collectives.DistributedDataParallel(net)
    ddp.register_comm_hook(state, collectives.fused_allreduce)

    def step():
        ddp(batch()).square().mean().backward()
        return net[0].weight.detach()

    return step


@program
def ddp_with_zero(comm):
    net = make_net()
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        ddp(batch()).square().mean().backward()
        optimizer.step()
        return net[0].weight.detach()

    return step


@program
def sharded(comm):
    net = make_net()
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        loss = net(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@program
def horovod(comm):
    hvd.init()
    net = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), 0)

    def step():
        optimizer.zero_grad()
        net(batch()).square().mean().backward()
        optimizer.step()
        weight = hvd.allreduce(net[0].weight.detach(), name="weight")
        rows, _ = hvd.alltoall(weight, torch.tensor([10, 30], device=CPU))
        one = hvd.synchronize(hvd.allreduce_async(torch.ones(1, device=CPU), name="one"))
        return rows * one + len(hvd.broadcast_object("an object", 0))

    return step


@over("collectives")
def in_all_modes(ctx):
    comm, wrong = ctx.communicator(), []
    for name, make in PROGRAMS.items():
        eager = None
        for mode in ("eager", "compiled", "meta"):
            with torch.device("meta" if mode == "meta" else "cpu"):
                step = make(comm)
                if mode == "compiled":
                    torch._dynamo.reset()
                    step = torch.compile(step, backend="eager")
                got = [step().clone() for _ in range(3)]
            eager = eager or got
            if not all(map(torch.equal, got, eager)) or not all(each.isfinite().all() and each.any() for each in got):
                wrong.append(f"{name}, {mode}: {got}, not {eager}")
        if name == "horovod":
            hvd.shutdown()
    return wrong


def test_programs_compiled_and_under_another_default_device(tmp_path):
    for wrong in run_ranks(in_all_modes, 2, tmp_path / "store", timeout=300):
        assert not wrong, "\n".join(wrong)
