"""The connections between the ranks of several nodes: how they open, what goes over them, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from collectives import errors
from collectives.comm.multinode import connecting
from collectives.comm.multinode.addresses import find_address
from collectives.comm.multinode.connecting import connect_ranks, parse_listener
from collectives.comm.multinode.error_store import ErrorStore
from tests.hosts import joined
from tests.ranks import run_ranks

LONG = 30 << 20  # bytes: more than what the system holds of a connection


def in_thread(function, *args):
    found = []

    def run():
        try:
            found.append(function(*args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


# ---- Opening.


def test_strangers_are_refused_while_ranks_connect(monkeypatch):
    """One that says nothing, one that says anything, and one that knows all but the token."""
    monkeypatch.setenv("COLLECTIVES_SECRET", "a secret of sixteen bytes or more")
    table = dist.HashStore()
    store = ErrorStore(table, "127.0.0.1", 0)
    store.set("address/1", json.dumps(["127.0.0.1", "127.0.0.1"]))
    thread, found = in_thread(connect_ranks, store, 0, 2, 20.0)
    address, port, _ = parse_listener(store.get("listens/0", time.monotonic() + 20, 0), 0)
    strangers = [socket.create_connection((address, port)) for _ in range(3)]
    strangers[1].send(bytes(500))
    forged = connecting._GREETING.pack(connecting._MAGIC, 1, 0, bytes(16), bytes(16))
    strangers[2].send(connecting.seal(forged, connecting._PURPOSE))
    strangers[2].settimeout(20)
    assert strangers[2].recv(1) == b"", "it is closed"
    (mine,) = connect_ranks(ErrorStore(table, "127.0.0.1", 1), 1, 2, 20.0).values()
    thread.join()
    (theirs,) = found[0].values()
    theirs.send(b"x")
    mine.setblocking(True)
    assert mine.recv(1) == b"x"
    for each in (mine, theirs, *strangers):
        each.close()


def test_a_stranger_that_is_closed_for_another_one_may_have_sent_something():
    store = ErrorStore(dist.HashStore(), "127.0.0.1", 0)
    opening = connecting._Opening(store, 0, 2, 20.0)
    opening._listener = connecting._listen("127.0.0.1", 2)
    there, strangers = opening._listener.getsockname(), []
    most = opening._size + connecting._SPARE
    for number in range(most + 1):
        strangers.append(socket.create_connection(there))
        if number == most:
            strangers[0].send(b"x")
        opening._take_greetings()
    assert len(opening._greeted) == most
    for each in (opening, *strangers):
        each.close()


def test_strangers_that_keep_coming_do_not_extend_the_limit():
    table = dist.HashStore()
    store = ErrorStore(table, "127.0.0.1", 0)
    store.set("address/1", json.dumps(["127.0.0.1", "127.0.0.1"]))
    thread, found = in_thread(connect_ranks, store, 0, 2, 1.0)
    address, port, _ = parse_listener(store.get("listens/0", time.monotonic() + 20, 0), 0)
    with contextlib.suppress(OSError):  # it listens no more
        while thread.is_alive():
            socket.create_connection((address, port)).close()
            time.sleep(connecting._LOOK_S / 5)
    thread.join()
    assert isinstance(found[0], errors.CollectiveTimeout) and found[0].peers == (1,), found


@pytest.fixture
def store():
    """Rank 1's, in which rank 0 has said where it is."""
    made = ErrorStore(dist.HashStore(), "127.0.0.1", 1)
    made.set("address/0", json.dumps(["127.0.0.1", "127.0.0.1"]))
    return made


def say_where(store, server):
    store.set("listens/0", json.dumps(["127.0.0.1", server.getsockname()[1], "00" * 16]))


def test_a_rank_that_refuses_is_named(store):
    with socket.create_server(("127.0.0.1", 0)) as server:
        say_where(store, server)
    with pytest.raises(errors.TransportError, match="could not connect to rank 0 at 127.0.0.1.*refused") as raised:
        connect_ranks(store, 1, 2, 20.0)
    assert raised.value.peers == (0,)


def test_a_rank_that_ends_before_it_answers_is_named(store):
    with socket.create_server(("127.0.0.1", 0)) as server:
        say_where(store, server)
        thread, found = in_thread(connect_ranks, store, 1, 2, 20.0)
        server.accept()[0].close()
        thread.join()
    assert isinstance(found[0], errors.RemoteError) and found[0].peers == (0,), found
    assert "rank 0 died or left while the machines were connected" in str(found[0])


