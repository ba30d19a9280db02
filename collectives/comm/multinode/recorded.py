"""Collectives on long arrays over several nodes, recorded once and run by the binding.

A long array goes through the steps of `hierarchical` in chunks, and each chunk is a dozen calls. In
Python they cost as much as a fifth of the time of all cores. So the first call of a kind runs the
same composition on recorders in place of its two levels, which keep what they are called with, by
addresses relative to the call's arrays. Each call then runs what was recorded without Python, all
but the first messages, which compare the ranks' calls.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..._nccl import DTYPES, STEP_KINDS, StepList
from ...arrays import ITEMSIZE
from ...kernels.execution import library as kernel_library
from .connections import NodeConnections
from .hierarchical import HierarchicalCollectives, LevelReduction
from .inter_node import ScheduledInterNode
from .messages import MessageTransport
from .scratch import Scratch
from .topology import Topology

__all__ = ["RecordedCollectives"]

_BASE_BITS = 56  # an address's upper bits: the number of one of the call's arrays
_SEND, _SUMS, _OUT = (number << _BASE_BITS for number in (1, 2, 3))
_UINT8 = DTYPES["uint8"]
_MAX_RECORDINGS = 32


@dataclass(slots=True)
class _Steps:
    """Steps [first, end) of the list, run without Python."""

    first: int
    end: int


@dataclass(slots=True)
class _FirstMessages:
    """The first messages, which Python sends and receives: (method, address, count, dtype, peer)."""

    messages: list[tuple]
    meanwhile: list = field(default_factory=list)


class _Recorder:
    """What is recorded: the rows of a `StepList`, and in which order Python runs parts of it."""

    def __init__(self):
        self.items: list = []
        self.steps: list[tuple] = []
        self.messages: list[tuple] = []
        self.kernels: list[bytes] = []
        self.sources: list[int] = []
        self.compared = False  # the first messages are recorded
        self._target = self.items

    def add(self, kind, dtype=0, op=0, root=0, count=0, start=0, to=0, first=0, end=0) -> None:
        self.steps.append((STEP_KINDS[kind], dtype, op, root, count, start, to, first, end))
        target = self._target
        if target and isinstance(target[-1], _Steps) and target[-1].end == len(self.steps) - 1:
            target[-1].end = len(self.steps)
        else:
            target.append(_Steps(len(self.steps) - 1, len(self.steps)))

    def add_extension(self) -> None:
        """Record the place between the first step and the messages, see `before_inter_node`."""
        self._target.append(None)

    def add_first_messages(self, messages: list[tuple], meanwhile: Callable[[], None] | None) -> None:
        self.compared = True
        first = _FirstMessages(messages)
        self._target.append(first)
        if meanwhile is not None:
            self._target = first.meanwhile
            meanwhile()
            self._target = self.items

    def add_kernel(self, kernel, args, device) -> None:
        """Record a reduction, in place of running it; the table of its sources is there."""
        first = len(self.sources)
        self.sources += (ctypes.c_uint64 * args.n).from_address(args.sources)
        self.add("kernel", op=kernel.number, root=len(self.kernels), to=args.out, first=first, end=len(self.sources))
        self.kernels.append(bytes(args))


class _RecordedIntraNode:
    """Stand-in for the engine's communicator of a node."""

    def __init__(self, recorder: _Recorder):
        self.library = self
        self._add = recorder.add
        self.group_start = partial(recorder.add, "group_start")
        self.group_end = partial(recorder.add, "group_end")

    def group_cancel(self) -> None:
        """Recording has failed: nothing is kept."""

    def reduce_scatter(self, send, recv, count, dtype, op) -> None:
        self._add("reduce_scatter", dtype, op, 0, count, send, recv)

    def reduce(self, send, recv, count, dtype, op, root) -> None:
        self._add("reduce", dtype, op, root, count, send, recv)

    def all_gather(self, send, recv, count, dtype) -> None:
        self._add("all_gather", dtype, 0, 0, count, send, recv)

    def broadcast(self, send, recv, count, dtype, root) -> None:
        self._add("broadcast", dtype, 0, root, count, send, recv)


class _RecordedTransport:
    """Stand-in for `messages.MessageTransport`. ``places``: of the peers' sockets, by peer."""

    def __init__(self, recorder: _Recorder, places: dict[int, int]):
        self.library = self
        self._recorder = recorder
        self._places = places
        self._pending: list[tuple] = []
        self._meanwhile: Callable[[], None] | None = None

    def group_start(self) -> None:
        self._pending = []

    def group_cancel(self) -> None:
        """Recording has failed: nothing is kept."""

    def send(self, address: int, count: int, dtype: int, peer: int, stream: int = 0) -> None:
        self._pending.append(("send", address, count, dtype, peer))

    def recv(self, address: int, count: int, dtype: int, peer: int, stream: int = 0) -> None:
        self._pending.append(("recv", address, count, dtype, peer))

    def call_meanwhile(self, function: Callable[[], None]) -> None:
        self._meanwhile = function

    def group_end(self) -> None:
        meanwhile, self._meanwhile = self._meanwhile, None
        recorder = self._recorder
        if not recorder.compared:
            recorder.add_first_messages(self._pending, meanwhile)
            return
        first = len(recorder.messages)
        for method, address, count, dtype, peer in self._pending:
            recorder.messages.append((self._places[peer], method == "recv", address, count * ITEMSIZE[dtype]))
        recorder.add("begin_messages", first=first, end=len(recorder.messages))
        if meanwhile is not None:
            meanwhile()
        recorder.add("end_messages")


