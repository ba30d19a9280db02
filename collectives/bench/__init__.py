"""`python -m collectives.bench`: nccl-tests' job on GPUs and host memory, with other libraries measured beside ours."""

__all__ = []
