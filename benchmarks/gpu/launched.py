"""Record of the kernels that a program has launched, by their names in the sources."""

from __future__ import annotations

import contextlib

from collectives.kernels import cuda, execution

__all__ = ["record_launches"]


@contextlib.contextmanager
def record_launches():
    """Context of a set that gets the name of each kernel launched in the block, on a GPU or on the
    host.
    """
    names: set[str] = set()
    on_host, on_gpu = execution.run_on_host, cuda.launch

    def host(kernel, *args):
        names.add(kernel.name)
        return on_host(kernel, *args)

    def gpu(kernel, *args):
        names.add(kernel.name)
        return on_gpu(kernel, *args)

    execution.run_on_host, cuda.launch = host, gpu
    try:
        yield names
    finally:
        execution.run_on_host, cuda.launch = on_host, on_gpu
