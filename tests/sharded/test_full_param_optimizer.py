"""Optimizers of whole parameters over shards: the results, state and errors of one process."""

import torch
from torch import nn

from collectives.sharded import FullParamOptimizer, ShardedDataParallel, ShardingStrategy, fully_shard
from tests.ranks import run_ranks
from tests.sharded.training import full

STEPS = 4


class Net(nn.Module):
    """Matrices of several shapes, biases, and a matrix that is used in every other step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 9))
        self.branch = nn.Linear(6, 9, bias=False)
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)

    def forward(self, x, branch=True):
        return self.net(x) + (self.branch(x) if branch else 0) + self.frozen.sum()


def batch(step, rank):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def matrices(model):
    return [param for param in model.parameters() if param.dim() > 1 and param.requires_grad]


def vectors(model):
    return [param for param in model.parameters() if param.dim() == 1]


def muon_and_adamw(model, sharded):
    if sharded:
        muon = FullParamOptimizer(matrices(model), torch.optim.Muon, lr=0.05, weight_decay=0.01)
    else:
        muon = torch.optim.Muon(matrices(model), lr=0.05, weight_decay=0.01)
    return [muon, torch.optim.AdamW(vectors(model), lr=0.01, foreach=False)]


def adafactor(model, sharded):
    # The frozen parameter, too, in groups of other options.
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": vectors(model), "lr": 0.1}]
    if sharded:
        return [FullParamOptimizer(groups, torch.optim.Adafactor, lr=0.05)]
    return [torch.optim.Adafactor(groups, lr=0.05)]


def sgd(model, sharded):
    named = list(model.named_parameters())
    if sharded:
        return [FullParamOptimizer(named, torch.optim.SGD, lr=0.05, momentum=0.9)]
    return [torch.optim.SGD(named, lr=0.05, momentum=0.9)]


RULES = {rule.__name__: rule for rule in (muon_and_adamw, adafactor, sgd)}


def step_all(optimizers, schedulers):
    for each in [*optimizers, *schedulers]:
        each.step()
    for each in optimizers:
        each.zero_grad()


def schedules(optimizers):
    return [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in optimizers]


def train(model, optimizers, rank, first=0, last=STEPS):
    schedulers = schedules(optimizers)
    for step in range(first, last):
        model(batch(step, rank), branch=step % 2 == 0).square().mean().backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1e6)
        step_all(optimizers, schedulers)


def unsharded(rule, ranks, last=STEPS):
    """Train one process with the mean gradients of the ranks, summed in their order."""
    model = Net()
    optimizers = RULES[rule](model, False)
    schedulers = schedules(optimizers)
    for step in range(last):
        sums = {}
        for rank in range(ranks):
            model.zero_grad()
            model(batch(step, rank), branch=step % 2 == 0).square().mean().backward()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    sums[name] = param.grad if name not in sums else sums[name] + param.grad
        for name, param in model.named_parameters():
            param.grad = sums[name] / ranks if name in sums else None
        step_all(optimizers, schedulers)
    return model, optimizers


def shard(comm, how):
    model = Net()
    if how == "units":
        fully_shard(model.net[0], comm=comm)
        fully_shard(model.net, comm=comm)
        return fully_shard(model, comm=comm, reshard_after_forward=False)
    if how == "kept among 2":
        fully_shard(model.net, comm=comm, reshard_after_forward=2)
        return fully_shard(model, comm=comm)
    return ShardedDataParallel(model, comm=comm, sharding_strategy=ShardingStrategy[how])


def trained(ctx, rule, how):
    model = shard(ctx.communicator(), how)
    optimizers = RULES[rule](model, True)
    train(model, optimizers, ctx.rank)
    expected, theirs = unsharded(rule, ctx.size)
    ours = full(model)
    wrong = [name for name, value in expected.state_dict().items() if not torch.equal(value, ours[name])]
    assert optimizers[0].param_groups[0]["lr"] == theirs[0].param_groups[0]["lr"] != 0.05
    owned = [len(state) for state in optimizers[0].state_dict()["state"].values()]
    return wrong, len(owned)


def test_muon_and_adamw_are_those_of_one_process():
    for ranks, how in ((2, "units"), (3, "FULL_SHARD"), (2, "SHARD_OPTIMIZER"), (2, "NO_SHARD"), (2, "kept among 2")):
        found = run_ranks(trained, ranks, "muon_and_adamw", how)
        assert [wrong for wrong, _ in found] == [[]] * ranks, how
        assert sum(owned for _, owned in found) == (8 if how == "NO_SHARD" else 4), how


def test_adafactor_and_sgd_are_those_of_one_process():
    for rule in ("adafactor", "sgd"):
        found = run_ranks(trained, 3, rule, "units")
        assert [wrong for wrong, _ in found] == [[]] * 3, rule
        assert sum(owned for _, owned in found) == 7
