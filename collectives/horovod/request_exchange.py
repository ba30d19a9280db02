"""Request exchange: gathers what all ranks have submitted, once a cycle, by an all-gather or two.

It has a format of its own and not `comm.agree`'s, since a cycle is a part of each operation: in
the steady state one number travels, that of a plan which all ranks know; else a row, with the ids
of known requests; and requests are encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy

from ..comm.communicator import Communicator
from ..errors import TransportError
from .messages import MAX_BYTES, CachedRequest, Request, cached_request, decode_requests, encode_requests

__all__ = ["RankMessage", "RequestExchange"]

# A row, which a cycle gathers from each rank, is int32: flags, bytes of the payload (which a second
# all-gather gathers), number of request ids, the request ids.
_WORDS = 256
_HEAD = 3
_JOIN, _IDS_IN_PAYLOAD, _BLOCKED = 1, 2, 4  # flags; _IDS_IN_PAYLOAD: the request ids had no room in the row
_FLAGS = _JOIN | _IDS_IN_PAYLOAD | _BLOCKED
_MAX_REQUESTS = 8192  # with ids


class RankMessage(NamedTuple):
    """What one rank has sent in a cycle.

    ``requests``: what it has submitted, in its order. ``join``: whether it has joined. ``blocked``:
    whether all its threads wait.
    """

    requests: list[CachedRequest]
    join: bool
    blocked: bool = False


class RequestExchange:
    """Exchanges requests between the ranks of one process set.

    A request is sent once, as JSON; from then on any rank sends its id, the same on all ranks: at
    the end of a cycle its new requests get the next ids in the order of the ranks. In the cycle
    itself a rank's new requests have the numbers behind the last id. ``control``: communicator on
    host memory.
    """

    def __init__(self, control: Communicator):
        self._control = control
        self._size = control.size
        # By id: the one object for each request that every answer has, whichever a thread has submitted.
        self._requests: list[CachedRequest] = []
        self._ids: dict[Request, int] = {}
        self._row = numpy.zeros(_WORDS, dtype=numpy.int32)
        self._rows = numpy.zeros((self._size, _WORDS), dtype=numpy.int32)
        self._payload = b""
        self._plan_number = numpy.zeros(1, dtype=numpy.int64)
        self._plan_numbers = numpy.zeros((self._size, 1), dtype=numpy.int64)

    def agree(self, plan_number: int) -> bool:
        """Return whether all ranks have sent the same plan number, and not 0; blocks."""
        if self._size == 1:
            return plan_number != 0
        own, gathered = self._plan_number, self._plan_numbers
        own[0] = plan_number
        self._control.all_gather(gathered, own)
        return plan_number != 0 and gathered.tobytes() == self._size * own.tobytes()

    def gather(
        self, submitted: Sequence[CachedRequest], *, join: bool, blocked: bool = False
    ) -> tuple[CachedRequest, ...] | None:
        """Exchange what this rank has submitted; blocks. ``join``: this rank joins; ``blocked``: all
        its threads wait.

        Returns it where all ranks have submitted the same in the same order, and nothing else.
        None: `messages` has what they have sent, and must be called.
        """
        row, known = self._row, self._ids
        requests = [each.request for each in submitted]
        unknown = [each for each in dict.fromkeys(requests) if each not in known]
        numbers = known if not unknown else known | {each: len(known) + i for i, each in enumerate(unknown)}
        ids = [numbers[each] for each in requests]
        in_payload = len(ids) > _WORDS - _HEAD
        payload = b""
        if unknown or in_payload:
            payload = encode_requests(unknown, ids if in_payload else None)
        self._payload = payload
        flags = (_JOIN if join else 0) | (_IDS_IN_PAYLOAD if in_payload else 0) | (_BLOCKED if blocked else 0)
        row[:_HEAD] = flags, len(payload), len(ids)
        if not in_payload:
            row[_HEAD:] = 0
            row[_HEAD : _HEAD + len(ids)] = ids
        if self._size > 1:
            self._control.all_gather(self._rows, row)
        else:
            self._rows = row[None]
        if flags or payload or not (self._rows == row).all():
            return None
        return tuple([self._requests[number] for number in ids])

    def messages(self) -> list[RankMessage]:
        """Gather the payloads, where there are any, and return each rank's message; blocks."""
        found: list[RankMessage] = []
        unknown: dict[Request, CachedRequest] = {}
        for rank, (row, data) in enumerate(zip(self._rows, self._gather_payloads(), strict=True)):
            flags, _, count = row[:_HEAD].tolist()
            ids, listed, new = row[_HEAD : _HEAD + max(count, 0)].tolist(), None, []
            if data:
                new, listed = decode_requests(data, rank)
            if flags & _IDS_IN_PAYLOAD:
                ids = listed or []
            if flags & ~_FLAGS or len(ids) != count:
                raise _unreadable(rank)
            named = [*self._requests, *(self._find(each, unknown) for each in new)] if new else self._requests
            if ids and not 0 <= min(ids) <= max(ids) < len(named):
                text = f"rank {rank} has submitted a request that it never announced"
                raise TransportError(text, op="hvd", peers=(rank,))
            found.append(RankMessage([named[number] for number in ids], bool(flags & _JOIN), bool(flags & _BLOCKED)))
        self._ids |= {each: len(self._requests) + i for i, each in enumerate(unknown)}
        self._requests += unknown.values()
        if len(self._requests) > _MAX_REQUESTS:  # on all ranks in the same cycle
            self._ids.clear()
            self._requests.clear()
        return found

    def _find(self, request: Request, unknown: dict[Request, CachedRequest]) -> CachedRequest:
        """Return the object of a request that a rank has announced, and put a new one into ``unknown``."""
        number = self._ids.get(request)
        if number is not None:
            return self._requests[number]
        if request not in unknown:
            unknown[request] = cached_request(request)
        return unknown[request]

    def _gather_payloads(self) -> list[bytes]:
        lengths = self._rows[:, 1].tolist()
        for rank, length in enumerate(lengths):
            if not 0 <= length <= MAX_BYTES:
                raise _unreadable(rank)
        longest = max(lengths)
        if not longest:
            return [b""] * self._size
        sent = numpy.zeros(longest, dtype=numpy.uint8)
        sent[: len(self._payload)] = numpy.frombuffer(self._payload, dtype=numpy.uint8)
        gathered = sent[None]
        if self._size > 1:
            gathered = numpy.empty((self._size, longest), dtype=numpy.uint8)
            self._control.all_gather(gathered, sent)
        return [bytes(data[:length]) for data, length in zip(gathered, lengths, strict=True)]


def _unreadable(rank: int) -> TransportError:
    return TransportError(f"what rank {rank} announced can't be read", op="hvd", peers=(rank,))
