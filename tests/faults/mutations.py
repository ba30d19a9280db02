"""Mutations of valid inputs: bytes that are truncated, repeated, flipped, spliced or random, and JSON with other
values in it. A generator with a seed determines them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

__all__ = ["mutate", "mutate_bytes", "mutate_json", "mutate_keyed"]

_NUMBERS = [0, 1, -1, 2, 127, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**400]
_VALUES = [
    *_NUMBERS, 0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), None, True, False, [], {}, [[]],
    "", "\0", "\ud800", "²", "x" * 5000, "../..", "/", "||²|", "||99999999999|1", "Infinity", "-1", "1e5", "\x1b[2J\n",
]  # fmt: skip
_WORDS = [b"", b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"[", b"{", b'"', b"NaN", b"1e999", b","]
_DEEP = 100_000  # more brackets than a parser that recurses can take
_LONGEST = 1 << 20


def mutate(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Return a mutation of one of the inputs: in half of the cases of JSON one with other values."""
    data = draw.choice(corpus)
    if draw.random() < 0.5:
        changed = mutate_json(draw, data)
        if changed is not None:
            return changed
    return mutate_bytes(draw, data, corpus)


def mutate_keyed(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Mutate an input, whose first byte says what it is, and stays."""
    kind = draw.choice(corpus)[:1]
    return kind + mutate(draw, [data[1:] for data in corpus if data[:1] == kind])


def mutate_bytes(draw: random.Random, data: bytes, corpus: Sequence[bytes] = ()) -> bytes:
    """Return bytes with one to five changes anywhere."""
    if draw.random() < 0.03:
        return draw.randbytes(draw.choice([0, 1, 8, 64, max(1, len(data)), 4096]))
    for _ in range(draw.choice([1, 1, 1, 2, 3, 5])):
        data = _change(draw, data, draw.choice(corpus) if corpus else data)[:_LONGEST]
    return data


def _change(draw: random.Random, data: bytes, other: bytes) -> bytes:
    first = draw.randrange(len(data) + 1)
    last = min(len(data), first + draw.choice([0, 1, 2, 4, 8, 64, 1000]))
    how = draw.choices(["cut", "repeat", "flip", "splice", "overwrite", "number", "nest"], [3, 3, 6, 3, 3, 6, 1])[0]
    if how == "cut":
        return data[:first]
    if how == "repeat":
        return data[:last] + data[first:last] * draw.choice([1, 1, 2, 7, 100]) + data[last:]
    if how == "splice":
        return data[:first] + other[draw.randrange(len(other) + 1) :]
    if how == "overwrite":
        new = draw.choice(_WORDS) if draw.random() < 0.6 else draw.randbytes(min(last - first, 64))
        return data[:first] + new + data[last if draw.random() < 0.5 else min(len(data), first + len(new)) :]
    if how == "nest":
        return data[:first] + draw.choice([b"[", b'{"a":']) * draw.choice([10, 900, _DEEP]) + data[first:]
    size = draw.choice([1, 2, 4, 8])
    if len(data) < size:
        return data
    if how == "number":  # an aligned word, at a limit
        at = draw.randrange(len(data) // size) * size
        return data[:at] + (draw.choice(_NUMBERS) % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


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
            holder[draw.choice(["", "²", "x" * 300])] = holder[key]
        else:
            holder[key] = _other_value(draw, holder[key])
    return json.dumps(value).encode()


def _places(value):
    """Yield (list or dict, index or key) of all that is in a value, however deep."""
    todo = [value]
    while todo:
        value = todo.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            yield value, key
            todo.append(item)


def _other_value(draw: random.Random, value):
    if isinstance(value, str) and value and draw.random() < 0.3:
        return mutate_bytes(draw, value.encode("utf-8", "surrogatepass")).decode("latin-1")
    return draw.choice([draw.choice(_VALUES), draw.choice(_VALUES), draw.randrange(-4, 64), [value], {"a": value}])
