"""Modules that compute with the weights of inner modules without calling these, where the inner modules are units of
their own: the same results as unsharded, to the bit.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives.errors import CollectivesError
from collectives.sharded import MixedPrecisionPolicy, ModuleWrapPolicy, ShardedDataParallel, fully_shard
from tests.ddp.training import over_gloo, run
from tests.sharded.training import full, same

WIDTH, HEADS, LENGTH = 8, 2, 6


def make_encoder(norm_first=False):
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=not norm_first)


def shard_leaves(model, **how):
    """Shard every module with parameters of its own: out_proj, linear1, norm1, and then self_attn."""
    for each in reversed(list(model.modules())):
        if each is not model and any(True for _ in each.parameters(recurse=False)):
            fully_shard(each, **how)
    return fully_shard(model, **how)


def shard_layers(model, **how):
    for layer in model.layers:
        fully_shard(layer.self_attn, **how)
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def by_policy(model, **how):
    return ShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.LayerNorm}))


def plain_outer(model, **how):
    """The layers are units, what holds them isn't."""
    for layer in model.layers:
        shard_leaves(layer, **how)
    fully_shard(model.norm, **how)
    return model


def inputs(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, LENGTH, WIDTH, generator=generator)


def masks():
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4], [2]])
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return {
        "none": {}, "padding": {"src_key_padding_mask": padding}, "causal": {"mask": causal, "is_causal": True},
        "both": {"mask": causal.isinf(), "src_key_padding_mask": padding},
    }  # fmt: skip


def train_step(models, optimizers, ranks, rank, step, **how):
    """Make a step of the sharded model on this rank's batch and of the whole one on those of all ranks."""
    sharded, whole = models
    for each in optimizers:
        each.zero_grad()
    sharded(inputs(rank, step), **how).square().mean().backward()
    sums = None
    for other in range(ranks):  # in rank order, divided once, as the ranks reduce
        grads = torch.autograd.grad(whole(inputs(other, step), **how).square().mean(), list(whole.parameters()))
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
    for param, grad in zip(whole.parameters(), sums, strict=True):
        param.grad = grad / ranks
    for each in optimizers:
        each.step()


@over_gloo
def encode(ctx, ways, reshard):
    found = {}
    for way in ways:
        for norm_first in (False, True):
            whole = make_encoder(norm_first)
            model = way(make_encoder(norm_first), reshard_after_forward=reshard)
            sgd = [torch.optim.SGD(each.parameters(), 0.1, foreach=False) for each in (model, whole)]
            for step, (name, how) in enumerate([*masks().items(), ("again", masks()["padding"])]):
                key = way.__name__, norm_first, name, step
                for training in (False, True):
                    model.train(training), whole.train(training)
                    with torch.no_grad():
                        here, there = (each(inputs(ctx.rank, step), **how) for each in (model, whole))
                        found[(*key, training, "no_grad")] = torch.equal(here, there)
                    train_step((model, whole), sgd, ctx.size, ctx.rank, step, **how)
                    found[(*key, training, "step")] = not same(full(model), dict(whole.named_parameters()))
                shards = [param.shape for param in model.parameters()]
                found[(*key, "sharded again")] = shards != [param.shape for param in whole.parameters()]
            state = model.state_dict()
            found[way.__name__, norm_first] = all(torch.equal(state[k], v) for k, v in whole.state_dict().items())
    return found


@pytest.mark.parametrize(
    ("ranks", "reshard"),
    [(2, True), *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((2, False), (3, True)))],
)
def test_transformer_encoder(ranks, reshard, tmp_path):
    assert torch.backends.mha.get_fastpath_enabled()
    ways = [shard_leaves, shard_layers, by_policy, plain_outer] if ranks == 2 and reshard else [shard_leaves]
    for found in run(encode, ranks, str(tmp_path / "store"), ways, reshard):
        assert found and not [key for key, equal in found.items() if not equal]


