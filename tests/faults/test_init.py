"""What can go wrong while the ranks meet: each a clear error on everybody within the time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from collectives.errors import CollectivesError, CollectiveTimeout, InvalidUsage
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


def init(ctx, seconds, rank=None, size=None):
    """Make a communicator by an id of all ranks, which must fail; the seconds and the error."""
    unique_id = ctx.unique_id()
    ctx.library.set_init_timeout(seconds)
    rank, size = ctx.rank if rank is None else rank, size or ctx.size
    return raised(lambda: ctx.library.comm_init_rank(size, unique_id, rank))


def missing_rank(ctx, missing):
    if ctx.rank == missing:
        ctx.unique_id()
    result = None if ctx.rank == missing else init(ctx, 1.0)
    ctx.barrier()
    return result


@pytest.mark.parametrize(("n", "missing"), [(2, 0), (4, 2)])
def test_a_rank_that_never_comes(n, missing):
    """Whoever is missing is named by everybody; without rank 0 nobody knows more than that rank 0 has not come."""
    for rank, result in enumerate(run_ranks(missing_rank, n, missing, fresh=True)):
        if rank != missing:
            elapsed, error = result
            assert isinstance(error, CollectiveTimeout), repr(error)
            assert 0.8 < elapsed < 4
            assert error.peers == (missing,) and f"rank {missing}" in str(error), str(error)


def wrong_numbers(ctx, numbers, sizes):
    return init(ctx, 5.0, numbers[ctx.rank], sizes[ctx.rank])


@pytest.mark.parametrize("numbers", [(0, 1, 1), (0, 0)])
def test_two_ranks_with_one_number(numbers):
    n, twice = len(numbers), max(numbers, key=numbers.count)
    for elapsed, error in run_ranks(wrong_numbers, n, numbers, [n] * n, fresh=True):
        assert elapsed < 5.5
        assert isinstance(error, InvalidUsage), repr(error)
        assert f"{twice}" in error.message


def test_ranks_that_disagree_about_the_number_of_ranks():
    results = run_ranks(wrong_numbers, 3, (0, 1, 2), (3, 4, 3), fresh=True)
    assert all(isinstance(error, CollectivesError) for _, error in results)
    assert any(isinstance(e, InvalidUsage) and "3" in e.message and "4" in e.message for _, e in results), results


def killed_during_init(ctx, victim):
    unique_id = ctx.unique_id()
    ctx.library.set_init_timeout(6.0)
    if ctx.rank == victim:
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # SIGALRM's default action ends the process inside of init
    if ctx.rank == 2:
        time.sleep(1.0)  # the others are still waiting for it when the victim dies
    return raised(lambda: ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_during_init(victim):
    results = run_ranks(killed_during_init, 3, victim, deaths={victim}, fresh=True)
    assert results[victim] == Died(signal=int(signal.SIGALRM), exitcode=0)
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        elapsed, error = result
        assert elapsed < 6.8, f"rank {rank} after {elapsed:.1f} s"
        assert isinstance(error, CollectivesError)
        # Rank 2 comes when rank 0 has given up or is dead: it may be told why, or find that rank 0 isn't there.
        assert error.peers in ([(victim,), (0,)] if rank == 2 else [(victim,)]), f"rank {rank}: {error!r}"


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


def others(ctx):
    """A process of another user holds the right id: it is refused. Nor is one let in of which only the name is right,
    which can be seen in /proc/net/unix, and the secret is guessed. Our own ranks can still come afterwards, and use the
    id again, which NCCL forbids: no rank goes to the place of the first meeting.

    An id of the host engine: 8 bytes of magic, 16 of the name, 32 of the secret.
    """
    unique_id, text, outcome = ctx.unique_id(), "", []
    ctx.library.set_init_timeout(20.0)
    if ctx.rank == 1:
        if os.getuid() == 0:  # nobody else can start a process of another user
            command = [sys.executable, "-c", OTHER_USER.format(root=str(ROOT), path=library_path("host"))]
            done = subprocess.run([*command, unique_id.hex()], capture_output=True, text=True, timeout=30, check=False)
            text = done.stdout + done.stderr
        ctx.library.set_init_timeout(1.0)
        for byte in (24, 31, 40, 55):
            forged = bytearray(unique_id)
            forged[byte] ^= 0x01
            outcome.append(type(raised(lambda f=bytes(forged): ctx.library.comm_init_rank(2, f, 1))[1]).__name__)
        ctx.library.set_init_timeout(20.0)
    comms = [ctx.library.comm_init_rank(2, unique_id, ctx.rank) for _ in range(2)]
    found = [each for comm in comms for each in run_cases(ctx, OK, comm)]
    for comm in comms:
        comm.destroy()
    return found, text, outcome


def test_who_has_an_id_in_part_or_is_another_user_is_refused():
    (found, *_), (found_too, text, outcome) = run_ranks(others, 2, fresh=True)
    assert not found + found_too
    assert os.getuid() or "attached" not in text and ("Error" in text or "Timeout" in text), text
    assert len(outcome) == 4
    assert set(outcome) <= {"RemoteError", "CollectiveTimeout", "TransportError"}, outcome
