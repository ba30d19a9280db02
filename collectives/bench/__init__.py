"""`python -m collectives.bench`: nccl-tests for GPUs and host memory, with other libraries."""

__all__ = []
