"""The pool of rank processes itself: what it must notice, else every other test would be worth less."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.ranks import Died, RankFailure, run_ranks


def who(ctx):
    return ctx.rank, ctx.size, os.getpid()


def swap(ctx):
    assert ctx.exchange(ctx.rank * 10) == [r * 10 for r in range(ctx.size)]
    if ctx.rank < 2:
        assert ctx.exchange(ctx.rank, ranks=[0, 1]) == [0, 1]
    ctx.barrier()
    return True


def raise_on_one(ctx):
    if ctx.rank == 1:
        raise ValueError("rank one's own trouble")
    ctx.barrier()


def hang_in_a_function_with_a_name(ctx):
    if ctx.rank == 0:
        threading.Event().wait()


def end_process(ctx, rank, sig):
    if ctx.rank == rank:
        os.kill(os.getpid(), sig)
        time.sleep(10)
    return ctx.rank


def environment(ctx, key):
    return os.environ.get(key)


def not_picklable(ctx):
    return threading.Lock()


def test_processes_are_real_and_reused():
    first, second = run_ranks(who, 3), run_ranks(who, 3)
    assert first == second
    assert [f[:2] for f in first] == [(0, 3), (1, 3), (2, 3)]
    assert len({f[2] for f in first} | {os.getpid()}) == 4
    assert not {f[2] for f in run_ranks(who, 2, fresh=True)} & {f[2] for f in first}


def test_exchange():
    assert run_ranks(swap, 3) == [True] * 3


def test_exception_names_the_rank_and_the_cause():
    with pytest.raises(RankFailure, match=r"(?s)rank 1: Traceback.*raise_on_one.*rank one's own trouble") as caught:
        run_ranks(raise_on_one, 2)
    assert isinstance(caught.value.errors[1], ValueError)


def test_hang_ends_with_the_stack():
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank\(s\) \[0\] not done.*hang_in_a_function_with_a_name"):
        run_ranks(hang_in_a_function_with_a_name, 2, timeout=2)
    assert time.monotonic() - start < 10
    assert len(run_ranks(who, 2)) == 2


def test_death_expected_and_not():
    assert run_ranks(end_process, 2, 1, signal.SIGKILL, deaths={1}) == [0, Died(signal=9, exitcode=0)]
    with pytest.raises(RankFailure, match="rank 0: the process ended unexpectedly \\(killed by SIGKILL"):
        run_ranks(end_process, 2, 0, signal.SIGKILL)
    with pytest.raises(RankFailure, match="were to die and lived"):
        run_ranks(who, 2, deaths={1})


def test_environment_lasts_for_one_call():
    assert run_ranks(environment, 2, "COLLECTIVES_TEST_X", env={"COLLECTIVES_TEST_X": 3}) == ["3", "3"]
    assert run_ranks(environment, 2, "COLLECTIVES_TEST_X") == [None, None]


def test_result_that_cannot_travel_is_a_failure():
    with pytest.raises(RankFailure, match="can't be sent back"):
        run_ranks(not_picklable, 1)


def test_variables_of_each_rank_and_of_processes_that_are_kept():
    by_rank = [{"COLLECTIVES_TEST_X": 1}, {"COLLECTIVES_TEST_X": 2}]
    assert run_ranks(environment, 2, "COLLECTIVES_TEST_X", env=by_rank) == ["1", "2"]
    assert run_ranks(environment, 2, "COLLECTIVES_TEST_X", start_env=by_rank) == ["1", "2"]
    kept = run_ranks(who, 2, start_env=by_rank)
    assert run_ranks(who, 2, start_env=by_rank) == kept
    assert not {each[2] for each in run_ranks(who, 2)} & {each[2] for each in kept}
    assert run_ranks(end_process, 2, 1, signal.SIGKILL, start_env=by_rank, deaths=[1])[0] == 0
    assert run_ranks(environment, 2, "COLLECTIVES_TEST_X", start_env=by_rank) == ["1", "2"]


def test_communicators_of_ranks_with_variables_of_their_own():
    run_ranks(summed, 2, env=[{"COLLECTIVES_TEST_X": 1}, {"COLLECTIVES_TEST_X": 1}])
    run_ranks(summed, 2, env=[{"COLLECTIVES_TEST_X": 1}, {"COLLECTIVES_TEST_X": 2}], timeout=20)


def summed(ctx):
    ctx.comm().all_reduce(0, 0, 0, 0, 0, 0)
