"""The bytes that memory_plan computes are those that a step takes."""

import gc

import pytest
import torch
from torch import nn

import collectives
from collectives.comm import memory
from collectives.errors import InvalidArgument
from collectives.sharded import (
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    memory_plan,
)
from collectives.torch_compat import can_swap_storage_memory
from tests import one_gpu
from tests.ddp.training import over_gloo, run
from tests.sharded.counting import Counted

WIDTH = 192
TOLERANCE = 0.1


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
CASES = {  # model, strategy, precision, optimizer, backwards a step
    "full shard": ("equal", S.FULL_SHARD, None, torch.optim.AdamW, 1),
    "full shard, ours": ("equal", S.FULL_SHARD, None, collectives.optim.AdamW, 1),
    "gathered until backward": ("equal", S.SHARD_GRAD_OP, None, torch.optim.AdamW, 1),
    "optimizer": ("equal", S.SHARD_OPTIMIZER, None, torch.optim.AdamW, 1),
    "nothing": ("equal", S.NO_SHARD, None, torch.optim.AdamW, 1),
    "half": ("equal", S.FULL_SHARD, HALF, torch.optim.AdamW, 1),
    "accumulated": ("equal", S.FULL_SHARD, None, collectives.optim.SGD, 3),
    "mixed": ("mixed", S.FULL_SHARD, None, torch.optim.AdamW, 1),
    "mixed half, accumulated": ("mixed", S.SHARD_GRAD_OP, HALF, torch.optim.AdamW, 3),
}


def measured(ctx, case):
    """Return what a step takes by counting, the plan on the meta device, and the plan of the sharded module."""
    kind, strategy, precision, optimizer, micro = CASES[case]
    make, units, data = MODELS[kind]
    with torch.device("meta"):
        bare = make()
    how = {"units": units(bare), "mp_policy": precision, "accumulate": micro > 1}
    plan = memory_plan(bare, ctx.size, optimizer, strategy, device="cpu", **how)
    x = data()
    with Counted() as counted, ctx.communicator().split(0) as comm:  # which has an arena of its own
        model = make()
        inner = units(model)

        def policy(module, recurse, nonwrapped_numel):
            return recurse or module in inner

        model = ShardedDataParallel(
            model, sharding_strategy=strategy, auto_wrap_policy=policy, mixed_precision=precision, comm=comm
        )
        stepper = optimizer(model.parameters(), lr=1e-3)
        peaks = {}
        for _ in range(6):
            counted.begin()
            for part in range(micro):
                with model.no_sync() if part < micro - 1 else torch.enable_grad():
                    model(x).sum().backward()
            peaks["backward"] = counted.most
            counted.begin()
            stepper.step()
            peaks["step"] = counted.most
            stepper.zero_grad()
        as_is = memory_plan(model, ctx.size, stepper, accumulate=micro > 1)
    return peaks, plan.peaks, as_is.peaks, str(plan)


@over_gloo
def all_cases(ctx, cases):
    torch.set_num_threads(1)
    found = {}
    for case in cases:
        found[case] = measured(ctx, case)
        gc.collect()
    return found


@pytest.mark.skipif(not can_swap_storage_memory(), reason="before torch 2.12 gathered parameters are torch's memory")
def test_measured_peak_is_the_planned_one(tmp_path):
    for found in run(all_cases, 2, str(tmp_path / "store"), list(CASES), timeout=180):
        for case, (peaks, planned, as_is, text) in found.items():
            assert planned == as_is, case
            expected = {"backward": max(planned["forward"], planned["backward"]), "step": planned["step"]}
            for phase, most in expected.items():
                assert peaks[phase] == pytest.approx(most, rel=TOLERANCE), (case, phase, peaks, planned, text)
        # 16 bytes a parameter and rank, a block for gathering and reducing, and one unit's gradients.
        unit = 4 * (WIDTH + 1) * WIDTH
        for case in ("full shard", "full shard, ours"):
            assert found[case][0]["backward"] == pytest.approx(16 * 8 * unit / 4 / 2 + 2 * unit, rel=0.03)


