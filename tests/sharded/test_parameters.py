"""Parameters of all kinds, units of several modules, precision, changes of a module, and compiled blocks."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from collectives.errors import CollectivesError
from collectives.sharded import MixedPrecisionPolicy, fully_shard
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.ranks import run_ranks
from tests.sharded.programs import averaged, differences, full_grads, full_params
from tests.sharded.training import RULES, by_ddp, full, loss_of, sharded, steps_of


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
        self.transposed = nn.Parameter(torch.randn(12, 12).t())
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
        y = ((h @ self.transposed).double() @ self.wide).float() @ self.sixteen.float() + self.empty.sum()
        y = y * (self.complex * self.complex.conj()).real.sum() + self.counts.sum()
        return self.again(y)


def backward_odd(model, rank):
    model(batch(0, rank)[0]).square().mean().backward()
    if not hasattr(model, "unshard"):
        model.sparse.weight.grad = model.sparse.weight.grad.to_dense()


@over_gloo
def odd(ctx):
    for reshard in (True, False):
        model, plain = fully_shard(Odd(), reshard_after_forward=reshard), Odd()
        names = list(dict(plain.named_parameters()))
        assert list(dict(model.named_parameters())) == names
        for name, param in plain.named_parameters():
            ours = model.get_parameter(name)
            assert isinstance(ours, DTensor) and (ours.shape, ours.dtype) == (param.shape, param.dtype)
            assert torch.equal(ours.full_tensor(), param)
        for _ in range(2):
            model.zero_grad()
            backward_odd(model, ctx.rank)
        assert not differences(full_grads(model), averaged(ctx, plain, backward_odd), rtol=1e-2, atol=1e-4)
        trainable = [param for param in model.parameters() if param.requires_grad]
        torch.optim.SGD(trainable, 0.1).step()
        for name, value in full_params(model).items():
            before = plain.get_parameter(name)
            assert not value.numel() or torch.equal(value, before) != before.requires_grad, name


@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_of_all_kinds(ranks, tmp_path):
    run_ranks(odd, ranks, str(tmp_path / "store"))


class Returns(nn.Module):
    """Returns its own parameters and views of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.linear, self.scale = nn.Linear(12, 5), nn.Parameter(torch.ones(()) * 3)

    def forward(self, x):
        weight = self.linear.weight
        return self.linear(x), self.scale, {"weight": weight, "rows": [weight[1:], weight.detach().t()]}


def tensors_of(output):
    y, scale, more = output
    return [y, scale, more["weight"], *more["rows"]]


@over_gloo
def returned(ctx):
    """What a forward returns of its parameters keeps its values past the reshard, and has gradients."""
    x = batch(0, 0)[0]
    for root in (True, False):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            plain, model = Returns(), fully_shard(Returns(), reshard_after_forward=True)
            if not root:
                model = fully_shard(nn.Sequential(model))
            with mode():
                theirs, ours = tensors_of(plain(x)), tensors_of(model(x))
            assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), (root, mode)
            if mode is torch.enable_grad:
                for tensors in (ours, theirs):
                    sum(tensor.square().sum() for tensor in tensors if tensor.requires_grad).backward()
                grads = [grad for grad in full_grads(model).values()]
                assert all(torch.allclose(a, b.grad) for a, b in zip(grads, plain.parameters(), strict=True))


def test_own_parameters_in_outputs(tmp_path):
    run_ranks(returned, 2, str(tmp_path / "store"))


# ---- Precision.


@over_gloo
def in_bf16(ctx):
    expected, _ = by_ddp(make_model, "sgd", ctx.rank, 10)
    for policy in (
        MixedPrecisionPolicy(torch.bfloat16),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    ):
        model, seen = make_model(), []
        for layer in model[::2]:
            fully_shard(layer, mp_policy=policy)
            layer.register_forward_hook(lambda m, args, out, seen=seen: seen.append((args[0].dtype, m.weight.dtype)))
        fully_shard(model, mp_policy=policy)
        steps_of(model, RULES["sgd"](model.parameters()), 10, ctx.rank)
        assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
        assert all(param.dtype == param.grad.dtype == torch.float32 for param in model.parameters())
        # Ten steps of bf16 gradients: each within 2^-8 of its size, and the path diverges slowly.
        assert not differences(full(model), expected, rtol=0, atol=0.05)
    model, plain = sharded(), make_model()
    ddp = nn.parallel.DistributedDataParallel(plain)
    for each in (model, ddp):
        optimizer = RULES["sgd"](each.parameters())
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                steps_of(each, optimizer, 1, ctx.rank, first=step)
    assert not differences(full(model), full(plain), atol=0.003)


def test_mixed_precision(tmp_path):
    run_ranks(in_bf16, 2, str(tmp_path / "store"))


