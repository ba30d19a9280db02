"""Collectives over several nodes.

`topology` says which rank is on which node. `gloo` carries bytes between nodes, and `hierarchical`
makes collectives of the engine's inside of each node and of Gloo between them. `comm` gives that
the interface of the binding's communicator. `nccl_hierarchical` does the same with NCCL on both
levels.

Import from the modules: some are lower than others in `comm`, so this package imports none of them.
"""

__all__ = []
