"""The rendezvous over a store, with threads as ranks: every kind of store, and every way in which it fails."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from collectives.errors import (
    CollectivesError,
    CollectiveTimeout,
    InternalError,
    InvalidArgument,
    InvalidUsage,
    RemoteError,
    TransportError,
)
from collectives.launcher import Identity
from collectives.rendezvous.join import identify_process, join_over_store, join_rendezvous
from collectives.rendezvous.peers import Participant
from collectives.rendezvous.store import StoreRendezvous
from tests.launching import free_port
from tests.rendezvous.joining import at, by_name, check_met, nccl_like, over, threads

pytestmark = pytest.mark.usefixtures("no_launcher")


# ---- Over a store.


@pytest.mark.parametrize("size", [1, 2, 7])
def test_over_a_store(store, host, size):
    results = threads(*over(store, host, range(size), size))
    check_met(results, size)
    again = threads(*over(store, host, range(size), size, prefix="another"))  # is a meeting of its own
    check_met(again, size)
    assert again[0].unique_id != results[0].unique_id
    assert [peer.device for peer in results[0].peers] == [f"cpu:{rank}" for rank in range(size)]


def test_over_a_file_store(host, tmp_path):
    def call(rank):
        return lambda: join_over_store(
            dist.FileStore(str(tmp_path / "store"), 2), "p", rank, 2, engine=host, timeout=10
        )

    check_met(threads(call(0), call(1)), 2)


def test_a_rank_that_never_comes(store, host):
    began = time.monotonic()
    results = threads(*over(store, host, (0, 2, 3), 5, timeout=1.0))
    assert time.monotonic() - began < 4
    for rank, error in zip((0, 2, 3), results, strict=True):
        assert isinstance(error, CollectiveTimeout) and isinstance(error, TimeoutError)
        assert error.peers == (1, 4) and error.rank == rank and error.op == "init"
        assert "ranks 1, 4 of 5 did not come within 1 s" in str(error)


def test_the_shortest_limit_ends_the_meeting_for_all(store, host):
    """And a rank that comes after that gets the same error at once."""
    began = time.monotonic()
    calls = over(store, host, (0,), 3, timeout=0.5) + over(store, host, (1,), 3, timeout=60)
    results = threads(*calls) + threads(*over(store, host, (2,), 3, timeout=20))
    assert time.monotonic() - began < 5
    assert all(isinstance(error, CollectiveTimeout) and error.peers == (2,) for error in results)


def test_two_ranks_with_one_number(store, host):
    began = time.monotonic()
    results = threads(*over(store, host, (0, 1, 1), 3, timeout=20))
    assert time.monotonic() - began < 10
    for error in results:
        assert type(error) is InvalidUsage and error.peers == (1,)
        assert "two processes say that they are rank 1" in str(error) and str(os.getpid()) in str(error)


def test_rank_0_can_make_no_id(store):
    def fail():
        raise InternalError("no id today")

    results = threads(*over(store, nccl_like(fail), range(3), 3))
    assert type(results[0]) is InternalError
    for error in results[1:]:
        assert type(error) is RemoteError and error.peers == (0,) and "no id today" in str(error)


def test_an_error_of_ours_while_the_store_is_lost(host):
    server = dist.TCPStore("localhost", free_port(), None, True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, None, False, wait_for_workers=False)
    began = time.monotonic()

    def stop_serving():
        nonlocal server
        time.sleep(0.3)
        server = None

    error, _ = threads(*over(client, host, (1,), 2, timeout=20), stop_serving)
    assert type(error) is TransportError and "gone away" in str(error) and time.monotonic() - began < 10


def test_a_store_that_stops_answering(host):
    class Stuck:
        def add(self, key, value):
            time.sleep(60)

    participant = Participant(1, 2, host)
    pending = StoreRendezvous(Stuck(), participant, time.monotonic() + 0.2, 0.2, "rank 0's store", 0)
    with pytest.raises(CollectiveTimeout, match="rank 0's store has stopped answering") as caught:
        pending.exchange()
    assert caught.value.peers == (0,)


def test_sizes_and_engines_that_differ(store, host):
    results = threads(*over(store, host, (0,), 2), *over(store, host, (1,), 3, timeout=1.5))
    assert type(results[0]) is InvalidUsage and "2 on rank 0; 3 on rank 1" in str(results[0])
    assert isinstance(results[1], CollectivesError)
    calls = over(store, host, (0,), 2, prefix="b") + over(store, nccl_like(None), (1,), 2, prefix="b")
    for error in threads(*calls):
        assert type(error) is InvalidUsage and "host on rank 0; nccl on rank 1" in str(error)


# ---- At MASTER_ADDR and MASTER_PORT.


def test_the_port_is_free_again_when_the_meeting_is_over(host):
    port = free_port()
    for generation, size in enumerate((4, 2, 2)):
        check_met(threads(*(at(port, rank, size, host, generation=generation) for rank in range(size))), size)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)


def test_the_port_is_free_again_after_a_failure(host):
    port = free_port()
    results = threads(*(at(port, rank, 3, host, timeout=0.5) for rank in (0, 1)))
    assert all(isinstance(error, CollectiveTimeout) and error.peers == (2,) for error in results)
    del results
    check_met(threads(*(at(port, rank, 2, host, generation=1) for rank in range(2))), 2)


def test_a_store_of_the_same_process_on_that_port_is_shared(host):
    port = free_port()
    mine = dist.TCPStore("localhost", port, None, True, wait_for_workers=False, multi_tenant=True)
    check_met(threads(*(at(port, rank, 2, host) for rank in range(2))), 2)
    mine.set("a", "b")
    assert mine.get("a") == b"b"


def test_the_agents_store_is_used_and_not_a_new_one(host):
    agent = dist.TCPStore("localhost", free_port(), None, True, wait_for_workers=False)
    for restart in range(2):
        calls = [at(agent.port, rank, 2, host, restart=restart, agent_store=True) for rank in range(2)]
        check_met(threads(*calls), 2)
    calls = [at(agent.port, rank, 3, host, restart=1, agent_store=True) for rank in range(3)]
    check_met(threads(*calls), 3)


def test_a_store_that_ends_before_rank_0_has_come_to_the_meeting(host):
    port = free_port()
    stores = [dist.TCPStore("localhost", port, None, True, wait_for_workers=False, multi_tenant=True)]

    def rank_0():
        time.sleep(0.3)
        stores.clear()  # as when a process group ends: rank 1 is in there already
        time.sleep(0.3)
        return at(port, 0, 2, host)()

    check_met(threads(rank_0, at(port, 1, 2, host)), 2)


def test_rank_0_that_dies_in_the_meeting(host):
    port, began = free_port(), time.monotonic()
    store = dist.TCPStore("localhost", port, None, True, wait_for_workers=False)
    dist.PrefixStore("collectives/init/0/0", store).set("peer/0", Participant(0, 3, host).make_record())

    def die():
        nonlocal store
        time.sleep(0.3)
        store = None

    _, error = threads(die, at(port, 1, 3, host, timeout=20))
    assert type(error) is RemoteError and error.peers == (0,) and time.monotonic() - began < 10
    assert "gone away" in str(error)


def test_rank_0_that_does_not_serve(host):
    port, began = free_port(), time.monotonic()
    (error,) = threads(at(port, 1, 2, host, timeout=0.5))
    assert isinstance(error, CollectiveTimeout) and error.peers == (0,) and time.monotonic() - began < 3
    assert f"127.0.0.1:{port}" in str(error) and "did not answer within 0.5 s" in str(error)


def test_an_address_that_can_not_be_found(host):
    identity = Identity(1, 2, None, None, "env", "no-such-machine.invalid", 4000)
    with pytest.raises(CollectiveTimeout, match="no-such-machine.invalid:4000"):
        join_rendezvous(identity, engine=host, timeout=0.5)


def silent_program():
    """The port of a program that accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.detach()  # it stays open until the process ends: a torch client that waits for it does so, too
    return port


