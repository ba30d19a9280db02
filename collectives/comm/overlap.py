"""Inputs that share memory with an output: copied first, but in the engines' forms in place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from ..arrays import Buffer
from ..cuda_state import stream_from_address
from .arguments import stream_handle
from .group import Copy

__all__ = ["separate"]


def separate(
    comm, outs: Sequence[Buffer], inp: Buffer, in_place: int | None, stream
) -> tuple[Buffer, tuple[Copy, ...]]:
    """Return an input that shares no memory with the outputs, and the copies that the call needs for it.

    That is `inp` itself where they lie apart, or where it begins at `in_place`, the address of the
    operation's form in place; else memory for a copy, which is made when the operation's turn has
    come: one that was called before may write the input yet. `stream`: as the caller passed it.
    """
    overlaps = inp.nbytes and any(out.nbytes and out.overlaps(inp.ptr, inp.nbytes) for out in outs)
    if not overlaps or inp.ptr == in_place:
        return inp, ()
    on_stream = contextlib.nullcontext()
    if not comm._on_host and stream is not None:
        on_stream = torch.cuda.stream(stream_from_address(stream_handle(comm, stream), comm.device))
    with on_stream:
        memory = torch.empty(inp.nbytes, dtype=torch.uint8, device=comm.device)
    copy = Copy(inp.ptr, memory.data_ptr(), inp.nbytes, memory)
    return inp._replace(ptr=copy.target), (copy,)
