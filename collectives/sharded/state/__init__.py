"""State dicts and checkpoints of sharded modules and of their optimizers."""

__all__ = []
