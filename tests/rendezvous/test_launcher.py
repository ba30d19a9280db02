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
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "2137980929", "PMIX_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "2137980928.0;tcp://192.0.2.2:46665",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3", "SLURM_PROCID": "2", "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[007-008]",
}  # fmt: skip
OUTER = pytest.mark.parametrize("outer", [OPENMPI, MPICH, SRUN], ids=["openmpi", "mpich", "srun"])
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2"}
BATCH = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def numbers(identity: Identity):
    return identity.rank, identity.size, identity.local_rank, identity.local_size, identity.launcher


# ---- One launcher at a time, and several.

NUMBERS = {
    "alone": ({"PATH": "/bin"}, (0, 1, 0, 1, "alone")),
    "empty values": ({"RANK": "", "WORLD_SIZE": "  ", "MASTER_ADDR": "", "PMI_RANK": ""}, (0, 1, 0, 1, "alone")),
    "torchrun": (TORCHRUN, (3, 4, 1, 2, "torchrun")),
    "openmpi": (OPENMPI, (1, 2, 1, 2, "openmpi")),
    "mpich": (MPICH, (1, 2, 1, 2, "mpich")),
    "mpich without a local rank": (without(MPICH, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), (1, 2, None, None, "mpich")),
    "srun": (SRUN, (2, 4, 0, 2, "slurm")),
    "srun's step, not its job": (
        {**without(SRUN, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_NTASKS": "64"}, (2, 4, 0, None, "slurm"),
    ),
    "the least of srun": ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, (1, 2, 1, 2, "slurm")),
    "by hand": (BY_HAND, (1, 2, 1, 2, "env")),
    "by hand, elsewhere": ({**BY_HAND, "MASTER_ADDR": "node0", "MASTER_PORT": "4000"}, (1, 2, None, None, "env")),
    "ntasks": ({"SLURM_NTASKS": "4"}, (0, 1, 0, 1, "alone")),
    "salloc": ({**without(BATCH, "SLURM_PROCID"), "SLURM_JOB_NODELIST": "a,b"}, (0, 1, 0, 1, "alone")),
    "batch script": ({**BATCH, "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}, (0, 1, 0, 1, "alone")),
    "interactive step": ({**BATCH, "SLURM_STEP_ID": "4294967290"}, (0, 1, 0, 1, "alone")),
    "srun in a batch script": ({**SRUN, "ENVIRONMENT": "BATCH"}, (2, 4, 0, 2, "slurm")),
    "openmpi in slurm": ({**SRUN, **OPENMPI}, (1, 2, 1, 2, "openmpi")),
    "mpich in slurm": ({**SRUN, **MPICH}, (1, 2, 1, 2, "mpich")),
    "both MPIs": ({**OPENMPI, **MPICH}, (1, 2, 1, 2, "openmpi")),
    "the same numbers twice": ({**OPENMPI, **BY_HAND}, (1, 2, 1, 2, "openmpi")),
    "a place by hand": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", **BY_HAND, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        (1, 2, 0, 1, "mpich"),
    ),
    # A launcher that another one has started once counts.
    "mpich in one of openmpi": (
        {**MPICH, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, (1, 2, 1, 2, "mpich"),
    ),
    "openmpi in one of mpich": ({**OPENMPI, "PMI_RANK": "0", "PMI_SIZE": "1"}, (1, 2, 1, 2, "openmpi")),
    "by hand, once a machine": (
        {**OPENMPI, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (5, 8, 1, 4, "env"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("variables, expected", NUMBERS.values(), ids=NUMBERS)
def test_numbers(variables, expected, monkeypatch):
    found = detect_launcher(variables)
    assert numbers(found) == expected and found.job_key
    for name in (*TORCHRUN, *OPENMPI, *MPICH, *SRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert numbers(detect_launcher()) == expected  # the environment is the default


def place(variables):
    """The address, and whether the job is of one machine."""
    found = detect_launcher(variables)
    return found.master_addr, found.master_port, found.is_single_node


def test_places():
    port = detect_launcher(SRUN).master_port
    assert 1024 <= port < 32768 and port != 29500
    one = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "2"}
    apart = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    address = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    for variables, expected in (
        ({}, (None, None, True)),
        (TORCHRUN, ("node0", 29500, False)),
        (OPENMPI, (None, None, True)),
        ({**OPENMPI, "MASTER_PORT": "4000"}, ("127.0.0.1", 4000, True)),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4", **address}, ("10.0.0.1", 1234, False)),
        (without(MPICH, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), (None, None, False)),
        (SRUN, ("gpu007", port, False)),
        ({**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, ("gpu007", port, False)),
        ({**SRUN, **address}, ("10.0.0.1", 1234, False)),
        ({**SRUN, "MASTER_ADDR": "front"}, ("front", port, False)),
        ({**SRUN, "MASTER_PORT": "2000"}, ("gpu007", 2000, False)),
        ({**SRUN, **one, "SLURM_STEP_NODELIST": "gpu007"}, (None, None, True)),
        (apart, (None, None, False)),  # rank 1 is the first one on its machine, so rank 0 is on another
        (BY_HAND, (None, None, True)),
        ({**BY_HAND, "MASTER_ADDR": "localhost", "MASTER_PORT": "4000"}, ("localhost", 4000, True)),
        ({**BY_HAND, "MASTER_ADDR": "::1", "MASTER_PORT": "4000"}, ("::1", 4000, True)),
        ({**BY_HAND, "MASTER_PORT": "4000"}, ("127.0.0.1", 4000, True)),
    ):
        assert place(variables) == expected, variables
    assert place({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0"})[0] is None  # nobody to meet
    assert place({**SRUN, "SLURM_STEP_ID": "4"})[1] != port


def test_restarts_and_the_agents_store():
    found = detect_launcher(TORCHRUN)
    assert found.restart == 2 and found.agent_store and detect_launcher({}).restart == 0
    assert not detect_launcher({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store
    assert detect_launcher({**SRUN, "SLURM_RESTART_COUNT": "5"}).restart == 5


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
        ("gpu[3,5-6]", "gpu3"), ("a,b", "a"), ("rack[2-3]node[04,07]x,other", "rack2node04x"),
        ("login-1.example.org,b", "login-1.example.org"),
    ],
)  # fmt: skip
def test_srun_first_machine(hosts, first):
    assert detect_launcher({**SRUN, "SLURM_STEP_NODELIST": hosts}).master_addr == first


@OUTER
def test_torchrun_inside_another_launcher(outer):
    assert detect_launcher({**outer, **TORCHRUN}) == detect_launcher(TORCHRUN)


@OUTER
def test_contradicting_numbers(outer):
    with pytest.raises(InvalidArgument, match=r"RANK=0 of WORLD_SIZE=8 contradicts .*=[12] of .*=[24]"):
        detect_launcher({**outer, "RANK": "0", "WORLD_SIZE": "8"})
    with pytest.raises(InvalidArgument, match=r"OMPI_COMM_WORLD_RANK=1 .* contradicts PMI_RANK=0 of PMI_SIZE=3"):
        detect_launcher({**OPENMPI, "PMI_RANK": "0", "PMI_SIZE": "3"})


# ---- Bad values: the error names the variable and what is in it.

FIRST_OF_TWO = {"RANK": "0", "WORLD_SIZE": "2"}
BAD = [
    ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE"]),
    ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK"]),
    ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK='-1'"]),
    ({"RANK": "1_0", "WORLD_SIZE": "20"}, ["RANK='1_0'"]),
    ({"RANK": "٣", "WORLD_SIZE": "4"}, ["RANK='٣'"]),
    ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    ({**FIRST_OF_TWO, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "2"]),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK=1"]),
    ({**FIRST_OF_TWO, "LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE=3"]),
    ({**FIRST_OF_TWO, "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0"]),
    ({**FIRST_OF_TWO, "MASTER_ADDR": "x"}, ["MASTER_ADDR=x", "MASTER_PORT"]),
    ({**FIRST_OF_TWO, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
    ({**FIRST_OF_TWO, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536"]),
    ({**FIRST_OF_TWO, "MASTER_ADDR": "x", "MASTER_PORT": "0"}, ["MASTER_PORT=0"]),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "80"}, ["MASTER_ADDR", "2 of 4"]),
    ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT='x'"]),
    (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE"]),
    (without(MPICH, "PMI_RANK"), ["PMI_SIZE=2", "PMI_RANK"]),
    ({**MPICH, "MPI_LOCALRANKID": "2"}, ["MPI_LOCALRANKID=2"]),
    ({"SLURM_PROCID": "0"}, ["SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS"]),
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


def test_whose_children_are_one_job():
    """Those of one process, also behind a wrapper, and not those of two."""
    keys = {key_of_child(0), key_of_child(1), key_of_child(1, "timeout", "30")}
    assert len(keys) == 1 and keys != {detect_launcher({"RANK": "0", "WORLD_SIZE": "2"}).job_key}
    mpich = [{"PMI_RANK": rank, "PMI_SIZE": "2"} for rank in "01"]
    assert key_of_child(0, variables=mpich[0]) == key_of_child(1, "timeout", "30", variables=mpich[1])


def test_what_makes_a_job(monkeypatch):
    def key(**variables):
        return detect_launcher(variables).job_key

    first, job = {"RANK": "0", "WORLD_SIZE": "2"}, {"COLLECTIVES_JOB_ID": "mine"}
    assert key_of_child(0, variables={**first, **job}) == key(**BY_HAND, **job)  # with no parent in common
    assert key(**first) == key(**BY_HAND) and key(**MPICH) == key(**{**MPICH, "PMI_RANK": "0", "MPI_LOCALRANKID": "0"})
    other_rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0"}
    assert key(**OPENMPI) == key(**{**OPENMPI, **other_rank}) == key(**OPENMPI, **BY_HAND)
    assert key(**OPENMPI, **job) == key(**BY_HAND, **job)
    assert key(**SRUN) == key(**{**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"})
    apart = [
        key(), key(**BY_HAND), key(**BY_HAND, **job), key(**BY_HAND, COLLECTIVES_JOB_ID="other"),
        key(**SRUN), key(**{**SRUN, "SLURM_STEP_ID": "4"}),
        key(**OPENMPI), key(**{**OPENMPI, "PMIX_NAMESPACE": "5"}), key(**without(OPENMPI, "PMIX_NAMESPACE")),
    ]  # fmt: skip
    assert len(set(apart)) == len(apart) and apart[0] == key()
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # users are kept apart
    assert key(**BY_HAND, **job) not in apart


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
