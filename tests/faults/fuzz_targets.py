"""What is fuzzed, by name: records over a store, messages between ranks, files. The host engine's own messages are in
fuzz_host.cpp.
"""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
import torch.distributed as dist

import collectives
from collectives import errors, secret
from collectives._nccl import FLIGHT_LAYOUT
from collectives.comm import liveness, watchdog
from collectives.comm.engine import get_engine
from collectives.comm.fingerprint import fingerprint_of
from collectives.comm.multinode import addresses, connecting, messages
from collectives.flight import analysis, picture, reading, report
from collectives.horovod import message_table, request_exchange
from collectives.horovod import messages as requests
from collectives.rendezvous import peers, rounds, store
from collectives.rendezvous.launcher_store import LauncherStore
from collectives.sharded import checkpointer
from tests.faults.fuzz import Target
from tests.faults.mutations import mutate, mutate_bytes, mutate_keyed
from tests.variables import variables

__all__ = ["TARGETS", "with_part"]


# ---- Records over a store.


def open_sealed(stack: ExitStack):
    record, purpose = b'{"rank": 1}', "rendezvous/peer/1"
    stack.enter_context(variables(COLLECTIVES_SECRET="a secret of the fuzzing trials"))
    known = {secret.seal(record, purpose): record, secret.seal(b"", purpose): b""}

    def read(data: bytes) -> str | None:
        found = secret.unseal(data, purpose)
        return None if known.get(data) == found else f"unsealed, and nobody sealed it: {found!r}"

    return [*known, secret.seal(record, "rendezvous/peer/2"), record], read


def open_rendezvous(stack: ExitStack):
    engine = get_engine("host")
    first, here = (peers.Participant(r, 2, engine, job="a", agent_port=29500, master="127.0.0.1") for r in (0, 1))
    own = first.make_record()

    def read(data: bytes) -> str | None:
        kind, data = data[:1], data[1:]
        table = dist.HashStore()
        table.set("peer/0", own)
        if kind == b"c":  # a process that has this rank, too, says who it is
            table.set("claim/1", data[:64])
            table.set("peer/1", here.make_record())
        else:
            table.set("peer/0" if kind == b"p" else "error", data)
        records = store.StoreRendezvous(table, here, time.monotonic() + 0.05, 0.05).exchange()
        found = peers.validate(records, here)
        host, port = peers.parse_record(records[0], 0)["store"]
        if not 0 < port < 65536 or not host.isprintable():
            return f"an address that can't be one: {host!r}, {port}"
        return None if len(found.unique_id) == 128 and found.size == 2 else "another job"

    failure = {"kind": "CollectiveTimeout", "text": "rank 0 did not come", "peers": [0]}
    return [b"p" + own, b"e" + json.dumps(failure).encode(), b"c0"], read


def open_records(stack: ExitStack):
    """By the first byte: addresses of nodes, where ranks listen, a failure and a position of a rank, and processes."""
    own = liveness.this_process()
    node = own.rpartition("|")[0].rpartition("|")[0]
    table = dist.HashStore()
    status = watchdog.StatusStore(table, "status")

    def read(data: bytes) -> str | None:
        kind, data = data[:1], data[1:]
        table.set("status/key", data)
        if kind == b"a":
            found = addresses.parse_addresses(data, 1)
            return None if all(isinstance(address, str) for address in found) else f"no addresses: {found!r}"
        if kind == b"l":
            address, port, token = connecting.parse_listener(data, 1)
            right = isinstance(address, str) and 0 < port < 65536 and len(token) == 16
            return None if right else f"no place to connect to: {address!r}, {port!r}, {token!r}"
        if kind == b"f":
            found = watchdog.read_failure(status.get("key"))
            if found is not None:
                str(errors.RemoteError(found[1], peers=found[2], rank=0))
            return None
        if kind == b"p":
            number, text = watchdog.read_position(status.get("key"))
            f"{number + 1} {text}"
            return None
        text = data.decode("utf-8", "replace")
        ended = liveness.has_ended(text)
        liveness.exit_reason(text)
        return "this process is said to have ended" if ended and text == own else None

    valid = {
        "a": ["127.0.0.1", "10.0.0.1"], "l": ["127.0.0.1", 40123, "ab" * 16], "p": [17, "all_reduce"],
        "f": {"text": "rank 1 has ended", "rank": 1, "peers": [1]},
    }  # fmt: skip
    processes = [own, f"{node}|4194303|1", f"{node}|{os.getppid()}|0", "|||", f"{node}||5", f"{node}|²|1"]
    others = [b'a["10.0.0.2", null]', *(b"o" + text.encode() for text in processes)]
    return [*(kind.encode() + json.dumps(value).encode() for kind, value in valid.items()), *others], read