def test_a_port_in_use(host):
    port, began = silent_program(), time.monotonic()
    (error,) = threads(at(port, 0, 2, host, timeout=20))
    assert type(error) is TransportError and time.monotonic() - began < 8
    assert f"127.0.0.1:{port}" in str(error) and "MASTER_PORT" in str(error)
    assert f"port {port} is in use by another program on this machine, so rank 0 can't serve the others" in str(error)


def test_another_program_at_the_address(host):
    port, began = silent_program(), time.monotonic()
    (error,) = threads(at(port, 1, 2, host, timeout=1.0))
    assert isinstance(error, CollectiveTimeout) and error.peers == (0,) and time.monotonic() - began < 4
    assert "did not answer as torch's TCPStore" in str(error)


def test_a_port_that_needs_more_rights(host, monkeypatch):
    def refuse(*args, **kwargs):
        raise dist.DistNetworkError("the server socket has failed to bind: EACCES\nstack")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    (error,) = threads(at(80, 0, 2, host))
    assert type(error) is TransportError and "EACCES" in str(error) and "stack" not in str(error)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), None, "60"])
def test_time_limits_that_are_none(host, timeout):
    with pytest.raises(InvalidArgument, match="timeout="):
        join_rendezvous(Identity(0, 1, 0, 1, "alone"), engine=host, timeout=timeout)


