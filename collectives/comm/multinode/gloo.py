"""Connections between the ranks of several nodes, by torch's Gloo."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import CollectivesError, CollectiveTimeout, TransportError
from ...json_records import parse_json
from ..waiting import call_with_timeout, first_line, format_ranks
from .error_store import ErrorStore
from .gloo_store import PREFIX, GlooStore
from .topology import find_route, is_loopback

__all__ = [
    "DATA_TAG", "LATE_TAG", "WATCH_TAG", "ConnectionWatch", "GlooConnections", "TransferError", "close_connections",
    "wait",
]  # fmt: skip

_FOREVER = timedelta(days=365)
DATA_TAG, _ABORT_TAG, LATE_TAG, WATCH_TAG, _END_TAG = range(5)  # Gloo's tags
_CONNECTED = "connected/"  # of a store's keys: the rank has connections with all
_LOOK_S = 0.5  # between looks whether the connection that is waited for is still there
_OWN_END_S = 0.2  # for a wait to return that ran out of time itself, by which Gloo closes the connection


class TransferError(Exception):
    """A transfer that has failed.

    ``peer``: the rank at its other end; ``timed_out``: whether its time was over.
    """

    def __init__(self, peer: int, timed_out: bool, text: str):
        super().__init__(text)
        self.peer = peer
        self.timed_out = timed_out
        self.text = text


class GlooConnections:
    """Gloo connections of one rank with all others of a communicator.

    The constructor blocks until all ranks are connected, at most ``seconds``. Raises
    `CollectiveTimeout` past it, and `TransportError` where Gloo can't connect. One thread at a time
    may start transfers and wait; any thread may call `abort`.
    """

    def __init__(self, error_store: ErrorStore, rank: int, size: int, seconds: float):
        self._rank = rank
        self._others = [peer for peer in range(size) if peer != rank]
        self.awaited_peers: tuple[int, ...] = ()  # the peers of the transfers that `wait` waits for now
        deadline = time.monotonic() + seconds
        options = dist.ProcessGroupGloo._Options()
        options._devices = [_get_device(_find_address(error_store, rank, size, deadline))]
        options._threads = 1
        options._timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = GlooStore(error_store, deadline)

        def find_missing(prefix: str) -> list[int]:
            return error_store.find_missing([f"{prefix}{peer}" for peer in range(size)])

        def not_come(missing: list[int]) -> CollectivesError:
            return CollectiveTimeout(
                f"{format_ranks(missing)} of {size} did not come within {seconds:g} s to connect the machines",
                op="init", rank=rank, peers=missing,
            )  # fmt: skip

        def timed_out() -> CollectivesError:
            missing = find_missing(PREFIX)
            if 0 < len(missing) < size:
                return not_come(missing)
            unconnected = [] if missing else find_missing(_CONNECTED)  # all are missing: the store can't be reached
            return CollectiveTimeout(
                f"the ranks' machines were not connected within {seconds:g} s: is a firewall between them, or does "
                "GLOO_SOCKET_IFNAME have to name the network interface?",
                op="init", rank=rank, peers=[peer for peer in unconnected if peer != rank],
            )  # fmt: skip

        try:
            self._gloo = call_with_timeout(
                lambda _: dist.ProcessGroupGloo(store, rank, size, options), deadline + 1.0, timed_out,
                error_store.check_ranks,
            )  # fmt: skip
        except CollectivesError:
            raise
        except RuntimeError as error:
            if isinstance(store.error, CollectivesError):
                raise store.error from error
            missing = find_missing(PREFIX)
            if 0 < len(missing) < size:
                raise not_come(missing) from error
            refused = store.find_rank(str(error))
            raise TransportError(
                f"Gloo could not connect the machines: {first_line(error)}{_find_lack()}. GLOO_SOCKET_IFNAME names the "
                "interface to use; the machines must reach each other on any TCP port",
                op="init", rank=rank, peers=() if refused is None else (refused,),
            ) from error  # fmt: skip
        error_store.set(f"{_CONNECTED}{rank}", b"1")
        self._jobs: queue.SimpleQueue | None = None
        self._broken = False
        self._waits = 0  # that have begun
        self._waits_for: int | None = None  # the peer of the newest one, until it has returned
        self._watched: dict[int, ConnectionWatch] = {}  # by peer

    def start_transfer(self, is_send: bool, peer: int, address: int, nbytes: int, tag: int = DATA_TAG) -> list:
        """Start a send or a receive, and return what `wait` takes; nothing for 0 bytes.

        Transfers between two ranks arrive in order, for each ``tag`` by itself. One may be shorter than
        its receive buffer; a longer one ends the process.
        """
        if not nbytes:
            return []
        memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        try:
            return [(peer, (self._gloo.send if is_send else self._gloo.recv)([memory], peer, tag), memory)]
        except RuntimeError as error:
            raise TransferError(peer, False, _reason_of(error)) from error

    def run_waits(self, waits: Callable[[], None], peers: Sequence[int]) -> None:
        """Run a function that calls `wait`, and block until it returns.

        ``peers``: the ranks for which it waits. It runs in another thread: signal handlers run in the
        main thread, which must not be inside of Gloo then, and Gloo doesn't wake a receive whose data
        has begun to come when the connection is lost. Then this returns without it.
        """
        self.awaited_peers = tuple(dict.fromkeys(peers))
        try:
            self._run_in_thread(waits)
        finally:
            self.awaited_peers = ()

    def wait(self, started: list, seconds: float | None) -> None:
        """Block until transfers are complete, as the function `wait`; inside of `run_waits`."""
        until = None if seconds is None else time.monotonic() + seconds
        for each in started:
            self._waits, self._waits_for = self._waits + 1, each[0]
            wait([each], None if until is None else until - time.monotonic())
            self._waits_for = None

    def _run_in_thread(self, waits: Callable[[], None]) -> None:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_run_jobs, args=(self._jobs,), name="collectives-gloo", daemon=True).start()
        done, outcome, before = threading.Lock(), [], None
        done.acquire()
        self._jobs.put((waits, done, outcome))
        try:
            while not done.acquire(timeout=_LOOK_S):
                peer, at = self._waits_for, self._waits
                if peer is not None and peer not in self._watched:
                    self._watched[peer] = ConnectionWatch(self, peer, _END_TAG)
                if peer is not None and at == before and (lost := self._watched[peer].lost) is not None:
                    if done.acquire(timeout=_OWN_END_S):
                        break
                    raise lost
                before = at
        except TransferError:
            raise
        except BaseException:
            self.abort()  # so that the thread returns, and nothing is written to the arrays any more
            threading.Lock.acquire(done, True, 5.0)
            raise
        if outcome:
            raise outcome[0]

    def abort(self) -> None:
        """Close all connections, from any thread. Waits of this rank and of its peers fail."""
        gloo = self._gloo
        if gloo is None or self._broken:
            return
        self._broken = True
        close_connections(gloo, self._others)
        if self._jobs is not None:
            self._jobs.put(None)

    def close(self) -> None:
        """Free everything. No transfer may be in flight."""
        if self._watched:
            self.abort()  # ends the receives that watch connections
        if self._jobs is not None:
            self._jobs.put(None)
        self._jobs = self._gloo = None

    def detach_after_fork(self) -> None:
        """Detach from the parent's connections in a forked child.

        They are neither closed nor waited for.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


