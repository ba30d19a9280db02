"""A communicator over several nodes without GPUs, with the interface of the binding's communicator.

`MultiNodeComm` has the methods of `_nccl.Comm` that `Communicator` calls, and
`library.MultiNodeLibrary` those of `_nccl.Library`. So everything above them is the same on one
node and on several. `host.HostCollectives` moves the data.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial
from zlib import crc32

import torch

from ..._nccl import DTYPES, OPS, REFUSAL_BYTES, SHRINK_ABORT, ErrorInfo, FlightRing, name_of_tag
from ...arrays import ITEMSIZE
from ...errors import (
    Aborted,
    CollectivesError,
    CollectiveTimeout,
    InternalError,
    InvalidUsage,
    Mismatch,
    RemoteError,
    TransportError,
)  # fmt: skip
from ..engine import Engine
from ..error_ranks import renumber_error
from ..fingerprint import KINDS, PREMUL, fingerprint_of
from ..waiting import call_with_timeout, format_ranks
from .connections import NodeConnections, TransferError
from .error_store import ErrorStore, ParentFailed, StoreGone
from .host import HostCollectives
from .library import Call, CallOrder, MultiNodeLibrary
from .messages import NodeMismatch
from .p2p import P2POp, list_messages
from .parent_watch import ParentWatch
from .reduction import ReduceSpec
from .topology import Topology, group_ranks_by_node

__all__ = ["MultiNodeComm", "NoFastPath", "open_multinode"]

_ENGINES_S = 5.0  # after the deadline, in which the host engine ends its own wait
_UINT8 = DTYPES["uint8"]
_FIRST_CREATED_OP = 1 << 20  # the numbers of premultiplied sums


def open_multinode(engine: Engine, rendezvous, rank: int, seconds: float) -> tuple[Engine, MultiNodeComm]:
    """Open the communicator of ranks on several nodes after their rendezvous.

    Blocks until all ranks have come, at most ``seconds``. Returns the engine to use with it, too.
    """
    library = MultiNodeLibrary.of(engine.library)
    store = ErrorStore(rendezvous.store, rendezvous.store_host, rank)
    native = MultiNodeComm(library, rendezvous.peers, rank, store, rendezvous.name, seconds)
    return replace(engine, library=library), native


class _PartsMismatch(NodeMismatch):
    """What a comparison of parts has found, on all ranks when all have exchanged them."""


class NoFastPath:
    """Stand-in for `_nccl.ArrayCalls` that takes no call: all calls take the general path."""

    def _refuse(self, *arguments) -> bool:
        return False

    all_reduce = reduce = reduce_scatter = all_gather = broadcast = all_to_all = _refuse
    gather = scatter = send = recv = _refuse


class MultiNodeComm:
    """A rank of a communicator over several nodes; the methods are those of `_nccl.Comm`.

    ``peers``: `PeerInfo` of its ranks; ``uid``: its name in the store; ``seconds``: limit of the
    constructor, which blocks until all ranks are connected. After a failure it can't be used any
    more.
    """

    def __init__(self, library: MultiNodeLibrary, peers, rank: int, store: ErrorStore, uid: str, seconds: float):
        self.library = library
        self.peers = tuple(replace(peer, rank=number) for number, peer in enumerate(peers))
        self.rank = rank
        self.size = len(self.peers)
        self.uid = uid
        self.handle = 1
        self._root_store = store
        self._store = store.with_prefix(f"comm{uid}", rank, [peer.process for peer in self.peers])
        self.call_order = CallOrder()
        self._running: Call | None = None
        self.flight_ring: FlightRing | None = None
        self.tag = 0  # see `Communicator.tag`
        self._failure: CollectivesError | None = None
        self._aborted = False
        self._timeout: float | None = None
        self._init_timeout = seconds
        self._num_splits = self._num_shrinks = 0
        self._premul_factors: dict[int, float | int] = {}  # by the op's number
        self._new_ops = itertools.count(_FIRST_CREATED_OP)
        topology = Topology(group_ranks_by_node(peer.node for peer in self.peers), rank)
        self.local_rank, self.local_size = topology.local_rank, len(topology.local_ranks)
        deadline, connects = time.monotonic() + seconds, False
        try:
            intra_node = _open_intra_node(
                library.library, self._store, topology.local_ranks, rank, deadline, f"id/{topology.node}"
            )
            connects = True
            try:
                connections = NodeConnections(self._store, rank, self.size, max(1.0, deadline - time.monotonic()))
            except BaseException:
                intra_node.abort()
                raise
        except CollectivesError as error:
            raise _share_cause(self._store, error, connects) from error
        self._store.forget_parent()
        self.collectives = HostCollectives(intra_node, connections, topology)
        self._connections = connections
        self._topology = topology

    def __repr__(self):
        return f"<MultiNodeComm rank {self.rank} of {self.size} on {len(self._topology.nodes)} nodes>"

    # ---- Running a call.

    def check_usable(self, op: str) -> None:
        """Raise `Aborted` or `InvalidUsage` where the communicator can't be used."""
        if self._aborted:
            raise Aborted("abort() closed the communicator", op=op, rank=self.rank)
        if not self.handle:
            raise InvalidUsage("communicator is closed", op=op, rank=self.rank)
        if self._failure is not None:
            raise InvalidUsage(
                f"the communicator is out of use since an earlier call failed: {self._failure}",
                op=op, rank=self.rank, peers=self._failure.peers,
            )  # fmt: skip

    def run(self, call: Call) -> None:
        """Run a call whose turn it is."""
        self.check_usable(call.op)
        self._running = call
        call.record_start()
        try:
            self.collectives.begin_call(self._timeout, call.label)
            call.body()
        except _PartsMismatch as error:  # all ranks have it, and the communicator goes on
            error.error.op, error.error.tag = call.label[0] or call.op, name_of_tag(call.tag)
            call.record_end(error.error)
            raise error.error from error
        except Exception as error:
            found = self._fail(error, call.label[0] or call.op)
            found.tag = name_of_tag(call.tag)
            call.record_end(found)
            raise found from error
        except BaseException:  # Ctrl-C: the peers must not be left waiting
            self._shut_down(Aborted("the call was interrupted", op=call.op, rank=self.rank))
            raise
        else:
            call.record_end()
        finally:
            self._running = None

    def attach_flight_ring(self, ring: FlightRing | None) -> None:
        """Record the calls from now on in a ring; None: no more."""
        self.flight_ring = ring

    def _fail(self, error: Exception, op: str) -> CollectivesError:
        """Post the cause of a failed call, shut down, and return the error to raise."""
        if self._aborted:
            return Aborted("abort() closed the communicator during the call", op=op, rank=self.rank)
        found = _translate_error(error, op, self.peers, self._topology, self._timeout)
        found = _find_cause(self._store, found, isinstance(error, TransferError))
        self._store.post_error(found)
        self._shut_down(found)
        return found

    def _shut_down(self, error: CollectivesError) -> None:
        """End everything in flight, here and at the peers, and refuse further calls."""
        self._failure = self._failure or error
        self._connections.abort()
        if self.collectives.intra_node.handle:
            self.collectives.intra_node.abort()

    # ---- Calls.

    def all_reduce(self, send, recv, count, dtype, op, stream=0, config=None) -> None:
        self.all_reduce_share(send, recv, count, dtype, op, 0, stream)

    def all_reduce_share(self, send, recv, count, dtype, op, stats_out, stream=0) -> None:
        spec, fingerprint = self._describe_reduction("all_reduce", dtype, count, op)
        body = partial(self.collectives.all_reduce, fingerprint, send, recv, count, spec, stats_out)
        self._add_call("all_reduce", count, dtype, body, stream)

    def reduce(self, send, recv, count, dtype, op, root, stream=0, config=None) -> None:
        spec, fingerprint = self._describe_reduction("reduce", dtype, count, op, root)
        body = partial(self.collectives.reduce, fingerprint, send, recv, count, spec, root)
        self._add_call("reduce", count, dtype, body, stream)

    def reduce_scatter(self, send, recv, recvcount, dtype, op, stream=0, config=None) -> None:
        self.reduce_scatter_share(send, recv, recvcount, dtype, op, 0, stream)

    def reduce_scatter_share(self, send, recv, recvcount, dtype, op, stats_out, stream=0) -> None:
        spec, fingerprint = self._describe_reduction("reduce_scatter", dtype, recvcount, op)
        body = partial(self.collectives.reduce_scatter, fingerprint, send, recv, recvcount, spec, stats_out)
        self._add_call("reduce_scatter", recvcount * self.size, dtype, body, stream)

    def all_gather(self, send, recv, sendcount, dtype, stream=0, config=None) -> None:
        fingerprint = _make_fingerprint(self.library, "all_gather", dtype, sendcount)
        body = partial(self.collectives.all_gather, fingerprint, send, recv, sendcount * ITEMSIZE[dtype])
        self._add_call("all_gather", sendcount * self.size, dtype, body, stream)

    def broadcast(self, send, recv, count, dtype, root, stream=0, config=None) -> None:
        fingerprint = _make_fingerprint(self.library, "broadcast", dtype, count, root=root)
        body = partial(self.collectives.broadcast, fingerprint, send, recv, count * ITEMSIZE[dtype], root)
        self._add_call("broadcast", count, dtype, body, stream)

    def send(self, buf, count, dtype, peer, stream=0) -> None:
        self._add_p2p_call("send", True, buf, count, dtype, peer, stream)

    def recv(self, buf, count, dtype, peer, stream=0) -> None:
        self._add_p2p_call("recv", False, buf, count, dtype, peer, stream)

    def probe(self, peer: int) -> bool:
        """Return whether anything has come from a rank, or its connection has ended; never blocks."""
        node, local_rank = self._topology.locations[peer]
        if node == self._topology.node:
            return self.collectives.intra_node.probe(local_rank)
        return self._connections.has_input(peer)

    def wait_for_input(self, peer: int) -> bool:
        """Block until anything has come from a rank of another node; return False past the time limit."""
        return self._connections.has_input(peer, self._timeout)

    def check_peer(self, peer: int) -> None:
        """Raise `RemoteError` where a rank of another node has left, or its process has ended."""
        if self._connections.is_lost(peer):
            error = TransferError(peer, False, "it was closed")
            raise self._fail(error, "recv") from error

    def all_to_all(self, send, recv, count, dtype, stream=0, config=None) -> None:
        self._add_p2p_collective("all_to_all", send, recv, count, dtype, -1, stream)

    def gather(self, send, recv, count, dtype, root, stream=0, config=None) -> None:
        self._add_p2p_collective("gather", send, recv, count, dtype, root, stream)

    def scatter(self, send, recv, count, dtype, root, stream=0, config=None) -> None:
        self._add_p2p_collective("scatter", send, recv, count, dtype, root, stream)

    def compare_parts(self, own, all, transfers, name, dtype_name, count, dtype, stream=0) -> None:
        self.library.label(name, dtype_name)
        fingerprint = _make_fingerprint(self.library, "all_gather", _UINT8, 0)

        def compare() -> None:
            self.collectives.all_gather(fingerprint, own, all, REFUSAL_BYTES + 16 * self.size)
            try:
                self.library.check_parts(all, self.size, self.rank)
            except Mismatch as error:
                raise _PartsMismatch(error) from error

        self._add_call("all_to_all", count, dtype, compare, stream)

    def _add_call(self, op: str, count: int, dtype: int, body, stream: int) -> None:
        self.library.add_call(Call(self, op, count * ITEMSIZE[dtype], body, stream))

    def _add_p2p_call(self, op, is_send, address, count, dtype, peer, stream) -> None:
        _, label = self.library.get_label()
        p2p_op = P2POp(
            is_send, address, count, dtype, peer, _make_fingerprint(self.library, "message", dtype, count), label
        )
        body = partial(self.collectives.send_and_receive, [p2p_op])
        call = Call(self, op, count * ITEMSIZE[dtype], body, stream, p2p_op)
        call.label = (call.label[0], None)  # the dtype's name is in the P2POp
        self.library.add_call(call)

    def _add_p2p_collective(self, op, send, recv, count, dtype, root, stream) -> None:
        """Add a collective that is made of sends and receives."""
        fingerprint = _make_fingerprint(self.library, op, dtype, count, root=root)
        parts = list_messages(op, send, recv, count * ITEMSIZE[dtype], root, self.rank, self.size)
        _, label = self.library.get_label()
        p2p_ops = [P2POp(is_send, address, count, dtype, peer, fingerprint, label) for is_send, address, peer in parts]
        body = partial(self.collectives.send_and_receive, p2p_ops)
        call = Call(self, op, count * ITEMSIZE[dtype] * self.size, body, stream)
        call.label = (None, None)
        self.library.add_call(call)

    def _describe_reduction(self, kind: str, dtype: int, count: int, op: int, root: int = -1):
        """Return (`ReduceSpec`, fingerprint). Raises `InvalidUsage` for an unknown op."""
        scalar = self._premul_factors.get(op)
        if scalar is None and op not in OPS.values():
            raise InvalidUsage(f"op {op} is none of this communicator's", op=kind, rank=self.rank)
        compared_op = op if scalar is None else PREMUL
        fingerprint = _make_fingerprint(self.library, kind, dtype, count, compared_op, root)
        return ReduceSpec(dtype, op if scalar is None else OPS["sum"], scalar), fingerprint

    def create_premul_sum(self, value, dtype: int) -> int:
        op = next(self._new_ops)
        self._premul_factors[op] = value
        return op

    def destroy_op(self, op: int) -> None:
        self._premul_factors.pop(op, None)

    # ---- State and settings.

    def set_timeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def register(self, address: int, nbytes: int) -> int:
        return self.collectives.intra_node.register(address, nbytes)

    def deregister(self, handle: int) -> None:
        if self.collectives.intra_node.handle:
            self.collectives.intra_node.deregister(handle)

    def sequence(self) -> int:
        return self.collectives.sequence

    def pending(self) -> ErrorInfo | None:
        """Return the operation in progress and the ranks for which it waits, or None."""
        call = self._running
        if call is None:
            return None
        peers = self._connections.awaited_peers
        intra_node = self.collectives.intra_node
        local = intra_node.pending() if intra_node.handle and not peers else None
        if local is not None:
            peers = tuple(self._topology.local_ranks[peer] for peer in local.peers)
        return ErrorInfo(0, "none", self.rank, peers, self.collectives.sequence, call.nbytes, call.op, "in progress")

    # ---- Other communicators.

    def split(self, color: int, key: int, *, config=None):
        """Open one communicator for each color, the engine's own where its ranks share a node.

        A collective.
        """
        table = torch.empty((self.size, 2), dtype=torch.int64, device="cpu")
        mine = torch.tensor([color, key], dtype=torch.int64, device="cpu")
        self.all_gather(mine.data_ptr(), table.data_ptr(), 2, DTYPES["int64"])
        self._num_splits += 1
        if color < 0:
            return None
        rows = [(key, rank) for rank, (theirs, key) in enumerate(table.tolist()) if theirs == color]
        return _open_child(self, "split", [rank for _, rank in sorted(rows)], f"{self.uid}/s{self._num_splits}c{color}")

    def shrink(self, exclude: list[int], *, flags: int = 0, config=None):
        """Open a communicator without some ranks, which may be dead. A collective of the others."""
        if flags & SHRINK_ABORT:
            self._shut_down(Aborted("shrink(abort=True) ended what was in flight", op="shrink", rank=self.rank))
            while self._running is not None:
                time.sleep(1e-3)
        self._num_shrinks += 1
        left = [rank for rank in range(self.size) if rank not in exclude]
        uid = f"{self.uid}/w{self._num_shrinks}-{','.join(map(str, sorted(exclude)))}"
        return _open_child(self, "shrink", left, uid)

    # ---- The end.

    def abort(self) -> None:
        """End everything in flight, from any thread."""
        if not self.handle:
            return
        self._aborted = True
        self.handle = 0
        self._shut_down(Aborted("abort() closed the communicator", rank=self.rank))

    def wait_for_calls(self) -> None:
        """Wait for the calls of other threads. Raises `InvalidUsage` as `destroy` does."""
        self.call_order.check_handler("destroy", self.rank)
        self.call_order.wait_for_calls()

    def destroy(self) -> None:
        """Free everything. Nothing may be in flight.

        Raises `InvalidUsage` in a signal handler that has interrupted a call of this thread.
        """
        if not self.handle:
            return
        self.wait_for_calls()
        self.handle = 0
        if self.collectives.intra_node.handle:
            self.collectives.intra_node.destroy()
        self._connections.close()

    def detach_after_fork(self) -> None:
        """Detach from the parent's connections in a forked child, and leave them open."""
        self._connections.detach_after_fork()


