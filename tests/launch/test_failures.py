"""Ranks that can't meet: each one ends in time with an error that says what is wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import pytest

from tests.launching import clean_environment, finish, free_port, run, started, worker

# Seconds beyond the limit of init() that a rank may take on a loaded machine to raise.
SLACK_S = 10


def ranks(numbers, size, timeout, **variables):
    """The commands of these ranks; with ``port`` they meet at an address, without by name."""
    return [(worker(timeout, "init"), clean_environment(RANK=n, WORLD_SIZE=size, **variables)) for n in numbers]


def at_port(port):
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


WAYS = pytest.mark.parametrize("way", ["by name", "at an address"])


def variables(way):
    return at_port(free_port()) if way == "at an address" else {}


@WAYS
def test_a_rank_that_never_comes(way):
    results = run(*ranks((0, 2), 4, 2, **variables(way)), results=2, succeed=False)
    for result in results:
        assert result["error"] == "CollectiveTimeout" and result["peers"] == [1, 3]
        assert re.search("ranks 1(, | and )3 ", result["text"]) and result["seconds"] < 2 + SLACK_S


@WAYS
def test_two_ranks_with_one_number(way):
    results = run(*ranks((0, 1, 1), 3, 20, **variables(way)), results=3, succeed=False)
    for result in results:
        assert result["error"] == "InvalidUsage", result
        assert re.search("two processes .* rank.* 1 ?[:(]", result["text"]) and result["seconds"] < SLACK_S


@WAYS
def test_two_ranks_0(way):
    results = run(*ranks((0, 0, 1), 3, 20, **variables(way)), results=3, succeed=False)
    for result in results:
        assert result["error"] == "InvalidUsage", result
        assert re.search("two processes .* rank.* 0 ?[:(]", result["text"]) and result["seconds"] < SLACK_S


def test_nobody_is_rank_0():
    port = free_port()
    results = run(*ranks((1,), 2, 2, **at_port(port)), results=1, succeed=False)
    assert results[0]["error"] == "CollectiveTimeout" and results[0]["peers"] == [0]
    assert f"127.0.0.1:{port}" in results[0]["text"] and results[0]["seconds"] < 2 + SLACK_S


def test_a_port_in_use():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        results = run(*ranks((0, 1), 2, 2, **at_port(port)), results=2, succeed=False)
    assert sorted(result["error"] for result in results) == ["CollectiveTimeout", "TransportError"]
    for result in results:
        assert f"127.0.0.1:{port}" in result["text"] and result["seconds"] < 2 + SLACK_S


def test_the_address_is_missing_where_several_machines_need_it():
    env = {"OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": 0}
    command = worker(20, "init"), clean_environment(OMPI_COMM_WORLD_RANK=0, **env)
    (result,) = run(command, results=1, succeed=False)
    assert result["error"] == "InvalidArgument" and "MASTER_ADDR is missing" in result["text"]
    assert result["seconds"] < SLACK_S


def test_variables_that_contradict_each_other():
    env = clean_environment(RANK=0, WORLD_SIZE=2, PMI_RANK=1, PMI_SIZE=2)
    (result,) = run((worker(20, "init"), env), results=1, succeed=False)
    assert result["error"] == "InvalidArgument" and "PMI_RANK=1" in result["text"]


def test_sizes_that_differ():
    port = free_port()
    commands = ranks((0,), 2, 2, **at_port(port)) + ranks((1,), 3, 2, **at_port(port))
    results = run(*commands, results=2, succeed=False)
    assert any("same number of ranks" in result["text"] for result in results)
    assert all("error" in result for result in results)


@WAYS
def test_ctrl_c_ends_the_wait(way):
    with started(*ranks((0,), 2, 60, **variables(way))) as running:
        process, out = running[0]
        wait_until_it_waits(out)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        results, codes, output = finish(running, 15)
    assert results and results[0]["error"] == "KeyboardInterrupt", output
    assert codes == [1] and time.monotonic() - began < 5


def wait_until_it_waits(out):
    """Until the process that writes to this file waits for the others, most likely."""
    until = time.monotonic() + 40
    while time.monotonic() < until:
        if b"BEGUN" in os.pread(out.fileno(), 1000, 0):
            time.sleep(1)
            return
        time.sleep(0.05)
    raise AssertionError("the rank never began to wait")
