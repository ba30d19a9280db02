"""``python -m collectives.run``: what it takes, what it refuses, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from collectives import run as launcher
from tests.launching import clean_environment, finish, forked, run, started, worker
from tests.programs import FORKING, run_forked

RUN = [sys.executable, "-m", "collectives.run"]
QUICK = "import os, signal, sys, time; from pathlib import Path; rank = os.environ['RANK']\n"  # ranks without torch


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run main with a command line; give its exit code and what it printed. Nothing of it may start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    monkeypatch.setattr(os, "environ", clean_environment())
    monkeypatch.setattr(launcher, "_run", lambda options: pytest.fail("ranks would have been started"))

    def call(*words):
        try:
            code = launcher.main(words)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def prepared(refused, monkeypatch):
    """Run main up to the start of the ranks; give torch's options, the ranks' variables and what was printed."""
    seen = []
    monkeypatch.setattr(launcher, "_run", lambda options: seen.append(options) or 0)

    def call(*words):
        code, _, err = refused(*words)
        assert code == 0, err
        return seen.pop(), os.environ, err

    return call


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-n", "0", "script.py"], "-n 0: a job has at least one rank"),
        (["-n", "-3", "script.py"], "-n -3: a job has at least one rank"),
        (["-n", "two", "script.py"], "-n two: "),
        (["-n", "2", "nowhere.py"], "can't open file 'nowhere.py': no such file in "),
        (["-n", "2", "-m", "nowhere.at.all"], "-m nowhere.at.all: there is no such module"),
        (["-n", "2"], "training_script"),
        (["-n", "2", "--no-such-option", "script.py"], "unrecognized arguments: --no-such-option"),
        (["-n", "2", "-x", "1A=2", "script.py"], "'1A' is no name of a variable"),
        (["-n", "2", "--nnodes", "2:1", "script.py"], "min_nodes"),
        (["-n", "2", "--nnodes", "many", "script.py"], "many"),
        (["-n", "2", "--max-restarts", "-1", "script.py"], "max_restarts"),
        (["-n", "2", "--cycle-time-ms", "nan", "script.py"], "--cycle-time-ms nan: not a number from 0 up"),
        (["-n", "2", "--start-timeout", "0", "script.py"], "--start-timeout 0: not a number of seconds"),
        (["-n", "3", "-H", "a:2,b:1", "script.py"], "-H: the ranks of this machine are started, -n says how many;"),
        (["--hosts", "localhost:2", "script.py"], "--hosts: the ranks of this machine are started"),
        (["--hostfile", "hosts", "script.py"], "and its own --node-rank"),
        (["--machinefile=hosts", "script.py"], "and its own --node-rank"),
        (["-n", "2", "--oversubscribe", "script.py"], "and its own --node-rank"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused_with_exit_code_2(refused, words, told):
    code, out, err = refused(*words)
    assert (code, out) == (2, "")
    assert told in err.splitlines()[-1]
    assert "Traceback" not in err


def test_torchruns_options_are_passed_on(prepared):
    options, variables, err = prepared("-np", "3", "--max-restarts", "2", "--log-dir", "logs", "script.py", "-n", "7")
    assert (options.nproc_per_node, options.max_restarts, options.log_dir) == ("3", 2, "logs")
    assert (options.training_script, options.training_script_args) == ("script.py", ["-n", "7"])
    assert options.standalone and options.local_addr == "localhost"  # a port of the system's choice
    assert variables["OMP_NUM_THREADS"] == "1" and "OMP_NUM_THREADS" not in err  # given by clean_environment
    many = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "4000")
    options, _, _ = prepared("--nproc-per-node", "2", *many, "script.py")
    assert (options.nproc_per_node, options.nnodes, options.node_rank) == ("2", "2", 1)
    assert (options.master_addr, options.master_port, options.standalone) == ("a", 4000, False)
    elastic = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:4000", "--rdzv-id", "7")
    options, _, _ = prepared("-n", "2", *elastic, "--start-timeout", "9", "script.py")
    assert (options.rdzv_endpoint, options.rdzv_id, options.standalone) == ("a:4000", "7", False)
    assert options.rdzv_conf == "timeout=9,join_timeout=9"


def test_each_rank_gets_its_share_of_the_cores(prepared, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(13)))
    for ranks, threads in (("1", None), ("4", "3"), ("20", "1")):
        os.environ.pop("OMP_NUM_THREADS", None)
        _, variables, err = prepared("-n", ranks, "script.py")
        assert variables.get("OMP_NUM_THREADS") == threads
        assert (f"OMP_NUM_THREADS={threads} for each of {ranks} ranks on 13 cores" in err) == (threads is not None)


def test_variables_and_horovodruns_options(prepared):
    os.environ["HERE"] = "kept"
    words = ("-x", "A=b=c", "-x", "HERE", "-x", "NOT_HERE", "--timeline-filename", "t.json", "--cycle-time-ms", "2.5")
    _, variables, err = prepared("-np", "2", *words, "--fusion-threshold-mb", "1.5", "script.py")
    assert (variables["A"], variables["HERE"], variables["COLLECTIVES_TIMELINE"]) == ("b=c", "kept", "t.json")
    assert (variables["HOROVOD_CYCLE_TIME"], variables["HOROVOD_FUSION_THRESHOLD"]) == ("2.5", str(3 * 2**19))
    assert "-x NOT_HERE: there is no such variable here" in err and "NOT_HERE" not in variables


# ---- Real ranks.


@pytest.mark.thorough
def test_two_jobs_at_once():
    job = [*RUN, "-n", "2", *worker(30, "init", "group", "reopen")[1:]]
    results = run((forked(job), clean_environment()), (forked(job), clean_environment()), results=4)
    assert [result["rank"] for result in results] == [0, 0, 1, 1]
    for result in results:
        assert result["launcher"] == "torchrun" and (result["local_rank"], result["local_size"]) == (result["rank"], 2)
        assert result["sums"] == [3.0, 3.0] and result["groups"] == [3.0]


def script(tmp_path, text):
    path = tmp_path / "ranks.py"
    path.write_text(QUICK + text)
    return str(path)


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3;"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
    ids=["exit code", "signal"],
)
def test_the_rank_that_failed_first_is_named(tmp_path, end, code, told):
    check_first(script(tmp_path, f"if rank == '1': {end}\ntime.sleep(60)\n"), code, told)


def test_a_rank_that_raises_failed_before_those_whose_calls_fail_with_it(tmp_path):
    """Rank 1 ends seconds after rank 0 has noticed: its exception is what is told, not that of rank 0."""
    raising = "import atexit, collectives\ncomm = collectives.init()\n"
    raising += "if rank == '1': atexit.register(time.sleep, 20); comm.close(); raise ValueError('no such\\nthing')\n"
    path = script(tmp_path, raising + "comm.barrier()\n")
    check_first(path, 1, "exit code 1 (ValueError: no such);", ["RemoteError", "ValueError"])


def check_first(path, code, told, printed=()):
    done = run_forked([FORKING, *RUN[1:], "-n", "2", path], clean_environment(), 60)
    assert done.returncode == code, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("collectives.run: ")]
    assert line.startswith("collectives.run: rank 1 (process ") and told in line and "first to fail" in line
    rest = done.stderr.replace(line, "")  # the ranks' lines may stand inside one another
    assert [name for name in ("RemoteError", "ValueError") if name in rest] == list(printed), done.stderr


def test_a_rank_that_was_killed_failed_before_those_that_noticed():
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "none") for rank, code in enumerate((1, -9, -15, 1))}
    assert launcher._report_failures(failures) == 137


def test_a_port_in_use_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(os, "environ", clean_environment())
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process's own stay
        assert launcher.main(["-n", "2", "--master-port", str(port), script(tmp_path, "")]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"collectives.run: --master-port {port}: the port is in use by another program")


def test_ctrl_c_ends_all_ranks_quietly(tmp_path):
    path = script(tmp_path, f"Path({str(tmp_path)!r}, rank).write_text(str(os.getpid())); time.sleep(60)\n")
    with started((forked([*RUN, "-n", "2", path]), clean_environment())) as running:
        until, files = time.monotonic() + 40, [tmp_path / "0", tmp_path / "1"]
        while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(running[0][0].pid, signal.SIGINT)  # as a terminal does: torch gives the ranks sessions of their own
        _, codes, output = finish(running, 30)
    assert codes == [130]
    assert output.splitlines() == ["collectives.run: ended by SIGINT, and all ranks with it"]
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
