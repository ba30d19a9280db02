"""Check that the ranks' `GradientBuckets` have the same parameters and settings."""

from __future__ import annotations

import hashlib

import torch

from ..comm.communicator import Communicator
from ..errors import Mismatch

__all__ = ["verify_same_buckets"]

_OP = "GradientBuckets"


def verify_same_buckets(comm: Communicator, params: list, buckets: list, settings: str, overlap: bool) -> bool:
    """Raise `Mismatch` where the ranks' parameters or settings differ.

    Returns whether all ranks want to overlap. A collective that blocks. `params`: in the order that
    the user gave; `buckets`: the `GradientBucket` of each; `overlap`: this rank's wish.
    """
    strides = {id(param): each for b in buckets for param, each in zip(b.params, b.strides, strict=True)}
    described = [
        f"shape {tuple(param.shape)}, {param.dtype}, on {param.device.type}, strides {strides[id(param)]}"
        for param in params
    ]
    elements = sum(param.numel() for param in params)
    digests = [_digest(each) for each in described]
    own = [len(params), elements, _digest((digests, settings)), int(overlap)]
    rows = _all_gather(comm, own)
    if all(row[:3] == rows[0][:3] for row in rows):
        return all(row[3] for row in rows)
    lines = "\n".join(f"  rank {rank}: {row[0]} parameters, {row[1]} elements" for rank, row in enumerate(rows))
    if len({row[0] for row in rows}) == 1:
        columns = list(zip(*_all_gather(comm, digests), strict=True))
        differing = next((at for at, column in enumerate(columns) if len(set(column)) > 1), None)
        if differing is None:
            lines += f"\nThe parameters are alike, the settings are not; here: {settings}"
        else:
            names = {id(param): name for b in buckets for param, name in zip(b.params, b.names(), strict=True)}
            name = names[id(params[differing])]
            lines += f"\nThe first that differs is {name}, here of {described[differing]}"
    raise Mismatch(
        f"the ranks' GradientBuckets differ in number, order, shapes, strides, dtypes or settings:\n{lines}",
        op=_OP, rank=comm.rank, peers=[rank for rank, row in enumerate(rows) if row[:3] != own[:3]],
    )  # fmt: skip


def _all_gather(comm: Communicator, numbers: list[int]) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=comm.device)
    gathered = torch.empty((comm.size, len(numbers)), dtype=torch.int64, device=comm.device)
    comm.all_gather(gathered, own)
    return gathered.tolist()


def _digest(thing) -> int:
    return int.from_bytes(hashlib.sha256(repr(thing).encode()).digest()[:7], "little")
