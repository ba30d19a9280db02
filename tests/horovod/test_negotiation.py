"""Ranks that submit in different orders, late, or not at all; fusion; join; process sets; a rank that dies."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import threading
import time

import pytest
import torch

from collectives.horovod.message_table import MessageTable, fuse_responses
from collectives.horovod.messages import Request, cached_request
from tests.ranks import Died, run_ranks

from .started import started


def any_order(ctx):
    names = [f"tensor {i}" for i in range(300)]
    order = random.Random(ctx.rank).sample(names, len(names))
    with started(ctx) as hvd:
        for _ in range(2):  # the second time by numbers alone
            handles = {}
            for name in order:
                index = names.index(name)
                handles[name] = hvd.allreduce_async(torch.full((index % 7 + 1,), float(index)), name=name, op=hvd.Sum)
            for name in reversed(names):
                index = names.index(name)
                assert hvd.synchronize(handles[name]).tolist() == [ctx.size * index] * (index % 7 + 1)
        # Nobody waits: the background thread drives, and poll returns whether it has ended.
        handle = hvd.broadcast_async(torch.tensor([ctx.rank]), 1)
        until = time.monotonic() + 20
        while not hvd.poll(handle) and time.monotonic() < until:
            time.sleep(0.001)
        assert hvd.synchronize(handle).tolist() == [1]
        # Two threads submit and wait at once, in another order on each rank.
        found = {}

        def submit(name):
            for i in range(50):
                found[name, i] = hvd.allreduce(torch.tensor([float(i)]), name=f"{name}.{i}", op=hvd.Sum).item()

        threads = [threading.Thread(target=submit, args=(name,)) for name in ("ab" if ctx.rank else "ba")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == {(name, i): ctx.size * i for name in "ab" for i in range(50)}
    return True


def test_any_order():
    assert run_ranks(any_order, 3) == [True] * 3


def requests(*shapes, dtype="float32"):
    made = [Request("allreduce", str(i), (dtype,), (shape,), "cpu", "avg") for i, shape in enumerate(shapes)]
    return list(map(cached_request, made))


def test_fusion_is_by_size_and_kind():
    table = MessageTable(2)
    other = Request("allreduce", "other", ("float64",), ((5,),), "cpu", "avg")
    new = [*requests((1000,), (2000,), (300_000,), (3000,)), *map(cached_request, [Request("barrier"), other])]
    table.add_submitted(0, new)
    assert (
        table.pop_ready() == [] and table.missing_ranks("allreduce.2") == [1] and table.missing_ranks("nothing") == []
    )
    table.add_submitted(1, new[::-1])  # complete in the order of the last rank
    ready = table.pop_ready()
    assert [each.request.name for each in ready] == ["other", "", "3", "2", "1", "0"]
    names = [[each.request.name for each in item.responses] for item in fuse_responses(ready, 16_000)]
    assert names == [["other"], [""], ["3"], ["2"], ["1", "0"]]
    names = [[each.request.name for each in item.responses] for item in fuse_responses(ready, 1 << 20)]
    assert names == [["other"], [""], ["3", "1", "0"], ["2"]]  # the large one goes alone: copying it costs more


def joins(ctx):
    rank, size = ctx.rank, ctx.size
    with started(ctx) as hvd:
        for _ in range(2):
            sums = []
            for step in range(2 * rank + 1):
                took_part = [each for each in range(size) if 2 * each + 1 > step]
                got = hvd.allreduce(torch.full((3,), float(rank + 1)), name=f"step {step}", op=hvd.Sum)
                sums.append(got.tolist() == [sum(each + 1 for each in took_part)] * 3)
                mean = hvd.allreduce(torch.ones(2), name=f"mean {step}")
                sums.append(torch.allclose(mean, torch.full((2,), len(took_part) / size)))
                rows = hvd.allgather(torch.full((2,), rank), name=f"rows {step}")
                sums.append(rows.tolist() == [each for each in took_part for _ in range(2)])
            assert all(sums)
            if rank == size - 1:
                ctx.exchange(None)
                with pytest.raises(hvd.HorovodInternalError, match="can't be done once a rank has joined"):
                    hvd.broadcast(torch.ones(1), rank)
                assert hvd.join() == rank
            else:
                done = []
                thread = threading.Thread(target=lambda: done.append(hvd.join()))  # noqa: B023
                thread.start()
                ctx.exchange(None)
                thread.join(30)
                assert done == [size - 1]
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_join_with_uneven_inputs():
    assert run_ranks(joins, 3) == [3.0] * 3


def sets(ctx):
    from collectives.horovod import ProcessSet

    even, first = ProcessSet([0, 2]), ProcessSet([0, 1])
    with started(ctx, process_sets=[even, first]) as hvd:
        assert even.process_set_id == 1 and even.size() == 2 and first.included() == (ctx.rank < 2)
        assert even.rank() == (None if ctx.rank == 1 else ctx.rank // 2)
        mine = torch.tensor([float(ctx.rank + 1)])
        answers = [hvd.allreduce(mine, op=hvd.Sum).item()]
        if even.included():
            answers.append(hvd.allreduce(mine, op=hvd.Sum, process_set=even).item())
            answers.append(hvd.broadcast(mine, 2, process_set=even).item())
            assert hvd.allgather(mine, process_set=even).tolist() == [1.0, 3.0]
            hvd.barrier(process_set=even)
        else:
            with pytest.raises(ValueError, match="rank 1 isn't in process set 1"):
                hvd.allreduce(mine, process_set=even)
        # Each set waits for its own members alone, whichever of them a rank is busy with.
        handles = []
        if ctx.rank == 0:
            handles.append(hvd.allreduce_async(mine, op=hvd.Sum, process_set=even))
            answers.append(hvd.allreduce(mine, op=hvd.Sum, process_set=first).item())
        elif ctx.rank == 1:
            answers.append(hvd.allreduce(mine, op=hvd.Sum, process_set=first).item())
        ctx.exchange(None)
        if ctx.rank == 2:
            handles.append(hvd.allreduce_async(mine, op=hvd.Sum, process_set=even))
        answers += [hvd.synchronize(handle).item() for handle in handles]
        last = hvd.add_process_set([1, 2])
        if last.included():
            answers.append(hvd.allreduce(mine, op=hvd.Max, process_set=last).item())
        assert hvd.remove_process_set(last) and not hvd.remove_process_set(hvd.global_process_set)
        assert last.size() is None and not hvd.remove_process_set(last)
        with pytest.raises(ValueError, match="isn't a process set of this job"):
            hvd.allreduce(mine, process_set=last)
        return answers


def test_process_sets():
    assert run_ranks(sets, 3) == [[6.0, 4.0, 3.0, 3.0, 4.0], [6.0, 3.0, 3.0], [6.0, 4.0, 3.0, 4.0, 3.0]]


@contextlib.contextmanager
def log_lines():
    """A list to which the lines of the log are added."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("collectives.horovod")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def stalls(ctx):
    with log_lines() as logged, started(ctx, HOROVOD_STALL_CHECK_TIME_SECONDS=0.4) as hvd:
        if ctx.rank < 2:
            handle = hvd.allreduce_async(torch.ones(2), name="lost")
            # Ranks 0 and 1 have exchanged what they have under way; rank 2 has nothing at all.
            until = time.monotonic() + 20
            while not logged and time.monotonic() < until:
                time.sleep(0.05)
        ctx.exchange(None)
        if ctx.rank == 2:
            handle = hvd.allreduce_async(torch.ones(2), name="lost")
        hvd.synchronize(handle)
    return logged


