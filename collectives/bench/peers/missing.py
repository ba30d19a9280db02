"""PeerMissing: the error of a peer that can't be measured."""

__all__ = ["PeerMissing"]


class PeerMissing(Exception):
    """A peer is not installed, or can't be started here.

    The text says why and how to install it.
    """