def close_connections(gloo: dist.ProcessGroupGloo, peers: Iterable[int]) -> None:
    """Close all connections of a group, from any thread. ``peers``: its other ranks."""
    # Gloo has no call for it (its `abort` and `shutdown` leave them open), but closes all connections
    # of a group when one wait runs out of time. A receive from a peer that has closed its connection
    # fails at once instead: so it is tried with all peers.
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


class ConnectionWatch:
    """A receive of one byte from a peer, on a thread: it fails where the connection is lost.

    ``lost``: that error; None before, and where the byte has come.
    """

    def __init__(self, connections: GlooConnections, peer: int, tag: int):
        self.lost: TransferError | None = None
        self._byte = torch.empty(1, dtype=torch.uint8)
        try:
            self._started = connections.start_transfer(False, peer, self._byte.data_ptr(), 1, tag)
        except TransferError as error:
            self.lost = error
        else:
            threading.Thread(target=self._wait, name="collectives-gloo-watch", daemon=True).start()

    def _wait(self) -> None:
        try:
            wait(self._started, None)
        except TransferError as error:
            self.lost = error


def wait(started: list, seconds: float | None) -> None:
    """Block until transfers are complete, at most ``seconds`` (None: no limit).

    ``started``: what `GlooConnections.start_transfer` has returned. Raises `TransferError`.
    """
    until = None if seconds is None else time.monotonic() + seconds
    for peer, work, _ in started:
        limit = _FOREVER if until is None else timedelta(seconds=max(0.001, until - time.monotonic()))
        try:
            work.wait(limit)
        except RuntimeError as error:
            timed_out = until is not None and time.monotonic() >= until - 0.0005
            raise TransferError(peer, timed_out, _reason_of(error)) from None


