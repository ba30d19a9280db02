"""Agreement of the ranks: values that they exchange outside of a step, and the check that all have the same.

Values travel as JSON, and bytes as they are: nothing that arrives is unpickled here. Each function
is a collective of a `Communicator`, of any engine and over any number of nodes, and blocks, on CUDA
too. `comm` may also be an object that has its `rank`, `size`, `device`, and these calls:
`all_reduce`, `all_gather`, `broadcast`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..cuda_state import refuse_capture
from ..errors import CollectiveTimeout, InvalidArgument, Mismatch, TransportError
from .waiting import format_ranks

__all__ = [
    "ComparedValue",
    "agree_on_settings",
    "all_gather_bytes",
    "all_gather_object",
    "describe_differences",
    "verify_same",
]

_HEAD_BYTES = 8  # of a row: the length of the rank's bytes
_INLINE_BYTES = 248  # of a row: the first of these bytes, so that short values take one all-gather
_MAX_DIFFERENCES = 8  # of one message
_MAX_TEXT = 120  # characters of one value in a message
_CONTEXT = 40  # of these, characters before the first one that differs
_ABSENT = "absent"
_CHUNK_BYTES = {"host": 256 << 10, "nccl": 4 << 20}  # of a message of the ring and direct algorithms
_IN_CAPTURE = (
    "the host compares or exchanges something with the other ranks, as in a first step: make some steps (12 with DDP) "
    "before the capture, with the options and shapes of the captured one"
)


# ---- Exchange.


def all_gather_object(comm, value: Any) -> list:
    """Return the values of all ranks, in rank order.

    `value`: what JSON has (None, bool, int, float, str, and lists and dicts of these), of another
    size on each rank. Tuples arrive as lists, and the keys of dicts as strings. Raises
    `InvalidArgument` for any other value, and as `Communicator.all_gather` does.
    """
    try:
        data = json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"not a value for JSON: {error}", op="all_gather_object", rank=comm.rank) from error
    values = []
    for rank, theirs in enumerate(all_gather_bytes(comm, data)):
        try:
            values.append(json.loads(theirs))
        except (ValueError, RecursionError) as error:
            raise TransportError(
                f"what rank {rank} has sent can't be read: {theirs[:80]!r}",
                op="all_gather_object", rank=comm.rank, peers=(rank,),
            ) from error  # fmt: skip
    return values


def all_gather_bytes(comm, data: bytes, *, seconds: float | None = None, purpose: str = "") -> list[bytes]:
    """Return the bytes of all ranks, in rank order; each rank may have another number of them.

    One all-gather of 256 bytes a rank. Where ranks have more than fits there, a second one of the
    longest; where one rank alone has, a broadcast of its bytes. `seconds`: limit for all ranks to
    come, None for the communicator's own; past it `CollectiveTimeout` is raised, and the
    all-gather stays pending; `purpose`: what they come for, "to ...", for its message.
    """
    if comm.size == 1:
        return [data]
    refuse_capture(comm.device, _IN_CAPTURE, op="all_gather_object", rank=comm.rank)
    head = len(data).to_bytes(_HEAD_BYTES, "little") + data[:_INLINE_BYTES]
    rows = _gather_rows(comm, head, _HEAD_BYTES + _INLINE_BYTES, seconds, purpose)
    lengths = [int.from_bytes(row[:_HEAD_BYTES], "little") for row in rows]
    parts = [row[_HEAD_BYTES:][:length] for row, length in zip(rows, lengths, strict=True)]
    longer = [rank for rank, length in enumerate(lengths) if length > _INLINE_BYTES]
    if not longer:
        return parts
    rest, longest = data[_INLINE_BYTES:], max(lengths) - _INLINE_BYTES
    if len(longer) == 1:
        sent = _as_tensor(rest, longest).to(comm.device)
        comm.broadcast(sent, longer[0])
        parts[longer[0]] += _as_bytes(sent)
        return parts
    rows = _gather_rows(comm, rest, longest)
    return [(part + row)[:length] for part, row, length in zip(parts, rows, lengths, strict=True)]


def _gather_rows(comm, data: bytes, nbytes: int, seconds: float | None = None, purpose: str = "") -> list[bytes]:
    """Gather so many bytes of each rank, `data` and zeros."""
    gathered = torch.empty(comm.size * nbytes, dtype=torch.uint8, device=comm.device)
    own = _as_tensor(data, nbytes).to(comm.device)
    if seconds is None:
        comm.all_gather(gathered, own)
    else:
        work = comm.all_gather(gathered, own, async_op=True)
        if not comm._queue.wait_blocking(work._pending_op, seconds):
            raise CollectiveTimeout(
                f"not all ranks came within {seconds:g} s {purpose}", op="all_gather_object", rank=comm.rank
            )
        work.wait()
    whole = _as_bytes(gathered)
    return [whole[first : first + nbytes] for first in range(0, len(whole), nbytes)]


def _as_tensor(data: bytes, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


# ---- Comparison.


class ComparedValue:
    """A value as `verify_same` compares it: its entries, which are named one by one.

    `pairs`: names and values; a name may be there more than once. Values are compared by their
    repr, and the order counts, too. `digest`: a number below 2**56 of all of it.
    """

    def __init__(self, pairs: Iterable[tuple[str, Any]]):
        self.entries = [[str(name), repr(each)] for name, each in pairs]
        digest = hashlib.sha256(json.dumps(self.entries).encode()).digest()
        self.digest = int.from_bytes(digest[:7], "big")


def verify_same(
    comm, what: str, value: Any, cure: str = "", *, op: str | None = None, ranks: Sequence[int] | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Raise `Mismatch` on all ranks unless all ranks have the same value.

    `what`: the message's beginning, "the ranks' ... differ"; `value`: a `ComparedValue`, or a dict
    for one of its items, or anything else, compared by its repr; `cure`: the message's end, what to do; `ranks`:
    the numbers of `comm`'s ranks in the message, None: their own; `labels`: what this rank's
    message calls entries, by their names. The message names what differs, the ranks and their
    values. An all-reduce of 16 bytes, and where the values differ `all_gather_object`.
    """
    if comm.size == 1:
        return
    refuse_capture(comm.device, _IN_CAPTURE, op=op or "verify_same", rank=comm.rank)
    if not isinstance(value, ComparedValue):
        value = ComparedValue(value.items() if isinstance(value, dict) else [("", value)])
    bounds = torch.tensor([value.digest, -value.digest], dtype=torch.int64, device="cpu").to(comm.device)
    comm.all_reduce(bounds, "max")
    most, least = bounds.tolist()
    if most == -least:
        return
    entries = all_gather_object(comm, value.entries)
    ranks = range(comm.size) if ranks is None else ranks
    raise Mismatch(
        f"{what} ({describe_differences(entries, ranks, labels)}){': ' if cure else ''}{cure}",
        op=op, rank=ranks[comm.rank],
        peers=[rank for rank, theirs in zip(ranks, entries, strict=True) if theirs != value.entries],
    )  # fmt: skip


