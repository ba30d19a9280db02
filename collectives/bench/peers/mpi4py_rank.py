"""One rank of an MPI job that the bench measures through mpi4py.

    python -m collectives.bench.peers.mpi4py_rank SOCKET    # the name of an abstract Unix socket

It waits, asleep, for commands while others are measured, and ends with the bench.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import traceback
from functools import partial

import torch

from ..buffers import Buffers
from ..cases import Case, Layout
from ..implementation import InProcessImplementation
from .mpi_protocol import (
    CHECK,
    COMMAND,
    HELLO,
    PREPARE,
    RELEASE,
    STOP,
    TURN,
    mpi_layout,
    receive,
    receive_case,
    receive_plan,
)

__all__ = ["Mpi4pyRank", "main"]


class Mpi4pyRank(InProcessImplementation):
    """mpi4py's communicator, whose upper-case methods are called on NumPy arrays."""

    def __init__(self, mpi, comm):
        super().__init__(comm.rank)
        self.mpi = mpi  # mpi4py.MPI
        self.comm = comm

    def layout(self, case: Case, in_place: bool) -> Layout:
        return mpi_layout(case, self.rank, in_place)

    def barrier(self) -> None:
        self.comm.Barrier()

    def make_call(self, case: Case, buffers: Buffers):
        comm, name, root, at_root = self.comm, case.op.name, case.root, self.rank == case.root
        send, recv = buffers.send.numpy(), buffers.recv.numpy()
        first = self.mpi.IN_PLACE if buffers.in_place else send
        op = getattr(self.mpi, case.redop.upper()) if case.redop else None
        if name == "all_reduce":
            return partial(comm.Allreduce, first, recv, op)
        if name == "reduce":  # in place only the root has a result
            send, recv = (first, recv) if at_root else (send, None)
            return partial(comm.Reduce, send, recv, op, root)
        if name == "reduce_scatter":
            return partial(comm.Reduce_scatter_block, first, send if buffers.in_place else recv, op)
        if name == "all_gather":
            return partial(comm.Allgather, first, recv)
        if name == "all_to_all":
            return partial(comm.Alltoall, send, recv)
        if name == "broadcast":
            return partial(comm.Bcast, recv, root)
        if name == "gather":
            return partial(comm.Gather, first, recv, root) if at_root else partial(comm.Gather, send, None, root)
        if name == "scatter":
            into = self.mpi.IN_PLACE if buffers.in_place else recv
            return partial(comm.Scatter, send, into, root) if at_root else partial(comm.Scatter, None, recv, root)
        after, before = (self.rank + 1) % comm.size, (self.rank - 1) % comm.size
        return partial(comm.Sendrecv, send, after, recvbuf=recv, source=before)


def serve(channel: socket.socket, implementation: InProcessImplementation) -> None:
    """Carry out commands until STOP. Raises ConnectionResetError where the bench has ended."""
    while True:
        what, *_ = COMMAND.unpack(receive(channel, COMMAND.size))
        answer = 0
        if what == STOP:
            return
        if what == PREPARE:
            implementation.prepare(*receive_case(channel))
        elif what == TURN:
            (times,) = implementation.turn(receive_plan(channel))
            channel.sendall(struct.pack(f"@{len(times)}d", *times))
            continue
        elif what == CHECK:
            (answer,) = implementation.check()
        elif what == RELEASE:
            implementation.release()
        channel.sendall(struct.pack("@q", answer))


def main(argv: list[str] | None = None) -> int:
    """Connect, and carry out commands; return the exit code.

    ``argv``: arguments; default: the command line's.
    """
    (name,) = sys.argv[1:] if argv is None else argv
    torch.set_num_threads(1)
    from mpi4py import MPI  # which loads an MPI and starts it

    comm = MPI.COMM_WORLD
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect("\0" + name)
        version = MPI.Get_library_version().encode()[:255]
        channel.sendall(HELLO.pack(comm.rank, comm.size, version))
        try:
            serve(channel, Mpi4pyRank(MPI, comm))
        except BaseException as error:  # MPI_Finalize would wait for ranks that wait for this one
            if not isinstance(error, OSError):
                # The bench shows the start of the output.
                print(f"rank {comm.rank}: {type(error).__name__}: {error}", file=sys.stderr)
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
