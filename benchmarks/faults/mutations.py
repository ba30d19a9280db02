"""Mutations of valid inputs: bytes that are truncated, repeated, flipped, spliced or random, and JSON
with other values in it. A generator with a seed determines them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

__all__ = ["mutate", "mutate_bytes", "mutate_json"]

_NUMBERS = [0, 1, -1, 2, 127, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**400]
_FLOATS = [0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")]
_TEXTS = [
    "", "\0", "\ud800", "²", "x" * 300, "x" * 5000, "..", "../..", "/", "a/b", ".", "|||", "||²|", "||0|",
    "||99999999999|1",
    "Infinity", "-1", "1e5", "<script>", "%s%n", "\x1b[2J\n",
]  # fmt: skip
_DEEP = 100_000  # more brackets than a parser that recurses can take
_WORDS = [b"", b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80"]
_WORDS += [b"[", b"{", b'"', b"NaN", b"1e999", b"-", b","]
_LONGEST = 1 << 20


def mutate(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Return a mutation of one of the inputs: in half of the cases of JSON one with other values."""
    data = draw.choice(corpus)
    if draw.random() < 0.5:
        changed = mutate_json(draw, data)
        if changed is not None:
            return changed
    return mutate_bytes(draw, data, corpus)


def mutate_bytes(draw: random.Random, data: bytes, corpus: Sequence[bytes] = ()) -> bytes:
    """Return bytes with one to five changes anywhere."""
    if draw.random() < 0.03:
        return draw.randbytes(draw.choice([0, 1, 8, 64, max(1, len(data)), 4096]))
    for _ in range(draw.choice([1, 1, 1, 2, 3, 5])):
        data = draw.choice(_CHANGES)(draw, data, corpus)[:_LONGEST]
    return data


def _truncate(draw, data, _):
    return data[: draw.randrange(len(data) + 1)]


def _repeat(draw, data, _):
    first, last = _part(draw, data)
    return data[:last] + data[first:last] * draw.choice([1, 1, 2, 7, 100]) + data[last:]


def _flip(draw, data, _):
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _splice(draw, data, corpus):
    other = draw.choice(corpus) if corpus else data
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


def _overwrite(draw, data, _):
    first, last = _part(draw, data)
    new = draw.choice(_WORDS) if draw.random() < 0.6 else draw.randbytes(min(last - first, 64))
    return data[:first] + new + data[last if draw.random() < 0.5 else min(len(data), first + len(new)) :]


def _set_word(draw, data, _):
    """Set an aligned word to a number at a limit."""
    size = draw.choice([1, 2, 4, 8])
    if len(data) < size:
        return data
    at = draw.randrange(len(data) // size) * size
    number = draw.choice(_NUMBERS) % (1 << 8 * size)
    return data[:at] + number.to_bytes(size, "little") + data[at + size :]


def _nest(draw, data, _):
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice([b"[", b'{"a":']) * draw.choice([10, 900, _DEEP]) + data[at:]


_CHANGES = [_truncate, _repeat, _flip, _flip, _splice, _overwrite, _set_word, _set_word]
_CHANGES = [*_CHANGES, *_CHANGES, *_CHANGES, _nest]


def _part(draw, data) -> tuple[int, int]:
    first = draw.randrange(len(data) + 1)
    return first, min(len(data), first + draw.choice([0, 1, 2, 4, 8, 64, 1000]))


# ---- JSON.


def mutate_json(draw: random.Random, data: bytes) -> bytes | None:
    """Return JSON with one to three values changed; None where the bytes are no JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(draw.choice([1, 1, 2, 3])):
        places = list(_places(value))
        if not places:
            return json.dumps(_other_value(draw, value)).encode()
        holder, key = draw.choice(places)
        how = draw.random()
        if how < 0.15:
            del holder[key]
        elif how < 0.3 and isinstance(holder, list):
            holder.insert(key, draw.choice(holder))
        elif how < 0.3:
            holder[draw.choice(_TEXTS)] = holder[key]
        else:
            holder[key] = _other_value(draw, holder[key])
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return None


def _places(value):
    """Yield (list or dict, index or key) of all that is in a value, however deep."""
    todo = [value]
    while todo:
        value = todo.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, each in items:
            yield value, key
            todo.append(each)


def _other_value(draw, value):
    kinds = [
        lambda: draw.choice(_NUMBERS), lambda: draw.choice(_NUMBERS), lambda: draw.choice(_FLOATS),
        lambda: draw.choice(_TEXTS), lambda: draw.choice(_TEXTS),
        lambda: draw.choice([None, True, False, [], {}, [[]]]),
        lambda: [value], lambda: {"a": value}, lambda: draw.randrange(-4, 64), lambda: draw.randrange(-4, 64),
    ]  # fmt: skip
    if isinstance(value, str) and value:
        kinds += [lambda: mutate_bytes(draw, value.encode("utf-8", "surrogatepass")).decode("latin-1")] * 3
    if draw.random() < 0.01:
        return _nested(draw.choice([50, 400, 900]))
    return draw.choice(kinds)()


def _nested(depth: int):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value
