"""Planted errors: with one of the package's waits left out, the checker reports what goes wrong."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.gpu import test_buckets, test_communicator, test_horovod, test_sharded
from tests.gpu.devices import Rank
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation

pytestmark = needs_simulation


def offloaded(rank):
    test_sharded.trained(rank, "offload")


WAIT = "torch.cuda.Stream.wait_stream"
# What is left out, the program, and the kind and the words of a report.
PLANTED = [
    ("torch.Tensor.record_stream", test_horovod.handles, "freed", "is freed"),
    (WAIT, test_communicator.algorithms, "race", "nccl recv"),
    (WAIT, test_buckets.trained_on_two_streams, "race", "pack"),
    ("torch.cuda.Event.synchronize", offloaded, "race", "pinned memory"),
]


def reports_without(ctx, name, program):
    from tests.streams import running

    with mock.patch(name, lambda *arguments: None):
        program(Rank(ctx, "simulated"))
    return [(each.kind, each.text) for each in running.take()]


@pytest.mark.parametrize(("name", "program", "kind", "words"), PLANTED, ids=[each[1].__name__ for each in PLANTED])
def test_a_wait_that_is_left_out_is_reported(name, program, kind, words):
    for found in run_ranks(reports_without, 2, name, program, device="simulated"):
        assert any(each == kind and words in text for each, text in found), found
