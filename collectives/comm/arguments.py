"""Checks of a communicator's arguments before anything is sent; they raise `InvalidArgument`."""

from __future__ import annotations

import operator

import torch

from ..arrays import Buffer, check_premul_scalar, parse_op, parse_rank
from ..errors import InvalidArgument
from ..torch_compat import cuda_current_raw_stream

__all__ = [
    "invalid",
    "parse_allocation",
    "parse_int",
    "parse_peer",
    "parse_reduction",
    "parse_size",
    "parse_split_sizes",
    "parse_timeout",
    "read_on_root",
    "read_pair",
    "stream_handle",
]


def invalid(comm, name: str, message: str) -> InvalidArgument:
    """Build the error of a wrong argument; `name`: the operation's."""
    return InvalidArgument(message, op=name, rank=comm.rank)


# ---- Numbers.


def parse_size(size) -> int:
    """Return a number of ranks."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidArgument(f"size must be an int of at least 1, not {size!r}")
    return size


def parse_timeout(seconds, rank: int) -> float | None:
    """Return a time limit in seconds; None for no limit."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (number and seconds > 0):
        raise InvalidArgument(f"timeout must be above 0 s, or None for no limit, not {seconds!r}", rank=rank)
    return seconds


def parse_peer(comm, value, what: str, name: str) -> int:
    """Return a rank of the communicator, such as a root or a peer."""
    return parse_rank(value, comm.size, what, rank=comm.rank, name=name)


def parse_int(comm, value, what: str, low: int, name: str, end: int = 2**63) -> int:
    """Return an int from `low` to `end` - 1."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__") or not low <= operator.index(value) < end:
        raise invalid(comm, name, f"{what} must be an int from {low} to {end - 1}, not {value!r}")
    return operator.index(value)


def parse_reduction(comm, op, dtype: int, name: str):
    """Return (op code, (scalar, dtype code) of a premultiplied sum or None).

    `dtype`: the array's dtype code.
    """
    code, scalar = parse_op(op, rank=comm.rank, name=name)
    if scalar is None:
        return code, None
    return code, (check_premul_scalar(scalar, dtype, rank=comm.rank, name=name), dtype)


def parse_allocation(comm, n, dtype: torch.dtype | None) -> tuple[int, torch.dtype]:
    """Return the number of elements and the dtype of a tensor that is to be allocated.

    None: torch's default dtype.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise invalid(comm, "empty", f"dtype must be a torch.dtype, not {dtype!r}")
    if str(dtype).startswith(("torch.q", "torch.bits")):
        raise invalid(comm, "empty", f"{dtype} needs more than memory: allocate its integers (torch.uint8, ...)")
    n = parse_int(comm, n, "n", 0, "empty")
    if n * dtype.itemsize >= 2**63:
        raise invalid(comm, "empty", f"{n} elements of {dtype} are more than an address space holds")
    return n, dtype


# ---- Arrays.


def read_pair(comm, out, inp, name: str) -> tuple[Buffer, Buffer]:
    """Read an output and an input of one dtype."""
    out_buffer = comm._reader.read(out, name, writes=True, what="out")
    inp_buffer = comm._reader.read(inp, name, writes=False, what="inp")
    comm._reader.check_same_dtype(out_buffer, inp_buffer, name)
    return out_buffer, inp_buffer


def read_on_root(comm, array, root: int, name: str, what: str, *, writes: bool) -> Buffer | None:
    """Read an array that only the root passes; return None on the other ranks."""
    if comm.rank != root:
        if array is not None:
            raise invalid(comm, name, f"only root (rank {root}) has {what}: pass None on the other ranks")
        return None
    if array is None:
        raise invalid(comm, name, f"{what} is None, but this rank is the root and must give it")
    return comm._reader.read(array, name, writes=writes, what=what)


def parse_split_sizes(comm, array, buffer: Buffer, sizes, what: str, which: str) -> tuple[list[int], int | None]:
    """Return (units for each rank, elements of one row) of one side of an all_to_all.

    `sizes`: rows for each rank, None for even parts; `what`: the argument's name; `which`: the
    array's. The elements are None where the array has no rows.
    """
    shape = tuple(array.shape)
    if not shape:
        raise invalid(comm, "all_to_all", f"{which} has no dimension to split: use a tensor of at least one")
    if sizes is None:
        if shape[0] % comm.size:
            raise invalid(comm, "all_to_all", f"the {shape[0]} rows of {which} can't be shared evenly: pass {what}")
        sizes = [shape[0] // comm.size] * comm.size
    if isinstance(sizes, (str, bytes)) or not hasattr(type(sizes), "__iter__"):
        raise invalid(comm, "all_to_all", f"{what} must be a list of {comm.size} ints, one a rank, not {sizes!r}")
    sizes = list(sizes)
    if len(sizes) != comm.size:
        raise invalid(comm, "all_to_all", f"{what} must have {comm.size} entries, one a rank, not {len(sizes)}")
    sizes = [parse_int(comm, size, f"each of {what}", 0, "all_to_all") for size in sizes]
    if sum(sizes) != shape[0]:
        raise invalid(comm, "all_to_all", f"{what} add up to {sum(sizes)}, but {which} has {shape[0]} rows")
    units = buffer.units // shape[0] if shape[0] else 0
    return [size * units for size in sizes], buffer.count // shape[0] if shape[0] else None


# ---- Streams.


def stream_handle(comm, stream) -> int:
    """Return the address of the CUDA stream to issue on, None: torch's current one.

    Always 0 on the host.
    """
    if comm._on_host:
        if stream is not None:
            text = "the host engine takes no stream: use async_op=True for the communicator's own queue"
            raise InvalidArgument(text, rank=comm.rank)
        return 0
    if stream is None:
        return cuda_current_raw_stream(comm.device.index)
    if isinstance(stream, int) and not isinstance(stream, bool):
        comm._external_streams.add(stream)
        return stream
    handle = getattr(stream, "cuda_stream", None)  # torch's
    if handle is None:
        handle = getattr(stream, "ptr", None)  # CuPy's
        comm._external_streams.add(handle)
    if handle is None:
        text = f"stream must be a torch or CuPy stream or its address, not {stream!r}"
        raise InvalidArgument(text, rank=comm.rank)
    return handle
