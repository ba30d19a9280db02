"""How ranks find each other: launcher variables, stores, unique ids, `init()`, and communicators of process groups."""

__all__ = []
