"""Calls that can't be carried out, for their arguments; and facts about the library."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.conformance.worlds import check

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
    from collectives.errors import InvalidArgument

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


@pytest.mark.parametrize("n", [1, 3])
def test_wrong_arguments(n):
    check(wrong_arguments, "host", n)


def library_facts(ctx):
    library = ctx.library
    found = []
    if library.version < 23000 or not library.is_host:
        found.append(f"version {library.version}, host {library.is_host}")
    comm = ctx.comm()
    before = comm.sequence()
    run_cases(ctx, [Case("all_reduce", "float32", 10), Case("all_gather", "float32", 10)])
    if comm.sequence() != before + 2:
        found.append(f"two collectives moved the sequence number from {before} to {comm.sequence()}")
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_facts_about_the_library(n):
    check(library_facts, "host", n)
