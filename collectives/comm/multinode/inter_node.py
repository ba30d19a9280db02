"""Collectives between the leaders with one number of all nodes, by schedules over a transport.

A transport is anything with send, recv and a library with groups. The schedules are those of the
direct and the one-shot algorithm, so that sums are in node order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

from ..._nccl import DTYPES
from ...arrays import ITEMSIZE
from ..algorithms.plan import CallKey, PlanCache
from ..algorithms.schedule import shard_bounds
from .hierarchical import LevelReduction
from .topology import Topology

__all__ = ["SHORT_BYTES", "ScheduledInterNode"]

SHORT_BYTES = 8192  # up to here more bytes cost less than one more step

_UINT8 = DTYPES["uint8"]
_WHOLE = 1 << 62  # bytes of a chunk: each message is a whole shard


class ScheduledInterNode:
    """The collectives of this leader with those of the other nodes, on host memory.

    ``transport``: its peers are the nodes, in order; ``end_call``: a function to call after the
    messages of a call: a barrier has none, and waits for the other nodes there; ``launch``: runs a
    kernel, None: `kernels.execution.run`. One call at a time; each blocks until its result is there.
    """

    def __init__(
        self, transport, topology: Topology, end_call: Callable[[], None] = lambda: None,
        launch: Callable | None = None,
    ):  # fmt: skip
        self._transport = transport
        self._end_call = end_call
        self._launch = launch
        self._num_ranks = len(topology.locations)
        self._num_nodes = len(topology.nodes)
        self._plans = PlanCache(topology.node, self._num_nodes, torch.device("cpu"), _WHOLE)

    def all_reduce(
        self, send: int, recv: int, count: int, what: LevelReduction, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Reduce ``count`` elements of all nodes, from ``send`` to ``recv`` or in place.

        ``meanwhile``: a function to call once this node's elements are on their way, or None; only
        `messages.MessageTransport` can do that.
        """
        if meanwhile is not None:
            self._transport.call_meanwhile(meanwhile)
        algorithm = self._choose_algorithm(count * ITEMSIZE[what.dtype])
        self._run_reduction(
            "all_reduce", algorithm, send, recv, count, what,
            separate_out=send != recv or what.dtype != what.out_dtype,
        )  # fmt: skip

    def reduce_scatter(self, send: int, recv: int, counts: Sequence[int], what: LevelReduction) -> None:
        """Reduce the nodes' arrays; this node gets its part. ``counts``: the parts' elements."""
        self._run_reduction("reduce_scatter", "direct", send, recv, tuple(counts), what)

    def all_gather(self, recv: int, nbytes: int, served: Sequence[Sequence[int]]) -> dict[int, int]:
        """Gather the blocks of ranks that the leaders serve.

        ``recv``: an array with a block of ``nbytes`` for each rank of the communicator; ``served``:
        the ranks of each node whose blocks its leader has, in ``recv``, and sends. Return the
        blocks' addresses by rank, all in ``recv``.
        """
        self._transport.library.group_start()
        for ranks in zip_longest(*served):
            counts = tuple(0 if rank is None else nbytes for rank in ranks)
            starts = tuple((rank or 0) * nbytes for rank in ranks)
            self._run(CallKey("all_gather", "direct", counts, _UINT8, in_place=True, starts=starts), recv, recv)
        self._transport.library.group_end()
        return {rank: recv + rank * nbytes for ranks in served for rank in ranks}

    def broadcast(self, recv: int, nbytes: int, root: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Send ``nbytes`` of node ``root`` to all nodes. ``meanwhile``: as in `all_reduce`."""
        if meanwhile is not None:
            self._transport.call_meanwhile(meanwhile)
        self._run(CallKey("broadcast", self._choose_algorithm(nbytes), nbytes, _UINT8, root=root), recv, recv)

    def _choose_algorithm(self, nbytes: int) -> str:
        """Return "one-shot" where more bytes cost less than one more step.

        Two nodes send the same bytes either way. Among very many a node's shard may be empty. Then it
        would have no part in a broadcast's first step, and compare its call with others' second one.
        """
        if self._num_nodes == 2 or nbytes <= SHORT_BYTES:
            return "one-shot"
        *_, last, end = shard_bounds(nbytes, self._num_nodes, 1)
        return "direct" if last < end else "one-shot"

    def _run_reduction(self, name, algorithm, send, recv, count, what: LevelReduction, separate_out=False) -> None:
        key = CallKey(
            name, algorithm, count, what.dtype, what.inter_op, separate_out=separate_out, out_code=what.out_dtype,
            average_over=self._num_ranks,
        )  # fmt: skip
        self._run(key, send, recv)

    def _run(self, key: CallKey, send: int, recv: int) -> None:
        self._plans.get(key).run(self._transport, send, recv, None, self._launch)
        self._end_call()
