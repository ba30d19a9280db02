"""Peers: other libraries that are measured in turn with ours."""

from __future__ import annotations

from ...comm.communicator import Communicator
from ..control import Control
from ..implementation import Implementation, PeerMissing
from .deepspeed import DeepSpeedPeer
from .mpi4py_job import Mpi4pyPeer
from .process_group import ProcessGroupPeer

__all__ = ["open_peer"]


def open_peer(name: str, comm: Communicator, control: Control, bound: bool) -> Implementation:
    """Start a peer by its name; all ranks call it.

    Raises `PeerMissing` on all ranks where one rank doesn't have it. ``bound``: the peer's own rank
    processes are bound to cores.
    """
    peer, missing = None, None
    try:
        if name.startswith("mpi4py-"):
            peer = Mpi4pyPeer(name, comm, bound)
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
    peer.fields = control.broadcast_from_rank_0(peer.fields)
    return peer
