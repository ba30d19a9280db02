"""Messages of the negotiation: `Request`, and `TensorTableEntry`, which holds its tensors."""

from __future__ import annotations

import json
import math
import time
import weakref
from typing import NamedTuple

import torch

from ..arrays import NAMED_DTYPES
from ..cuda_state import refuse_capture
from ..errors import TransportError
from ..json_records import parse_json, parse_numbers, parse_text
from ..layout import ALIGNMENT

__all__ = [
    "CAST_DTYPES",
    "MAX_BYTES",
    "CachedRequest",
    "Request",
    "TensorTableEntry",
    "cached_request",
    "decode_requests",
    "encode_requests",
]

CAST_DTYPES = (torch.bool, torch.int16)  # reduced in another dtype, each tensor by itself
MAX_BYTES = 1 << 26  # of one rank's encoded requests
_MAX_ELEMENTS = 1 << 58  # of a shape, and in a dimension: their bytes are a number of 64 bits


class Request(NamedTuple):
    """One operation as all ranks must call it. The tensors of a group are one operation.

    ``name``: the user's, "" for none. ``dtypes`` and ``shapes``: of each tensor. ``device``: "cpu"
    or "cuda". ``root``: a rank of the process set. ``wire``: the wire format to which elements are
    rounded for transport, or "". ``refusal``: why this rank can't take part, or "".
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
    refusal: str = ""


class CachedRequest:
    """A request and what is derived from it.

    There is one object for each request; compare by identity. ``key``: name by which the ranks'
    entries are matched; "" for a request without a name. ``nbytes``: of all tensors.
    ``fusion_key``: equal for allreduces that can be fused with each other; None for what can't be
    fused. ``unpadded``: whether a fusion buffer has no padding between its tensors.
    """

    __slots__ = ("__weakref__", "fusion_key", "key", "nbytes", "request", "unpadded")

    def __init__(self, request: Request):
        kind, name, dtypes, shapes, device, op, prescale, postscale, _, wire, _ = request
        self.request = request
        self.key = f"{kind}.{name}" if name else ""
        sizes = [NAMED_DTYPES[d].itemsize * torch.Size(s).numel() for d, s in zip(dtypes, shapes, strict=True)]
        self.nbytes = sum(sizes)
        self.unpadded = not any(nbytes % ALIGNMENT for nbytes in sizes)
        one_dtype = len(set(dtypes)) == 1 and NAMED_DTYPES[dtypes[0]] not in CAST_DTYPES
        fusible = kind == "allreduce" and op != "adasum" and one_dtype
        self.fusion_key = (dtypes[0], device, op, prescale, postscale, wire) if fusible else None


_cache: weakref.WeakValueDictionary[Request, CachedRequest] = weakref.WeakValueDictionary()


def cached_request(request: Request) -> CachedRequest:
    """Return the `CachedRequest` of a request, which lives while it is referenced.

    Threads that want it for the first time at once may get two: compare the requests where it must
    not matter.
    """
    cached = _cache.get(request)
    if cached is None:
        cached = _cache[request] = CachedRequest(request)
    return cached


class TensorTableEntry:
    """An operation of this rank, with its tensors, which it keeps alive, and its outcome.

    ``results``: what `synchronize` returns, set when ``done`` is. ``splits``: of alltoall.
    ``ready_event``: on CUDA the event after the inputs were computed. ``finish_event``: on CUDA the
    event after the operation. ``sequence``: number of the operation in the order in which its
    process set carries them out, the same on all ranks.
    """

    __slots__ = (
        "cached", "done", "error", "finish_event", "inputs", "key", "outputs", "ready_event", "results", "sequence",
        "splits", "stall_reported", "submit_time",
    )  # fmt: skip

    def __init__(self, cached: CachedRequest, inputs: list, outputs: list | None = None, splits=None):
        self.cached = cached
        self.inputs = inputs
        self.outputs = outputs
        self.splits = splits
        self.key = cached.key
        self.done = False
        self.error: BaseException | None = None
        self.results = None
        self.sequence = -1
        self.submit_time = time.monotonic()
        self.stall_reported = False
        self.ready_event = None
        self.finish_event = None
        if cached.request.device == "cuda":
            refuse_capture(
                inputs[0].device,
                "Horovod's ranks agree on the host on the order of their operations; capture a step of DDP or "
                "GradientBuckets",
                op=f"hvd {self.key}",
            )
            self.ready_event = torch.cuda.current_stream(inputs[0].device).record_event()

    def tensors(self) -> list[torch.Tensor]:
        """Return the caller's tensors: those that are read and those that are written."""
        separate = self.outputs is not None and self.outputs is not self.inputs
        return [*self.inputs, *self.outputs] if separate else self.inputs

    @property
    def request(self) -> Request:
        """What the ranks compare."""
        return self.cached.request


def encode_requests(new: list[Request], request_ids: list[int] | None) -> bytes:
    """Encode new requests, and the request ids where they have no room in the row."""
    return json.dumps([new, request_ids], separators=(",", ":")).encode()


def decode_requests(data: bytes, rank: int) -> tuple[list[Request], list[int] | None]:
    """Decode what `encode_requests` wrote.

    Nothing is unpickled; `TransportError` for anything else.
    """
    try:
        new, request_ids = parse_json(data)
        requests = [
            Request(
                parse_text(kind), parse_text(name), tuple(map(parse_text, dtypes)), tuple(map(_parse_shape, shapes)),
                parse_text(device), parse_text(op), float(prescale), float(postscale), int(root), parse_text(wire),
                parse_text(refusal),
            )
            for kind, name, dtypes, shapes, device, op, prescale, postscale, root, wire, refusal in new
        ]  # fmt: skip
        for request in requests:
            if len(request.dtypes) != len(request.shapes) or not set(request.dtypes) <= NAMED_DTYPES.keys():
                raise ValueError("no dtypes of these shapes")
        return requests, None if request_ids is None else parse_numbers(request_ids)
    except (ValueError, TypeError, OverflowError) as error:
        text = f"what rank {rank} announced can't be read: {data[:80]!r}"
        raise TransportError(text, op="hvd", peers=(rank,)) from error


def _parse_shape(value) -> tuple[int, ...]:
    shape = tuple(value)
    if not all(type(n) is int and 0 <= n < _MAX_ELEMENTS for n in shape) or math.prod(shape) >= _MAX_ELEMENTS:
        raise ValueError("no shape")
    return shape
