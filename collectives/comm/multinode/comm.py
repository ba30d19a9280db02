"""A communicator over several machines without GPUs, in the place of the binding's.

`HostsComm` has the methods of `_nccl.Comm` that `Communicator` calls, and `HostsLibrary` those of `_nccl.Library`, so
that everything above them is the same on one machine and on several. What moves data is in `across.py`.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from zlib import crc32

import torch

from ..._nccl import DTYPES, OPS, SHRINK_ABORT, ErrorInfo
from ...arrays import ITEMSIZE
from ...errors import Aborted, CollectivesError, CollectiveTimeout, InternalError, InvalidUsage, RemoteError
from ..engine import Engine
from ..fingerprint import KINDS, PREMUL, fingerprint_of
from .gloo import Board, Lost, Mesh
from .hierarchical import Across, Message, Reduction, Unlike
from .topology import Layout, grouped

__all__ = ["HostsComm", "HostsLibrary", "NoShortWay", "another", "open_over"]

_FIRST_MADE_OP = 1 << 20  # numbers of premultiplied sums


def open_over(engine: Engine, meeting, rank: int, seconds: float) -> tuple[Engine, HostsComm]:
    """Open the communicator of ranks that have met and are on several machines; `seconds`: limit of all of it.

    Blocks until all have come. Gives the engine to be used with it, too.
    """
    library = HostsLibrary.of(engine.library)
    board = Board(meeting.store, meeting.store_host, rank)
    native = HostsComm(library, meeting.peers, rank, board, "", seconds, keeps=meeting.server)
    return replace(engine, library=library), native


def another(comm, unique_id: bytes):
    """Open one more binding object over a communicator's ranks, with an id that rank 0 has made."""
    if isinstance(comm._native, HostsComm):
        return comm._native.duplicate(unique_id.hex())
    return comm.engine.library.comm_init_rank(comm.size, unique_id, comm.rank)


class NoShortWay:
    """In the place of `_nccl.ArrayCalls`: takes no call, so that all go the longer way."""

    def _refuse(self, *arguments) -> bool:
        return False

    all_reduce = reduce = reduce_scatter = all_gather = broadcast = all_to_all = send = recv = _refuse


class HostsLibrary:
    """The host engine's library for communicators over several machines: its groups, labels and queues are Python's."""

    is_host = True
    _of: dict = {}

    def __init__(self, library):
        self.library = library
        self._here = threading.local()

    @classmethod
    def of(cls, library) -> HostsLibrary:
        """Give the one that belongs to a library."""
        return cls._of.setdefault(id(library), cls(library))

    def __getattr__(self, name: str):
        return getattr(self.library, name)

    def has(self, name: str) -> bool:
        """Tell whether a C function has its counterpart here."""
        return self.library.has(name) and name != "collHostAllReduceCast"

    def label(self, op: str | None = None, dtype: str | None = None) -> None:
        """Say what this thread's next operation is called; see `_nccl.Library.label`."""
        self._here.label = (op, dtype) if op or dtype else None

    def take_label(self) -> tuple[str | None, str | None]:
        """Give what `label` said, once."""
        found = getattr(self._here, "label", None) or (None, None)
        self._here.label = None
        return found

    def group_start(self) -> None:
        """Collect this thread's calls up to the matching end."""
        if getattr(self._here, "depth", 0) == 0:
            self._here.calls = []
        self._here.depth = getattr(self._here, "depth", 0) + 1

    def group_end(self) -> None:
        """End a group; the outermost end issues its calls."""
        self._here.depth -= 1
        if self._here.depth == 0:
            calls, self._here.calls = self._here.calls, []
            if calls:
                _submit(calls, calls[0].stream)

    def group_cancel(self) -> None:
        """Drop this thread's open group."""
        self._here.depth, self._here.calls = 0, []

    def add(self, call: _Call) -> None:
        """Put a call into the open group, or issue it."""
        if getattr(self._here, "depth", 0):
            self._here.calls.append(call)
        else:
            _submit([call], call.stream)

    def queue_create(self) -> _Queue:
        """Make a queue for asynchronous operations."""
        return _Queue(self.library.queue_create())

    def comm_init_rank(self, size: int, unique_id: bytes, rank: int, *, config=None):
        """Not to be used: `open_over` opens communicators over several machines."""
        raise InternalError("communicators over several machines don't come from an id", op="init", rank=rank)


