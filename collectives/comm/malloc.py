"""Settings of glibc's malloc, for fewer page faults."""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # mallopt's numbers, <malloc.h>


def keep_freed_memory() -> None:
    """Make malloc take up to 32 MiB from its heap, and keep 64 MiB at its top.

    These are the settings that glibc itself uses after a while. A new tensor in the place of a
    freed one then has no page faults. Does nothing where the user has set these (MALLOC_*,
    GLIBC_TUNABLES), or with another libc than glibc.
    """
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)
