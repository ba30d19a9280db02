"""Schedules: once passes have repeated themselves the ranks exchange nothing but data, and diverge without hanging."""

import contextlib
import gc
import itertools
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives.errors import CollectivesError, InvalidArgument
from collectives.sharded import uneven
from collectives.sharded.schedule import Pass, ScheduleBook
from tests.ddp.training import over_gloo
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.sharded.test_scheduler import Branches, check, equal, expected, gradients, loss_of, sharded

USUAL = (0, 1, 2)


class Messages:
    """Counts the control communicator's calls, and the waits on the progress board."""

    def __init__(self, model):
        agreement = model._scheduler.agreement
        self.control, self.board = agreement.control, agreement.follower.board
        self.sent = self.waits = 0
        for name in ("all_reduce", "all_gather", "broadcast"):
            setattr(self.control, name, self._counting(getattr(self.control, name)))
        wait = self.board._wait

        def counted(purpose, find_missing):
            self.waits += 1
            return wait(purpose, find_missing)

        self.board._wait = counted

    def _counting(self, call):
        def counted(*args, **kwargs):
            self.sent += 1
            return call(*args, **kwargs)

        return counted

    def take(self):
        found = self.sent, self.waits
        self.sent = self.waits = 0
        return found


def step(model, rank, at=0, which=USUAL):
    model.zero_grad()
    loss_of(model, rank, which, at).backward()


def theirs(at=0, whiches=(USUAL, USUAL), size=2):
    return expected(Branches, lambda model, rank: loss_of(model, rank, whiches[rank], at).backward(), size)


def counts_of(model, rank, count, which=USUAL, messages=None):
    messages = messages or Messages(model)
    messages.take()
    found = []
    for at in range(count):
        step(model, rank, at, which)
        found.append(messages.take())
    return found


# ---- Errors, for test_divergence, too.


def outcome(call):
    """Call; return the kind of the package's error and its text, or None."""
    began = time.monotonic()
    try:
        call()
    except CollectivesError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


def go_on(model, rank, calls):
    """Make calls until one raises; return that error's kind."""
    for call in calls:
        found = outcome(call)
        if found is not None:
            assert found[2] < 20, found
            return found
    return None


def after(model, ctx, found, name):
    """All ranks go on after an error that all have had."""
    dist.barrier()
    for at in range(4):
        step(model, ctx.rank, at)
    found["after", name] = equal(gradients(model), theirs(3, [USUAL] * ctx.size, ctx.size), close=ctx.size > 2)


# ---- The steady state.


@over_gloo
def silent(ctx):
    """From the third step on no message is sent and no host waits: whatever the ranks run, if they repeat it."""
    found = {}
    ways = {
        "the same": [USUAL, USUAL],
        "other branches": [(0,), (1,)],
        "other orders": [(0, 1, 2), (2, 0, 1)],
        "more on one rank": [(0, 1, 2), (1,)],
        "twice": [(0, 0), (0, 1)],
    }
    for (name, whiches), reshard in itertools.product(ways.items(), (True, False)):
        model = sharded(Branches(), reshard_after_forward=reshard)
        counts = counts_of(model, ctx.rank, 6, whiches[ctx.rank])
        if not all(sent for sent, _ in counts[:2]) or any(map(any, counts[2:])):
            found["messages", name, reshard] = counts
        found["gradients", name, reshard] = equal(gradients(model), theirs(5, whiches))
    return found


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_steps_that_repeat_themselves_send_no_message(tmp_path, overlap):
    with mock.patch.dict(os.environ, COLLECTIVES_OVERLAP=overlap):
        check(silent, tmp_path)


class Frozen(Branches):
    def freeze(self, frozen):
        self.branches[1].requires_grad_(not frozen)


@over_gloo
def kinds(ctx):
    """An evaluation, accumulation, a frozen layer: each kind of pass has its own schedule, and all go on in silence."""
    model = sharded(Frozen())
    messages, found = Messages(model), {}

    def evaluate():
        model.eval()
        with torch.no_grad():
            for at in range(3):
                loss_of(model, ctx.rank, USUAL, at)
        model.train()

    def accumulate():
        model.zero_grad()
        for at in range(3):
            model.set_requires_gradient_sync(at == 2)
            loss_of(model, ctx.rank, USUAL, at).backward()

    def freeze():
        model.freeze(True)
        step(model, ctx.rank)
        model.freeze(False)

    for way in (evaluate, accumulate, freeze):
        counts = []
        for _ in range(6):
            step(model, ctx.rank)
            step(model, ctx.rank)
            way()
            counts.append(messages.take())
        if not counts[0][0] or any(sent for sent, _ in counts[3:]) or counts[-1][1]:
            found[way.__name__] = counts
    step(model, ctx.rank, 5)
    found["gradients"] = equal(gradients(model), theirs(5))
    model.freeze(True)
    step(model, ctx.rank, 5)
    ours = gradients(model)
    found["frozen"] = [
        name for name, grad in ours.items() if (grad is None) != ("branches.1" in name or "never" in name)
    ]
    return found


