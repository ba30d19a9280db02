"""Models and optimizers that a framework has wrapped already are refused with what to write instead."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives.errors import InvalidArgument
from tests.ranks import run_ranks


def refused(ctx, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    for module in (wrapped, torch.compile(wrapped)):
        with pytest.raises(InvalidArgument, match="DistributedDataParallel already.*register the hook on it"):
            collectives.DistributedDataParallel(module)
    with pytest.raises(InvalidArgument, match=r"register_comm_hook\(HookState\(\)"):
        collectives.HookState(wrapped)
    del wrapped, module
    dist.destroy_process_group()
    return True


def test_a_wrapped_model_is_refused(tmp_path):
    assert run_ranks(refused, 2, tmp_path / "store") == [True, True]


class Wrapper(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer holds one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_wrapped_optimizer_is_refused():
    ours = collectives.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(InvalidArgument, match=r"pass its \.optimizer"):
        collectives.HookState(optimizer=Wrapper(ours))
