"""Changes to a module after it is sharded: as with DDP, or a named error."""

import functools
import typing

import torch
from torch import nn

from collectives.errors import CollectivesError
from collectives.sharded import ShardedDataParallel, fully_shard
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.sharded.training import full

RANKS = 2
STEPS = 4


def sharded(model, **how):
    for each in model:
        if any(True for _ in each.parameters()):
            fully_shard(each, **how)
    return fully_shard(model, **how)


def rule(params):
    return torch.optim.AdamW(params, 0.01, foreach=False)


def loss_of(model, rank, step):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def alone(make, change):
    """Train on all ranks' batches in one process."""
    model = make()
    optimizer = rule(list(model.parameters()))
    for step in range(STEPS):
        change(model, step)
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(RANKS)) / RANKS).backward()
        optimizer.step()
    return dict(model.named_parameters())


def differ(ours, theirs):
    return [name for name, value in theirs.items() if not torch.allclose(ours[name], value, atol=2e-5)]


def partly_frozen():
    model = make_model()
    model[0].requires_grad_(False)
    next(model[-1].parameters()).requires_grad_(False)
    return model


def halve(grad):
    return grad * 0.5


def freeze(model, step):
    model[0].requires_grad_(step < 2)


def thaw(model, step):
    model.requires_grad_(True) if step == 2 else None


def hook(model, step):
    model[0].weight.register_hook(halve) if step == 1 else None


def hooked():
    model = make_model()
    model[0].weight.register_hook(halve)
    return model


def nothing(model, step):
    pass


CHANGES = {
    "freeze": (make_model, freeze), "thaw": (partly_frozen, thaw), "hook": (make_model, hook),
    "hook before": (hooked, nothing),
}  # fmt: skip


@over_gloo
def all_changes(ctx):
    found = {}
    for name, (make, change) in CHANGES.items():
        model = sharded(make())
        optimizer = rule(list(model.parameters()))
        for step in range(STEPS):
            change(model, step)
            optimizer.zero_grad()
            loss_of(model, ctx.rank, step).backward()
            optimizer.step()
        found[name] = differ(full(model), alone(make, change))
    for reshard in (True, False):  # zero_grad at different times, of the module or its owner, and after an evaluation
        model = sharded(make_model(), reshard_after_forward=reshard)
        outer = nn.ModuleList([model])
        optimizer = rule(list(model.parameters()))
        shapes = [param.shape for param in model.parameters()]
        for step in range(STEPS):
            loss = loss_of(model, ctx.rank, step)
            (model if step % 2 else outer).zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                loss_of(model, ctx.rank, step)
            found["shapes", reshard, step] = [p.shape for p in model.parameters()] != shapes
        found["zero_grad", reshard] = differ(full(model), alone(make_model, nothing))
    return found


def step_in_backward(ctx):
    """An optimizer for each parameter, stepped by its hook."""
    model = sharded(make_model())
    optimizers = {param: rule([param]) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for step_number in range(STEPS):
        loss_of(model, ctx.rank, step_number).backward()
    return differ(full(model), alone(make_model, nothing))


def one_thaws(ctx):
    """Ranks that disagree on what is frozen: those without a gradient count as 0."""
    model = sharded(partly_frozen())
    model[0].requires_grad_(ctx.rank == 0)
    for step in range(2):
        model.zero_grad()
        loss_of(model, ctx.rank, step).backward()
    plain = make_model()
    loss_of(plain, 0, 1).backward()
    with ShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        return not torch.allclose(model[0].weight.grad, plain[0].weight.grad / RANKS, atol=1e-6)


def error_of(call):
    try:
        call()
    except CollectivesError as error:
        return str(error)
    return ""


def added(model):
    model[0].register_parameter("scale", nn.Parameter(torch.ones(3)))


def exchanged(model):
    model.append(nn.Linear(5, 5))


class ReadsAnnotations(nn.Linear):
    """A model whose class reads the annotations of every class made from it, as those of transformers do."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.annotations = typing.get_type_hints(cls)


@over_gloo
def others(ctx):
    found = {"in backward": step_in_backward(ctx), "one thaws": one_thaws(ctx)}
    for change in (added, exchanged):
        model = sharded(make_model())
        change(model)
        found[change.__name__] = error_of(functools.partial(loss_of, model, ctx.rank, 0))
    for shard in (fully_shard, ShardedDataParallel):
        found["annotations", shard.__name__] = "weight" in type(shard(ReadsAnnotations(2, 2))).annotations
    model = sharded(nn.Sequential(nn.Embedding(5, 6, max_norm=0.1), nn.Linear(6, 5)))
    found["written"] = error_of(lambda: model(batch(0, ctx.rank)[1]))
    return found


def test_training_follows_changes(tmp_path):
    for found in run(all_changes, RANKS, str(tmp_path / "store")):
        assert not any(found.values()), found


def test_hooks_of_shards_and_refused_changes(tmp_path):
    for found in run(others, RANKS, str(tmp_path / "store")):
        assert not found["in backward"] and not found["one thaws"], found
        assert "scale of this" in found["added"] and "was added after it was sharded" in found["added"]
        assert "weight of this Sequential was added" in found["exchanged"]
        assert "has written to weight in place" in found["written"]
        assert found["annotations", "fully_shard"] and found["annotations", "ShardedDataParallel"]
