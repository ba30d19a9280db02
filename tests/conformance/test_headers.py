"""Headers of sends on the host engine: the receiver reads them before it receives."""

import threading

import numpy as np
import pytest

from tests.ranks import run_ranks

F32 = 7


def read(ctx):
    """Headers of short and long sends, in order; none is all zeros; a peek takes nothing."""
    comm, headers = ctx.new_comm(), [(1, -7, 2**40, 3), (2, 0, 0, -1), None]
    arrays = [np.full(count, 1.0 + count, np.float32) for count in (4, 300_000, 0)]
    if ctx.rank == 0:
        for header, array in zip(headers, arrays, strict=True):
            if header is not None:
                comm.set_header(*header)
            comm.send(array.ctypes.data, array.size, F32, 1)
    else:
        for header, array in zip(headers, arrays, strict=True):
            assert [comm.peek(0) for _ in range(2)] == [header or (0, 0, 0, 0)] * 2
            got = np.zeros_like(array)
            comm.recv(got.ctypes.data, got.size, F32, 0)
            assert (got == array).all()
    comm.abort()
    return True


def test_headers():
    assert all(run_ranks(read, 2))


def waited(ctx):
    """A wait past the time limit ends nothing; an abort ends a wait; a rank that has left is named."""
    from collectives.errors import Aborted, CollectiveTimeout, InvalidArgument, RemoteError

    comm, other = ctx.new_comm(), ctx.new_comm()
    x = np.full(4, float(ctx.rank), np.float32)
    if ctx.rank == 0:
        comm.set_timeout(0.2)
        with pytest.raises(CollectiveTimeout) as caught:
            comm.peek(1)
        assert caught.value.peers == (1,)
        comm.set_timeout(None)
        with pytest.raises(InvalidArgument):
            comm.peek(0)
        with pytest.raises(InvalidArgument):
            comm.peek(2)
        raised = []

        def wait():
            try:
                other.peek(1)
            except Aborted as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while other.pending() is None:
            pass
        assert other.pending().peers == (1,)
        other.abort()
        thread.join()
        assert len(raised) == 1
        ctx.barrier()
        assert comm.peek(1) == (1, 2, 3, 4)
        comm.recv(x.ctypes.data, 4, F32, 1)
        assert (x == 1).all()
        with pytest.raises(RemoteError) as caught:
            comm.peek(1)
        assert caught.value.peers == (1,)
    else:
        ctx.barrier()
        other.abort()
        comm.set_header(1, 2, 3, 4)
        comm.send(x.ctypes.data, 4, F32, 0)
    comm.abort()
    return True


def test_waits():
    assert all(run_ranks(waited, 2))
