"""ncclMemAlloc, registration of buffers and windows, and accounting of the engine's memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from collectives.errors import CollectivesError
from tests.conformance.worlds import check

F32, SUM, AVG = 7, 0, 4


def view(address: int, count: int, ctype=ctypes.c_float) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctype)), (count,))


def allocate_and_reduce(ctx):
    """Buffers of the engine's own memory give the same bits as ordinary ones, at any place inside them."""
    library, comm = ctx.library, ctx.comm()
    found = []
    for nbytes in (1, 4096, 1 << 20, (5 << 20) + 12):
        address = library.mem_alloc(nbytes)
        if address == 0 or address % 64:
            found.append(f"mem_alloc({nbytes}) gave {address:#x}")
        bytes_ = view(address, nbytes, ctypes.c_uint8)
        bytes_[:] = ctx.rank + 1
        if bytes_[-1] != ctx.rank + 1:
            found.append("memory does not keep what is written")
        library.mem_free(address)
    count = 100_003
    send, recv = library.mem_alloc(count * 4 + 64), library.mem_alloc(count * 4 + 64)
    for shift in (0, 1, 7):
        a, b = view(send + 4 * shift, count), view(recv + 4 * shift, count)
        a[:] = np.arange(count, dtype=np.float32) * (ctx.rank + 1)
        want = np.arange(count, dtype=np.float32)
        total = want.copy()
        for r in range(1, ctx.size):
            total += want * np.float32(r + 1)
        comm.all_reduce(send + 4 * shift, recv + 4 * shift, count, F32, SUM)
        if not np.array_equal(b, total):
            found.append(f"out of place, shift {shift}")
        comm.all_reduce(send + 4 * shift, send + 4 * shift, count, F32, SUM)
        if not np.array_equal(a, total):
            found.append(f"in place, shift {shift}")
        plain = np.zeros(count, np.float32)
        b[:] = ctx.rank + 1  # one side from the engine's memory, the other ordinary
        comm.all_reduce(recv + 4 * shift, plain.ctypes.data, count, F32, AVG)
        if not np.allclose(plain, (ctx.size + 1) / 2):
            found.append(f"mixed, shift {shift}")
    library.mem_free(send)
    library.mem_free(recv)
    return found


@pytest.mark.parametrize("n", [1, 3])
def test_memory_of_the_engine(n):
    check(allocate_and_reduce, "host", n)


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
    good = during - before >= 3 << 20 and after == before
    return [] if good else [f"bytes in use: {before}, {during} with 3 MiB more, {after} at the end"]


def test_memory_in_use():
    check(accounted, "host", 1)


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


@pytest.mark.parametrize("n", [1, 3])
def test_registered_buffers(n):
    check(registered, "host", n)
