"""Collectives over several nodes.

`topology` says which rank is on which node. `gloo` carries bytes between nodes. `hierarchical`
composes collectives from the engine's inside of each node and from Gloo's transfers between nodes.
`comm` wraps them in the interface of the binding's communicator. `nccl_hierarchical` composes
NCCL's collectives inside of each node and between nodes.

Import from the modules: some are lower than others in `comm`, so this package imports none of them.
"""

__all__ = []
