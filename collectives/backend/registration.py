"""Registration of the backend with torch.distributed, and the creation of its process groups."""

from __future__ import annotations

import functools

import torch.distributed as dist

from . import patches

__all__ = ["NAME", "register_backend"]

NAME = "collectives"


def register_backend() -> None:
    """Make "collectives" a backend of torch.distributed, for CPUs and CUDA; harmless when repeated.

    The import of this module calls it, and so does torch itself where it finds backends by the entry
    point group ``torch.distributed.backends``.
    """
    if dist.is_available():
        _register()


@functools.cache
def _register() -> None:
    dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu", "cuda"])
    patches.install()


def create_backend(options, backend_options=None):
    """Create the backend of one process group; torch calls it on all ranks of the group.

    `options`: torch's ``_DistributedBackendOptions``; `backend_options`: the ``pg_options`` of
    ``init_process_group`` and ``new_group``; a `Communicator` of the same ranks: the group uses it, and
    opens none of its own. Blocks until all ranks have come.
    """
    from .mixed import create  # subclasses torch's ProcessGroup: only for programs that use it

    patches.install_for_groups()
    return create(options, backend_options)


register_backend()
