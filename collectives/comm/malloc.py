"""Settings of glibc's malloc, for memory that can be shared and for fewer page faults."""

from __future__ import annotations

import ctypes
import os
import threading

__all__ = ["MIN_SHARED_BYTES", "allocate_with_mmap", "keep_freed_memory"]

MIN_SHARED_BYTES = 64 << 10  # malloc gives smaller allocations no mapping of their own
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # mallopt's numbers, <malloc.h>


def allocate_with_mmap(function) -> None:
    """Call a function so that malloc gives each of its larger allocations a mapping of its own.

    Only such memory can be shared at its address. The function runs in a thread of its own, since
    malloc first uses free memory of the heap, and a new thread has none. Afterwards malloc has the
    settings that glibc itself uses in a process that has freed something large: up to 32 MiB come
    from the heap, and 64 MiB stay at its top. Where the user has set these (MALLOC_*,
    GLIBC_TUNABLES), and with another libc, the function is called directly.
    """
    mallopt = _mallopt()
    if mallopt is None:
        function()
        return
    errors = []

    def target():
        try:
            function()
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    mallopt(_MMAP_THRESHOLD, MIN_SHARED_BYTES)
    try:
        thread = threading.Thread(target=target, name="collectives, making buckets")
        thread.start()
        thread.join()
    finally:
        keep_freed_memory()
    if errors:
        raise errors[0]


def keep_freed_memory() -> None:
    """Make malloc take up to 32 MiB from its heap, and keep 64 MiB at its top.

    These are the settings that glibc itself uses after a while. A new tensor in the place of a
    freed one then has no page faults. Does nothing where the user has set these, or with another
    libc than glibc.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)


def _mallopt():
    """Return glibc's function; None where the user has tuned malloc or the libc has none."""
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    tuned = tuned or any(name.startswith("MALLOC_") for name in os.environ)
    return None if tuned else getattr(ctypes.CDLL(None), "mallopt", None)
