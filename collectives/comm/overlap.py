"""Inputs that share memory with an output: copied first, but in the engines' forms in place."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from ..arrays import Buffer
from ..cuda_state import stream_from_address
from .arguments import stream_handle
from .memory import raw_cuda_memory

__all__ = ["raw_bytes", "separate"]


def raw_bytes(comm, buffer: Buffer) -> torch.Tensor:
    """Return an array's memory as a tensor of bytes; the array must be held as long as that is used."""
    if not buffer.nbytes:
        return torch.empty(0, dtype=torch.uint8, device=comm.device)
    if comm._on_host:
        return torch.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ptr), dtype=torch.uint8)
    return raw_cuda_memory(buffer.ptr, buffer.nbytes, comm.device)


def separate(
    comm, out: Buffer, inp: Buffer, in_place: int | None, stream=None
) -> tuple[Buffer, tuple[torch.Tensor, ...]]:
    """Return an input that shares no memory with an output, and what must be held for it.

    That is `inp` itself where they lie apart, or where it begins at `in_place`, the address of the
    operation's form in place; else a copy, which is made on `stream`.
    """
    if not inp.nbytes or not out.nbytes or not out.overlaps(inp.ptr, inp.nbytes) or inp.ptr == in_place:
        return inp, ()
    on_stream = contextlib.nullcontext()
    if not comm._on_host and stream is not None:
        on_stream = torch.cuda.stream(stream_from_address(stream_handle(comm, stream), comm.device))
    with on_stream:
        copy = raw_bytes(comm, inp).clone()
    return inp._replace(ptr=copy.data_ptr()), (copy,)
