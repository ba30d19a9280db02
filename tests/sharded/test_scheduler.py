"""Ranks that run other units, and exceptions: no rank waits for ever, and the gradients are right."""

import contextlib
import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives.errors import RemoteError
from collectives.sharded import ShardedDataParallel, fully_shard
from tests.ddp.training import batch, over_gloo, run

RANKS = 2


class Branches(nn.Module):
    """A trunk, and branches, of which each forward runs those in `which`."""

    def __init__(self, count=3):
        super().__init__()
        torch.manual_seed(12)
        self.trunk = nn.Linear(12, 20)
        self.branches = nn.ModuleList(nn.Linear(20, 5) for _ in range(count))
        self.never = nn.Linear(3, 3)

    def forward(self, x, which):
        h = torch.tanh(self.trunk(x))
        return sum(self.branches[each](h) for each in which)


def sharded(model, *parts, **how):
    for part in parts or [each for each in model.modules() if isinstance(each, nn.Linear)]:
        fully_shard(part, **how)
    return fully_shard(model, **how)


def gradients(model):
    """Return the full gradients by name; None where there is none."""
    with ShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def expected(make, run_rank, size=RANKS):
    """Return the average of all ranks' gradients, computed here on an unsharded model."""
    total, seen = {}, set()
    for rank in range(size):
        model = make()
        run_rank(model, rank)
        for name, param in model.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            total[name] = grad if name not in total else total[name] + grad
            if param.grad is not None:
                seen.add(name)
    return {name: value / size if name in seen else None for name, value in total.items()}


def equal(ours, theirs, close=False):
    wrong = []
    for name, value in theirs.items():
        mine = ours[name]
        if (mine is None) != (value is None):
            wrong.append((name, None if mine is None else "a gradient", None if value is None else "a gradient"))
        elif value is not None and not torch.equal(mine, value):
            # Sums of bf16 cancel: within two roundings of the largest.
            absolute = 2**-7 * value.abs().max().item() if value.dtype == torch.bfloat16 else 1e-6
            if close and torch.allclose(mine, value, 1e-5, absolute):
                continue
            wrong.append((name, (mine - value).abs().max().item()))
    return wrong


def loss_of(model, rank, which, step=0):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x, which), y)


@over_gloo
def branches(ctx):
    """Ranks run other units, in other orders, other numbers of them, and some none at all."""
    found = {}
    ways = {
        "other branches": [[0], [1]],
        "other orders": [[0, 1, 2], [2, 0, 1]],
        "more on one rank": [[0, 1, 2], [1]],
        "twice": [[0, 0], [0, 1]],
    }
    for reshard in (True, False):
        for name, which in ways.items():
            model = sharded(Branches(), reshard_after_forward=reshard)
            for _ in range(2):  # the second backward uses the order of the first
                model.zero_grad()
                loss_of(model, ctx.rank, which[ctx.rank]).backward()
            theirs = expected(Branches, lambda model, rank, which=which: loss_of(model, rank, which[rank]).backward())
            found[name, reshard] = equal(gradients(model), theirs)
    return found


@over_gloo
def alone(ctx):
    """Rank 0 evaluates alone between steps; one rank has more micro-batches; a unit is called alone."""
    model = sharded(Branches())
    for step in range(3):
        if ctx.rank == 0:
            with torch.no_grad():
                loss_of(model, 0, [0, 1], 77)
        model.zero_grad()
        loss_of(model, ctx.rank, [0], step).backward()
    found = {
        "evaluating": equal(
            gradients(model), expected(Branches, lambda model, rank: loss_of(model, rank, [0], 2).backward())
        )
    }
    model.zero_grad()
    h = torch.tanh(model.trunk(batch(0, ctx.rank)[0]))
    model.branches[1](h).square().sum().backward()

    def by_hand(model, rank):
        model.branches[1](torch.tanh(model.trunk(batch(0, rank)[0]))).square().sum().backward()

    found["a submodule alone"] = equal(gradients(model), expected(Branches, by_hand))
    return found


@over_gloo
def several(ctx):
    """Several forwards before a backward, several backwards, accumulation with and without sync, and by bytes."""
    found = {}
    for reshard in (True, False):
        model = sharded(Branches(), reshard_after_forward=reshard)

        def two_forwards(model, rank):
            (loss_of(model, rank, [0, 1], 1) + loss_of(model, rank, [1, 2], 2)).backward()

        two_forwards(model, ctx.rank)
        found["two forwards", reshard] = equal(gradients(model), expected(Branches, two_forwards))
        model.zero_grad()

        def apart(model, rank):
            first, second = loss_of(model, rank, [0, 1], 1), loss_of(model, rank, [1, 2], 2)
            first.backward()
            second.backward()

        apart(model, ctx.rank)
        found["two backwards", reshard] = equal(gradients(model), expected(Branches, apart), close=True)
        for keep_bytes in (None, 0, 500):
            model.zero_grad()
            model.set_requires_gradient_sync(False, keep_bytes=keep_bytes)
            loss_of(model, ctx.rank, [0, 1], 1).backward()
            if keep_bytes is None:
                found["no gradient yet", reshard] = [n for n, p in model.named_parameters() if p.grad is not None]
            model.set_requires_gradient_sync(True)
            loss_of(model, ctx.rank, [2], 2).backward()

            def micro(model, rank):
                loss_of(model, rank, [0, 1], 1).backward()
                loss_of(model, rank, [2], 2).backward()

            theirs = expected(Branches, micro)
            found["accumulated", keep_bytes, reshard] = equal(gradients(model), theirs, close=keep_bytes is not None)
    return found


