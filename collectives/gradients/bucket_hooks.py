"""Post-accumulate-grad hooks, by which `GradientBuckets` sends a bucket as soon as a backward has
made its gradients.
"""

from __future__ import annotations

import weakref

__all__ = ["SyncGate", "add_hooks"]


class SyncGate:
    """Gate of `no_sync()`: backwards start buckets while `closed` is 0."""

    __slots__ = ("closed",)

    def __init__(self):
        self.closed = 0  # nested no_sync() blocks


def add_hooks(buckets: list, gate: SyncGate, owner: weakref.ref) -> list:
    """Register hooks on all parameters of the buckets; return their handles.

    When the last missing gradient of a bucket is there, a hook calls
    ``owner().start_ready_buckets()``.
    """
    return [
        param.register_post_accumulate_grad_hook(_make_hook(bucket.missing, at, gate, owner))
        for bucket in buckets
        for at, param in enumerate(bucket.params)
    ]


def _make_hook(missing: set, at: int, gate: SyncGate, owner: weakref.ref):
    """Make the hook of parameter `at`.

    It must not hold the parameter: Python's garbage collector may not find that cycle.
    """
    discard = missing.discard

    def gradient_ready(_param):
        if not gate.closed:
            discard(at)
            if not missing:
                buckets = owner()
                if buckets is not None:
                    buckets.start_ready_buckets()

    return gradient_ready
