"""Benchmark of the collectives, as nccl-tests, on GPUs and host memory, beside other libraries.

Run it as ``python -m collectives.bench``.
"""

__all__ = []
