"""Modules whose parameters, gradients and optimizer state are sharded over the ranks, and plug-ins
for torch's FSDP2.
"""

from .fully_shard import fully_shard
from .ragged_tensor import RaggedTensor

__all__ = ["RaggedTensor", "fully_shard"]
