"""What a type checker says of a user's program, and that the types are those of the values that are taken."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from collectives import Communicator, argument_types
from collectives._nccl import OPS
from collectives.gradients.options import HookOptions
from collectives.layout import WIRE_FORMATS

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = "all_reduce reduce reduce_scatter all_gather broadcast all_to_all gather scatter send recv".split()
# A line that ends with "# wrong" has an error of its own, and no other line has one.
PROGRAM = """
from typing import assert_type

import torch
from torch import nn

import collectives
from collectives import sharded


def main(flag: bool) -> None:
    comm = collectives.init(timeout=5.0)
    t = torch.ones(4)
    assert_type(comm.all_reduce(t, async_op=True), collectives.Work)
    assert_type(comm.all_reduce(t, op=0.5), None)
    assert_type(comm.broadcast(t, async_op=flag), collectives.Work | None)
    assert_type(comm.rank, int)
    assert_type(comm.engine.name, str)
    assert_type(comm.device, torch.device)
    assert_type(comm.split(0), collectives.Communicator | None)
    net = nn.Linear(2, 2)
    assert_type(sharded.fully_shard(net), nn.Linear)
    assert_type(sharded.fully_shard([net]), list[nn.Linear])
    assert_type(collectives.horovod.rank(), int)
    collectives.HookState(wire="bf16", max_norm=1.0, grad_scaler=False)
    collectives.GradientBuckets(net.parameters(), wire="int8", block=128)
    comm.all_reduce(t).wait()  # wrong
    comm.all_reduce(t, op="mean")  # wrong
    comm.all_gather(t, t, algorithm="tree")  # wrong
    comm.rank = "0"  # wrong
    collectives.init("hosts")  # wrong
    collectives.HookState(wire="bf17")  # wrong
    collectives.HookState(max_norn=1.0)  # wrong
    collectives.GradientBuckets(net.parameters(), wire="int4")  # wrong
    sharded.fully_shard(net, reshard_after_forwards=False)  # wrong
"""


def test_the_literals_are_the_values_that_are_taken():
    def values(name):
        return set(typing.get_args(getattr(argument_types, name)))

    assert values("Wire") == {"fp32", *WIRE_FORMATS} and values("Compressed") == set(WIRE_FORMATS)
    assert set(typing.get_args(typing.get_args(argument_types.Op)[0])) == set(OPS)
    fields = [field.name for field in dataclasses.fields(HookOptions)]
    assert list(argument_types.HookArguments.__annotations__) == fields


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads came with Python 3.11")
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_overloads_have_the_arguments_of_the_method(name):
    method = getattr(Communicator, name)
    arguments = list(inspect.signature(method).parameters)
    overloads = typing.get_overloads(getattr(method, "__wrapped__", method))
    assert [list(inspect.signature(each).parameters) for each in overloads] == [arguments] * 3


@pytest.mark.thorough
@pytest.mark.slow
def test_a_users_program(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: it is in the group `test`")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "--python-version", "3.11"]
    done = subprocess.run(
        [*command, "--cache-dir", tmp_path / "cache", program], capture_output=True, text=True, timeout=500,
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    found = {int(line) for line in re.findall(r"^program\.py:(\d+): error", done.stdout, re.MULTILINE)}
    wrong = {number for number, line in enumerate(PROGRAM.split("\n"), 1) if line.endswith("# wrong")}
    assert found == wrong and wrong, done.stdout + done.stderr
