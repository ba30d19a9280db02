"""The bytes that memory_plan predicts are those that a step takes."""

import gc

import pytest
import torch
from torch import nn

import collectives
from collectives.errors import InvalidArgument
from collectives.sharded import MixedPrecisionPolicy, ShardedDataParallel, ShardingStrategy
from collectives.sharded.loans import Loans
from collectives.sharded.memory import memory_plan
from tests.ddp.training import over_gloo, run
from tests.sharded.counting import Counted

WIDTH = 192


def equal_units():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])


class Mixed(nn.Module):
    """Units of many sizes inside of one with parameters of its own; a tied weight, a frozen unit, two dtypes."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(400, 96)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, wide), nn.Linear(wide, 96)) for wide in (200, 600, 300))
        self.blocks[1][0].requires_grad_(False)
        self.narrow = nn.Linear(96, 300).to(torch.bfloat16)
        self.head = nn.Linear(96, 400, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum() + self.narrow(x.to(torch.bfloat16)).sum()


MODELS = {
    "equal": (equal_units, lambda model: list(model), lambda: torch.ones(1, WIDTH)),
    "mixed": (Mixed, lambda model: list(model.blocks), lambda: torch.zeros(1, dtype=torch.int64)),
}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
S = ShardingStrategy
CASES = {  # model, strategy, whether collectives run beside the computation, precision, optimizer, backwards a step
    "full shard": ("equal", S.FULL_SHARD, False, None, torch.optim.AdamW, 1),
    "full shard, ours": ("equal", S.FULL_SHARD, False, None, collectives.optim.AdamW, 1),
    "full shard beside": ("equal", S.FULL_SHARD, True, None, torch.optim.AdamW, 1),
    "gathered until backward": ("equal", S.SHARD_GRAD_OP, True, None, torch.optim.AdamW, 1),
    "optimizer": ("equal", S.SHARD_OPTIMIZER, False, None, torch.optim.AdamW, 1),
    "nothing": ("equal", S.NO_SHARD, False, None, torch.optim.AdamW, 1),
    "half": ("equal", S.FULL_SHARD, False, HALF, torch.optim.AdamW, 1),
    "accumulated": ("equal", S.FULL_SHARD, False, None, collectives.optim.SGD, 3),
    "mixed": ("mixed", S.FULL_SHARD, False, None, torch.optim.AdamW, 1),
    "mixed beside": ("mixed", S.FULL_SHARD, True, None, collectives.optim.AdamW, 1),
    "mixed half, accumulated": ("mixed", S.SHARD_GRAD_OP, False, HALF, torch.optim.AdamW, 3),
}


def measured(ctx, case):
    """Give what a step takes by counting, as planned on the meta device, and as planned of the sharded module."""
    kind, strategy, beside, precision, optimizer, micro = CASES[case]
    make, units, data = MODELS[kind]
    with torch.device("meta"):
        bare = make()
    how = {"overlap": beside, "accumulate": micro > 1}
    plan = memory_plan(bare, ctx.size, optimizer, strategy, units=units(bare), mp_policy=precision, device="cpu", **how)
    x = data()
    with Counted() as counted:
        model = make()
        inner = units(model)

        def policy(module, recurse, nonwrapped_numel):
            return recurse or module in inner

        model = ShardedDataParallel(
            model, sharding_strategy=strategy, auto_wrap_policy=policy, mixed_precision=precision, forward_prefetch=True
        )
        model._order.beside, model._order.loans = beside, Loans()
        for each in model.modules():
            if isinstance(each, ShardedDataParallel):
                each._unit.loans = model._order.loans
                for group in each._unit.groups:
                    group.loans = model._order.loans
        stepper = optimizer(model.parameters(), lr=1e-3)
        peaks = {}
        for _ in range(4):
            counted.begin()
            for part in range(micro):
                with model.no_sync() if part < micro - 1 else torch.enable_grad():
                    model(x).sum().backward()
            peaks["backward"] = counted.most
            counted.begin()
            stepper.step()
            peaks["step"] = counted.most
            stepper.zero_grad()
        as_is = memory_plan(model, ctx.size, stepper, **how)
    return peaks, plan.peaks, as_is.peaks, str(plan)


@over_gloo
def all_cases(ctx, cases):
    torch.set_num_threads(1)
    found = {}
    for case in cases:
        found[case] = measured(ctx, case)
        gc.collect()
    return found


def test_measured_peak_is_the_planned_one(tmp_path):
    for found in run(all_cases, 2, str(tmp_path / "store"), list(CASES)):
        for case, (peaks, planned, as_is, text) in found.items():
            assert planned == as_is, case
            told = case, peaks, planned, text
            assert peaks["backward"] == pytest.approx(max(planned["forward"], planned["backward"]), rel=0.02), told
            assert peaks["step"] == pytest.approx(planned["step"], rel=0.02), told
