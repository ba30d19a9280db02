"""mpi4py as a peer: jobs of two real ranks, and what goes wrong with them."""

import importlib.util
import os
import signal
import time
import types
from pathlib import Path

import pytest
import torch

from collectives.bench.cases import OPS, TYPES, Case
from collectives.bench.implementation import PeerMissing, Plan, Unsupported
from collectives.bench.peers import mpi4py_job
from collectives.bench.peers.mpi4py_job import Mpi4pyPeer
from collectives.bench.peers.mpi_installation import FLAVOURS, find_mpi

COMM = types.SimpleNamespace(rank=0, size=2, local_size=2, device=torch.device("cpu"))


def case(name, kind="float32", redop="sum", nbytes=12_000, root=1):
    return Case.of(OPS[name], TYPES[kind], redop, root, nbytes, 2)


@pytest.fixture
def start():
    opened = []

    def start(flavour):
        if importlib.util.find_spec("mpi4py") is None:
            pytest.skip("mpi4py is not installed")
        try:
            find_mpi(flavour)
        except PeerMissing as error:
            pytest.skip(str(error))
        opened.append(Mpi4pyPeer(f"mpi4py-{flavour}", COMM, False))
        return opened[-1]

    yield start
    for peer in opened:
        peer.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_operation_is_right(start, flavour):
    peer = start(flavour)
    assert peer.name == f"mpi4py-{flavour}" and set(peer.fields["versions"]) == {"mpi4py", flavour}
    for name in OPS:
        # MPICH 4.0.2 crashes in an MPI_Reduce in place at another root than 0, from C, too.
        one = case(name, root=0 if (flavour, name) == ("mpich", "reduce") else 1)
        for in_place in (False, True):
            for fresh in (False, True):
                try:
                    peer.prepare(one, in_place, 3 if fresh else 1)
                except Unsupported:
                    assert (name, in_place) in {("broadcast", False), ("all_to_all", True), ("sendrecv", True)}
                    continue
                times = peer.time_turn(Plan(warmup=1, calls=2, batches=3, fresh=fresh))
                assert [len(each) for each in times] == [3, 3] and min(map(min, times)) > 0
                assert peer.check() == [0, 0], (name, in_place, fresh)
                peer.release()


def test_every_dtype_and_reduction_is_right(start):
    peer = start("openmpi")
    measured, reasons = set(), set()
    for kind in TYPES:
        for redop in ("sum", "prod", "max", "min", "avg", "mulsum"):
            try:
                peer.prepare(case("all_reduce", kind, redop), True)
            except Unsupported as error:
                reasons.add(str(error))
                continue
            assert peer.check() == [0, 0], (kind, redop)
            peer.release()
            measured.add((kind, redop))
    assert len(measured) == 8 * 4 and {"MPI has no bfloat16", "MPI has no reduction 'avg'"} <= reasons


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [each for child in children for each in descendants(child)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("flavour", ["openmpi", "intelmpi"])
def test_a_rank_that_is_killed_ends_the_peer(start, flavour):
    peer = start(flavour)
    peer.prepare(case("all_reduce"), True)
    ranks = []
    for pid in descendants(peer._process.pid):
        if b"mpi4py_rank" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2]:
            ranks.append(pid)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="MPI's job has ended"):
        for _ in range(2):
            peer.time_turn(Plan(warmup=0, calls=1, batches=1))
    peer.close()
    until = time.monotonic() + 30
    while any(map(alive, ranks)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, ranks))


def test_a_rank_that_raises_ends_the_peer(start):
    """A broadcast from a rank that isn't there has no input."""
    with pytest.raises(ChildProcessError, match="Open MPI's job has ended: .*IndexError"):
        start("openmpi").prepare(case("broadcast", redop=None, root=7), True)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(mpi4py_job.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PeerMissing, match="pip install mpi4py"):
        Mpi4pyPeer("mpi4py-openmpi", COMM, False)


def test_another_mpi_than_the_launcher_s_is_refused(start, monkeypatch):
    """mpi4py that was built for one MPI doesn't look at MPI4PY_LIBMPI."""
    start("intelmpi").close()
    installed = find_mpi("intelmpi")
    monkeypatch.setattr(mpi4py_job, "find_mpi", lambda name: installed)
    with pytest.raises(PeerMissing, match="is not MPICH, it says 'Intel"):
        Mpi4pyPeer("mpi4py-mpich", COMM, False)
