"""Comparison of the ranks' calls at the start of a ring or direct algorithm on the host.

It is a part of each call, on the call's queue: an all-gather of a few numbers, which needs none of
`agree`'s encoding.
"""

from __future__ import annotations

import ctypes

from ..._nccl import DTYPES
from ..fingerprint import compare

__all__ = ["CallCheck"]

_INT64 = DTYPES["int64"]


class CallCheck:
    """Exchange of the ranks' fingerprints at the start of a call on the host, in call order.

    The engine or `verify` detects a rank that makes another call, such as one with the native
    algorithm, before a step is executed, so that the communicator stays usable. `label`: the call's
    name.
    """

    def __init__(self, comm, label: str, fingerprint: tuple[int, ...]):
        self.comm = comm
        self.label = label
        self._own = (ctypes.c_int64 * len(fingerprint))(*fingerprint)
        self._all = (ctypes.c_int64 * (len(fingerprint) * comm.size))()

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
        rows = [[tuple(self._all[r * each : (r + 1) * each])] for r in range(self.comm.size)]
        compare(rows, self.comm.rank)
