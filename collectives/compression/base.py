"""Wire formats: how a bucket of gradients is reduced, and what that costs in bytes and in precision.

A bucket is reduced in two halves: each rank gets its part of the sum, and all get all parts. On a compressed wire the
first half is a quantization, an all-to-all and one fused pass that dequantizes, sums in fp32 in rank order, and
quantizes again; the second an all-gather and a dequantization. So each element is rounded twice, however many ranks
there are (the sum itself once). What is lost can be kept as a residual and added in the next step.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import NamedTuple

import torch

from ..errors import InvalidArgument
from ..kernels import Statistics, reduce_n
from ..layout import WIRE_FORMATS
from ..parameter_names import Names, names_of

__all__ = [
    "Bucket",
    "Factor",
    "Plain",
    "Residuals",
    "Wire",
    "add_found",
    "add_share",
    "follow",
    "parse_wire",
    "statistics_for",
    "transport",
]


class Factor(NamedTuple):
    """What a reduction does beside summing: all values times `before`, the sum divided by `over`, times `after`.

    ``over`` 0: not divided. Division is by the number itself, in fp32, as an average is; it isn't a product with its
    reciprocal.
    """

    before: float = 1.0
    over: int = 0
    after: float = 1.0


class Bucket:
    """A flat buffer of gradients on its way: one-dimensional, contiguous, of a floating dtype; reduced in place.

    `params`: the parameters whose gradients it holds, or a function that gives them when they are first asked for;
    `offsets`: the element at which each one's begins; None: one after the other. `index`: its place among the buckets
    of a backward, the same on all ranks. `known`: where messages find the parameters' names; None: in the modules.
    """

    __slots__ = ("_known", "_offsets", "_params", "flat", "index")

    def __init__(self, flat: torch.Tensor, params, offsets: list[int] | None, index: int, known: Names | None = None):
        self.flat = flat
        self.index = index
        self._params = params
        self._offsets = offsets
        self._known = known

    @property
    def params(self) -> list:
        if callable(self._params):
            self._params = self._params()
        return self._params

    @property
    def offsets(self) -> list[int]:
        if self._offsets is None:
            # Complex numbers are pairs.
            counts = [param.numel() << param.is_complex() for param in self.params[:-1]]
            self._offsets = [0, *itertools.accumulate(counts)]
        return self._offsets

    def names(self) -> list[str]:
        """The parameters' names, or their shapes where they have none; looked up now."""
        found = names_of(self.params) if self._known is None else self._known.of(self.params)
        return [name or f"shape {tuple(param.shape)}" for name, param in zip(found, self.params, strict=True)]

    def describe(self, most: int = 8) -> str:
        """The names as a message shows them."""
        names = self.names()
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def parse_wire(wire) -> tuple[str, int]:
    """Give a wire's format, and its rank ("powersgd:4": "powersgd", 4; else 0); raise `InvalidArgument`."""
    known = ["fp32", *WIRE_FORMATS, "powersgd:RANK"]
    if isinstance(wire, str):
        if wire == "fp32" or wire in WIRE_FORMATS:
            return wire, 0
        name, colon, rank = wire.partition(":")
        if name == "powersgd":
            if not (colon and rank.isascii() and rank.isdigit() and len(rank) < 6 and int(rank) > 0):
                raise InvalidArgument(f"wire {wire!r}: PowerSGD needs a rank from 1 up, as in 'powersgd:2'")
            return name, int(rank)
        if wire == "fp8":
            raise InvalidArgument(
                "wire='fp8' could be either of two: 'fp8_e4m3' has 3 bits of mantissa and is the one for gradients in "
                "blocks with a scale each, 'fp8_e5m2' has 2 and a wider range"
            )
    raise InvalidArgument(f"wire must be one of {', '.join(map(repr, known))}, not {wire!r:.60}")


