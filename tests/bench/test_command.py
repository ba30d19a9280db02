"""`python -m collectives.bench` with real ranks: alone, under torchrun and mpirun, and with a rank
that dies.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import programs
from tests.launching import clean_environment, torchrun

BENCH = [sys.executable, "-m", "collectives.bench"]
TORCHRUN = torchrun(2, "--standalone")
CORRUPT = str(Path(__file__).with_name("corrupt.py"))
FIELDS = """op name ours engine algorithm dtype ranks nodes bytes count in_place zero_copy time_us p95_us algbw_gbs
    busbw_gbs wrong redop root p99_us mean_us iters calls warmup turns fresh arrays machine commit versions""".split()
OPS = "all_reduce reduce_scatter all_gather broadcast reduce all_to_all gather scatter sendrecv".split()
PEERS = ("gloo", "nccl", "collectives", "mpi4py-openmpi", "mpi4py-mpich", "mpi4py-intelmpi")
PARTED = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(command, *words, limit=100, **variables):
    """Run to the end; exit code, stdout and stderr."""
    variables.setdefault("I_MPI_ROOT", "")
    done = subprocess.run(
        [*command, *map(str, words)], env=clean_environment(**variables), capture_output=True, text=True, timeout=limit
    )
    return done.returncode, done.stdout, done.stderr


def run_forked(command, *words):
    """What `run` does, with a launcher and ranks that are forked with torch imported, which takes most of their time.

    The run of the fixture `whole`, those with an MPI and those that are killed are started as users start them.
    """
    done = programs.run_forked([programs.FORKING, *command[1:], *map(str, words)], clean_environment(), 100)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run with all that can be asked for, but for DeepSpeed, which takes minutes to compile."""
    folder = tmp_path_factory.mktemp("bench")
    words = "--ranks 2 --collective all -b 1K -e 2K -f 2 -n 3 -m 2 -w 1 --turns 2 --zero-copy both --peers"
    files = ("--json", folder / "rows.jsonl", "--plot", folder / "plot.png")
    code, out, err = run(BENCH, *words.split(), ",".join(PEERS), *files)
    assert code == 0, out + err
    return folder, out, read_rows(folder / "rows.jsonl")


def test_columns_are_nccl_tests(whole):
    _, out, _ = whole
    headings = [line.lstrip("#").split() for line in out.splitlines() if "#wrong" in line]
    place = ["time", "algbw", "busbw", "#wrong"]
    assert headings == [["size", "count", "type", "redop", "root", *place, *place]] * len(OPS)
    lines = [line.split() for line in out.splitlines() if line.startswith("host ") and "zero-copy" not in line]
    assert len(lines) == 2 * len(OPS)
    assert lines[0][1:6] == ["1024", "256", "float", "sum", "-1"] and len(lines[0]) == 14
    assert "# Out of bounds values : 0 OK" in out and "# Avg bus bandwidth    : " in out


def test_rows_have_all_fields(whole):
    *_, rows = whole
    assert [op for op in dict.fromkeys(row["op"] for row in rows)] == OPS
    for row in rows:
        assert set(FIELDS) <= set(row) and row["wrong"] == 0 and row["ranks"] == 2
        assert 0 < row["min_us"] <= row["time_us"] <= row["p95_us"] <= row["p99_us"]
        assert row["algbw_gbs"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3, rel=1e-3)
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * (0.5 if row["op"] in PARTED else 1), rel=1e-3)
    ours = {(row["op"], row["in_place"], row["zero_copy"]) for row in rows if row["ours"]}
    # broadcast and reduce have no form out of place, all_to_all and sendrecv none in place
    assert len(ours) == 2 * (2 * len(OPS) - 4)
    assert {(row["name"], row["algorithm"]) for row in rows if row["ours"]} == {
        ("host", "native"), ("host zero-copy", "native"),
    }  # fmt: skip


def test_the_plot_is_a_picture(whole):
    folder = whole[0]
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG") and (folder / "plot.png").stat().st_size > 20_000


def test_peers_are_measured_or_named(whole):
    _, out, rows = whole
    names = {"nccl": "torch nccl", "collectives": "c10d collectives"}
    for peer in PEERS:
        measured = {row["op"] for row in rows if row["engine"] == names.get(peer, peer)}
        assert measured == set(OPS) or f"# {peer}: " in out
    assert {"gloo", "c10d collectives"} <= {row["engine"] for row in rows}
    assert "time of host, and the others' times as multiples of it" in out


def test_every_dtype_and_reduction_is_right_on_three_ranks(tmp_path):
    """A peer without a dtype is left out of these cases alone."""
    words = "--ranks 3 --op all_reduce -d all -o all --sizes 1000 -n 1 -w 0 -m 1 --turns 1 --peers gloo --json"
    code, out, err = run_forked(BENCH, *words.split(), tmp_path / "rows.jsonl")
    assert code == 0 and "# gloo: " in out, out + err
    rows = read_rows(tmp_path / "rows.jsonl")
    assert sum(row["ours"] for row in rows) == 12 * 6 * 2 and not any(row["wrong"] for row in rows)
    dtypes = {row["dtype"] for row in rows if row["engine"] == "gloo"}
    assert "float32" in dtypes and "uint32" not in dtypes