def test_plan_for_any_number_of_ranks():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(64)])
    count, unit = 64 * 4096**2, 4 * 4096**2
    policy = ModuleWrapPolicy({nn.Linear})
    plan = memory_plan(model, 1024, units=policy, device="cuda")
    assert (plan.parameters, plan.gradients, plan.optimizer) == (
        4 * count // 1024,
        4 * count // 1024,
        8 * count // 1024,
    )
    # Two units are gathered in turn, and a unit's gradients.
    assert (plan.peak_in, plan.arena, plan.full_gradients) == ("backward", 2 * unit, unit)
    assert plan.peak == pytest.approx(16 * count / 1024 + 3 * unit, rel=0.02)
    assert len(plan.units) == 65 and plan.units[1] == ("0", 4096**2, unit)
    def adamw(params):
        return collectives.optim.AdamW(params, master_weights=True)

    halves = memory_plan(model.to(torch.bfloat16), 8, adamw, units=policy, device="cpu")
    assert (halves.parameters, halves.optimizer) == (2 * count // 8, 12 * count // 8)
    assert memory_plan(model, 8, "sgd", "NO_SHARD", units=policy, device="cpu").parameters == 2 * count
    hybrid = memory_plan(model, 8, "sgd", "HYBRID_SHARD", replicas=2, units=policy, device="cpu")
    assert (hybrid.parameters, hybrid.replicas) == (2 * count // 4, 2)
    offloaded = memory_plan(model, 8, None, units=policy, offload=True, device="cuda", activations=1 << 20)
    assert offloaded.on_host == 4 * count // 8 and offloaded.parameters == 0 and offloaded.activations == 1 << 20
    text = str(plan)
    assert f"{plan.peak / 2**20:,.2f} MiB  peak, in the backward" in text and "packed gradients" in text


@over_gloo
def plans_of_sharded(ctx):
    found = []
    for strategy in (S.NO_SHARD, S.SHARD_OPTIMIZER, S.SHARD_GRAD_OP):
        made = memory_plan(nn.Linear(50, 100, bias=False), ctx.size, None, strategy)
        model = ShardedDataParallel(nn.Linear(50, 100, bias=False), sharding_strategy=strategy)
        own = memory_plan(model, ctx.size, None)
        if strategy is S.NO_SHARD:
            assert memory_plan(model, 3, None).parameters == own.parameters  # of any number of ranks
        found.append((made.peaks, own.peaks, made.parameters, own.parameters))
    return found


def test_plan_beside_sharded_and_ignored_parameters():
    def build(comm):
        model = nn.Sequential(nn.Linear(50, 100, bias=False), nn.Linear(100, 50, bias=False))
        fully_shard(model[0], comm=comm)
        plan = memory_plan(model, 2, None)
        return plan.parameters, memory_plan(model, 2, None, ignored_params=list(model[0].parameters())).parameters

    assert build(collectives.init()) == (20_000, 10_000)


def test_plan_of_a_sharded_module_takes_its_strategy(tmp_path):
    for found in run(plans_of_sharded, 2, str(tmp_path / "store")):
        assert [(made, params) == (own, other) for made, own, params, other in found] == [True] * 3
        assert [params for _, _, params, _ in found] == [20_000, 10_000, 10_000]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 0}, "ranks must be an int from 1"),
        ({"optimizer": "adamx"}, "'adamw'"),
        ({"optimizer": torch.optim.LBFGS, "strategy": "SOME"}, "strategy must be a ShardingStrategy"),
        ({"units": [nn.Linear(1, 1)]}, "submodules of the module"),
        ({"replicas": 3}, "replicas must divide 4 ranks"),
        ({"reshard_after_forward": 3}, "must divide 4 ranks"),
        ({"optimizer": lambda params: 3}, "is no optimizer"),
    ],
)
def test_refused(given, message):
    with pytest.raises(InvalidArgument, match=message):
        memory_plan(**{"module": nn.Sequential(nn.Linear(2, 2)), "ranks": 4, **given})


class EngineBytes:
    """The bytes of the engine's memory (ncclMemAlloc), of which torch's allocator knows nothing."""

    def __init__(self):
        self.live, self._allocate, self._drop = {}, memory._allocate_on_cuda, memory._drop
        memory._allocate_on_cuda, memory._drop = self.allocate, self.drop

    def allocate(self, library, device, nbytes, window):
        ptr, part = self._allocate(library, device, nbytes, window)
        self.live[ptr] = nbytes
        return ptr, part

    def drop(self, library, ptr, *args):
        self.live.pop(ptr, None)
        self._drop(library, ptr, *args)


@over_gloo
def measured_on_gpu(ctx, strategy):
    wide, engine = 1024, EngineBytes()
    torch.nn.functional.linear(
        torch.ones(1, wide).cuda(), torch.ones(wide, wide).cuda().requires_grad_()
    ).sum().backward()
    gc.collect()
    before = torch.cuda.memory_allocated()  # cuBLAS's
    model = nn.Sequential(*[nn.Linear(wide, wide) for _ in range(8)]).cuda()
    x = torch.ones(1, wide).cuda()
    model = ShardedDataParallel(model, sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = memory_plan(model, ctx.size, optimizer)
    return torch.cuda.max_memory_allocated() - before, sum(engine.live.values()), plan.peak, str(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("ranks", [1, 2], ids=["1rank", "2ranks"])
def test_measured_on_gpu(tmp_path, ranks, strategy):
    path = str(tmp_path / "store")
    # In processes of its own, whose allocator has nothing of other tests.
    options = {"timeout": one_gpu.SECONDS, "start_env": one_gpu.start_env(ranks), "fresh": True}
    for of_torch, of_engine, planned, text in run(measured_on_gpu, ranks, path, strategy, engine="nccl", **options):
        assert of_torch + of_engine == pytest.approx(planned, rel=TOLERANCE), (of_torch, of_engine, planned, text)