def open_rounds(stack: ExitStack):
    """Memberships of an elastic job; the first byte says which key of the store is another's."""
    me, gone = liveness.this_process(), "another|node|1|1"
    first, second = rounds.Member(me, launched_as=0), rounds.Member(gone, launched_as=1)
    before = rounds.Round(0, (first, second), 0)
    closed = json.dumps([0, 1]).encode().hex().encode()

    def encode(member: rounds.Member) -> bytes:
        return json.dumps(vars(member)).encode()

    valid = {
        "0/member/0": encode(first), "0/member/1": encode(second), "0/count": b"2", "0/closed": closed, "newest": b"0",
        "1/member/0": encode(rounds.Member(me, 0, 0, 3, 0, {"a": 1})), "1/count": b"2",
        "1/member/1": encode(rounds.Member(gone, 0, 1, 3, 1)),
    }  # fmt: skip
    keys = ("0/member/1", "1/member/1", "0/closed", "newest", "1/closed", "1/count", "0/count")

    def read(data: bytes) -> str | None:
        table = dist.HashStore()
        for key, value in valid.items():
            table.set(f"elastic/{key}", value)
        table.set("elastic/dead/" + gone, "1")
        key = keys[data[0] % len(keys)] if data else keys[1]
        # Its slots are text in JSON, in hexadecimal digits.
        value = data[1:].hex().encode() if key == "1/closed" and data[1:2] == b"[" else data[1:]
        table.set(f"elastic/{key}", value)
        found = rounds.Rounds(LauncherStore(table), 1, 1, 64).join(before, 0.01)
        found.joined(), found.lost(before)
        names = [member.process for member in found.members]
        if names[found.rank] != me:
            return f"another process has rank {found.rank} of {found.size}"
        return None if len(set(names)) == len(names) else f"a process is there twice: {names}"

    return [bytes([number]) + valid.get(key, closed) for number, key in enumerate(keys)], read


# ---- Messages between ranks.


def open_heads(stack: ExitStack):
    own = messages._Head.pack(5, *fingerprint_of("all_reduce", dtype=7, count=100, op=0), 0, 1)
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

    return [own, own + bytes(400)], read


_ROW = 4 * request_exchange._WORDS


def open_requests(stack: ExitStack):
    request = requests.Request
    some = [
        request("allreduce", "grad.0", ("float32",), ((4, 3),), op="average", wire="bf16"),
        request("allgather", "", ("int64",), ((2,),)), request("alltoall", "x", ("bool",), ((2, 5),)),
        request("allreduce", "group", ("float32", "float32"), ((4,), ()), op="sum", prescale=0.5),
        request("broadcast", "b", ("float16",), ((2,),), root=1), request("barrier"),
    ]  # fmt: skip

    def encode(new: list, ids: list[int], flags: int = 0, in_payload: bool = False) -> bytes:
        payload = requests.encode_requests(new, ids if in_payload else None) if new or in_payload else b""
        row = [flags | (2 if in_payload else 0), len(payload), len(ids), *([] if in_payload else ids)]
        return b"p" + struct.pack(f"<{len(row)}i", *row).ljust(_ROW, b"\0") + payload

    def read(data: bytes) -> str | None:
        payload = data[1 + _ROW :]

        def all_gather(gathered, own) -> None:  # as Horovod's control communicator of two ranks
            gathered[0], gathered[1] = own, 0
            theirs = numpy.frombuffer(payload, dtype=numpy.uint8)[: own.shape[0]]
            gathered[1][: len(theirs)] = theirs

        exchange = request_exchange.RequestExchange(SimpleNamespace(size=2, all_gather=all_gather))
        exchange._payload = requests.encode_requests(some[:4], None)
        exchange._rows[0][:6] = 0, len(exchange._payload), 3, 0, 1, 2
        exchange._rows[1] = numpy.frombuffer(data[1 : 1 + _ROW].ljust(_ROW, b"\0"), dtype=numpy.int32)
        if data[:1] == b"p":
            exchange._rows[1][1] = len(payload)
        table = message_table.MessageTable(2)
        table.add_messages(exchange.messages())
        ready = table.pop_ready()
        for response in ready:
            if response.error is None and None not in response.cached_requests:
                one, two = (cached.request for cached in response.cached_requests)
                if (one.kind, one.dtypes, one.op, one.wire) != (two.kind, two.dtypes, two.op, two.wire):
                    return f"two requests that differ are carried out: {one}, {two}"
        message_table.fuse_responses(ready, 1 << 26)
        for key in table.waiting:
            table.missing_ranks(key)
        table.plan_for(tuple(response.cached for response in ready), 1 << 26)
        return None

    return [
        encode(some[:4], [0, 1, 2]), encode(some, list(range(len(some)))), encode([], []), encode([], [], 1),
        encode(some[:4], [3, 0], 4), encode(some[:3], [0, 1, 2] * 100, 0, True),
    ], read  # fmt: skip


