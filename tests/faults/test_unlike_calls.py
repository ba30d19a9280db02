"""Unlike calls that C alone can't tell apart: dtypes that travel as bytes, barriers; and splits beside collectives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import run_ranks


def odd_and_others(ctx, odd, others):
    """Make one call on rank 0 and another on the rest; give this rank's error, and go on with the same communicator."""
    import torch

    from collectives.errors import CollectivesError

    comm = ctx.communicator()
    calls = {
        "int16": lambda: comm.broadcast(torch.zeros(4, dtype=torch.int16)),
        "uint8": lambda: comm.broadcast(torch.zeros(8, dtype=torch.uint8)),
        "complex64": lambda: comm.broadcast(torch.zeros(1, dtype=torch.complex64)),
        "datetime": lambda: comm.broadcast(np.zeros(1, dtype="datetime64[s]")),
        "barrier": comm.barrier,
        "empty": lambda: comm.all_reduce(torch.zeros(0, dtype=torch.uint8)),
        "bool sent": lambda: comm.send(torch.zeros(4, dtype=torch.bool), 1),
        "int8 received": lambda: comm.recv(torch.zeros(4, dtype=torch.int8), 0),
        "group": lambda: in_group(comm, torch.int16),
        "another group": lambda: in_group(comm, torch.uint16),
    }
    try:
        calls[odd if ctx.rank == 0 else others]()
        error = None
    except CollectivesError as raised:
        error = (type(raised).__name__, raised.op, str(raised))
    total = torch.ones(3)
    comm.all_reduce(total)
    assert total.tolist() == [comm.size] * 3
    comm.barrier()
    return error


def in_group(comm, dtype):
    import torch

    with comm.group():
        comm.broadcast(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize(
    ("odd", "others", "ops", "words"),
    [
        ("int16", "uint8", {"broadcast"}, ["int16", "dtype=uint8"]),
        ("complex64", "int16", {"broadcast"}, ["complex64", "int16"]),
        ("datetime", "int16", {"broadcast"}, ["datetime64[s]", "int16"]),
        ("barrier", "empty", {"barrier", "all_reduce"}, ["barrier", "ncclAllReduce"]),
        ("group", "another group", {"broadcast"}, ["int16", "uint16"]),
        ("bool sent", "int8 received", {"send", "recv"}, ["bool", "int8"]),
    ],
)
def test_unlike_calls(odd, others, ops, words):
    for name, op, text in run_ranks(odd_and_others, 2, odd, others):
        assert name == "Mismatch"
        assert op in ops
        assert all(word in text for word in words), text


@pytest.mark.parametrize("same", ["int16", "complex64", "datetime", "barrier", "group"])
def test_like_calls(same):
    assert run_ranks(odd_and_others, 2, same, same) == [None, None]


def split_beside(ctx):
    import torch

    from collectives.errors import CollectivesError

    comm = ctx.new_communicator()
    try:
        if ctx.rank == 0:
            comm.split(0)
        else:
            comm.all_reduce(torch.zeros(3))
        return None
    except CollectivesError as error:
        return type(error).__name__, error.peers, str(error)
    finally:
        comm.abort()


def test_split_beside_a_collective():
    """Nobody waits for the time limit; the communicator is out of use after it."""
    first, second = run_ranks(split_beside, 2, timeout=30)
    assert "Mismatch" in (first[0], second[0])
    assert {first[0], second[0]} <= {"Mismatch", "RemoteError"}
