"""The order of units is compared in the first steps and where it changes, and no step sends anything otherwise."""

import os
from unittest import mock

import pytest

from collectives.errors import CollectiveTimeout, Mismatch
from collectives.sharded.order_check import OrderCheck, compares_order
from tests.hosts import joined
from tests.ranks import run_ranks

NAMES = ("blocks.0 (Block)", "blocks.1 (Block)", "head (Linear)")


class CountingStore:
    """A store of which each call counts."""

    def __init__(self, store):
        self._store, self.calls = store, 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self._store, name)


def open_check(comm, always=False):
    with mock.patch.dict(os.environ, {"COLLECTIVES_CHECK": str(int(always))}):
        check = OrderCheck(comm, NAMES.__getitem__)
    check._store = CountingStore(check._store)
    return check


def step(check, order=(0, 1, 2)):
    for unit in order:
        check.note(unit, "all_gather")
    for unit in reversed(order):
        check.note(unit, "reduce_scatter")
    before = check._store.calls
    check.end_step()
    return check._store.calls - before


def steady(ctx):
    comm = ctx.new_communicator()
    sequence = comm._native.sequence
    check = open_check(comm)
    before = sequence()
    counts = [step(check) for _ in range(10)]
    changed = [step(check, (1, 0, 2)) for _ in range(4)]  # on all ranks: an agreement, then nothing
    assert sequence() == before  # no collective either
    always = open_check(comm, always=True)
    found = [step(always) for _ in range(4)]
    ctx.barrier()
    keys = always._store._store.num_keys()
    found += [step(always) for _ in range(6)]
    assert always._store._store.num_keys() <= keys + 4  # those of earlier steps are deleted
    comm.close()
    return counts, changed, found


def test_a_steady_step_sends_nothing():
    for counts, changed, always in run_ranks(steady, 2):
        assert all(counts[:3]) and counts[3:] == [0] * 7
        assert changed[0] > 0 and changed[1:] == [0, 0, 0]
        assert all(always)


def divergent(ctx, at, always):
    comm = ctx.new_communicator()
    check = open_check(comm, always=always)
    for _ in range(at):
        step(check)
    with pytest.raises(Mismatch) as caught:
        step(check, (0, 2, 1) if ctx.rank else (0, 1, 2) if always or at < 3 else (1, 0, 2))
    assert caught.value.peers == (1 - ctx.rank,)
    step(check, (0,))  # the ranks go on together
    comm.close()
    return caught.value.message


@pytest.mark.parametrize(("at", "always"), [(0, False), (2, False), (5, True)])
def test_divergent_orders_name_the_first_unit_that_differs(at, always):
    for text in run_ranks(divergent, 2, at, always):
        assert f"in step {at + 1}, from number 2 on" in text
        assert f"all_gather of {NAMES[1]} on rank 0; all_gather of {NAMES[2]} on rank 1" in text


def test_orders_that_change_differently():
    for text in run_ranks(divergent, 2, 4, False):
        assert "in step 5, from number 1 on" in text
        assert f"all_gather of {NAMES[1]} on rank 0; all_gather of {NAMES[0]} on rank 1" in text


def one_changes(ctx):
    comm = ctx.new_communicator(timeout=1.0)
    check = open_check(comm)
    for _ in range(4):
        step(check)
    text = ""
    if ctx.rank == 1:
        with pytest.raises(CollectiveTimeout) as caught:
            step(check, (0, 1))
        assert caught.value.peers == (0,)
        text = caught.value.message
    else:
        assert step(check) == 0
    ctx.barrier()
    comm.abort()
    return text


def test_a_rank_that_changes_its_order_alone():
    text = run_ranks(one_changes, 2)[1]
    assert "rank 0 of 2 did not come within 1 s" in text and "another one on rank 1 than in step 4" in text
    assert f"reduce_scatter of {NAMES[1]} and not all_gather of {NAMES[2]} as number 3" in text


def over_nodes(ctx):
    with joined(ctx, "ab") as comm:
        assert not compares_order(comm)
        check = open_check(comm)
        counts = [step(check) for _ in range(5)]
        ctx.barrier()
        lone = comm.split(ctx.rank)
        assert compares_order(lone)
        lone.close()
    one_node = ctx.new_communicator()
    assert compares_order(one_node)
    one_node.close()
    return counts[3:]


def test_two_nodes():
    assert run_ranks(over_nodes, 2) == [[0, 0]] * 2
