"""Ranks on several machines find each other: in network namespaces of their own, and by each launcher's variables."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.launching import clean_environment, forked, free_port, run, worker

STEPS = ("init", "twice", "reopen", "group")  # the group's port is MASTER_PORT: nothing of ours may have it


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a pair of interfaces; their names and addresses."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"coll{os.getpid()}{end}" for end in "ab"]
    addresses = ["10.231.77.1", "10.231.77.2"]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "end0", "netns", names[0], "type", "veth", "peer", "name", "end0", "netns", names[1])
            for name, address in zip(names, addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "end0")
                ip("-n", name, "link", "set", "end0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield list(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def test_two_real_namespaces(namespaces):
    """What they have in common is the link between them: neither local sockets nor the loopback."""
    port = free_port()
    commands = []
    for rank in range(3):
        name, _ = namespaces[rank // 2]
        env = clean_environment(RANK=rank, WORLD_SIZE=3, MASTER_ADDR=namespaces[0][1], MASTER_PORT=port)
        if rank == 2:
            env["GLOO_SOCKET_IFNAME"] = "end0"
        commands.append((["ip", "netns", "exec", name, *worker(40, *STEPS[:3], "control")], env))
    results = run(*commands, results=3)
    assert all(result["sums"] == [6.0, 6.0] and result["same"] for result in results)
    assert [result["control"] for result in results] == [6.0] * 3


def of_job(rank, job):
    return {"RANK": rank, "WORLD_SIZE": 4, "COLLECTIVES_JOB_ID": job, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 4}


def of_srun(rank, port):
    return {
        "SLURM_PROCID": rank, "SLURM_NTASKS": 4, "SLURM_LOCALID": rank % 2, "SLURM_NTASKS_PER_NODE": 2,
        "SLURM_JOB_ID": port, "SLURM_STEP_ID": 0, "SLURM_JOB_NUM_NODES": 2, "SLURM_NNODES": 2,
        "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": rank // 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


@pytest.mark.parametrize("way", [of_job, of_srun])
def test_each_way_to_meet(way):
    port = free_port()
    steps = STEPS if way is not of_job else STEPS[:3]
    commands = [
        (
            worker(40, *steps),
            clean_environment(
                COLLECTIVES_HOST_ID=rank // 2, TEST_GROUP=f"tcp://127.0.0.1:{port} {rank} 4", **way(rank, port)
            ),
        )
        for rank in range(4)
    ]
    results = run(*commands, results=4)
    assert all(result["sums"] == [10.0, 10.0] and result["same"] for result in results)
    assert [result["local_rank"] for result in results] == [0, 1, 0, 1], results


def test_torchrun_on_two_nodes():
    """The agents' store is the one that lasts; a process group is open before, and another one comes after."""
    port = free_port()
    command = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    commands = []
    for node in range(2):
        program = worker(40, "group-first", *STEPS[:3])[1:]
        own = [*command, "--master-port", str(port), "--node-rank", str(node), *program]
        commands.append((forked([worker()[0], *own]), clean_environment(COLLECTIVES_HOST_ID=node)))
    results = run(*commands, results=4)
    assert all(result["sums"] == [10.0, 10.0] and result["groups"] == [10.0] for result in results)