@over_gloo
def compiled(ctx):
    """The inner blocks compiled, as whole programs do it, or the whole; with a backend that needs no compiler."""
    expected, _ = by_ddp(make_model, "sgd", ctx.rank, 5)
    for reshard in (True, False):
        model = make_model()
        for layer in model[::2]:
            layer.compile(backend="aot_eager")
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model)
        steps_of(model, RULES["sgd"](model.parameters()), 5, ctx.rank)
        assert not differences(full(model), expected)
    model = sharded()
    steps_of(torch.compile(model, backend="aot_eager"), RULES["sgd"](model.parameters()), 5, ctx.rank)
    assert not differences(full(model), expected)


def test_compiled_blocks(tmp_path):
    run_ranks(compiled, 2, str(tmp_path / "store"))


# ---- Units of several modules.


class Words(nn.Module):
    """An embedding and a head with one weight, a norm, and blocks between them."""

    def __init__(self, tied=True, chunks=1):
        super().__init__()
        torch.manual_seed(8)
        self.embed, self.norm, self.head = nn.Embedding(29, 12), nn.LayerNorm(12), nn.Linear(12, 29, bias=not tied)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)])
        if tied:
            self.head.weight = self.embed.weight
        self.chunks = chunks

    def forward(self, tokens, head=True):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        return torch.cat([self.head(part) for part in x.chunk(self.chunks)]) if head else x


def grouped(model, **options):
    modules = [model.norm, model.embed, model.head]
    assert fully_shard(modules, **options) is modules
    returned = fully_shard((model.blocks[0], model.blocks[2]), **options)
    assert isinstance(returned, tuple) and returned[1] is model.blocks[2]
    return fully_shard(model, **options)


def words(rank, step=0):
    return torch.randint(0, 29, (8,), generator=torch.Generator().manual_seed(1000 * step + rank))


def by_words(model, rank):
    nn.functional.cross_entropy(model(words(rank)), words(rank).roll(1)).backward()


def by_parts(model, rank):
    """The head is called alone, in chunks."""
    out = model(words(rank), head=False)
    zeros = torch.zeros(4, dtype=torch.long)
    sum(nn.functional.cross_entropy(model.head(part), zeros) for part in out.chunk(2)).backward()


@over_gloo
def lists(ctx):
    for tied in (True, False):
        for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": True}):
            for make in (functools.partial(Words, tied), functools.partial(Words, tied, 2)):
                model = grouped(make(), **options)
                model.embed.set_modules_to_forward_prefetch([model.blocks[0]])
                for backward in (by_words, by_parts):
                    for _ in range(2):
                        model.zero_grad()
                        backward(model, ctx.rank)
                    assert not differences(full_grads(model), averaged(ctx, make(), backward)), (tied, options)
    unit = model.norm._sharded_unit
    assert unit is model.embed._sharded_unit is model.head._sharded_unit
    model = grouped(Words(False))
    unit, seen = model.norm._sharded_unit, []
    model.blocks[1].register_forward_pre_hook(lambda *_: seen.append(unit.is_unsharded))
    with torch.no_grad():
        model(words(0))
        assert not unit.is_unsharded
        model(words(0), head=False)  # the end of the outermost forward reshards
    assert seen == [True, True] and not unit.is_unsharded
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(words(0).float())  # an exception in the embedding
    by_words(model, ctx.rank)
    model.embed.unshard()
    assert model.head.weight.shape == (29, 12) and not isinstance(model.head.weight, DTensor)
    model.head.reshard()
    assert isinstance(model.embed.weight, DTensor)
    nested = Words(False)
    fully_shard([nested.blocks[0], nested.blocks[0][0]])  # the inner one is of the outer one, as in FSDP2
    assert not hasattr(nested.blocks[0][0], "_sharded_unit")


def test_lists_of_modules(tmp_path):
    run_ranks(lists, 2, str(tmp_path / "store"), timeout=120)


# ---- Changes of a module after it is sharded.

STEPS = 4


def partly_frozen():
    model = make_model()
    model[0].requires_grad_(False)
    next(model[-1].parameters()).requires_grad_(False)
    return model


def halve(grad):
    return grad * 0.5


def hooked():
    model = make_model()
    model[0].weight.register_hook(halve)
    return model


CHANGES = {
    "freeze": (make_model, lambda model, step: model[0].requires_grad_(step < 2)),
    "thaw": (partly_frozen, lambda model, step: model.requires_grad_(True) if step == 2 else None),
    "hook": (make_model, lambda model, step: model[0].weight.register_hook(halve) if step == 1 else None),
    "hook before": (hooked, lambda model, step: None),
}


def adamw(params):
    return torch.optim.AdamW(params, 0.01, foreach=False)


def alone(make, change, size):
    """Train on all ranks' batches in one process."""
    model = make()
    optimizer = adamw(list(model.parameters()))
    for step in range(STEPS):
        change(model, step)
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(size)) / size).backward()
        optimizer.step()
    return full_params(model)


