"""Divergence: ranks that follow schedules and then run other units get right gradients, or all an error."""

import contextlib
import gc
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives.errors import CollectivesError, RemoteError
from collectives.sharded import fully_shard
from tests.ddp.training import batch, over_gloo
from tests.ranks import Died, run_ranks
from tests.sharded import test_scheduler
from tests.sharded.test_schedule import USUAL, Messages, after, go_on, outcome, step, theirs
from tests.sharded.test_scheduler import Branches, check, equal, expected, gradients, loss_of, sharded


@over_gloo
def skips(ctx):
    """One rank leaves a unit out, that it has used before: it sends zeros."""
    found = {}
    others = [USUAL] * (ctx.size - 1)
    for name, which in {"one less": (0, 2), "the last one less": (0, 1), "the first ones less": (2,)}.items():
        model = sharded(Branches())
        messages = Messages(model)
        for at in range(4):
            step(model, ctx.rank, at)
        messages.take()
        whiches = [*others, which]
        step(model, ctx.rank, 6, whiches[ctx.rank])
        sent = messages.take()[0]
        found["no message", name] = [] if not sent else [sent]
        found[name] = equal(gradients(model), theirs(6, whiches, ctx.size), close=ctx.size > 2)
        for at in range(4):
            step(model, ctx.rank, at)
        found["after", name] = equal(gradients(model), theirs(3, [USUAL] * ctx.size, ctx.size), close=ctx.size > 2)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_leaves_a_unit_out(tmp_path, ranks):
    check(skips, tmp_path, ranks)


