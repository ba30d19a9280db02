"""Which process a rank is, and whether it has ended: what a rank that waits for another one can find out.

A process is named by its machine, its pid namespace, its number and its start time. A rank announces itself in
torch.distributed's store as soon as it has to do with this package, long before the others wait for it. Whether a
process of the same machine lives, the kernel says; one that ends by an exception leaves a note in the store.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import sys
import weakref
from collections.abc import Iterable

import torch.distributed as dist

from ..launcher import get_start_time
from ..torch_compat import default_store
from .multinode.topology import identify_node

__all__ = ["Fates", "announce", "described", "has_ended", "this_process"]

_PREFIX = "collectives/process"
_PROBE_S = 0.5
_MOST_TEXT = 500

_announced: list = []  # (weak reference to the store, key, pid): of the last process group


@functools.cache
def _identity(pid: int, machine: str) -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{machine}|{namespace}|{pid}|{get_start_time(pid)}"


def this_process() -> str:
    """Name this process, for `has_ended` in another one."""
    host, boot_id, _ = identify_node()
    return _identity(os.getpid(), boot_id or host)


def has_ended(process: str) -> bool:
    """Tell whether a process, as `this_process` names it there, has ended. False also where that can't be known here.

    A zombie has ended: nothing of it will come any more.
    """
    words, own = process.split("|"), this_process().split("|")
    if len(words) != 4 or words[:2] != own[:2] or not words[1] or not (words[2] + words[3]).isdigit():
        return False
    pid, started = int(words[2]), int(words[3])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except FileNotFoundError:  # it ended just now, or /proc is hidden: the next look will tell
        return False
    except OSError:
        return False
    return fields[0] in (b"Z", b"X") or (started > 0 and int(fields[19]) != started)


def announce() -> None:
    """Put this process's name into the store of torch.distributed's default group, once; without a group: nothing."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    store = default_store()
    if _announced and _announced[0]() is store and _announced[2] == os.getpid():
        return
    key = f"{_PREFIX}/{dist.get_rank()}"
    # A store that is gone is reported by the first wait that needs it.
    with contextlib.suppress(RuntimeError):
        store.set(key, this_process())
        _announced[:] = weakref.ref(store), key, os.getpid()


class Fates:
    """How ranks of a group that have announced themselves ended; `ranks`: their numbers in the default group."""

    def __init__(self, store: dist.Store, ranks: Iterable[int]):
        self._store = store
        self._numbers = list(ranks)
        self._known: dict[int, str] = {}

    def of(self, rank: int) -> str:
        """Say how a rank of the group has ended; "" while it lives, or where that can't be known here."""
        key = f"{_PREFIX}/{self._numbers[rank]}"
        if self._store.check([f"{key}/ended"]):
            return self._store.get(f"{key}/ended").decode("utf-8", "replace")
        if rank not in self._known and self._store.check([key]):
            self._known[rank] = self._store.get(key).decode("utf-8", "replace")
        return described(self._known[rank]) if has_ended(self._known.get(rank, "")) else ""

    def without_store(self) -> dict[int, str]:
        """Say it of those ranks whose processes were known before the store was gone."""
        return {rank: described(process) for rank, process in self._known.items() if has_ended(process)}


def described(process: str) -> str:
    """Say that a process has ended."""
    return f"its process {process.split('|')[2]} has ended"


# ---- The end of this process.


def _at_exit() -> None:
    """Leave a note where an exception ends this process: ranks on other machines can't see that it has."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # Python 3.12, and before
    if error is None or not _announced or _announced[2] != os.getpid():
        return
    store, key = _announced[0](), _announced[1]
    if store is None or not _answers(store):
        return
    text = f"it ended with {type(error).__name__}: {error}"[:_MOST_TEXT]
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/ended", text)


def _answers(store: dist.Store) -> bool:
    """Tell whether a TCP store's server is there: for one that isn't, torch writes a stack to stderr."""
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
