"""Mutations of valid inputs: bytes that are truncated, repeated, flipped, spliced or random, and JSON with other
values in it. A generator with a seed determines them.
"""

from __future__ import annotations

import copy
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
_WAYS = {"cut": 3, "repeat": 3, "flip": 6, "splice": 3, "overwrite": 3, "number": 6, "nest": 1}  # and how often
_DEEP = 100_000  # more brackets than a parser that recurses can take
_LONGEST = 1 << 20


def mutate(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Return a mutation of one of the inputs: in half of the cases of JSON one with other values."""
    data = draw.choice(corpus)
    changed = mutate_json(draw, data) if draw.random() < 0.5 else None
    return mutate_bytes(draw, data, corpus) if changed is None else changed


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
    size = draw.choice([1, 2, 4, 8])
    before, part, after = data[:first], data[first:last], data[last:]
    match draw.choices([*_WAYS], [*_WAYS.values()])[0]:
        case "cut":
            return before
        case "repeat":
            return before + part * draw.choice([2, 2, 3, 8, 101]) + after
        case "splice":
            return before + other[draw.randrange(len(other) + 1) :]
        case "overwrite":
            new = draw.choice(_WORDS) if draw.random() < 0.6 else draw.randbytes(min(len(part), 64))
            return before + new + (after if draw.random() < 0.5 else data[first + len(new) :])
        case "nest":
            return before + draw.choice([b"[", b'{"a":']) * draw.choice([10, 900, _DEEP]) + part + after
        case "number" if len(data) >= size:  # an aligned word, at a limit
            at = draw.randrange(len(data) // size) * size
            return data[:at] + (draw.choice(_NUMBERS) % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]
        case "flip" if data:
            changed = bytearray(data)
            for _ in range(draw.choice([1, 1, 2, 8])):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            return bytes(changed)
    return data


def mutate_json(draw: random.Random, data: bytes) -> bytes | None:
    """Return JSON with one to three values changed; None where the bytes are no JSON."""
    try:
        whole = [json.loads(data)]
    except (ValueError, RecursionError):
        return None
    for _ in range(draw.choice([1, 1, 2, 3])):
        holder, key = draw.choice([*_places(whole)][1:] or [(whole, 0)])
        how = draw.random()
        if holder is whole or how >= 0.3:
            holder[key] = _other_value(draw, holder[key])
        elif how < 0.15:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(draw.choice(holder)))
        else:
            holder[draw.choice(["", "²", "x" * 300])] = copy.deepcopy(holder[key])
    return json.dumps(whole[0]).encode()


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
    others = [draw.choice(_VALUES), draw.choice(_VALUES), draw.randrange(-4, 64), [value], {"a": value}]
    return copy.deepcopy(draw.choice(others))  # lists and dictionaries of _VALUES stay as they are
