"""Each launcher's variables, and the traps among them. Nothing here starts a rank."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import launcher as launch
from collectives.errors import InvalidArgument
from collectives.launcher import Identity, detect_launcher

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2137980929",
    "PMIX_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "2137980928.0;tcp://192.0.2.2:46665",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def numbers(identity: Identity):
    return identity.rank, identity.size, identity.local_rank, identity.local_size, identity.launcher


# ---- One launcher at a time.


def test_alone():
    found = detect_launcher({"PATH": "/bin"})
    assert numbers(found) == (0, 1, 0, 1, "alone")
    assert found.is_single_node and found.master_addr is None and found.master_port is None and found.restart == 0
    assert found.job_key


def test_torchrun():
    found = detect_launcher(TORCHRUN)
    assert numbers(found) == (3, 4, 1, 2, "torchrun")
    assert (found.master_addr, found.master_port) == ("node0", 29500)
    assert found.restart == 2 and found.agent_store and not found.is_single_node


@pytest.mark.parametrize("marker", ["TORCHELASTIC_RUN_ID", "GROUP_RANK"])
def test_torchrun_is_known_by_either_of_its_own_variables(marker):
    drop = {"TORCHELASTIC_RUN_ID", "GROUP_RANK"} - {marker}
    assert detect_launcher(without(TORCHRUN, *drop)).launcher == "torchrun"
    assert detect_launcher(without(TORCHRUN, "TORCHELASTIC_RUN_ID", "GROUP_RANK")).launcher == "env"


def test_torchrun_with_a_store_of_its_own():
    assert not detect_launcher({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


@pytest.mark.parametrize("restart", ["0", "1", "17"])
def test_torchrun_restarts(restart):
    assert detect_launcher({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": restart}).restart == int(restart)


def test_open_mpi():
    found = detect_launcher(OPENMPI)
    assert numbers(found) == (1, 2, 1, 2, "openmpi")
    assert found.is_single_node and found.master_addr is None
    other_rank = {**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0"}
    assert detect_launcher(other_rank).job_key == found.job_key
    assert detect_launcher({**OPENMPI, "PMIX_NAMESPACE": "5"}).job_key != found.job_key
    assert detect_launcher(without(OPENMPI, "PMIX_NAMESPACE")).job_key != detect_launcher(MPICH).job_key
    assert detect_launcher(without(OPENMPI, "OMPI_MCA_orte_hnp_uri")).job_key


def test_open_mpi_on_several_machines_with_an_address():
    found = detect_launcher(
        {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
    )
    assert (found.master_addr, found.master_port) == ("10.0.0.1", 1234) and not found.is_single_node


def test_mpich_and_intel():
    found = detect_launcher(MPICH)
    assert numbers(found) == (1, 2, 1, 2, "mpich")
    assert found.is_single_node and found.master_addr is None
    assert detect_launcher({**MPICH, "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_FD": "6"}).job_key == found.job_key


def test_mpich_that_does_not_tell_the_local_rank():
    found = detect_launcher(without(MPICH, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    assert numbers(found) == (1, 2, None, None, "mpich") and not found.is_single_node


def test_srun_on_two_machines():
    found = detect_launcher(SRUN)
    assert numbers(found) == (2, 4, 0, 2, "slurm")
    assert found.master_addr == "gpu007" and 1024 <= found.master_port < 32768 and found.master_port != 29500
    last = detect_launcher({**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"})
    assert (last.master_addr, last.master_port, last.job_key) == (found.master_addr, found.master_port, found.job_key)
    assert detect_launcher({**SRUN, "SLURM_STEP_ID": "4"}).master_port != found.master_port
    assert detect_launcher({**SRUN, "SLURM_STEP_ID": "4"}).job_key != found.job_key


def test_srun_on_two_machines_with_an_address():
    found = detect_launcher({**SRUN, "MASTER_ADDR": "front", "MASTER_PORT": "2000"})
    assert (found.master_addr, found.master_port) == ("front", 2000)
    assert detect_launcher({**SRUN, "MASTER_ADDR": "front"}).master_port == detect_launcher(SRUN).master_port
    assert detect_launcher({**SRUN, "MASTER_PORT": "2000"}).master_addr == "gpu007"


def test_srun_on_one_machine():
    one = {**SRUN, "SLURM_LOCALID": "2", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_RESTART_COUNT": "5"}
    one |= {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "gpu007"}
    found = detect_launcher(one)
    assert numbers(found) == (2, 4, 2, 4, "slurm")
    assert found.is_single_node and found.master_addr is None and found.restart == 5
    assert numbers(detect_launcher(without(one, "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"))) == numbers(found)


def test_srun_with_the_least_it_can_give():
    found = detect_launcher({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"})
    assert numbers(found) == (1, 2, 1, 2, "slurm") and found.job_key
    apart = detect_launcher({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"})
    assert not apart.is_single_node, "rank 1 is the first one on its machine, so rank 0 is on another"


@pytest.mark.parametrize(
    ("spread", "node", "expected"),
    [("2(x2)", 0, 2), ("3,1", 0, 3), ("3,1", 1, 1), ("1(x2),2", 2, 2), ("8", 0, None), ("2(x2)", 7, None)],
)
def test_srun_tasks_per_node(spread, node, expected):
    variables = {**SRUN, "SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": spread}
    assert detect_launcher(variables).local_size == expected


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[007-008]", "gpu007"),
        ("gpu[3,5-6]", "gpu3"),
        ("a,b", "a"),
        ("rack[2-3]node[04,07]x,other", "rack2node04x"),
        ("login-1.example.org,b", "login-1.example.org"),
    ],
)
def test_srun_first_machine(hosts, first):
    assert detect_launcher({**SRUN, "SLURM_STEP_NODELIST": hosts}).master_addr == first


def test_rank_and_world_size_alone():
    found = detect_launcher({"RANK": "1", "WORLD_SIZE": "2"})
    assert numbers(found) == (1, 2, 1, 2, "env")
    assert found.is_single_node and found.master_addr is None
    assert found.job_key == detect_launcher({"RANK": "0", "WORLD_SIZE": "2"}).job_key


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_rank_and_world_size_with_an_address_on_this_machine(address):
    found = detect_launcher({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "4000"})
    assert numbers(found) == (1, 2, 1, 2, "env") and (found.master_addr, found.master_port) == (address, 4000)


def test_rank_and_world_size_with_an_address_elsewhere_leaves_the_local_rank_open():
    found = detect_launcher({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "4000"})
    assert numbers(found) == (1, 2, None, None, "env")


def test_master_port_alone_means_this_machine():
    found = detect_launcher({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "4000"})
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 4000)
    found = detect_launcher({**OPENMPI, "MASTER_PORT": "4000"})
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 4000)


# ---- Traps.


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "4"},
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"},
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"},
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
    ],
    ids=["ntasks", "salloc", "batch script", "interactive step"],
)
def test_slurm_outside_srun_is_alone(variables):
    assert numbers(detect_launcher(variables)) == (0, 1, 0, 1, "alone")


def test_srun_inside_a_batch_script():
    assert numbers(detect_launcher({**SRUN, "ENVIRONMENT": "BATCH"})) == (2, 4, 0, 2, "slurm")


def test_the_steps_number_of_tasks_counts_and_not_the_jobs():
    found = detect_launcher({**without(SRUN, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_NTASKS": "64"})
    assert found.size == 4


@pytest.mark.parametrize("outer", [OPENMPI, MPICH, SRUN], ids=["openmpi", "mpich", "srun"])
def test_torchrun_inside_another_launcher(outer):
    assert detect_launcher({**outer, **TORCHRUN}) == detect_launcher(TORCHRUN)


@pytest.mark.parametrize("mpi", [OPENMPI, MPICH], ids=["openmpi", "mpich"])
def test_mpi_inside_slurm(mpi):
    assert numbers(detect_launcher({**SRUN, **mpi})) == numbers(detect_launcher(mpi))


def test_the_same_numbers_twice_are_no_contradiction():
    found = detect_launcher({**OPENMPI, "RANK": "1", "WORLD_SIZE": "2"})
    assert numbers(found) == (1, 2, 1, 2, "openmpi") and found.job_key == detect_launcher(OPENMPI).job_key
    unplaced = without(MPICH, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    found = detect_launcher({**unplaced, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert numbers(found) == (1, 2, 0, 1, "mpich")
    assert detect_launcher({**OPENMPI, **MPICH}).launcher == "openmpi"


@pytest.mark.parametrize("outer", [OPENMPI, MPICH, SRUN], ids=["openmpi", "mpich", "srun"])
def test_contradicting_numbers(outer):
    with pytest.raises(InvalidArgument, match=r"RANK=0 of WORLD_SIZE=8 contradicts .*=[12] of .*=[24]"):
        detect_launcher({**outer, "RANK": "0", "WORLD_SIZE": "8"})


def test_two_mpi_launchers_that_contradict_each_other():
    with pytest.raises(InvalidArgument, match=r"OMPI_COMM_WORLD_RANK=1 .* contradicts PMI_RANK=0 of PMI_SIZE=3"):
        detect_launcher({**OPENMPI, "PMI_RANK": "0", "PMI_SIZE": "3"})
    single = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert detect_launcher({**OPENMPI, **single}).launcher == "openmpi"
    single = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert numbers(detect_launcher({**MPICH, **single})) == (1, 2, 1, 2, "mpich")


def test_a_launcher_started_once_by_another_one_counts():
    own = {"RANK": "5", "WORLD_SIZE": "8"}
    single = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}
    assert detect_launcher({**single, **own}).rank == 5
    once_a_machine = {**own, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert numbers(detect_launcher({**OPENMPI, **once_a_machine})) == (5, 8, 1, 4, "env")


def test_empty_values_count_as_unset():
    assert detect_launcher({"RANK": "", "WORLD_SIZE": "  ", "MASTER_ADDR": "", "PMI_RANK": ""}).launcher == "alone"


def test_a_world_of_one_does_not_look_at_the_address():
    found = detect_launcher({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0"})
    assert found.size == 1 and found.master_addr is None


def test_the_environment_is_the_default(monkeypatch):
    for name in (*TORCHRUN, *OPENMPI, *MPICH, *SRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert numbers(detect_launcher()) == (6, 7, 6, 7, "env")


# ---- Bad values: the error names the variable and what is in it.

BAD = [
    ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE"]),
    ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK"]),
    ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK='-1'"]),
    ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'"]),
    ({"RANK": "1.0", "WORLD_SIZE": "2"}, ["RANK='1.0'"]),
    ({"RANK": "1_0", "WORLD_SIZE": "20"}, ["RANK='1_0'"]),
    ({"RANK": "٣", "WORLD_SIZE": "4"}, ["RANK='٣'"]),
    ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "2"]),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK=1"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE=3"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, ["MASTER_ADDR=x", "MASTER_PORT"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, ["MASTER_PORT=65536"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "0"}, ["MASTER_PORT=0"]),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "80"}, ["MASTER_ADDR", "2 of 4"]),
    ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT='x'"]),
    (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE"]),
    ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, ["OMPI_COMM_WORLD_LOCAL_SIZE=9"]),
    (without(MPICH, "PMI_RANK"), ["PMI_SIZE=2", "PMI_RANK"]),
    ({**MPICH, "MPI_LOCALRANKID": "2"}, ["MPI_LOCALRANKID=2"]),
    ({"SLURM_PROCID": "0"}, ["SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS"]),
    ({"SLURM_PROCID": "4", "SLURM_NTASKS": "4"}, ["SLURM_PROCID=4", "SLURM_NTASKS=4"]),
    ({**SRUN, "SLURM_LOCALID": "2"}, ["SLURM_LOCALID=2"]),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, ["SLURM_STEP_TASKS_PER_NODE='2(x'"]),
    ({**SRUN, "SLURM_STEP_NODELIST": "]"}, ["SLURM_STEP_NODELIST=']'"]),
]


@pytest.mark.parametrize(("variables", "words"), BAD, ids=[" ".join(words) for _, words in BAD])
def test_bad_variables(variables, words):
    with pytest.raises(InvalidArgument) as caught:
        detect_launcher(variables)
    for word in words:
        assert word in str(caught.value)


# ---- The job's name.

# A child process loads launch.py without the package round it: no torch, so it is quick.
SHOW = """
import sys, types
package = sys.modules["collectives"] = types.ModuleType("collectives")
package.__path__ = [sys.argv[1]]
from collectives.launcher import detect_launcher
print(detect_launcher().job_key.hex())
"""
PACKAGE = str(Path(launch.__file__).resolve().parent)


def key_of_child(rank, *wrapper, variables=None):
    """The job key that a child of this process finds for itself, maybe behind wrappers that keep the variables."""
    names = ("RANK", "WORLD_SIZE", "COLLECTIVES_JOB_ID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    env = without(os.environ, *names) | (variables or {"RANK": str(rank), "WORLD_SIZE": "2"})
    command = [*wrapper, sys.executable, "-S", "-c", SHOW, PACKAGE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=True)
    return bytes.fromhex(done.stdout.strip())


def test_children_of_one_process_are_one_job():
    keys = {key_of_child(0), key_of_child(1), key_of_child(1, "timeout", "30"), key_of_child(0, "timeout", "30")}
    assert len(keys) == 1
    mpich = [{"PMI_RANK": rank, "PMI_SIZE": "2"} for rank in "01"]
    assert key_of_child(0, variables=mpich[0]) == key_of_child(1, "timeout", "30", variables=mpich[1])


def test_children_of_two_processes_are_two_jobs():
    assert key_of_child(0) != detect_launcher({"RANK": "0", "WORLD_SIZE": "2"}).job_key


def test_a_job_id_joins_what_has_no_parent_in_common():
    given = {"RANK": "0", "WORLD_SIZE": "2", "COLLECTIVES_JOB_ID": "mine"}
    assert key_of_child(0, variables=given) == detect_launcher({**given, "RANK": "1"}).job_key
    assert detect_launcher(given).job_key != detect_launcher({**given, "COLLECTIVES_JOB_ID": "other"}).job_key
    assert detect_launcher({**OPENMPI, "COLLECTIVES_JOB_ID": "mine"}).job_key == detect_launcher(given).job_key


def test_users_are_kept_apart(monkeypatch):
    given = {"RANK": "0", "WORLD_SIZE": "2", "COLLECTIVES_JOB_ID": "mine"}
    before = detect_launcher(given).job_key
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert detect_launcher(given).job_key != before


def test_alone_is_a_job_of_its_own():
    key = detect_launcher({}).job_key
    assert detect_launcher({}).job_key == key != detect_launcher({"RANK": "0", "WORLD_SIZE": "1"}).job_key


def test_launch_needs_the_standard_library_only():
    tree = ast.parse(Path(launch.__file__).read_text())
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(node.module.split(".")[0] if not node.level else f".{node.module}")
    assert {root for root in roots if not root.startswith(".")} <= sys.stdlib_module_names
    assert {root for root in roots if root.startswith(".")} == {".errors"}
