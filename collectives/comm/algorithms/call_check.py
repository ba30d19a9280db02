"""Comparison of the ranks' calls at the start of a ring or direct algorithm on the host.

It is a part of each call, on the call's queue: an all-gather of a few numbers, which needs none of
`consensus`'s encoding.
"""

from __future__ import annotations

import ctypes

from ..._nccl import DTYPES
from ..fingerprint import compare

__all__ = ["CallCheck"]

_INT64 = DTYPES["int64"]
_FINGERPRINT_WORDS = 5
_ID_WORDS = 16  # int64 in a unique id


class CallCheck:
    """Exchange of the ranks' fingerprints at the start of a call on the host, in call order.

    The engine or `verify` detects a rank that makes another call, such as one with the native
    algorithm, before a step is executed, so that the communicator stays usable. `label`: the call's
    name; `sends_id`: rank 0 sends a unique id along, for a communicator of the steps.
    """

    def __init__(self, comm, label: str, fingerprint: tuple[int, ...], sends_id: bool):
        self.comm = comm
        self.label = label
        words = [*fingerprint, *[0] * _ID_WORDS]
        self._own = (ctypes.c_int64 * len(words))(*words)
        if sends_id and comm.rank == 0:
            unique_id = comm.engine.library.get_unique_id()
            ctypes.memmove(ctypes.addressof(self._own) + 8 * _FINGERPRINT_WORDS, unique_id, 8 * _ID_WORDS)
        self._all = (ctypes.c_int64 * (len(words) * comm.size))()

    def exchange(self, stream: int) -> None:
        """Gather the fingerprints, on a queue's stream; 0: blocks."""
        label = self.comm.engine.library.label
        name, _, algorithm = self.label.partition(" by ")
        label(f"{name} ({algorithm})", "row of the call")
        try:
            count = len(self._own)
            self.comm._native.all_gather(
                ctypes.addressof(self._own), ctypes.addressof(self._all), count, _INT64, stream
            )
        finally:
            label()

    def verify(self) -> None:
        """Raise `Mismatch` unless all ranks make the same call."""
        each = len(self._own)
        compare(
            [[tuple(self._all[r * each : r * each + _FINGERPRINT_WORDS])] for r in range(self.comm.size)],
            self.comm.rank,
        )

    def unique_id(self) -> bytes:
        """Return the id that rank 0 has sent."""
        return bytes(self._all)[8 * _FINGERPRINT_WORDS : 8 * (_FINGERPRINT_WORDS + _ID_WORDS)]
