"""Tags: numbers that stand for parts of a program, which the ranks compare with each collective."""

from __future__ import annotations

import zlib

from .._nccl import tag_names

__all__ = ["make_tag"]


def make_tag(name: str) -> int:
    """Return the tag of a name, for `Communicator.tag`; messages then say the name.

    It is a number of 32 bits, not 0, which depends on the name alone: ranks that use the same names
    have the same tags, in whatever order they make them.
    """
    tag = zlib.crc32(name.encode()) or 1
    tag_names[tag] = name
    return tag
