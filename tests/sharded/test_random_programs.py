"""Random programs over a sharded model: after each event the parameters are those of one process."""

import contextlib
import functools
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives.sharded import fully_shard, uneven
from tests.ddp.training import batch
from tests.ranks import run_ranks

BLOCKS = 4
EVENTS = 40


class Net(nn.Module):
    """Blocks that a forward runs in any order, checkpointed or not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inp = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(BLOCKS))
        self.head = nn.Linear(8, 5)
        self.reentrant = None  # checkpointing's use_reentrant; None: without it

    def forward(self, x, order):
        h = torch.tanh(self.inp(x))
        for at in order:
            block = self.blocks[at]
            if self.reentrant is None or not torch.is_grad_enabled():
                h = h + block(h)
            else:
                h = h + checkpoint(block, h, use_reentrant=self.reentrant)
        return self.head(h)


def shard(net, comm, draw):
    reshard = draw.choice([True, True, False])
    for block in net.blocks:
        fully_shard(block, comm=comm, reshard_after_forward=reshard)
    if draw.random() < 0.5:
        fully_shard(net.head, comm=comm, reshard_after_forward=reshard)
    return fully_shard(net, comm=comm, reshard_after_forward=reshard)


class Program:
    """A program over one model. `ranks`: those whose batches it computes: its own in shards, all in the reference."""

    def __init__(self, net, ranks, size, *, sharded):
        self.net, self.ranks, self.size, self.sharded = net, ranks, size, sharded
        self.params = list(net.parameters())
        self.optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, foreach=False)
        self.order = tuple(range(BLOCKS))

    def loss(self, rank, at, order=None):
        x, y = batch(at, rank)
        return nn.functional.cross_entropy(self.net(x, self.order if order is None else order), y)

    def step(self, backward, clips=False):
        """Step with the ranks' average of the gradients that `backward(rank)` computes."""
        if self.sharded:
            backward(self.ranks[0])
        else:
            totals = [None] * len(self.params)
            for rank in self.ranks:
                backward(rank)
                for at, param in enumerate(self.params):
                    if param.grad is not None:
                        totals[at] = param.grad if totals[at] is None else totals[at] + param.grad
                    param.grad = None
            for param, total in zip(self.params, totals, strict=True):
                param.grad = None if total is None else total / self.size
        if clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def uneven(self):
        return uneven(self.net) if self.sharded else contextlib.nullcontext()

    def in_parts(self, rank, at, count):
        for part in range(count):
            if self.sharded:
                self.net.set_requires_gradient_sync(part == count - 1)
            self.loss(rank, 100 * at + part).backward()

    def state(self):
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    # ---- The events: `at`: its number; `draw`: the same random numbers on all ranks.

    def plain_steps(self, at, draw):
        for part in range(draw.choice([1, 3])):
            self.step(lambda rank, part=part: self.loss(rank, 100 * at + part).backward())

    def evaluation(self, at, draw):
        self.net.train(draw.random() < 0.5)
        with torch.no_grad():
            self.loss(self.ranks[0], at)
        self.net.train()

    def freezing(self, at, draw):
        module = draw.choice([self.net.inp, self.net.blocks[0], self.net.blocks[2]])  # the head gives a gradient always
        trains = draw.random() < 0.4
        for param in module.parameters():
            param.requires_grad_(trains)
        self.step(lambda rank: self.loss(rank, at).backward())

    def accumulation(self, at, draw):
        count = draw.choice([2, 3])
        self.step(lambda rank: self.in_parts(rank, at, count))

    def other_order(self, at, draw):
        self.order = tuple(draw.sample(range(BLOCKS), draw.choice([2, 3, 4])))

    def checkpointing(self, at, draw):
        self.net.reentrant = draw.choice([None, False, True])

    def two_forwards(self, at, draw):
        self.step(lambda rank: (self.loss(rank, at) + self.loss(rank, at + 500)).backward())

    def evaluation_on_rank_0(self, at, draw):
        with self.uneven(), torch.no_grad():
            if 0 in self.ranks:
                self.loss(0, at)
                self.loss(0, at + 1)

    def uneven_parts(self, at, draw):
        def backward(rank):
            with self.uneven():
                self.in_parts(rank, at, rank + 1)

        self.step(backward)

    def branches(self, at, draw):
        orders = [sorted(draw.sample(range(BLOCKS), draw.choice([1, 2, 3, 4]))) for _ in range(self.size)]

        def backward(part, rank):
            with self.uneven():
                self.loss(rank, 100 * at + part, orders[rank]).backward()

        for part in range(draw.choice([1, 4])):
            self.step(functools.partial(backward, part))

    def unsharding(self, at, draw):
        block, reshards = draw.randrange(BLOCKS), draw.random() < 0.5
        if self.sharded:
            self.net.blocks[block].unshard()
            if reshards:
                self.net.reshard()

    def static_graph(self, at, draw):
        is_static = draw.random() < 0.6
        if self.sharded:
            self.net.set_static_graph(is_static)

    def retained_graph(self, at, draw):
        self.step(lambda rank: self.loss(rank, at).backward(retain_graph=True))

    def clipping(self, at, draw):
        self.step(lambda rank: self.loss(rank, at).backward(), clips=True)


CHANGES = [
    Program.evaluation, Program.freezing, Program.accumulation, Program.other_order, Program.checkpointing,
    Program.two_forwards, Program.evaluation_on_rank_0, Program.uneven_parts, Program.branches, Program.unsharding,
    Program.static_graph, Program.retained_graph, Program.clipping,
]  # fmt: skip


def compare(ctx, seeds):
    """Run programs in shards and on one process; return for each seed the first event after which they differ."""
    found = {}
    for seed in seeds:
        draw = random.Random(seed)
        comm = ctx.communicator().split(0)
        comm.timeout = 20.0
        ours = Program(shard(Net(), comm, draw), [ctx.rank], ctx.size, sharded=True)
        theirs = Program(Net(), range(ctx.size), ctx.size, sharded=False)
        history = []
        for at in range(EVENTS):
            event = draw.choice([Program.plain_steps] * 6 + CHANGES)
            history.append(event.__name__)
            numbers = draw.randrange(1 << 30)
            try:
                for program in (theirs, ours):
                    event(program, at, random.Random(numbers))
            except Exception as error:
                raise AssertionError(f"seed {seed}, in the last of {history}") from error
            for name, value in theirs.state().items():
                got = ours.state()[name]
                if not torch.allclose(got, value, rtol=1e-4, atol=1e-6):
                    found.setdefault(seed, (name, (got - value).abs().max().item(), history))
            if seed in found:
                break
        comm.close()
    return found


def check(ranks, seeds, *, overlaps):
    for found in run_ranks(compare, ranks, seeds, timeout=150, env={"COLLECTIVES_OVERLAP": str(int(overlaps))}):
        assert found == {}


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
def test_programs(overlaps):
    check(2, [1], overlaps=overlaps)


def test_programs_on_three_ranks():
    check(3, [22], overlaps=True)


@pytest.mark.thorough
@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("first", range(2, 26, 4))
def test_more_programs(ranks, first, overlaps):
    check(ranks, list(range(first, first + 4)), overlaps=overlaps)
