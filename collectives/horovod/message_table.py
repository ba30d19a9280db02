"""Message table: which ranks have submitted which operation, and how operations are fused.

Ranks submit operations in any order. In each cycle they exchange what is new. An operation is
carried out when all ranks have submitted it, in the order in which operations became complete,
which is the same on all ranks. Each rank keeps the same table. This module doesn't communicate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..comm.waiting import format_ranks
from ..errors import TransportError
from .messages import CachedRequest, Request

__all__ = ["CachedPlan", "FusedResponse", "MessageTable", "Response", "fuse_responses"]

_SMALL_BYTES = 1 << 20  # bytes of a fused allreduce
_MAX_PLANS = 256
# Bytes of an allreduce on the host from which on it isn't fused: the copies to and from a fusion
# buffer take longer than a call of its own.
_MIN_UNFUSED_BYTES = 1 << 20


class Response(NamedTuple):
    """An operation that all ranks have submitted.

    ``key``: its name, or its position in a plan. ``cached_requests``: one for each rank; None for a
    rank that has joined. ``error``: why it can't be carried out, or None.
    """

    key: str | int
    cached_requests: list[CachedRequest | None]
    error: str | None

    @property
    def cached(self) -> CachedRequest:
        """The cached request of the first rank that has one."""
        return self.cached_requests[0] or next(each for each in self.cached_requests if each is not None)

    @property
    def request(self) -> Request:
        """The request of the first rank that has one."""
        return self.cached.request


class FusedResponse:
    """Allreduces that are carried out as one, all of one dtype, device, op and scale; or one
    response of any kind.

    ``request``: of the first response. ``error``: why it can't be carried out; such a response is
    alone. ``one_call``: whether `make_call` carries it out; None: the executor finds out.
    """

    __slots__ = ("_small", "error", "one_call", "request", "responses")

    def __init__(self, response: Response):
        self.responses = [response]
        self.request = response.request
        self.error = response.error
        self._small: bool | None = None
        self.one_call: bool | None = None

    @property
    def small(self) -> bool:
        """Whether they are several, small in total, and unpadded in a fusion buffer."""
        if self._small is None:
            requests = [response.cached for response in self.responses]
            small = len(requests) > 1 and sum(cached.nbytes for cached in requests) <= _SMALL_BYTES
            self._small = small and all(cached.unpadded for cached in requests)
        return self._small


class CachedPlan(NamedTuple):
    """Responses to operations that all ranks submit in the same order.

    ``number``: by which all ranks know it, from 1. ``items``: each response with the positions of
    its operations in that order. ``unnamed``: number of operations without a name, by kind.
    """

    number: int
    items: list[tuple[FusedResponse, list[int]]]
    unnamed: dict[str, int]


class MessageTable:
    """Operations that some of ``size`` ranks have submitted, and not all.

    ``waiting``: by key, one cached request for each rank, None where it hasn't submitted the
    operation. ``joined``: ranks that have joined, in the order of joining. ``planned``: whether the
    last cycle was one of a plan, so that nothing waits; the same on all ranks.
    """

    def __init__(self, size: int):
        self.size = size
        self.waiting: dict[str, list[CachedRequest | None]] = {}
        self.joined: list[int] = []
        self.planned = False
        # Operations without a name, by kind: those of plans, which all ranks have submitted, and the others by rank.
        self._unnamed_in_plans: dict[str, int] = {}
        self._unnamed: list[dict[str, int]] = [{} for _ in range(size)]
        self._ready: list[Response] = []
        self._plans: dict[tuple[CachedRequest, ...], CachedPlan] = {}
        self._plan_number = 0  # of the newest plan

    def add_messages(self, messages: Iterable) -> None:
        """Add a cycle's messages of all ranks, by rank, as `RequestExchange.messages` returns them."""
        self.planned = False
        for rank, message in enumerate(messages):
            if message.requests:
                self.add_submitted(rank, message.requests)
            if message.join:
                self.join(rank)

    def add_submitted(self, rank: int, requests: Iterable[CachedRequest]) -> None:
        """Add what a rank has submitted, in its order."""
        waiting, size, unnamed = self.waiting, self.size, self._unnamed[rank]
        for cached in requests:
            key = cached.key or self._unnamed_key(cached.request.kind, unnamed)
            row = waiting.get(key)
            if row is None:
                row = waiting[key] = [None] * size
            row[rank] = cached
            if None not in row or self.joined:
                self._complete_if_ready(key, row)

    def keys_of(self, rank: int, requests: Iterable[CachedRequest]) -> list[str]:
        """Return the keys of operations that a rank submits next."""
        unnamed = dict(self._unnamed[rank])
        return [cached.key or self._unnamed_key(cached.request.kind, unnamed) for cached in requests]

    def _unnamed_key(self, kind: str, unnamed: dict[str, int]) -> str:
        """Return the key of a rank's next operation without a name, and count it in ``unnamed``."""
        number = unnamed.get(kind, 0)
        unnamed[kind] = number + 1
        return f"{kind}.noname.{self._unnamed_in_plans.get(kind, 0) + number}"

    def plan_for(self, requests: tuple[CachedRequest, ...], threshold: int) -> CachedPlan | None:
        """Return the plan of what all ranks have submitted in the same order, and count it as used.

        ``threshold``: as of `fuse_responses`. None: `add_submitted` must be called for each rank.
        """
        unnamed = self._unnamed[0]
        if self.waiting or self.joined or any(each != unnamed for each in self._unnamed[1:]):
            return None
        if any(cached.request.refusal for cached in requests):
            return None
        plan = self._plans.get(requests) or self._make_plan(requests, threshold)
        self.planned = True
        self.use_plan(plan)
        return plan

    def _make_plan(self, requests: tuple[CachedRequest, ...], threshold: int) -> CachedPlan:
        ready = [Response(position, [cached] * self.size, None) for position, cached in enumerate(requests)]
        items = [(item, [each.key for each in item.responses]) for item in fuse_responses(ready, threshold)]
        kinds = [cached.request.kind for cached in requests if not cached.key]
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plan_number += 1
        plan = CachedPlan(self._plan_number, items, {kind: kinds.count(kind) for kind in set(kinds)})
        self._plans[requests] = plan
        return plan

    def find_plan(self, requests: tuple[CachedRequest, ...]) -> CachedPlan | None:
        """Return the plan of what this rank submits, if it has one.

        It may be used where ``planned`` is true and all ranks have found it: call `use_plan` then.
        """
        return self._plans.get(requests)

    def use_plan(self, plan: CachedPlan) -> None:
        """Count the operations of a plan as submitted by all ranks."""
        if plan.unnamed:
            counts = self._unnamed_in_plans
            for kind, count in plan.unnamed.items():
                counts[kind] = counts.get(kind, 0) + count

    def join(self, rank: int) -> None:
        """Record that a rank has no more data: it takes part in what the others submit."""
        if rank in self.joined:
            raise TransportError(f"rank {rank} has joined twice", op="hvd", peers=(rank,))
        self.joined.append(rank)
        for key, row in list(self.waiting.items()):
            self._complete_if_ready(key, row)

    def missing_ranks(self, key: str) -> list[int]:
        """Return the ranks that have not submitted a waiting operation."""
        row = self.waiting.get(key)
        return [] if row is None else [r for r, s in enumerate(row) if s is None and r not in self.joined]

    def describe_waiting(self) -> str:
        """Return which ranks have submitted what, of the operations that are not complete."""
        return "; ".join(
            f"{format_ranks(rank for rank, each in enumerate(row) if each is not None)} submitted {key}"
            for key, row in list(self.waiting.items())[:8]
        )

    def drop_waiting(self) -> None:
        """Drop the operations that are not complete, on all ranks at one time."""
        self.waiting.clear()
        for unnamed in (self._unnamed_in_plans, *self._unnamed):
            unnamed.clear()

    def pop_ready(self) -> list[Response]:
        """Remove and return the complete operations, in the order of their completion."""
        ready, self._ready = self._ready, []
        return ready

    def finish_join(self) -> int | None:
        """Return the rank that joined last, and reset the joins; None before all have joined."""
        if len(self.joined) < self.size:
            return None
        last = self.joined[-1]
        self.joined = []
        for unnamed in (self._unnamed_in_plans, *self._unnamed):  # a rank that had joined has counted fewer
            unnamed.clear()
        return last

    def _complete_if_ready(self, key: str, row: list[CachedRequest | None]) -> None:
        if self.joined and any(each is None and rank not in self.joined for rank, each in enumerate(row)):
            return
        del self.waiting[key]
        self._ready.append(Response(key, row, find_mismatch(row)))


