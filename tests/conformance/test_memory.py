"""ncclMemAlloc, registration of buffers and windows, and accounting of the engine's memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from collectives.errors import CollectivesError
from tests.conformance.worlds import check

F32, SUM = 7, 0


def view(address: int, count: int, ctype=ctypes.c_float) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctype)), (count,))


def accounted(ctx):
    library = ctx.library
    before = library.memory_in_use()
    address = library.mem_alloc(3 << 20)
    during = library.memory_in_use()
    library.mem_free(address)
    after = library.memory_in_use()
    with pytest.raises(CollectivesError):  # it was not allocated
        library.mem_free(np.zeros(64, np.uint8).ctypes.data)
    library.mem_free(0)  # NULL is nothing, as with free()
    for nbytes in (1, 4096, 1 << 20, (5 << 20) + 12):
        address = library.mem_alloc(nbytes)
        assert address and address % 64 == 0, address
        view(address, nbytes, ctypes.c_uint8)[:] = 1
        library.mem_free(address)
    good = during - before >= 3 << 20 and after == before
    return [] if good else [f"bytes in use: {before}, {during} with 3 MiB more, {after} at the end"]


def registered(ctx):
    """Buffers and windows: the sums are the same while they are registered and afterwards."""
    comm, library = ctx.comm(), ctx.library
    count = 70_000
    ordinary = np.full(count, ctx.rank + 1.0, np.float32)
    own = library.mem_alloc(count * 4)
    view(own, count)[:] = ctx.rank + 1.0
    want = ctx.size * (ctx.size + 1) / 2
    found = []
    for address in (ordinary.ctypes.data, own):
        for begin, end in (
            (comm.register, comm.deregister),
            (comm.window_register, comm.window_deregister),
        ):
            view(address, count)[:] = ctx.rank + 1.0
            handle = begin(address, count * 4)
            comm.all_reduce(address, address, count, F32, SUM)
            end(handle)
            if not np.all(view(address, count) == want):
                found.append("registered buffer: wrong sum")
            comm.all_reduce(address, address, count, F32, 2)  # also afterwards
    handle = comm.register(own, 256)
    comm.deregister(handle)
    with pytest.raises(CollectivesError):
        comm.deregister(handle)
    library.mem_free(own)
    return found


PROGRAMS = [
    (accounted, 1), (registered, 1), (registered, 3),
]  # fmt: skip


@pytest.mark.parametrize(("program", "n"), PROGRAMS, ids=lambda value: getattr(value, "__name__", None))
def test_memory(program, n):
    check(program, "host", n)
