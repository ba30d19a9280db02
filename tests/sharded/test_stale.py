"""Gathered values older than the shards are never used, whatever stays gathered between forwards."""

import collections

import torch
from torch import nn

from collectives.errors import InvalidUsage
from collectives.sharded import ShardedDataParallel, ShardingStrategy
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.sharded.test_scheduler import equal, gradients

STRATEGIES = [each.name for each in ShardingStrategy if not each.name.startswith("_") and "HYBRID" not in each.name]


def make(strategy):
    policy = lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear)  # noqa: E731
    return ShardedDataParallel(make_model(), sharding_strategy=strategy, auto_wrap_policy=policy)


def loss_of(model, step):
    x, y = batch(step, 0)
    return nn.functional.cross_entropy(model(x), y)


def evaluate(model):
    with torch.inference_mode():
        model(batch(1, 0)[0])
    with torch.no_grad():
        return model(batch(0, 0)[0])


@over_gloo
def edits(ctx):
    """Shards are written to after an evaluation; then a new optimizer makes a step."""
    found = {}
    before = {"eval": evaluate, "grad": lambda model: loss_of(model, 0)}
    for strategy in STRATEGIES:
        for way, look in before.items():
            ours, theirs = make(strategy), make_model()
            shards = list(ours.parameters())
            look(ours)
            for model in (ours, theirs):
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(1.5)
            outs = [evaluate(model) for model in (ours, theirs)]
            look(ours)
            for model in (ours, theirs):
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                loss_of(model, 1).backward()
                optimizer.step()
            outs += [evaluate(model) for model in (ours, theirs)]
            found[strategy, way] = (
                [mine is not kept for mine, kept in zip(ours.parameters(), shards, strict=True)].count(True),
                *[not torch.allclose(a, b, 1e-5, 1e-6) for a, b in (outs[:2], outs[2:])],
            )
    return found


@over_gloo
def steps_between(ctx):
    """An optimizer steps between a forward and its backward: an error, or the gradients of the forward's values."""
    found = collections.Counter()
    for strategy in STRATEGIES:
        ours, theirs = make(strategy), make_model()
        optimizer = torch.optim.SGD(ours.parameters(), 0.1)
        loss_of(ours, 0).backward()  # learns what the backward begins with
        optimizer.zero_grad()
        losses = [loss_of(ours, 1), loss_of(ours, 2)]
        losses[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            losses[1].backward()
        except InvalidUsage as error:
            found[strategy, "between a forward and its backward" in str(error)] = True
        except RuntimeError as error:  # torch's own
            found[strategy, "modified by an inplace operation" in str(error)] = True
        else:
            loss_of(theirs, 2).backward()
            grads = {name: param.grad for name, param in theirs.named_parameters()}
            found[strategy, not equal(gradients(ours), grads, close=True)] = True
    return found


def both(ctx, path):
    return edits(ctx, path), steps_between(ctx, f"{path}.steps")


def test_stale_values_are_never_used(tmp_path):
    for edited, stepped in run(both, 2, str(tmp_path / "store")):
        assert len(edited) == 2 * len(STRATEGIES)
        for way, wrong in edited.items():
            assert wrong == (0, False, False), way
        assert stepped == {(strategy, True): True for strategy in STRATEGIES}
