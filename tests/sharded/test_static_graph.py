"""Static graph: ranks whose steps repeat go on without waiting for each other, and diverge without hanging.

The default on GPUs; here it is enabled on the host engine.
"""

import contextlib
import gc
import os
import random
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives.errors import CollectivesError, InvalidUsage, RemoteError
from collectives.sharded import controller, fully_shard, static_graph
from tests.ddp.training import batch, over_gloo, run
from tests.ranks import Died, run_ranks
from tests.sharded import test_scheduler
from tests.sharded.test_scheduler import Branches, check, equal, expected, gradients, loss_of, sharded


@contextlib.contextmanager
def static_graphs():
    with mock.patch.object(controller, "uses_static_graph", lambda comm: True):
        yield


class Waits:
    """Counts the all-reduces of a communicator's rows for which the host waits, and those that it only posts."""

    def __init__(self, model):
        self.waited = self.posted = 0
        control = model._scheduler.control
        all_reduce = control.all_reduce

        def counted(*args, async_op=False, **kwargs):
            self.waited += not async_op
            self.posted += async_op
            return all_reduce(*args, async_op=async_op, **kwargs)

        control.all_reduce = counted

    def take(self):
        found = (self.waited, self.posted > 0)
        self.waited = self.posted = 0
        return found


def step(model, rank, at=0, which=(0, 1, 2)):
    model.zero_grad()
    loss_of(model, rank, which, at).backward()


def theirs(at=0, whiches=((0, 1, 2), (0, 1, 2))):
    return expected(Branches, lambda model, rank: loss_of(model, rank, whiches[rank], at).backward())


def made(**how):
    """Return a model with a static graph, and its counter."""
    with static_graphs():
        model = sharded(Branches(), **how)
    waits = Waits(model)
    return model, waits


@over_gloo
def repeats(ctx):
    found = {}
    for reshard in (True, False):
        model, waits = made(reshard_after_forward=reshard)
        counts = []
        for at in range(7):
            step(model, ctx.rank, at)
            counts.append(waits.take())
            found["gradients", reshard, at] = equal(gradients(model), theirs(at))
            waits.take()
        # `gradients` makes negotiated calls between the steps, so no iteration repeats: see below.
        found["negotiated", reshard] = [] if all(waited for waited, _ in counts) else counts
        counts = []
        for at in range(6):
            step(model, ctx.rank, at)
            counts.append(waits.take())
        if any(waited for waited, _ in counts[4:]) or not all(posted for _, posted in counts[4:]):
            found["replayed", reshard] = counts
        found["after replayed iterations", reshard] = equal(gradients(model), theirs(5))
        with torch.no_grad():  # all ranks leave the iteration
            for at in range(2):
                loss_of(model, ctx.rank, [0, 1, 2], at)
        counts = []
        for at in range(6):
            step(model, ctx.rank, at)
            counts.append(waits.take())
        found["again, after an evaluation", reshard] = [] if not counts[-1][0] and counts[0][0] else counts
        found["gradients after an evaluation", reshard] = equal(gradients(model), theirs(5))
    return found


def test_steps_that_repeat_themselves_wait_for_no_host(tmp_path):
    check(repeats, tmp_path)


@over_gloo
def beside_a_deleted_model(ctx):
    """A deleted model, collected on one rank only, keeps no iteration from repeating."""
    deleted, _ = made()
    for at in range(3):
        step(deleted, ctx.rank, at)
    deleted.cycle = deleted
    gc.disable()
    try:
        del deleted
        if ctx.rank == 1:
            gc.collect()
        model, waits = made()
        counts = []
        for at in range(6):
            step(model, ctx.rank, at)
            counts.append(waits.take())
    finally:
        gc.enable()
    return {"replayed": [] if counts[-1] == (0, True) else counts, "gradients": equal(gradients(model), theirs(5))}


def test_a_model_that_is_deleted_on_one_rank(tmp_path):
    check(beside_a_deleted_model, tmp_path)


