"""`python -m collectives.bench` with real ranks: alone, under torchrun and mpirun, and with a rank
that dies.
"""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives.bench.options import PEERS
from tests import programs
from tests.launching import clean_environment, torchrun

BENCH = [sys.executable, "-m", "collectives.bench"]
TORCHRUN = torchrun(2, "--standalone")
CORRUPT = str(Path(__file__).with_name("corrupt.py"))
FIELDS = """op engine algorithm dtype ranks bytes count in_place zero_copy time_us p95_us algbw_gbs busbw_gbs wrong
    redop root wire p50_us p99_us mean_us iters calls warmup turns machine commit versions""".split()
OPS = "all_reduce reduce_scatter all_gather broadcast reduce all_to_all gather scatter sendrecv".split()


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
    """One run with all that can be asked for."""
    folder = tmp_path_factory.mktemp("bench")
    files = ("--json", folder / "rows.json", "--csv", folder / "rows.csv", "--plot", folder / "plot.png")
    words = "--ranks 2 --collective all -b 1K -e 2K -f 2 -n 3 -m 2 -w 1 --turns 2 --zero-copy both --peers all"
    code, out, err = run(BENCH, *words.split(), *files, XDG_CACHE_HOME=folder)
    assert code == 0, out + err
    return folder, out, err, json.loads((folder / "rows.json").read_text())["rows"]


@pytest.mark.sampled(one_in=3)
def test_columns_are_nccl_tests(whole):
    _, out, _, rows = whole
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
        assert 0 < row["min_us"] <= row["p50_us"] == row["time_us"] <= row["p95_us"] <= row["p99_us"]
        assert row["algbw_gbs"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3, rel=1e-3)
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * (0.5 if row["op"] in PARTED else 1), rel=1e-3)
    ours = {(row["op"], row["in_place"], row["zero_copy"]) for row in rows if row["engine"] == "host"}
    assert len(ours) == 2 * (2 * len(OPS) - 2)  # all_to_all and sendrecv have no form in place
    assert {(row["algorithm"], row["wire"]) for row in rows if row["engine"] == "host"} == {("auto", None)}
    assert {row["op"] for row in rows if row["engine"] == "gloo"} == set(OPS)
    assert {row["op"] for row in rows if row["engine"] == "backend"} == set(OPS)


PARTED = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")


def test_csv_has_the_same_rows(whole):
    folder, _, _, rows = whole
    with (folder / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(row["engine"], float(row["time_us"])) for row in read] == [(row["engine"], row["time_us"]) for row in rows]


def test_the_plot_is_a_picture(whole):
    folder = whole[0]
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG") and (folder / "plot.png").stat().st_size > 20_000


def test_peers_are_measured_or_named(whole):
    _, out, _, rows = whole
    measured = {row["engine"] for row in rows}
    for peer in PEERS:
        assert peer in measured or f"# {peer}: " in out
    for peer, program in (("openmpi", "mpirun.openmpi"), ("mpich", "mpiexec.mpich")):
        if shutil.which(program) and shutil.which("cc"):
            found = [row for row in rows if row["engine"] == peer]
            assert {row["op"] for row in found} == set(OPS) and {row["caller"] for row in found} == {"c"}
            assert found[0]["versions"][peer]
    assert "pip install impi-rt" in out or "intelmpi" in measured
    assert "times of the peers as multiples of that of host" in out
    assert "# who is first, beside all peers" in out
    assert {row["caller"] for row in rows if row["engine"].startswith("mpi4py")} <= {"python"}


def test_no_progress_bar_in_a_pipe(whole):
    _, _, err, _ = whole
    assert "turn/s" not in err and "%|" not in err


@pytest.mark.sampled(one_in=4)
def test_every_dtype_and_reduction_is_right_on_three_ranks(tmp_path):
    words = "--ranks 3 --op all_reduce -d all -o all --sizes 1000 -n 1 -w 0 -m 1 --json"
    code, out, err = run_forked(BENCH, *words.split(), tmp_path / "rows.json")
    assert code == 0, out + err
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 12 * (6 + 5) and not any(row["wrong"] for row in rows)


@pytest.mark.sampled(one_in=2)
def test_wires_and_percentiles(tmp_path):
    words = "--ranks 2 --op all_reduce,all_gather,broadcast,gather --wire none,bf16,fp8 --sizes 4K -n 2 -m 1 --json"
    code, out, err = run_forked(BENCH, *words.split(), tmp_path / "rows.json", "--percentiles")
    assert code == 0, out + err
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["wire"] for row in rows} == {None, "bfloat16", "float8_e4m3fn"} and not any(r["wrong"] for r in rows)
    assert "p99" in out


@pytest.mark.parametrize(("ranks", "peers"), [(2, "backend"), (3, "gloo,openmpi,mpi4py-openmpi,mpi4py-intelmpi")])
def test_fresh_data_in_every_call(tmp_path, ranks, peers):
    words = f"--ranks {ranks} --collective all --sizes 1K,100K --fresh 1M -n 3 -m 4 --turns 2 --peers {peers}"
    start = run if "mpi" in peers else run_forked
    code, out, err = start(BENCH, *words.split(), "--zero-copy", "both", "--json", tmp_path / "rows.json")
    assert code == 0 and "# fresh: before each call" in out, out + err
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert not any(row["wrong"] for row in rows) and all(row["fresh"] for row in rows)
    arrays = {(row["bytes"] > 2000, row["arrays"]) for row in rows if row["op"] == "all_reduce" and row["in_place"]}
    assert arrays == {(False, 17), (True, 10)}  # as many as calls; what fits into 1 MiB


def test_fresh_under_torchrun_corrupted_results_of_every_array_are_counted(tmp_path):
    words = ("--sizes", "1K", "-n", "2", "-m", "2", "-w", "1", "--fresh", "--json", tmp_path / "rows.json")
    code, out, err = run_forked([*TORCHRUN, CORRUPT], *words)
    assert code != 0 and "# Out of bounds values : 18 FAILED" in out, out + err  # 5 arrays and the check's, 3 each


def test_under_torchrun_corrupted_results_are_counted(tmp_path):
    """Rank 1's all-reduce spoils three elements of its result in place, and every one of them is
    counted.
    """
    words = ("--sizes", "1K", "-n", "2", "-c", "2", "--json", tmp_path / "rows.json")
    code, out, err = run_forked([*TORCHRUN, CORRUPT], *words)
    assert code != 0 and "# Out of bounds values : 6 FAILED" in out, out + err
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["in_place"], row["wrong"]) for row in rows] == [(False, 0), (True, 6)]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpiexec.hydra"])
def test_under_mpirun(program):
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    start = [path, *(["--oversubscribe", *root] if program == "mpirun.openmpi" else []), "-n", "2"]
    # The other MPI's job is started from inside of this one's.
    peer = "mpich" if program == "mpirun.openmpi" else "openmpi"
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


@pytest.mark.sampled(one_in=6)
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


@pytest.mark.sampled(one_in=2)
def test_the_time_limit_is_hard():
    code, out, err = run_forked(BENCH, "--ranks", "2", "--sizes", "1K", "-n", "100000000", "-T", "5")
    assert code == 4 and "not done after --timeout 5 s" in err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    words = (
        "--ranks 1 --engine nccl --collective all -d float,half -o sum,avg --sizes 1K,1M -n 5 --peers nccl,gloo --json"
    )
    code, out, err = run(BENCH, *words.split(), tmp_path / "rows.json", COLLECTIVES_ENGINE="nccl")
    assert code == 0, out + err
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert not any(row["wrong"] for row in rows) and {row["algorithm"] for row in rows} == {"auto", None}
