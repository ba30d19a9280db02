"""The optimizer that is stepped inside of DDP's backward, bucket by bucket, each rank a part of the elements.

A bucket of N elements over n ranks: of its first n*S elements, S the largest multiple of `align` for which they fit,
rank r owns part r; the rest, fewer than n*align, all ranks own alike. A bucket's gradients are reduced and scattered
(by the hook), each rank steps what it owns, and the parameters are gathered through a buffer of one bucket's size. The
optimizer's state, fp32 masters included, is there for what a rank owns: 1/n of it and the rests.
"""

from .ownership import Ownership
from .sharded_step import ShardedStep, refuse_arguments

__all__ = ["Ownership", "ShardedStep", "refuse_arguments"]
