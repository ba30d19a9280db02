"""Recorded collectives of long arrays over several nodes: the same bits, and how they fail in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from functools import partial

import pytest
import torch

import collectives
from collectives import errors
from collectives._nccl import STEP_KINDS, StepList
from collectives.comm.multinode import recorded
from tests.hosts import joined
from tests.ranks import Died, run_ranks

COUNT = 1_100_011  # floats: some chunks on two nodes of two ranks


def make_calls(comm, rank, size):
    """Return calls on long arrays: functions that make their arrays and return what is in them then."""

    def numbers(dtype, count=COUNT):
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(-99, 99, (count,), generator=generator).div(16).to(dtype)

    def all_reduce(dtype, op, count):
        array = numbers(dtype, count)
        comm.all_reduce(array, op)
        return array

    def out_of_place():
        array, out = numbers(torch.float32), torch.empty(COUNT)
        comm.all_reduce(array, out=out)
        return torch.cat([array, out])

    def view():
        array = numbers(torch.float32)
        comm.all_reduce(array[3 : COUNT - 1])
        return array

    def unaligned():
        array = numbers(torch.float32).view(torch.uint8)
        comm.all_reduce(array.numpy()[2:-2].view("float32"))
        return array

    def rooted(name, dtype, root):
        array = numbers(dtype, 4 * COUNT // dtype.itemsize)
        getattr(comm, name)(array, root)
        return array if name == "broadcast" or rank == root else array[:0]

    dtypes = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int32, torch.uint8
    reductions = [(dtype, op) for dtype, op in zip(dtypes, ("sum", "avg") * 3, strict=True)]
    reductions += [(torch.float32, op) for op in ("prod", "max", "min", 0.5 + rank)]
    made = [partial(all_reduce, dtype, op, 4 * COUNT // dtype.itemsize) for dtype, op in reductions]
    made += [partial(all_reduce, torch.float32, "sum", COUNT + 1), out_of_place, view, unaligned]
    for root in range(size):
        made += [partial(rooted, "broadcast", torch.float32, root), partial(rooted, "reduce", torch.float32, root)]
    made.append(partial(rooted, "broadcast", torch.uint8, 1))
    return made


def same_bits(ctx, machines):
    """The same call by the composition itself, then recorded, then by the recording once more."""
    takes, recorded._MAX_RECORDINGS = recorded.RecordedCollectives.takes, 8
    with joined(ctx, machines) as comm:
        made = make_calls(comm, ctx.rank, ctx.size)
        for call in made:
            found = []
            for way in ("composed", "recorded", "again"):
                recorded.RecordedCollectives.takes = takes if way != "composed" else lambda *_: False
                found.append(call().view(torch.uint8))
            recorded.RecordedCollectives.takes = takes
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), call
        kept = comm._native.collectives._recorded._recordings
        assert len(kept) == recorded._MAX_RECORDINGS < len(made)  # more were made than are kept


@pytest.mark.parametrize("machines", ["abbab", "abc"])
def test_same_bits_as_composed(machines):
    run_ranks(same_bits, len(machines), machines, timeout=100, fresh=True)


def several(ctx):
    """Two communicators and a part of them, each used by a thread of its own, half of the calls by a queue."""
    with joined(ctx, "aab") as whole:
        other, part = whole.split(0, -ctx.rank), whole.split(int(ctx.rank == 0), ctx.rank)
        wrong, ended = [], []

        def use(comm, count):
            for i in range(6):
                array = torch.full((count + 1000 * (i % 3),), float(comm.rank + i))
                work = comm.all_reduce(array, async_op=i % 2 == 1)
                if i % 2:
                    work.wait()
                if not array.eq(sum(range(comm.size)) + comm.size * i).all():
                    wrong.append(("all_reduce", comm.size, i))
                array.fill_(float(comm.rank))
                comm.broadcast(array, i % comm.size)
                if not array.eq(i % comm.size).all():
                    wrong.append(("broadcast", comm.size, i))
            ended.append(comm)

        pairs = (whole, COUNT), (other, COUNT + 7), (part, 2 * COUNT)
        threads = [threading.Thread(target=use, args=pair) for pair in pairs]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for comm in (part, other):
            comm.close()
    return wrong, len(ended)


def test_several_communicators_at_once():
    assert run_ranks(several, 3, timeout=90) == [([], 3)] * 3


# ---- Failures in the middle.


def until_it_fails(comm, event=None, seconds=20.0):
    """Reduce a long array until a call fails; return the error.

    `event`: a function that is called once the calls are under way; None on ranks without one.
    """
    array = torch.ones(20 * COUNT)
    comm.all_reduce(array, "max")
    if event is not None:
        threading.Timer(0.3, event).start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            comm.all_reduce(array, "max")
        except errors.CollectivesError as error:
            return error
    raise AssertionError("no call has failed")


def later(function, *args):
    threading.Timer(0.3, function, args).start()


def killed(ctx, victim):
    with contextlib.suppress(errors.CollectivesError), joined(ctx, "aabb") as comm:
        error = until_it_fails(comm, partial(os.kill, os.getpid(), signal.SIGKILL) if ctx.rank == victim else None)
        comm.abort()
    return type(error).__name__, error.peers


@pytest.mark.parametrize("victim", [1, 3])  # rank 0 has the store by which ranks learn the cause
def test_a_killed_rank_is_named(victim):
    answers = run_ranks(killed, 4, victim, deaths=[victim], timeout=60)
    assert isinstance(answers.pop(victim), Died) and answers == [("RemoteError", (victim,))] * 3


def stopped(ctx):
    """A rank that is stopped, and so lets all others run out of time."""
    with joined(ctx, "aabb") as comm:
        comm.all_reduce(torch.ones(COUNT))
        comm._native.set_timeout(1.0)
        others = []

        def stop():
            others.append(subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"]))
            os.kill(os.getpid(), signal.SIGSTOP)

        error = until_it_fails(comm, stop if ctx.rank == 2 else None)
        for process in others:
            process.wait()
        ctx.barrier()
        comm.abort()
    return type(error).__name__, error.peers


def test_a_stopped_rank_is_named():
    answers = run_ranks(stopped, 4, timeout=60)
    kind, peers = answers.pop(2)  # stopped in a call it finds that the other rank of its node is late, or it itself
    assert kind == "CollectiveTimeout" and peers in ((2,), (3,))
    assert answers == [("CollectiveTimeout", (2,))] * 3


def aborted(ctx, by_signal):
    """Another thread of rank 1, or a signal handler, aborts: its own call ends with that, and the others' by its end.

    A handler may come between two calls, the second of which is refused.
    """
    with joined(ctx, "aabb") as comm:
        before = signal.signal(signal.SIGUSR1, lambda *_: comm.abort())
        abort = partial(os.kill, os.getpid(), signal.SIGUSR1) if by_signal else comm.abort
        error = until_it_fails(comm, abort if ctx.rank == 1 else None)
        signal.signal(signal.SIGUSR1, before)
        ctx.barrier()
        comm.abort()
    return type(error).__name__, error.peers, str(error)


@pytest.mark.parametrize("by_signal", [False, True])
def test_an_abort_ends_it(by_signal):
    first, second, third, fourth = run_ranks(aborted, 4, by_signal, timeout=60)
    assert second[0] == "Aborted" or (by_signal and "the communicator was aborted" in second[2]), second
    assert {first[0], third[0], fourth[0]} == {"RemoteError"} and first[1] == fourth[1] == (1,)


def interrupted(ctx):
    """Ctrl-C: this rank raises it, and the others are not left waiting."""
    with joined(ctx, "aabb") as comm:
        if ctx.rank == 2:
            with pytest.raises(KeyboardInterrupt):
                until_it_fails(comm, partial(os.kill, os.getpid(), signal.SIGINT))
            found = "KeyboardInterrupt"
        else:
            found = type(until_it_fails(comm)).__name__
        ctx.barrier()
        comm.abort()
    return found


def test_ctrl_c():
    assert run_ranks(interrupted, 4, timeout=60) == ["RemoteError", "RemoteError", "KeyboardInterrupt", "RemoteError"]


def waits(ctx):
    """While a rank waits for messages, `pending` names the rank for which it does."""
    with joined(ctx, "ab", timeout=30.0) as comm:
        array, named = torch.ones(4 * COUNT), set()
        comm.all_reduce(array)
        if ctx.rank == 1:
            whole = StepList.run

            class Late(StepList):
                def run(self, *args):
                    time.sleep(0.5)
                    return whole(self, *args)

            recorded.StepList = Late
            comm._native.collectives._recorded._recordings.clear()
        worker = threading.Thread(target=comm.all_reduce, args=(array,))
        worker.start()
        while worker.is_alive():
            if (pending := comm._native.pending()) is not None:
                named.update(pending.peers)
            time.sleep(0.01)
        recorded.StepList = StepList
        return named


def test_who_is_waited_for():
    assert run_ranks(waits, 2, timeout=60, fresh=True)[0] == {1}


def used_by_a_handler(ctx):
    """A handler that interrupts a call can't make another one on the same communicator, or close it, only abort it."""
    with joined(ctx, "aabb") as comm:
        found, array = [], torch.ones(4)
        uses = [lambda: comm.all_reduce(array), lambda: comm.all_reduce(array, async_op=True), comm.close]

        def handler(*_):
            for use in uses:
                try:
                    use()
                except errors.InvalidUsage as error:
                    found.append("can only abort" in str(error))
            comm.abort()

        before = signal.signal(signal.SIGUSR1, handler)
        comm.all_reduce(array, async_op=True).wait()
        if ctx.rank == 1:
            later(os.kill, os.getpid(), signal.SIGUSR1)
            with pytest.raises(errors.Aborted):
                comm.all_reduce(torch.ones(COUNT))  # the others don't come to it
        ctx.barrier()
        signal.signal(signal.SIGUSR1, before)
        comm.abort()
    return found


