"""Errors of a smaller communicator in the rank numbers of the larger one that it serves."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import CollectivesError

__all__ = ["renumber", "renumber_error"]


def renumber(text: str, ranks: Sequence[int]) -> str:
    """Return a text of a smaller communicator with the larger one's rank numbers: `ranks`, by the smaller one's.

    Of "rank 1 of 2" the number of ranks is left out.
    """

    def replace(match) -> str:
        return re.sub(r"\d+", lambda n: str(ranks[int(n[0])]) if int(n[0]) < len(ranks) else n[0], match[1])

    return re.sub(r"\b(ranks? \d+(?:(?:, | and )\d+)*)(?: of \d+\b)?", replace, text)


def renumber_error(error: CollectivesError, ranks: Sequence[int], *, op: str, rank: int) -> CollectivesError:
    """Return an error with the larger communicator's rank numbers, in its text and its peers.

    `ranks`: the larger one's number of each rank of the smaller one; `op`, `rank`: the operation's
    name and this rank, in the larger one.
    """

    peers = [ranks[peer] for peer in error.peers if peer < len(ranks)]
    text = renumber(error.message, ranks)
    return type(error)(
        text, peers=peers, code=error.code, seq=error.seq, nbytes=error.nbytes, op=op, rank=rank, tag=error.tag
    )