class _Call:
    """An operation of one communicator, ready to run."""

    __slots__ = ("before", "body", "comm", "label", "message", "mine", "nbytes", "op", "stream")

    def __init__(self, comm, op: str, nbytes: int, body, stream: int, message: Message | None = None):
        self.comm = comm
        self.op = op
        self.nbytes = nbytes
        self.body = body
        self.stream = stream
        self.message = message
        self.label = comm.library.take_label()
        self.before = self.mine = None


def _submit(calls: list[_Call], stream: int) -> None:
    """Run calls, or put them into the queue that the stream is. The sends and receives of a communicator go as one."""
    runs = []
    by_comm: dict[int, list[_Call]] = {}
    for call in calls:
        call.comm.alive(call.op)
        if call.message is None:
            runs.append(call)
        else:
            by_comm.setdefault(id(call.comm), []).append(call)
    for some in by_comm.values():
        first = some[0]
        if len(some) > 1:
            first.body = partial(first.comm.across.messages, [call.message for call in some])
            first.nbytes = sum(call.nbytes for call in some)
        runs.append(first)
    runs.sort(key=lambda call: call.comm.uid)  # calls of several communicators in one order everywhere
    for call in runs:
        call.before, call.mine = call.comm.take_turn()

    def run() -> None:
        try:
            for call in runs:
                call.before.wait()
                call.comm.run(call)
                call.mine.set()
        finally:
            for call in runs:
                call.mine.set()

    if not stream:
        run()
        return
    try:
        _queues[stream].put(run)
    except BaseException:
        for call in runs:
            call.mine.set()
        raise


# ---- Queues.

_queues: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # by handle


class _Queue:
    """The engine's queue, which calls Python functions here; keeps what a task failed with by its ticket."""

    def __init__(self, queue):
        self._queue = queue
        self._lock = threading.Lock()
        self._failed: dict[int, BaseException] = {}
        _queues[queue.handle] = self

    def __getattr__(self, name: str):
        return getattr(self._queue, name)

    def put(self, run: Callable[[], None]) -> None:
        """Queue a function; what it raises comes out of `wait` and `done` with its ticket."""
        task: dict = {"ticket": None, "error": None}

        def work():
            try:
                run()
            except BaseException as error:
                with self._lock:
                    task["error"] = error
                    if task["ticket"] is not None:
                        self._failed[task["ticket"]] = error

        with self._lock:
            self._queue.call(work)
            task["ticket"] = self._queue.record()
            if task["error"] is not None:
                self._failed[task["ticket"]] = task["error"]

    def wait(self, ticket: int, timeout: float | None = None) -> bool:
        """Wait for a task; see `_nccl.Queue.wait`."""
        return self._told(ticket, self._queue.wait(ticket, timeout))

    def done(self, ticket: int) -> bool:
        """Tell whether a task has ended; see `_nccl.Queue.done`."""
        return self._told(ticket, self._queue.done(ticket))

    def _told(self, ticket: int, ended: bool) -> bool:
        if ended:
            with self._lock:
                error = self._failed.get(ticket)
            if error is not None:
                raise error
        return ended


# ---- A communicator.


