"""JSON that other processes have written: whatever its bytes are, it is parsed or a ``ValueError``."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parse_json", "parse_numbers", "parse_text"]

_MOST = 1 << 20  # no rank, slot or id of a request is as large


def parse_json(data: bytes | str) -> Any:
    """Return the value of JSON. Raises ``ValueError`` for what is none, or is nested too deep."""
    try:
        return json.loads(data)
    except RecursionError:  # a RuntimeError, as a torch store that has ended raises
        raise ValueError("nested too deep") from None


def parse_numbers(value: Any) -> list[int]:
    """Return a list of ranks or ids as it is. Raises ``ValueError`` for any other value."""
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < _MOST for each in value):
        raise ValueError("no list of ranks")
    return value


def parse_text(value: Any) -> str:
    """Return a text as it is. Raises ``ValueError`` for any other value."""
    if not isinstance(value, str):
        raise ValueError("no text")
    return value
