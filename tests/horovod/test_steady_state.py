"""Ranks that submit the same operations in the same order as before: plans, and how they end."""

from __future__ import annotations

import random
import threading

import torch

from collectives.horovod import request_exchange
from collectives.horovod.basics import current
from collectives.horovod.message_table import MessageTable
from collectives.horovod.messages import CachedRequest, Request, cached_request
from collectives.horovod.request_exchange import RequestExchange
from tests.ranks import run_ranks

from .started import started


def request(name, count):
    return cached_request(Request("allreduce", name, ("float32",), ((count,),), "cpu", "sum"))


def test_plans_are_known_by_number():
    first, second = request("", 4), request("named", 8)
    one, other = MessageTable(2), MessageTable(2)  # of two ranks
    for table in (one, other):
        assert not table.planned and table.plan_for((first, first), 1 << 20).number == 1 and table.planned
        assert table.plan_for((second,), 1 << 20).number == 2
    for plan, wanted in (((first, first), 1), ((second,), 2)):
        assert one.find_plan(plan).number == other.find_plan(plan).number == wanted
    assert one.find_plan((first,)) is None
    one.use_plan(one.find_plan((first, first)))
    # Operations without a name are counted whether they were planned or not, those of all ranks.
    assert one.keys_of(0, [first, second, first]) == ["allreduce.noname.4", "allreduce.named", "allreduce.noname.5"]
    one.add_submitted(1, [first])
    assert one.missing_ranks("allreduce.noname.4") == [0] and one.keys_of(1, [first]) == ["allreduce.noname.5"]
    one.add_messages([])
    assert not one.planned
    for number in range(2, 400):  # more than are kept: numbers go on
        assert other.plan_for((request(f"{number}", 1),), 1 << 20).number == number + 1
    assert other.find_plan((second,)) is None


def gathered(*submitted, exchanges):
    """Run a cycle of exchanges, one for each rank in this process; return what each has found: what all have
    submitted, if it is the same, and else the messages.
    """
    size, found = len(exchanges), {}

    class Control:
        def __init__(self, rank):
            self.rank, self.size, self.calls = rank, size, 0

        def all_gather(self, out, own):
            key = self.calls
            self.calls += 1
            with changed:
                rows = shared.setdefault(key, {})
                rows[self.rank] = own.copy()
                changed.notify_all()
                assert changed.wait_for(lambda: len(rows) == size, 20)
            out[:] = [rows[rank] for rank in range(size)]

    shared, changed = {}, threading.Condition()

    def run(rank):
        exchange = exchanges[rank]
        exchange._control = Control(rank)
        same = exchange.gather(submitted[rank], join=False)
        found[rank] = same, exchange.messages() if same is None else None

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[rank] for rank in range(size)]


def test_an_id_is_the_same_on_all_ranks_whoever_announced_it_first():
    first, second, third = request("first", 4), request("second", 4), request("third", 4)
    exchanges = [RequestExchange(Gathers(0, 0)) for _ in range(3)]
    for submitted in (([first, second], [second], [third, first]), ([], [first, third], [second])):
        for same, messages in gathered(*submitted, exchanges=exchanges):
            assert same is None and [message.requests for message in messages] == list(submitted)
    orders = [[first, second, third], [third, first]], [[second, third], [second, second]]
    for mine in (*orders[0], *orders[1]):
        assert gathered(mine, mine, mine, exchanges=exchanges) == [(tuple(mine), None)] * 3
    twin = CachedRequest(
        first.request
    )  # as of a thread that submits it for the first time while another rank's is read
    for same, _ in gathered([twin], [first], [first], exchanges=exchanges):
        assert same == (first,)
    (_, messages), *_ = gathered([first], [second], [], exchanges=exchanges)  # known to all, and in no order of theirs
    assert [message.requests for message in messages] == [[first], [second], []]


