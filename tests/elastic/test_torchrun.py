"""Elastic jobs under torchrun: workers that die, agents that end and come, with torchrun's own processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import clean_environment, free_port, torchrun
from tests.programs import FORKING, ForkedProgram, run_python
from tests.project.test_imports import ROOT

PROGRAM = Path(__file__).with_name("steps.py")
ENTRY_POINT = "collectives.elastic.torchrun:get_handler"
LIMIT_S = 90  # of everything that is waited for
FAST = "keep_alive_max_attempt=3,join_timeout=60"  # in place of ten


@pytest.fixture
def job(tmp_path):
    """A job of torchruns that are started one by one; all its processes are gone at the end."""
    running = Job(tmp_path)
    try:
        yield running
    finally:
        for process in running.agents:
            process.kill()
            process.wait()
        for pid in running.all_pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        running.files.close()


class Job:
    def __init__(self, folder: Path):
        self.folder, self.agents, self.files = folder, [], contextlib.ExitStack()
        self.forks = True  # all processes are forked with torch imported, which takes longer than these tests
        points = folder / "points" / "collectives_torchrun-0.dist-info"  # as an installed package's
        points.mkdir(parents=True)
        (points / "METADATA").write_text("Metadata-Version: 2.1\nName: collectives-torchrun\nVersion: 0\n")
        (points / "entry_points.txt").write_text(f"[torchrun.handlers]\ncollectives = {ENTRY_POINT}\n")
        self.env = clean_environment(LOG=folder / "log", STOP=folder / "stop")
        self.env["PYTHONPATH"] += os.pathsep + str(points.parent)
        self.port = free_port()

    def start(self, *options, ranks=2, conf=FAST, backend="collectives", **variables) -> ForkedProgram:
        """Start a torchrun; it prints into a file of the folder."""
        conf = ["--rdzv-conf", conf] if conf else []
        return self.launch(torchrun(ranks, "--rdzv-backend", backend, *conf, *options, PROGRAM), **variables)

    def launch(self, command, **variables) -> ForkedProgram | subprocess.Popen:
        env = {**self.env, **variables}
        out = self.files.enter_context(open(self.folder / f"agent{len(self.agents)}", "w"))
        if self.forks:
            agent = ForkedProgram([FORKING, *command[1:]], env, out, out, self.folder)
        else:
            agent = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=self.folder)
        self.agents.append(agent)
        return agent

    def start_node(self, number, *options, nodes="1:2", **values) -> ForkedProgram:
        """Start the torchrun of one of several nodes, which all are this machine."""
        return self.start(
            "--nnodes", nodes, "--rdzv-endpoint", f"127.0.0.1:{self.port}", *options,
            COLLECTIVES_HOST_ID=f"node{number}", **values,
        )  # fmt: skip

    def rows(self) -> dict[int, list[dict]]:
        """What each process has written."""
        found = {}
        for path in self.folder.glob("log.*"):
            lines = path.read_text().splitlines(keepends=True)
            found[int(path.suffix[1:])] = [json.loads(line) for line in lines if line.endswith("\n")]
        return {pid: rows for pid, rows in found.items() if rows}

    def all_pids(self) -> list[int]:
        return [int(path.suffix[1:]) for path in self.folder.glob("log.*")]

    def texts(self) -> str:
        return "\n".join((self.folder / f"agent{number}").read_text() for number in range(len(self.agents)))

    def wait(self, size: int, without=(), least_step: int = 0) -> dict[int, dict]:
        """Wait until ``size`` ranks step together, without some processes; return their newest rows."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            newest = {pid: rows[-1] for pid, rows in self.rows().items()}
            step = max((row["step"] for row in newest.values() if row["size"] == size), default=-1)
            at = {pid: row for pid, row in newest.items() if row["size"] == size and abs(row["step"] - step) <= 2}
            if len(at) == size and not set(at) & set(without) and step > least_step:
                return at
            time.sleep(0.05)
        raise AssertionError(f"no {size} ranks step together:\n{newest}\n{self.texts()}")

    def stop(self) -> list[int]:
        """Let the program end; return the exit codes of the agents."""
        (self.folder / "stop").touch()
        return self.finish()

    def finish(self) -> list[int]:
        try:
            return [agent.wait(LIMIT_S) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun does not end:\n{self.rows()}\n{self.texts()}") from None


def kill_node(agent: ForkedProgram, rows: dict[int, dict], node: str) -> None:
    """Kill an agent and its workers at once, as when their machine fails."""
    agent.kill()
    for pid, row in rows.items():
        if row["node"] == node:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("way", ["plain", pytest.param("hvd", marks=pytest.mark.thorough)])
def test_a_worker_that_dies_is_started_again_alone(job, way):
    job.forks = way != "plain"  # one of the tests is with processes as users start them
    job.start("--max-restarts", "2", WAY=way)
    before = job.wait(2)
    (victim,) = [pid for pid, row in before.items() if row["rank"] == 0]
    (other,) = set(before) - {victim}
    os.kill(victim, signal.SIGKILL)
    after = job.wait(2, without=[victim])
    assert other in after and after[other]["rank"] == 0, "the survivor goes on, in its process"
    (new,) = set(after) - {other}
    assert after[new]["launched"] == "0:1" and after[new]["step"] >= before[victim]["step"]
    assert job.stop() == [0], job.texts()
    assert f"rank 0 (process {victim}) was killed by SIGKILL; it is started again, 1 times more" in job.texts()
    assert job.rows()[other][-1]["size"] == 2


def test_an_agent_comes_later_and_another_one_goes(job):
    job.env["COLLECTIVES_SECRET"] = "x" * 20  # which all records carry
    job.start_node(0)
    first = job.wait(2)
    job.start_node(1)
    both = job.wait(4)
    assert set(first) < set(both), "those that ran already go on in their processes"
    assert sorted(row["launched"] for row in both.values()) == ["0:0", "1:0", "2:0", "3:0"]
    kill_node(job.agents[1], both, "node1")
    left = job.wait(2, least_step=max(row["step"] for row in both.values()))
    assert set(left) == set(first)
    job.start_node(2)
    again = job.wait(4, without=set(both) - set(first))
    assert set(first) < set(again)
    codes = job.stop()
    assert codes == [0, -signal.SIGKILL, 0], job.texts()
    assert "has not been heard of for 3 s: it and its 2 workers count as dead" in job.texts()


@pytest.mark.thorough
def test_an_agent_that_is_terminated_leaves_at_once(job):
    """Without the time after which an agent counts as dead, and its number is free again."""
    for number in range(2):
        job.start_node(number, conf="keep_alive_max_attempt=1000,join_timeout=60")
        both = job.wait(2 * (number + 1))  # the first one serves the store
    job.agents[1].terminate()
    left = job.wait(2, least_step=max(row["step"] for row in both.values()))
    assert {row["node"] for row in left.values()} in ({"node0"}, {"node1"})
    assert job.agents[1].wait(LIMIT_S) != 0


@pytest.mark.thorough
def test_a_worker_that_is_not_started_again(job):
    """Without restarts the job goes on with the ranks that are left, and ends with fewer than its least."""
    job.start(ranks=3, conf="min_ranks=2")
    before = job.wait(3)
    os.kill(next(iter(before)), signal.SIGKILL)
    left = job.wait(2)
    assert set(left) < set(before)
    os.kill(next(iter(left)), signal.SIGKILL)
    assert job.finish() == [1], job.texts()
    assert "it is not started again (--max-restarts)" in job.texts()
    assert "1 of at least 2 ranks are left: the job ends" in job.texts()


@pytest.mark.thorough
def test_an_exception_of_the_program_uses_up_the_restarts(job):
    ends = " ".join(f"{rank}:{life}" for rank in range(2) for life in range(9))
    job.start("--max-restarts", "2", LIFE_ENDS=ends)
    assert job.finish() == [1], job.texts()
    assert "ValueError: a fault of the program" in job.texts()
    assert "ended with exit code 1; it is started again, 0 times more" in job.texts()


@pytest.mark.thorough
def test_the_store_ends_with_its_agent(job):
    """Those that are left end by themselves, and say why."""
    job.start_node(0)
    job.wait(2)
    job.start_node(1)
    kill_node(job.agents[0], job.wait(4), "node0")
    assert job.finish()[1] == 1, job.texts()
    text = (job.folder / "agent1").read_text()
    assert "the launcher's store of the elastic job is gone" in text  # the workers' error
    assert f"the agent that served it at 127.0.0.1:{job.port} has ended, and with it the job" in text


def start_with_standby(job) -> str:
    """Start node 1, which serves the store in reserve, and then node 0, which serves the job's; their --rdzv-conf."""
    reserve = free_port()
    conf = f"{FAST},standby=127.0.0.1:{reserve}"
    job.start_node(1, "--max-restarts", "3", conf=f"{conf},is_host=0")
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", reserve), timeout=1):
            break
        time.sleep(0.05)
    job.start_node(0, conf=f"{conf},is_host=1")
    return conf


def test_another_store_takes_the_place(job):
    """The node dies that serves the store: the others go on, and later agents and restarts work, too."""
    conf = start_with_standby(job)
    both = job.wait(4)
    kill_node(job.agents[1], both, "node0")
    left = job.wait(2, least_step=max(row["step"] for row in both.values()))
    assert {row["node"] for row in left.values()} == {"node1"}
    assert set(left) < set(both), "the survivors were not started again"
    victim, other = left
    os.kill(victim, signal.SIGKILL)
    assert other in job.wait(2, without=[victim])
    job.start_node(0, conf=f"{conf},is_host=1")  # it comes again, and finds the job where it is now
    assert other in job.wait(4)
    assert job.stop() == [0, -signal.SIGKILL, 0], job.texts()


@pytest.mark.thorough
def test_the_agent_alone_dies_that_serves_the_store(job):
    """Its workers go on with the others."""
    start_with_standby(job)
    both = job.wait(4)
    job.agents[1].kill()
    after = job.wait(4, least_step=max(row["step"] for row in both.values()) + 50)
    assert set(after) == set(both)
    assert job.stop() == [0, -signal.SIGKILL], job.texts()


@pytest.mark.thorough
def test_node_0_of_our_own_launcher_ends(job):
    """`python -m collectives.run --elastic`: the others end by themselves, and are not started again."""
    for node in range(2):
        command = [sys.executable, "-m", "collectives.run", "-n", "2", "--elastic", "1:4", "--nnodes", "2"]
        command += ["--node-rank", str(node), "--rdzv-endpoint", f"127.0.0.1:{job.port}", str(PROGRAM)]
        job.launch(command, COLLECTIVES_HOST_ID=f"node{node}")
    kill_node(job.agents[0], job.wait(4), "node0")
    assert job.finish()[1] == 1, job.texts()
    text = (job.folder / "agent1").read_text()
    assert "the launcher's store of the elastic job is gone" in text and "the job has ended with its store" in text
    assert "is started again" not in text


@pytest.mark.thorough
def test_agents_that_do_not_fit(job):
    job.start_node(0)
    job.wait(2)
    codes = [
        job.start_node(1, nodes="1:3").wait(LIMIT_S), job.start_node(1, ranks=1).wait(LIMIT_S),
        job.start_node(1, "--rdzv-id", "other").wait(LIMIT_S),
    ]  # fmt: skip
    assert codes == [1, 1, 1]
    for wrong in ("--nnodes 1:3 and not 1:2", "--nproc-per-node 1 and not 2", "--rdzv-id other and not none"):
        assert f"this torchrun has {wrong} as the job's first one" in job.texts().replace(", min_ranks 1 and not 2", "")
    assert job.stop()[0] == 0


def test_too_few_agents(job):
    job.start_node(0, nodes="2:2", conf="join_timeout=1")
    assert job.finish() == [1]
    assert f"1 of at least 2 agents have come to the elastic job at 127.0.0.1:{job.port} after 1 s" in job.texts()


@pytest.mark.thorough
def test_torchs_own_rendezvous_starts_all_again(job):
    """The program begins anew: torch's agent ends the survivors."""
    job.start("--max-restarts", "1", "--rdzv-endpoint", "localhost:0", conf="", backend="c10d")
    before = job.wait(2)
    os.kill(next(iter(before)), signal.SIGKILL)
    after = job.wait(2, without=set(before))
    assert {row["launched"] for row in after.values()} == {"0:1", "1:1"}
    assert min(row["step"] for rows in job.rows().values() for row in rows if row["pid"] in after) == 0
    assert job.stop() == [0], job.texts()


def test_the_metadata_names_the_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points."torchrun.handlers"]\ncollectives = "{ENTRY_POINT}"\n' in text


def test_torchrun_without_it_is_torchs_own():
    """The entry point alone changes nothing in a torchrun: torch's agent stays, and no program part is loaded."""
    code = (
        "import sys, torch.distributed.run, torch.distributed.launcher.api as api\n"
        "import collectives.elastic.torchrun as entry\n"
        "entry.get_handler()\n"
        "print(api.LocalElasticAgent.__name__, 'collectives.elastic.agent' in sys.modules)"
    )
    done = run_python(code, timeout=LIMIT_S, **clean_environment())
    assert done.stdout.split() == ["LocalElasticAgent", "False"], done.stderr