@over_gloo
def skips(ctx):
    """One rank doesn't use a unit, or another one, once the ranks replay an iteration."""
    found = {}
    for name, whiches in {
        "one less": ((0, 1, 2), (0, 2)),
        "the last one less": ((0, 1, 2), (0, 1)),
        "one alone": ((0, 1, 2), (1,)),
        "both less": ((0, 1), (0, 1)),
        "both another": ((0,), (1,)),
    }.items():
        model, waits = made()
        for at in range(6):
            step(model, ctx.rank, at)
        if waits.take() is None or model._scheduler.static_graph.next is None:
            found["not replayed", name] = True
        step(model, ctx.rank, 6, whiches[ctx.rank])
        # A replayed iteration reduces what all ranks used before: zeros where no rank has gradients now.
        ours = {key: value for key, value in gradients(model).items()}
        found[name] = equal(ours, theirs(6, whiches))
        for at in range(6):
            step(model, ctx.rank, at)
        found["after", name] = equal(gradients(model), theirs(5))
    return found


def test_a_rank_that_leaves_a_unit_out(tmp_path):
    check(skips, tmp_path)


@over_gloo
def diverges(ctx):
    """One rank takes units in another order: both raise, and both can go on after it."""
    found = {}
    for name, whiches in {"another order": ((0, 1, 2), (2, 0, 1)), "one more": ((0, 1), (0, 1, 2))}.items():
        model, _ = made()
        usual = whiches[0]
        for at in range(6):
            step(model, ctx.rank, at, usual)
        raised = []
        for at in range(4):
            try:
                step(model, ctx.rank, at, whiches[ctx.rank] if at == 0 else usual)
            except CollectivesError as error:
                raised.append((type(error), str(error)))
                break  # the others know of it a step later
        kinds = [kind for kind, _ in raised]
        found[name] = [] if kinds == [InvalidUsage if ctx.rank else RemoteError] else raised
        if ctx.rank and "set_static_graph(False)" not in raised[0][1]:
            found[name] = raised
        dist.barrier()
        for at in range(6):
            step(model, ctx.rank, at)
        found["after", name] = equal(gradients(model), theirs(5))
    return found


def test_ranks_that_diverge_raise(tmp_path):
    check(diverges, tmp_path)


@over_gloo
def negotiates(ctx):
    """Without a static graph the ranks may diverge in any step, on GPUs too."""
    found = {}
    model, waits = made()
    for at in range(6):
        step(model, ctx.rank, at)
    model.set_static_graph(False)
    waits.take()
    step(model, ctx.rank, 0)
    found["negotiated"] = [] if waits.take()[0] else ["replayed"]
    whiches = ((0, 1, 2), (2, 0, 1))
    step(model, ctx.rank, 1, whiches[ctx.rank])
    found["another order"] = equal(gradients(model), theirs(1, whiches))
    return found


def test_set_static_graph(tmp_path):
    check(negotiates, tmp_path)


class Fails(test_scheduler.Fails):
    pass


@over_gloo
def interrupted(ctx):
    """An exception on one rank, and on all, once the ranks replay an iteration."""
    found = {}
    with static_graphs():
        model = test_scheduler.sharded(Fails())

    def backward(model, rank):
        model(batch(0, rank)[0]).square().sum().backward()

    expects = expected(Fails, backward)

    def repeat():
        for _ in range(5):
            model.zero_grad()
            backward(model, ctx.rank)

    repeat()
    found["replayed"] = [] if model._scheduler.static_graph.next is not None else ["no"]
    model.fails = True
    with contextlib.suppress(ValueError):
        backward(model, ctx.rank)
    model.fails = False
    repeat()
    found["all ranks failed"] = equal(gradients(model), expects)
    repeat()
    model.fails = ctx.rank == 1
    raised = []
    for _ in range(4):
        try:
            model.zero_grad()
            backward(model, ctx.rank)
        except (ValueError, RemoteError) as error:
            raised.append(type(error).__name__)
            if raised[-1] == "RemoteError":
                break
        model.fails = False
    found["one rank failed"] = [] if raised == ["ValueError", "RemoteError"][1 - ctx.rank :] else raised
    dist.barrier()
    repeat()
    found["after one rank's failure"] = equal(gradients(model), expects)
    return found