def _reason_of(error: BaseException) -> str:
    """Return Gloo's message without the path of its source and its advice."""
    return first_line(error).rpartition("] ")[2].partition(". ")[0] or first_line(error)


def _run_jobs(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        waits, done, outcome = job
        try:
            waits()
        except BaseException as error:  # raised in the thread that waits
            outcome.append(error)
        del job, waits
        done.release()


# ---- Addresses.

_devices: dict = {}
_devices_of_parent: list = []  # of the process that was forked; never freed


def _get_device(address: str):
    """Return Gloo's device for an address of this node; "" lets Gloo choose.

    GLOO_SOCKET_IFNAME overrides both.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    key = (interface, address)
    if key not in _devices:
        make = dist.ProcessGroupGloo.create_device
        try:
            _devices[key] = make(interface=interface) if interface else make(hostname=address or socket.gethostname())
        except RuntimeError as error:
            name = f"GLOO_SOCKET_IFNAME={interface}" if interface else f"address {address or socket.gethostname()}"
            raise TransportError(f"Gloo can't use {name}: {first_line(error)}{_find_lack()}", op="init") from error
    return _devices[key]


def _find_lack() -> str:
    """Return what this process lacks, of what Gloo's errors don't say; "" for nothing."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        thread = threading.Thread(target=str)
        thread.start()
        thread.join()
    except OSError as error:
        return f" (no file descriptor is free: {error.strerror})"
    except RuntimeError:
        return " (no thread can be started: this process is at its limit of memory or of threads)"
    return ""


def _find_address(error_store: ErrorStore, rank: int, size: int, deadline: float) -> str:
    """Return the address at which peers reach this rank: that from which it reaches the store.

    On the store's own node that may be a loopback address, even where MASTER_ADDR is the node's
    name (Debian's /etc/hosts maps that to 127.0.1.1). There it is the address at which the other
    nodes have reached the store.
    """
    own, there = find_route(error_store.host)
    error_store.set(f"address/{rank}", json.dumps([own, there]))
    if own and not is_loopback(own):
        return own
    for peer in range(size):
        theirs, seen = parse_addresses(error_store.get(f"address/{peer}", deadline, peer), peer)
        if theirs and not is_loopback(theirs) and seen and not is_loopback(seen):
            return seen
    return own


def parse_addresses(data: bytes, peer: int) -> tuple[str, str]:
    """Parse what a peer has set: its own address, and the store's as it reaches that; "" for none.

    Raises `TransportError` for anything else.
    """
    try:
        own, seen = (each or "" for each in parse_json(data))
        if not (isinstance(own, str) and isinstance(seen, str) and f"{own}{seen}".isascii()):
            raise ValueError("no addresses")
    except (ValueError, TypeError) as error:
        text = f"rank {peer}'s record of its address can't be read: {data[:80]!r}"
        raise TransportError(text, op="init", peers=(peer,)) from error
    return own, seen


def _after_fork() -> None:
    _devices_of_parent.extend(_devices.values())
    for device in _devices.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
    _devices.clear()


os.register_at_fork(after_in_child=_after_fork)
