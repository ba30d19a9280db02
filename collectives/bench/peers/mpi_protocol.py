"""Messages between the bench and the ranks of an MPI's job, which are mpi_loop.c or `mpi4py_rank`.

A rank connects, and says which one it is (`HELLO`). Then it gets commands (`COMMAND`) and answers
each: a turn with the time of each batch in us (doubles), all others with one int64. What follows a
command: after PREPARE the data's patterns, to mpi_loop.c, or the case as JSON after its length, to
`mpi4py_rank`; after TURN the plan.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct

from ..cases import OPS, TYPES, Case, Layout
from ..implementation import Plan

__all__ = [
    "CHECK", "COMMAND", "HELLO", "PREPARE", "RELEASE", "STOP", "TURN", "encode_case", "encode_command", "encode_plan",
    "mpi_layout", "receive", "receive_case", "receive_plan",
]  # fmt: skip

STOP, PREPARE, TURN, CHECK, RELEASE = range(5)
HELLO = struct.Struct("@2i256s")  # rank, number of ranks, the library's version
COMMAND = struct.Struct("@7i8q")  # mpi_loop.c's struct command
_PLAN = struct.Struct("@4q")  # its struct plan
_LENGTH = struct.Struct("@q")


def receive(channel: socket.socket, n: int) -> bytes:
    """Receive n bytes. Raises ConnectionResetError where the other side has ended."""
    data = bytearray()
    while len(data) < n:
        part = channel.recv(n - len(data))
        if not part:
            raise ConnectionResetError("the other side has ended")
        data += part
    return bytes(data)


def encode_command(what: int) -> bytes:
    """Return a command that needs no numbers."""
    return COMMAND.pack(what, *[0] * 14)


def encode_plan(plan: Plan) -> bytes:
    return _PLAN.pack(plan.warmup, plan.calls, plan.batches, plan.fresh)


def receive_plan(channel: socket.socket) -> Plan:
    warmup, calls, batches, fresh = _PLAN.unpack(receive(channel, _PLAN.size))
    return Plan(warmup, calls, batches, fresh=bool(fresh))


def encode_case(case: Case, in_place: bool, arrays: int) -> bytes:
    values = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    values |= {"op": case.op.name, "kind": case.kind.name}
    text = json.dumps([values, in_place, arrays]).encode()
    return _LENGTH.pack(len(text)) + text


def receive_case(channel: socket.socket) -> tuple[Case, bool, int]:
    """Receive what `encode_case` made: the case, whether it is in place, and how many arrays."""
    (length,) = _LENGTH.unpack(receive(channel, _LENGTH.size))
    values, in_place, arrays = json.loads(receive(channel, length))
    return Case(**values | {"op": OPS[values["op"]], "kind": TYPES[values["kind"]]}), in_place, arrays


def mpi_layout(case: Case, rank: int, in_place: bool) -> Layout:
    """Return where MPI has a rank's arrays.

    MPI_Reduce_scatter_block in place leaves the part at the start of the buffer, NCCL at part
    ``rank``.
    """
    layout = case.layout(rank)
    return dataclasses.replace(layout, recv_at=0) if in_place and case.op.name == "reduce_scatter" else layout
