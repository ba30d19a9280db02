"""Ranks as threads that join a rendezvous: over a store, at an address, by the job's name."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import SimpleNamespace

from collectives.comm.engine import Engine
from collectives.launcher import Identity
from collectives.rendezvous.join import join_over_store, join_rendezvous
from collectives.rendezvous.peers import Rendezvous


def threads(*calls, limit=30):
    """Run calls at once, each in a thread; their results in order, with what was raised in the place of a result."""
    results = [None] * len(calls)

    def run(index, call):
        try:
            results[index] = call()
        except BaseException as error:
            results[index] = error

    started = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(calls)]
    for thread in started:
        thread.start()
    until = time.monotonic() + limit
    for thread in started:
        thread.join(max(0, until - time.monotonic()))
    assert not any(thread.is_alive() for thread in started), "a rank hangs"
    return results


def over(store, engine, ranks, size, *, timeout=10.0, prefix="test"):
    """The calls of these ranks' meetings over a store."""

    def call(rank):
        return lambda: join_over_store(store, prefix, rank, size, engine=engine, timeout=timeout, device=f"cpu:{rank}")

    return [call(rank) for rank in ranks]


def at(port, rank, size, engine, *, timeout=10.0, generation=0, job_key=b"job", **fields):
    """The call of one rank's meeting at an address."""
    identity = Identity(rank, size, rank, size, "env", "127.0.0.1", port, job_key, **fields)
    return lambda: join_rendezvous(identity, engine=engine, timeout=timeout, generation=generation)


def by_name(rank, size=2, **fields):
    return Identity(rank, size, rank, size, "openmpi", **{"job_key": b"this job", **fields})


def nccl_like(get_unique_id):
    """An engine whose ids come from a function: to the meeting an id is 128 bytes."""
    return Engine("nccl", "cuda", "2.32.3", "/nowhere", SimpleNamespace(is_host=False, get_unique_id=get_unique_id))


def check_met(results, size):
    assert all(isinstance(result, Rendezvous) for result in results), results
    assert {result.unique_id for result in results} == {results[0].unique_id} and len(results[0].unique_id) == 128
    for rank, result in enumerate(results):
        assert [peer.rank for peer in result.peers] == list(range(size))
        assert (result.local_rank, result.local_size) == (rank, size)
        assert result.peers[rank].pid == os.getpid() and result.peers[rank].host == socket.gethostname()