@over_gloo
def keeps_another_model(ctx):
    """One rank keeps a model that the others have dropped, while gradients of another one add up."""
    gone, kept = sharded(Branches()), None
    step(gone, ctx.rank, 0)
    if ctx.rank == 0:
        kept = gone
    del gone
    gc.collect()
    model = sharded(Branches())
    model.set_requires_gradient_sync(False)
    for at in range(6):
        loss_of(model, ctx.rank, USUAL, at).backward()
    model.set_requires_gradient_sync(True)
    for at in range(3):
        step(model, ctx.rank, at)
    del kept
    return {"gradients": equal(gradients(model), theirs(2, [USUAL] * ctx.size, ctx.size), close=ctx.size > 2)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_keeps_a_model_that_the_others_drop(tmp_path, ranks):
    check(keeps_another_model, tmp_path, ranks)


@over_gloo
def diverges(ctx):
    """The last rank needs something that isn't in the schedule: all raise, and all can go on."""
    found, last = {}, ctx.rank == ctx.size - 1

    def evaluation(model):
        with torch.no_grad():
            loss_of(model, ctx.rank, USUAL)

    ways = {
        "another order": (USUAL, lambda m: step(m, ctx.rank, 0, (2, 0, 1)), "<Unit Linear"),
        "another branch": ((0, 1), lambda m: step(m, ctx.rank, 0, (0, 1, 2)), "<Unit Linear"),
        "an evaluation": (USUAL, evaluation, "<Unit Branches"),
        "one more gather": (USUAL, lambda m: m.branches[0].unshard(), "<Unit Linear"),
        "a state dict": (USUAL, lambda m: m.state_dict(), "gathers <Unit"),
    }
    for name, (usual, way, named) in ways.items():
        model = sharded(Branches())
        for at in range(4):
            step(model, ctx.rank, at, usual)
        calls = [lambda way=way, model=model: way(model)] if last else []
        calls += [lambda at=at, usual=usual, model=model: step(model, ctx.rank, at, usual) for at in range(3)]
        raised = go_on(model, ctx.rank, calls)
        wrong = raised is None or raised[0] != ("InvalidUsage" if last else "RemoteError")
        wrong = wrong or (named not in raised[1] if last else f"rank {ctx.size - 1} " not in raised[1])
        wrong = wrong or (last and "uneven(model)" not in raised[1])
        found[name] = [raised] if wrong else []
        after(model, ctx, found, name)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_diverge_raise(tmp_path, ranks):
    check(diverges, tmp_path, ranks)


@over_gloo
def leaves_out_a_kept_unit(ctx):
    """With an int as reshard_after_forward a rank that left a unit out has no part of it: the error says so."""
    model, last, found = sharded(Branches(), reshard_after_forward=2), ctx.rank == ctx.size - 1, {}
    for at in range(4):
        step(model, ctx.rank, at)
    found["steady"] = equal(gradients(model), theirs(3, [USUAL] * ctx.size, ctx.size), close=True)
    calls = [lambda: step(model, ctx.rank, 0, (0, 2) if last else USUAL), lambda: step(model, ctx.rank)]
    raised = go_on(model, ctx.rank, calls)
    ok = raised and raised[0] == ("InvalidUsage" if last else "RemoteError")
    found["named"] = [] if ok and (not last or "out in its forward" in raised[1]) else [raised]
    after(model, ctx, found, "an int")
    return found


def test_a_rank_that_leaves_out_a_unit_that_others_keep(tmp_path):
    check(leaves_out_a_kept_unit, tmp_path, 4)


class Uses(nn.Module):
    """A unit with a parameter that is used where it is asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(12)
        self.first, self.second = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x, both):
        return self.first(x) + (self.second(x) if both else 0)


@over_gloo
def parameters(ctx):
    """A parameter inside of a unit: zeros where one rank doesn't use it, an error where one alone uses it."""

    def backward(model, rank, both):
        x, y = batch(0, rank)
        nn.functional.cross_entropy(model(x, both), y).backward()

    def repeat(both):
        for _ in range(4):
            model.zero_grad()
            backward(model, ctx.rank, both)

    found = {}
    model = fully_shard(Uses())
    repeat(True)
    for name, uses in {"one less": (True, False), "none": (False, False)}.items():
        model.zero_grad()
        backward(model, ctx.rank, uses[ctx.rank])
        found[name] = equal(gradients(model), expected(Uses, lambda m, rank, uses=uses: backward(m, rank, uses[rank])))
    repeat(False)
    raised = go_on(model, ctx.rank, [lambda: backward(model, ctx.rank, ctx.rank == 1)] + 2 * [lambda: repeat(False)])
    ok = raised and raised[0] == ["RemoteError", "InvalidUsage"][ctx.rank]
    found["one more"] = [] if ok and (ctx.rank == 0 or "second.weight" in raised[1]) else [raised]
    dist.barrier()
    repeat(True)
    found["after"] = equal(gradients(model), expected(Uses, lambda m, rank: backward(m, rank, True)))
    return found


def test_parameters_that_one_rank_does_not_use(tmp_path):
    check(parameters, tmp_path)


class Fails(test_scheduler.Fails):
    pass


@over_gloo
def interrupted(ctx):
    """An exception on one rank, and on all, in a forward, an evaluation and a backward."""
    found, last = {}, ctx.rank == ctx.size - 1
    model = test_scheduler.sharded(Fails())

    def backward(model, rank):
        model(batch(0, rank)[0]).square().sum().backward()

    def repeat():
        for _ in range(4):
            model.zero_grad()
            backward(model, ctx.rank)

    def fails_forward():
        model.fails = True
        try:
            backward(model, ctx.rank)
        finally:
            model.fails = False

    def fails_evaluation():
        with torch.no_grad():
            fails_forward()

    def evaluate():
        with torch.no_grad():
            for _ in range(4):
                model(batch(0, ctx.rank)[0])

    def fails_backward():
        out = model(batch(0, ctx.rank)[0])
        out.register_hook(lambda grad: (_ for _ in ()).throw(ValueError("in a backward")))
        out.square().sum().backward()

    expects = expected(Fails, backward, ctx.size)
    for way in (fails_forward, fails_evaluation, fails_backward):
        repeat()
        with contextlib.suppress(ValueError):
            way()
        repeat()
        found["on all", way.__name__] = equal(gradients(model), expects, close=ctx.size > 2)
        others = evaluate if way is fails_evaluation else repeat
        others()
        raised = []
        for at in range(3):
            try:
                way() if last and not at else others()
            except (ValueError, RemoteError) as error:
                raised.append((at, type(error).__name__))
        found["on one", way.__name__] = [] if raised == [(0, "ValueError" if last else "RemoteError")] else raised
        repeat()
        found["after one", way.__name__] = equal(gradients(model), expects, close=ctx.size > 2)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exception(tmp_path, ranks):
    check(interrupted, tmp_path, ranks)


def net_of(ctx):
    """Return a model over a communicator of its own, since its errors don't all end on all ranks."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    return sharded(net, net[0], net[2], comm=ctx.communicator().split(0))


def dies(ctx):
    """A rank dies in a step, and beside a rank that waits on the board: the others' errors name it at once."""
    model = net_of(ctx)
    for at in range(8):
        if at == 6 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            with torch.set_grad_enabled(at != 6 or ctx.rank == 0):
                model(torch.randn(4, 6)).sum().backward()
        except RemoteError as error:
            return at >= 6 and "1" in str(error) and time.monotonic() - began < 20
    return False


def test_a_rank_that_dies():
    assert run_ranks(dies, 2, deaths=[1]) == [True, Died(signal=9, exitcode=0)]


def dies_beside_a_wait(ctx):
    model = net_of(ctx)
    for _ in range(3):
        model(torch.randn(4, 6)).sum().backward()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        return outcome(lambda: model(torch.randn(4, 6)))


def test_a_rank_that_dies_where_another_one_waits_on_the_board():
    (kind, text, seconds), _ = run_ranks(dies_beside_a_wait, 2, deaths=[1])
    assert kind == "RemoteError" and "rank 1" in text and "has ended" in text and seconds < 20


def stops(ctx):
    """One rank makes no more steps: the other ones' time limit passes, and their errors name it."""
    model = net_of(ctx)
    for _ in range(3):
        model(torch.randn(4, 6)).sum().backward()
    ctx.exchange("begin")
    if ctx.rank == 1:
        return None, ctx.exchange("end")[0] and None
    model._scheduler.comm.timeout = 1.0
    with torch.no_grad():
        found = outcome(lambda: model(torch.randn(4, 6)))
    ctx.exchange("end")
    return found, None


def test_a_rank_that_stops():
    (found, _), _ = run_ranks(stops, 2)
    assert found[0] == "CollectiveTimeout" and "rank 1" in found[1] and found[2] < 10


def evaluates(ctx, count):
    """Rank 0 evaluates alone once the ranks follow a schedule."""
    model = net_of(ctx)
    for _ in range(4):
        model(torch.randn(4, 6)).sum().backward()

    def alone():
        with torch.no_grad():
            for _ in range(count):
                model(torch.randn(4, 6))

    calls = [alone] if ctx.rank == 0 else []
    raised = go_on(model, ctx.rank, calls + 4 * [lambda: model(torch.randn(4, 6)).sum().backward()])
    ctx.exchange("both know")
    for _ in range(4):
        model(torch.randn(4, 6)).sum().backward()
    return raised[0]


@pytest.mark.parametrize("count", [1, 3])
def test_one_rank_that_evaluates_alone(count):
    assert run_ranks(evaluates, 2, count) == ["InvalidUsage", "RemoteError"]


def fails_at_the_end(ctx, options):
    """An exception on the last rank, after its last reduction: it takes part in what the others exchange there. They
    raise in that step, or if they have ended it, all raise in the next one.
    """
    torch.manual_seed(3)
    net, last = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), ctx.rank == ctx.size - 1
    state = collectives.HookState(**options) if options else None
    model = sharded(net, net[0], net[2], comm=ctx.communicator().split(0), hook_state=state)
    model._scheduler.comm.timeout = 10.0

    def backward(fails=False):
        x = torch.randn(4, 6, requires_grad=True)
        if fails:
            x.register_hook(lambda grad: (_ for _ in ()).throw(ValueError("at the end")))
        model(x * 1).sum().backward()

    for _ in range(4):
        backward()
    raised = []
    for at in range(6):
        try:
            backward(last and at == 0)
        except (ValueError, RemoteError) as error:
            raised.append((at, type(error).__name__, str(error)))
    return raised


