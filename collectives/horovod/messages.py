"""What a rank wants done: a `Signature`, which the ranks compare, and a `Submission`, which holds the tensors."""

from __future__ import annotations

import json
import time
import weakref
from typing import NamedTuple

import torch

from ..arrays import TORCH_CODES
from ..errors import TransportError
from ..layout import ALIGNMENT

__all__ = [
    "DTYPE_NAMES",
    "Request",
    "Signature",
    "Submission",
    "can_reduce",
    "decode",
    "dtype_of",
    "encode",
    "request_of",
]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALONE = frozenset({"bool", "int16"})  # reduced as other dtypes, each by itself
_MOST_BYTES = 1 << 26  # of one rank's announcement


class Signature(NamedTuple):
    """One operation as all ranks must call it; the tensors of a group are one operation.

    ``name``: as the user gave it, "" for none; ``dtypes`` and ``shapes``: of each tensor; ``device``: "cpu" or "cuda";
    ``root``: a rank of the process set; ``wire``: a wire format to which elements are rounded on the way, or "".
    """

    kind: str
    name: str = ""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    wire: str = ""


class Request:
    """A signature and what follows from it. Requests are compared by identity.

    ``key``: by which the ranks' submissions meet; "" for one with no name. ``nbytes``: of all tensors. ``alike``: what
    allreduces that can be fused have in common; None: it isn't to be fused. ``dense``: there is no padding between its
    tensors in a fusion buffer.
    """

    __slots__ = ("__weakref__", "alike", "dense", "key", "nbytes", "signature")

    def __init__(self, signature: Signature):
        kind, name, dtypes, shapes, device, op, before, after, _, wire = signature
        self.signature = signature
        self.key = f"{kind}.{name}" if name else ""
        sizes = [_DTYPES[d].itemsize * torch.Size(s).numel() for d, s in zip(dtypes, shapes, strict=True)]
        self.nbytes = sum(sizes)
        self.dense = not any(nbytes % ALIGNMENT for nbytes in sizes)
        one_dtype = bool(dtypes) and dtypes.count(dtypes[0]) == len(dtypes) and dtypes[0] not in _ALONE
        fusible = kind == "allreduce" and op != "adasum" and one_dtype
        self.alike = (dtypes[0], device, op, before, after, wire) if fusible else None


_made: weakref.WeakValueDictionary[Signature, Request] = weakref.WeakValueDictionary()


def request_of(signature: Signature) -> Request:
    """Give the request of a signature: the same one for as long as anybody has it, in submissions and tables alike."""
    request = _made.get(signature)
    if request is None:
        request = _made[signature] = Request(signature)
    return request


class Submission:
    """An operation of this rank under way, with its tensors, which it keeps alive, and its end.

    ``results``: what `synchronize` gives, set when ``done`` is. ``splits``: of alltoall. ``ready``: on CUDA the event
    behind what made the inputs. ``finished``: on CUDA the event behind the operation. ``sequence``: the operations of
    a process set are numbered in the order in which they are carried out, the same on all ranks.
    """

    __slots__ = (
        "begun", "done", "error", "finished", "inputs", "key", "outputs", "ready", "reported", "request", "results",
        "sequence", "splits",
    )  # fmt: skip

    def __init__(self, request: Request, inputs: list, outputs: list | None = None, splits=None):
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        self.splits = splits
        self.key = request.key
        self.done = False
        self.error: BaseException | None = None
        self.results = None
        self.sequence = -1
        self.begun = time.monotonic()
        self.reported = False
        self.ready = None
        self.finished = None
        if request.signature.device == "cuda":
            self.ready = torch.cuda.current_stream(inputs[0].device).record_event()

    def tensors(self) -> list[torch.Tensor]:
        """Give the caller's tensors: those that are read, and those that are written to."""
        apart = self.outputs is not None and self.outputs is not self.inputs
        return [*self.inputs, *self.outputs] if apart else self.inputs

    @property
    def signature(self) -> Signature:
        """What the ranks compare."""
        return self.request.signature


def dtype_of(name: str) -> torch.dtype:
    """Give the torch dtype of a name such as "float32"."""
    return _DTYPES[name]


def can_reduce(dtype: torch.dtype) -> bool:
    """Tell whether a dtype's elements can be reduced: NCCL's dtypes, bool, and int16 by int32."""
    return dtype in TORCH_CODES or dtype in (torch.bool, torch.int16)


def encode(new: list[Signature], numbers: list[int] | None) -> bytes:
    """Write down signatures that the others haven't seen, and all numbers, where these have no room elsewhere."""
    return json.dumps([new, numbers], separators=(",", ":")).encode()


def decode(data: bytes, rank: int) -> tuple[list[Signature], list[int] | None]:
    """Read what `encode` wrote. Nothing is unpickled; `TransportError` for anything else."""
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError("too long")
        new, numbers = json.loads(data)
        signatures = [
            Signature(
                str(kind), str(name), tuple(map(str, dtypes)), tuple(tuple(map(int, s)) for s in shapes), str(device),
                str(op), float(prescale), float(postscale), int(root), str(wire),
            )
            for kind, name, dtypes, shapes, device, op, prescale, postscale, root, wire in new
        ]  # fmt: skip
        if any(dtype not in _DTYPES for signature in signatures for dtype in signature.dtypes):
            raise ValueError("no dtype")
        return signatures, None if numbers is None else list(map(int, numbers))
    except (ValueError, TypeError, RecursionError) as error:
        text = f"what rank {rank} announced can't be read: {data[:80]!r}"
        raise TransportError(text, op="hvd", peers=(rank,)) from error