def mutate_request(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Mutate the row of a message, or its payload, whose length the row then has."""
    at, item = 1 + _ROW, draw.choice(corpus)
    if len(item) > at and draw.random() < 0.7:
        return b"p" + item[1:at] + mutate(draw, [data[at:] for data in corpus if len(data) > at])
    row = mutate_bytes(draw, item[1 : 1 + draw.choice([12, 40, at])])
    return b"l" + (row + item[1 + len(row) :])[: at - 1].ljust(at - 1, b"\0") + item[at:]


# ---- Files.


def temporary_folder(stack: ExitStack) -> Path:
    """A folder in memory, where there is room."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))


def with_part(data: bytes, part: str, text: bytes) -> bytes:
    """Return a flight recorder's file with another text in a part of its header."""
    at, room = FLIGHT_LAYOUT[f"{part}_offset"], FLIGHT_LAYOUT[f"{part}_bytes"]
    return data[:at] + (struct.pack("<I", len(text)) + text)[:room].ljust(room, b"\0") + data[at + room :]


def open_flight(stack: ExitStack):
    folder = temporary_folder(stack)
    with variables(COLLECTIVES_FLIGHT_DIR=folder / "own", COLLECTIVES_FLIGHT_LINES=1), collectives.init() as comm:
        for _ in range(5):
            comm.all_reduce(torch.ones(16))
        (path,) = (folder / "own").glob("*.flight")
        own = path.read_bytes()
    error = {"kind": "RemoteError", "text": "gone", "op": "barrier", "peers": [1]}
    failed = with_part(own, "outcome", json.dumps({"state": "failed", "at": 5, "error": error}).encode())
    meta = json.loads(own[FLIGHT_LAYOUT["meta_offset"] + 4 :].partition(b"\0")[0])
    place = folder / "read"
    place.mkdir()
    other = json.dumps({**meta, "rank": 1, "size": 2}).encode()
    (place / "other.flight").write_bytes(with_part(own, "meta", other))

    def read(data: bytes) -> str | None:
        (place / "own.flight").write_bytes(data)
        rings, problems = reading.read_folder(place)
        if len(rings) + len(problems) != 2:
            return "a file is missing from what was read"
        report.format_findings(analysis.analyse(rings), rings).encode()
        json.dumps(report.describe_rings(rings)).encode()
        picture.draw(rings).encode()
        if problems:
            raise errors.InvalidArgument("\n".join(problems))
        return None

    return [own, failed], read


def mutate_flight(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Mutate a text of the header, or the records that are used; now and then any part of a file."""
    data, part = draw.choice(corpus), draw.choice(["meta", "outcome", "header", "records", "any"])
    if part in ("meta", "outcome"):
        at = FLIGHT_LAYOUT[f"{part}_offset"]
        (length,) = struct.unpack_from("<I", data, at)
        return with_part(data, part, mutate(draw, [data[at + 4 : at + 4 + length]]))
    if part == "any":
        return mutate_bytes(draw, data)
    first = FLIGHT_LAYOUT["header_bytes"] if part == "records" else 0
    last = FLIGHT_LAYOUT["header_bytes"] + 12 * FLIGHT_LAYOUT["record_bytes"]
    changed = mutate_bytes(draw, data[first:last])[: last - first]
    return data[:first] + changed + data[first + len(changed) :]


def open_checkpoint(stack: ExitStack):
    """Any file of a checkpoint, which is loaded; the first byte says which. The one before is whole."""
    keeper = checkpointer.Checkpointer(temporary_folder(stack) / "whole")
    model = torch.nn.Linear(4, 3, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in (1, 2):
        for param in model.parameters():
            param.data.fill_(2.0 + step)
        keeper.save(step, model, optimizer, extra={"epoch": step}, block=True)
    path = keeper.latest()
    saved = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    names = list(saved)
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")

    def read(data: bytes) -> str | None:
        name = names[data[0] % len(names)] if data else names[0]
        (path / name).write_bytes(data[1:])
        try:
            found = keeper.load_latest(model, optimizer)
        finally:
            (path / name).write_bytes(saved[name])
        right = {1: 3.0, 2: 4.0}[found.step]
        if found.extra != {"epoch": found.step} or any((param != right).any() for param in model.parameters()):
            return f"what is loaded is not what was saved: {found.extra}"
        return None

    return [bytes([number]) + saved[name] for number, name in enumerate(names)], read


TARGETS = {
    target.name: target
    for target in (
        Target("sealed", open_sealed, valid=2),
        Target("rendezvous", open_rendezvous, mutate=mutate_keyed),
        Target("records", open_records, mutate=mutate_keyed, valid=5),
        Target("rounds", open_rounds, mutate=mutate_keyed),
        Target("heads", open_heads, (messages.NodeMismatch,)),
        Target("requests", open_requests, mutate=mutate_request),
        Target("flight", open_flight, mutate=mutate_flight),
        Target("checkpoint", open_checkpoint, mutate=mutate_keyed),
    )
}