def follow(last, *tensors):
    """Let torch's current stream use memory that `last` has used last, in the kernels to come; give that stream.

    Its kernels then come behind all that the other stream has been given so far, and the memory isn't used again before
    they are done, whichever stream it was allocated on. `last`: what this has given before, None at first. On the host
    it is nothing. A stream that is captured needs no wait: nothing was running when the capture began.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    if last is not None and last != stream:
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(last)
        for tensor in tensors:
            tensor.record_stream(stream)
    return stream


class _Flat:
    """The residuals of a bucket, and the stream that has used them last."""

    __slots__ = ("stream", "values")

    def __init__(self, values: torch.Tensor):
        self.values = values
        self.stream = None
        self.use()

    def use(self) -> torch.Tensor:
        self.stream = follow(self.stream, self.values)
        return self.values


class Residuals:
    """What compression has lost of each parameter's gradient so far, in fp32; kept by parameter.

    A bucket's residuals lie in one flat tensor, in the order of the bucket, and move to another one when the buckets
    are made again. What was loaded by name waits until its parameter comes.
    """

    def __init__(self, names: Names | None = None):
        self._names = names or Names()
        # id of a parameter -> (weak reference to it, its part, what that is a part of, its place there)
        self._views: dict[int, tuple] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Give the residuals of a bucket's elements: fp32, as long as ``bucket.flat``, on its device; 0 at first."""
        count, views = bucket.flat.numel(), self._views
        first = views.get(id(bucket.params[0]))
        home = None if first is None else first[2]
        if home is not None and home.values.numel() == count and home.values.device == bucket.flat.device:
            known = zip(map(views.get, map(id, bucket.params)), bucket.params, bucket.offsets, strict=True)
            if all(v is not None and v[0]() is param and v[2] is home and v[3] == at for v, param, at in known):
                return home.use()
        flat = torch.zeros(count, dtype=torch.float32, device=bucket.flat.device)
        home = _Flat(flat)
        names = self._names.of(bucket.params) if self._loaded else [None] * len(bucket.params)
        ends = [*bucket.offsets[1:], count]
        for param, name, begin, end in zip(bucket.params, names, bucket.offsets, ends, strict=True):
            # Behind a parameter there may be padding, which loses nothing.
            end = min(end, begin + (param.numel() << param.is_complex()))
            part, old = flat[begin:end], views.get(id(param))
            if old is not None and old[0]() is param and old[1].numel() == part.numel():
                old[2].use()  # another bucket's, which went by another stream
                part.copy_(old[1])
            elif name is not None and name in self._loaded:
                given = self._loaded.pop(name)
                if given.numel() != part.numel():
                    raise InvalidArgument(
                        f"the loaded residual of {name} has {given.numel()} elements, its gradient {part.numel()}"
                    )
                part.copy_(given)
            views[id(param)] = (self._watch(param), part, home, begin)
        return flat

    def _watch(self, param) -> weakref.ref:
        """Refer to a parameter weakly, and let its residual go with it."""
        views, key = self._views, id(param)

        def gone(reference):
            if key in views and views[key][0] is reference:
                del views[key]

        return weakref.ref(param, gone)

    def unclaimed(self) -> list[str]:
        """Give the names of what was loaded and of which no parameter has come."""
        return list(self._loaded)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Give copies by parameter name; `InvalidArgument` where a parameter is in no module that was registered."""
        found = dict(self._loaded)
        views = [(reference(), part) for reference, part, _, _ in list(self._views.values())]
        views = [(param, part) for param, part in views if param is not None]
        for name, (param, part) in zip(self._names.of(param for param, _ in views), views, strict=True):
            if name is None:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(param.shape)} has no name, by which its residual could be saved: let "
                    "the state know its module, state.register(module)"
                )
            found[name] = part.detach().cpu().clone()
        return found

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take residuals by parameter name, in place of all that is there."""
        self._views = {}
        self._loaded = dict(state)


# ---- The wires: what reduces a bucket.


class Wire:
    """What reduces buckets over a communicator's ranks; blocks on the host, is ordered on torch's stream on CUDA.

    `health`: None, or a float64 tensor of [sum of squares, number of non-finite values] on the bucket's device, to
    which this rank's share of the reduced bucket is added; the shares of all ranks make up the whole. Each call returns
    the bytes that this rank sends.
    """

    exact = False  # whether nothing is lost on the way
    align = 0  # a rank's part of a bucket is a multiple of so many elements; 0: of 16 bytes

    def reduce(self, comm, bucket: Bucket, factor: Factor, *, health=None) -> int:
        """Replace a bucket's values by the reduced ones, on all ranks."""
        raise NotImplementedError

    def scatter(self, comm, bucket: Bucket, factor: Factor, share: int, *, health=None) -> int:
        """Reduce at least rank r's elements ``[r * share, (r + 1) * share)``, on rank r, and those behind, on all."""
        return self.reduce(comm, bucket, factor, health=health)

    def begin(self) -> None:
        """Begin a backward."""

    def unclaimed(self) -> list[str]:
        """Give the names of parameters of which something was loaded, and which have not come."""
        return []

    def starts_from(self) -> int:
        """Give a number for what was loaded and must be the same on all ranks; 0 where that is nothing."""
        return 0

    def state_dict(self) -> dict:
        """Give what must be kept from one step to the next."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Take what `state_dict` gave."""
        if state.get("residuals"):
            raise InvalidArgument("the state to load has residuals, which only the wire it was saved with can use")


