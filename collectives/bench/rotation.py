"""New data in every call, ``--fresh``: how many arrays the calls of a turn go through.

A loop over one array finds the array, and what a library copied from it, in the caches. With
``--fresh`` each call has the next of several arrays, whose input the rank has just written, as a
training step writes its gradients before they are reduced. All ranks wait for each other after
that, by the library's own barrier, and only the call is timed. Nothing touches the other elements
of the arrays in between.
"""

from __future__ import annotations

import re
from pathlib import Path

from .buffers import stride_of
from .cases import Case

__all__ = ["bytes_of_arrays", "count_arrays", "last_level_cache"]

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHE_WHERE_UNKNOWN = 64 << 20  # bytes
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def last_level_cache(folder: Path = _CACHES) -> int:
    """Return the bytes of this machine's last-level cache, 0 where Linux doesn't report it."""
    found = []
    for entry in folder.glob("index*"):
        try:
            level, text = (entry / "level").read_text(), (entry / "size").read_text().strip()
        except OSError:  # this machine doesn't say
            continue
        size = re.fullmatch(r"(\d+)([KMG]?)", text)
        if size is not None:
            found.append((int(level), int(size[1]) << _UNITS[size[2]]))
    return max(found, default=(0, 0))[1]


def bytes_of_arrays(case: Case, in_place: bool) -> int:
    """Return the bytes of the arrays of one call, on the rank that has most."""
    layouts = [case.layout(rank) for rank in range(case.ranks)]
    itemsize = case.kind.dtype.itemsize
    if in_place:
        return max(stride_of(layout.total * itemsize) for layout in layouts)
    return max(stride_of(layout.send * itemsize) + stride_of(layout.recv * itemsize) for layout in layouts)


def count_arrays(case: Case, in_place: bool, calls: int, cache: int, most: int) -> int:
    """Return how many arrays ``calls`` calls go through.

    Each call has one of its own, unless fewer are more than the last-level cache (``cache``, in
    bytes; 0 counts as 64 MiB), or than ``most`` bytes. One at least.
    """
    each = bytes_of_arrays(case, in_place)
    cache = cache or _CACHE_WHERE_UNKNOWN
    return max(1, min(calls, cache // each + 1, most // each))
