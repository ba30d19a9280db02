"""Default size of buckets on GPUs: it grows with the number of ranks, as a ring's latency does.

A bucket's collectives cost a latency each, whatever its bytes, and the last bucket of a backward
isn't hidden behind it. NCCL's constants for rings over NVLink and InfiniBand add up to 6.6 us and 1
us a rank (1 ms at 1,024), and eight ports of a node carry 376 GB/s (docs/scaling.md). So the bytes
of a bucket take four times its ring's latency, while the last one is at most a sixteenth of the
gradients, and never more than 400 MiB. All-reduces of many ranks are trees, whose latency is less,
but an optimizer in the hook has rings. In the model of docs/scaling.md twice these sizes make steps
of 1.3B and 7B parameters on 8 to 1,024 GPUs at most 4% faster.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["DEFAULT_CAP_MB", "default_bucket_cap", "default_bucket_cap_mb"]

DEFAULT_CAP_MB = 25  # torch's
_MIB = 1 << 20
_START, _STEP = 6.6e-6, 1.0e-6  # seconds: of a ring, and of each rank in it
_BANDWIDTH = 8 * 47e9  # bytes/s between nodes
_LATENCIES, _PARTS, _LARGEST_MB = 4, 16, 400


def default_bucket_cap(ranks: int, nbytes: int) -> int:
    """Return the bytes of a bucket on so many GPUs, of gradients of `nbytes` in all."""
    by_latency = _LATENCIES * (_START + _STEP * ranks) * _BANDWIDTH
    return int(max(DEFAULT_CAP_MB * _MIB, min(by_latency, nbytes / _PARTS, _LARGEST_MB * _MIB)))


def default_bucket_cap_mb(params: Iterable[torch.Tensor], ranks: int) -> int:
    """Return the size in MiB of buckets for the gradients of parameters: 25 on the host, where a
    bucket's latency is some microseconds.
    """
    params = [param for param in params if param.requires_grad]
    if not any(param.is_cuda for param in params):
        return DEFAULT_CAP_MB
    return default_bucket_cap(ranks, sum(param.numel() * param.element_size() for param in params)) // _MIB
