"""Liveness of ranks: the process of each rank, and whether it has ended.

A process is identified by its node, its pid namespace, its pid and its start time. A rank publishes
its process in torch.distributed's store at its first use of this package, long before other ranks
wait for it. The kernel knows whether a process of the same node lives. A process that ends by an
exception writes its error to the store.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import socket
import sys
import weakref
from collections.abc import Iterable

import torch.distributed as dist

from ..errors import TransportError
from ..launcher import get_start_time, read_stat
from ..secret import seal, unseal
from ..torch_compat import default_store
from .multinode.topology import identify_node

__all__ = [
    "ProcessExits", "RankExits", "describe_exit", "exit_reason", "has_ended", "identify_process", "publish_process",
    "this_process",
]  # fmt: skip

_PREFIX = "collectives/process"
_PROBE_S = 0.5
_MAX_TEXT = 500
_NUMBER = re.compile(r"[0-9]{1,20}")
_MAX_PID = 1 << 31

_published: list = []  # (weak reference to the store, key, pid) of each store that has this process


@functools.cache
def _identity(pid: int, node: str) -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{node}|{namespace}|{pid}|{get_start_time(pid)}"


def this_process() -> str:
    """Return this process's identity, for `has_ended` in another process."""
    return identify_process(os.getpid())


def identify_process(pid: int) -> str:
    """Return the identity of a process of this node and process namespace."""
    host, boot_id, _ = identify_node()
    return _identity(pid, boot_id or host)


def has_ended(process: str) -> bool:
    """Return whether a process has ended; False also where this process can't know.

    `process`: its identity, which its own `this_process` has returned. A zombie has ended.
    """
    words, own = process.split("|"), this_process().split("|")
    if len(words) != 4 or words[:2] != own[:2] or not words[1] or not all(map(_NUMBER.fullmatch, words[2:])):
        return False
    pid, started = int(words[2]), int(words[3])
    if pid >= _MAX_PID:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    try:
        _, fields = read_stat(pid)
    except OSError:  # it ended just now, or /proc is hidden: the next call finds out
        return False
    return fields[0] in (b"Z", b"X") or (started > 0 and int(fields[19]) != started)


def publish_process(store=None, rank: int | None = None) -> None:
    """Publish this process's identity in a torch store, once, as a rank of those that share it.

    None: in the store of torch.distributed's default group, if there is one.
    """
    if store is None:
        if not (dist.is_available() and dist.is_initialized()):
            return
        store, rank = default_store(), dist.get_rank()
    pid = os.getpid()
    if any(known() is store and its_pid == pid for known, _, its_pid in _published):
        return
    key = f"{_PREFIX}/{rank}"
    # A store that is closed is reported by the first wait that needs it.
    with contextlib.suppress(RuntimeError):
        store.set(key, seal(this_process().encode(), key))
        _published[:] = [each for each in _published if each[0]() is not None and each[2] == pid]
        _published.append((weakref.ref(store), key, pid))


class RankExits:
    """How ranks of a group that have published their processes ended.

    `ranks`: their ranks in the default group.
    """

    def __init__(self, store: dist.Store, ranks: Iterable[int]):
        self._store = store
        self._global_ranks = list(ranks)
        self._processes: dict[int, str] = {}

    def reason(self, rank: int) -> str:
        """Return how a rank of the group has ended.

        "" while it lives, or where this process can't know.
        """
        key = f"{_PREFIX}/{self._global_ranks[rank]}"
        if rank not in self._processes and self._store.check([key]):
            self._processes[rank] = _read(self._store, key)
        process = self._processes.get(rank, "")
        ended = f"{key}/ended/{process}"
        return _read(self._store, ended) if process and self._store.check([ended]) else exit_reason(process)

    def reasons_without_store(self) -> dict[int, str]:
        """Return the reasons of the ranks whose processes were read before the store was closed."""
        return {rank: describe_exit(process) for rank, process in self._processes.items() if has_ended(process)}


def _read(store: dist.Store, key: str) -> str:
    """Return the text of a key; "" where nobody who has the job's secret has written it."""
    try:
        return unseal(store.get(key), key).decode("utf-8", "replace")
    except TransportError:
        return ""


class ProcessExits:
    """How ranks have ended whose processes are known, with the methods of `RankExits`."""

    def __init__(self, processes: Iterable[str]):
        self._processes = list(processes)

    def reason(self, rank: int) -> str:
        """Return how a rank has ended, "" while it lives or where this process can't know."""
        return exit_reason(self._processes[rank])

    def reasons_without_store(self) -> dict[int, str]:
        """Return the reasons of the ranks that have ended."""
        return {rank: how for rank in range(len(self._processes)) if (how := self.reason(rank))}


def exit_reason(process: str) -> str:
    """Return the message that a process has ended; "" while it lives, or where that isn't known."""
    return describe_exit(process) if has_ended(process) else ""


def describe_exit(process: str) -> str:
    """Return the message that a process has ended."""
    return f"its process {process.split('|')[2]} has ended"


# ---- The end of this process.


def _at_exit() -> None:
    """Publish the exception that ends this process: ranks on other nodes can't observe its end."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # Python 3.12, and before
    if error is None:
        return
    text = f"it ended with {type(error).__name__}: {error}"[:_MAX_TEXT]
    for reference, key, pid in _published:
        store = reference()
        if store is None or pid != os.getpid() or not _is_reachable(store):
            continue
        with contextlib.suppress(RuntimeError):
            ended = f"{key}/ended/{this_process()}"
            store.set(ended, seal(text.encode(), ended))


def _is_reachable(store: dist.Store) -> bool:
    """Return whether a TCP store's server runs: if it doesn't, torch writes a stack to stderr."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return True
    try:
        socket.create_connection((store.host, store.port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


atexit.register(_at_exit)
