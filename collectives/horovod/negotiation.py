"""Which operations all ranks have submitted: the table that every rank keeps alike, and how operations are fused.

Ranks submit in any order. In each cycle they tell each other what is new; an operation is carried out when all ranks
have submitted it, in the order in which that came to be known, which is the same everywhere. Nothing here communicates.
"""

from __future__ import annotations

from typing import NamedTuple

from .requests import Signature, dtype_of

__all__ = ["Batch", "Ready", "Table", "fuse"]

_ALONE = 1 << 20  # bytes; on the host the copies to and from a fusion buffer then take longer than a call of its own
_SPECIAL = frozenset({"bool", "int16"})  # reduced as other dtypes, each by itself


class Ready(NamedTuple):
    """An operation that all ranks have submitted: each rank's signature, None for one that has joined, or an error."""

    key: str
    signatures: list[Signature | None]
    error: str | None

    @property
    def any(self) -> Signature:
        """The signature of the first rank that has one."""
        return next(each for each in self.signatures if each is not None)


class Batch(NamedTuple):
    """Allreduces that go as one; all of one dtype, device, op and scale."""

    members: list[Ready]


class Table:
    """What each of ``size`` ranks has announced and not all have."""

    def __init__(self, size: int):
        self.size = size
        self.waiting: dict[str, list[Signature | None]] = {}
        self.joined: list[int] = []  # in the order of joining
        self._known: list[list[Signature]] = [[] for _ in range(size)]  # by rank and number
        self._unnamed: list[dict[str, int]] = [{} for _ in range(size)]
        self._ready: list[Ready] = []

    def learn(self, rank: int, new: list[Signature], *, afresh: bool = False) -> None:
        """Number a rank's new signatures, on from what is known of it; ``afresh``: from 0."""
        if afresh:
            self._known[rank] = []
        self._known[rank] += new

    def announce(self, rank: int, numbers) -> None:
        """Enter what a rank submits, in its order."""
        known, waiting, joined, size = self._known[rank], self.waiting, self.joined, self.size
        for number in numbers:
            signature = known[number]
            key = key_of(signature, self._unnamed[rank])
            row = waiting.get(key)
            if row is None:
                row = waiting[key] = [None] * size
            row[rank] = signature
            if row.count(None) <= len(joined):
                self._complete(key, row)

    def join(self, rank: int) -> None:
        """Enter that a rank has no more data: it takes part in what the others submit."""
        self.joined.append(rank)
        for key, row in list(self.waiting.items()):
            if row.count(None) <= len(self.joined):
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
        return last

    def _complete(self, key: str, row: list[Signature | None]) -> None:
        if any(each is None and rank not in self.joined for rank, each in enumerate(row)):
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


def unlike(row: list[Signature | None]) -> str | None:
    """Tell how the ranks' signatures of one operation contradict each other; None: they don't."""
    first_rank, first = next((rank, each) for rank, each in enumerate(row) if each is not None)
    kind = first.kind
    joined = [rank for rank, each in enumerate(row) if each is None]
    if joined and (kind not in _WITH_JOIN or first.op == "adasum"):
        what = "Adasum" if first.op == "adasum" else kind
        return f"{what} can't be done once a rank has joined, as rank {joined[0]} has: it has nothing to give"
    if row.count(first) + len(joined) == len(row):
        return None
    for rank, each in enumerate(row):
        if each is None or each == first:
            continue
        for what, mine, theirs in _compared(kind, first, each):
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
    open_batches: dict[tuple, tuple[list[Ready], int]] = {}
    for each in ready:
        first = each.any
        if each.error is not None or first.kind != "allreduce" or not _fusible(first):
            plan.append(each)
            continue
        nbytes = first.nbytes
        if nbytes >= _ALONE and first.device == "cpu":
            plan.append(Batch([each]))
            continue
        alike = (first.dtypes[0], first.device, first.op, first.prescale, first.postscale, first.wire)
        members, total = open_batches.get(alike, (None, 0))
        if members is None or total + nbytes > threshold:
            members, total = [], 0
            plan.append(Batch(members))
        members.append(each)
        open_batches[alike] = members, total + nbytes
    return plan


def _fusible(signature: Signature) -> bool:
    dtypes = signature.dtypes
    if signature.op == "adasum" or not dtypes:
        return False
    return dtypes.count(dtypes[0]) == len(dtypes) and dtypes[0] not in _SPECIAL and dtype_of(dtypes[0]) is not None
