"""Whether all ranks were given the same: compared at its first use, since ranks that differ wait for ever."""

from __future__ import annotations

import hashlib
import json

import torch

from .errors import InvalidUsage

__all__ = ["agree", "agree_on_options"]

_TEXT = 2048  # bytes of what a rank has


def agree_on_options(comm, options: dict) -> None:
    """Compare the ranks' options, values by their repr; raise `InvalidUsage` on all of them where they differ.

    A collective that blocks, on CUDA too: an all-reduce of 16 bytes, and where they differ an all-gather.
    """
    agree(
        comm, options, "the ranks' HookStates differ",
        "give all ranks the same arguments, and the same COLLECTIVES_* variables",
    )  # fmt: skip


def agree(comm, options: dict, what: str, cure: str, error: type = InvalidUsage) -> None:
    """As `agree_on_options`, for other things: `what` differs, `cure`: what to do, and the error's class."""
    if comm.size == 1:
        return
    text = json.dumps({name: repr(value)[:60] for name, value in options.items()}).encode()[:_TEXT]
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    ends = torch.tensor([digest, -digest], dtype=torch.int64).to(comm.device)
    comm.all_reduce(ends, "max", algorithm="native")
    most, least = ends.tolist()
    if most == -least:
        return
    mine = torch.zeros(_TEXT, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everyones = torch.empty(comm.size * _TEXT, dtype=torch.uint8, device=comm.device)
    comm.all_gather(everyones, mine.to(comm.device), algorithm="native")
    texts = [bytes(row.tolist()).rstrip(b"\0") for row in everyones.cpu().split(_TEXT)]
    told = [json.loads(each) for each in texts]
    differing = []
    for name in told[0]:
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            ranks.setdefault(each.get(name, "unknown"), []).append(rank)
        if len(ranks) > 1:
            found = [f"{value} on rank {', '.join(map(str, who[:8]))}" for value, who in ranks.items()]
            differing.append(f"{name}: {'; '.join(found)}")
    raise error(
        f"{what} ({' | '.join(differing)}): {cure}",
        rank=comm.rank, peers=[rank for rank, each in enumerate(texts) if each != texts[comm.rank]],
    )  # fmt: skip
