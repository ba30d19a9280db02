"""Pool of memory for gathered parameters, and for gradients that are being reduced: shared memory on
the host, and the device's own buffers.
"""

from __future__ import annotations

import weakref

from ..comm.communicator import Communicator
from ..comm.shared_memory_pool import SharedMemoryPool
from .device_buffers import DeviceBuffers

__all__ = ["GATHERED", "GRADIENTS", "MIN_POOLED_BYTES", "BufferPool"]

GATHERED, GRADIENTS = "gathered parameters", "gradients"  # purposes of buffers

# A smaller buffer shares malloc's pages, and its staging copy stays in the cache.
MIN_POOLED_BYTES = 64 << 10


class BufferPool(SharedMemoryPool):
    """Pool of the units' memory: on the host shared memory, on a GPU buffers that are used in turn."""

    def __init__(self):
        super().__init__()
        # Those of a GPU: communicator -> purpose -> buffers
        self._in_turn: weakref.WeakKeyDictionary[Communicator, dict[str, DeviceBuffers]] = weakref.WeakKeyDictionary()

    def in_turn(self, comm: Communicator, purpose: str) -> DeviceBuffers:
        """Return the buffers on a GPU that a communicator's units use in turn for a purpose."""
        found = self._in_turn.get(comm)
        if found is None:
            found = self._in_turn[comm] = {
                # A gradient's buffer is released on the stream that stores the result of its reduction.
                GATHERED: DeviceBuffers(GATHERED, at_least=1, crosses_streams=False),
                GRADIENTS: DeviceBuffers(GRADIENTS, at_least=2, crosses_streams=True),
            }
        return found[purpose]