def _open_child(comm: MultiNodeComm, op: str, ranks: list[int], uid: str):
    """Open a child of some ranks; its errors have the parent's rank numbers."""
    rank = ranks.index(comm.rank)
    peers = [comm.peers[each] for each in ranks]
    seconds = comm._timeout or comm._init_timeout
    store, host = comm._root_store.store, comm._root_store.host
    watch = None
    if op == "split":
        watch = ParentWatch(comm._connections, comm._store, uid, ranks, rank) if len(ranks) > 1 else None
        store = ErrorStore(store, host, rank, parent=comm._store, parent_ranks=ranks, watch=watch and watch.check)
    else:  # the parent has failed
        store = ErrorStore(store, host, rank)
    try:
        child = _open_among(comm, peers, rank, store, uid, seconds)
        if watch is not None:
            watch.finish()
        return child
    except BaseException as error:
        if isinstance(error, StoreGone):
            found = StoreGone(error.message, op=op, rank=comm.rank)
        elif isinstance(error, ParentFailed):
            found = error.posted
        elif isinstance(error, CollectivesError):
            found = renumber_error(error, ranks, op=op, rank=comm.rank)
            if isinstance(error, CollectiveTimeout) and store.waits_in_parent(error.peers):
                found = _follow_timeout(comm._store, found)
        else:  # Ctrl-C
            found = Aborted("the call was interrupted", op=op, rank=comm.rank)
        if op == "split":  # others may have opened their part, and be at their next call on this communicator
            comm._store.post_error(found)
            comm._shut_down(found)
        if not isinstance(error, CollectivesError):
            raise
        raise found from error


