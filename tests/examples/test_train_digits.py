"""The example, run as people run it: under each launcher into a pipe, and alone on a terminal."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import sys
import termios
import threading

import pytest

from tests.examples.running import EXAMPLES, SECONDS, fork_example, login_environment, run_example, start_two, torchrun
from tests.programs import ForkedProgram

NAME = "train_digits.py"
SHORT = ("--epochs", "3", "--blocks", "1")
KEYS = ["ranks", "engine", "test_accuracy", "identical_parameters", "step_ms_gloo", "step_ms_collectives"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    code, out, err = fork_example(NAME, *SHORT, "--plot", "plots/digits.png", cwd=folder)
    assert code == 0, out + err
    return folder, out, err


def numbers(folder):
    return json.loads((folder / "out" / "train_digits.json").read_text())


def test_the_last_line_says_what_came_out_and_files_have_numbers_and_plot(two_ranks):
    """In a pipe there is no progress bar."""
    folder, out, err = two_ranks
    result, (*_, plot, written, last) = numbers(folder), out.splitlines()
    assert list(result)[: len(KEYS)] == KEYS
    assert (result["ranks"], result["identical_parameters"]) == (2, True) and result["engine"] in ("host", "nccl")
    assert result["test_accuracy"] >= 0.95
    assert result["step_ms_gloo"] > 0 and result["step_ms_collectives"] > 0
    learned, times = re.fullmatch(
        r"The test accuracy is (\S+)%, and the parameters are the same on all ranks\. (.*)\.", last
    ).groups()
    assert float(learned) == pytest.approx(100 * result["test_accuracy"], abs=0.1)
    gloo, ours, ratio = map(float, re.findall(r"\d+\.\d", times))
    assert times == f"{gloo} ms a step on Gloo, {ours} with collectives: {ratio} times as fast"
    assert gloo == pytest.approx(result["step_ms_gloo"], abs=0.06)
    assert ratio == pytest.approx(result["step_ms_gloo"] / result["step_ms_collectives"], abs=0.06)
    assert (plot, written) == ("plot: plots/digits.png", "numbers: out/train_digits.json")
    assert (folder / "plots" / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert not [sign for sign in ("\r", "\x1b", "step/s") if sign in out + err]


def test_the_loss_goes_down_as_it_does_on_gloo(two_ranks):
    losses = {"collectives": [], "gloo": []}
    for line in two_ranks[1].splitlines():
        words = line.split()
        if words[1:2] == ["epoch"]:
            losses[words[0]].append(float(words[-1]))
    assert len(losses["collectives"]) == 3
    assert losses["collectives"][-1] < 0.2 * losses["collectives"][0]
    assert losses["collectives"] == pytest.approx(losses["gloo"], abs=2e-4)  # four decimals are printed


LAUNCHERS = {
    "torchrun": torchrun(2),
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "mpich": ["mpiexec.hydra", "-n", "2"],
    "srun": start_two(),
    "run": [sys.executable, "-m", "collectives.run", "-n", "2", "--no-python"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
def test_the_same_parameters_under_every_launcher(two_ranks, launcher, tmp_path):
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    code, out, err = run_example(launcher, NAME, *SHORT, cwd=tmp_path)
    assert code == 0, out + err
    result, expected = numbers(tmp_path), numbers(two_ranks[0])
    for name in ("ranks", "engine", "parameters_sha256", "test_accuracy", "identical_parameters", "loss_last"):
        assert result[name] == expected[name], name
    assert (tmp_path / "out" / "train_digits.png").exists()


def test_alone_on_a_terminal_shows_a_bar_and_fails_below_the_threshold(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # rows, columns
    chunks = []

    def read():
        with contextlib.suppress(OSError):  # EIO is how a terminal's other end learns that it was closed
            while chunk := os.read(ours, 4096):
                chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w") as terminal:
        words = [str(EXAMPLES / NAME), "--steps", "2", "--blocks", "1"]
        process = ForkedProgram(words, {**login_environment(), "TERM": "xterm"}, terminal, terminal, tmp_path)
        try:
            code = process.wait(SECONDS)
        finally:
            process.kill()
    reader.join(20)
    os.close(ours)
    text = b"".join(chunks).decode()
    assert code == 1, text
    assert re.search(r"collectives: +\d+%.*/2 \[", text), text
    result = numbers(tmp_path)
    assert result["ranks"] == 1
    assert result["test_accuracy"] < 0.95 and "%, below 95%, and the parameters" in text.splitlines()[-1]
