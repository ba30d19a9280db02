"""Training of small models in shards and, for comparison, by our DDP hook."""

import functools

import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives.sharded import fully_shard
from tests.ddp.training import batch, make_model

RULES = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "sgd, foreach": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, foreach=False),
    "adamw, foreach": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
    "our sgd": lambda params: collectives.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01),
    "our adamw": lambda params: collectives.optim.AdamW(params, 0.01),
}


def over_comm(function):
    """Run a function of (ctx, ...) without torch.distributed; the groups over its communicators end with it."""

    @functools.wraps(function)
    def inside(ctx, *args):
        try:
            return function(ctx, *args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return inside


def sharded(model=None, **options):
    """Make each layer of a Sequential a unit, and the rest."""
    model = make_model() if model is None else model
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def loss_of(model, rank, step=0):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def steps_of(model, optimizer, count, rank, *, micro=1, first=0):
    """Train `count` steps of `micro` backwards, the last one synchronised; return the losses."""
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        for part in range(micro):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == micro - 1)
            else:
                model.require_backward_grad_sync = part == micro - 1
            loss = loss_of(model, rank, 10 * step + part)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_ddp(make, rule, rank, count=20, **how):
    """Train by our DDP hook; return the parameters by name, and the losses."""
    model = make()
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, collectives.fused_allreduce)
    losses = steps_of(ddp, RULES[rule](ddp.parameters()), count, rank, **how)
    return {name: param.detach().clone() for name, param in model.named_parameters()}, losses


def full(model):
    """Return copies of the full parameters by name."""
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for name, param in model.named_parameters()
    }


def same(ours, theirs):
    """Return the names of parameters that differ in a bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
