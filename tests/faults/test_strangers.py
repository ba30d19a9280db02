"""Processes that don't belong to a job: they can't join it, pose as rank 0, or stop the ranks from connecting."""

from __future__ import annotations

import contextlib
import hmac
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from tests.conformance.cases import Case, run_cases
from tests.ranks import run_ranks

OK = [Case("all_reduce", "float32", 100)]
KINDS = ("challenge", "hello", "welcome", "join", "arrived", "segment", "heap", "mapped", "gave up", "failed", "go")
ADDRESSES = 16


def address(unique_id: bytes, number: int = 0) -> bytes:
    """Return the name of an id's socket, which anybody can read in /proc/net/unix."""
    first, second = struct.unpack("<2Q", unique_id[8:24])
    return b"\0collectives-%016x%016x-%d" % (first, second, number)


def message(kind: str, rank: int = 1, nranks: int = 2, text: bytes = b"") -> bytes:
    """Return a message of the handshake, as host/handshake.h has it."""
    head = struct.pack("<2I4i", 0x434F4C04, KINDS.index(kind), rank, nranks, os.getpid(), 5)
    return head + bytes(64) + struct.pack("<3Q", 0, 0, 0) + bytes(128) + text.ljust(1024, b"\0")


def connect(name: bytes, stop: threading.Event | None = None) -> socket.socket:
    """Connect to an address once somebody listens there, or until an event is set."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(10)
    until = time.monotonic() + 20
    while stop is None or not stop.is_set():
        try:
            client.connect(name)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until, "rank 0 did not listen"
            time.sleep(0.01)
    return client


def join_and_run(ctx, unique_id):
    ctx.library.set_init_timeout(30.0)
    comm = ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank)
    found = run_cases(ctx, OK, comm)
    comm.destroy()
    return found


def odd_messages(ctx):
    unique_id = ctx.unique_id()
    outcome = []
    if ctx.rank == 1:
        draw = random.Random(5)
        inputs = [message(kind, rank, 2, b"stranger") for kind in KINDS for rank in (-1, 0, 1, 7)]
        inputs += [draw.randbytes(draw.randint(0, 1400)) for _ in range(100)]
        inputs += [message("hello")[: draw.randint(0, 1200)] for _ in range(20)]
        for data in inputs:
            with connect(address(unique_id)) as client, contextlib.suppress(ConnectionError):
                client.send(data)
                if draw.random() < 0.2:
                    client.send(data)
                answers = []
                while part := client.recv(4096):
                    answers.append(struct.unpack_from("<I", part, 4)[0])
                outcome += [KINDS[each] for each in answers if each]  # all but the challenge
    return outcome, join_and_run(ctx, unique_id)


def test_messages_before_a_valid_hello_close_that_connection_alone():
    assert run_ranks(odd_messages, 2, fresh=True) == [([], [])] * 2


def flood(ctx):
    unique_id = ctx.unique_id()
    if ctx.rank == 1:
        held = [connect(address(unique_id)) for _ in range(200)]
        stop = threading.Event()

        def reconnect():
            while not stop.is_set():
                held[random.randrange(len(held))].close()
                held.append(connect(address(unique_id), stop))

        thread = threading.Thread(target=reconnect)
        thread.start()
        try:
            return join_and_run(ctx, unique_id)
        finally:
            stop.set()
            thread.join(30)
            for each in held:
                each.close()
    return join_and_run(ctx, unique_id)


def test_a_flood_of_connections_that_say_nothing():
    """The server's descriptors are few: it holds on to 64 strangers at most."""
    assert run_ranks(flood, 2, fresh=True) == [[], []]


