"""Unlike calls that C alone can't tell apart: dtypes that travel as bytes, barriers; and splits beside collectives."""

from __future__ import annotations

import numpy as np
import torch

from tests.ranks import run_ranks

# The calls of rank 0 and of the others, the operations of which the errors are, and words that they have.
UNLIKE = [
    ("int16", "uint8", {"broadcast"}, ["int16", "dtype=uint8"]),
    ("complex64", "int16", {"broadcast"}, ["complex64", "int16"]),
    ("datetime", "int16", {"broadcast"}, ["datetime64[s]", "int16"]),
    ("barrier", "empty", {"barrier", "all_reduce"}, ["barrier", "ncclAllReduce"]),
    ("group", "another group", {"broadcast"}, ["int16", "uint16"]),
    ("bool sent", "int8 received", {"send", "recv"}, ["bool", "int8"]),
]
LIKE = ("int16", "complex64", "datetime", "barrier", "group")


def odd_and_others(ctx, pairs):
    """Make one call on rank 0 and another on the rest, and go on with the communicator; give this rank's errors."""
    from collectives.errors import CollectivesError

    comm, found = ctx.communicator(), []

    def in_group(dtype):
        with comm.group():
            comm.broadcast(torch.zeros(3, dtype=dtype))

    calls = {
        "int16": lambda: comm.broadcast(torch.zeros(4, dtype=torch.int16)),
        "uint8": lambda: comm.broadcast(torch.zeros(8, dtype=torch.uint8)),
        "complex64": lambda: comm.broadcast(torch.zeros(1, dtype=torch.complex64)),
        "datetime": lambda: comm.broadcast(np.zeros(1, dtype="datetime64[s]")),
        "barrier": comm.barrier,
        "empty": lambda: comm.all_reduce(torch.zeros(0, dtype=torch.uint8)),
        "bool sent": lambda: comm.send(torch.zeros(4, dtype=torch.bool), 1),
        "int8 received": lambda: comm.recv(torch.zeros(4, dtype=torch.int8), 0),
        "group": lambda: in_group(torch.int16),
        "another group": lambda: in_group(torch.uint16),
    }
    for odd, others in pairs:
        try:
            calls[odd if ctx.rank == 0 else others]()
            found.append(None)
        except CollectivesError as raised:
            found.append((type(raised).__name__, raised.op, str(raised)))
        total = torch.ones(3)
        comm.all_reduce(total)
        assert total.tolist() == [comm.size] * 3
        comm.barrier()
    return found


def test_unlike_and_like_calls():
    pairs = [*(row[:2] for row in UNLIKE), *((same, same) for same in LIKE)]
    for found in run_ranks(odd_and_others, 2, pairs):
        assert found[len(UNLIKE) :] == [None] * len(LIKE)
        for (name, op, text), (*_, ops, words) in zip(found, UNLIKE, strict=False):
            assert name == "Mismatch"
            assert op in ops
            assert all(word in text for word in words), text


def split_beside(ctx):
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