# Kinds in which a rank that has joined can take part: with zeros, with no rows, with nothing.
_KINDS_WITH_JOIN = ("allreduce", "allgather", "barrier")


def find_mismatch(row: list[CachedRequest | None]) -> str | None:
    """Return what differs between the ranks' requests of one operation, as text, or None."""
    first = row[0]
    if first is not None and row.count(first) == len(row) and not first.request.refusal:
        return None
    for rank, each in enumerate(row):
        if each is not None and each.request.refusal:
            return f"rank {rank} takes no part, since it raised {each.request.refusal}"
    first_rank, first = next((rank, each.request) for rank, each in enumerate(row) if each is not None)
    kind = first.kind
    joined = [rank for rank, each in enumerate(row) if each is None]
    if joined and (kind not in _KINDS_WITH_JOIN or first.op == "adasum"):
        what = "Adasum" if first.op == "adasum" else kind
        return f"{what} can't be done once a rank has joined, as rank {joined[0]} has: it has nothing to give"
    for rank, each in enumerate(row):
        if each is None:
            continue
        for what, mine, theirs in _compared_fields(kind, first, each.request):
            if mine != theirs:
                return f"the ranks' {kind} differ in {what}: rank {first_rank} has {mine}, rank {rank} has {theirs}"
    return None


