"""What can go wrong while the ranks meet: each a clear error on everybody within the time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conformance.cases import Case, run_cases
from tests.rank_process import ROOT, library_path
from tests.ranks import Died, run_ranks

OK = [Case("all_reduce", "float32", 100)]


def raised(call):
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return time.monotonic() - start, error
    raise AssertionError("was accepted")


def missing_rank(ctx, missing):
    unique_id = ctx.unique_id()
    ctx.library.set_init_timeout(1.0)
    if ctx.rank == missing:
        ctx.barrier()
        return None
    result = raised(lambda: ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank))
    ctx.barrier()
    return result


@pytest.mark.parametrize(("n", "missing"), [(2, 0), (4, 2)])
def test_a_rank_that_never_comes(n, missing):
    """Whoever is missing is named by everybody; without rank 0 nobody knows more than that rank 0 has not come."""
    from collectives.errors import CollectiveTimeout

    for rank, result in enumerate(run_ranks(missing_rank, n, missing, fresh=True)):
        if rank == missing:
            continue
        elapsed, error = result
        assert isinstance(error, CollectiveTimeout), repr(error)
        assert 0.8 < elapsed < 4
        assert error.peers == (missing,), str(error)
        assert f"rank {missing}" in str(error)


def duplicate(ctx, numbers):
    unique_id = ctx.unique_id()
    ctx.library.set_init_timeout(5.0)
    return raised(lambda: ctx.library.comm_init_rank(ctx.size, unique_id, numbers[ctx.rank]))


@pytest.mark.parametrize("numbers", [(0, 1, 1), (0, 0)])
def test_two_ranks_with_one_number(numbers):
    from collectives.errors import InvalidUsage

    twice = max(numbers, key=numbers.count)
    for elapsed, error in run_ranks(duplicate, len(numbers), numbers, fresh=True):
        assert elapsed < 5.5
        assert isinstance(error, InvalidUsage), repr(error)
        assert f"{twice}" in error.message


def other_size(ctx):
    unique_id = ctx.unique_id()
    ctx.library.set_init_timeout(5.0)
    return raised(lambda: ctx.library.comm_init_rank(3 if ctx.rank != 1 else 4, unique_id, ctx.rank))


def test_ranks_that_disagree_about_the_number_of_ranks():
    from collectives.errors import CollectivesError, InvalidUsage

    results = run_ranks(other_size, 3, fresh=True)
    assert all(isinstance(error, CollectivesError) for _, error in results)
    assert any(isinstance(e, InvalidUsage) and "3" in e.message and "4" in e.message for _, e in results), results


def killed_during_init(ctx, victim):
    unique_id = ctx.unique_id()
    ctx.library.set_init_timeout(6.0)
    if ctx.rank == victim:
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # SIGALRM's default action ends the process inside of init
        ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank)
    if ctx.rank == 2:
        time.sleep(1.5)  # the others are still waiting for it when the victim dies
    return raised(lambda: ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_during_init(victim):
    results = run_ranks(killed_during_init, 3, victim, deaths={victim}, fresh=True)
    assert results[victim] == Died(signal=int(signal.SIGALRM), exitcode=0)
    from collectives.errors import CollectivesError

    for rank, result in enumerate(results):
        if rank == victim:
            continue
        elapsed, error = result
        assert elapsed < 6.8, f"rank {rank} after {elapsed:.1f} s"
        assert isinstance(error, CollectivesError)
        # Rank 2 comes when rank 0 has given up or is dead: it may be told why, or find that rank 0 isn't there.
        assert error.peers in ([(victim,), (0,)] if rank == 2 else [(victim,)]), f"rank {rank}: {error!r}"


def id_used_twice(ctx):
    """NCCL forbids it; here an id serves again, and no rank goes to the place of the first meeting."""
    unique_id = ctx.unique_id()
    first = ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank)
    second = ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank)
    found = run_cases(ctx, OK, first) + run_cases(ctx, OK, second)
    first.destroy()
    second.destroy()
    return found


def test_an_id_can_be_used_again():
    assert run_ranks(id_used_twice, 3) == [[]] * 3


OTHER_USER = """
import os, sys
sys.path.insert(0, {root!r})
from tests.rank_process import load_binding
binding = load_binding()
library = binding.Library({path!r})
library.set_init_timeout(2.0)
os.setgid(65534)
os.setuid(65534)
try:
    library.comm_init_rank(2, bytes.fromhex(sys.argv[1]), 1)
except Exception as error:
    print(type(error).__name__, error)
else:
    print("attached")
"""


def other_user(ctx):
    """A process of another user holds the right id: it is refused, and our own rank still can come afterwards."""
    unique_id = ctx.unique_id()
    text = ""
    if ctx.rank == 1:
        code = OTHER_USER.format(root=str(ROOT), path=library_path("host"))
        done = subprocess.run(
            [sys.executable, "-c", code, unique_id.hex()], capture_output=True, text=True, timeout=30, check=False
        )
        text = done.stdout + done.stderr
    comm = ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank)
    found = run_cases(ctx, OK, comm)
    comm.destroy()
    return text, found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_is_refused():
    (_, found), (text, found_too) = run_ranks(other_user, 2, fresh=True)
    assert not found + found_too
    assert "attached" not in text
    assert "Error" in text or "Timeout" in text, text


def wrong_secret(ctx):
    """Of an id only the name is right (it can be seen in /proc/net/unix), the secret is guessed: it can't come in.

    An id of the host engine: 8 bytes of magic, 16 of the name, 32 of the secret.
    """
    unique_id = ctx.unique_id()
    if ctx.rank == 0:
        ctx.library.set_init_timeout(20.0)
        comm = ctx.library.comm_init_rank(2, unique_id, 0)
        return run_cases(ctx, OK, comm)
    outcome = []
    ctx.library.set_init_timeout(1.0)
    for byte in (24, 31, 40, 55):
        forged = bytearray(unique_id)
        forged[byte] ^= 0x01
        outcome.append(type(raised(lambda f=bytes(forged): ctx.library.comm_init_rank(2, f, 1))[1]).__name__)
    ctx.library.set_init_timeout(20.0)
    comm = ctx.library.comm_init_rank(2, unique_id, 1)
    return outcome + run_cases(ctx, OK, comm)


def test_an_id_that_is_partly_guessed():
    found, outcome = run_ranks(wrong_secret, 2, fresh=True)
    assert found == []
    assert len(outcome) == 4
    assert set(outcome) <= {"RemoteError", "CollectiveTimeout", "TransportError"}, outcome