class Plain(Wire):
    """The gradients as they are: NCCL's or the host engine's own reduction."""

    exact = True

    def __init__(self, algorithm: str | None = None, *, deterministic: bool = False):
        self.algorithm = algorithm
        self.deterministic = deterministic

    def _algorithm(self, comm) -> str | None:
        if self.algorithm is None and self.deterministic:
            return "native" if comm._on_host else "direct"  # what reduces in rank order
        return self.algorithm

    def reduce(self, comm, bucket, factor, *, health=None):
        flat, op, algorithm = bucket.flat, _op(factor, comm.size), self._algorithm(comm)
        after = _after(factor, comm.size)
        found = health if health is None or after == 1.0 else torch.zeros_like(health)
        if health is None:
            comm.all_reduce(flat, op, algorithm=algorithm)
        elif _counts_itself(comm, algorithm):
            comm.all_reduce(flat, op, share=found)
        else:
            part = flat.numel() // comm.size // 16 * 16
            self._scatter(comm, flat, op, part, found)
            if part:
                own = flat[comm.rank * part : (comm.rank + 1) * part]
                comm.all_gather(flat[: comm.size * part], own, algorithm=algorithm)
        _finish(flat, after, found, health)
        return _ring_bytes(flat, comm.size, 2)

    def scatter(self, comm, bucket, factor, share, *, health=None):
        flat, op = bucket.flat, _op(factor, comm.size)
        after = _after(factor, comm.size)
        found = health if health is None or after == 1.0 else torch.zeros_like(health)
        self._scatter(comm, flat, op, share, found)
        for part in _owned(flat, share, comm):
            _finish(part, after, None, None)
        if found is not health:
            _finish(flat[:0], after, found, health)
        behind = flat[comm.size * share :]
        return _ring_bytes(flat[: comm.size * share], comm.size, 1) + _ring_bytes(behind, comm.size, 2)

    def _scatter(self, comm, flat, op, share, health):
        algorithm = self._algorithm(comm)
        counted = health is not None and _counts_itself(comm, algorithm)
        options = {"share": health} if counted else {"algorithm": algorithm}
        own = flat[comm.rank * share : (comm.rank + 1) * share]
        behind = flat[comm.size * share :]
        if share:
            comm.reduce_scatter(own, flat[: comm.size * share], op, **options)
        if behind.numel():
            comm.all_reduce(behind, op, **options)
        if health is not None and not counted:
            add_share(own, health)
            if comm.rank == 0:
                add_share(behind, health)


def _op(factor: Factor, size: int):
    if factor.before != 1.0:
        return factor.before
    return "avg" if factor.over == size else "sum"


def _after(factor: Factor, size: int) -> float:
    """By what the result of `_op` is still to be multiplied."""
    done = factor.before == 1.0 and factor.over == size
    return factor.after if done or not factor.over else factor.after / factor.over


def _counts_itself(comm, algorithm) -> bool:
    """Whether the engine finds norm and health in the reduction itself; elsewhere a pass over a rank's part does."""
    return comm._on_host and algorithm in (None, "native")


def _finish(flat, after: float, found, health) -> None:
    """Multiply what was reduced; and correct the share that was taken before that."""
    if after != 1.0:
        flat.mul_(after)
        if health is not None:
            found[0] *= after * after
            health += found


def _owned(flat, share: int, comm) -> tuple[torch.Tensor, torch.Tensor]:
    return flat[comm.rank * share : (comm.rank + 1) * share], flat[comm.size * share :]


def _ring_bytes(flat, size: int, halves: int) -> int:
    """What a rank sends in a reduce-scatter or an all-gather (1 half), or both, as rings do it."""
    return halves * (size - 1) * flat.numel() * flat.element_size() // size


def add_share(values: torch.Tensor, health: torch.Tensor) -> None:
    """Add values' sum of squares and their number of non-finite ones to `health`, in one pass over them."""
    if values.numel():
        found = statistics_for(values.device)
        reduce_n([values], values, statistics=found)
        add_found(found, health)


def add_found(found: Statistics | None, health) -> None:
    """Add what a kernel has found to `health`."""
    if found is not None:
        health[0] += found.sum_of_squares[0]
        health[1] += found.nonfinite[0]


_local = threading.local()


def statistics_for(device: torch.device) -> Statistics:
    """One for each thread, device and CUDA stream: on a GPU the kernels of two streams run side by side."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    known = _local.__dict__.setdefault("statistics", {})
    key = (device, stream)
    if key not in known:
        known[key] = Statistics(device)
    return known[key]


_memory: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> its memory, the stream used last


def transport(comm, nbytes: int) -> torch.Tensor:
    """Give memory of at least so many bytes, which the ranks share on the host; one for each communicator, kept."""
    memory, last = _memory.get(comm, (None, None))
    if memory is None or memory.numel() < nbytes:
        memory, last = comm.empty(nbytes, torch.uint8), None
    _memory[comm] = memory, follow(last, memory)
    return memory