class Reader(nn.Module):
    """Reads and calls its inner modules in every order, and computes in a part that is recomputed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=4, vdim=4, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reentrant = None  # None: no checkpointing

    def part(self, x):
        return nn.functional.linear(x, self.head.weight * 2).tanh() + self.first.bias

    def forward(self, x):
        assert not self.head.weight.is_meta  # a read before
        weight = self.first.weight
        x = self.first(x).tanh() @ weight  # and what was read is used after the module's own forward
        x = x + self.attention(x, x[..., :4], x[..., :4])[0] @ self.gate.weight
        x = self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.head(x).to(x.dtype)


class Root(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.inner = nn.ModuleList([Reader(), Reader()])
        for each in self.inner:
            each.reentrant = reentrant

    def forward(self, x):
        for each in self.inner:
            x = each(x)
        return x, self.inner[0].head.weight.square().mean()  # a loss of weights that no module computes


def shard_readers(model, outer=True, **how):
    for each in model.inner:
        for part in (each.first, each.gate, each.attention.out_proj, each.head):
            fully_shard(part, **how)
        if outer:
            fully_shard(each, **how)
    return fully_shard(model, **how)


def step_loss(model, rank, step):
    x, penalty = model(inputs(rank, step).requires_grad_())
    return x.square().mean() + penalty


WAYS = {
    "units": {}, "stay gathered": {"reshard_after_forward": False}, "readers in the root's unit": {"outer": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}  # fmt: skip


@over_gloo
def read(ctx):
    found = {}
    for reentrant in (None, False, True):
        for way, how in WAYS.items():
            low = way == "bf16"
            model, whole = shard_readers(Root(reentrant), **how), Root()
            sgd = [torch.optim.SGD(each.parameters(), 0.05, foreach=False) for each in (model, whole)]
            for step in range(4):
                for micro in range(2):
                    model.set_requires_gradient_sync(micro == 1)
                    step_loss(model, ctx.rank, 2 * step + micro).backward()
                    for other in range(ctx.size):
                        (step_loss(whole, other, 2 * step + micro) / ctx.size).backward()
                for each in sgd:
                    each.step(), each.zero_grad()
                close = {"atol": 0.02, "rtol": 0.1} if low else {"atol": 1e-6}
                theirs = dict(whole.named_parameters())
                ours = full(model)
                found[reentrant, way, step] = [
                    name for name, value in theirs.items() if not torch.allclose(ours[name], value, **close)
                ]
            with torch.no_grad():
                model(inputs(ctx.rank))
            counts = [sum(param.numel() for param in each.parameters()) for each in (model, whole)]
            found[reentrant, way, "resharded"] = [] if counts[0] < counts[1] / 2 else counts
    return found


def test_reads_of_inner_modules(tmp_path):
    for found in run(read, 3, str(tmp_path / "store")):
        assert not {key: value for key, value in found.items() if value}


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.mul_(2)
        return self.inner(x)


class Failing(Reader):
    fails = True

    def forward(self, x):
        weight = self.head.weight
        if self.fails:
            raise ValueError("after a read")
        return super().forward(x) + weight.sum()


@over_gloo
def other_reads(ctx):
    found = {}
    model = Writer()
    fully_shard(model.inner)
    try:
        fully_shard(model)(torch.ones(2, 3))
    except CollectivesError as error:
        found["written"] = str(error)
    model = Failing()
    for each in (model.head, model.attention.out_proj):
        fully_shard(each)
    fully_shard(model)
    for _ in range(2):
        try:
            model(inputs(ctx.rank))
        except ValueError:
            found["failed"] = model.head.weight.shape  # outside of a forward: shards
    Failing.fails = False
    model(inputs(ctx.rank)).sum().backward()
    found["grads"] = [param.grad is None for param in model.parameters()]
    Failing.fails = True
    compiled = Failing()
    compiled.fails = False
    plain = Failing()
    plain.fails = False
    compiled.compile(backend="aot_eager")
    fully_shard(compiled.head)
    fully_shard(compiled)
    found["compiled"] = torch.allclose(compiled(inputs(0)), plain(inputs(0)), atol=1e-6)
    return found


def test_writes_exceptions_and_compiled_readers(tmp_path):
    for found in run(other_reads, 2, str(tmp_path / "store")):
        assert "has written to weight in place" in found["written"]
        assert found["failed"] != (WIDTH, WIDTH) and not any(found["grads"]) and found["compiled"]
