"""The job's store, which outlives the rendezvous: who serves it, who shares it, and when its port is free again."""

from __future__ import annotations

import gc
import os
import socket
import time

import pytest
import torch.distributed as dist

from collectives.errors import TransportError
from collectives.rendezvous import job_store
from collectives.rendezvous.job_store import connect_to_store, serve_store
from tests.launching import free_port
from tests.rendezvous.joining import at, check_met, nccl_like, over, threads

pytestmark = pytest.mark.usefixtures("no_launcher")


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except ConnectionRefusedError:
        return False
    return True


def becomes_free(port: int) -> bool:
    gc.collect()
    until = time.monotonic() + 5
    while is_open(port) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_open(port)


def meeting(calls):
    """The results of a meeting of NCCL's ranks, whose communicator needs a store."""
    results = threads(*calls)
    check_met(results, len(results))
    assert len({result.name for result in results}) == 1
    for rank, result in enumerate(results):
        dist.PrefixStore(result.name, result.store).set(f"from {rank}", str(rank))
    for result in results:
        assert [result.store.get(f"{result.name}/from {rank}") for rank in range(len(results))] == [b"0", b"1", b"2"]
    return results


def engine():
    return nccl_like(lambda: os.urandom(128))


def test_communicators_of_one_rank_0_share_its_store(store):
    master = free_port()
    first = meeting(at(master, rank, 3, engine()) for rank in range(3))
    second = meeting(over(store, engine(), range(3), 3))
    served = first[0].store
    assert second[0].store is served is serve_store() and first[0].name != second[0].name
    port = served.port
    assert {result.store.port for result in first + second} == {port} and not is_open(master)
    del first, served
    gc.collect()
    assert is_open(port)
    del second
    assert becomes_free(port)


def test_the_agents_store_is_the_jobs():
    agent = dist.TCPStore("localhost", free_port(), None, True, wait_for_workers=False)
    results = meeting(at(agent.port, rank, 3, engine(), agent_store=True) for rank in range(3))
    assert {result.store.port for result in results} == {agent.port}
    assert job_store._served is None or job_store._served() is None


def test_ranks_that_need_no_store_leave_none_open(store, host):
    results = threads(*over(store, host, range(2), 2))
    check_met(results, 2)
    assert [result.store for result in results] == [None, None]
    gc.collect()
    assert job_store._served() is None


def test_a_store_that_is_gone():
    with pytest.raises(TransportError, match="can't be reached.*on any TCP port") as caught:
        connect_to_store("localhost", free_port(), 1.0)
    assert caught.value.peers == (0,)


def test_a_forked_child_serves_its_own():
    served = serve_store()
    pid = os.fork()
    if not pid:
        os._exit(serve_store().port == served.port)
    assert os.waitpid(pid, 0)[1] == 0
