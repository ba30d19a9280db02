"""Ranks that submit the same operations in the same order as before: plans, and how they end."""

from __future__ import annotations

import random

import torch

from collectives.horovod.basics import current
from collectives.horovod.message_table import MessageTable
from collectives.horovod.messages import Request, cached_request
from collectives.horovod.request_exchange import RankMessage, RequestExchange
from tests.ranks import run_ranks

from .started import started


def request(name, count):
    return Request("allreduce", name, ("float32",), ((count,),), "cpu", "sum")


def test_plans_are_known_by_number():
    unnamed = request("", 4)
    named = request("named", 8)
    one, other = MessageTable(2), MessageTable(2)  # of two ranks
    for table in (one, other):
        for rank in range(2):
            table.register_requests(rank, [unnamed, named])
        assert not table.planned and table.plan_for((0, 0), 1 << 20).number == 1 and table.planned
        assert table.plan_for((1,), 1 << 20).number == 2
    first, second = cached_request(unnamed), cached_request(named)
    for plan, wanted in (((first, first), 1), ((second,), 2)):
        assert one.find_plan(plan).number == other.find_plan(plan).number == wanted
    assert one.find_plan((first,)) is None
    one.use_plan(one.find_plan((first, first)))
    # Operations without a name are counted whether they were planned or not, those of all ranks.
    assert one.keys_of(0, [first, second, first]) == ["allreduce.noname.4", "allreduce.named", "allreduce.noname.5"]
    one.add_submitted(1, [0])
    assert one.missing_ranks("allreduce.noname.4") == [0] and one.keys_of(1, [first]) == ["allreduce.noname.5"]
    one.add_messages([])
    assert not one.planned
    for number in range(2, 400):  # more than are kept: numbers go on
        for rank in range(2):
            other.register_requests(rank, [request(f"{number}", 1)])
        assert other.plan_for((number,), 1 << 20).number == number + 1
    assert other.find_plan((second,)) is None


def test_ranks_have_plans_whichever_of_them_was_ahead():
    """While a request was announced: the last rank, too, may have done it before the others."""
    first, second = request("first", 4), request("second", 4)
    for ahead in range(3):
        table = MessageTable(3)
        for early, others in (([first, second], [first]), ([], [second])):
            announced = [early if rank == ahead else others for rank in range(3)]
            ids = [[(first, second).index(each) for each in new] for new in announced]
            rows = zip(announced, ids, strict=True)
            table.add_messages(RankMessage(new or None, False, numbers, False) for new, numbers in rows)
        assert len(table.pop_ready()) == 2 and table.plan_for((0, 1), 1 << 20) is not None, ahead


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
        return counts, errors


def test_a_steady_state_is_a_number_and_the_operation():
    for counts, errors in run_ranks(steady, 3):
        assert counts == [(5, 5)] * 6 and errors == [True] * 2