def test_kinds_of_passes(tmp_path):
    check(kinds, tmp_path)


@over_gloo
def other_inputs(ctx):
    """All ranks take another path: a new schedule, and gradients as of that path alone."""
    model, found = sharded(Branches()), {}
    messages = Messages(model)
    for which in (USUAL, (0, 1), (1, 2), USUAL):
        counts = counts_of(model, ctx.rank, 4, which, messages)
        if any(map(any, counts[2:])):
            found["messages", which] = counts
        found["gradients", which] = equal(gradients(model), theirs(3, (which, which)))
    return found


def test_another_path_on_all_ranks(tmp_path):
    check(other_inputs, tmp_path)


@over_gloo
def beside_a_deleted_model(ctx):
    """A deleted model, collected on one rank only, keeps nothing from repeating."""
    deleted = sharded(Branches())
    for at in range(3):
        step(deleted, ctx.rank, at)
    deleted.cycle = deleted
    gc.disable()
    try:
        del deleted
        if ctx.rank == 1:
            gc.collect()
        model = sharded(Branches())
        counts = counts_of(model, ctx.rank, 6)
    finally:
        gc.enable()
    return {"silent": [] if not any(map(any, counts[2:])) else counts, "gradients": equal(gradients(model), theirs(5))}


def test_a_model_that_is_deleted_on_one_rank(tmp_path):
    check(beside_a_deleted_model, tmp_path)


@over_gloo
def called_by_hand(ctx):
    """Units that users gather themselves, several forwards before a backward, a unit after the first steps."""
    model, found = sharded(Branches()), {}
    messages = Messages(model)

    def by_hand(at):
        model.zero_grad()
        model.trunk.unshard(async_op=True)
        (loss_of(model, ctx.rank, (0, 1), at) + loss_of(model, ctx.rank, (1, 2), at + 1)).backward()

    counts = []
    for at in range(6):
        by_hand(at)
        counts.append(messages.take())
    found["by hand"] = [] if not any(map(any, counts[2:])) else counts
    other = sharded(Branches())
    step(other, ctx.rank)
    messages.take()
    counts = []
    for at in range(4):
        by_hand(at)
        counts.append(messages.take())
    found["after another model"] = [] if not any(map(any, counts[3:])) else counts
    return found


def test_units_that_are_called_by_hand(tmp_path):
    check(called_by_hand, tmp_path)


@over_gloo
def compared(ctx):
    """COLLECTIVES_CHECK: one message a backward, with the hash of its order."""
    with mock.patch.dict(os.environ, COLLECTIVES_CHECK="1"):
        model = sharded(Branches())
    counts = counts_of(model, ctx.rank, 5)
    found = {"messages": [] if [sent for sent, _ in counts[2:]] == [1, 1, 1] else counts}
    record = Pass.record
    with mock.patch.object(Pass, "record", lambda self, code, mine: record(self, code + ctx.rank, mine)):
        raised = outcome(lambda: step(model, ctx.rank))
    found["other orders"] = [] if raised and raised[0] == "Mismatch" else [raised]
    for at in range(3):
        step(model, ctx.rank, at)
    found["after it"] = equal(gradients(model), theirs(2))
    return found


def test_check_compares_the_order_once_a_step(tmp_path):
    check(compared, tmp_path)


def on_several_nodes(ctx):
    """Ranks without common memory agree before each collective; any rank may run any units."""
    with joined(ctx, "ab") as comm:
        torch.manual_seed(12)
        model = sharded(Branches(), comm=comm)
        for at, which in enumerate([USUAL, USUAL, USUAL, (2, 0, 1), (1,)]):
            step(model, ctx.rank, at, which if ctx.rank else USUAL)
            if ctx.rank == 0 and at > 2:
                with torch.no_grad():
                    loss_of(model, 0, (1, 2))
        with uneven(model):
            step(model, ctx.rank, 5, USUAL if ctx.rank else (2,))
        return equal(gradients(model), theirs(5, ((2,), USUAL)), close=True)


def test_ranks_on_several_nodes():
    assert run_ranks(on_several_nodes, 2) == [[], []]


# ---- Uneven blocks.


@over_gloo
def uneven_blocks(ctx):
    """Inside of `uneven` ranks may run what they want; after it they go on in silence."""
    model, found = sharded(Branches()), {}
    messages = Messages(model)
    for at in range(4):
        step(model, ctx.rank, at)
    for _ in range(2):
        with uneven(model):
            if ctx.rank == 0:
                with torch.no_grad():
                    for at in range(3):
                        loss_of(model, 0, [0, 2], at)
        messages.take()
        step(model, ctx.rank, 1)
        step(model, ctx.rank, 2)
        found["silent after it"] = [] if not messages.take()[0] else ["messages"]
    found["evaluated"] = equal(gradients(model), theirs(2))

    def micro_batches(model, rank):
        for at in range(1 + rank):
            loss_of(model, rank, USUAL, at).backward()

    model.zero_grad()
    with uneven(model):
        model.set_requires_gradient_sync(False)
        for at in range(ctx.rank):
            loss_of(model, ctx.rank, USUAL, at).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, ctx.rank, USUAL, ctx.rank).backward()
    found["micro-batches"] = equal(gradients(model), expected(Branches, micro_batches), close=True)
    with uneven(model), uneven(model):
        whiches = ((0, 1, 2), (2, 0, 1))
        step(model, ctx.rank, 1, whiches[ctx.rank])
    found["another order"] = equal(gradients(model), theirs(1, whiches))
    with contextlib.suppress(ValueError), uneven(model):
        raise ValueError("on all ranks")
    for at in range(4):
        step(model, ctx.rank, at)
    found["after an exception in it"] = equal(gradients(model), theirs(3))
    return found


