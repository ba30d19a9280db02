"""Operations that are one call of the communicator on one tensor of the host, or none.

They take a fraction of the executor's time: autograd has nothing to record in them.
"""

from __future__ import annotations

import torch

from ..comm.communicator import Communicator
from .message_table import Response
from .messages import Request, TensorTableEntry

__all__ = ["is_one_call", "make_call"]


def is_one_call(response: Response) -> bool:
    """Return whether `make_call` takes an operation, with the same request on all ranks."""
    request = response.request
    if len(request.shapes) > 1 or request.device != "cpu" or len(set(response.cached_requests)) != 1:
        return False
    if request.kind == "allreduce":  # the host engine takes an average itself, too
        unscaled = request.prescale == request.postscale == 1
        return response.cached.fusion_key is not None and not request.wire and unscaled
    return request.kind in ("allgather", "broadcast", "barrier")


def make_call(comm: Communicator, request: Request, entry: TensorTableEntry) -> None:
    """Carry out an operation and set its results; blocks. Not in torch's inference mode."""
    kind = request.kind
    if kind == "barrier":  # nothing remains to be done once all ranks have submitted it
        entry.results = []
        return
    (tensor,) = entry.inputs
    out = None if entry.outputs is None else entry.outputs[0]
    if kind == "allreduce":
        if out is None:
            out = torch.empty_like(tensor)
        comm.all_reduce(tensor, request.op, out=None if out is tensor else out)
    elif kind == "allgather":
        rows, *inner = tensor.shape
        out = tensor.new_empty((comm.size * rows, *inner))
        comm.all_gather(out, tensor)
    else:
        if out is None:
            out = tensor.clone() if comm.rank == request.root else torch.empty_like(tensor)
        elif out is not tensor and comm.rank == request.root:
            out.copy_(tensor)
        comm.broadcast(out, request.root)
    entry.results = [out]
