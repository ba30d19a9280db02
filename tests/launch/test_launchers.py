"""Real ranks under each launcher: they find each other, sum, close, and meet again.

One torchrun is started as users start it, and each mpirun; the others are forked with torch imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.launching import SRUN, clean_environment, forked, free_port, run, torchrun, worker


def check(results, size, launcher, *, sums=1, local_size=None):
    """All ranks of one machine have met ``sums`` times and got the right sums."""
    assert [result["rank"] for result in results] == list(range(size))
    for result in results:
        assert result["launcher"] == launcher and result["size"] == size
        assert (result["local_rank"], result["local_size"]) == (result["rank"], local_size or size)
        assert result["sums"] == [size * (size + 1) / 2] * sums


def mpi(program, ranks=2):
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return [path, *(["--oversubscribe", *root] if program == "mpirun.openmpi" else []), "-n", str(ranks)]


def test_torchrun():
    # One process group only: the agent's store keeps the first one's addresses, and a second one would read them.
    steps = ("init", "twice", "ours", "reopen")
    command = torchrun(2, "--standalone", *worker(30, *steps)[1:])
    results = run((command, clean_environment()), results=2)
    check(results, 2, "torchrun", sums=2)
    assert all(result["same"] and result["groups"] == [3.0] for result in results)


@pytest.mark.thorough
def test_torchrun_starts_the_ranks_again():
    command = torchrun(2, "--standalone", "--max-restarts", "1", *worker(30, "init", "restart", "reopen")[1:])
    results = run((forked(command), clean_environment()), results=2)
    check(results, 2, "torchrun", sums=2)


def test_torchrun_with_the_process_group_first():
    command = torchrun(2, "--master-port", str(free_port()), *worker(30, "group-first", "init", "reopen")[1:])
    check(run((forked(command), clean_environment()), results=2), 2, "torchrun", sums=2)


@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpiexec.hydra"])
def test_mpi_without_an_address(program):
    """The ranks stand behind shells that stay, and have no parent in common."""
    command = [*mpi(program), "sh", "-c", '"$@"; exit $?', "sh", *worker(30, "init", "twice", "ours", "reopen")]
    results = run((command, clean_environment()), results=2)
    check(results, 2, "openmpi" if program == "mpirun.openmpi" else "mpich", sums=2)
    assert all(result["same"] and result["groups"] == [3.0] for result in results)


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpiexec.hydra"])
def test_mpi_with_an_address_a_hostfile_and_more_ranks_than_slots(program, tmp_path):
    hosts = tmp_path / "hosts"
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if program == "mpirun.openmpi":
        hosts.write_text("localhost slots=2\n")
        words = ["--hostfile", str(hosts), *(word for item in given.items() for word in ("-x", "{}={}".format(*item)))]
    else:
        hosts.write_text("localhost:2\n")
        words = ["-f", str(hosts), *(str(word) for item in given.items() for word in ("-genv", *item))]
    command = [*mpi(program, 3), *words, *worker(30, "init", "reopen")]
    results = run((command, clean_environment()), results=3)
    check(results, 3, "openmpi" if "openmpi" in program else "mpich", sums=2)
    assert [result["address"] for result in results] == [list(map(str, given.values()))] * 3


@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpiexec.hydra"])
def test_mpi4py_where_there_is_no_address_and_more_than_one_machine(program):
    check_mpi = [sys.executable, "-c", "from mpi4py.MPI import COMM_WORLD as c; raise SystemExit(c.Get_size() != 2)"]
    if subprocess.run([*mpi(program), *check_mpi], env=clean_environment(), capture_output=True, timeout=60).returncode:
        pytest.skip(f"mpi4py is not installed, or not for the MPI of {program}")
    launcher = "openmpi" if "openmpi" in program else "mpich"
    name = "OMPI_COMM_WORLD_LOCAL_" if launcher == "openmpi" else "MPI_LOCALN"
    apart = {"openmpi": [f"{name}SIZE=1", f"{name}RANK=0"], "mpich": [f"{name}RANKS=1", "MPI_LOCALRANKID=0"]}
    command = [*mpi(program), "env", *apart[launcher], *worker(30, "init", "reopen")]
    results = run((command, clean_environment()), results=2)
    assert [result["launcher"] for result in results] == [launcher] * 2
    assert [result["sums"] for result in results] == [[3.0, 3.0]] * 2


def test_srun_on_one_machine():
    command = [sys.executable, SRUN, "-n", "2", *worker(30, "ours", "init", "reopen")]
    results = run((forked(command), clean_environment()), results=2)
    check(results, 2, "slurm", sums=2)
    assert [result["groups"] for result in results] == [[3.0], [3.0]]


def test_srun_with_an_address_from_the_list_of_machines():
    step = {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": 1, "SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2}
    step |= {"SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_NODELIST": "localhost,other", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    step |= {"MASTER_PORT": free_port()}
    ranks = [clean_environment(SLURM_PROCID=rank, SLURM_LOCALID=0, SLURM_NODEID=rank, **step) for rank in range(2)]
    results = run(*((worker(30, "init"), env) for env in ranks), results=2)
    assert [result["sums"] for result in results] == [[3.0], [3.0]]
    assert [(result["local_rank"], result["local_size"]) for result in results] == [(0, 1), (0, 1)]


def test_alone():
    results = run((worker(30, "init", "twice", "reopen"), clean_environment(SLURM_NTASKS=4)), results=1)
    check(results, 1, "alone", sums=2)


def test_rank_and_world_size_alone():
    ranks = [clean_environment(RANK=rank, WORLD_SIZE=3) for rank in range(3)]
    check(run(*((worker(30, "init", "reopen"), env) for env in ranks), results=3), 3, "env", sums=2)


def test_the_process_group_after_us_on_the_same_port():
    port = free_port()
    ranks = [clean_environment(RANK=r, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=port) for r in range(2)]
    results = run(*((worker(30, "init", "group", "reopen", "group"), env) for env in ranks), results=2)
    check(results, 2, "env", sums=2)
    assert all(result["groups"] == [3.0] * 2 for result in results)


def test_a_process_group_that_was_given_its_numbers_by_hand():
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = [clean_environment(TEST_GROUP=f"{url} {rank} 2") for rank in range(2)]
    results = run(*((worker(30, "group-first", "init", "reopen"), env) for env in ranks), results=2)
    assert [result["launcher"] for result in results] == ["alone", "alone"], "what it was before the group"
    for rank, result in enumerate(results):
        assert (result["rank"], result["local_rank"], result["local_size"]) == (rank, rank, 2)
        assert result["sums"] == [3.0, 3.0] and result["groups"] == [3.0]