def test_uneven(tmp_path):
    check(uneven_blocks, tmp_path)


@over_gloo
def uneven_on_one_rank(ctx):
    model = sharded(Branches())
    for at in range(4):
        step(model, ctx.rank, at)
    calls = 3 * [lambda: step(model, ctx.rank)]
    if ctx.rank:
        calls = [lambda: uneven(model).__enter__()]
    raised = go_on(model, ctx.rank, calls)
    found = {"one rank": [] if raised and raised[0] == ["RemoteError", "InvalidUsage"][ctx.rank] else [raised]}
    after(model, ctx, found, "one rank")
    return found


def test_uneven_on_one_rank(tmp_path):
    check(uneven_on_one_rank, tmp_path)


@over_gloo
def uneven_left_on_one_rank(ctx):
    """An exception ends the block on the last rank alone: the others raise in it, and all go on with what follows."""
    model, last, found = sharded(Branches()), ctx.rank == ctx.size - 1, {}

    def plain(at):
        if last and at == 0:
            raise ValueError("in a block")

    def nested(at):
        with uneven(model):
            plain(at)

    def forward(at):
        model(torch.ones(1, 3 if last and at == 0 else 12), USUAL)

    for way, then in itertools.product((plain, nested, forward), ("a block", "a step")):

        def block(at, way=way):
            with uneven(model):
                way(at)
                step(model, ctx.rank, 0, ((0,), (2, 1))[last])

        for at in range(4):
            step(model, ctx.rank, at)
        calls = [lambda at=at, block=block: block(at) for at in range(2)]
        if then == "a step":
            calls[1] = lambda: step(model, ctx.rank)
        if last:
            with contextlib.suppress(ValueError, RuntimeError):
                calls.pop(0)()
        raised = [outcome(call) for call in calls]
        ok = raised.pop() is None
        ok = ok and all(each and each[0] == "RemoteError" and f"rank {ctx.size - 1}" in each[1] for each in raised)
        found[way.__name__, then] = [] if ok else [raised]
        after(model, ctx, found, (way.__name__, then))
    with uneven(model):
        step(model, ctx.rank, 0, ((0,), (2, 1))[last])
    after(model, ctx, found, "a block after it")
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exception_ends_uneven_on_one_rank(tmp_path, ranks):
    check(uneven_left_on_one_rank, tmp_path, ranks)


def test_uneven_takes_a_sharded_module():
    with pytest.raises(InvalidArgument, match="sharded module"), uneven(nn.Linear(2, 2)):
        pass


@over_gloo
def static_graph(ctx):
    """`set_static_graph(False)`: as in `uneven`, until it is set again."""
    model, found = sharded(Branches()), {}
    messages = Messages(model)
    for at in range(4):
        step(model, ctx.rank, at)
    model.set_static_graph(False)
    model.set_static_graph(False)
    messages.take()
    whiches = ((0, 1, 2), (2, 0, 1))
    for _ in range(3):
        step(model, ctx.rank, 1, whiches[ctx.rank])
    found["agrees"] = [] if messages.take()[0] else ["silent"]
    found["another order"] = equal(gradients(model), theirs(1, whiches))
    model.set_static_graph(True)
    messages.take()
    step(model, ctx.rank, 1)
    found["again"] = [] if not messages.take()[0] else ["messages"]
    return found


def test_set_static_graph(tmp_path):
    check(static_graph, tmp_path)


def test_the_next_pass_is_predicted():
    """Each kind follows the one before as it did last: a period is known once it has come twice."""
    book = ScheduleBook()
    period = [book.number(("pass", each)) for each in "ababababcdee"]
    missed = []
    for at, key in enumerate(period * 5):
        if book.next != key:
            missed.append(at)
        book.begin(key)
    assert max(missed) < 2 * len(period), missed
    for _ in range(300):  # the history is bounded
        for key in period:
            assert book.next == key
            book.begin(key)


def test_schedules_are_bounded():
    book = ScheduleBook()
    for each in range(200):
        made = Pass(key=book.number(("pass", each)), codes=[1], mine=[True])
        book.store(made)
        assert book.find(made.key) is None
        book.store(made)
        assert book.find(made.key) is not None
    assert len(book._schedules) <= 64
