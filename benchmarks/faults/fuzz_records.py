"""Fuzzing of the records that ranks and launchers exchange over a store."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import contextmanager

import torch.distributed as dist

from benchmarks.faults.fuzz import Target
from benchmarks.faults.mutations import mutate
from collectives import errors, secret
from collectives.auto import consensus as auto_consensus
from collectives.backend import barriers
from collectives.comm import liveness, watchdog
from collectives.comm.engine import get_engine
from collectives.comm.multinode import addresses, connecting
from collectives.comm.multinode.error_store import ErrorStore
from collectives.rendezvous import peers, rounds, store
from collectives.rendezvous.launcher_store import LauncherStore
from tests.variables import variables

__all__ = ["TARGETS", "mutate_keyed"]

SECRET = "a secret of the fuzzing trials"


def mutate_keyed(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Mutate an input, whose first byte says what it is, and stays."""
    kind = draw.choice(corpus)[:1]
    return kind + mutate(draw, [each[1:] for each in corpus if each[:1] == kind])


# ---- Sealed records.


@contextmanager
def open_sealed():
    record, purpose = b'{"rank": 1}', "rendezvous/peer/1"
    with variables(COLLECTIVES_SECRET=SECRET):
        corpus = [secret.seal(record, purpose), secret.seal(b"", purpose)]
        others = [secret.seal(record, "rendezvous/peer/2"), record]
        known = {corpus[0]: record, corpus[1]: b""}

        def read(data: bytes) -> str | None:
            found = secret.unseal(data, purpose)
            return None if known.get(data) == found else f"{found!r} was unsealed, which nobody sealed"

        for other in others:
            try:
                secret.unseal(other, purpose)
            except errors.TransportError:
                continue
            raise AssertionError("a record of another purpose was unsealed")
        yield corpus, read


# ---- The rendezvous.


@contextmanager
def open_rendezvous():
    engine = get_engine("host")
    first = peers.Participant(0, 2, engine, job="a", agent_port=29500, master="127.0.0.1")
    here = peers.Participant(1, 2, engine, job="a", agent_port=29500, master="127.0.0.1")
    failure = {"kind": "CollectiveTimeout", "text": "rank 0 did not come", "peers": [0]}
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
        meeting = store.StoreRendezvous(table, here, time.monotonic() + 0.05, 0.05)
        records = meeting.exchange()
        found = peers.validate(records, here)
        host, port = peers.parse_record(records[0], 0)["store"]
        if not 0 < port < 65536 or not host.isprintable():
            return f"an address that can't be one: {host!r}, {port}"
        for peer in found.peers:
            liveness.exit_reason(peer.process)
        return None if len(found.unique_id) == 128 and found.size == 2 else "another job"

    yield [b"p" + own, b"e" + json.dumps(failure).encode(), b"c0"], read


# ---- What ranks post while they connect nodes, and when they fail.


@contextmanager
def open_errors():
    failed = {"kind": "RemoteError", "text": "rank 1 has ended", "peers": [1], "op": "all_reduce"}

    def read(data: bytes) -> str | None:
        table = ErrorStore(dist.HashStore(), "127.0.0.1", 0, ["", ""])
        table.store.set("failed", data)
        found = table.fetch_error()
        if table._unreachable:
            return "the store is taken for one that has ended"
        return None if found is None or str(found) else "an error without a text"

    yield [json.dumps(failed).encode()], read


@contextmanager
def open_addresses():
    corpus = [json.dumps(each).encode() for each in (["127.0.0.1", "10.0.0.1"], ["", ""], ["10.0.0.2", None])]

    def read(data: bytes) -> str | None:
        own, seen = addresses.parse_addresses(data, 1)
        return None if all(isinstance(each, str) for each in (own, seen)) else f"no addresses: {own!r}, {seen!r}"

    yield corpus, read


@contextmanager
def open_listeners():
    corpus = [json.dumps(each).encode() for each in (["127.0.0.1", 40123, "ab" * 16], ["fe80::1%end0", 1, "0" * 32])]

    def read(data: bytes) -> str | None:
        address, port, token = connecting.parse_listener(data, 1)
        right = isinstance(address, str) and 0 < port < 65536 and len(token) == 16
        return None if right else f"no place to connect to: {address!r}, {port!r}, {token!r}"

    yield corpus, read


@contextmanager
def open_status():
    corpus = [
        b"f" + json.dumps({"text": "rank 1 has ended", "rank": 1, "peers": [1]}).encode(),
        b"p" + json.dumps([17, "all_reduce"]).encode(),
    ]

    def read(data: bytes) -> str | None:
        status = watchdog.StatusStore(dist.HashStore(), "status")
        status._store.set("status/key", data[1:])
        value = status.get("key")
        if status._store is None:
            return "the store is taken for one that has ended"
        if data[:1] == b"f":
            found = watchdog.read_failure(value)
            if found is not None:
                str(errors.RemoteError(found[1], peers=found[2], rank=0))
        else:
            number, text = watchdog.read_position(value)
            f"{number + 1} {text}"
        return None

    yield corpus, read


