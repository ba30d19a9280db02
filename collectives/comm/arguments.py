"""Checks of a communicator's arguments before anything is sent; they raise `InvalidArgument`."""

from __future__ import annotations

import math
import numbers
import operator

import torch

from .._nccl import OPS
from ..arrays import DTYPE_NAMES, TORCH_CODES, Buffer, kind_of
from ..errors import InvalidArgument
from ..torch_compat import cuda_current_raw_stream

__all__ = [
    "check_premul_scalar",
    "check_same_dtype",
    "check_size",
    "invalid",
    "parse_allocation",
    "parse_int",
    "parse_op",
    "parse_peer",
    "parse_rank",
    "parse_reduction",
    "parse_row_splits",
    "parse_size",
    "parse_timeout",
    "read_on_root",
    "read_pair",
    "stats_address",
    "stream_handle",
]

_LIMITS = {
    code: (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype) for dtype, code in TORCH_CODES.items()
}


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


def parse_rank(value, size: int, what: str, *, rank: int, name: str) -> int:
    """Return a root or peer as an int in [0, ``size``), or raise `InvalidArgument`."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise InvalidArgument(f"{what} must be an int, not {kind_of(value)} {value!r}", op=name, rank=rank)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InvalidArgument(f"{what} must be an int, not {value!r}", op=name, rank=rank) from error
    if not 0 <= number < size:
        raise InvalidArgument(f"{what} {number} isn't a rank: they are 0 to {size - 1}", op=name, rank=rank)
    return number


def parse_peer(comm, value, what: str, name: str) -> int:
    """Return a rank of the communicator, such as a root or a peer."""
    return parse_rank(value, comm.size, what, rank=comm.rank, name=name)


def parse_int(comm, value, what: str, low: int, name: str, end: int = 2**63) -> int:
    """Return an int from `low` to `end` - 1."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__") or not low <= operator.index(value) < end:
        raise invalid(comm, name, f"{what} must be an int from {low} to {end - 1}, not {value!r}")
    return operator.index(value)


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


# ---- Reductions.


def parse_op(op, *, rank: int, name: str) -> tuple[int, float | None]:
    """Return (op code, scalar) of a name, a number or a torch ReduceOp.

    A number is a premultiplied sum: each rank's input is multiplied by its number, then summed. Its
    code is that of sum, and the caller creates the library's op for the scalar.
    """
    if type(op) is str:
        code = OPS.get(op)
        if code is not None:
            return code, None
    elif isinstance(op, numbers.Real) and not isinstance(op, bool) and type(op).__name__ not in ("bool_", "bool"):
        return OPS["sum"], op if isinstance(op, numbers.Integral) else float(op)
    else:
        found = _torch_op(op)
        if found is not None:
            return found
    raise InvalidArgument(
        f"op must be one of {', '.join(repr(known) for known in OPS)}, a number (premultiplied sum) or the "
        f"torch.distributed.ReduceOp of one of these, not {op!r}",
        op=name,
        rank=rank,
    )


def _torch_op(op):
    if not torch.distributed.is_available():
        return None
    known = torch.distributed.ReduceOp
    if isinstance(op, known.RedOpType):
        code = {"PRODUCT": OPS["prod"]}.get(op.name, OPS.get(op.name.lower()))
        return None if code is None else (code, None)
    if not isinstance(op, known):
        return None
    for name, code in OPS.items():
        if op == getattr(known, "PRODUCT" if name == "prod" else name.upper()):
            return code, None
    if op == known.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, numbers.Real):
            return OPS["sum"], float(factor)
    return None


def check_premul_scalar(scalar, code: int, *, rank: int, name: str) -> int | float:
    """Return the scalar as a value of the dtype; refuse one that the dtype can't hold.

    An integer type would cut 0.5 to 0 without a message.
    """
    limits = _LIMITS[code]
    finite = isinstance(scalar, int) or math.isfinite(scalar)
    if isinstance(limits, torch.finfo):
        if not finite or limits.min <= scalar <= limits.max:
            return float(scalar)
        what = "a number"
    else:
        if finite and scalar == int(scalar) and limits.min <= scalar <= limits.max:
            return int(scalar)
        what = "a whole number"
    raise InvalidArgument(
        f"op {str(scalar)[:40]} isn't a value of {DTYPE_NAMES[code]}, the array's dtype: use {what} from "
        f"{limits.min} to {limits.max}, or an array of another dtype",
        op=name,
        rank=rank,
    )