@pytest.mark.parametrize(
    ("options", "env"), [({}, {}), ({"max_norm": 0.1}, {}), ({}, {"COLLECTIVES_CHECK": "1"})], ids=str
)
def test_an_exception_behind_the_last_reduction(options, env):
    *others, last = run_ranks(fails_at_the_end, 3, options, env=env)
    assert last[0][:2] == (0, "ValueError") and len(last) < 3, last
    for raised in (*others, last[1:]):
        assert all("interrupted by an exception" in text for _, _, text in raised), raised
    lost = [{at for at, _, _ in raised} for raised in (*others, last)]
    assert lost[2] in ({0}, {0, 1}) and all(each in ({0}, {1}, {0, 1}) for each in lost), lost
    assert len({max(each) for each in lost}) == 1, lost  # in step after the same one


# ---- Anything.

TRIALS = 6


@over_gloo
def anything(ctx):
    """Three ranks follow a schedule and then run any units: right gradients or an error, never a hang."""
    found, outcomes = {}, set()
    usual = [0, 1, 2, 3]
    for trial in range(TRIALS):
        draw = random.Random(trial)
        ways = [usual, usual[:-1], usual[1:], [3, 2, 1, 0], [0, 0, 1, 2, 3], [1], [2, 1, 0, 3]]
        whiches = [draw.choice(ways[: 3 if trial % 2 else None]) for _ in range(ctx.size)]
        model = sharded(Branches(4), reshard_after_forward=draw.random() < 0.5)
        for at in range(4):
            step(model, ctx.rank, at, usual)
        raised = None
        for at in range(4):
            try:
                step(model, ctx.rank, at, whiches[ctx.rank] if at == 0 else usual)
            except CollectivesError as error:
                raised = error
                break
            if at == 0:
                units = [module._unit for module in model.modules() if hasattr(module, "_unit")]
                ours = {
                    param: None if param.shard.grad is None else param.shard.grad.flatten().clone()
                    for unit in units
                    for param in unit.params
                }
        every = [None] * ctx.size
        dist.all_gather_object(every, raised is not None)
        outcomes.add(any(every))
        if any(every):
            found["known to all", trial] = [] if all(every) else every
        else:
            full = expected(
                lambda: Branches(4), lambda m, rank, w=whiches: loss_of(m, rank, w[rank], 0).backward(), ctx.size
            )
            names = {id(p): name for name, p in model.named_parameters()}
            wrong = []
            for param, grad in ours.items():
                value = full[names[id(param.shard)]]
                part = None if value is None else value.flatten()[param.start : param.start + param.shard.numel()]
                if (grad is None) != (part is None) or (grad is not None and not torch.allclose(grad, part, atol=1e-6)):
                    wrong.append((param.name, whiches))
            found["right", trial] = wrong
        dist.barrier()
        for at in range(4):
            step(model, ctx.rank, at, usual)
        right = expected(lambda: Branches(4), lambda m, rank: loss_of(m, rank, usual, 3).backward(), ctx.size)
        found["after it", trial] = equal(gradients(model), right, close=True)
    found["outcomes"] = [] if outcomes == {True, False} else outcomes
    return found


def test_ranks_run_anything_after_passes_that_repeated_themselves(tmp_path):
    check(anything, tmp_path, 3)