def _compared_fields(kind: str, first: Request, each: Request):
    yield "number of tensors", len(first.shapes), len(each.shapes)
    yield "data type", ", ".join(first.dtypes), ", ".join(each.dtypes)
    yield "device", first.device, each.device
    yield "reduction", first.op, each.op
    yield "prescale and postscale factor", (first.prescale, first.postscale), (each.prescale, each.postscale)
    yield "compression", first.wire, each.wire
    yield "root rank", first.root, each.root
    cut = 1 if kind in ("allgather", "alltoall") else 0  # their first dimension may differ
    yield "number of dimensions", list(map(len, first.shapes)), list(map(len, each.shapes))
    yield (
        "shape" if not cut else "shape behind the first dimension",
        [list(shape[cut:]) for shape in first.shapes],
        [list(shape[cut:]) for shape in each.shapes],
    )


def fuse_responses(responses: list[Response], threshold: int) -> list[FusedResponse]:
    """Fuse allreduces up to ``threshold`` bytes, in the same way on all ranks.

    A fused response has the position of its first member. What isn't an allreduce, what has an
    error, and a large allreduce on the host is fused with no other.
    """
    items: list[FusedResponse] = []
    open_fusions: dict[tuple, list] = {}  # fusion key -> responses, bytes
    for response in responses:
        key, nbytes = response.cached.fusion_key, response.cached.nbytes
        if key is None or response.error is not None or (nbytes >= _MIN_UNFUSED_BYTES and key[1] == "cpu"):
            items.append(FusedResponse(response))
            continue
        fusion = open_fusions.get(key)
        if fusion is None or fusion[1] + nbytes > threshold:
            fusion = open_fusions[key] = [FusedResponse(response), nbytes]
            items.append(fusion[0])
        else:
            fusion[0].responses.append(response)
            fusion[1] += nbytes
    return items
