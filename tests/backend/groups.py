"""Process groups for the tests of the backend."""

import functools
import gc

import torch.distributed as dist

import collectives  # noqa: F401  (registers the backend)


def over(backend):
    """Run a function of (ctx, ...) as (ctx, path, ...) inside a default process group of a backend."""

    def decorate(function):
        @functools.wraps(function)
        def inside(ctx, path, *args, **options):
            dist.init_process_group(backend, init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
            try:
                result = function(ctx, *args, **options)
                gc.collect()
                return result
            finally:
                dist.destroy_process_group()

        return inside

    return decorate