@dataclass(slots=True)
class _Recording:
    items: list
    steps: StepList
    result: tuple[int, int] | None
    levels: HierarchicalCollectives  # holds the scratch memory and the plans' constants


class RecordedCollectives:
    """The long all-reduces and broadcasts of one communicator over several nodes.

    ``intra_node``: the engine's communicator of this node; ``leaders``: the transport between
    leaders, None on a rank that is none; the rest as in `HierarchicalCollectives`. Each call blocks
    until its result is there, and raises what the levels raise.
    """

    def __init__(
        self, intra_node, connections: NodeConnections, leaders: MessageTransport | None, topology: Topology, *,
        replicated_bytes: int, chunk_bytes: int, before_inter_node: Callable[[], None],
    ):  # fmt: skip
        self._intra_node = intra_node
        self._connections = connections
        self._leaders = leaders
        self._topology = topology
        self._limits = {"replicated_bytes": replicated_bytes, "chunk_bytes": chunk_bytes}
        self._before_inter_node = before_inter_node
        peers = [ranks[topology.local_rank] for ranks in topology.nodes] if topology.is_leader else []
        self._places = {node: i for i, node in enumerate(n for n in range(len(peers)) if n != topology.node)}
        self._peers = [peers[node] for node in self._places]
        self._recordings: OrderedDict[tuple, _Recording] = OrderedDict()

    def takes(self, nbytes: int) -> bool:
        """Return whether an array of so many bytes goes through the steps in chunks."""
        return nbytes >= 2 * self._limits["chunk_bytes"]

    def all_reduce(self, send: int, sums: int, out: int, count: int, what: LevelReduction) -> tuple[int, int]:
        """Reduce ``count`` elements of all ranks; see `HierarchicalCollectives.all_reduce`."""
        places = _SEND, _SEND if sums == send else _SUMS, _SEND if out == send else _SUMS if out == sums else _OUT
        key = "all_reduce", count, what, places
        found = self._find(key, lambda levels: levels.all_reduce(*places, count, what))
        self._run(found.items, found.steps, (send, sums, out))
        return found.result

    def broadcast(self, send: int, recv: int, nbytes: int, root: int) -> None:
        """Send the root's ``nbytes`` to all ranks."""
        places = _SEND, _SEND if recv == send else _SUMS
        found = self._find(("broadcast", nbytes, root, places), lambda levels: levels.broadcast(*places, nbytes, root))
        self._run(found.items, found.steps, (send, recv))

    # ---- Recording.

    def _find(self, key: tuple, call: Callable) -> _Recording:
        found = self._recordings.get(key)
        if found is None:
            found = self._recordings[key] = self._record(call)
            if len(self._recordings) > _MAX_RECORDINGS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return found

    def _record(self, call: Callable) -> _Recording:
        topology, recorder = self._topology, _Recorder()
        inter_node = None
        if topology.is_leader:
            transport = _RecordedTransport(recorder, self._places)
            inter_node = ScheduledInterNode(transport, topology, launch=recorder.add_kernel)
        levels = HierarchicalCollectives(
            _RecordedIntraNode(recorder), inter_node, topology, Scratch(), **self._limits,
            before_inter_node=recorder.add_extension,
        )  # fmt: skip
        result = call(levels)
        steps = StepList(
            self._intra_node, kernel_library().run_address, recorder.steps, recorder.messages, recorder.kernels,
            recorder.sources, [self._connections.descriptor(peer) for peer in self._peers],
        )  # fmt: skip
        return _Recording(recorder.items, steps, result, levels)

    # ---- Running.

    def _run(self, items: Sequence, steps: StepList, bases: tuple[int, ...]) -> None:
        for item in items:
            if item is None:
                self._before_inter_node()
            elif isinstance(item, _Steps):
                seconds = None if self._leaders is None else self._leaders.timeout
                self._connections.run_steps(steps, self._peers, item.first, item.end, bases, seconds)
            else:
                self._send_first_messages(item, steps, bases)

    def _send_first_messages(self, item: _FirstMessages, steps: StepList, bases: tuple[int, ...]) -> None:
        transport = self._leaders
        if item.meanwhile:
            transport.call_meanwhile(partial(self._run, item.meanwhile, steps, bases))
        transport.group_start()
        for method, address, count, dtype, peer in item.messages:
            base, offset = address >> _BASE_BITS, address & ((1 << _BASE_BITS) - 1)
            getattr(transport, method)(offset + (bases[base - 1] if base else 0), count, dtype, peer)
        transport.group_end()
