"""Start Horovod's API on the ranks of a `run_ranks` call, and end it."""

from __future__ import annotations

import contextlib
import os

import torch

import collectives.horovod as hvd
import collectives.world


@contextlib.contextmanager
def started(ctx, process_sets=None, **variables):
    """Have hvd initialised over a test's ranks, as a launcher's variables would do it."""
    job = ctx.exchange(os.urandom(8).hex())[0]
    variables = {"RANK": ctx.rank, "WORLD_SIZE": ctx.size, "COLLECTIVES_JOB_ID": job, **variables}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    collectives.world._generation = 0  # these processes have served other tests, each its own number of them
    torch.set_num_threads(1)
    try:
        hvd.init(process_sets=process_sets)
        yield hvd
    finally:
        hvd.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
