"""Parameters of all kinds in shards: other dtypes, frozen, tied, none or one element, fewer elements than ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from collectives.sharded import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from tests.ddp.training import batch, make_model, over_gloo
from tests.sharded.test_scheduler import check, equal, expected, gradients
from tests.sharded.training import RULES, by_ddp, full, same, steps_of


class Odd(nn.Module):
    """Everything that a parameter can be."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.wide = nn.Parameter(torch.randn(12, 3, dtype=torch.float64))
        self.sixteen = nn.Parameter(torch.randn(3, 12).to(torch.bfloat16))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.embed, self.head = nn.Embedding(7, 12), nn.Linear(12, 7, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.head  # the module itself in two places
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.rnn = nn.LSTM(12, 6)
        self.sparse = nn.Embedding(9, 12, sparse=True)

    def forward(self, x):
        index = x[:, 0].abs().long() % 7
        h = self.frozen(x) + self.embed(index) * self.scale + self.one * self.rnn(x)[0].sum() + self.sparse(index)
        y = (h.double() @ self.wide).float() @ self.sixteen.float() + self.empty.sum()
        y = y * (self.complex * self.complex.conj()).real.sum() + self.counts.sum()
        return self.again(y)


def backward(model, rank, step=0):
    model(batch(step, rank)[0]).square().mean().backward()


@over_gloo
def odd(ctx):
    found = {}
    for strategy in ("FULL_SHARD", "SHARD_OPTIMIZER", "NO_SHARD"):
        model = ShardedDataParallel(Odd(), sharding_strategy=ShardingStrategy[strategy])
        names = [name for name, _ in Odd().named_parameters()]
        found["names", strategy] = [] if [name for name, _ in model.named_parameters()] == names else ["other names"]
        dims = {name: param.dim() for name, param in Odd().named_parameters() if param.numel() > 1}
        found["dimensions", strategy] = [n for n, p in model.named_parameters() if n in dims and p.dim() != dims[n]]
        found["values", strategy] = same(full(model), {n: p.detach() for n, p in Odd().named_parameters()})
        for _ in range(2):
            model.zero_grad()
            backward(model, ctx.rank)

        def dense(model, rank):
            backward(model, rank)
            model.sparse.weight.grad = model.sparse.weight.grad.to_dense()

        found["gradients", strategy] = equal(gradients(model), expected(Odd, dense, ctx.size), close=True)
        trainable = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(trainable, 0.1)
        optimizer.step()
        moved = full(model)
        before = dict(Odd().named_parameters())
        found["moved", strategy] = [
            name for name, value in moved.items()
            if value.numel() and torch.equal(value, before[name]) == before[name].requires_grad
        ]  # fmt: skip
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_of_all_kinds(ranks, tmp_path):
    check(odd, tmp_path, ranks)


@over_gloo
def in_bf16(ctx):
    found = {}
    expected, _ = by_ddp(make_model, "sgd", ctx.rank, 10)
    for name, policy in {
        "bf16": MixedPrecisionPolicy(torch.bfloat16),
        "bf16, reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    }.items():
        model = make_model()
        seen = []
        for each in model[::2]:
            fully_shard(each, mp_policy=policy)
            each.register_forward_hook(lambda m, args, out, seen=seen: seen.append((args[0].dtype, m.weight.dtype)))
        fully_shard(model, mp_policy=policy)
        steps_of(model, RULES["sgd"](model.parameters()), 10, ctx.rank)
        found[name, "computes in bf16"] = [each for each in seen if each != (torch.bfloat16, torch.bfloat16)]
        params = list(model.parameters())
        found[name, "keeps fp32"] = [p.dtype for p in params if p.dtype != torch.float32 or p.grad.dtype != p.dtype]
        # Ten steps of bf16 gradients: each within 2^-8 of its size, and the path diverges slowly.
        ours = full(model)
        found[name, "near"] = [n for n, value in ours.items() if (value - expected[n]).abs().max() > 0.05]
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    policy = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.float32)
    model = ShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=policy)
    seen = []
    for each in (model[0], model[1], model[2]):
        each.register_forward_hook(lambda m, args, out: seen.append((type(m).__name__, m.weight.dtype)))
    steps_of(model, RULES["adamw"](model.parameters()), 2, ctx.rank)
    wanted = [("Linear", torch.bfloat16), ("BatchNorm1d", torch.float32), ("Linear", torch.bfloat16)] * 2
    found["batch norm in fp32"] = [] if seen == wanted else seen
    with torch.autocast("cpu", torch.bfloat16):
        model = fully_shard(make_model())
        steps_of(model, RULES["sgd"](model.parameters()), 3, ctx.rank)
        theirs = make_model()
        ddp = nn.parallel.DistributedDataParallel(theirs)
        steps_of(ddp, RULES["sgd"](ddp.parameters()), 3, ctx.rank)
    found["autocast"] = [n for n, p in theirs.named_parameters() if (full(model)[n] - p).abs().max() > 0.02]
    return found


def test_mixed_precision(tmp_path):
    check(in_bf16, tmp_path)


@over_gloo
def hybrid(ctx):
    found = {}
    expected, _ = by_ddp(make_model, "adamw", ctx.rank, 5)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = make_model()
    for each in model[::2]:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    steps_of(model, RULES["adamw"](model.parameters()), 5, ctx.rank)
    found["mesh"] = same(full(model), expected)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    mine = groups[ctx.rank // 2], groups[2 + ctx.rank % 2]
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        model = ShardedDataParallel(
            make_model(), mine, ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
        )
        halves = sum(param.numel() for param in model.parameters())
        steps_of(model, RULES["adamw"](model.parameters()), 5, ctx.rank)
        found[strategy] = same(full(model), expected)
        total = sum(param.numel() for param in make_model().parameters())
        found[strategy, "half of the parameters"] = [] if abs(halves - total / 2) < 100 else [halves, total]
    return found


def test_hybrid(tmp_path):
    check(hybrid, tmp_path, 4)


@over_gloo
def compiled(ctx):
    """The inner blocks compiled, as whole programs do it; with a backend that needs no compiler."""
    found = {}
    expected, _ = by_ddp(make_model, "sgd", ctx.rank, 5)
    for reshard in (True, False):
        model = make_model()
        for each in model[::2]:
            each.compile(backend="aot_eager")
            fully_shard(each, reshard_after_forward=reshard)
        fully_shard(model)
        steps_of(model, RULES["sgd"](model.parameters()), 5, ctx.rank)
        found["blocks", reshard] = [n for n, v in full(model).items() if not torch.allclose(v, expected[n], 1e-5, 1e-6)]
    model = make_model()
    for each in model[::2]:
        fully_shard(each)
    whole = torch.compile(fully_shard(model), backend="aot_eager")
    steps_of(whole, RULES["sgd"](model.parameters()), 5, ctx.rank)
    found["the whole"] = [n for n, v in full(model).items() if not torch.allclose(v, expected[n], 1e-5, 1e-6)]
    return found


def test_compiled_blocks(tmp_path):
    check(compiled, tmp_path)
