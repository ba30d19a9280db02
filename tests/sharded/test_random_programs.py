"""Random programs over a sharded model with experts: after each event the parameters are those of one process."""

import functools
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives.sharded import fully_shard
from tests.ddp.training import batch
from tests.ranks import run_ranks
from tests.sharded.programs import full_params

BLOCKS = 4
EVENTS = 40


class Block(nn.Module):
    """Experts, to which the samples go by their first feature, or in turn from `first` on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.skips = True  # experts without samples

    def forward(self, x, first):
        h = self.norm(x)
        chosen = (h[:, 0] > 0).long() + first % 2
        out = x
        for at, expert in enumerate(self.experts):
            rows = (chosen == at).nonzero().flatten()
            if len(rows) or not self.skips:
                out = out.index_add(0, rows, expert(h[rows]))
        return out


class Net(nn.Module):
    """Blocks that a forward runs in any order, checkpointed or not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inp = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(8, 5)
        self.reentrant = None  # checkpointing's use_reentrant; None: without it

    def forward(self, x, order, first=0):
        h = torch.tanh(self.inp(x))
        for at in order:
            block = self.blocks[at]
            if self.reentrant is None or not torch.is_grad_enabled():
                h = h + block(h, first + at)
            else:
                h = h + checkpoint(block, h, first + at, use_reentrant=self.reentrant)
        return self.head(h)


def make_net(with_experts):
    """Return a net. `with_experts`: all ranks run all experts, since these are units, too."""
    net = Net().double()
    for block in net.blocks:
        block.skips = not with_experts
    return net


def shard(net, comm, draw):
    """Make units of layers, and in some programs of the experts inside."""
    reshard = draw.choice([None, True, False])
    for block in net.blocks:
        for expert in () if block.skips else block.experts:
            fully_shard(expert, comm=comm, reshard_after_forward=reshard)
        fully_shard(block, comm=comm, reshard_after_forward=reshard)
    if draw.random() < 0.5:
        fully_shard(net.head, comm=comm, reshard_after_forward=reshard)
    return fully_shard(net, comm=comm, reshard_after_forward=reshard)


class Program:
    """A program over one model. `ranks`: those whose batches it computes: its own in shards, all in the reference."""

    def __init__(self, net, ranks, size, *, sharded):
        self.net, self.ranks, self.size, self.sharded = net, ranks, size, sharded
        self.params = list(net.parameters())
        self.optimizer = torch.optim.SGD(net.parameters(), 0.003, momentum=0.9, foreach=False)
        self.order = tuple(range(BLOCKS))

    def loss(self, rank, at, first=0):
        x, y = batch(at, rank, rows=3)
        return nn.functional.cross_entropy(self.net(x.double(), self.order, first), y)

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

    def in_parts(self, rank, at, count):
        for part in range(count):
            if self.sharded:
                self.net.set_requires_gradient_sync(part == count - 1)
            self.loss(rank, 100 * at + part).backward()

    def state(self):
        return full_params(self.net)

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

    def other_experts(self, at, draw):
        """Ranks use other experts."""
        first = [draw.randrange(2) for _ in range(self.size)]

        def backward(part, rank):
            self.loss(rank, 100 * at + part, first[rank]).backward()

        for part in range(draw.choice([1, 4])):
            self.step(functools.partial(backward, part))

    def unsharding(self, at, draw):
        block, reshards = draw.randrange(BLOCKS), draw.random() < 0.5
        if self.sharded:
            self.net.blocks[block].unshard()
            if reshards:
                self.net.reshard()

    def retained_graph(self, at, draw):
        self.step(lambda rank: self.loss(rank, at).backward(retain_graph=True))

    def clipping(self, at, draw):
        self.step(lambda rank: self.loss(rank, at).backward(), clips=True)


CHANGES = [
    Program.evaluation, Program.freezing, Program.accumulation, Program.other_order, Program.checkpointing,
    Program.two_forwards, Program.other_experts, Program.unsharding, Program.retained_graph, Program.clipping,
]  # fmt: skip


def compare(ctx, seeds):
    """Run programs in shards and on one process; return for each seed the first event after which they differ."""
    found = {}
    for seed in seeds:
        draw = random.Random(seed)
        comm = ctx.communicator().split(0)
        comm.timeout = 20.0
        with_experts = draw.random() < 0.4
        ours = Program(shard(make_net(with_experts), comm, draw), [ctx.rank], ctx.size, sharded=True)
        theirs = Program(make_net(with_experts), range(ctx.size), ctx.size, sharded=False)
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
            found_now = ours.state()
            for name, value in theirs.state().items():
                got = found_now[name]
                if not torch.allclose(got, value, rtol=1e-9, atol=1e-11):
                    found.setdefault(seed, (name, (got - value).abs().max().item(), history))
            if seed in found:
                break
        comm.close()
    return found


def check(ranks, seeds):
    for found in run_ranks(compare, ranks, seeds, timeout=300):
        assert found == {}


def test_programs():
    check(2, [1, 2])


def test_programs_on_three_ranks():
    check(3, [22])


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("first", range(3, 27, 4))
def test_more_programs(ranks, first):
    check(ranks, list(range(first, first + 4)))