def describe_differences(entries: Sequence[list], ranks: Iterable[int], labels: Mapping[str, str] | None = None) -> str:
    """Describe how the ranks' entries differ: each name, and which ranks have what; "" for nowhere.

    `entries`: each rank's `ComparedValue.entries`; `ranks`, `labels`: as in `verify_same`.
    """
    if all(each == entries[0] for each in entries):
        return ""
    ranks, labels = list(ranks), labels or {}
    tables = [dict(each) for each in entries]
    differing = []
    for name in dict.fromkeys(name for table in tables for name in table):
        texts = [table.get(name, _ABSENT) for table in tables]
        if len(set(texts)) > 1:
            label = labels.get(name, name)
            differing.append(f"{label}{': ' if label else ''}{_describe_values(texts, ranks)}")
    if not differing:  # the same entries in another order, or a name more than once
        rows = list(itertools.zip_longest(*entries))
        at = next(number for number, row in enumerate(rows) if any(each != row[0] for each in row))
        names = ["nothing" if each is None else each[0] for each in rows[at]]
        differing = [f"the order, from number {at} on, or how often a name is there: {_describe_values(names, ranks)}"]
    more = len(differing) - _MAX_DIFFERENCES
    return " | ".join(differing[:_MAX_DIFFERENCES]) + (f" | and {more} more" if more > 0 else "")


def _describe_values(texts: list[str], ranks: list[int]) -> str:
    """Describe which ranks have which of the texts; long ones are cut to where they differ."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        ranks_by_text.setdefault(text, []).append(rank)
    begin = 0
    if max(map(len, texts)) > _MAX_TEXT:
        begin = max(0, len(os.path.commonprefix(texts)) - _CONTEXT)
    return "; ".join(
        f"{'...' if begin else ''}{text[begin : begin + _MAX_TEXT]}"
        f"{'...' if len(text) > begin + _MAX_TEXT else ''} on {format_ranks(who)}"
        for text, who in ranks_by_text.items()
    )


# ---- The settings of a communicator.


def agree_on_settings(comm) -> int:
    """Compare the settings of the ranks of a `Communicator` that is being opened; return the bytes of
    one message of its algorithms, which are rank 0's.

    Blocks. Raises `Mismatch` where the ranks differ in `deterministic` or in the config,
    `InvalidArgument` on all ranks where rank 0's COLLECTIVES_CHUNK is invalid.
    """
    own = {"deterministic": comm.deterministic, "config": comm.config.to_dict()}
    chunk, problem = _read_chunk(comm.engine.name) if comm.rank == 0 else (0, None)
    values = all_gather_object(comm, [own, chunk, problem])
    for name, value in own.items():
        others = [rank for rank, (settings, _, _) in enumerate(values) if settings[name] != value]
        if others:
            raise Mismatch(
                f"{name}={value} here, and not on rank {', '.join(map(str, others))}: it must be the same on all ranks",
                op="init", rank=comm.rank, peers=others,
            )  # fmt: skip
    _, chunk, problem = values[0]
    if problem is not None:
        raise InvalidArgument(problem, op="init", rank=comm.rank)
    return chunk


def _read_chunk(engine: str) -> tuple[int, str | None]:
    """Return COLLECTIVES_CHUNK, or the engine's default, and what is wrong with it."""
    text = os.environ.get("COLLECTIVES_CHUNK", "").strip()
    if not text:
        return _CHUNK_BYTES[engine], None
    if not (text.isascii() and text.isdigit() and 64 <= int(text) < 1 << 40):
        return 0, f"COLLECTIVES_CHUNK={text}: must be a whole number of bytes from 64 up"
    return int(text), None