def test_ids_begin_anew_on_all_ranks_at_once(monkeypatch):
    monkeypatch.setattr(request_exchange, "_MAX_REQUESTS", 5)
    exchanges = [RequestExchange(Gathers(0, 0)) for _ in range(3)]
    many = [request(f"of many {number}", 4) for number in range(12)]
    counts = []
    for one, other in zip(many[::2], many[1::2], strict=True):
        for same, messages in gathered([one, other], [other], [], exchanges=exchanges):
            assert same is None and [message.requests for message in messages] == [[one, other], [other], []]
        assert exchanges[0]._ids == exchanges[1]._ids == exchanges[2]._ids
        counts.append(len(exchanges[0]._ids))
    assert counts == [2, 4, 0, 2, 4, 0]


class Gathers:
    """Stands for the control communicator: gathers other ranks' numbers beside this one's."""

    size = 3

    def __init__(self, *others):
        self.others = others

    def all_gather(self, gathered, own):
        gathered[:, 0] = own[0], *self.others


def test_ranks_agree_on_a_plan():
    assert RequestExchange(Gathers(7, 7)).agree(7)
    assert not RequestExchange(Gathers(7, 8)).agree(7)
    assert not RequestExchange(Gathers(0, 7)).agree(7)
    assert not RequestExchange(Gathers(0, 0)).agree(0)  # nobody has a plan


def steady(ctx):
    """What ranks that submit the same again and again send, and what becomes of it when they part."""
    rank, size = ctx.rank, ctx.size
    total = sum(range(size))
    with started(ctx) as hvd:
        controller = current().controller(hvd.global_process_set)
        control, comm = controller.control._native, controller.comms["cpu"]._native

        def reduce(name):
            assert hvd.allreduce(torch.full((3,), float(rank)), name=name, op=hvd.Sum).tolist() == [total] * 3

        calls = {
            "named": lambda: reduce("same"),
            "unnamed": lambda: reduce(None),
            "in place": lambda: hvd.allreduce_(torch.ones(5), op=hvd.Average),
            "gather": lambda: hvd.allgather(torch.full((2,), rank)),
            "broadcast": lambda: hvd.broadcast(torch.full((2,), rank), size - 1),
            "group": lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(3)]),
        }
        counts = []
        for call in calls.values():
            call(), call()  # described, then planned
            before = control.sequence(), comm.sequence()
            for _ in range(5):
                call()
            counts.append((control.sequence() - before[0], comm.sequence() - before[1]))
        # In another order on each rank, and in the same one once more.
        for turn in range(4):
            reduce("same")
            names = [f"{number}" for number in range(4)]
            submitted = {}
            for name in names if turn % 2 else random.Random(rank).sample(names, 4):
                submitted[name] = hvd.allreduce_async(torch.tensor([rank, int(name)]), name=name, op=hvd.Sum)
            for name in names:
                assert hvd.synchronize(submitted[name]).tolist() == [total, size * int(name)]
        # Whoever announced them in which order, they are planned once they come in one order.
        for _ in range(3):
            for number in range(4):
                hvd.allreduce(torch.tensor([rank, number]), name=f"{number}", op=hvd.Sum)
        planned_anew = controller._message_table.planned
        # One rank is late with an operation that the others submit before and after another one.
        late = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum) if rank else None
        for _ in range(3):
            reduce("same")
            reduce(None)
        late = late if rank else hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
        assert hvd.synchronize(late).item() == size
        # Ranks that differ under one name, on a plan and beside it.
        errors = []
        for _ in range(2):
            reduce("same")
            try:
                hvd.allreduce(torch.ones(3 + (rank == 1)), name="same", op=hvd.Sum)
            except hvd.HorovodInternalError as error:
                errors.append("allreduce.same" in str(error) and "differ in shape" in str(error))
        for _ in range(rank):  # as many as its number, then a join
            hvd.allreduce(torch.ones(1), op=hvd.Sum)
        hvd.join()
        reduce(None)
        reduce("same")
        return counts, errors, planned_anew


def test_a_steady_state_is_a_number_and_the_operation():
    for counts, errors, planned_anew in run_ranks(steady, 3):
        assert counts == [(5, 5)] * 6 and errors == [True] * 2 and planned_anew
