"""FSDP2's methods of a sharded module, custom collectives, and units that are used directly."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives.sharded import ShardedDataParallel, Unit, fully_shard, register_forward_method
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.sharded.test_scheduler import check, equal, expected, gradients
from tests.sharded.training import RULES, full, same


def sharded(**how):
    model = make_model()
    for each in model[::2]:
        fully_shard(each, **how)
    return fully_shard(model, **how)


def backward(model, rank, step=0):
    x, y = batch(step, rank)
    nn.functional.cross_entropy(model(x), y).backward()


class Gathers:
    """Torch's own all-gather, with FSDP2's interface; counts its calls."""

    def __init__(self):
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output, inp, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output, inp, group=group, async_op=async_op)


class Scatters(Gathers):
    def __call__(self, output, inp, group, op, async_op=False):
        self.calls += 1
        assert op == dist.ReduceOp.AVG
        whole = inp.clone()
        dist.all_reduce(whole, group=group)
        output.copy_(whole.chunk(group.size())[group.rank()] / group.size())


@over_gloo
def methods(ctx):
    theirs = expected(make_model, backward, ctx.size)
    found = custom_collectives(ctx, theirs)
    for part in (unshard_and_prefetch, divide_factor, last_backward, forward_method, kept_after_forward):
        found.update(part(ctx, theirs))
    return found


def custom_collectives(ctx, theirs):
    found = {}
    model = sharded()
    gathers, scatters = Gathers(), Scatters()
    for each in (model, *model[::2]):
        each.set_custom_all_gather(gathers)
        each.set_custom_reduce_scatter(scatters)
    backward(model, ctx.rank)
    found["own collectives"] = equal(gradients(model), theirs, close=True)
    found["they were called"] = [] if gathers.calls >= 4 and scatters.calls == 4 else [gathers.calls, scatters.calls]

    calls = []

    def reduces(tensor, comm, op, async_op):
        calls.append(op)
        comm.all_reduce(tensor, "avg")

    model = ShardedDataParallel(make_model(), sharding_strategy="NO_SHARD")
    model.set_custom_all_reduce(reduces)
    backward(model, ctx.rank)
    found["own all-reduce"] = equal(gradients(model), theirs) or ([] if calls == [dist.ReduceOp.AVG] else calls)
    return found


def unshard_and_prefetch(ctx, theirs):
    found = {}
    model = sharded()
    handle = model[0].unshard(async_op=True)
    handle.wait()
    found["unshard"] = [] if model[0].weight.shape == (40, 12) else [model[0].weight.shape]
    model[0].reshard()
    found["reshard"] = [] if model[0].weight.shape == (1, 260 - 40 * ctx.rank) else [model[0].weight.shape]
    model[0].set_modules_to_forward_prefetch([model[2], model[4]])
    model[4].set_modules_to_backward_prefetch([model[2], model[0]])
    model.set_reshard_after_backward(False)
    backward(model, ctx.rank)
    kept = model[2]._unit.state.name, model[2].weight.shape[0]
    found["kept after the backward"] = [] if kept == ("UNSHARDED", 1) else kept
    found["prefetch by name"] = equal(gradients(model), theirs)
    return found


def divide_factor(ctx, theirs):
    model = sharded()
    model.set_gradient_divide_factor(4.0)
    backward(model, ctx.rank)
    halves = {name: value * (ctx.size / 4) for name, value in theirs.items()}
    return {"divide factor": equal(gradients(model), halves, close=True)}


def last_backward(ctx, _theirs):
    model = sharded()
    model.set_is_last_backward(False)
    backward(model, ctx.rank)
    model.set_is_last_backward(True)
    backward(model, ctx.rank, 1)

    def both(model, rank):
        backward(model, rank)
        backward(model, rank, 1)

    return {"last of two backwards": equal(gradients(model), expected(make_model, both, ctx.size), close=True)}


class Two(nn.Module):
    """A module with another forward method."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(12, 5)

    def encode(self, x):
        return self.inner(x)


def forward_method(ctx, _theirs):
    found = {}
    model = fully_shard(Two())
    register_forward_method(model, "encode")
    model.encode(batch(0, ctx.rank)[0]).sum().backward()
    found["another forward"] = equal(
        gradients(model), expected(Two, lambda model, rank: model.encode(batch(0, rank)[0]).sum().backward(), ctx.size)
    )
    found["printed"] = [] if "unit" in repr(model) and "Two" in repr(model) else [repr(model)]
    return found


