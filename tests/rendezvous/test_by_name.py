"""The rendezvous without an address: by the job's name, and over MPI, with threads as ranks."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from collectives.errors import CollectiveTimeout, InvalidArgument, InvalidUsage
from collectives.launcher import Identity
from collectives.rendezvous import mpi
from collectives.rendezvous.join import identify_process, join_rendezvous
from tests.rendezvous.joining import by_name, check_met, nccl_like, threads

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_by_name_on_the_host_engine_nothing_is_exchanged(host):
    first, second = (join_rendezvous(by_name(rank), engine=host) for rank in range(2))
    assert first.unique_id == second.unique_id and len(first.unique_id) == 128
    assert (second.local_rank, second.local_size) == (1, 2)
    assert [peer.pid for peer in second.peers] == [None, os.getpid()]
    assert {peer.host for peer in second.peers} == {socket.gethostname()}
    assert len({peer.node for peer in second.peers}) == 1


def test_each_job_generation_and_restart_has_a_name_of_its_own(host):
    ids = [
        join_rendezvous(by_name(0), engine=host).unique_id,
        join_rendezvous(by_name(0), engine=host, generation=1).unique_id,
        join_rendezvous(by_name(0, restart=1), engine=host).unique_id,
        join_rendezvous(by_name(0, job_key=b"another job"), engine=host).unique_id,
    ]
    assert len(set(ids)) == len(ids)


def test_by_name_for_nccl_the_host_engine_carries_the_records():
    made = os.urandom(128)
    job = os.urandom(8)
    engine = nccl_like(lambda: made)
    calls = (lambda r=r: join_rendezvous(by_name(r, 3, job_key=job), engine=engine) for r in range(3))
    results = threads(*calls)
    check_met(results, 3)
    assert results[2].unique_id == made


def test_by_name_for_nccl_a_rank_that_never_comes():
    job, began = os.urandom(8), time.monotonic()
    engine = nccl_like(lambda: bytes(128))
    calls = (lambda r=r: join_rendezvous(by_name(r, 3, job_key=job), engine=engine, timeout=1) for r in (0, 2))
    results = threads(*calls)
    assert time.monotonic() - began < 5
    assert all(isinstance(error, CollectiveTimeout) and error.peers == (1,) for error in results), results


def test_a_world_of_one_meets_nobody(host):
    first = join_rendezvous(Identity(0, 1, 0, 1, "env", "nowhere.invalid", 1), engine=host)
    second = join_rendezvous(Identity(0, 1, 0, 1, "alone"), engine=host)
    assert first.unique_id != second.unique_id
    assert (first.local_rank, first.local_size, first.peers[0].pid) == (0, 1, os.getpid())


def test_several_machines_without_an_address(host, monkeypatch):
    for module in ("mpi4py", "mpi4py.MPI"):  # wherever they are installed
        monkeypatch.setitem(sys.modules, module, None)
    for identity in (
        Identity(0, 4, 0, 2, "openmpi", job_key=b"job"),
        Identity(1, 2, None, None, "mpich", job_key=b"job"),
        Identity(3, 4, 1, 2, "env", job_key=b"job"),
    ):
        with pytest.raises(InvalidArgument, match="MASTER_ADDR is missing") as caught:
            join_rendezvous(identity, engine=host)
        assert "MASTER_PORT" in str(caught.value)
        assert ("mpi4py" in str(caught.value)) == (identity.launcher != "env")


# ---- Over MPI.


class Mail:
    """What the meeting needs of mpi4py's COMM_WORLD, between threads."""

    def __init__(self, size):
        self.size, self.here, self.boxes, self.lock = size, threading.local(), {}, threading.Lock()
        self.BYTE, self.COMM_WORLD = "byte", self

    def Get_rank(self):
        return self.here.rank

    def Get_size(self):
        return self.size

    def _box(self, *key):
        with self.lock:
            return self.boxes.setdefault(key, queue.SimpleQueue())

    def Isend(self, message, peer, tag):
        assert message[1] == "byte"
        self._box(self.here.rank, peer, tag).put(bytes(message[0]))
        return SimpleNamespace(Test=lambda: True, Wait=lambda: True)

    def Irecv(self, message, peer, tag):
        box, cancelled = self._box(peer, self.here.rank, tag), []

        def test():
            if box.empty():
                return False
            data = box.get()
            message[0][: len(data)] = data
            return True

        return SimpleNamespace(Test=test, Cancel=lambda: cancelled.append(True))

    def call(self, rank, engine, monkeypatch, **options):
        def run():
            self.here.rank = rank
            identity = Identity(rank, self.size, rank, None, "openmpi", job_key=b"job")
            return join_rendezvous(identity, engine=engine, **options)

        monkeypatch.setattr(mpi, "find_running_mpi", lambda: self)
        return run


def test_mpi_carries_the_meeting_where_there_is_no_address(host, monkeypatch):
    mail = Mail(3)
    check_met(threads(*(mail.call(rank, host, monkeypatch) for rank in range(3))), 3)
    check_met(threads(*(mail.call(rank, host, monkeypatch, generation=1) for rank in range(3))), 3)


def test_over_mpi_a_rank_that_never_comes(host, monkeypatch):
    mail = Mail(4)
    results = threads(*(mail.call(rank, host, monkeypatch, timeout=0.5) for rank in (0, 3)))
    assert all(isinstance(error, CollectiveTimeout) and error.peers == (1, 2) for error in results), results
    mail = Mail(2)
    (error,) = threads(mail.call(1, host, monkeypatch, timeout=0.3))
    assert isinstance(error, CollectiveTimeout) and error.peers == (0,)


def test_over_mpi_numbers_that_are_not_mpis(host, monkeypatch):
    mail = Mail(1)
    mail.here.rank = 0
    monkeypatch.setattr(mpi, "find_running_mpi", lambda: mail)
    with pytest.raises(InvalidUsage, match="mpi4py says rank 0 of 1"):
        join_rendezvous(Identity(1, 2, None, None, "mpich"), engine=host)


def test_mpi_that_runs_tells_who_this_is(monkeypatch):
    mail = Mail(2)
    mail.here.rank = 1
    monkeypatch.setattr(mpi, "find_running_mpi", lambda: mail)
    assert identify_process() == Identity(1, 2, None, None, "mpi4py")
    monkeypatch.setattr(mpi, "find_running_mpi", lambda: Mail(1))
    assert identify_process().launcher == "alone"