def test_ctrl_c_ends_the_wait_on_all_ranks(host, store):
    main = threading.main_thread().ident
    threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    results, began = [], time.monotonic()
    other = threading.Thread(target=lambda: results.extend(threads(*over(store, host, (1,), 3, timeout=30))))
    other.start()
    with pytest.raises(KeyboardInterrupt):
        over(store, host, (0,), 3, timeout=30)[0]()
    other.join(10)
    assert time.monotonic() - began < 5
    assert [type(error) for error in results] == [RemoteError] and results[0].peers == (0,)


def test_a_rank_that_comes_late_to_a_failure_is_told(host):
    port = free_port()

    def late():
        time.sleep(2.5)
        return at(port, 2, 3, host, timeout=20)()

    began = time.monotonic()
    results = threads(at(port, 0, 3, host), at(port, 1, 3, host), at(port, 1, 3, host), late)
    assert all(type(error) is InvalidUsage and error.peers == (1,) for error in results), results
    assert time.monotonic() - began < 9


def test_known_places_are_kept(host):
    port = free_port()
    calls = []
    for rank in range(2):
        identity = replace(by_name(rank), master_addr="127.0.0.1", master_port=port, local_rank=1 - rank)
        calls.append(lambda identity=identity: join_rendezvous(identity, engine=host, timeout=10))
    assert [result.local_rank for result in threads(*calls)] == [1, 0]


# ---- With torch.distributed.


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_initialised_torch_distributed_knows_who_this_is(group_of_one, monkeypatch):
    found = identify_process()
    assert (found.rank, found.size, found.local_rank, found.local_size) == (0, 1, 0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (identify_process().rank, identify_process().size, identify_process().launcher) == (0, 1, "torch")
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert identify_process().launcher == "torch"


def test_numbers_that_are_not_torchs(group_of_one, host):
    with pytest.raises(InvalidUsage, match="rank 0 of 1.*rank 1 of 2"):
        join_rendezvous(by_name(1), engine=host)


def test_an_initialised_torch_distributed_carries_the_meeting(host, monkeypatch):
    store = dist.HashStore()
    numbers = threading.local()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: numbers.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def call(rank):
        def run():
            numbers.rank = rank
            return join_rendezvous(identify_process(), engine=host, timeout=10)

        return run

    check_met(threads(call(0), call(1)), 2)
