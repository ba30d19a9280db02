"""Which operations all ranks have submitted: the table that every rank keeps alike, and how operations are fused.

Ranks submit in any order. In each cycle they tell each other what is new; an operation is carried out when all ranks
have submitted it, in the order in which that came to be known, which is the same everywhere. Nothing here communicates.
"""

from __future__ import annotations

from operator import is_
from typing import NamedTuple

from .messages import Request, Signature, request_of

__all__ = ["Batch", "Plan", "Ready", "Table", "fuse", "key_of"]

_LITTLE = 1 << 20  # bytes
_MOST_PLANS = 256
_ALONE = 1 << 20  # bytes; on the host the copies to and from a fusion buffer then take longer than a call of its own


class Ready(NamedTuple):
    """An operation that all ranks have submitted: each rank's request, None for one that has joined, or an error."""

    key: str | int  # in a plan: its place
    requests: list[Request | None]
    error: str | None

    @property
    def request(self) -> Request:
        """The request of the first rank that has one."""
        return self.requests[0] or next(each for each in self.requests if each is not None)

    @property
    def any(self) -> Signature:
        """The signature of the first rank that has one."""
        return self.request.signature


class Batch:
    """Allreduces that go as one; all of one dtype, device, op and scale."""

    __slots__ = ("_small", "members")

    def __init__(self, members: list[Ready]):
        self.members = members
        self._small: bool | None = None

    @property
    def small(self) -> bool:
        """Whether it is several that are little together, and as long in a row as in a padded buffer."""
        if self._small is None:
            requests = [member.request for member in self.members]
            little = len(requests) > 1 and sum(request.nbytes for request in requests) <= _LITTLE
            self._small = little and all(request.dense for request in requests)
        return self._small


class Plan(NamedTuple):
    """What all ranks submit in one and the same order: items with the places of their members in that order.

    ``unnamed``: how many there are of each kind without a name.
    """

    items: list[tuple[Ready | Batch, list[int]]]
    unnamed: dict[str, int]


class Table:
    """What each of ``size`` ranks has announced and not all have."""

    def __init__(self, size: int):
        self.size = size
        self.waiting: dict[str, list[Request | None]] = {}
        self.joined: list[int] = []  # in the order of joining
        self._known: list[list[Request]] = [[] for _ in range(size)]  # by rank and number
        self._unnamed: list[dict[str, int]] = [{} for _ in range(size)]
        self._ready: list[Ready] = []
        self._alike = True  # all ranks' numbers mean the same
        self._plans: dict[tuple[int, ...], Plan] = {}

    def learn(self, rank: int, new: list[Signature], *, afresh: bool = False) -> None:
        """Number a rank's new signatures, on from what is known of it; ``afresh``: from 0."""
        if afresh:
            self._known[rank], self._alike = [], False
        self._known[rank] += map(request_of, new)
        if rank == self.size - 1:  # the last one to be asked in a cycle
            first = self._known[0]
            self._alike = all(len(known) == len(first) and all(map(is_, known, first)) for known in self._known[1:])

    def announce(self, rank: int, numbers) -> None:
        """Enter what a rank submits, in its order."""
        known, waiting, size, unnamed = self._known[rank], self.waiting, self.size, self._unnamed[rank]
        for number in numbers:
            request = known[number]
            key = request.key or key_of(request.signature, unnamed)
            row = waiting.get(key)
            if row is None:
                row = waiting[key] = [None] * size
            row[rank] = request
            if None not in row or self.joined:
                self._complete(key, row)

    def plan_alike(self, numbers: tuple[int, ...], threshold: int) -> Plan | None:
        """Plan what all ranks submit in one and the same order, which is quicker. None: it has to be done by rank."""
        unnamed = self._unnamed[0]
        if self.waiting or self.joined or not self._alike or any(each != unnamed for each in self._unnamed[1:]):
            return None
        plan = self._plans.get(numbers)
        if plan is None:
            requests = [self._known[0][number] for number in numbers]
            ready = [Ready(place, [request] * self.size, None) for place, request in enumerate(requests)]
            items = [
                (item, [member.key for member in item.members] if isinstance(item, Batch) else [item.key])
                for item in fuse(ready, threshold)
            ]
            kinds = [request.signature.kind for request in requests if not request.key]
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[numbers] = Plan(items, {kind: kinds.count(kind) for kind in set(kinds)})
        for each in self._unnamed:
            for kind, count in plan.unnamed.items():
                each[kind] = each.get(kind, 0) + count
        return plan

    def join(self, rank: int) -> None:
        """Enter that a rank has no more data: it takes part in what the others submit."""
        self.joined.append(rank)
        for key, row in list(self.waiting.items()):
            self._complete(key, row)

    def missing(self, key: str) -> list[int]:
        """Give the ranks that have not submitted an operation that waits."""
        row = self.waiting.get(key)
        return [] if row is None else [r for r, s in enumerate(row) if s is None and r not in self.joined]

    def take(self) -> list[Ready]:
        """Give what has become complete since the last time, in the order of becoming so."""
        ready, self._ready = self._ready, []
        return ready

    def all_joined(self) -> int | None:
        """Give the rank that joined last, once all have, and begin anew; else None."""
        if len(self.joined) < self.size:
            return None
        last = self.joined[-1]
        self.joined = []
        for unnamed in self._unnamed:  # a rank that had joined has counted fewer
            unnamed.clear()
        return last

    def _complete(self, key: str, row: list[Request | None]) -> None:
        if self.joined and any(each is None and rank not in self.joined for rank, each in enumerate(row)):
            return
        del self.waiting[key]
        self._ready.append(Ready(key, row, unlike(row)))


