"""The rows that an optimizer's launch reads: parameters with their gradients and state, checked."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable

import numpy
import torch

from ..arrays import ITEMSIZE, TORCH_CODES, Reader
from ..errors import InvalidArgument
from ..layout import TILE
from ..torch_compat import TensorBase
from . import abi
from .execution import Statistics, run
from .rows import Rows
from .table import _place, check_storage, device_of

__all__ = ["ParameterTable"]

_F16, _BF16, _F32, _F64 = (TORCH_CODES[t] for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64))
_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in TORCH_CODES.items()}
_SCALARS = {torch.float32: _F32, torch.float64: _F64, torch.int64: TORCH_CODES[torch.int64]}
_STATES = ("first", "second", "largest")
_WRITTEN = ("param", "master", *_STATES)
_ITEMSIZES = numpy.array([ITEMSIZE.get(code, 0) for code in range(max(ITEMSIZE) + 1)], dtype=numpy.uint64)
_LOW = 2**40  # addresses below it may be those of freed storage
_data_ptr, _numel, _is_contiguous = TensorBase.data_ptr, TensorBase.numel, TensorBase.is_contiguous

_OF_GRADIENTS = " and, where it is a Parameter's, assign the copy to p.grad"

# What the messages call an array of each column.
_WORDS = {
    "sgd_step": {"param": "param", "grad": "grad", "master": "master", "first": "momentum"},
    "adam_step": {
        "param": "param",
        "grad": "grad",
        "master": "master",
        "first": "exp_avg",
        "second": "exp_avg_sq",
        "largest": "max_exp_avg_sq",
    },
}


class ParameterTable:
    """Parameters with their gradients and state, checked, as the rows that a launch reads; made once for many steps.

    Each argument is a list with an entry for each parameter; in ``masters`` and the states None stands for what isn't
    there. Tensors may be dense in another order than the contiguous one (channels_last) where all of a parameter's
    tensors have the same strides. The table keeps the tensors but not their memory: each step checks that they still
    lie where they did, and after ``tensor.data = other`` the table must be made again (``InvalidArgument``).
    ``set_grads`` gives it other gradients; a step that was planned before is then refused, unless they lie where the
    old ones did. ``steps_done``: in place of ``steps``, one less. ``op``: "sgd_step" or "adam_step", for the messages,
    in which ``name`` (a function of the index) may name the parameters.
    """

    def __init__(
        self,
        op: str,
        params,
        grads,
        first=None,
        masters=None,
        second=None,
        largest=None,
        *,
        steps=None,
        steps_done=None,
        positions=(0,),
        name=None,
    ):
        self.op = op
        self._name = name
        self._words = _WORDS[op]
        self.params = self._list("param", params)
        if not self.params:
            raise InvalidArgument("there is no param", op=op)
        self.device = device_of(self.params[0])
        self._reader = Reader(self.device, owner="param 0")
        self._steps = []
        self._step_arrays = []
        self._written = None
        count = len(self.params)
        self.rows = rows = numpy.zeros(count, dtype=abi.PARAMETER)
        counts, self._codes = self._column("param", self.params)
        rows["count"], rows["param_type"] = counts, self._codes
        wide = rows["param_type"] == _F64
        for index, code in enumerate(self._codes):
            if code not in (_F16, _BF16, _F32, _F64):
                what = self._called("param", index)
                raise self._wrong(f"{what} is {_NAMES[code]}: it must be fp32, bf16, fp16 or fp64")
        self.masters = None if masters is None else self._list("master", masters)
        kept = [("param", self.params)]
        for column, arrays in (("master", self.masters), ("first", first), ("second", second), ("largest", largest)):
            if arrays is not None:
                arrays = arrays if column == "master" else self._list(column, arrays)
                kept.append((column, arrays))
                if any(each is not None for each in arrays):
                    self._state(column, arrays, wide)
        tiles = -(-rows["count"] // TILE)
        rows["first_tile"] = numpy.cumsum(tiles) - tiles
        self.tiles = int(tiles.sum())
        if steps is not None:
            self._set_steps(steps, 0.0)
        elif steps_done is not None:
            self._set_steps(steps_done, 1.0)
        self._set_positions(positions)
        self._written = self._apart()
        self._read_only(self._steps, "step {}".format)
        read = [array for array, step in zip(self._step_arrays, self._steps, strict=True) if step.at]
        self._fixed = _Places(kept, read)
        self._table = Rows(rows, self.device)
        self.grads = None
        self._generation = 0
        self.set_grads(grads)

    def set_grads(self, grads) -> None:
        """Give each parameter another gradient."""
        grads = self._list("grad", grads)
        rows = self.rows
        known = rows["grad"].tobytes(), rows["grad_type"].tobytes()
        _, codes = self._column("grad", grads)
        rows["grad_type"] = codes
        if self.grads is None or known != (rows["grad"].tobytes(), rows["grad_type"].tobytes()):
            try:
                self._check_grads(codes)
            except InvalidArgument:
                for column, old in zip(("grad", "grad_type"), known, strict=True):
                    rows[column] = numpy.frombuffer(old, dtype=rows[column].dtype)
                raise
            self._table.changed()
            self._generation += 1
        self.grads = grads

    def _check_grads(self, codes) -> None:
        rows = self.rows
        for index, code in enumerate(codes):
            if code not in (_F16, _BF16, _F32) and not (code == _F64 == self._codes[index]):
                allowed = "fp32, bf16 or fp16" + (" or fp64" if self._codes[index] == _F64 else "")
                raise self._wrong(f"{self._called('grad', index)} is {_NAMES[code]}: it must be {allowed}")
        begin, sizes = rows["grad"], _ITEMSIZES[rows["grad_type"]]
        self._aligned(begin % sizes != 0, lambda hit: self._called("grad", hit))
        starts, ends, origin = self._written
        if len(starts):
            end = begin + rows["count"].astype(numpy.uint64) * sizes
            before = numpy.searchsorted(starts, end)
            hit = (end > begin) & (before > 0) & (ends[before - 1] > begin)
            if hit.any():
                index = int(numpy.argmax(hit))
                other = int(numpy.argmax(ends[: before[index]] > begin[index]))
                raise self._wrong(f"{self._called('grad', index)} and {self._label(origin[other])} overlap")

    def moved(self) -> str | None:
        """Name a parameter or state that no longer lies where it did when the table was made; None: all do."""
        return self._fixed.moved(self._called)

    def _moved_grad(self) -> str | None:
        places = zip(self.rows["grad"].tolist(), self.rows["count"].tolist(), self._contiguous, strict=True)
        for index, (grad, place) in enumerate(zip(self.grads, places, strict=True)):
            if _place(grad) != place:
                return self._called("grad", index)
        return None

    # ---- The steps.
    def sgd(self, **how) -> None:
        """Step by SGD; see `plan_sgd`."""
        self.plan_sgd(**how)()

    def adam(self, **how) -> None:
        """Step by Adam or AdamW; see `plan_adam`."""
        self.plan_adam(**how)()

    def plan_sgd(
        self,
        *,
        lr,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        maximize=False,
        grad_scale=1.0,
        clip=1.0,
        found_nonfinite=None,
        seed=None,
        divide=False,
    ) -> Callable[[], None]:
        """Check everything and give the step by SGD as a function; see `sgd_step`. ``divide``: by ``grad_scale``.

        The step is by the gradients that the table has now. It keeps what it reads, and each call checks that this
        still lies where it did.
        """
        momentum = self._real(momentum, "momentum_factor")
        dampening = self._real(dampening, "dampening", least=None)
        has = self.rows["first"] != 0
        if momentum and not (has | (self.rows["count"] == 0)).all():
            raise self._wrong(f"momentum_factor is {momentum}, and momentum {int(numpy.argmin(has))} is missing")
        if not momentum and has.any():
            raise self._wrong("momentum_factor is 0, so no momentum is kept: leave momentum out")
        if nesterov and (not momentum or dampening):
            raise self._wrong("nesterov needs a momentum_factor and no dampening")
        flags = (abi.NESTEROV if nesterov else 0) | (abi.DIVIDE if divide else 0)
        update = self._update(lr, weight_decay, maximize, grad_scale, clip, found_nonfinite, seed, flags)
        args = abi.SgdArgs(abi.Work(self.tiles, 0, 0), update, momentum, dampening)
        return self._plan(abi.SGD, args, lr, grad_scale, clip, found_nonfinite)

    def plan_adam(
        self,
        *,
        lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        decoupled=False,
        maximize=False,
        grad_scale=1.0,
        clip=1.0,
        found_nonfinite=None,
        seed=None,
        divide=False,
    ) -> Callable[[], None]:
        """Check everything and give the step by Adam or AdamW as a function; see `adam_step` and `plan_sgd`."""
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise self._wrong(f"betas must be two numbers, not {str(betas)[:60]}")
        beta1, beta2 = (self._real(beta, f"betas[{i}]", below=1.0) for i, beta in enumerate(betas))
        eps = self._real(eps, "eps")
        for column in ("first", "second"):
            has = (self.rows[column] != 0) | (self.rows["count"] == 0)
            if not has.all():
                raise self._wrong(f"{self._words[column]} {int(numpy.argmin(has))} is missing")
        if not self._steps:
            raise self._wrong("step, the number of this step from 1, is missing")
        flags = (abi.DECOUPLED if decoupled else 0) | (abi.DIVIDE if divide else 0)
        update = self._update(lr, weight_decay, maximize, grad_scale, clip, found_nonfinite, seed, flags)
        args = abi.AdamArgs(abi.Work(self.tiles, 0, 0), update, beta1, beta2, eps)
        return self._plan(abi.ADAM, args, lr, grad_scale, clip, found_nonfinite)

    def _plan(self, kernel, args, *scalars) -> Callable[..., None]:
        if not self.tiles:
            return _nothing
        # The arguments are addresses: what lies there lives as long as the plan.
        named = zip(("lr", "grad_scale", "clip", "found_nonfinite"), map(_plain, scalars), strict=True)
        at = [(what, scalar, scalar.data_ptr()) for what, scalar in named if isinstance(scalar, torch.Tensor)]
        return functools.partial(self._launch, self._generation, at, kernel, args)

    def _launch(self, generation, scalars, kernel, args, *, checked=False) -> None:
        """Run a planned step. ``checked``: `moved` has just been asked, and the gradients and scalars were read."""
        if not checked:
            if generation != self._generation:
                raise self._wrong("the table has other gradients than when this step was planned: plan it again")
            moved = self.moved() or self._moved_grad()
            moved = moved or next((what for what, scalar, at in scalars if scalar.data_ptr() != at), None)
            if moved is not None:
                raise self._wrong(
                    f"{moved} doesn't lie where it did when the table was made: its memory was freed, resized or "
                    "exchanged, or its strides were changed; make the table again"
                )
        run(kernel, args, self.device, self._table)

    def _update(self, lr, weight_decay, maximize, grad_scale, clip, found_nonfinite, seed, flags) -> abi.Update:
        found_nonfinite = _plain(found_nonfinite)
        flags |= abi.MAXIMIZE if maximize else 0
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**64:
                raise self._wrong(f"seed must be a whole number from 0 and below 2**64, not {seed!r:.60}")
            if _BF16 not in self._codes:
                raise self._wrong("seed asks for rounding at random, which is for bf16 parameters, and none is")
            flags |= abi.STOCHASTIC
        return abi.Update(
            self._table.address,
            len(self.rows),
            self._number(lr, "lr", least=0.0),
            self._number(grad_scale, "grad_scale"),
            self._number(clip, "clip"),
            self._number(0 if found_nonfinite is None else found_nonfinite, "found_nonfinite", finite=False),
            self._real(weight_decay, "weight_decay"),
            int(seed or 0),
            flags,
        )

    # ---- Reading the arguments.
    def _list(self, column, arrays) -> list:
        if isinstance(arrays, torch.Tensor | numpy.ndarray | str | bytes | dict) or not isinstance(arrays, Iterable):
            kind = type(arrays).__name__
            raise self._wrong(f"{self._words.get(column, column)} must be a list, one for each param, not {kind}")
        return list(arrays)

    def _column(self, column, arrays) -> tuple[list[int], list[int]]:
        """Fill a column with addresses; give counts and dtype codes."""
        if len(arrays) != len(self.params):
            raise self._wrong(f"there are {len(arrays)} of {self._words[column]} and {len(self.params)} of param")
        plain, codes = self._reader.plain, TORCH_CODES
        addresses, counts, types = [], [], []
        for index, array in enumerate(arrays):
            if array is None:
                address, count, code = 0, -1, None
            else:
                kind = type(array)
                code = codes.get(array.dtype) if kind is torch.Tensor or kind is torch.nn.Parameter else None
                address = None if code is None else plain(array)
                if address is None:
                    address, count, code = self._unusual(column, index, array)
                else:
                    count = array.numel()
                    if address < _LOW or array.untyped_storage().nbytes() < (
                        (array.storage_offset() + count) * ITEMSIZE[code]
                    ):
                        check_storage(array, address, self._called(column, index), self.op)
                    if column != "param" and not self._contiguous[index]:
                        self._unusual(column, index, array)
            if array is None and column in ("param", "grad"):
                raise self._wrong(f"{self._called(column, index)} is None")
            addresses.append(address)
            counts.append(count)
            types.append(code)
        if column == "param":
            self._contiguous = [not isinstance(a, torch.Tensor) or a.is_contiguous() for a in arrays]
        elif any(count not in (-1, own) for count, own in zip(counts, self.rows["count"].tolist(), strict=True)):
            index, own = next((i, n) for i, n in enumerate(self.rows["count"].tolist()) if counts[i] not in (-1, n))
            what, param = self._called(column, index), self._called("param", index)
            raise self._wrong(f"{what} has {counts[index]} elements and {param} has {own}")
        self.rows[column] = addresses
        return counts, types

    def _unusual(self, column, index, array) -> tuple[int, int, int]:
        """A NumPy or CuPy array, a tensor of a subclass, or one that is dense in another order."""
        what = self._called(column, index)
        if isinstance(array, torch.Tensor) and array.layout is torch.strided and array.device == self.device:
            param = self.params[index]
            alike = isinstance(param, torch.Tensor) and _strides(array) == _strides(param)
            if column != "param" and not alike and not self._contiguous[index]:
                other = self._called("param", index)
                raise self._wrong(
                    f"{what} has strides {array.stride()} and {other} {param.stride()}: they must be the same; copy it "
                    "by torch.empty_like(param).copy_(it)" + (_OF_GRADIENTS if column == "grad" else "")
                )
            code = TORCH_CODES.get(array.dtype)
            if alike and not array.is_contiguous() and is_dense(array) and not array.is_neg() and code is not None:
                check_storage(array, array.data_ptr(), what, self.op)
                return array.data_ptr(), array.numel(), code
            if column == "grad" and not array.is_contiguous():
                raise self._wrong(
                    f"{what} of shape {tuple(array.shape)} and strides {array.stride()} isn't contiguous: copy it by "
                    f"it.contiguous(){_OF_GRADIENTS}"
                )
        place = self._reader.place(array, self.op, writes=column != "grad", what=what)
        check_storage(array, place.ptr, what, self.op)
        if place.label:
            raise self._wrong(f"{what} is {place.dtype}: it must be of a floating-point dtype")
        return place.ptr, place.count, place.code

    def _state(self, column, arrays, wide) -> None:
        _, codes = self._column(column, arrays)
        for index, code in enumerate(codes):
            if code is None:
                continue
            if column == "master" and self._codes[index] not in (_F16, _BF16):
                raise self._wrong(
                    f"{self._called('param', index)} is {_NAMES[self._codes[index]]} and needs no master: give None"
                )
            want = _F64 if wide[index] else _F32
            if code != want:
                raise self._wrong(f"{self._called(column, index)} is {_NAMES[code]}: it must be {_NAMES[want]}")

    def _set_steps(self, steps, more) -> None:
        steps = self._list("step", steps)
        if len(steps) not in (1, len(self.params)):
            raise self._wrong(f"there are {len(steps)} of step and {len(self.params)} of param")
        self._steps = [self._number(step, f"step {i}", least=1.0 - more, whole=True) for i, step in enumerate(steps)]
        column = self.rows["step"]
        column["at"] = [step.at for step in self._steps]
        column["value"] = [step.value + more for step in self._steps]
        column["type"] = [step.type for step in self._steps]
        self._step_arrays = steps  # kept as long as their addresses are in the table

    def _set_positions(self, positions) -> None:
        counts = self.rows["count"]
        positions = self._list("position", positions)
        for index, position in enumerate(positions):
            if isinstance(position, bool) or not isinstance(position, numbers.Integral) or not 0 <= position < 2**62:
                raise self._wrong(f"position {index} must be a whole number from 0, not {position!r}")
        if len(positions) == 1:
            self.rows["position"] = int(positions[0]) + numpy.cumsum(counts) - counts
        elif len(positions) == len(counts):
            self.rows["position"] = positions
        else:
            raise self._wrong(f"there are {len(positions)} of position and {len(counts)} of param")

    def _apart(self):
        """Refuse arrays that share memory where one is written; give the written ones' starts, ends and origins."""
        rows = self.rows
        starts = numpy.array([rows[column] for column in _WRITTEN])
        sizes = numpy.empty_like(starts)
        sizes[0] = _ITEMSIZES[rows["param_type"]]
        sizes[1:] = numpy.where(rows["param_type"] == _F64, 8, 4)
        self._aligned(starts % sizes != 0, lambda hit: self._label(hit))
        ends = (starts + rows["count"].astype(numpy.uint64) * sizes).ravel()
        starts = starts.ravel()
        origin = numpy.flatnonzero((starts != 0) & (ends > starts))
        origin = origin[numpy.argsort(starts[origin], kind="stable")]
        starts, ends = starts[origin], numpy.maximum.accumulate(ends[origin])
        hit = starts[1:] < ends[:-1]
        if hit.any():
            second = int(numpy.argmax(hit)) + 1
            first = int(numpy.argmax(ends[:second] > starts[second]))
            raise self._wrong(f"{self._label(origin[first])} and {self._label(origin[second])} overlap")
        return starts, ends, origin

    def _aligned(self, wrong, name) -> None:
        if wrong.any():
            what = name(int(numpy.argmax(wrong)))
            raise self._wrong(f"{what} begins at an address that is no multiple of its elements' size")

    def _read_only(self, scalars, name) -> None:
        """Refuse scalars on the device that the step itself would overwrite: threads read them at different times."""
        begin = numpy.array([scalar.at for scalar in scalars], dtype=numpy.uint64)
        sizes = _ITEMSIZES[[scalar.type if scalar.at else _F32 for scalar in scalars]]
        self._aligned(begin % sizes != 0, name)
        starts, ends, origin = self._written
        if len(starts):
            before = numpy.searchsorted(starts, begin + sizes)
            hit = (begin > 0) & (before > 0) & (ends[before - 1] > begin)
            if hit.any():
                index = int(numpy.argmax(hit))
                other = self._label(origin[int(numpy.argmax(ends[: before[index]] > begin[index]))])
                raise self._wrong(f"{name(index)} lies inside of {other}, which is written: give a copy")

    def _label(self, origin) -> str:
        column, index = divmod(int(origin), len(self.rows))
        return self._called(_WRITTEN[column], index)

    def _called(self, column, index) -> str:
        word = self._words[column]
        return f"{word} {index}" if self._name is None else f"{word} of {self._name(index)}"

    def _number(self, value, what, *, least=None, whole=False, finite=True) -> abi.Number:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise self._wrong(f"{what} must have one element, not the shape {tuple(value.shape)}")
            if value.layout is not torch.strided:
                raise self._wrong(f"{what} is a {str(value.layout).removeprefix('torch.')} tensor: give a dense one")
            if value.is_neg():
                raise self._wrong(f"{what} is a lazily negated view: give {what}.resolve_neg()")
            if value.device == self.device and value.dtype in _SCALARS:
                try:
                    at = value.data_ptr()
                except RuntimeError as error:  # under vmap or grad
                    raise self._wrong(f"{what} has no memory of its own: {error}") from error
                check_storage(value, at, what, self.op)
                if least is not None and value.is_cpu:
                    self._real(value.item(), what, least=least, whole=whole, finite=finite)
                number = abi.Number(at, 0.0, _SCALARS[value.dtype])
                if self._written is not None:
                    self._read_only([number], lambda _: what)
                return number
            if not value.is_cpu:
                dtype = str(value.dtype).removeprefix("torch.")
                raise self._wrong(
                    f"{what} is {dtype} on {value.device}: it must be fp32, fp64 or int64 on {self.device}, where the "
                    "arrays are, or a number"
                )
            value = value.item()
        return abi.Number(0, self._real(value, what, least=least, whole=whole, finite=finite), 0)

    def _real(self, value, what, *, least=0.0, below=math.inf, whole=False, finite=True) -> float:
        if type(value) is not float and not isinstance(value, numbers.Real):
            kind = type(value).__name__
            raise self._wrong(f"{what} must be a number, not {kind}: {str(value)[:60]}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        fits = (math.isfinite(number) or not finite) and (least is None or least <= number < below)
        if not fits or (whole and number != int(number)):
            kind = "a whole number" if whole else "a finite number"
            limits = "" if least is None else f" from {least:g}" + (f" and below {below:g}" if below < math.inf else "")
            raise self._wrong(f"{what} must be {kind}{limits}, not {value!r:.60}")
        return number

    def _wrong(self, message) -> InvalidArgument:
        return InvalidArgument(message, op=self.op)


class _Places:
    """Where a table's arrays lie, to see later whether they still do."""

    def __init__(self, columns, steps):
        self.names = [(column, at) for column, some in columns for at, each in enumerate(some) if each is not None]
        self.params = columns[0][1]
        self.arrays = [*(each for _, some in columns for each in some if each is not None), *steps]
        self.all_torch = all(isinstance(each, torch.Tensor) for each in self.arrays)
        self.known = self._look()
        self.strided = [each for each in self.params if isinstance(each, torch.Tensor) and not each.is_contiguous()]
        self.strides = [each.stride() for each in self.strided]

    def _look(self) -> tuple[list, ...]:
        # Shapes matter in the parameters alone: with the same address all else is still in bounds.
        if self.all_torch:
            params = self.params
            return list(map(_data_ptr, self.arrays)), list(map(_numel, params)), list(map(_is_contiguous, params))
        params = [_place(each)[1:] for each in self.params]
        return [_place(each)[0] for each in self.arrays], params

    def moved(self, called) -> str | None:
        try:
            now = self._look()
        except RuntimeError as error:  # under vmap or grad
            return f"an array ({error})"
        if now == self.known and [each.stride() for each in self.strided] == self.strides:
            return None
        for some, others in zip(now, self.known, strict=True):
            for at, (one, other) in enumerate(zip(some, others, strict=True)):
                if one != other:
                    return called(*self.names[at]) if at < len(self.names) else f"step {at - len(self.names)}"
        return "a param"


def _nothing(*, checked=False) -> None:
    pass


def _plain(scalar):
    return scalar.nonfinite if isinstance(scalar, Statistics) else scalar


def _strides(tensor) -> list[int]:
    """The strides that mean something: those of dimensions with more than one entry."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def is_dense(tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps and overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