@pytest.mark.parametrize("listens", [True, False])
def test_a_rank_that_never_comes_is_named(store, listens):
    """Its record is missing, or nobody answers at its place."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if listens:
            say_where(store, server)
        text = "were not connected within 0.5 s: is a firewall" if listens else "did not come within .* to connect"
        with pytest.raises(errors.CollectiveTimeout, match=text) as raised:
            connect_ranks(store, 1, 2, 0.5)
    assert raised.value.peers == (0,)


def test_the_interface_can_be_named(monkeypatch):
    store = ErrorStore(dist.HashStore(), "127.0.0.1", 0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert find_address(store, 0, 1, time.monotonic() + 20) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    with pytest.raises(errors.TransportError, match="GLOO_SOCKET_IFNAME=none7: the interface has no address"):
        find_address(store, 0, 1, time.monotonic() + 20)


# ---- Ranks.


def in_order(ctx, machines):
    """All-reduces and broadcasts of many chunks: sums of a node's ranks, then of nodes; the bits of every rank."""
    with joined(ctx, machines) as comm:
        for count, dtype in ((1_500_007, torch.float32), (1_000_003, torch.bfloat16), (300_001, torch.float64)):
            everyone = [
                torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
                for rank in range(ctx.size)
            ]
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            nodes = []
            for ranks in comm.machines:
                node = everyone[ranks[0]].to(wide)
                for rank in ranks[1:]:
                    node = node + everyone[rank].to(wide)
                nodes.append(node)
            total = nodes[0]
            for node in nodes[1:]:
                total = total + node
            mine, share = everyone[ctx.rank].clone(), torch.zeros(2, dtype=torch.float64)
            comm.all_reduce(mine, share=share)
            assert torch.equal(mine, total.to(dtype))
            comm.all_reduce(share)
            assert torch.allclose(share[0], mine.double().square().sum())
            for root in (0, ctx.size - 1):
                one = everyone[ctx.rank].clone()
                comm.broadcast(one, root)
                assert torch.equal(one, everyone[root])


@pytest.mark.parametrize("machines", ["abbab"])
def test_chunks_keep_the_order_of_sums(machines):
    run_ranks(in_order, len(machines), machines, timeout=60)


def long_messages(ctx):
    """Groups of sends inside of a node and between nodes, whose ranks depend on one another."""
    r = ctx.rank
    with joined(ctx, "aabb") as comm:
        big, small = torch.full((LONG // 4,), float(r)), torch.full((3,), float(r))
        got, little = torch.empty(LONG // 4), torch.empty(3)
        if r == 0:  # to the other node and inside of its own at once
            with comm.group():
                comm.send(big, 2)
                comm.recv(little, 1)
        elif r == 1:  # comes to rank 0 only after rank 2, which needs all from rank 0
            comm.recv(little, 2)
            comm.send(small, 0)
        elif r == 2:
            comm.recv(got, 0)
            comm.send(small, 1)
            assert (got == 0).all()
        comm.barrier()
        assert r > 1 or (little == (1.0 if r == 0 else 2.0)).all()


def test_long_messages_move_on_while_others_are_waited_for():
    run_ranks(long_messages, 4, timeout=60)


def lost_in_a_group(ctx):
    """Rank 2 leaves while rank 0 sends to it in a group that also waits for a rank that waits for rank 0."""
    few = torch.zeros(3)
    with joined(ctx, "aabb") as comm:
        comm.barrier()
        if ctx.rank == 2:
            comm.abort()
            ctx.barrier()
            return None
        with pytest.raises(errors.CollectivesError) as raised:
            if ctx.rank == 0:
                with comm.group():
                    comm.send(torch.zeros(LONG // 4), 2)
                    comm.recv(few, 1)
            elif ctx.rank == 1:
                comm.recv(few, 3)
            else:
                comm.recv(few, 0)
        ctx.barrier()
        comm.abort()
        return type(raised.value).__name__, raised.value.peers


def test_a_rank_that_is_lost_in_a_group_ends_the_waits_inside_of_the_node():
    first, second, _, fourth = run_ranks(lost_in_a_group, 4, timeout=60)
    assert first == ("RemoteError", (2,))
    for kind, peers in (second, fourth):  # those that wait for rank 0 may not know its cause
        assert kind == "RemoteError" and peers in ((0,), (1,), (2,))


def interrupted(ctx):
    """Ctrl-C in a wait for another node: this rank raises it, and the others are not left waiting."""
    with joined(ctx, "aabb") as comm:
        comm.all_reduce(torch.ones(3))
        if ctx.rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                comm.send(torch.ones(LONG // 4), 3)
        elif ctx.rank == 2:
            with pytest.raises(errors.RemoteError, match="rank 0"):
                comm.recv(torch.ones(3), 0)
        ctx.barrier()
        with pytest.raises(errors.CollectivesError):
            comm.all_reduce(torch.ones(300_000))
        comm.abort()


def test_ctrl_c_between_nodes():
    run_ranks(interrupted, 4, timeout=60)