def test_calls_of_a_signal_handler_are_refused():
    assert run_ranks(used_by_a_handler, 4, timeout=60) == [[], [True] * 3, [], []]


def long_limit(ctx):
    """A time limit of 30 days is more than a poll can take."""
    with joined(ctx, "ab", timeout=30 * 86400.0) as comm:
        for count in (1, COUNT):
            if ctx.rank == 1:
                time.sleep(0.3)
            comm.all_reduce(torch.ones(count))


def test_a_long_time_limit():
    run_ranks(long_limit, 2, timeout=60)


def step(kind, first=0, end=0):
    return STEP_KINDS[kind], 0, 0, 0, 0, 0, 0, first, end


@pytest.mark.parametrize(
    "message, steps, messages, kernels",
    [
        ("step 1 uses messages, sources or a kernel", [step("group_start"), step("kernel")], [], []),
        ("step 0 uses messages, sources or a kernel", [step("begin_messages", end=1)], [], []),
        ("step 0 uses messages, sources or a kernel", [step("end_messages", first=1)], [], []),
        ("message 0 has no socket", [], [(0, True, 0, 4)], []),
        ("kernel 0 takes [0-9]+ bytes of arguments", [], [], [b"short"]),
    ],
)
def test_a_list_of_steps_that_names_what_is_not_there(message, steps, messages, kernels):
    with collectives.init(engine="host") as comm, pytest.raises(errors.InvalidArgument, match=message):
        StepList(comm._native, 0, steps, messages, kernels, [], [])


def test_steps_that_are_not_in_the_list_are_not_run():
    with collectives.init(engine="host") as comm:
        steps = StepList(comm._native, 0, [], [], [], [], [])
        for first, end, bases in ((0, 1, ()), (-1, 0, ()), (1, 0, ()), (0, 0, (1, 2, 3, 4))):
            with pytest.raises(errors.InvalidArgument, match=f"steps {first} to {end} of 0, {len(bases)} bases"):
                steps.run(first, end, bases, None, 1)
        assert steps.run(0, 0, (), None, 1) is None