def _open_among(comm: MultiNodeComm, peers: list, rank: int, store: ErrorStore, uid: str, seconds: float):
    if len(group_ranks_by_node(peer.node for peer in peers)) > 1:
        child = MultiNodeComm(comm.library, peers, rank, store, uid, seconds)
        child.set_timeout(comm._timeout)
        return child
    store = store.with_prefix(f"comm{uid}", rank, [peer.process for peer in peers])
    deadline = time.monotonic() + seconds
    return _open_intra_node(comm.library.library, store, tuple(range(len(peers))), rank, deadline, "id/0")


def _share_cause(store: ErrorStore, error: CollectivesError, connects: bool) -> CollectivesError:
    """Post why a communicator could not be opened; return the cause.

    ``connects``: the nodes were being connected, where a rank only knows who did not come. That one
    may have posted for whom it waited.
    """
    if isinstance(error, ParentFailed):  # the others look there, too
        return error
    if isinstance(error, CollectiveTimeout) and error.peers:
        error = _follow_timeout(store, error)
    elif connects and isinstance(error, CollectiveTimeout | RemoteError | TransportError):
        error = store.find_cause(error)
    store.post_error(error)
    return error


def _find_cause(store: ErrorStore, error: CollectivesError, is_transfer: bool) -> CollectivesError:
    """Return what another rank has posted, where this one only knows that a transfer has failed. A rank whose
    process has ended is the cause, unless one is posted: others, which wait for it to be, would post theirs.
    """
    if isinstance(error, CollectiveTimeout):
        return _follow_timeout(store, error)
    if is_transfer or isinstance(error, RemoteError):
        posted = store.fetch_error(0.0) if store.have_ended(error.peers) else store.fetch_error(peers=error.peers)
        seen_end = isinstance(posted, RemoteError) and error.rank in posted.peers  # this rank's, by a peer
        return error if posted is None or seen_end else posted
    return error


