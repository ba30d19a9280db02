"""Ranks that submit the same operations in the same order as before: plans, and how they end."""

from __future__ import annotations

import random
from unittest import mock

import torch

from collectives.horovod import message_table, request_exchange
from collectives.horovod.basics import current
from tests.ranks import run_ranks

from .started import started


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


def many_names(ctx):
    """More requests and plans than are kept: their numbers begin anew on all ranks at once."""
    limits = mock.patch.object(request_exchange, "_MAX_REQUESTS", 5), mock.patch.object(message_table, "_MAX_PLANS", 3)
    with limits[0], limits[1], started(ctx) as hvd:
        for turn in range(3):
            for first in range(0, 12, 2):
                names = [first, first + 1][:: -1 if ctx.rank == turn else 1]
                submitted = [hvd.allreduce_async(torch.tensor([n]), name=f"{n}", op=hvd.Sum) for n in names]
                assert [hvd.synchronize(handle).item() for handle in submitted] == [ctx.size * n for n in names]
            for name in range(8):  # in one order, as plans
                for _ in range(2):
                    assert hvd.allreduce(torch.tensor([name]), name=f"{name}", op=hvd.Sum).item() == ctx.size * name
        exchange = current().controller(hvd.global_process_set)._exchange
        return len(exchange._ids)


def test_more_names_than_are_kept():
    counts = run_ranks(many_names, 3)
    assert counts == [counts[0]] * 3 and counts[0] <= 7


def test_a_steady_state_is_a_number_and_the_operation():
    for counts, errors, planned_anew in run_ranks(steady, 3):
        assert counts == [(5, 5)] * 6 and errors == [True] * 2 and planned_anew