class Checkpointed(nn.Module):
    def __init__(self, inside, reentrant):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)) for _ in range(3))
        self.inside, self.reentrant = inside, reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.inside else block(x)
        return x


class Inner(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        return checkpoint(lambda x: torch.tanh(self.second(torch.tanh(self.first(x)))), x, use_reentrant=False)


@over_gloo
def checkpointing(ctx):
    found = {}
    for reentrant in (False, True):
        for reshard in (True, False):

            def make(reentrant=reentrant):
                return Checkpointed(True, reentrant)

            def backward(model, rank):
                model(batch(0, rank)[0].requires_grad_()).square().sum().backward()

            model = make()
            sharded(model, *model.blocks, reshard_after_forward=reshard)
            for _ in range(2):
                model.zero_grad()
                backward(model, ctx.rank)
            found["blocks", reentrant, reshard] = equal(gradients(model), expected(make, backward))

            def two_forwards(model, rank):
                losses = [model(batch(at, rank)[0].requires_grad_()).square().sum() for at in range(2)]
                sum(losses).backward()

            for _ in range(3):
                model.zero_grad()
                two_forwards(model, ctx.rank)
            theirs = expected(make, two_forwards)
            found["two forwards", reentrant, reshard] = equal(gradients(model), theirs, close=True)

    def make_repeated():
        model = Checkpointed(True, True)
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
        return model

    # Each of its backwards inside the backward adds to gradients whose reduction may be in progress.
    model = make_repeated()
    sharded(model, model.blocks[0])
    for _ in range(2):
        model.zero_grad()
        backward(model, ctx.rank)
    found["repeated"] = equal(gradients(model), expected(make_repeated, backward), close=True)

    def make_inner():
        return nn.Sequential(Inner(), nn.Tanh(), Inner())

    def backward_inner(model, rank):
        model(batch(0, rank)[0]).square().sum().backward()

    model = make_inner()
    sharded(model, model[0], model[2])
    for _ in range(2):
        model.zero_grad()
        backward_inner(model, ctx.rank)
    found["inside of a unit"] = equal(gradients(model), expected(make_inner, backward_inner))
    return found


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 5)
        self.fails = False

    def forward(self, x):
        h = self.first(x)
        if self.fails:
            raise ValueError("a bad batch")
        return self.second(torch.tanh(h))


@over_gloo
def exceptions(ctx):
    found = {}
    model = sharded(Fails())

    def backward(model, rank):
        model(batch(0, rank)[0]).square().sum().backward()

    theirs = expected(Fails, backward)
    model.fails = True  # on all ranks
    with contextlib.suppress(ValueError):
        backward(model, ctx.rank)
    model.fails = False
    backward(model, ctx.rank)
    found["a forward failed everywhere"] = equal(gradients(model), theirs)
    model.zero_grad()
    out = model(batch(0, ctx.rank)[0])
    handle = out.register_hook(lambda grad: (_ for _ in ()).throw(ValueError("in a backward")))
    with contextlib.suppress(ValueError):
        out.square().sum().backward()
    handle.remove()
    model.zero_grad()
    backward(model, ctx.rank)
    found["a backward failed everywhere"] = equal(gradients(model), theirs)
    model.zero_grad()
    model.fails = ctx.rank == 1
    raised = []
    try:
        backward(model, ctx.rank)
    except (ValueError, RemoteError) as error:
        raised.append(type(error).__name__)
    model.fails = False
    found["a rank's failure raises"] = [] if raised == [["RemoteError", "ValueError"][ctx.rank]] else raised
    model.zero_grad()
    backward(model, ctx.rank)
    found["after one rank's failure"] = equal(gradients(model), theirs)
    return found


def overlapped(ctx, path):
    """All of these with prefetch, and with reductions that overlap with the backward."""
    os.environ["COLLECTIVES_OVERLAP"] = "1"
    try:
        found = {}
        for each in (branches, alone, several, checkpointing, exceptions):
            for way, wrong in each(ctx, f"{path}.{each.__name__}").items():
                found[each.__name__, way] = wrong
        return found
    finally:
        del os.environ["COLLECTIVES_OVERLAP"]


def check(function, tmp_path, ranks=RANKS):
    for rank, found in enumerate(run(function, ranks, str(tmp_path / "store"))):
        assert found
        for way, wrong in found.items():
            assert not wrong, (rank, way, wrong)


def test_ranks_run_other_units(tmp_path):
    check(branches, tmp_path)


def test_one_rank_alone_and_one_unit_alone(tmp_path):
    check(alone, tmp_path)


def test_accumulation(tmp_path):
    check(several, tmp_path)


def test_activation_checkpointing(tmp_path):
    check(checkpointing, tmp_path)


def test_exceptions(tmp_path):
    check(exceptions, tmp_path)


def test_all_with_overlap(tmp_path):
    check(overlapped, tmp_path)