SQUATTER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
held = []
for number, name in enumerate(sys.argv[1:]):
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    held[-1].bind(bytes.fromhex(name))
    if number != 1:  # the second one has the name and doesn't listen
        held[-1].listen(1)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def squatter(unique_id: bytes, count: int):
    names = [address(unique_id, number).hex() for number in range(count)]
    with subprocess.Popen(
        [sys.executable, "-c", SQUATTER, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def beside_a_squatter(ctx, name):
    unique_id = ctx.library.named_unique_id(name)
    with squatter(unique_id, 3) if ctx.rank == 0 else contextlib.nullcontext():
        ctx.barrier()
        return join_and_run(ctx, unique_id)


def all_names_taken(ctx):
    unique_id = ctx.library.named_unique_id(b"all %d" % os.getpid())
    ctx.library.set_init_timeout(1.0)
    errors = []
    with squatter(unique_id, ADDRESSES):
        for rank in (0, 1):
            with pytest.raises(Exception) as caught:  # noqa: PT011 the type is compared below
                ctx.library.comm_init_rank(2, unique_id, rank)
            errors.append((type(caught.value).__name__, str(caught.value)))
    return errors


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_holds_the_jobs_names():
    """The ranks step aside to the next name, wherever that process listens, or doesn't; all can be held."""
    assert run_ranks(beside_a_squatter, 3, b"squatted %d" % os.getpid()) == [[]] * 3
    (((first, text), (second, late)),) = run_ranks(all_names_taken, 1)
    assert (first, second) == ("TransportError", "CollectiveTimeout")
    assert "user 65534" in text and "COLLECTIVES_SECRET" in text
    assert "user 65534" in late


def impostor(ctx):
    """A process of the same user listens first, and answers as rank 0 would."""
    unique_id = ctx.unique_id()
    if ctx.rank == 0:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address(unique_id))
        listener.listen(64)
        stop = threading.Event()

        def serve():
            held, answers = [], [message("failed", text=b"stranger"), message("welcome"), message("segment")]
            listener.settimeout(0.1)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError, ConnectionError):
                    held.append(listener.accept()[0])
                    held[-1].send(message("challenge"))
                    held[-1].settimeout(1)
                    held[-1].recv(4096)
                    held[-1].send(answers[len(held) % 3])

        thread = threading.Thread(target=serve)
        thread.start()
        ctx.barrier()
        try:
            return join_and_run(ctx, unique_id)
        finally:
            stop.set()
            thread.join(10)
            listener.close()
    ctx.barrier()
    return join_and_run(ctx, unique_id)


def test_an_impostor_on_the_first_address():
    assert run_ranks(impostor, 3, fresh=True) == [[]] * 3


def with_secrets(ctx, secrets):
    unique_id = ctx.unique_id()
    ctx.library.set_secret(secrets[ctx.rank])
    name = ctx.library.named_unique_id(b"job")
    try:
        if len(set(secrets)) == 1:
            return name, join_and_run(ctx, unique_id)
        ctx.library.set_init_timeout(1.5)
        with pytest.raises(Exception) as caught:  # noqa: PT011 the type is compared below
            ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank)
        return name, f"{type(caught.value).__name__}: {caught.value}"
    finally:
        ctx.library.set_secret(None)


def test_a_process_with_the_id_and_another_secret_does_not_join():
    first, second = b"a" * 32, b"b" * 32
    names = []
    for secrets in ((first, second), (first, None), (first, first)):
        results = run_ranks(with_secrets, 2, secrets)
        names += [name for name, _ in results]
        for _, found in results:
            if secrets == (first, first):
                assert not found
            else:
                assert found.startswith("CollectiveTimeout") and "COLLECTIVES_SECRET" in found, found
    assert names[0] == names[2] == names[4] == names[5] and len(set(names)) == 3


def proven_rank_0(ctx, what):
    """Rank 0 proves itself, and then says what none does; gives rank 1's errors and how many descriptors it kept."""
    ctx.library.set_init_timeout(10.0)
    found = []
    for says in what:
        unique_id = ctx.unique_id()
        if ctx.rank == 1:
            ctx.barrier()
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(Exception) as caught:
                ctx.library.comm_init_rank(ctx.size, unique_id, ctx.rank)
            found.append((type(caught.value).__name__, len(os.listdir("/proc/self/fd")) - before))
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address(unique_id))
            listener.listen(1)
            ctx.barrier()
            with listener.accept()[0] as peer:
                challenge, welcome, said = message("challenge"), message("welcome"), message(says)
                peer.send(challenge)
                hello = peer.recv(4096)
                key = hmac.digest(b"", unique_id, "sha256")
                proof = hmac.digest(key, b"collectives serve 0 " + challenge[24:56] + hello[24:56], "sha256")
                peer.send(welcome[:56] + proof + welcome[88:])
                peer.recv(4096)
                if says == "arrived":  # with descriptors
                    for _ in range(20):
                        socket.send_fds(peer, [said], [0, 0])
                else:
                    peer.send(said[:20] + bytes(4) + said[24:])
    return found


def test_a_rank_0_that_says_what_none_does():
    """Found by fuzzing: a null pointer, an init without an error and without a communicator, descriptors left open."""
    _, found = run_ranks(proven_rank_0, 2, ["go", "failed", "arrived"], fresh=True)
    for kind, kept in found:
        assert kind in ("RemoteError", "InternalError") and kept <= 1  # its own file of shared memory