class HostsComm:
    """A rank of a communicator over several machines; the methods are those of `_nccl.Comm`.

    ``peers``: `PeerInfo` of its ranks; ``uid``: its name on the board; ``keeps``: what must live as long as it does.
    After a failure it is out of use.
    """

    def __init__(self, library: HostsLibrary, peers, rank: int, board: Board, uid: str, seconds: float, keeps=None):
        self.library = library
        self.peers = tuple(replace(peer, rank=number) for number, peer in enumerate(peers))
        self.rank = rank
        self.size = len(self.peers)
        self.uid = uid
        self.handle = 1
        self._root = board
        self._board = board.under(f"comm{uid}", rank, [peer.process for peer in self.peers])
        self._keeps = keeps
        self._lock = threading.Lock()
        self._last = threading.Event()
        self._last.set()
        self._now: _Call | None = None
        self._dead: CollectivesError | None = None
        self._aborted = False
        self._timeout: float | None = None
        self._opened = seconds
        self._children = self._shrunk = self._made = 0
        self._scalars: dict[int, tuple] = {}
        layout = Layout(grouped(peer.machine for peer in self.peers), rank)
        self.local_rank, self.local_size = layout.local, len(layout.here)
        self.machine_count = len(layout.machines)
        deadline = time.monotonic() + seconds
        try:
            inside = _open_inside(library.library, self._board, layout.here, rank, deadline, f"id/{layout.machine}")
            try:
                mesh = Mesh(self._board, rank, self.size, max(1.0, deadline - time.monotonic()))
            except BaseException:
                inside.abort()
                raise
        except CollectivesError as error:
            self._board.tell(error)
            raise
        self.across = Across(inside, mesh, layout)
        self._layout = layout

    def __repr__(self):
        return f"<HostsComm rank {self.rank} of {self.size} on {len(self._layout.machines)} machines>"

    # ---- Running a call.

    def take_turn(self) -> tuple[threading.Event, threading.Event]:
        """Give the end of the call before, and this one's: calls take effect in call order, from whichever thread."""
        with self._lock:
            before, self._last = self._last, threading.Event()
            return before, self._last

    def alive(self, op: str) -> None:
        """Raise where the communicator can't be used."""
        if self._aborted:
            raise Aborted("abort() closed the communicator", op=op, rank=self.rank)
        if not self.handle:
            raise InvalidUsage("communicator is closed", op=op, rank=self.rank)
        if self._dead is not None:
            raise InvalidUsage(
                f"the communicator is out of use since an earlier call failed: {self._dead}",
                op=op, rank=self.rank, peers=self._dead.peers,
            )  # fmt: skip

    def run(self, call: _Call) -> None:
        """Run a call whose turn it is."""
        self.alive(call.op)
        across = self.across
        self._now = call
        try:
            across.begin(self._timeout)
            if call.label != (None, None):
                across.library.label(*call.label)
            call.body()
        except Exception as error:
            raise self._failed(error, call.label[0] or call.op) from error
        except BaseException:  # Ctrl-C: the peers can't be left waiting
            self._break(Aborted("the call was interrupted", op=call.op, rank=self.rank))
            raise
        finally:
            self._now = None

    def _failed(self, error: Exception, op: str) -> CollectivesError:
        """Give the error of a failed call, in this communicator's numbers, and tell the others the cause."""
        if self._aborted:
            return Aborted("abort() closed the communicator during the call", op=op, rank=self.rank)
        found = self._translated(error, op)
        if isinstance(error, Lost) or isinstance(found, RemoteError):
            # Only that a message hasn't come is known here; who saw the beginning of it has left a note.
            found = self._board.told() or found
        self._board.tell(found)
        self._break(found)
        return found

    def _translated(self, error: Exception, op: str) -> CollectivesError:
        options = {"op": op, "rank": self.rank}
        if isinstance(error, Lost):
            host = self.peers[error.peer].host
            if error.late:
                text = f"rank {error.peer} on {host} did not come within {self._timeout:g} s"
                return CollectiveTimeout(text, peers=(error.peer,), detail=error.text, **options)
            text = f"rank {error.peer} on {host} died or left: its connection was lost ({error.text})"
            return RemoteError(text, peers=(error.peer,), detail=error.text, **options)
        if isinstance(error, Unlike):
            error.error.op = op
            return error.error
        if not isinstance(error, CollectivesError):
            return InternalError(f"{type(error).__name__}: {error}", **options)
        here = self._layout.here

        def renumber(match) -> str:
            return re.sub(r"\d+", lambda n: str(here[int(n[0])]) if int(n[0]) < len(here) else n[0], match[0])

        text = re.sub(r"\branks? \d+(?:(?:, | and )\d+)*", renumber, error.message)
        peers = [here[peer] for peer in error.peers if peer < len(here)]
        return type(error)(text, peers=peers, code=error.code, seq=error.seq, nbytes=error.nbytes, **options)

    def _break(self, error: CollectivesError) -> None:
        """Put the communicator out of use; the peers' waits fail."""
        self._dead = self._dead or error
        self.across.mesh.end()
        if self.across.inside.handle:
            self.across.inside.abort()

    # ---- Calls.

    def all_reduce(self, send, recv, count, dtype, op, stream=0, config=None) -> None:
        how, words = self._reduction("all_reduce", dtype, count, op)
        self._add("all_reduce", count, dtype, partial(self.across.all_reduce, words, send, recv, count, how), stream)

    def all_reduce_share(self, send, recv, count, dtype, op, share, stream=0) -> None:
        how, words = self._reduction("all_reduce", dtype, count, op)
        body = partial(self.across.all_reduce, words, send, recv, count, how, share)
        self._add("all_reduce", count, dtype, body, stream)

    def reduce(self, send, recv, count, dtype, op, root, stream=0, config=None) -> None:
        how, words = self._reduction("reduce", dtype, count, op, root)
        self._add("reduce", count, dtype, partial(self.across.reduce, words, send, recv, count, how, root), stream)

    def reduce_scatter(self, send, recv, recvcount, dtype, op, stream=0, config=None) -> None:
        self.reduce_scatter_share(send, recv, recvcount, dtype, op, 0, stream)

    def reduce_scatter_share(self, send, recv, recvcount, dtype, op, share, stream=0) -> None:
        how, words = self._reduction("reduce_scatter", dtype, recvcount, op)
        body = partial(self.across.reduce_scatter, words, send, recv, recvcount, how, share)
        self._add("reduce_scatter", recvcount * self.size, dtype, body, stream)

    def all_gather(self, send, recv, sendcount, dtype, stream=0, config=None) -> None:
        words = self._words("all_gather", dtype, sendcount)
        body = partial(self.across.all_gather, words, send, recv, sendcount * ITEMSIZE[dtype])
        self._add("all_gather", sendcount * self.size, dtype, body, stream)

    def broadcast(self, send, recv, count, dtype, root, stream=0, config=None) -> None:
        words = self._words("broadcast", dtype, count, root=root)
        body = partial(self.across.broadcast, words, send, recv, count * ITEMSIZE[dtype], root)
        self._add("broadcast", count, dtype, body, stream)

    def send(self, buf, count, dtype, peer, stream=0) -> None:
        self._message("send", True, buf, count, dtype, peer, stream)

    def recv(self, buf, count, dtype, peer, stream=0) -> None:
        self._message("recv", False, buf, count, dtype, peer, stream)

    def all_to_all(self, send, recv, count, dtype, stream=0, config=None) -> None:
        nbytes = count * ITEMSIZE[dtype]
        parts = [(side, base + r * nbytes, r) for r in range(self.size) for side, base in ((True, send), (False, recv))]
        self._messages("all_to_all", parts, count, dtype, stream)

    def gather(self, send, recv, count, dtype, root, stream=0, config=None) -> None:
        parts = [(True, send, root)]
        if self.rank == root:
            parts += [(False, recv + r * count * ITEMSIZE[dtype], r) for r in range(self.size)]
        self._messages("gather", parts, count, dtype, stream, root)

    def scatter(self, send, recv, count, dtype, root, stream=0, config=None) -> None:
        parts = [(False, recv, root)]
        if self.rank == root:
            parts += [(True, send + r * count * ITEMSIZE[dtype], r) for r in range(self.size)]
        self._messages("scatter", parts, count, dtype, stream, root)

    def _add(self, op: str, count: int, dtype: int, body, stream: int) -> None:
        self.library.add(_Call(self, op, count * ITEMSIZE[dtype], body, stream))

    def _message(self, op, sends, address, count, dtype, peer, stream) -> None:
        _, label = getattr(self.library._here, "label", None) or (None, None)
        message = Message(sends, address, count, dtype, peer, self._words("message", dtype, count), label)
        body = partial(self.across.messages, [message])
        call = _Call(self, op, count * ITEMSIZE[dtype], body, stream, message)
        call.label = (call.label[0], None)  # the message has it, where it is needed
        self.library.add(call)

    def _messages(self, op, parts, count, dtype, stream, root=-1) -> None:
        """A collective that is made of messages."""
        words = self._words(op, dtype, count, root=root)
        own = [address for _, address, peer in parts if peer == self.rank]
        if len(own) == 2 and own[0] == own[1]:  # in place
            parts = [part for part in parts if part[2] != self.rank]
        _, label = getattr(self.library._here, "label", None) or (None, None)
        messages = [Message(sends, address, count, dtype, peer, words, label) for sends, address, peer in parts]
        call = _Call(self, op, count * ITEMSIZE[dtype] * self.size, partial(self.across.messages, messages), stream)
        call.label = (None, None)
        self.library.add(call)

    def _words(self, kind: str, dtype: int, count: int, op: int = -1, root: int = -1) -> tuple[int, ...]:
        """Give what the machines compare; a label tells the call's name and the type of what travels as bytes."""
        named, of = getattr(self.library._here, "label", None) or (None, None)
        kind = named if named in KINDS else kind
        digest = 0 if of is None else crc32(of.encode())
        return (*fingerprint_of(kind, dtype=dtype, count=count, op=op, root=root), digest, 0)

    def _reduction(self, kind: str, dtype: int, count: int, op: int, root: int = -1):
        scalar = self._scalars.get(op)
        known = _OP_CODES if scalar is None else (op,)
        if op not in known:
            raise InvalidUsage(f"op {op} is none of this communicator's", op=kind, rank=self.rank)
        how = Reduction(dtype, op) if scalar is None else Reduction(dtype, OPS["sum"], scalar[0])
        return how, self._words(kind, dtype, count, op if scalar is None else PREMUL, root)

    def create_premul_sum(self, value, dtype: int) -> int:
        self._made += 1
        self._scalars[_FIRST_MADE_OP + self._made] = (value, dtype)
        return _FIRST_MADE_OP + self._made

    def destroy_op(self, op: int) -> None:
        self._scalars.pop(op, None)

    # ---- What it is, and settings.

    def set_timeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def register(self, address: int, nbytes: int) -> int:
        return self.across.inside.register(address, nbytes)

    def deregister(self, handle: int) -> None:
        if self.across.inside.handle:
            self.across.inside.deregister(handle)

    def sequence(self) -> int:
        return self.across.sequence

    def pending(self) -> ErrorInfo | None:
        """Give what is in progress and which ranks it waits for, or None."""
        call = self._now
        if call is None:
            return None
        peers = self.across.mesh.waiting
        inside = self.across.inside.pending() if self.across.inside.handle and not peers else None
        if inside is not None:
            peers = tuple(self._layout.here[peer] for peer in inside.peers)
        return ErrorInfo(0, "none", self.rank, peers, self.across.sequence, call.nbytes, call.op, "in progress")

    # ---- Other communicators.

    def split(self, color: int, key: int, *, config=None):
        """Make one communicator for each color; ranks of one machine get the engine's own."""
        table = torch.empty((self.size, 2), dtype=torch.int64)
        mine = torch.tensor([color, key], dtype=torch.int64)
        self.all_gather(mine.data_ptr(), table.data_ptr(), 2, DTYPES["int64"])
        self._children += 1
        if color < 0:
            return None
        rows = [(key, rank) for rank, (theirs, key) in enumerate(table.tolist()) if theirs == color]
        return self._child([rank for _, rank in sorted(rows)], f"{self.uid}/s{self._children}c{color}")

    def shrink(self, exclude: list[int], *, flags: int = 0, config=None):
        """Make a communicator without some ranks, which may be dead."""
        if flags & SHRINK_ABORT:
            self._break(Aborted("shrink(abort=True) ended what was in flight", op="shrink", rank=self.rank))
            while self._now is not None:
                time.sleep(1e-3)
        self._shrunk += 1
        left = [rank for rank in range(self.size) if rank not in exclude]
        return self._child(left, f"{self.uid}/w{self._shrunk}-{','.join(map(str, sorted(exclude)))}")

    def duplicate(self, name: str) -> HostsComm:
        """Open another communicator of the same ranks; the name is the same on all of them and was not used before."""
        return self._child(list(range(self.size)), f"{self.uid}/d{name}")

    def _child(self, ranks: list[int], uid: str):
        rank = ranks.index(self.rank)
        peers = [self.peers[each] for each in ranks]
        seconds = max(self._timeout or 0.0, self._opened)
        if len(grouped(peer.machine for peer in peers)) > 1:
            child = HostsComm(self.library, peers, rank, self._renumbered(rank), uid, seconds, self._keeps)
            child.set_timeout(self._timeout)
            return child
        board = self._root.under(f"comm{uid}", rank, [self.peers[each].process for each in ranks])
        deadline = time.monotonic() + seconds
        return _open_inside(self.library.library, board, tuple(range(len(ranks))), rank, deadline, "id/0")

    def _renumbered(self, rank: int) -> Board:
        return Board(self._root.store, self._root.host, rank)

    # ---- The end.

    def abort(self) -> None:
        """End everything in flight, from any thread."""
        if not self.handle:
            return
        self._aborted = True
        self.handle = 0
        self._break(Aborted("abort() closed the communicator", rank=self.rank))
        self._keeps = None

    def wait_for_calls(self) -> None:
        """Wait for the calls of other threads."""
        self._last.wait()

    def destroy(self) -> None:
        """Free everything; nothing may be in flight."""
        if not self.handle:
            return
        self._last.wait()
        self.handle = 0
        if self.across.inside.handle:
            self.across.inside.destroy()
        self.across.mesh.close()
        self._keeps = None

    def forget(self) -> None:
        """In a forked child: keep the parent's connections from being closed here."""
        self.across.mesh.forget()


_OP_CODES = tuple(OPS.values())


def _open_inside(library, board: Board, ranks: tuple[int, ...], rank: int, deadline: float, key: str):
    """Open the engine's communicator of some ranks on this machine."""
    if rank == ranks[0]:
        unique_id = library.get_unique_id()
        board.put(key, unique_id.hex())
    else:
        unique_id = bytes.fromhex(board.get(key, deadline, ranks[0]).decode())
    library.set_init_timeout(max(1.0, deadline - time.monotonic()))
    return library.comm_init_rank(len(ranks), unique_id, ranks.index(rank))
