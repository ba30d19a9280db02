"""hvd on the rank processes of tests/ranks.py: as after hvd.init(), over a communicator of their own."""

from __future__ import annotations

import contextlib
import os


@contextlib.contextmanager
def horovod(ctx, size: int | None = None):
    """Give the module, initialised over the ranks of ``ctx``, and shut it down at the end."""
    import collectives.horovod as hvd
    from collectives.exchange import PeerInfo
    from collectives.horovod.settings import read_settings
    from collectives.horovod.world import World, enter

    hvd.shutdown()
    comm = ctx.new_communicator()
    pids = ctx.exchange(os.getpid())
    peers = [PeerInfo(rank, "here", "boot", pid) for rank, pid in enumerate(pids)]
    enter(World(comm, peers, owns=True, settings=read_settings()))
    try:
        yield hvd
    finally:
        hvd.shutdown()
