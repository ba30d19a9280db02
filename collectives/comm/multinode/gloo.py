"""Between machines: torch's Gloo as a carrier of bytes, and a store on which the ranks leave each other notes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ... import errors
from ...errors import CollectivesError, CollectiveTimeout, RemoteError, TransportError
from ..liveness import describe_exit, has_ended
from ..waiting import RankWait, call_with_timeout, first_line
from .topology import loops, route_to

__all__ = ["Board", "Lost", "Mesh", "span"]

_FOREVER = timedelta(days=365)
_DATA, _END = 0, 1  # Gloo's tags
_TOLD_S = 1.0  # how long a rank that only knows of a lost connection waits for somebody who knows why
_POLL_S = 0.002


class Lost(Exception):
    """A transfer that failed: the rank at its other end, and whether time ran out."""

    def __init__(self, peer: int, late: bool, text: str):
        super().__init__(text)
        self.peer = peer
        self.late = late
        self.text = text


class Board:
    """Notes of a communicator's ranks for each other, in a torch store that lives as long as the communicator.

    ``host``: where the store is, by name or address, as this rank reaches it; "" where that isn't known;
    ``processes``: the ranks', as `presence.this_process` names them.
    """

    def __init__(self, store: dist.Store, host: str, rank: int, processes: Sequence[str] = ()):
        self.store = store
        self.processes = processes
        self.host = host
        self.rank = rank
        self._away = False  # it went with the process that served it: torch writes a stack for each further try

    def under(self, prefix: str, rank: int, processes: Sequence[str]) -> Board:
        """Give a part of it, for a communicator of these processes in which this one has the number ``rank``."""
        return Board(dist.PrefixStore(prefix, self.store), self.host, rank, processes)

    def put(self, key: str, value: bytes | str) -> None:
        """Put up a note."""
        try:
            self.store.set(key, value)
        except RuntimeError as error:
            raise self._gone(error) from error

    def get(self, key: str, deadline: float, peer: int) -> bytes:
        """Wait for ``peer``'s note, until ``deadline`` on ``time.monotonic``'s clock."""
        seconds = max(0.0, deadline - time.monotonic())
        size = max(2, len(self.processes))
        wait = RankWait(
            "to connect the machines", self.rank, size, seconds, deadline=deadline, exit_reason=self._fate, op="init"
        )
        pause = _POLL_S
        while True:
            try:
                if self.store.check([key]):
                    return self.store.get(key)
            except RuntimeError as error:
                raise self._gone(error) from error
            wait.check(lambda: [peer])
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def _fate(self, peer: int) -> str:
        process = self.processes[peer] if peer < len(self.processes) else ""
        return describe_exit(process) if has_ended(process) else ""

    def tell(self, error: CollectivesError) -> None:
        """Leave the cause of a failure for the others, unless somebody was first. Where the store is gone: nothing."""
        text = error.message[:8000].replace(" (this rank)", "")
        told = {"kind": type(error).__name__, "text": text, "peers": list(error.peers), "op": error.op}
        if self._away:
            return
        with contextlib.suppress(RuntimeError):
            if not self.store.check(["failed"]):
                self.store.set("failed", json.dumps(told))

    def told(self, seconds: float = _TOLD_S) -> CollectivesError | None:
        """Give the cause that another rank has left, waiting for it a little; None where there is none."""
        until = time.monotonic() + seconds
        try:
            while not self.store.check(["failed"]):
                if time.monotonic() >= until:
                    return None
                time.sleep(0.01)
            told = json.loads(self.store.get("failed"))
            kind = getattr(errors, told["kind"]) if told["kind"] in errors.__all__ else RemoteError
            return kind(str(told["text"]), op=told["op"], rank=self.rank, peers=[int(peer) for peer in told["peers"]])
        except (ValueError, KeyError, TypeError):  # no such note as `tell` leaves
            return None
        except RuntimeError:
            self._away = True
            return None

    def _gone(self, error: BaseException) -> CollectivesError:
        return RemoteError(
            f"the store by which the ranks of several machines meet is gone ({first_line(error)}): the process that "
            "has served it, rank 0's or the launcher's agent, has ended",
            op="init", rank=self.rank, peers=(0,) if self.rank else (),
        )  # fmt: skip


class Mesh:
    """Connections of one rank with all others of a communicator. Gloo carries bytes; what they mean isn't its matter.

    One thread uses it at a time, beside those that end it.
    """

    def __init__(self, board: Board, rank: int, size: int, seconds: float):
        self._rank = rank
        self.waiting: tuple[int, ...] = ()  # ranks whose messages are awaited now
        deadline = time.monotonic() + seconds
        options = dist.ProcessGroupGloo._Options()
        options._devices = [_device(_address(board, rank, size, deadline))]
        options._threads = 1
        options._timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = dist.PrefixStore("gloo", board.store)

        def late() -> CollectivesError:
            return CollectiveTimeout(
                f"the ranks' machines were not connected within {seconds:g} s: is a firewall between them, or does "
                "GLOO_SOCKET_IFNAME have to name the network interface?",
                op="init", rank=rank,
            )  # fmt: skip

        try:
            self._gloo = call_with_timeout(
                lambda _: dist.ProcessGroupGloo(store, rank, size, options), deadline + 1.0, late
            )
        except CollectivesError:
            raise
        except RuntimeError as error:
            raise TransportError(
                f"Gloo could not connect the machines: {first_line(error)}. GLOO_SOCKET_IFNAME names the interface to "
                "use; the machines must reach each other on any TCP port",
                op="init", rank=rank,
            ) from error  # fmt: skip
        self._others = [peer for peer in range(size) if peer != rank]
        self._jobs: queue.SimpleQueue | None = None
        self._broken = False

    def start(self, sends: Sequence, recvs: Sequence) -> list:
        """Start messages, each (peer, address, bytes); give what `wait` takes. Empty ones aren't sent.

        Messages between two ranks arrive in order; one may be shorter than its receiver has room for.
        """
        started = []
        for incoming, messages in ((True, recvs), (False, sends)):
            method = self._gloo.recv if incoming else self._gloo.send
            for peer, address, nbytes in messages:
                if nbytes:
                    memory = span(address, nbytes)
                    try:
                        started.append((peer, method([memory], peer, _DATA), memory))
                    except RuntimeError as error:
                        raise Lost(peer, False, _reason(error)) from error
        return started

    def wait(self, started: list, seconds: float | None) -> None:
        """Block until messages have come and gone; raises `Lost`. ``seconds``: None for no limit."""
        if not started:
            return
        self.waiting = tuple(dict.fromkeys(peer for peer, _, _ in started))
        try:
            if threading.current_thread() is threading.main_thread():
                self._wait_beside(started, seconds)
            else:
                _wait_here(started, seconds)
        finally:
            self.waiting = ()

    def exchange(self, sends: Sequence, recvs: Sequence, seconds: float | None) -> None:
        """Send and receive, and wait for the end of it."""
        self.wait(self.start(sends, recvs), seconds)

    def _wait_beside(self, started: list, seconds: float | None) -> None:
        """Let a thread wait: signal handlers run in the main thread, and not inside of Gloo."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name="collectives-gloo", daemon=True).start()
        done, outcome = threading.Lock(), []
        done.acquire()
        self._jobs.put((started, seconds, done, outcome))
        try:
            done.acquire()
        except BaseException:
            self.end()  # so that the thread comes back, and nobody writes to the arrays any more
            threading.Lock.acquire(done, True, 5.0)
            raise
        if outcome:
            raise outcome[0]

    def end(self) -> None:
        """Close all connections, from any thread: waits here and at the peers fail."""
        gloo = self._gloo
        if gloo is None or self._broken:
            return
        self._broken = True
        # Gloo has no call for it, but closes a whole group where one wait runs out of time. For a peer that has gone
        # already there is no such wait: so it is tried with all.
        for peer in self._others:
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _END).wait(timedelta(milliseconds=1))
        if self._jobs is not None:
            self._jobs.put(None)

    def close(self) -> None:
        """Free everything; no transfer may be under way."""
        if self._jobs is not None:
            self._jobs.put(None)
        self._jobs = self._gloo = None

    def forget(self) -> None:
        """In a forked child: keep the parent's connections from being closed, or waited for, here."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


def _wait_here(started: list, seconds: float | None) -> None:
    until = None if seconds is None else time.monotonic() + seconds
    for peer, work, _ in started:
        limit = _FOREVER if until is None else timedelta(seconds=max(0.001, until - time.monotonic()))
        try:
            work.wait(limit)
        except RuntimeError as error:
            late = until is not None and time.monotonic() >= until - 0.0005
            raise Lost(peer, late, _reason(error)) from None


def _reason(error: BaseException) -> str:
    """Give what Gloo says, without its source's path and its advice."""
    return first_line(error).rpartition("] ")[2].partition(". ")[0] or first_line(error)


