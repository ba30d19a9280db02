"""The store of an elastic job that ends: what takes its place, and what the ranks write into that."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from collectives.comm.liveness import this_process
from collectives.errors import TransportError
from collectives.rendezvous import launcher_store
from collectives.rendezvous.launcher_store import LauncherStore, StoreMoved, connect, open_store
from collectives.rendezvous.rounds import Rounds


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(launcher_store, "_AGAIN_S", 0.2)
    monkeypatch.setattr(launcher_store, "_SECONDS", 2.0)


@pytest.fixture
def served():
    """Two stores that are served, by their places; without the first one its server has ended."""
    stores = [open_store("127.0.0.1:0", True) for _ in range(2)]
    return {f"127.0.0.1:{store.port}": store for store in stores}


def end(served) -> str:
    """End the first store's server; return its place."""
    place = next(iter(served))
    del served[place]
    return place


def test_the_next_place_is_used(served):
    first, second = served
    store = connect([first, second])
    assert store.place == first and not store.has_moved
    store.call("a", "set", "key", "1")
    end(served)
    with pytest.raises(StoreMoved, match=f"the job's store is now that at {second}"):
        for _ in range(2):  # torch's store notices it at the second call
            store.call("a", "check", ["key"])
    assert (store.place, store.moves, store.has_moved) == (second, 1, True)
    assert not store.call("a", "check", ["key"])
    later = connect([first, second])  # as a process that comes later
    assert later.place == second


def test_an_empty_store_in_reserve_is_not_used(served):
    first, second = served
    end(served)
    with pytest.raises(TransportError, match=f"{first} can't be reached"):
        connect([first, second])


def test_without_one_in_reserve_it_is_an_error(served):
    (first, _) = served
    store = connect([first])
    end(served)
    with pytest.raises(TransportError, match="the launcher's store of the elastic job is gone"):
        for _ in range(2):
            store.call("", "check", ["key"])


def test_another_store_at_the_same_address_is_not_taken(served):
    first, second = served
    store = connect([first, second])
    served.pop(first)
    again = open_store(first, True)  # of another job
    with pytest.raises(StoreMoved):
        for _ in range(2):
            store.call("", "check", ["key"])
    assert store.place == second and again.port


def test_a_round_goes_on_in_the_new_store(served):
    first, second = served
    rounds = Rounds(connect([first, second]), 1, 1, 4)
    before = rounds.join(None, 5.0)
    before = rounds.join(before, 5.0, commits=1)
    end(served)
    assert not rounds.has_joiners(before)
    assert rounds.newest_processes() == [this_process()], "the round before is known there"
    after = rounds.join(before, 5.0, commits=2)
    assert (after.number, after.rank, after.size, after.joined()) == (2, 0, 1, [])


def test_a_new_process_waits_for_the_ranks_there(served):
    first, second = served
    served[second].set("moved", "1")
    end(served)
    with pytest.raises(TransportError, match="no rank of the elastic job came to its new store in 0.1 s"):
        Rounds(connect([second]), 1, 1, 4).join(None, 0.1)


def test_two_that_know_different_rounds(served):
    """One has missed the last round before the store ended: it comes into the next one as a new rank."""
    first, second = served
    ahead = Rounds(connect([first, second]), 1, 1, 4)
    before = ahead.join(None, 5.0)
    behind = Rounds(connect([first, second]), 1, 1, 4)
    behind._last = before
    now = ahead.join(before, 5.0)
    end(served)
    assert not ahead.has_joiners(now) and not behind.has_joiners(before)
    assert ahead._newest() == behind._newest() == 1
    found = []
    thread = threading.Thread(target=lambda: found.append(ahead.join(now, 5.0)))
    thread.start()
    thread.join(30)
    assert found[0].number == 2 and found[0].size == 1


def test_a_plain_store():
    store = LauncherStore(dist.HashStore())
    store.call("a", "set", "key", "1")
    assert store.prefixed("a").get("key") == b"1"
