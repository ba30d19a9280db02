"""Ranks and agents that come after an elastic job's end say so in one line, and no traceback."""

from __future__ import annotations

import sys
import textwrap
import time

from tests.launching import clean_environment, forked, free_port, started, torchrun

LIMIT_S = 90
# Rank 1 dies in its first life. In its second one it comes when rank 0's process, whose end is the job's, is gone.
REPLACED = """
import os, signal, sys, time
import collectives

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
place = sys.argv[1]
if first:
    comm = collectives.init()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists(place):
        time.sleep(0.01)
    with open(place + "-ended", "w"):
        os._exit(0)
open(place, "w").close()
while not os.path.exists(place + "-ended"):
    time.sleep(0.01)
time.sleep(1.0)
collectives.init()
"""
# Rank 0 ends, and with it the job; rank 1 keeps its agent, which serves the store, until the late agent has left.
ENDED = """
import os, sys, time
import collectives

comm = collectives.init()
if comm.rank == 0:
    open(sys.argv[1] + "-ended", "w").close()
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os._exit(0)
"""


def wait_for(path) -> None:
    until = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} has not come"
        time.sleep(0.02)


def program(folder, text):
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return path, folder / "place"


def output(file) -> str:
    file.seek(0)
    return file.read()


def test_a_replacement_after_the_end_of_the_job(tmp_path):
    path, place = program(tmp_path, REPLACED)
    options = ["-n", "2", "--elastic", "1:2", "--max-restarts", "1"]
    command = forked([sys.executable, "-m", "collectives.run", *options, str(path), str(place)])
    with started((command, clean_environment())) as ((process, out),):
        assert process.wait(LIMIT_S) == 0, output(out)
        text = output(out)
    assert "it is started again, 0 times more" in text
    assert "collectives: init: the job has ended: there is nothing to join any more" in text
    assert "Traceback" not in text, text


def test_an_agent_after_the_end_of_the_job(tmp_path):
    path, place = program(tmp_path, ENDED)
    words = ["--nnodes", "1:2", "--rdzv-backend", "collectives", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = forked(torchrun(2, *words, path, place))
    with started((command, clean_environment(COLLECTIVES_HOST_ID="node0"))) as ((first, out),):
        wait_for(tmp_path / "place-ended")
        time.sleep(0.5)  # until its agent has seen the end of the rank
        with started((command, clean_environment(COLLECTIVES_HOST_ID="node1"))) as ((late, late_out),):
            assert late.wait(LIMIT_S) == 1, output(late_out)
            text = output(late_out)
        place.touch()
        assert first.wait(LIMIT_S) == 0, output(out)
    assert "has ended: nobody can join it" in text and "Traceback" not in text, text
