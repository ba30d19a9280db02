"""Calls that can't be carried out, for their arguments, or since the communicator has ended."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage
from tests.conformance.cases import Case, run_cases
from tests.conformance.worlds import check
from tests.ranks import run_ranks

F32, SUM = 7, 0


def refused(calls: dict, errors, words=()) -> list[str]:
    """Each call must raise one of ``errors`` with a text that holds the words."""
    found = []
    for name, call in calls.items():
        try:
            call()
        except errors as error:
            text = str(error).lower()
            missing = [word for word in words if word not in text]
            if missing or not error.message:
                found.append(f"{name}: the error lacks {missing}: {error}")
        except Exception as error:
            found.append(f"{name}: raised {error!r}")
        else:
            found.append(f"{name}: was accepted")
    return found


def wrong_arguments(ctx):
    """Wrong on every rank alike: refused before anything is sent, and the communicator works on."""
    comm, n = ctx.comm(), ctx.size
    x, y = np.ones(64, np.float32), np.ones(64 * n, np.float32)
    a, b = x.ctypes.data, y.ctypes.data
    calls = {
        "dtype past the end": lambda: comm.all_reduce(a, a, 8, 12, SUM),
        "negative dtype": lambda: comm.all_reduce(a, a, 8, -1, SUM),
        "op that was never made": lambda: comm.all_reduce(a, a, 8, F32, 77),
        "negative op": lambda: comm.all_reduce(a, a, 8, F32, -1),
        "root past the end": lambda: comm.broadcast(a, a, 8, F32, n),
        "negative root": lambda: comm.reduce(a, a, 8, F32, SUM, -1),
        "peer past the end": lambda: comm.send(a, 8, F32, n),
        "negative peer": lambda: comm.recv(a, 8, F32, -1),
        "NULL send buffer": lambda: comm.all_reduce(0, a, 8, F32, SUM),
        "NULL receive buffer": lambda: comm.all_reduce(a, 0, 8, F32, SUM),
        "NULL in all_gather": lambda: comm.all_gather(a, 0, 8, F32),
        "NULL in reduce_scatter": lambda: comm.reduce_scatter(0, a, 8, F32, SUM),
        "NULL in all_to_all": lambda: comm.all_to_all(b, 0, 8, F32),
        "bytes past what an address can be": lambda: comm.all_reduce(a, a, 1 << 62, F32, SUM),
        "pieces past what an address can be": lambda: comm.all_gather(a, b, (1 << 61) + 1, F32),
        "premul of a wrong dtype": lambda: comm.create_premul_sum(1.0, 55),
        "an op destroyed that was never made": lambda: comm.destroy_op(99),
        "a built-in op destroyed": lambda: comm.destroy_op(SUM),
    }
    found = refused(calls, InvalidArgument)
    premul = comm.create_premul_sum(2.0, F32)
    found += refused({"premul used with another dtype": lambda: comm.all_reduce(a, a, 8, 8, premul)}, InvalidArgument)
    comm.destroy_op(premul)
    found += refused({"premul after its end": lambda: comm.all_reduce(a, a, 8, F32, premul)}, InvalidArgument)
    ctx.barrier()
    return found + run_cases(ctx, [Case("all_reduce", "float32", 10)])


def bad_arguments_of_init(ctx):
    library = ctx.library
    good = library.get_unique_id()
    calls = {
        "rank past the end": lambda: library.comm_init_rank(2, good, 2),
        "negative rank": lambda: library.comm_init_rank(2, good, -1),
        "no ranks": lambda: library.comm_init_rank(0, good, 0),
    }
    found = refused(calls, InvalidArgument)
    calls = {
        "garbage id": lambda: library.comm_init_rank(1, b"\x5a" * 128, 0),
        "id of zeros": lambda: library.comm_init_rank(1, bytes(128), 0),
        "more ranks than there can be": lambda: library.comm_init_rank(1 << 20, good, 0),
    }
    return found + refused(calls, CollectivesError)


def after_the_end(ctx):
    x, found = np.ones(4, np.float32), []
    for end in ("destroy", "abort"):
        comm = ctx.new_comm()
        getattr(comm, end)()
        calls = {
            "all_reduce": lambda c=comm: c.all_reduce(x.ctypes.data, x.ctypes.data, 4, F32, SUM),
            "split": lambda c=comm: c.split(0, 0),
            "async_error": lambda c=comm: c.async_error(),
            "register": lambda c=comm: c.register(x.ctypes.data, 16),
        }
        found += refused(calls, InvalidUsage, ["closed"])
        for again in (comm.destroy, comm.abort):
            with contextlib.suppress(InvalidUsage):
                again()
    return found


def refused_variable(ctx, text):
    with pytest.raises(InvalidArgument, match=text):
        ctx.comm()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("COLLECTIVES_ISA", "sse9", "COLLECTIVES_ISA=sse9: this machine has baseline"),
        ("COLLECTIVES_HOST_CHUNK", "256k", "COLLECTIVES_HOST_CHUNK=256k: must be a number of bytes"),
    ],
)
def test_variables_that_the_engine_does_not_take(name, value, text):
    run_ranks(refused_variable, 1, text, env={name: value})


PROGRAMS = [
    (wrong_arguments, 1), (wrong_arguments, 3), (bad_arguments_of_init, 1), (after_the_end, 1), (after_the_end, 2),
]  # fmt: skip


@pytest.mark.parametrize(("program", "n"), PROGRAMS, ids=lambda value: getattr(value, "__name__", None))
def test_refusals(program, n):
    check(program, "host", n)