def test_a_stalled_tensor_is_reported_by_name():
    first, second, third = run_ranks(stalls, 3)
    assert third == []
    for rank, logged in enumerate((first, second)):
        assert len(logged) == 1  # once
        assert f"hvd [rank {rank}]: submitted here more than 0.4 s ago" in logged[0]
        assert "allreduce.lost (missing: rank 2)" in logged[0]


def asks_for_two_levels(ctx):
    with log_lines() as logged:
        for variables in ({"ALLREDUCE": "0"}, {"ALLREDUCE": "1"}, {"ALLREDUCE": "1", "ALLGATHER": "1"}):
            with started(ctx, **{f"HOROVOD_HIERARCHICAL_{name}": value for name, value in variables.items()}) as hvd:
                hvd.barrier()
    return logged


def test_horovods_two_levels_are_said_to_be_the_engines_choice():
    first, second = run_ranks(asks_for_two_levels, 2)
    assert len(first) == 2 and second == []
    assert first[0].startswith("HOROVOD_HIERARCHICAL_ALLREDUCE: no effect, since NCCL decides")
    assert first[1].startswith("HOROVOD_HIERARCHICAL_ALLREDUCE and HOROVOD_HIERARCHICAL_ALLGATHER: no effect")


def failure_of(hvd, call):
    """Make a call that must fail; return the error's text, and the name of its cause."""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    return str(caught.value), type(caught.value.__cause__).__name__


