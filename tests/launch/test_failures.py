"""Ranks that can't meet: each one ends in time with an error that says what is wrong.

More ways in which they can't: tests/rendezvous.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.launching import clean_environment, finish, free_port, run, started, worker

SLACK_S = 10  # seconds beyond the limit of init() that a rank may take on a loaded machine to raise


def ranks(numbers, size, timeout, **variables):
    """The commands of these ranks."""
    return [(worker(timeout, "init"), clean_environment(RANK=n, WORLD_SIZE=size, **variables)) for n in numbers]


@pytest.mark.parametrize("way", ["by name", "at an address"])
def test_a_rank_that_never_comes(way):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} if way == "at an address" else {}
    for result in run(*ranks((0, 2), 4, 2, **place), results=2, succeed=False):
        assert result["error"] == "CollectiveTimeout" and result["peers"] == [1, 3]
        assert re.search("ranks 1(, | and )3 ", result["text"]) and result["seconds"] < 2 + SLACK_S


def test_ctrl_c_ends_the_wait():
    with started(*ranks((0,), 2, 60)) as running:
        process, out = running[0]
        until = time.monotonic() + 40
        while b"BEGUN" not in os.pread(out.fileno(), 1000, 0) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1)  # until it waits for the other, most likely
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        results, codes, output = finish(running, 15)
    assert results and results[0]["error"] == "KeyboardInterrupt", output
    assert codes == [1] and time.monotonic() - began < 5
