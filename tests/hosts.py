"""Several machines on one: ranks with a COLLECTIVES_HOST_ID each, so that they connect as if they were apart."""

from __future__ import annotations

import contextlib

from tests.launching import free_port
from tests.variables import variables

__all__ = ["apart", "joined"]


@contextlib.contextmanager
def apart(ctx, machines: str):
    """Let rank r be on the machine that the r-th letter of `machines` names, for as long as the block runs."""
    port = ctx.exchange(free_port())[0]
    with variables(
        RANK=ctx.rank, WORLD_SIZE=ctx.size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        COLLECTIVES_HOST_ID=machines[ctx.rank], COLLECTIVES_ENGINE="host",
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def joined(ctx, machines: str, **options):
    """Open the communicator of all ranks on such machines; it is closed, or aborted where the block raised."""
    import collectives
    import collectives.rendezvous.world as world
    from tests.rank_process import bind_submodules

    bind_submodules()
    with apart(ctx, machines):
        world._generation, world._world = 0, None  # processes that are used again have opened other worlds before
        comm = collectives.init(**options)
        try:
            yield comm
        except BaseException:
            comm.abort()
            raise
        comm.close()