def test_simulated_hosts(tmp_path):
    words = "--ranks 4 --hosts 2 --sizes 4K -n 2 --turns 1 --peers gloo,mpi4py-openmpi --json"
    code, out, err = run_forked(BENCH, *words.split(), tmp_path / "rows.jsonl")
    assert code == 0 and "# mpi4py-openmpi: Open MPI is measured on one machine only" in out, out + err
    found = {(row["name"], row["nodes"]) for row in read_rows(tmp_path / "rows.jsonl")}
    assert found == {("host on 2 machines", 2), ("gloo", 2)}


def test_fresh_data_in_every_call(tmp_path):
    words = "--ranks 2 --collective all --sizes 1K,16M --peers collectives --zero-copy both --fresh"
    words += " -n 3 -m 2 -w 1 --turns 1 --json"
    code, out, err = run_forked(BENCH, *words.split(), tmp_path / "rows.jsonl")
    assert code == 0 and "# fresh: " in out, out + err
    rows = read_rows(tmp_path / "rows.jsonl")
    assert not any(row["wrong"] for row in rows) and all(row["fresh"] for row in rows)
    # as many as calls, or what fits into 64 MiB
    assert all(row["arrays"] == (4 if row["bytes"] > 10_000 else 7) for row in rows)


@pytest.mark.parametrize(("words", "wrong"), [(("-c", "2"), 6), (("-m", "2", "-w", "1", "--fresh"), 18)])
def test_under_torchrun_corrupted_results_are_counted(tmp_path, words, wrong):
    """Rank 1's all-reduce spoils three elements of its result, and every one of them is counted: of two checks; with
    fresh data of five arrays and the check.
    """
    words = ("--sizes", "1K", "-n", "2", *words, "--json", tmp_path / "rows.jsonl")
    code, out, err = run_forked([*TORCHRUN, CORRUPT], *words)
    assert code != 0 and f"# Out of bounds values : {2 * wrong} FAILED" in out, out + err
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [(row["in_place"], row["wrong"]) for row in rows] == [(False, wrong), (True, wrong)]


@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpiexec.hydra"])
def test_under_mpirun(program):
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    start = [path, *(["--oversubscribe", *root] if program == "mpirun.openmpi" else []), "-n", "2"]
    # The other MPI's job is started from inside of this one's.
    peer = "mpi4py-mpich" if program == "mpirun.openmpi" else "mpi4py-openmpi"
    code, out, err = run([*start, *BENCH], "--sizes", "1K", "-n", "2", "--peers", peer)
    assert code == 0 and "2 ranks" in out and "# Out of bounds values : 0 OK" in out, out + err
    assert f"\n{peer} " in out or f"# {peer}: not installed" in out


def test_a_file_that_cannot_be_written_ends_all_ranks():
    """MPICH's launcher lets the others wait where one has failed before MPI_Init."""
    path = shutil.which("mpiexec.hydra")
    if path is None:
        pytest.skip("mpiexec.hydra is not installed")
    code, out, err = run([path, "-n", "2", *BENCH], "--sizes", "1K", "--json", "/nowhere/x.json")
    assert code == 2 and (out + err).count("--json /nowhere/x.json can't be written") == 1, out + err


def ranks_of(process, count):
    """The rank processes of a bench, once they measure."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        children = path.read_text().split()
        if len(children) == count:
            return [int(pid) for pid in children]
        time.sleep(0.05)
    raise AssertionError("the ranks were not started")


def gone(pid):
    return (
        not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    )


@pytest.mark.parametrize("end", ["a rank is killed", "Ctrl-C", "killed itself"])
def test_all_end_together(end):
    command = [*BENCH, "--ranks", "2", "--sizes", "1M", "-n", "10000000"]
    with subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            pids = ranks_of(process, 2)
            process.stdout.readline()  # rank 0 has opened the communicator
            if end == "a rank is killed":
                os.kill(pids[1], signal.SIGKILL)
            else:
                process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    codes = {"a rank is killed": 1, "Ctrl-C": 130, "killed itself": -signal.SIGKILL}
    assert process.returncode == codes[end], err
    assert end != "a rank is killed" or b"rank 1 was killed by SIGKILL" in err
    until = time.monotonic() + 5
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    left = [pid for pid in pids if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_the_time_limit_is_hard():
    code, out, err = run_forked(BENCH, "--ranks", "2", "--sizes", "1K", "-n", "100000000", "-T", "3")
    assert code == 1 and "Timeout (0:00:03)!" in err, out + err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    words = (
        "--ranks 1 --engine nccl --collective all -d float,half -o sum,avg --sizes 1K,1M -n 5 --peers nccl,gloo --json"
    )
    code, out, err = run(BENCH, *words.split(), tmp_path / "rows.jsonl", COLLECTIVES_ENGINE="nccl")
    assert code == 0, out + err
    rows = read_rows(tmp_path / "rows.jsonl")
    assert not any(row["wrong"] for row in rows) and {row["algorithm"] for row in rows} == {"native", None}
