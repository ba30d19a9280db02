"""One communicator for each group and device: what works on a group of the backend uses it and opens none."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives.comm import communicator as module
from collectives.sharded import fully_shard
from tests.backend.groups import over
from tests.ranks import run_ranks


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def step(model):
    model(torch.ones(3, 4)).square().mean().backward()


def hooked_by_ddp(ctx):
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(collectives.HookState(), collectives.fused_allreduce)
    step(model)


def in_buckets(ctx):
    model = make_model()
    buckets = collectives.GradientBuckets(model.parameters())
    step(model)
    buckets.all_reduce()
    buckets.close()


def sharded(ctx):
    model = make_model()
    fully_shard(model)
    step(model)


def by_fsdp2(ctx):
    model = make_model()
    fully_shard_of_torch(model, mesh=init_device_mesh("cpu", (ctx.size,)))
    model.set_allocate_memory_from_process_group_for_comm(True)
    step(model)


@over("collectives")
def count_opened(ctx):
    """Return how many communicators each program opens; a part that is split off one, to overlap, is none."""
    opened, open_one, found = [], module.Communicator.__init__, {}

    def counted(self, *args, **options):
        opened.append(self)
        return open_one(self, *args, **options)

    module.Communicator.__init__ = counted
    try:
        for program in (hooked_by_ddp, in_buckets, sharded, by_fsdp2):
            program(ctx)
            found[program.__name__] = len(opened)
    finally:
        module.Communicator.__init__ = open_one
    return found


def test_no_second_communicator_is_opened(tmp_path):
    for found in run_ranks(count_opened, 2, tmp_path / "store"):
        assert len(found) == 4 and not any(found.values()), found


def is_shared_memory(tensor):
    """Return whether the kernel says that a tensor lies in a shared mapping without a name in the file system."""
    with open("/proc/self/maps") as file:
        for line in file:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return line.split()[1].endswith("s") and "memfd:" in line
    raise AssertionError("an address without a mapping")


@over("collectives")
def allocated(ctx):
    """FSDP2's buffers for gathers and reductions lie in the engine's memory, which collectives use with no copy."""
    group = dist.group.WORLD
    taken, allocate = [], group.allocate_tensor

    def recorded(*args, **options):
        taken.append(allocate(*args, **options))
        return taken[-1]

    group.allocate_tensor = recorded
    try:
        by_fsdp2(ctx)
    finally:
        del group.allocate_tensor
    assert all(is_shared_memory(each) for each in taken) and not is_shared_memory(torch.empty(1000))
    return len(taken)


def test_fsdp2_takes_memory_of_the_engine(tmp_path):
    first, second = run_ranks(allocated, 2, tmp_path / "store")
    assert first == second >= 2
