"""Control channel between rank processes, over torch's TCPStore, on which waiting ranks sleep.

While one library is measured, ranks that take no part must not use its cores. So the values go
through a store and not by a communicator, whose collectives may spin while they wait.
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch.distributed as dist

from ..comm.communicator import Communicator
from ..rendezvous.job_store import connect_to_store, share_store

__all__ = ["Control"]


class Control:
    """Exchanges of small JSON values between all ranks.

    ``store``: torch's, shared by all ranks. ``limit``: seconds that a rank waits for the others.
    """

    def __init__(self, comm: Communicator, limit: float):
        self.rank, self.size = comm.rank, comm.size
        self._turn = 0
        self._server, name = share_store(comm)
        # A connection of its own: calls that block keep all others of a connection waiting.
        self.store = dist.PrefixStore(name, connect_to_store(self._server.host, self._server.port))
        self.store.set_timeout(timedelta(seconds=limit))

    def gather(self, value) -> list:
        """Return all ranks' values, in rank order. Blocks, asleep, until all ranks call it."""
        self._turn += 1
        turn = str(self._turn)
        if self.rank:
            self.store.set(f"{turn}/{self.rank}", json.dumps(value))
            return json.loads(self.store.get(f"{turn}/all"))
        values = [value, *(json.loads(self.store.get(f"{turn}/{rank}")) for rank in range(1, self.size))]
        self.store.set(f"{turn}/all", json.dumps(values))
        for rank in range(1, self.size):
            self.store.delete_key(f"{turn}/{rank}")
        self.store.delete_key(f"{self._turn - 1}/all")  # all ranks have read it, because they have made this call
        return values

    def broadcast_from_rank_0(self, value):
        """Return rank 0's value on all ranks."""
        return self.gather(value if self.rank == 0 else None)[0]

    def close(self) -> None:
        """Close on all ranks: rank 0, whose process serves the store, ends last."""
        self.gather(None)
        if self.rank:
            self.store.set(f"bye/{self.rank}", "")
        else:
            for rank in range(1, self.size):
                self.store.get(f"bye/{rank}")
