"""Parameter table of an optimizer's launch: parameters with their gradients and state, checked, one
row each.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable

import numpy
import torch

from ..arrays import TORCH_CODES
from ..errors import InvalidArgument
from ..layout import TILE
from . import abi
from .execution import Statistics, run
from .parameter_arrays import ArrayNames, Column
from .rows import Rows
from .scalars import ScalarReader
from .tensor_list import TensorList
from .written_memory import WrittenMemory

__all__ = ["ParameterTable"]

_F16, _BF16, _F32, _F64 = (TORCH_CODES[t] for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64))
_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in TORCH_CODES.items()}


class ParameterTable:
    """Parameters with their gradients and state, checked, as the rows of a launch; made once for
    many steps.

    Each list has an entry for each parameter. Tensors may be dense in another order than the
    contiguous one (channels_last) if all of a parameter's tensors have the same strides. The table
    keeps the tensors but not their memory: each step checks that they still lie where they did, and
    after ``tensor.data = other`` the table must be made again (``InvalidArgument``). ``set_grads``
    replaces the gradients; a step that was planned before is then refused, unless the new ones lie
    where the old ones did.

    Args:
        op: "sgd_step" or "adam_step", for the messages.
        params: The parameters.
        grads: Their gradients.
        first: The momentum, or Adam's exp_avg; the entry of a parameter that has none is None.
        masters: The fp32 masters; an entry may be None.
        second: Adam's exp_avg_sq; an entry may be None.
        largest: Adam's max_exp_avg_sq; an entry may be None.
        steps: The numbers of the steps, from 1.
        steps_done: In place of ``steps``, one less.
        positions: The places of the parameters in the whole, for random rounding.
        name: A function of the index that names the parameter in messages.
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
        self._names = ArrayNames(op, name)
        self.params = self._names.read_list("param", params)
        if not self.params:
            raise self._names.error("there is no param")
        self._params = Column(self._names, "param", self.params)
        self.device = self._params.reader.device
        self._scalars = ScalarReader(self.device, self._names)
        self._steps = []
        self._step_arrays = []
        self.rows = rows = numpy.zeros(len(self.params), dtype=abi.PARAMETER)
        rows["param"], rows["count"] = self._params.addresses, self._params.counts
        rows["param_type"] = self._codes = self._params.codes
        for index, code in enumerate(self._codes):
            if code not in (_F16, _BF16, _F32, _F64):
                what = self._names.label("param", index)
                raise self._names.error(f"{what} is {_NAMES[code]}: it must be fp32, bf16, fp16 or fp64")
        self.masters = None if masters is None else self._names.read_list("master", masters)
        states = []
        for column, arrays in (("master", self.masters), ("first", first), ("second", second), ("largest", largest)):
            if arrays is not None:
                states.append(self._set_state(column, self._names.read_list(column, arrays)))
        tiles = -(-rows["count"] // TILE)
        rows["first_tile"] = numpy.cumsum(tiles) - tiles
        self.tiles = int(tiles.sum())
        if steps is not None:
            self._set_steps(steps, 0.0)
        elif steps_done is not None:
            self._set_steps(steps_done, 1.0)
        self._set_positions(positions)
        self._written = self._scalars.written = WrittenMemory(rows, self._names)
        self._written.check_scalars(self._steps, "step {}".format)
        read = [at for at, step in enumerate(self._steps) if step.at]
        if read:
            arrays = [self._step_arrays[at] for at in read]
            states.append(TensorList(arrays, self._params.reader, op, lambda at: f"step {read[at]}"))
        self._states = TensorList.joined(states) if states else None  # all that steps use but params and gradients
        self._table = Rows(rows, self.device)
        self.grads = None
        self._generation = 0
        self.set_grads(grads)

    def set_grads(self, grads) -> None:
        """Replace the gradients, one for each parameter."""
        grads = self._names.read_list("grad", grads)
        rows = self.rows
        known = rows["grad"].tobytes(), rows["grad_type"].tobytes()
        column = Column(self._names, "grad", grads, self._params)
        rows["grad"], rows["grad_type"] = column.addresses, column.codes
        if self.grads is None or known != (rows["grad"].tobytes(), rows["grad_type"].tobytes()):
            try:
                self._check_grads(column.codes)
            except InvalidArgument:
                for name, old in zip(("grad", "grad_type"), known, strict=True):
                    rows[name] = numpy.frombuffer(old, dtype=rows[name].dtype)
                raise
            self._table.changed()
            self._generation += 1
        self.grads = column

    def _check_grads(self, codes) -> None:
        rows = self.rows
        for index, code in enumerate(codes):
            if code not in (_F16, _BF16, _F32) and not (code == _F64 == self._codes[index]):
                allowed = "fp32, bf16 or fp16" + (" or fp64" if self._codes[index] == _F64 else "")
                raise self._names.error(f"{self._names.label('grad', index)} is {_NAMES[code]}: it must be {allowed}")
        self._written.check_grads(rows)

    def find_moved(self) -> str | None:
        """Name a parameter or state that no longer lies where it did when the table was made; None:
        all do.
        """
        at = self._params.find_moved()
        if at is not None:
            return self._params.label(at)
        # With the same address all else is still in bounds, as in the parameters.
        at = None if self._states is None else self._states.find_moved(addresses_suffice=True)
        return None if at is None else self._states.label(at)

    # ---- Steps.
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
        """Check everything and return the step by SGD as a function; see `sgd_step`.

        The step is by the gradients that the table has now. It keeps what it reads, and each call
        checks that its memory is where it was. ``divide``: divide by ``grad_scale``.
        """
        momentum = self._scalars.real(momentum, "momentum_factor")
        dampening = self._scalars.real(dampening, "dampening", least=None)
        has = self.rows["first"] != 0
        if momentum and not (has | (self.rows["count"] == 0)).all():
            raise self._names.error(f"momentum_factor is {momentum}, and momentum {int(numpy.argmin(has))} is missing")
        if not momentum and has.any():
            raise self._names.error("momentum_factor is 0, so no momentum is kept: leave momentum out")
        if nesterov and (not momentum or dampening):
            raise self._names.error("nesterov needs a momentum_factor and no dampening")
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
        """Check everything and return the step by Adam or AdamW as a function; see `adam_step` and
        `plan_sgd`.
        """
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise self._names.error(f"betas must be two numbers, not {str(betas)[:60]}")
        beta1, beta2 = (self._scalars.real(beta, f"betas[{i}]", below=1.0) for i, beta in enumerate(betas))
        eps = self._scalars.real(eps, "eps")
        for column in ("first", "second"):
            has = (self.rows[column] != 0) | (self.rows["count"] == 0)
            if not has.all():
                raise self._names.error(f"{self._names.word(column)} {int(numpy.argmin(has))} is missing")
        if not self._steps:
            raise self._names.error("step, the number of this step from 1, is missing")
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
        """Run a planned step.

        ``checked``: `find_moved` has just been called, and the gradients and scalars were just
        read.
        """
        if not checked:
            if generation != self._generation:
                raise self._names.error("the table has other gradients than when this step was planned: plan it again")
            moved = self.find_moved()
            if moved is None and (at := self.grads.find_moved()) is not None:
                moved = self.grads.label(at)
            moved = moved or next((what for what, scalar, at in scalars if scalar.data_ptr() != at), None)
            if moved is not None:
                raise self._names.error(
                    f"{moved} doesn't lie where it did when the table was made: its memory was freed, resized or "
                    "exchanged, or its strides were changed; make the table again"
                )
        run(kernel, args, self.device, self._table)

    def _update(self, lr, weight_decay, maximize, grad_scale, clip, found_nonfinite, seed, flags) -> abi.Update:
        found_nonfinite = _plain(found_nonfinite)
        flags |= abi.MAXIMIZE if maximize else 0
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**64:
                raise self._names.error(f"seed must be a whole number from 0 and below 2**64, not {seed!r:.60}")
            if _BF16 not in self._codes:
                raise self._names.error("seed asks for rounding at random, which is for bf16 parameters, and none is")
            flags |= abi.STOCHASTIC
        return abi.Update(
            self._table.address,
            len(self.rows),
            self._scalars.number(lr, "lr", least=0.0),
            self._scalars.number(grad_scale, "grad_scale"),
            self._scalars.number(clip, "clip"),
            self._scalars.number(0 if found_nonfinite is None else found_nonfinite, "found_nonfinite", finite=False),
            self._scalars.real(weight_decay, "weight_decay"),
            int(seed or 0),
            flags,
        )

    # ---- Reading the arguments.

    def _set_state(self, name, arrays) -> Column:
        column = Column(self._names, name, arrays, self._params)
        self.rows[name] = column.spread(column.addresses, 0)
        for at, code in enumerate(column.codes):
            index = column.rows[at]
            if name == "master" and self._codes[index] not in (_F16, _BF16):
                what, dtype = self._names.label("param", index), _NAMES[self._codes[index]]
                raise self._names.error(f"{what} is {dtype} and needs no master: give None")
            want = _F64 if self._codes[index] == _F64 else _F32
            if code != want:
                raise self._names.error(f"{column.label(at)} is {_NAMES[code]}: it must be {_NAMES[want]}")
        return column

    def _set_steps(self, steps, more) -> None:
        steps = self._names.read_list("step", steps)
        if len(steps) not in (1, len(self.params)):
            raise self._names.error(f"there are {len(steps)} of step and {len(self.params)} of param")
        self._steps = [
            self._scalars.number(step, f"step {i}", least=1.0 - more, whole=True) for i, step in enumerate(steps)
        ]
        column = self.rows["step"]
        column["at"] = [step.at for step in self._steps]
        column["value"] = [step.value + more for step in self._steps]
        column["type"] = [step.type for step in self._steps]
        self._step_arrays = steps  # kept as long as their addresses are in the table

    def _set_positions(self, positions) -> None:
        counts = self.rows["count"]
        positions = self._names.read_list("position", positions)
        for index, position in enumerate(positions):
            if isinstance(position, bool) or not isinstance(position, numbers.Integral) or not 0 <= position < 2**62:
                raise self._names.error(f"position {index} must be a whole number from 0, not {position!r}")
        if len(positions) == 1:
            self.rows["position"] = int(positions[0]) + numpy.cumsum(counts) - counts
        elif len(positions) == len(counts):
            self.rows["position"] = positions
        else:
            raise self._names.error(f"there are {len(positions)} of position and {len(counts)} of param")


def _nothing(*, checked=False) -> None:
    pass


def _plain(scalar):
    return scalar.nonfinite if isinstance(scalar, Statistics) else scalar