def _serve(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        started, seconds, done, outcome = job
        try:
            _wait_here(started, seconds)
        except BaseException as error:  # raised in the thread that waits
            outcome.append(error)
        del job, started
        done.release()


def span(address: int, nbytes: int) -> torch.Tensor:
    """Give a tensor of bytes over memory that the caller holds."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


# ---- Addresses.

_devices: dict = {}
_kept: list = []


def _device(address: str):
    """Give Gloo's device for an address of this machine; "" lets Gloo choose. GLOO_SOCKET_IFNAME is above both."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    key = (interface, address)
    if key not in _devices:
        make = dist.ProcessGroupGloo.create_device
        try:
            _devices[key] = make(interface=interface) if interface else make(hostname=address or socket.gethostname())
        except RuntimeError as error:
            name = f"GLOO_SOCKET_IFNAME={interface}" if interface else f"address {address or socket.gethostname()}"
            raise TransportError(f"Gloo can't use {name}: {first_line(error)}", op="init") from error
    return _devices[key]


def _address(board: Board, rank: int, size: int, deadline: float) -> str:
    """Give the address at which the others reach this rank: the one from which it reaches the store.

    On the store's own machine that may be a loopback address, even where MASTER_ADDR is the machine's name (Debian's
    /etc/hosts maps that to 127.0.1.1). There it is the one at which the other machines have reached the store.
    """
    own, there = route_to(board.host)
    board.put(f"address/{rank}", json.dumps([own, there]))
    if own and not loops(own):
        return own
    for peer in range(size):
        theirs, seen = json.loads(board.get(f"address/{peer}", deadline, peer))
        if theirs and not loops(theirs) and seen and not loops(seen):
            return seen
    return own


def _after_fork() -> None:
    _kept.extend(_devices.values())
    for device in _devices.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
    _devices.clear()


os.register_at_fork(after_in_child=_after_fork)
