"""Collectives over several nodes: the topology, Gloo between nodes, and the two levels of a hierarchical collective."""

__all__ = []
