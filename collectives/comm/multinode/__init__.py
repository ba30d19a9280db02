"""Collectives over several nodes.

`topology` says which rank is on which node. `hierarchical` composes collectives of a level inside
of nodes and a level between them. On the host `host` gives it the engine and `inter_node`, which
runs schedules over `messages`, the transport on TCP `connections`; `comm` wraps that in the
interface of the binding's communicator.

Import from the modules: some are lower than others in `comm`, so this package imports none of them.
"""

__all__ = []
