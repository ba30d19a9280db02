"""Ranks that wait for different operations, and one whose own arguments contradict each other, are errors at once."""

import threading

import pytest
import torch

from tests.horovod.started import started
from tests.ranks import run_ranks

NEVER = {"HOROVOD_STALL_CHECK_DISABLE": "1"}


def error_of(call):
    from collectives.horovod.exceptions import HorovodInternalError

    try:
        call()
    except (HorovodInternalError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def different(ctx, named):
    with started(ctx, **NEVER) as hvd:
        x = torch.arange(float(2 * ctx.size))
        name = "mine" if named else None
        for at in range(ctx.size):
            calls = {
                True: lambda: hvd.alltoall(x, [2] * ctx.size, name=name),
                False: lambda: hvd.allreduce(x, name=name, op=hvd.Sum),
            }
            kind, text = error_of(calls[ctx.rank == at])
            assert kind == "HorovodInternalError"
            assert "the ranks wait for different operations" in text, text
            assert f"rank {at} submitted alltoall." in text and "submitted allreduce." in text, text
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == ctx.size  # it goes on
            rows, counts = hvd.alltoall(x, [2] * ctx.size)
            assert rows.tolist() == [2.0 * ctx.rank, 2 * ctx.rank + 1] * ctx.size and counts.tolist() == [2] * ctx.size


@pytest.mark.parametrize("named", [False, True])
def test_alltoall_against_another_operation(named):
    run_ranks(different, 3, named)


def refused(ctx):
    with started(ctx, **NEVER) as hvd:
        x = torch.arange(6.0)
        for splits, text in (([9] * ctx.size, "splits add up to"), ([1], "numbers of rows from 0 up")):
            found = error_of(lambda: hvd.alltoall(x, splits if ctx.rank == 1 else [1] * ctx.size))  # noqa: B023
            if ctx.rank == 1:
                assert found[0] == "ValueError" and text in found[1]
            else:
                assert found[0] == "HorovodInternalError", found
                assert "rank 1 takes no part, since it raised ValueError: alltoall: splits" in found[1], found
            assert error_of(lambda: hvd.alltoall(x, splits))[0] == "ValueError"  # noqa: B023  (all ranks do)
            assert hvd.alltoall(x[: ctx.size]).numel() == ctx.size


def test_splits_of_one_rank_that_contradict_themselves():
    run_ranks(refused, 3)


def submitted_late(ctx):
    """What a second thread submits later, or this one, ends the waits: they are none of no end."""
    with started(ctx, **NEVER) as hvd:
        names = ["a", "b"]
        mine = names if ctx.rank == 0 else names[::-1]
        results = {}

        def reduce(name):
            results[name] = hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum).item()

        threads = [threading.Thread(target=reduce, args=(name,)) for name in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {"a": 2.0, "b": 2.0}
        handle = hvd.allreduce_async(torch.ones(1), name="c")
        if ctx.rank == 1:
            ctx.barrier()  # it computes, and rank 0 waits for as long as it takes
        else:
            threading.Timer(2.5, ctx.barrier).start()
            hvd.allreduce(torch.ones(1), name="d")
        if ctx.rank == 1:
            hvd.allreduce(torch.ones(1), name="d")
        assert hvd.synchronize(handle).item() == 1


def test_a_late_operation_is_none_of_another_kind():
    run_ranks(submitted_late, 2)