def kept_after_forward(ctx, theirs):
    found = {}
    model = sharded()
    model.set_reshard_after_forward(False)
    loss = nn.functional.cross_entropy(model(batch(0, ctx.rank)[0]), batch(0, ctx.rank)[1])
    states = {unit._unit.state.name for unit in ShardedDataParallel.fsdp_modules(model)}
    loss.backward()
    found["kept after the forward"] = equal(gradients(model), theirs) or ([] if states == {"UNSHARDED"} else states)
    roots = ShardedDataParallel.fsdp_modules(nn.ModuleList([model, nn.Linear(2, 2)]), root_only=True)
    found["roots"] = [] if roots == [model] else roots
    return found


def test_methods(tmp_path):
    check(methods, tmp_path)


@over_gloo
def whole_batch(ctx):
    """One process with all ranks' batches, to the rounding of fp32."""
    model = sharded()
    optimizer = RULES["adamw"](model.parameters())
    alone = make_model()
    other = RULES["adamw"](alone.parameters())
    for step in range(20):
        for each in (optimizer, other):
            each.zero_grad()
        x, y = batch(step, ctx.rank)
        nn.functional.cross_entropy(model(x), y).backward()
        parts = [batch(step, rank) for rank in range(ctx.size)]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        nn.functional.cross_entropy(alone(x), y).backward()
        optimizer.step()
        other.step()
    ours = full(model)
    # AdamW divides by the root of what are nearly zeros in the first steps: 20 steps of 0.01 move each by up to 0.2.
    return {"whole batch": [n for n, p in alone.named_parameters() if (ours[n] - p).abs().max() > 2e-4]}


def test_one_process_with_the_whole_batch(tmp_path):
    check(whole_batch, tmp_path)


@over_gloo
def an_embedding_beside_ddp(ctx):
    """docs/custom-wrappers.md: only the embedding in shards, DDP for the rest."""

    def make():
        torch.manual_seed(2)
        model = nn.Sequential()
        model.embedding, model.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        return model

    def train(model, optimizer):
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + ctx.rank)
            tokens = torch.randint(0, 50, (16,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens * 7 % 50).backward()
            optimizer.step()

    theirs = make()
    ddp = collectives.DistributedDataParallel(theirs)
    ddp.register_comm_hook(collectives.fused_allreduce)
    train(ddp, RULES["adamw"](theirs.parameters()))
    model = make()
    fully_shard(model.embedding)
    model._ddp_params_and_buffers_to_ignore = [f"embedding.{name}" for name, _ in model.embedding.named_parameters()]
    ddp = collectives.DistributedDataParallel(model)
    ddp.register_comm_hook(collectives.fused_allreduce)
    train(ddp, RULES["adamw"](model.parameters()))
    return {"embedding": same(full(model), {name: param.detach() for name, param in theirs.named_parameters()})}


def test_an_embedding_beside_ddp(tmp_path):
    check(an_embedding_beside_ddp, tmp_path)


def unit_by_hand(ctx):
    """A unit on a communicator alone: no torch.distributed, gradients that aren't autograd's."""
    torch.manual_seed(4)
    layer = nn.Linear(5, 3)
    before = [param.detach().clone() for param in layer.parameters()]
    unit = Unit(layer, ctx.communicator())
    assert sum(shard.numel() for shard in unit.pieces()) < 18 or ctx.size == 1
    with unit.unsharded(write_back=True):
        whole = all(torch.equal(*pair) for pair in zip(layer.parameters(), before, strict=True))
        layer.weight.data += 1
    unit.unshard()
    written = torch.equal(layer.weight, before[0] + 1)
    unit.params[0].full.grad = torch.full_like(layer.weight, ctx.rank + 1.0)
    unit.reduce()
    unit.reshard()
    mean = (ctx.size + 1) / 2
    grads = [shard.grad for shard in unit.pieces()]
    return whole, written, torch.equal(grads[0], torch.full_like(grads[0], mean)), not grads[1].any().item()


def test_a_unit_by_hand():
    for ranks in (1, 3):
        assert run(unit_by_hand, ranks) == [(True, True, True, True)] * ranks


@over_gloo
def other_values(ctx):
    torch.manual_seed(ctx.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(nn.Linear(3, 3))
        seeded_apart = [str(each.message) for each in caught]
        ShardedDataParallel(nn.Linear(3, 3), sync_module_states=True)
        fully_shard(make_model())
    return seeded_apart, len(caught) - len(seeded_apart)


def test_ranks_with_other_values_are_warned(tmp_path):
    for messages, others in run(other_values, 2, str(tmp_path / "store")):
        assert len(messages) == 1 and "values of a Linear with weight differ" in messages[0]
        assert not others
