"""The C loop of the MPI peers on a library that stands in for MPI, so that its check is seen to
find what is wrong.
"""

import shutil
import subprocess
import types

import pytest
import torch

from collectives.bench.cases import OPS, TYPES, Case
from collectives.bench.implementation import PeerMissing, Plan
from collectives.bench.peers import mpi
from collectives.bench.peers.mpi_installation import FLAVOURS

# One rank, MPICH's ABI. An all-reduce copies; out of place it also spoils the elements 5 and 2000.
STUB = """
#include <string.h>
int MPI_Init(int *c, char ***v) { return 0; }
int MPI_Finalize(void) { return 0; }
int MPI_Comm_rank(int comm, int *rank) { *rank = 0; return 0; }
int MPI_Comm_size(int comm, int *size) { *size = SIZE; return 0; }
int MPI_Get_library_version(char *text, int *n) { strcpy(text, "MPICH Version:\\t0.1 (a stand-in)\\n"); return 0; }
int MPI_Barrier(int comm) { return 0; }
int MPI_Allreduce(const void *from, void *to, int n, int type, int op, int comm) {
    if (comm != 0x44000000 || type != 0x4c00040a || op != 0x58000003) return 1;
    if (from == (void *)-1) return 0;
    memcpy(to, from, n * sizeof(float));
    ((float *)to)[5] += 1, ((float *)to)[2000] -= 1;
    return 0;
}
#define OTHER(name) int name(void) { return 1; }
OTHER(MPI_Reduce) OTHER(MPI_Reduce_scatter_block) OTHER(MPI_Allgather) OTHER(MPI_Alltoall) OTHER(MPI_Bcast)
OTHER(MPI_Gather) OTHER(MPI_Scatter) OTHER(MPI_Sendrecv)
"""
COMM = types.SimpleNamespace(rank=0, size=1, local_size=1, device=torch.device("cpu"))
CASE = Case.of(OPS["all_reduce"], TYPES["float32"], "sum", 0, 12_000, 1)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Open the peer on the stand-in, whose communicator has so many ranks."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    (tmp_path / "mpi.c").write_text(STUB)
    opened = []

    def start(size=1, flavour="mpich"):
        library = str(tmp_path / "libmpi.so")
        command = ["cc", "-shared", "-fPIC", "-w", f"-DSIZE={size}", "-o", library, str(tmp_path / "mpi.c")]
        subprocess.run(command, check=True)
        monkeypatch.setattr(mpi, "find_mpi", lambda flavour: (str(launcher), library, {}))
        monkeypatch.setattr(mpi, "launcher_arguments", lambda *_: [])
        opened.append(mpi.MpiPeer(FLAVOURS[flavour], COMM, False))
        return opened[-1]

    yield start
    for peer in opened:
        peer.close()


def test_wrong_elements_are_counted(start):
    peer = start()
    assert peer.fields["versions"] == {"mpich": "MPICH Version: 0.1 (a stand-in)"}
    for in_place, wrong in ((False, 2), (True, 0), (False, 2)):
        peer.prepare(CASE, in_place)
        assert peer.check() == [wrong]
        (times,) = peer.turn(Plan(warmup=1, calls=3, batches=7))
        assert len(times) == 7 and min(times) >= 0
        peer.release()


@pytest.mark.parametrize("arrays", [1, 3, 11])
def test_fresh_data_go_through_all_arrays_and_every_result_that_is_left_is_checked(start, arrays):
    peer = start()
    plan = Plan(warmup=2, calls=4, batches=2, fresh=True)
    for in_place, wrong in ((False, 2), (True, 0)):
        peer.prepare(CASE, in_place, arrays)
        assert peer.check() == [wrong]  # no turn has written any
        (times,) = peer.turn(plan)
        assert len(times) == 2 and min(times) > 0
        left = min(arrays, plan.warmup + plan.calls * plan.batches)
        assert peer.check() == [wrong * (left + 1)]  # and the one of the check itself
        assert peer.check() == [wrong]
        peer.release()


def test_a_call_that_fails_ends_the_peer(start):
    peer = start()
    peer.prepare(Case.of(OPS["broadcast"], TYPES["float32"], None, 0, 64, 1), True)
    with pytest.raises(ChildProcessError, match="MPICH's job has ended.*a call failed"):
        peer.check()


@pytest.mark.parametrize(
    ("settings", "says"), [({"size": 2}, "2 ranks, not 1"), ({"flavour": "openmpi"}, "is not Open MPI")]
)
def test_another_library_than_the_launcher_s_is_refused(start, settings, says):
    with pytest.raises(PeerMissing, match=says):
        start(**settings)