def test_an_exception_on_one_rank(tmp_path):
    check(interrupted, tmp_path)


def dies(ctx):
    torch.manual_seed(3)
    with static_graphs():
        model = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), comm=ctx.communicator())
    for at in range(8):
        if at == 6 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            model(torch.randn(4, 6)).sum().backward()
        except RemoteError as error:
            return at >= 6 and "1" in str(error) and time.monotonic() - began < 20
    return False


def test_a_rank_that_dies():
    assert run_ranks(dies, 2, deaths=[1]) == [True, Died(signal=9, exitcode=0)]


def evaluates(ctx, count):
    """Rank 0 evaluates alone once the ranks replay an iteration: its gradients would be of another step."""
    comm = ctx.communicator()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    with static_graphs():
        model = sharded(net, net[0], net[2], comm=comm)
    for _ in range(6):
        model(torch.randn(4, 6)).sum().backward()
    raised = []
    if ctx.rank == 0:
        try:
            with torch.no_grad():
                for _ in range(count):
                    model(torch.randn(4, 6))
        except CollectivesError as error:
            raised.append(type(error))
    for _ in range(4):
        if not raised:
            try:
                model(torch.randn(4, 6)).sum().backward()
            except CollectivesError as error:
                raised.append(type(error))
    ctx.exchange("both know")
    for _ in range(6):
        model(torch.randn(4, 6)).sum().backward()
    return raised


@pytest.mark.parametrize("count", [1, 3])
def test_one_rank_that_evaluates_alone(count):
    assert run_ranks(evaluates, 2, count) == [[InvalidUsage], [RemoteError]]


TRIALS = 6


@over_gloo
def anything(ctx):
    """Three ranks replay an iteration and then run any units: right gradients or an error, never a hang."""
    found, outcomes = {}, set()
    usual = [0, 1, 2, 3]
    for trial in range(TRIALS):
        draw = random.Random(trial)
        ways = [usual, usual[:-1], usual[1:], [3, 2, 1, 0], [0, 0, 1, 2, 3], [1], [2, 1, 0, 3]]
        whiches = [draw.choice(ways[: 3 if trial % 2 else None]) for _ in range(ctx.size)]
        with static_graphs():
            model = sharded(Branches(4), reshard_after_forward=draw.random() < 0.5)
        for at in range(6):
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
        for at in range(6):
            step(model, ctx.rank, at, usual)
        theirs = expected(lambda: Branches(4), lambda m, rank: loss_of(m, rank, usual, 5).backward(), ctx.size)
        found["after it", trial] = equal(gradients(model), theirs, close=True)
    found["outcomes"] = [] if outcomes == {True, False} else outcomes
    return found


def test_ranks_run_anything_after_replayed_iterations(tmp_path):
    check(anything, tmp_path, 3)


def everything(ctx, path):
    """In their first steps ranks may run other units, as where they negotiate in each."""
    with static_graphs():
        return test_scheduler.overlapped(ctx, path)


def test_first_steps_are_negotiated(tmp_path):
    for rank, found in enumerate(run(everything, 2, str(tmp_path / "store"))):
        for way, wrong in found.items():
            assert not wrong, (rank, way, wrong)


@pytest.mark.parametrize("longest", [3])
def test_an_endless_iteration_is_not_recorded(longest):
    with mock.patch.object(static_graph, "_LONGEST", longest):
        found = static_graph.StaticGraph(None, None)
        for code in range(10):
            found.record(code, True)
        assert len(found._iteration) == longest