@contextmanager
def open_verdicts():
    corpus = [b"b" + json.dumps(["RemoteError", "rank 1 has ended", [1]]).encode()]
    corpus += [b"a" + json.dumps({"sequence": 4, "error": None, "unused": "x"}).encode()]

    def read(data: bytes) -> str | None:
        if data[:1] == b"b":
            str(barriers.parse_verdict(data[1:], 1))
        else:
            auto_consensus.parse_value(data[1:], 1)
        return None

    yield corpus, read


@contextmanager
def open_processes():
    own = liveness.this_process()
    node = own.rpartition("|")[0].rpartition("|")[0]
    corpus = [own, f"{node}|4194303|1", f"{node}|{os.getppid()}|0", "|||", f"{node}||5", f"{node}|²|1"]

    def read(data: bytes) -> str | None:
        text = data.decode("utf-8", "replace")
        ended = liveness.has_ended(text)
        liveness.exit_reason(text)
        return "this process is said to have ended" if ended and text == own else None

    yield [each.encode() for each in corpus], read


# ---- Rounds of an elastic job.


@contextmanager
def open_rounds():
    me, gone = liveness.this_process(), "another|node|1|1"
    first = rounds.Member(me, launched_as=0)
    second = rounds.Member(gone, launched_as=1)
    stayed = rounds.Member(me, 0, 0, 3, 0, {"a": 1})
    also = rounds.Member(gone, 0, 1, 3, 1)
    before = rounds.Round(0, (first, second), 0)

    def encode(member: rounds.Member) -> bytes:
        return json.dumps(vars(member)).encode()

    keys = {
        b"0": "elastic/0/member/1", b"1": "elastic/1/member/1", b"2": "elastic/0/closed", b"3": "elastic/newest",
        b"4": "elastic/1/closed", b"5": "elastic/1/count", b"6": "elastic/0/count",
    }  # fmt: skip
    closed = json.dumps([0, 1]).encode().hex().encode()
    valid = {
        "elastic/0/member/0": encode(first), "elastic/0/member/1": encode(second), "elastic/0/count": b"2",
        "elastic/0/closed": closed, "elastic/newest": b"0", "elastic/1/member/1": encode(also), "elastic/1/count": b"1",
    }  # fmt: skip
    valid["elastic/1/member/0"] = encode(stayed)

    def read(data: bytes) -> str | None:
        table = dist.HashStore()
        for key, value in valid.items():
            table.set(key, value)
        table.set("elastic/1/count", "2")
        table.set("elastic/dead/" + gone, "1")
        key = keys.get(data[:1], "elastic/1/member/1")
        if key == "elastic/1/closed":  # its slots are text in JSON, in hexadecimal digits
            table.set(key, data[1:].hex() if data[1:2] == b"[" else data[1:])
        else:
            table.set(key, data[1:])
        job = rounds.Rounds(LauncherStore(table), 1, 1, 64)
        found = job.join(before, 0.01)
        found.joined(), found.lost(before)
        names = [member.process for member in found.members]
        if found.members[found.rank].process != me:
            return f"rank {found.rank} of {found.size} is another process"
        return None if len(set(names)) == len(names) else f"a process is there twice: {names}"

    corpus = [
        b"0" + encode(second), b"1" + encode(also), b"2" + closed, b"3" + b"0", b"4" + b"[0, 2]", b"4" + closed,
        b"5" + b"2", b"6" + b"2",
    ]  # fmt: skip
    yield corpus, read


TARGETS = [
    Target("sealed", open_sealed, [secret.unseal, secret._mac]),
    Target(
        "rendezvous", open_rendezvous,
        [peers.parse_record, peers._parse_json, peers.raise_posted_failure, peers.validate, peers._group_ranks],
        mutate=mutate_keyed,
    ),
    Target("errors", open_errors, [ErrorStore.fetch_error]),
    Target("addresses", open_addresses, [addresses.parse_addresses]),
    Target("listeners", open_listeners, [connecting.parse_listener]),
    Target(
        "status", open_status,
        [watchdog.StatusStore.get, getattr(watchdog, "read_failure", None), getattr(watchdog, "read_position", None)],
        mutate=mutate_keyed,
    ),
    Target(
        "verdicts", open_verdicts,
        [getattr(barriers, "parse_verdict", None), getattr(auto_consensus, "parse_value", None)],
        mutate=mutate_keyed,
    ),
    Target("processes", open_processes, [liveness.has_ended, liveness.exit_reason, liveness.describe_exit]),
    Target(
        "rounds", open_rounds,
        [
            rounds._parse_member, rounds.Rounds._closed, rounds.Rounds._newest, rounds.Rounds._members,
            rounds.Rounds._propose, rounds.Rounds.join,
        ],
        mutate=mutate_keyed,
    ),
]  # fmt: skip
