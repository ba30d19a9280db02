"""Sends and receives of a process group of this backend.

On the host they go over channels: each makes progress by itself, with tags and from any source, as
on Gloo. On CUDA they are NCCL's, of a communicator for each direction between two ranks; those of a
``batch_isend_irecv`` or another coalescing block are one group of the process group's communicator.
"""

from __future__ import annotations

from ..errors import InvalidArgument, InvalidUsage
from .launching import Launching
from .tensors import as_dense, single, store_back
from .work import BackendWork

__all__ = ["PointToPointOps"]


class PointToPointOps(Launching):
    """Mixin of a process group: its sends and receives."""

    def send(self, tensors, dst_rank, tag=0):
        """Send a tensor to a rank of the group; returns its Work at once."""
        tensor = single(tensors, "send", self._rank)
        work = self._start(as_dense(tensor), dst_rank, tag, "send")
        return self._coalesce(BackendWork((work,), [tensor], is_collective=False))

    def recv(self, tensors, src_rank, tag=0):
        """Receive a tensor from a rank of the group; returns its Work at once."""
        tensor = single(tensors, "recv", self._rank)
        target = as_dense(tensor)
        work = self._start(target, src_rank, tag, "recv")
        return self._coalesce(BackendWork((work,), [tensor], store_back(tensor, target), is_collective=False))

    def recv_anysource(self, tensors, tag=0):
        """Receive a tensor from whichever rank of the group sends one first."""
        return self.recv(tensors, None, tag)

    def waited_at_once(self):
        """Return a block in which this thread waits for each send and receive behind its call."""
        return self._channels.waited_at_once()

    def _start(self, data, peer, tag, name):
        if peer is not None and (peer == self._rank or not 0 <= peer < self._size):
            raise InvalidArgument(
                f"rank {peer} is {'this one itself' if peer == self._rank else f'none of the {self._size} ranks'}",
                op=name, rank=self._rank,
            )  # fmt: skip
        if data.device.type == "cpu":
            if not -(2**63) <= tag < 2**63:
                raise InvalidArgument(f"the tag {tag} has more than 64 bits", op=name, rank=self._rank)
            comm = self.communicator(data.device)
            comm._reader.read(data, name, writes=name == "recv")  # refuses what can't be sent, here and not later
            return getattr(self._channels, name)(data, peer, tag)
        if peer is None:
            raise InvalidUsage("NCCL can't receive from any source: name the rank", op=name, rank=self._rank)
        if self._coalesced is not None:
            return getattr(self.communicator(data.device), name)(data, peer, async_op=True)
        self._check_device(data.device)
        return self._device_channels.start(name, data, peer, data.device)  # torch's NCCL ignores tags, too