def key_of(signature: Signature, unnamed: dict[str, int]) -> str:
    """Give the name by which the ranks' submissions meet; those without a name are numbered in ``unnamed``."""
    if signature.name:
        return f"{signature.kind}.{signature.name}"
    number = unnamed.get(signature.kind, 0)
    unnamed[signature.kind] = number + 1
    return f"{signature.kind}.noname.{number}"


# Kinds for which a rank that has joined has something to give: zeros, no rows, nothing.
_WITH_JOIN = ("allreduce", "allgather", "barrier")


def unlike(row: list[Request | None]) -> str | None:
    """Tell how the ranks' requests of one operation contradict each other; None: they don't."""
    first = row[0]
    if first is not None and row.count(first) == len(row):
        return None
    first_rank, first = next((rank, each.signature) for rank, each in enumerate(row) if each is not None)
    kind = first.kind
    joined = [rank for rank, each in enumerate(row) if each is None]
    if joined and (kind not in _WITH_JOIN or first.op == "adasum"):
        what = "Adasum" if first.op == "adasum" else kind
        return f"{what} can't be done once a rank has joined, as rank {joined[0]} has: it has nothing to give"
    for rank, each in enumerate(row):
        if each is None:
            continue
        for what, mine, theirs in _compared(kind, first, each.signature):
            if mine != theirs:
                return f"the ranks' {kind} differ in {what}: rank {first_rank} has {mine}, rank {rank} has {theirs}"
    return None


def _compared(kind: str, first: Signature, each: Signature):
    yield "number of tensors", len(first.shapes), len(each.shapes)
    yield "data type", ", ".join(first.dtypes), ", ".join(each.dtypes)
    yield "device", first.device, each.device
    yield "reduction", first.op, each.op
    yield "prescale and postscale factor", (first.prescale, first.postscale), (each.prescale, each.postscale)
    yield "compression", first.wire, each.wire
    yield "root rank", first.root, each.root
    cut = 1 if kind in ("allgather", "alltoall") else 0  # the first dimension may differ there
    yield "number of dimensions", list(map(len, first.shapes)), list(map(len, each.shapes))
    yield (
        "shape" if not cut else "shape behind the first dimension",
        [list(shape[cut:]) for shape in first.shapes],
        [list(shape[cut:]) for shape in each.shapes],
    )


def fuse(ready: list[Ready], threshold: int) -> list[Ready | Batch]:
    """Put allreduces together that can go as one, up to ``threshold`` bytes; the same on all ranks.

    Each batch stands where its first member does; what isn't an allreduce, what is large on the host, and what can't be
    done stays as it is.
    """
    plan: list[Ready | Batch] = []
    open_batches: dict[tuple, list] = {}  # what they have in common -> members, bytes
    for each in ready:
        request = each.request
        alike = request.alike
        if alike is None or each.error is not None:
            plan.append(each)
            continue
        nbytes = request.nbytes
        if nbytes >= _ALONE and alike[1] == "cpu":
            plan.append(Batch([each]))
            continue
        batch = open_batches.get(alike)
        if batch is None or batch[1] + nbytes > threshold:
            batch = open_batches[alike] = [[], 0]
            plan.append(Batch(batch[0]))
        batch[0].append(each)
        batch[1] += nbytes
    return plan
