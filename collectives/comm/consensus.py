"""Checks that all ranks have the same options.

Ranks with different options would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import json

import torch

from ..errors import InvalidUsage

__all__ = ["RankOptions", "verify_same_options"]


def verify_same_options(comm, options: dict) -> None:
    """Raise `InvalidUsage` on all ranks unless their options are the same, compared by repr.

    A collective that blocks, on CUDA too: an all-reduce of 24 bytes, and where the options differ
    an all-gather.
    """
    RankOptions(options).verify_same(
        comm, "the ranks' HookStates differ",
        "give all ranks the same arguments, and the same COLLECTIVES_* variables",
    )  # fmt: skip


class RankOptions:
    """This rank's options, values by their repr, and their digest: a number below 2**56."""

    def __init__(self, options: dict):
        self._text = json.dumps({name: repr(value)[:60] for name, value in options.items()}).encode()
        self.digest = int.from_bytes(hashlib.sha256(self._text).digest()[:7], "big")

    def verify_same(self, comm, what: str, cure: str, error: type = InvalidUsage) -> None:
        """Raise an `error` on all ranks unless all ranks of `comm` have the same options.

        `what`: the message's beginning, "... differ"; `cure`: its end, what to do. A collective
        that blocks, on CUDA too: an all-reduce of 24 bytes, and where the options differ an
        all-gather.
        """
        if comm.size == 1:
            return
        bounds = torch.tensor([self.digest, -self.digest, len(self._text)], dtype=torch.int64).to(comm.device)
        comm.all_reduce(bounds, "max", algorithm="native")
        most, least, longest = bounds.tolist()
        if most == -least:
            return
        own_text = torch.zeros(longest, dtype=torch.uint8)
        own_text[: len(self._text)] = torch.frombuffer(bytearray(self._text), dtype=torch.uint8)
        gathered = torch.empty(comm.size * longest, dtype=torch.uint8, device=comm.device)
        comm.all_gather(gathered, own_text.to(comm.device), algorithm="native")
        texts = [bytes(row.tolist()).rstrip(b"\0") for row in gathered.cpu().split(longest)]
        per_rank = [json.loads(text) for text in texts]
        differing = []
        for name in dict.fromkeys(name for options in per_rank for name in options):
            ranks_by_value: dict[str, list[int]] = {}
            for rank, options in enumerate(per_rank):
                ranks_by_value.setdefault(options.get(name, "unknown"), []).append(rank)
            if len(ranks_by_value) > 1:
                values = [f"{v} on rank {', '.join(map(str, ranks[:8]))}" for v, ranks in ranks_by_value.items()]
                differing.append(f"{name}: {'; '.join(values)}")
        raise error(
            f"{what} ({' | '.join(differing)}): {cure}",
            rank=comm.rank, peers=[rank for rank, text in enumerate(texts) if text != self._text],
        )  # fmt: skip
