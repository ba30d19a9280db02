"""Request exchange: gathers what all ranks have submitted, once a cycle, by an all-gather or two.

It has a format of its own and not `comm.consensus`'s, since a cycle is a part of each operation: in
the steady state one number travels, that of a plan which all ranks know; else a row, with the ids
of known requests; and requests are encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy

from ..comm.communicator import Communicator
from ..errors import TransportError
from .messages import MAX_BYTES, CachedRequest, Request, decode_requests, encode_requests

__all__ = ["RankMessage", "RequestExchange"]

# A row, which a cycle gathers from each rank, is int32: flags, bytes of the payload (which a second
# all-gather gathers), number of request ids, the request ids.
_WORDS = 256
_HEAD = 3
_JOIN, _RESTART, _IDS_IN_PAYLOAD = 1, 2, 4  # flags; _IDS_IN_PAYLOAD: the request ids had no room in the row
_FLAGS = _JOIN | _RESTART | _IDS_IN_PAYLOAD
_MAX_REQUESTS = 8192  # of one rank, that the others remember


class RankMessage(NamedTuple):
    """What one rank has sent in a cycle.

    ``new``: requests that get the next request ids, or, with ``restart``, ids from 0; None: there
    are none. ``request_ids``: of what it has submitted, in its order. ``join``: whether it has
    joined.
    """

    new: list[Request] | None
    restart: bool
    request_ids: list[int]
    join: bool


class RequestExchange:
    """Exchanges requests between the ranks of one process set.

    A request is sent once, as JSON; from then on by its id. ``control``: communicator on host
    memory.
    """

    def __init__(self, control: Communicator):
        self._control = control
        self._size = control.size
        self._request_ids: dict[CachedRequest, int] = {}  # by which the other ranks know this rank's requests
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

    def gather(self, requests: Sequence[CachedRequest], *, join: bool) -> list[int] | None:
        """Exchange what this rank has submitted; blocks. ``join``: this rank joins.

        Returns the request ids where all ranks have sent the same ones, and nothing else. None:
        `messages` has what they have sent.
        """
        row, known = self._row, self._request_ids
        flags = _JOIN if join else 0
        unknown = [each for each in dict.fromkeys(requests) if each not in known]
        if len(known) + len(unknown) > _MAX_REQUESTS:
            known.clear()
            unknown = list(dict.fromkeys(requests))
            flags |= _RESTART
        for each in unknown:
            known[each] = len(known)
        ids = [known[each] for each in requests]
        in_payload = len(ids) > _WORDS - _HEAD
        payload = b""
        if unknown or in_payload:
            payload = encode_requests([each.request for each in unknown], ids if in_payload else None)
        self._payload = payload
        row[:_HEAD] = flags | (_IDS_IN_PAYLOAD if in_payload else 0), len(payload), len(ids)
        if not in_payload:
            row[_HEAD:] = 0
            row[_HEAD : _HEAD + len(ids)] = ids
        if self._size > 1:
            self._control.all_gather(self._rows, row)
        else:
            self._rows = row[None]
        return ids if not flags and not payload and (self._rows == row).all() else None

    def messages(self) -> Iterator[RankMessage]:
        """Gather the payloads, where there are any, and yield each rank's message; blocks."""
        for rank, (row, data) in enumerate(zip(self._rows, self._gather_payloads(), strict=True)):
            flags, _, count = row[:_HEAD].tolist()
            ids, listed, new = row[_HEAD : _HEAD + max(count, 0)].tolist(), None, None
            if data:
                new, listed = decode_requests(data, rank)
            if flags & _IDS_IN_PAYLOAD:
                ids = listed or []
            if flags & ~_FLAGS or len(ids) != count:
                raise _unreadable(rank)
            yield RankMessage(new, bool(flags & _RESTART), ids, bool(flags & _JOIN))

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
