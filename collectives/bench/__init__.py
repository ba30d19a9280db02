"""`python -m collectives.bench`: bandwidth benchmark as nccl-tests, on GPUs and host memory, with
other libraries.
"""

__all__ = []