def stall_ends(ctx):
    with started(ctx, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=0.5, HOROVOD_STALL_CHECK_DISABLE=1) as hvd:
        if ctx.rank == 0:
            failure = failure_of(hvd, lambda: hvd.allreduce(torch.ones(2), name="lost"))
        ctx.exchange(None)
        if ctx.rank == 1:  # it hears of it at its next operation
            failure = failure_of(hvd, lambda: hvd.allreduce(torch.ones(2), name="other"))
        return failure


def test_a_stall_ends_the_job_where_that_is_asked_for():
    first, second = run_ranks(stall_ends, 2)
    assert "allreduce.lost" in first[0] and "(missing: rank 1)" in first[0] and first[1] == "CollectiveTimeout"
    assert "allreduce.other" in second[0] and second[1] == "RemoteError"


def dies(ctx):
    with started(ctx) as hvd:
        for _ in range(3):  # so that what is next would be planned
            hvd.allreduce(torch.ones(1))
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        handles = [hvd.allreduce_async(torch.ones(5), name=str(i)) for i in range(3)]
        waits = [lambda handle=handle: hvd.synchronize(handle) for handle in handles]
        return [failure_of(hvd, each) for each in (*waits, lambda: hvd.allreduce(torch.ones(1)))]


def test_a_dead_rank_fails_what_waits_for_it():
    first, second, third = run_ranks(dies, 3, deaths=[1])
    assert isinstance(second, Died)
    for answers in (first, third):
        assert len(answers) == 4
        assert all("rank 1" in text and kind == "RemoteError" for text, kind in answers), answers


def forks(ctx):
    with started(ctx) as hvd:
        hvd.allreduce(torch.ones(1))
        under_way = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="under way") if ctx.rank == 0 else None
        uses = [lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.allreduce_async(torch.ones(1))]
        if under_way is not None:
            uses.append(lambda: hvd.synchronize(under_way))
        texts = [in_child(hvd, use) for use in uses]
        ctx.exchange(None)
        if under_way is None:
            under_way = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="under way")
        return texts, hvd.synchronize(under_way).item(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def in_child(hvd, use):
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            use()
        except hvd.HorovodInternalError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as said:
        return said.read()


def test_a_forked_child_is_refused():
    for rank, (texts, *values) in enumerate(run_ranks(forks, 2)):
        assert len(texts) == (3 if rank == 0 else 2) and values == [2.0, 2.0]
        assert all("initialised in the parent process" in text for text in texts), texts


def traces(ctx, path):
    with started(ctx) as hvd:
        hvd.start_timeline(path)
        with pytest.raises(ValueError) as caught:
            hvd.start_timeline(path)
        assert "hvd.stop_timeline() ends it" in str(caught.value)
        hvd.allreduce(torch.ones(3), name="traced")
        handles = [hvd.allreduce_async(torch.ones(4), name=f"small {i}") for i in range(2)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.stop_timeline()
        hvd.stop_timeline()  # nothing is recorded any more
    return True


def test_a_timeline_names_the_operations(tmp_path):
    assert run_ranks(traces, 2, str(tmp_path / "trace.json")) == [True, True]
    for rank in range(2):
        written = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())
        names = {event.get("name") for event in written["traceEvents"]}
        assert "allreduce.traced" in names
        assert "2 fused, allreduce.small 0 first" in names or {"allreduce.small 0", "allreduce.small 1"} <= names
