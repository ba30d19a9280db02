"""Tags: numbers that stand for parts of a program, which the ranks compare with each collective."""

from __future__ import annotations

import zlib

from .._nccl import tag_names

__all__ = ["make_tag", "tagged"]


def make_tag(name: str) -> int:
    """Return the tag of a name, for `Communicator.tag`; messages then say the name.

    It is a number of 32 bits, not 0, which depends on the name alone: ranks that use the same names
    have the same tags, in whatever order they make them.
    """
    tag = zlib.crc32(name.encode()) or 1
    tag_names[tag] = name
    return tag


class tagged:  # noqa: N801, as a function is called
    """Context in which the calls of communicators have a tag."""

    __slots__ = ("_comms", "_tag")

    def __init__(self, tag: int, *comms):
        self._tag = tag
        self._comms = comms

    def __enter__(self):
        for comm in self._comms:
            comm.tag = self._tag

    def __exit__(self, *error):
        for comm in self._comms:
            comm.tag = 0
