"""Sizes and times as text."""

from __future__ import annotations

from collectives.errors import InvalidArgument

__all__ = ["parse_size", "show_size", "show_time"]


def parse_size(text: str) -> int:
    """Parse a number of bytes: "512", "64K", "16M", "1G"."""
    scale = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    digits = text[:-1] if scale else text
    if not digits.isdigit():
        raise InvalidArgument(f"{text!r} is no size: write bytes, or a number with K, M or G")
    return int(digits) << scale


def show_size(nbytes: int) -> str:
    """Write a number of bytes with the unit that leaves at least one digit before the point."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << bits:
            return f"{nbytes / (1 << bits):.3g} {unit}"
    return f"{nbytes} B"


def show_time(seconds: float) -> str:
    """Write a time in the unit that it is read best in."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
