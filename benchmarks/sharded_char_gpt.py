"""The char-GPT of the examples in shards, for the benchmarks of what its steps pay beside the training."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from collectives.sharded import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from char_gpt import GPT, loss_of

__all__ = ["CONTEXT", "loss_of", "make_sharded"]

CONTEXT = 64  # characters of a text


def make_sharded(comm, layers: int, width: int) -> tuple[GPT, torch.optim.Optimizer, int]:
    """Return the model, each block and the rest a unit, its AdamW, and its number of parameters."""
    torch.manual_seed(1)
    model = GPT(layers, width, CONTEXT)
    count = sum(param.numel() for param in model.parameters())
    for block in model.blocks:
        fully_shard(block, comm=comm)
    fully_shard(model, comm=comm)
    return model, torch.optim.AdamW(model.parameters(), 1e-3), count
