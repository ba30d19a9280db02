"""The gradients of a few parameters on their way: where they lie, and their copies to and from one flat buffer."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable

import numpy
import torch
from torch.autograd.graph import increment_version

from ..arrays import kind_of
from ..errors import InvalidArgument
from ..kernels import Table, pack, unpack
from ..kernels.places import HeldArrays
from ..layout import bucket_layout
from ..parameter_names import names_of
from ..torch_compat import is_traceable_wrapper_subclass

__all__ = ["GradientBucket", "called", "check_apart", "fill", "read_params"]

_OP = "GradientBuckets"
# Bytes. From here on the copies to a flat buffer and back take longer than a call of its own with the engine's staging:
# for 12 gradients of 4 MiB on 2 ranks 58 ms against 33 ms.
_ALONE = 1 << 20
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class _GradientTable(Table):
    """A table that goes on to other tensors of the same sizes and dtypes, which costs less than making another one."""

    def _fill(self, pointers, counts, types, op) -> None:
        super()._fill(pointers, counts, types, op)
        self._kinds = counts, types
        self._lengths = self._ends - self._starts
        self._sizes = self._lengths.tolist()
        self._data = self.rows.array["data"]

    def follow(self, tensors: list) -> bool:
        """Take these tensors in place of those before. False: it can't, and isn't to be used any more."""
        self.tensors = tuple(tensors)
        plain = self._read_plain(self.device)
        if plain is None or (plain[1], plain[2]) != self._kinds:
            return False
        pointers = plain[0]
        if pointers != self._pointers:
            if 0 in self._sizes:
                return False  # there is no telling where nothing lies
            # Lists, since a call of NumPy's takes longer than a pass over the gradients of a small model.
            ends = list(map(operator.add, pointers, self._sizes))
            if functools.reduce(operator.or_, pointers) % self.itemsize:
                return False
            self._low, self._high = min(pointers), max(ends)
            self._pointers, self._starts = pointers, numpy.array(pointers, dtype=numpy.int64)
            self._ends = self._starts + self._lengths
            self._data[:] = self._starts
            self.rows.changed()
            self._apart_from = None
        return True

    def spans(self) -> tuple[list[int], list[int]]:
        """Give where each tensor begins and ends. The caller sees to it that they lie apart."""
        self._are_destinations = True
        return self._pointers, list(map(operator.add, self._pointers, self._sizes))

    def release(self) -> None:
        """Hold no tensors any more, until `follow`: gradients that are set to None must be freed."""
        self.tensors = ()
        self._held = HeldArrays((), [], [], [])

    def verify(self, op: str = _OP) -> None:
        """Do nothing: each use follows a `look` of the bucket's, with nobody's code between."""


class GradientBucket:
    """Parameters whose gradients travel together.

    Each one's elements go in the order in which the parameter's own memory had them when the buckets were made, so that
    ranks agree on it whatever strides their gradients have. A gradient that is laid out otherwise goes by a copy.
    """

    def __init__(self, index: int, members: list, dtype: torch.dtype, device: torch.device):
        self.index = index
        self.params = [param for _, param in members]
        self.dtype = dtype  # of the elements that travel; a complex one is two
        self.device = device
        self.strides = [_dense_strides(param) for param in self.params]
        self.offsets, self.total = bucket_layout(
            [param.numel() * (2 if param.is_complex() else 1) for param in self.params], dtype.itemsize
        )
        self.flat: torch.Tensor | None = None
        self.work = None
        self.missing: set[int] = set()  # parameters whose gradient has not come since the last round; for the hooks
        self._given_names = [name for name, _ in members]
        self._shapes = [param.shape for param in self.params]
        self._kinds = [_grad_dtype(param) for param in self.params]
        self._simple = not any(self.strides) and not any(param.is_complex() for param in self.params)
        self._table: _GradientTable | None = None
        self._stream = None
        self.forget()

    # ---- Names.

    def called(self) -> list[str]:
        """The names that were given with the parameters, else those of their modules, else shapes."""
        names = self._given_names
        if None in names:
            names = [given or found for given, found in zip(names, names_of(self.params), strict=True)]
        return [name or f"shape {tuple(shape)}" for name, shape in zip(names, self._shapes, strict=True)]

    def describe(self, most: int = 8) -> str:
        names = self.called()
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

    # ---- The gradients as they are.

    def changed(self) -> bool:
        """Tell whether the gradients aren't those, or not as they were, when they were packed."""
        grads = [param.grad for param in self.params]
        return self._marks is None or any(map(operator.is_not, self._grads, grads)) or self._marks != _marks(grads)

    def look(self) -> None:
        """Take the gradients as they are now; raise `InvalidArgument` for one that can't be averaged."""
        self._marks, self._staged = None, {}
        grads = self._grads = [param.grad for param in self.params]
        self.has = [grad is not None for grad in grads]
        table = self._table
        if not self._simple or table is None or not all(self.has) or not table.follow(grads):
            pieces = [self._piece(at, grad) for at, grad in enumerate(grads)]
            if table is None or not table.follow(pieces):
                self._table = None
                self._table = _GradientTable(pieces, self.dtype)

    def _piece(self, at: int, grad: torch.Tensor | None) -> torch.Tensor:
        """Give a gradient's memory, flat and real; that of a copy where it is laid out otherwise, of zeros for none."""
        shape, strides, kind = self._shapes[at], self.strides[at], self._kinds[at]
        if grad is not None:
            self._check(at, grad)
            alike = grad.is_contiguous() if strides is None else _dense_strides(grad) == strides
            if alike and not grad.is_conj() and not grad.is_neg():
                return _memory(grad)
        if strides is None:
            staged = torch.zeros(shape, dtype=kind, device=self.device)
        else:
            staged = torch.empty_strided(shape, strides, dtype=kind, device=self.device).zero_()
        if grad is not None:
            staged.copy_(grad)
        self._staged[at] = staged
        return _memory(staged)

    def _check(self, at: int, grad: torch.Tensor) -> None:
        wrong = None
        if grad.layout is not torch.strided or grad.is_nested:
            layout = "nested" if grad.is_nested else str(grad.layout).removeprefix("torch.")
            wrong = (
                f"is {layout}: only dense ones are averaged; build the embedding with sparse=False, or use .to_dense()"
            )
        elif is_traceable_wrapper_subclass(grad):
            wrong = f"is a {kind_of(grad)}: only plain tensors are averaged"
        elif grad.dtype is not self._kinds[at]:
            wrong = f"is {grad.dtype}, and was to be {self._kinds[at]} when the buckets were made: make them again"
        elif grad.device != self.device:
            wrong = f"is on {grad.device}, the buckets are on {self.device}: make them after moving the model"
        elif grad.shape != self._shapes[at]:
            wrong = (
                f"has shape {tuple(grad.shape)}, the parameter had {tuple(self._shapes[at])} when the buckets were "
                "made: make them again"
            )
        if wrong:
            raise InvalidArgument(f"the gradient of {self.called()[at]} {wrong}", op=_OP)

    def spans(self) -> tuple[list[int], list[int]]:
        """Give the addresses at which what will be written begins and ends, of each gradient."""
        return self._table.spans()

    # ---- To the flat buffer and back.

    def settle(self) -> None:
        """Wait for what is under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def pack(self, watch: bool) -> None:
        """Copy what `look` saw into the flat buffer; `watch`: so that `changed` can tell what is done to it later.

        With no flat buffer the bucket is one gradient, which is sent where it lies.
        """
        self.settle()
        if self.flat is None:
            (self.sending,) = self._table.tensors
            return
        if self._stream is not None:  # on which the flat buffer was read last
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        pack(self._table, self.flat)
        self.sending = self.flat
        if watch:
            self._marks = _marks(self._grads)

    def unpack(self, used: list) -> None:
        """Copy what was sent back; a parameter that is `used` on some rank and has no gradient here gets one."""
        self.settle()
        if self.flat is not None:
            unpack(self.flat, self._table)
        elif not self.sending.is_inference():
            increment_version(self.sending)
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        for at, staged in self._staged.items():
            grad = self._grads[at]
            if grad is None:
                if used[at]:
                    self.params[at].grad = staged
            elif _overlaps_itself(grad):  # an expanded one has no room for what may differ
                self.params[at].grad = staged
            else:
                grad.copy_(staged)

    def forget(self) -> None:
        """Hold no gradients any more."""
        self._grads: list = []
        self.has: list[bool] = []  # for each parameter, whether it had a gradient at the last look
        self._marks: list | None = None
        self.sending: torch.Tensor | None = None
        self._staged: dict[int, torch.Tensor] = {}
        if self._table is not None:
            self._table.release()

    def free(self) -> None:
        """Let the memory go."""
        self.flat = self.work = self._table = None


# ---- Parameters and gradients.


def read_params(params) -> list[tuple[str | None, torch.Tensor]]:
    """Read (name or None, parameter) pairs from all forms; without frozen parameters, each once."""
    if isinstance(params, torch.nn.Module):
        raise InvalidArgument("params is a module: pass its parameters() or named_parameters()", op=_OP)
    if isinstance(params, (torch.Tensor, dict, str)) or not isinstance(params, Iterable):
        raise InvalidArgument(
            f"params must be parameters, (name, parameter) pairs or an optimizer's param_groups, not {kind_of(params)}",
            op=_OP,
        )
    entries: list = []
    for entry in params:
        if isinstance(entry, dict):
            if "params" not in entry:
                raise InvalidArgument('a param group must have "params", as an optimizer\'s do', op=_OP)
            inside = entry["params"]
            entries += [inside] if isinstance(inside, torch.Tensor) else inside
        else:
            entries.append(entry)
    found: dict[int, tuple] = {}
    for number, entry in enumerate(entries):
        name, param = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(param, torch.Tensor) or not isinstance(name, str | None):
            cure = "" if not isinstance(entry, Iterable) else ". Of several models: itertools.chain(one, other)"
            raise InvalidArgument(
                f"entry {number} of params is no parameter, nor (name, parameter): {kind_of(entry)}{cure}", op=_OP
            )
        if param.requires_grad and id(param) not in found:
            _check_param(name, number, param)
            found[id(param)] = (name, param)
    if not found:
        raise InvalidArgument("params holds no parameter that requires a gradient", op=_OP)
    return list(found.values())


def _check_param(name, number, param) -> None:
    wrong = None
    if torch.nn.parameter.is_lazy(param):
        wrong = "has no shape yet: run the model once, or give lazy modules their sizes"
    elif not param.is_leaf:
        wrong = "is no leaf: only leaves of the graph get a .grad"
    elif is_traceable_wrapper_subclass(param):
        wrong = f"is a {kind_of(param)}: only plain parameters can be averaged (sharded ones have their own reduction)"
    elif param.layout is not torch.strided or param.device.type not in ("cpu", "cuda"):
        wrong = f"is {str(param.layout).removeprefix('torch.')} on {param.device}: it must be dense, on the CPU or CUDA"
    elif _real(_grad_dtype(param)) not in _DTYPES:
        wrong = f"has gradients of {_grad_dtype(param)}: fp32, fp64, fp16, bf16 and complex ones can be averaged"
    if wrong:
        raise InvalidArgument(f"{called(name, number, param)} {wrong}", op=_OP)


def fill(members: list, caps: tuple[int, int]) -> list[GradientBucket]:
    """Put parameters into buckets, last ones first, by dtype and device; large ones on the host into their own."""
    filling: dict[tuple, list] = {}  # (dtype, device) -> members, bytes, how many were full before
    done = []  # place of the last member, members, key
    for place, (name, param) in enumerate(reversed(members)):
        key = _real(_grad_dtype(param)), param.device
        nbytes = param.numel() * _grad_dtype(param).itemsize
        if nbytes >= _ALONE and param.device.type == "cpu":
            done.append((place, [(name, param)], key))
            continue
        entry = filling.setdefault(key, [[], 0, 0, place])
        if entry[0] and entry[1] + nbytes > caps[entry[2] > 0]:
            done.append((entry[3], entry[0], key))
            entry[:] = [], 0, entry[2] + 1, place
        entry[0].append((name, param))
        entry[1] += nbytes
        entry[3] = place
    done += [(entry[3], entry[0], key) for key, entry in filling.items()]
    done.sort(key=lambda each: each[0])  # a bucket is complete with its last member
    return [GradientBucket(index, inside, *key) for index, (_, inside, key) in enumerate(done)]


def check_apart(buckets: list[GradientBucket]) -> None:
    """Raise `InvalidArgument` where gradients share memory, which would be averaged, or summed, twice."""
    spans = [bucket.spans() for bucket in buckets]
    starts = sorted(itertools.chain.from_iterable(each[0] for each in spans))
    ends = sorted(itertools.chain.from_iterable(each[1] for each in spans))
    # Of intervals that lie apart each ends before the next begins, whichever they are.
    if not any(map(operator.gt, ends, itertools.islice(starts, 1, None))):
        return
    named = sorted(
        (start, end, name)
        for bucket, (starts, ends) in zip(buckets, spans, strict=True)
        for start, end, name in zip(starts, ends, bucket.called(), strict=True)
        if start < end
    )
    last, owner = 0, ""
    for start, end, name in named:
        if start < last:
            raise InvalidArgument(
                f"the gradients of {owner} and {name} share memory: give one of them a copy",
                op=_OP,
            )
        if end > last:
            last, owner = end, name


def _grad_dtype(param) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype  # torch 2.10 lets it differ from the parameter's


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _dense_strides(tensor) -> tuple[int, ...] | None:
    """The strides of a tensor whose memory has its elements in another order than a contiguous one's, with no gaps.

    None for all others. A stride along a single element says nothing and is given as 0.
    """
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return None
            expected *= size
    return tuple(stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _overlaps_itself(tensor) -> bool:
    """Tell whether two elements may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _memory(tensor) -> torch.Tensor:
    """A dense tensor's elements as they lie in memory; a complex one's as pairs of real ones."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _marks(grads) -> list:
    """What changes when a gradient is written to or moved. An inference tensor doesn't tell, and is never the same."""
    return [
        None if grad is None else object() if grad.is_inference() else (grad._version, grad.data_ptr())
        for grad in grads
    ]  # fmt: skip


def called(name, number, param) -> str:
    return f"parameter {name or number} of shape {tuple(param.shape) if not torch.nn.parameter.is_lazy(param) else '?'}"
