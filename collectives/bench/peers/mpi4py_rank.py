"""One rank of an MPI job that the bench measures through mpi4py.

    python -m collectives.bench.peers.mpi4py_rank SOCKET    # the name of an abstract Unix socket

It waits, asleep, for calls while others are measured, and ends with the bench.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import torch

from ..buffers import Buffers
from ..cases import Case, Layout
from ..implementation import InProcessImplementation, Unsupported

__all__ = ["Mpi4pyRank", "main"]

_TYPES = "int8 uint8 int32 uint32 int64 uint64 float32 float64".split()
_REDUCTIONS = ("sum", "prod", "max", "min")


class Mpi4pyRank(InProcessImplementation):
    """mpi4py's communicator, whose upper-case methods are called on NumPy arrays.

    torch tensors, which mpi4py reads by DLPack, would take 10 us more a call.
    """

    def __init__(self, mpi, comm):
        super().__init__(comm.rank)
        self.mpi = mpi  # mpi4py.MPI
        self.comm = comm

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        if not in_place and case.op.name == "broadcast":
            return "MPI_Bcast is in place only"
        if case.kind.name not in _TYPES:
            return f"MPI has no {case.kind.name}"
        if case.redop is not None and case.redop not in _REDUCTIONS:
            return f"MPI has no reduction {case.redop!r}"
        return "mpi4py's counts are ints" if case.count >= 2**31 else None

    def layout(self, case: Case, in_place: bool) -> Layout:
        """Return where MPI has a rank's arrays: MPI_Reduce_scatter_block in place leaves the part at the start."""
        layout = case.layout(self.rank)
        return dataclasses.replace(layout, recv_at=0) if in_place and case.op.name == "reduce_scatter" else layout

    def barrier(self) -> None:
        self.comm.Barrier()

    def make_call(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        comm, name, root, at_root = self.comm, case.op.name, case.root, self.rank == case.root
        send, recv = buffers.send.numpy(), buffers.recv.numpy()
        first = self.mpi.IN_PLACE if buffers.in_place else send
        op = getattr(self.mpi, case.redop.upper()) if case.redop else None
        after, before = (self.rank + 1) % comm.size, (self.rank - 1) % comm.size
        # In place only the root has a result of a reduce and a gather, and only the root sends in a scatter.
        if at_root:
            rooted = {
                "reduce": partial(comm.Reduce, first, recv, op, root),
                "gather": partial(comm.Gather, first, recv, root),
                "scatter": partial(comm.Scatter, send, self.mpi.IN_PLACE if buffers.in_place else recv, root),
            }
        else:
            rooted = {
                "reduce": partial(comm.Reduce, send, None, op, root),
                "gather": partial(comm.Gather, send, None, root),
                "scatter": partial(comm.Scatter, None, recv, root),
            }
        return (rooted | {
            "all_reduce": partial(comm.Allreduce, first, recv, op),
            "reduce_scatter": partial(comm.Reduce_scatter_block, first, send if buffers.in_place else recv, op),
            "all_gather": partial(comm.Allgather, first, recv),
            "all_to_all": partial(comm.Alltoall, send, recv),
            "broadcast": partial(comm.Bcast, recv, root),
            "sendrecv": partial(comm.Sendrecv, send, after, recvbuf=recv, source=before),
        })[name]  # fmt: skip


def serve(connection: Connection, implementation: InProcessImplementation) -> None:
    """Make the calls that the bench sends until it sends "stop". Raises EOFError where it has ended."""
    while True:
        method, arguments = connection.recv()
        if method == "stop":
            return
        try:
            result = getattr(implementation, method)(*arguments)
        except Unsupported as error:
            result = error
        connection.send(result)


def main(argv: list[str] | None = None) -> int:
    """Connect, and make calls; return the exit code.

    ``argv``: arguments; default: the command line's.
    """
    (address,) = sys.argv[1:] if argv is None else argv
    torch.set_num_threads(1)
    from mpi4py import MPI  # which loads an MPI and starts it

    comm = MPI.COMM_WORLD
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect("\0" + address)
        connection = Connection(channel.detach())
    connection.send((comm.rank, comm.size, MPI.Get_library_version()))
    try:
        serve(connection, Mpi4pyRank(MPI, comm))
    except BaseException as error:  # MPI_Finalize would wait for ranks that wait for this one
        if not isinstance(error, OSError | EOFError):
            # The bench shows the start of the output.
            print(f"rank {comm.rank}: {type(error).__name__}: {error}", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