def _follow_timeout(store: ErrorStore, error: CollectiveTimeout) -> CollectiveTimeout:
    """Return the error of a wait that ran out of time, with the ranks at the end of its chain of waits."""
    ends = store.follow_waits(error.peers)
    posted = store.fetch_error(seconds=0.0)
    if posted is not None and error.rank not in posted.peers:
        return posted
    if set(ends) == set(error.peers):
        return error
    text = f"{error.message}; the chain of waits ends at {format_ranks(ends)}"
    return CollectiveTimeout(text, op=error.op, rank=error.rank, peers=ends, detail=error.detail)


def _make_fingerprint(
    library: MultiNodeLibrary, kind: str, dtype: int, count: int, op: int = -1, root: int = -1
) -> tuple[int, ...]:
    """Return what the ranks compare of a call.

    This thread's label has the call's name, and the name of the dtype of arrays that are sent as
    bytes.
    """
    label_op, label_dtype = library.get_label()
    kind = label_op if label_op in KINDS else kind
    digest = 0 if label_dtype is None else crc32(label_dtype.encode())
    return (*fingerprint_of(kind, dtype=dtype, count=count, op=op, root=root), digest)


def _translate_error(
    error: Exception, op: str, peers: tuple, topology: Topology, timeout: float | None
) -> CollectivesError:
    """Return the error of a failed call with the communicator's rank numbers.

    The engine's are local ranks.
    """
    options = {"op": op, "rank": topology.rank}
    if isinstance(error, TransferError):
        host = peers[error.peer].host
        if error.timed_out:
            text = f"rank {error.peer} on {host} did not come within {timeout:g} s"
            return CollectiveTimeout(text, peers=(error.peer,), detail=error.text, **options)
        text = f"rank {error.peer} on {host} died or left: its connection was lost ({error.text})"
        return RemoteError(text, peers=(error.peer,), detail=error.text, **options)
    if isinstance(error, NodeMismatch):
        error.error.op = op
        return error.error
    if not isinstance(error, CollectivesError):
        return InternalError(f"{type(error).__name__}: {error}", **options)
    return renumber_error(error, topology.local_ranks, **options)


def _open_intra_node(library, store: ErrorStore, ranks: tuple[int, ...], rank: int, deadline: float, key: str):
    """Open the engine's communicator of some ranks on this node, by a unique id in the store."""
    if rank == ranks[0]:
        unique_id = library.get_unique_id()
        store.set(key, unique_id.hex())
    else:
        unique_id = bytes.fromhex(store.get(key, deadline, ranks[0]).decode())
    library.set_init_timeout(max(1.0, deadline - time.monotonic()))

    def open_it(_):
        try:
            return library.comm_init_rank(len(ranks), unique_id, ranks.index(rank))
        except CollectivesError as error:
            raise renumber_error(error, ranks, op="init", rank=rank) from error

    def timed_out() -> CollectivesError:  # the engine's own limit comes first
        return CollectiveTimeout("the ranks of this node did not connect in time", op="init", rank=rank)

    return call_with_timeout(open_it, deadline + _ENGINES_S, timed_out, store.check_ranks)