def parse_reduction(comm, op, dtype: int, name: str):
    """Return (op code, (scalar, dtype code) of a premultiplied sum or None).

    `dtype`: the array's dtype code.
    """
    code, scalar = parse_op(op, rank=comm.rank, name=name)
    if scalar is None:
        return code, None
    return code, (check_premul_scalar(scalar, dtype, rank=comm.rank, name=name), dtype)


# ---- Arrays.


def read_pair(comm, out, inp, name: str) -> tuple[Buffer, Buffer]:
    """Read an output and an input of one dtype."""
    out_buffer = comm._reader.read(out, name, writes=True, what="out")
    inp_buffer = comm._reader.read(inp, name, writes=False, what="inp")
    check_same_dtype(comm, out_buffer, inp_buffer, name)
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


def check_same_dtype(comm, out: Buffer, inp: Buffer, name: str) -> None:
    """Refuse an output of another dtype than the input."""
    if out.dtype != inp.dtype:
        raise invalid(comm, name, f"out is {out.dtype} and inp is {inp.dtype}: both must have one dtype")


def check_size(comm, large: Buffer, small: Buffer, size: int, name: str, large_is: str, small_is: str) -> None:
    """Refuse two arrays of which the first isn't `size` times as long as the second."""
    if large.count != small.count * size:
        text = (
            f"{large_is} has {large.count} elements and {small_is} has {small.count}: {large_is} must have "
            f"{size} (ranks) x {small.count} = {small.count * size}"
        )
        raise invalid(comm, name, text)


def stats_address(comm, share, reduced: Buffer, name: str) -> int:
    """Return the address of the two float64 to which a reduction adds its statistics.

    `share`: the array with them; `reduced`: the array that is reduced.
    """
    if not DTYPE_NAMES.get(reduced.code, "").startswith(("float", "bfloat")):
        raise invalid(comm, name, f"the array is {reduced.dtype}, of which there is no share: leave share out")
    buffer = comm._reader.read(share, name, writes=True, what="share")
    if buffer.dtype != "float64" or buffer.count != 2:
        text = (
            f"share is {buffer.count} x {buffer.dtype}: use torch.zeros(2, dtype=torch.float64), to which the sum "
            "of squares and the count of non-finite elements are added"
        )
        raise invalid(comm, name, text)
    if buffer.overlaps(reduced.ptr, reduced.nbytes):
        raise invalid(comm, name, "share overlaps the array: use memory of its own")
    return buffer.ptr


def parse_row_splits(comm, out, dst: Buffer, output_split_sizes, inp, src: Buffer, input_split_sizes):
    """Return the units to send to each rank, and those to receive from each, of an all_to_all.

    The split sizes are rows for each rank, None for even parts.
    """
    sends, sent_row = _parse_split_sizes(comm, inp, src, input_split_sizes, "input_split_sizes", "inp")
    receives, received_row = _parse_split_sizes(comm, out, dst, output_split_sizes, "output_split_sizes", "out")
    if None not in (sent_row, received_row) and sent_row != received_row:
        text = f"a row of inp has {sent_row} elements and a row of out {received_row}: they must be equal"
        raise invalid(comm, "all_to_all", text)
    own_send, own_receive = sends[comm.rank], receives[comm.rank]
    if own_send != own_receive:
        text = f"rank {comm.rank} sends {own_send} elements to itself and receives {own_receive}"
        raise invalid(comm, "all_to_all", text)
    return sends, receives


def _parse_split_sizes(comm, array, buffer: Buffer, sizes, what: str, which: str) -> tuple[list[int], int | None]:
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
        comm._queue.external_streams.add(stream)
        return stream
    handle = getattr(stream, "cuda_stream", None)  # torch's
    if handle is None:
        handle = getattr(stream, "ptr", None)  # CuPy's
        comm._queue.external_streams.add(handle)
    if handle is None:
        text = f"stream must be a torch or CuPy stream or its address, not {stream!r}"
        raise InvalidArgument(text, rank=comm.rank)
    return handle