@over_gloo
def changes(ctx):
    found = {}
    for name, (make, change) in CHANGES.items():
        model = sharded(make())
        optimizer = adamw(list(model.parameters()))
        for step in range(STEPS):
            change(model, step)
            optimizer.zero_grad()
            loss_of(model, ctx.rank, step).backward()
            optimizer.step()
        found[name] = differences(full_params(model), alone(make, change, ctx.size), atol=2e-5)
    # An optimizer for each parameter, stepped by its hook in the backward.
    model = sharded()
    optimizers = {param: adamw([param]) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        loss_of(model, ctx.rank, number).backward()
    expected = alone(make_model, lambda model, step: None, ctx.size)
    found["stepped by hooks"] = differences(full_params(model), expected, atol=2e-5)
    for reshard in (True, False):  # written to after an evaluation, from outside of an optimizer
        model, plain = sharded(reshard_after_forward=reshard), make_model()
        x = batch(0, 0)[0]
        for look in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with look():
                model(x)
            for each in (model, plain):
                with torch.no_grad():
                    for param in each.parameters():
                        param.mul_(1.5)
            with torch.no_grad():
                if not torch.allclose(model(x), plain(x), 1e-4, 1e-5):
                    found["stale", reshard, look.__name__] = ["old values"]
    return found


def test_changes_after_sharding(tmp_path):
    for found in run_ranks(changes, 2, str(tmp_path / "store")):
        assert found == dict.fromkeys(found, [])


@over_gloo
def parts_of_older_values(ctx):
    """Parts that neighbours keep after a forward aren't used once the parameters were written to."""
    model, plain = sharded(reshard_after_forward=2), make_model()
    x = batch(0, 0)[0]
    for _ in range(2):
        assert torch.allclose(model(x), plain(x), 1e-4, 1e-5)
        for each in (model, plain):
            with torch.no_grad():
                for param in each.parameters():
                    param.mul_(1.5)
    with model[0]._sharded_unit.unsharded():
        assert torch.allclose(model[0].weight, plain[0].weight)
    assert torch.allclose(model(x), plain(x), 1e-4, 1e-5)


def test_parts_of_older_values(tmp_path):
    run_ranks(parts_of_older_values, 4, str(tmp_path / "store"))


@over_gloo
def conversions(ctx):
    """A module that is converted after it is sharded trains in the new dtype."""
    for dtype in (torch.float64, torch.bfloat16):
        model, plain = sharded().to(dtype), make_model().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def backward(model, rank, dtype=dtype):
            x, y = batch(0, rank)
            nn.functional.cross_entropy(model(x.to(dtype)), y).backward()

        backward(model, ctx.rank)
        assert {param.dtype for param in model.parameters()} == {dtype}
        exact = {"rtol": 1e-9, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 0.1, "atol": 0.01}
        assert not differences(full_grads(model), averaged(ctx, plain, backward), **exact)
        optimizer.step()
    model = sharded()
    model.float(), model.to("cpu")  # what changes nothing
    loss_of(model, ctx.rank).backward()
    model[0]._apply(lambda tensor: tensor.double() if tensor.dim() > 1 else tensor)
    with pytest.raises(CollectivesError, match="several dtypes"):
        loss_of(model, ctx.rank)


def test_conversions(tmp_path):
    run_ranks(conversions, 2, str(tmp_path / "store"))


def with_norm():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def average(model, averaged):
    optimizer = adamw(model.parameters())
    for step in range(3):
        model(torch.randn(6, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)


@over_gloo
def averages(ctx):
    """An AveragedModel of the unsharded model, which is sharded alike."""
    batches = [torch.randn(6, 5, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
        plain = with_norm()
        expected = AveragedModel(plain, **options)
        model = with_norm()
        averaged = AveragedModel(model, **options)
        for each in (model, averaged.module):
            fully_shard(each[0])
            fully_shard(each)
        average(plain, expected), average(model, averaged)
        assert not differences(full_params(averaged), full_params(expected))
        update_bn(batches, expected), update_bn(batches, averaged)
        expected.eval(), averaged.eval()
        assert torch.allclose(averaged(batches[0]), expected(batches[0]), atol=1e-6)


def test_averages(tmp_path):
    run_ranks(averages, 2, str(tmp_path / "store"))


@over_gloo
def other_values(ctx):
    import warnings

    torch.manual_seed(ctx.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(nn.Linear(3, 3))
        seeded_apart = [str(each.message) for each in caught]
        fully_shard(make_model())
    return seeded_apart, len(caught) - len(seeded_apart)


def test_ranks_with_other_values_are_warned(tmp_path):
    for messages, others in run(other_values, 2, str(tmp_path / "store")):
        assert len(messages) == 1 and "values of a Linear with weight differ" in messages[0]
        assert not others
