"""The watchdog that ends what hangs on NCCL, on real communicators of the host engine, which it looks at in one way."""

from __future__ import annotations

import os
import pickle
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collectives import errors
from collectives.comm import liveness as presence
from collectives.comm import make_tag, watchdog
from collectives.rendezvous.peers import PeerInfo
from tests.launching import clean_environment, free_port
from tests.programs import run_python
from tests.ranks import run_ranks


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, getattr(error, "peers", None), str(error)
    return None


def hangs(ctx, port, how):
    from collectives.comm.engine import get_engine
    from collectives.rendezvous.peers import Participant, validate

    store = dist.TCPStore("127.0.0.1", port, ctx.size, ctx.rank == 0, wait_for_workers=False)
    participant = Participant(ctx.rank, ctx.size, get_engine("host"))
    peers = validate(ctx.exchange(participant.make_record()), participant).peers
    comm = ctx.new_communicator(timeout=None, peers=peers)  # as NCCL, which has no limit of its own
    comm._timeout = 0.6
    found = {}
    with mock.patch.object(watchdog, "ROUND_S", 0.05), mock.patch.object(watchdog, "_PENDING_S", 0.3):
        watchdog.watch(comm, watchdog.StatusStore(store, "watch"))
        tensor = torch.ones(1000)
        comm.tag = make_tag("unit blocks.0")
        for _ in range(3):
            comm.all_reduce(tensor, async_op=True).wait()
        time.sleep(0.3)  # the ranks publish how far they are
        ctx.barrier()
        if ctx.rank == 1:
            ctx.barrier()
            if how == "absent":
                comm._abort_with_error(errors.Aborted("the test is over"))
                return None
        if how == "idle":
            if ctx.rank == 0:
                ctx.barrier()
            time.sleep(1.0)  # longer than the limit, with nothing in flight
            comm.all_reduce(tensor)
            comm.close()
            return tensor[0].item()
        comm.tag = make_tag("unit blocks.1")
        work = comm.all_reduce(tensor, async_op=True)
        found["wait"] = raised(work.wait)
        found["next"] = raised(lambda: comm.all_reduce(tensor))
        found["async"] = raised(lambda: comm.all_reduce(tensor, async_op=True))
        found["close"] = raised(comm.close)
        if how == "absent":
            ctx.barrier()
    assert comm.closed and id(comm) not in watchdog._watched
    return pickle.dumps(found)


def test_a_rank_that_stays_away_is_named_and_the_call_described():
    found = pickle.loads(run_ranks(hangs, 2, free_port(), "absent")[0])
    kind, peers, text = found["wait"]
    assert kind == "CollectiveTimeout" and peers == (1,)
    assert "all_reduce, call 5 of this communicator, 1000 elements of float32, has not ended within 0.6 s" in text
    assert "all_reduce of unit blocks.1 [rank 0]: " in text
    assert "rank 1 of 2 did not come (rank 1 is at call 4 (all_reduce of unit blocks.0))" in text
    assert found["next"] == found["async"] == found["wait"]
    assert found["close"] is None  # it was raised before


def test_what_ends_is_left_alone():
    assert run_ranks(hangs, 2, free_port(), "idle") == [16.0, 16.0]


ALONE = """
import os, time
from collectives.comm import watchdog
watchdog.ROUND_S = 0.05
import collectives, torch
comm = collectives.init()
watchdog.watch(comm)
thread = watchdog._thread
assert thread.is_alive()
pid = os.fork()
if pid == 0:
    assert not watchdog._watched and watchdog._thread is None
    other = collectives.comm.engine.get_engine("host")
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert thread.is_alive()
if os.environ["STATE"] == "closed":
    comm.close()
    assert not watchdog._watched
print("at the end")
"""


@pytest.mark.parametrize("state", ["closed", "open"])
def test_it_ends_with_the_interpreter_and_not_in_a_child(state):
    done = run_python(ALONE, timeout=60, **clean_environment(STATE=state))
    assert (done.returncode, done.stdout, done.stderr) == (0, "at the end\n", "")


class Comm:
    """A communicator as the watchdog sees it, whose calls and their ends are the test's."""

    rank, size, timeout, closed, peers, _flight = 0, 3, 30.0, False, None, None

    def __init__(self):
        self.marks, self.ends, self.error, self._queue = [], True, None, self
        self._native = SimpleNamespace(issued=(0, "", 0, 0, 0), last_tag=0, async_error=lambda: 0)

    def record_completion(self, stream):
        self.marks.append(stream)
        return lambda: self.ends

    def _abort_with_error(self, error):
        self.error = error


def test_calls_that_keep_coming_are_not_marked():
    """Nothing is recorded while the number of calls moves: a call costs no event, a group may not be launched yet."""
    comm = Comm()
    watched = watchdog._WatchedComm(comm, None)
    for number in range(1, 5):
        comm._native.issued = (number, "all_reduce", 1, 7, 55)
        watched.check()
    assert comm.marks == []
    for _ in range(4):
        watched.check()
    assert comm.marks == [55] and comm.error is None


def hanging(comm, notes):
    comm.ends = False
    comm._native.issued = (4, "reduce_scatter", 10, 7, 55)
    watched = watchdog._WatchedComm(comm, notes)
    for _ in range(2):
        watched.check()
    assert comm.error is None
    with mock.patch.object(watchdog, "_PENDING_S", 0.0):
        watched.check()
    return comm.error


def test_what_ends_a_wait_before_its_limit():
    """A peer's process that is gone, and a failure that another rank has found; NCCL itself would wait."""
    notes = watchdog.StatusStore(dist.HashStore(), "some")
    assert hanging(Comm(), notes) is None
    process = presence.this_process().rpartition("|")[0] + "|1"  # this one's number, which another one had before
    comm = Comm()
    comm.peers = (PeerInfo(0, "a", "b"), PeerInfo(1, "a", "b"), PeerInfo(2, "a", "b", process=process))
    error = hanging(comm, notes)
    assert type(error) is errors.RemoteError and error.peers == (2,) and (error.seq, error.nbytes) == (4, 40)
    assert f"can't end: rank 2: its process {os.getpid()} has ended" in error.message
    other = Comm()
    other.rank = 1
    error = hanging(other, notes)  # which can't see the process
    assert type(error) is errors.RemoteError and error.peers == (2,)
    assert "rank 0 has ended the communicator: reduce_scatter, call 4" in error.message
