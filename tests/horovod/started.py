"""Start Horovod's API on the ranks of a `run_ranks` call, and end it."""

from __future__ import annotations

import contextlib
import os

from tests.variables import variables


@contextlib.contextmanager
def started(ctx, process_sets=None, **more):
    """Have hvd initialised over a test's ranks, as a launcher's variables would do it."""
    import torch

    import collectives.horovod as hvd
    import collectives.rendezvous.world

    job = ctx.exchange(os.urandom(8).hex())[0]
    with variables(RANK=ctx.rank, WORLD_SIZE=ctx.size, COLLECTIVES_JOB_ID=job, **more):
        collectives.rendezvous.world._generation = 0  # other tests in these processes have counted
        torch.set_num_threads(1)
        try:
            hvd.init(process_sets=process_sets)
            yield hvd
        finally:
            hvd.shutdown()
