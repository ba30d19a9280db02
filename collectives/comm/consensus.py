"""Whether all ranks were given the same: compared at its first use, since ranks that differ wait for ever."""

from __future__ import annotations

import hashlib
import json

import torch

from ..errors import InvalidUsage

__all__ = ["Given", "agree_on_options"]


def agree_on_options(comm, options: dict) -> None:
    """Compare the ranks' options, values by their repr; raise `InvalidUsage` on all of them where they differ.

    A collective that blocks, on CUDA too: an all-reduce of 24 bytes, and where they differ an all-gather.
    """
    Given(options).compare(
        comm, "the ranks' HookStates differ",
        "give all ranks the same arguments, and the same COLLECTIVES_* variables",
    )  # fmt: skip


class Given:
    """What a rank was given, values by their repr, to be compared with the others'."""

    def __init__(self, options: dict):
        self._text = json.dumps({name: repr(value)[:60] for name, value in options.items()}).encode()
        self.digest = int.from_bytes(hashlib.sha256(self._text).digest()[:7], "big")

    def compare(self, comm, what: str, cure: str, error: type = InvalidUsage) -> None:
        """Raise an `error` on all ranks, with `what` differs and the `cure`, unless they have the same.

        A collective that blocks, on CUDA too: an all-reduce of 24 bytes, and where they differ an all-gather.
        """
        if comm.size == 1:
            return
        ends = torch.tensor([self.digest, -self.digest, len(self._text)], dtype=torch.int64).to(comm.device)
        comm.all_reduce(ends, "max", algorithm="native")
        most, least, longest = ends.tolist()
        if most == -least:
            return
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(self._text)] = torch.frombuffer(bytearray(self._text), dtype=torch.uint8)
        everyones = torch.empty(comm.size * longest, dtype=torch.uint8, device=comm.device)
        comm.all_gather(everyones, mine.to(comm.device), algorithm="native")
        texts = [bytes(row.tolist()).rstrip(b"\0") for row in everyones.cpu().split(longest)]
        told = [json.loads(each) for each in texts]
        differing = []
        for name in dict.fromkeys(name for each in told for name in each):
            ranks: dict[str, list[int]] = {}
            for rank, each in enumerate(told):
                ranks.setdefault(each.get(name, "unknown"), []).append(rank)
            if len(ranks) > 1:
                found = [f"{value} on rank {', '.join(map(str, who[:8]))}" for value, who in ranks.items()]
                differing.append(f"{name}: {'; '.join(found)}")
        raise error(
            f"{what} ({' | '.join(differing)}): {cure}",
            rank=comm.rank, peers=[rank for rank, each in enumerate(texts) if each != self._text],
        )  # fmt: skip
