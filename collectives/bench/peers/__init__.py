"""The other libraries, measured beside ours: which are there, and how to install those that are not."""

from __future__ import annotations

from ...comm.communicator import Communicator
from ..contestant import Contestant
from ..control import Control
from .deepspeed import DeepSpeedPeer
from .missing import PeerMissing
from .mpi import FLAVOURS, MpiPeer
from .process_group import ProcessGroupPeer

__all__ = ["PeerMissing", "open_peer"]


def open_peer(name: str, comm: Communicator, control: Control, bound: bool) -> Contestant:
    """Start a peer by its name; all ranks call it. Raises `PeerMissing` on all ranks where it is not there on one.

    ``bound``: a rank that is a process of the peer's is to be bound to a core.
    """
    peer, missing = None, None
    try:
        if name in FLAVOURS:
            peer = MpiPeer(FLAVOURS[name], comm, bound)
        elif name == "deepspeed":
            peer = DeepSpeedPeer(comm, control)
        else:
            peer = ProcessGroupPeer(name, comm, control)
    except PeerMissing as error:
        missing = str(error)
    reasons = [text for text in control.gather(missing) if text]
    if reasons:
        if peer is not None:
            peer.close()
        raise PeerMissing(reasons[0])
    peer.fields = control.from_first(peer.fields)
    return peer
