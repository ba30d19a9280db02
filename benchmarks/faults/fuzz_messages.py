"""Fuzzing of the messages between ranks that the Python side reads: heads between nodes, Horovod's
requests, and the lines of the progress board. The host engine's are in tests/faults/fuzz_host.cpp.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from contextlib import contextmanager

import numpy

from benchmarks.faults.fuzz import Target
from benchmarks.faults.fuzz_records import mutate_keyed
from benchmarks.faults.mutations import mutate, mutate_bytes
from collectives.comm import fingerprint
from collectives.comm.fingerprint import fingerprint_of
from collectives.comm.liveness import this_process
from collectives.comm.multinode import messages
from collectives.horovod import message_table, request_exchange
from collectives.horovod import messages as requests
from collectives.rendezvous import progress_board
from collectives.rendezvous.progress_board import ProgressBoard, Status

__all__ = ["TARGETS"]

# ---- Heads of messages between nodes.


@contextmanager
def open_heads():
    def head(number: int, *words) -> bytes:
        return messages._Head.pack(number, *words, 0, 1)

    own = head(5, *fingerprint_of("all_reduce", dtype=7, count=100, op=0))
    mine = messages._Message(1, 0, 0, messages._Head.unpack(own))

    def read(data: bytes) -> str | None:
        memory = bytearray(data[: len(own)].ljust(len(own), b"\0"))
        refusal = None
        for verify in (
            lambda: messages._verify_calls(0, [(mine, messages._Head.unpack(memory))]),
            lambda: messages._verify_message(0, mine, memory),
        ):
            try:
                verify()
                if memory != own:
                    return "another head is taken for this rank's"
            except messages.NodeMismatch as error:
                str(error).encode()
                refusal = error
        if refusal is not None:
            raise refusal
        return None

    yield [own, own + bytes(400)], read


# ---- Horovod's requests.


class _Gathered:
    """Stands for the control communicator: gathers what it was given, as `all_gather` of two ranks."""

    size = 2

    def __init__(self, payload: bytes):
        self.payload = payload

    def all_gather(self, gathered, own) -> None:
        gathered[0] = own
        theirs = numpy.frombuffer(self.payload, dtype=numpy.uint8)[: own.shape[0]]
        gathered[1] = 0
        gathered[1][: len(theirs)] = theirs


@contextmanager
def open_requests():
    request = requests.Request
    some = [
        request("allreduce", "grad.0", ("float32",), ((4, 3),), op="average", wire="bf16"),
        request("allgather", "", ("int64",), ((2,),)), request("alltoall", "x", ("bool",), ((2, 5),)),
        request("allreduce", "group", ("float32", "float32"), ((4,), ()), op="sum", prescale=0.5),
        request("broadcast", "b", ("float16",), ((2,),), root=1), request("barrier"),
        request("allreduce", "a", op="adasum"),
    ]  # fmt: skip
    words, row_bytes = request_exchange._WORDS, 4 * request_exchange._WORDS

    def encode(new: list, ids: list[int], flags: int = 0, in_payload: bool = False) -> bytes:
        payload = requests.encode_requests(new, ids if in_payload else None) if new or in_payload else b""
        row = [flags | (2 if in_payload else 0), len(payload), len(ids), *([] if in_payload else ids)]
        return b"p" + struct.pack(f"<{words}i", *row, *[0] * (words - len(row))) + payload

    def read(data: bytes) -> str | None:
        kind, head, payload = data[:1], data[1 : 1 + row_bytes].ljust(row_bytes, b"\0"), data[1 + row_bytes :]
        exchange = request_exchange.RequestExchange(_Gathered(payload))
        exchange._payload = requests.encode_requests(some[:4], None)
        exchange._rows[0][:6] = 0, len(exchange._payload), 3, 0, 1, 2
        exchange._rows[1] = numpy.frombuffer(head, dtype=numpy.int32)
        if kind == b"p":
            exchange._rows[1][1] = len(payload)
        table = message_table.MessageTable(2)
        table.add_messages(exchange.messages())
        ready = table.pop_ready()
        for each in ready:
            if each.error is None and None not in each.cached_requests:
                one, two = (cached.request for cached in each.cached_requests)
                if (one.kind, one.dtypes, one.op, one.wire) != (two.kind, two.dtypes, two.op, two.wire):
                    return f"two requests that differ are carried out: {one}, {two}"
        message_table.fuse_responses(ready, 1 << 26)
        for key in table.waiting:
            table.missing_ranks(key)
        table.plan_for(tuple(each.cached for each in ready), 1 << 26)
        return None

    corpus = [
        encode(some[:4], [0, 1, 2]), encode(some, list(range(len(some)))), encode([], []), encode([], [], 1),
        encode(some[:4], [3, 0], 4), encode(some[:3], [0, 1, 2] * 100, 0, True),
    ]  # fmt: skip
    yield corpus, read


def mutate_request(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Mutate the row of a message, or its payload, whose length the row then has."""
    at = 1 + 4 * request_exchange._WORDS
    item = draw.choice(corpus)
    if len(item) > at and draw.random() < 0.7:
        return b"p" + item[1:at] + mutate(draw, [each[at:] for each in corpus if len(each) > at])
    row = mutate_bytes(draw, item[1 : 1 + draw.choice([12, 40, at])])
    return b"l" + (row + item[1 + len(row) :])[: at - 1].ljust(at - 1, b"\0") + item[at:]


# ---- Lines of the progress board.


@contextmanager
def open_board():
    ranks, own = 3, 1
    processes = [this_process()] * ranks
    nbytes = ProgressBoard.size_of(ranks)

    def state(epoch: int, position: int, status: int) -> bytes:
        memory = bytearray(nbytes)
        for rank in range(ranks):
            word = epoch << 39 | position << 3 | status
            struct.pack_into("<4q", memory, (1 + rank) * 64, word, status, status, 5)
        struct.pack_into("<q", memory, 0, epoch if status >= 3 else 0)
        return bytes(memory)

    def read(data: bytes) -> str | None:
        kind, memory = data[:1], bytearray(data[1 : 1 + nbytes].ljust(nbytes, b"\0"))
        board = ProgressBoard(memory, own, processes, lambda: 0.002)
        failed = board.enter()
        if failed is not None and failed not in (0, 2):
            return f"rank {failed} is said to have failed"
        if kind == b"l":
            wants, failed = board.leave(3, 0, 7)
            return None if wants is None or len(wants) == ranks else "no wants"
        board.fail(Status.FAILED, 2, 7)
        for _ in range(3):
            if board.is_needed():
                continue
            found = board.recover()
            if found is not None:
                return None if all(isinstance(each, Status) for each in found) else "no status"
            return None
        board.reason_of(0), board.progress_of(2)
        return None

    corpus = [
        kind + state(1, position, status)
        for kind in (b"l", b"f") for position in (1, 0, 2) for status in (2, 3, 0, 1, 4)
    ]  # fmt: skip
    yield corpus, read


TARGETS = [
    Target(
        "heads", open_heads,
        [messages._verify_calls, messages._verify_message, fingerprint.compare, fingerprint.describe],
        (messages.NodeMismatch,),
    ),
    Target(
        "requests", open_requests,
        [
            requests.decode_requests, requests.CachedRequest, request_exchange.RequestExchange.messages,
            request_exchange.RequestExchange._gather_payloads, message_table.MessageTable, message_table.find_mismatch,
            message_table.fuse_responses, message_table._compared_fields,
        ],
        mutate=mutate_request,
    ),
    Target("board", open_board, [ProgressBoard, getattr(progress_board, "_parse_word", None)], mutate=mutate_keyed),
]  # fmt: skip
