"""Common memory: memory that all ranks of one host map, so that what a rank writes the others read.

The engine's own memory belongs to the process that has allocated it, which also frees it. Common
memory is nobody's: it is freed when the last rank has dropped it.
"""

from __future__ import annotations

import os
import secrets

import numpy
import torch

from .agree import all_gather_object
from .communicator import Communicator
from .liveness import this_process

__all__ = ["allocate_common", "is_on_one_host"]

_TOKEN_BYTES = 32


def is_on_one_host(comm: Communicator) -> bool:
    """Whether the ranks are processes, or threads, of one host that the host engine serves."""
    return comm.device.type == "cpu" and len(comm.machines) == 1


def allocate_common(comm: Communicator, nbytes: int) -> tuple[numpy.ndarray | None, str]:
    """Allocate bytes of 0 that all ranks of a communicator on one host map, behind which lie some of ours. A
    collective; blocks.

    Nothing orders the ranks' reads and writes: a barrier between them does. The memory is freed when no
    rank has it mapped any more. Returns the memory, and ""; or None and the reason, the same on all
    ranks, where some rank can't map it: containers may hide the ranks' processes from each other.
    """
    nbytes += _TOKEN_BYTES
    file = None
    offer = ["", 0, "", ""]  # process, descriptor, what the memory ends with, error
    if comm.rank == 0:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            file = os.memfd_create("collectives", os.MFD_CLOEXEC)
            os.posix_fallocate(file, 0, nbytes)  # a system without so much memory says so here, not by a signal
            os.pwrite(file, token, nbytes - _TOKEN_BYTES)
            offer = [this_process(), file, token.hex(), ""]
        except OSError as error:
            offer[3] = f"rank 0: {error}"
    try:
        process, number, token, reason = all_gather_object(comm, offer)[0]
        memory = None
        if not reason:
            try:
                memory = _map(process, number, bytes.fromhex(token), nbytes)
            except OSError as error:
                reason = f"rank {comm.rank}: {error}"
        reason = next(filter(None, all_gather_object(comm, reason)), "")
    finally:
        if file is not None:
            os.close(file)
    if reason:
        return None, reason
    return memory, ""


def _map(process: str, number: int, token: bytes, nbytes: int) -> numpy.ndarray:
    """Map another process's file; raise OSError where it isn't the one that ends with the token."""
    node, namespace, pid, _ = process.split("|")
    if [node, namespace] != this_process().split("|")[:2]:
        raise OSError("it is in another process namespace than rank 0")
    path = f"/proc/{pid}/fd/{number}"
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != nbytes or os.pread(file, _TOKEN_BYTES, nbytes - _TOKEN_BYTES) != token:
            raise OSError(f"descriptor {number} of process {pid} is another file than rank 0's")
    finally:
        os.close(file)
    try:
        # torch keeps no descriptor open, as Python's mmap does.
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy()
    except RuntimeError as error:
        raise OSError(f"{path}: {error}") from error
