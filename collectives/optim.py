"""Fused optimizers: SGD, Adam and AdamW, each of which does a step in one pass over the memory.

They are torch Optimizers and are used as torch.optim's: the same arguments, param groups, state
dicts (which travel both ways), schedulers, hooks and GradScaler. Over parameters of all kinds and
sizes a step is one kernel launch a group and device; unscaling, clipping by a factor and skipping a
step with non-finite gradients are part of it. New are ``master_weights`` (fp32 masters of bf16 and
fp16 parameters, in the state as ``"master_param"``) and ``stochastic_rounding`` (of bf16
parameters). The state of bf16 and fp16 parameters is fp32. For flat shards there are
`collectives.kernels.sgd_step` and `adam_step`.

Parameters and gradients must be dense and gradients laid out as their parameters are, as no
gradient is copied silently (``p.grad = p.grad.contiguous()`` corrects a transposed or an expanded
one). Complex parameters, sparse gradients, parameters that overlap, negative learning rates and
betas as tensors are refused (``InvalidArgument``).
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.autograd.graph import increment_version

from .errors import InvalidArgument
from .kernels import ParameterTable, Statistics
from .optimizer_state import (
    HALF_DTYPES,
    clip_coefficient,
    increment_steps,
    init_state,
    new_state_tensor,
    random_bit_offsets,
    same_objects,
    state_dtype,
    state_values,
    step_count,
    update_master,
)
from .torch_compat import untraced

__all__ = ["SGD", "Adam", "AdamW", "clip_factor"]

_FLOATS = (torch.float32, torch.float64, *HALF_DTYPES)
_TORCHS_OWN = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


def clip_factor(statistics: Statistics, max_norm: float) -> torch.Tensor:
    """Return the clipping factor of torch's clip_grad_norm_: min(1, max_norm / (norm + 1e-6)).

    Where gradients aren't finite neither is the norm: pass ``found_nonfinite=statistics`` as well.

    Args:
        statistics: The statistics of the gradients, as `pack`, `unpack` or `reduce_n` found them on
            the way.
        max_norm: The largest norm.

    Returns:
        The factor for ``step(clip=...)``, fp64 of one element on the device of the statistics; the
        host doesn't wait for the GPU.
    """
    if not isinstance(statistics, Statistics):
        raise InvalidArgument(f"statistics must be a Statistics, not {type(statistics).__name__}")
    if not isinstance(max_norm, numbers.Real | torch.Tensor):
        raise InvalidArgument(f"max_norm must be a number, not {type(max_norm).__name__}")
    return clip_coefficient(statistics.norm, max_norm)


class _Batch:
    """Parameters of one group and device that one launch steps, as of when their table was made."""

    def __init__(self, params, keys, held, steps, table):
        self.params = table.params if same_objects(table.params, params) else params  # of DTensors it has local parts
        self.keys = keys  # of the state
        self.held = held  # what the state had there
        self.steps = steps  # how many each parameter has done
        self.table = table
        # Inference tensors have no version counters.
        several = [params] if table.params is self.params else [params, table.params]
        self.counted = [param for each in several for param in each if not param.is_inference()]
        self.versions: list[int | None] = []  # of the parameters' memory after the last step; None: not known

    def current(self, params, keys, states) -> bool:
        return (
            keys == self.keys
            and same_objects(params, self.params)
            and (self.table.params is self.params or same_objects(_local_parts(params), self.table.params))
            and same_objects(state_values([states[param] for param in params], keys), self.held)
            and self.table.find_moved() is None
        )

    def stepped(self, found) -> None:
        """Count a step, unless it was skipped (``found``), and move the version counters."""
        self.table.grads = ()  # so that zero_grad frees them; the rows have the addresses
        increment_steps(self.steps, found)
        increment_version(self.counted)
        if self.table.masters is not None:
            self.versions = [_version(param) for param in self.table.params]


def _version(tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimizers.

    A subclass defines what state a parameter has, and how it is stepped.
    """

    _step_supports_amp_scaling = True  # GradScaler then sets grad_scale and found_inf and leaves the rest to step
    _op = ""
    _sharded = None  # the gradients.optimizer_in_backward.OptimizerInBackward that steps it inside of a backward

    def __init__(self, params, defaults, *, seed):
        self._batches: dict[tuple, _Batch] = {}  # by group, device, and who steps some
        if defaults["differentiable"]:
            raise InvalidArgument("differentiable steps aren't offered: use torch.optim's")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
            raise InvalidArgument(f"seed must be a whole number from 0 and below 2**64, not {seed!r:.60}")
        if defaults["stochastic_rounding"] and seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        super().__init__(params, {**defaults, "seed": seed})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._batches = {}
        if self._sharded is not None:
            self._sharded.forget()
        loaded = self.__dict__.pop("_loaded", None)
        for group in self.param_groups:
            for key, value in self.defaults.items():  # of torch's own optimizers, or of older versions
                group.setdefault(key, value)
        if loaded is not None:
            self._convert_loaded_state(loaded)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's optimizers do.

        Args:
            param_group: The group.

        Raises:
            InvalidArgument: For parameters of dtypes that the kernels lack.
        """
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for index, param in enumerate(self.param_groups[number]["params"]):
            if param.dtype not in _FLOATS:
                del self.param_groups[number]
                name = str(param.dtype).removeprefix("torch.")
                raise InvalidArgument(
                    f"parameter {index} of group {number} is {name}: it must be fp32, bf16, fp16 or fp64"
                )
        self._batches.clear()
        if self._sharded is not None:
            self._sharded.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of torch's class of the same name.

        State of bf16 and fp16 parameters stays, or becomes, fp32 (torch would cast it to the
        parameter's dtype).
        """
        # Torch casts before it calls __setstate__, which then converts again from what the last
        # pre-hook got.
        hook = self.register_load_state_dict_pre_hook(lambda own, given: own.__dict__.update(_loaded=given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self.__dict__.pop("_loaded", None)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Update the masters from their parameters after writes that autograd didn't count.

        To be called once, before the next step. A step detects writes of others to a parameter by
        its version counter. ``param.data.fill_(...)`` and what writes by pointer, NumPy for one,
        don't move that, and the next step would undo what they wrote. Where a parameter is its
        master, rounded, the master stays as it is.
        """
        if self._sharded is not None:
            self._sharded.refresh_masters()
        else:
            self._refresh_masters()

    @torch.no_grad()
    def _refresh_masters(self, parts=None) -> None:
        """Update the masters. `parts(param, state)`: yields the memory of a master with that of its
        parameter; None: both as a whole.
        """
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param] if param in self.state else {}
                if state.get("master_param") is not None and param.dtype in HALF_DTYPES:
                    whole = [(_local(state["master_param"]), _local(param))]
                    for master, memory in whole if parts is None else parts(param, state):
                        update_master(master, memory, group["stochastic_rounding"])

    def _convert_loaded_state(self, loaded) -> None:
        """Convert loaded state to the dtypes, devices and strides that the kernels need."""
        ids = itertools.chain.from_iterable(group["params"] for group in loaded["param_groups"])
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, param in zip(ids, params, strict=True):
            given = loaded["state"].get(number)
            if not given or param not in self.state:
                continue
            state = self.state[param]
            sharded = isinstance(given.get("shard"), torch.Tensor)
            if sharded:
                state["shard"] = given["shard"].to("cpu", torch.int64, copy=True)
            for key, value in given.items():
                if not isinstance(value, torch.Tensor) and key != "step":
                    continue
                if key == "step":
                    state[key] = step_count(param, value)
                elif sharded:
                    if key != "shard":
                        state[key] = value.to(param.device, state_dtype(param), copy=True)
                elif value.shape == param.shape and value.is_floating_point():
                    wanted = new_state_tensor(param)
                    if state[key].dtype != wanted.dtype or _local(state[key]).stride() != _local(wanted).stride():
                        state[key] = wanted.copy_(value)

    @untraced  # torch.compile would trace the table
    @torch.no_grad()
    def step(self, closure=None, *, grad_scale=None, clip=None, found_nonfinite=None):
        """Step all parameters that have a gradient; return the result of ``closure``.

        On a GPU the host doesn't wait. GradScaler sets the attributes ``grad_scale``, by which
        torch's optimizers divide, and ``found_inf`` in place of these arguments.

        Where a DDP hook steps this optimizer inside of the backward, this only ends the step, and
        takes none of these arguments; see `OptimizerInBackward.step`.

        Args:
            closure: A function that computes the gradients again and returns the loss.
            grad_scale: A factor of the gradients, a number or a tensor of one element.
            clip: Another factor, such as `clip_factor` returns.
            found_nonfinite: Leave the step out where this isn't 0: a number, a tensor of one
                element or a `Statistics`. Then neither parameters nor state change, the number of
                the step included.
        """
        if self._sharded is not None:
            return self._sharded.step(closure, grad_scale=grad_scale, clip=clip, found_nonfinite=found_nonfinite)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_params(None, grad_scale=grad_scale, clip=clip, found_nonfinite=found_nonfinite)
        return loss

    @torch.no_grad()
    def _step_params(self, wanted, key=None, *, grad_scale=None, clip=None, found_nonfinite=None) -> None:
        """Step parameters that have a gradient.

        `wanted`: group -> indices of the parameters to look at; None: all. `key`: under which their
        batches are cached.
        """
        found = self._parse_found_nonfinite(found_nonfinite, getattr(self, "found_inf", None))
        if found is True:
            return
        scalars = {**self._grad_scale_arguments(grad_scale), "clip": 1.0 if clip is None else clip}
        plans = []  # all is checked before anything is written
        position = 0
        for number, group in enumerate(self.param_groups):
            numbers = None if wanted is None else wanted.get(number, ())
            for device, members in _by_device(group["params"], numbers).items():
                batch = self._batch(number, group, device, members, position, key)
                target = torch.device("cpu") if device < 0 else torch.device("cuda", device)
                arguments = self._step_arguments(group, target, batch.params, scalars, found)
                plans.append((self._plan(batch.table, group, **arguments), batch, arguments))
            position += sum(param.numel() for param in group["params"]) if group["stochastic_rounding"] else 0
        for launch, batch, arguments in plans:
            launch(checked=True)  # by _batch
            batch.stepped(arguments["found_nonfinite"])

    # ---- What a subclass has of its own.
    def _columns(self, group) -> dict[str, str]:
        """Return the state's keys with the columns of the table that they fill."""
        raise NotImplementedError

    def _plan(self, table: ParameterTable, group, **arguments) -> Callable[[], None]:
        raise NotImplementedError

    def _counts_steps(self, group) -> bool:
        return True

    # ---- What a step is made of.
    def _step_arguments(self, group, target, params, scalars, found) -> dict[str, Any]:
        """Return the arguments of `_plan` for a group and device, without a subclass's own."""
        arguments = {key: _to_device(value, target) for key, value in {**scalars, "lr": group["lr"]}.items()}
        if group["stochastic_rounding"] and any(param.dtype is torch.bfloat16 for param in params):
            arguments["seed"] = group["seed"]
        found = None if found is None else _to_device(found, target)
        arguments.update(weight_decay=group["weight_decay"], maximize=group["maximize"], found_nonfinite=found)
        return arguments

    @staticmethod
    def _parse_found_nonfinite(*given):
        """Return True to skip this step, None to do it, or a GPU tensor that the kernels read."""
        found = None
        for each in given:
            each = each.nonfinite if isinstance(each, Statistics) else each
            if each is None:
                continue
            if not isinstance(each, numbers.Real | numpy.bool_ | torch.Tensor) or (
                isinstance(each, torch.Tensor) and each.numel() != 1
            ):
                raise InvalidArgument(
                    "found_nonfinite must be a number, a tensor of one element or a Statistics, not "
                    f"{type(each).__name__}: {str(each)[:60]}"
                )
            if isinstance(each, torch.Tensor) and not each.is_cpu:
                each = (each != 0).to(torch.float32)  # NaN isn't 0 either
                found = each if found is None else found + each.to(found.device)
            elif not each == 0:
                return True
        return found

    def _grad_scale_arguments(self, given) -> dict[str, Any]:
        divisor = getattr(self, "grad_scale", None)
        if divisor is None:
            return {"grad_scale": 1.0 if given is None else given}
        if given is not None:
            divisor = divisor / given
        return {"grad_scale": divisor, "divide": True}

    def _batch(self, number, group, device, members, position, key) -> _Batch:
        """Return the batch of a group's parameters with gradients on one device.

        It is the last step's where nothing has changed since.
        """
        params = [group["params"][index] for index in members]
        columns = self._columns(group)
        counts = ["step"] if self._counts_steps(group) else []
        masters = ["master_param"] if group["master_weights"] else []
        keys = [*columns, *masters, *counts]
        grads = _gradients(params, members, number)
        batch = self._batches.get((number, device, key))
        if batch is not None and batch.current(params, keys, self.state):
            batch.table.set_grads(grads)
        else:
            known = {} if batch is None else dict(zip(map(id, batch.params), batch.versions, strict=False))
            states = [self._state(param, group, columns) for param in params]
            local = {key: [_local(state.get(key)) for state in states] for key in [*columns, *masters]}
            steps = [state["step"] for state in states] if counts else []
            memory = _local_parts(params)
            table = ParameterTable(
                self._op,
                memory,
                grads,
                masters=local.get("master_param"),
                **{column: local[key] for key, column in columns.items()},
                steps_done=steps or None,
                positions=[
                    start + _first_element(param)
                    for start, param in zip(random_bit_offsets(group["params"], members, position), params, strict=True)
                ],
                name=lambda index: f"parameter {members[index]} of group {number}",
            )
            batch = self._batches[number, device, key] = _Batch(params, keys, state_values(states, keys), steps, table)
            batch.versions = [known.get(id(param), -1) for param in params]
        if group["master_weights"]:
            for param, master, version in zip(batch.table.params, batch.table.masters, batch.versions, strict=True):
                if master is not None and (version is None or _version(param) != version):
                    update_master(master, param, group["stochastic_rounding"])
        return batch

    @torch.inference_mode(False)  # the state outlives the mode, in which alone its tensors could be written
    @torch.no_grad()
    def _state(self, param, group, columns) -> dict[str, torch.Tensor]:
        """Return a parameter's state in its memory order, with missing entries added."""
        state = self.state[param]
        if "shard" in state:
            raise InvalidArgument(
                "the optimizer's state is one rank's shard: load the full one (HookState's or ShardedStep's "
                "state_dict(full=True)), or step inside of the hook"
            )
        zeros = functools.partial(new_state_tensor, param)
        init_state(
            param, state, columns, counts=self._counts_steps(group), masters=group["master_weights"], zeros=zeros,
            master=lambda: zeros().copy_(param),
        )  # fmt: skip
        for key in (*columns, "master_param"):
            value = state.get(key)
            # After model.to(memory_format=...).
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.stride() != param.stride():
                wanted = new_state_tensor(param)
                if wanted.stride() != value.stride() and (wanted.dtype, wanted.device) == (value.dtype, value.device):
                    state[key] = wanted.copy_(value)
        return state


class SGD(FusedOptimizer):
    """torch.optim.SGD in one pass.

    With masters a step is the masters'. It detects writes of others to the parameters by autograd's
    version counters; after writes that these don't count (``param.data.fill_(...)``, by NumPy) call
    ``refresh_masters()``, or the step undoes them.

    Args:
        params: Parameters, or param groups.
        lr: The learning rate, a number or a tensor of one element.
        momentum: As in torch.optim.SGD.
        dampening: As in torch.optim.SGD.
        weight_decay: As in torch.optim.SGD.
        nesterov: As in torch.optim.SGD.
        maximize: As in torch.optim.SGD.
        foreach: Accepted, without effect.
        differentiable: True is refused.
        fused: Accepted, without effect.
        master_weights: Keep fp32 masters of bf16 and fp16 parameters.
        stochastic_rounding: Round bf16 parameters at random, each step and each element with bits
            of its own.
        seed: The seed of that rounding; saved with the groups. None: drawn from torch's generator.
    """

    _op = "sgd_step"

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int | None = None,
    ):
        _check_lr(lr)
        _check("momentum value", momentum)
        _check("dampening", dampening, least=-math.inf)
        _check("weight_decay value", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InvalidArgument("Nesterov momentum requires a momentum and zero dampening")
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            **{**_TORCHS_OWN, "differentiable": differentiable},
        )
        super().__init__(params, defaults, seed=seed)

    def _columns(self, group):
        return {"momentum_buffer": "first"} if group["momentum"] else {}

    def _counts_steps(self, group):
        # Without momentum nothing depends on the number but the random bits.
        return bool(group["momentum"]) or group["stochastic_rounding"]

    def _plan(self, table, group, **arguments):
        arguments.update(momentum=group["momentum"], dampening=group["dampening"], nesterov=group["nesterov"])
        return table.plan_sgd(**arguments)


class Adam(FusedOptimizer):
    """torch.optim.Adam in one pass. Masters are kept as in `SGD`.

    Args:
        params: Parameters, or param groups.
        lr: The learning rate, a number or a tensor of one element.
        betas: As in torch.optim.Adam.
        eps: As in torch.optim.Adam.
        weight_decay: As in torch.optim.Adam.
        amsgrad: As in torch.optim.Adam.
        foreach: Accepted, without effect.
        maximize: As in torch.optim.Adam.
        capturable: Accepted, without effect.
        differentiable: True is refused.
        fused: Accepted, without effect.
        decoupled_weight_decay: As in torch.optim.Adam.
        master_weights: As in `SGD`.
        stochastic_rounding: As in `SGD`.
        seed: As in `SGD`.
    """

    _op = "adam_step"

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int | None = None,
    ):
        _check_lr(lr)
        _check("epsilon value", eps)
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise InvalidArgument(f"betas must be two numbers, not {betas!r:.60}")
        for index, beta in enumerate(betas):
            _check(f"beta parameter at index {index}", beta, below=1.0)
        _check("weight_decay value", weight_decay)
        defaults = dict(
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            **{**_TORCHS_OWN, "differentiable": differentiable},
        )
        super().__init__(params, defaults, seed=seed)

    def _columns(self, group):
        columns = {"exp_avg": "first", "exp_avg_sq": "second"}
        return {**columns, "max_exp_avg_sq": "largest"} if group["amsgrad"] else columns

    def _plan(self, table, group, **arguments):
        arguments.update(betas=group["betas"], eps=group["eps"], decoupled=group["decoupled_weight_decay"])
        return table.plan_adam(**arguments)


class AdamW(Adam):
    """torch.optim.AdamW in one pass. The arguments are those of `Adam`."""

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **others,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{**others, "decoupled_weight_decay": True})

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


def _check(what, value, *, least=0.0, below=math.inf) -> None:
    if not isinstance(value, numbers.Real):
        raise InvalidArgument(f"Invalid {what}: {str(value)[:60]}: it must be a number, not {type(value).__name__}")
    if not least <= value < below:
        raise InvalidArgument(f"Invalid {what}: {value}")


def _check_lr(lr) -> None:
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise InvalidArgument("Tensor lr must be 1-element")
    elif not isinstance(lr, numbers.Real) or not 0.0 <= lr:
        raise InvalidArgument(f"Invalid learning rate: {lr}")


def _local(tensor):
    """Return a DTensor's local tensor; any other tensor, or None, itself."""
    return tensor._local_tensor if _is_dtensor(type(tensor)) else tensor


@functools.cache
def _is_dtensor(cls: type) -> bool:
    """Whether a class is DTensor, or one of its subclasses."""
    return hasattr(cls, "_local_tensor") and hasattr(cls, "__tensor_flatten__")


def _has_dtensors(tensors) -> bool:
    return any(map(_is_dtensor, set(map(type, tensors))))


_local_of, _spec_of = operator.attrgetter("_local_tensor"), operator.attrgetter("_spec")


def _local_parts(tensors) -> list:
    if not _has_dtensors(tensors):
        return list(tensors)
    return list(map(_local_of if all(map(_is_dtensor, set(map(type, tensors)))) else _local, tensors))


def _first_element(param) -> int:
    """Return which element of the whole tensor a DTensor's local part begins with; 0 for a plain tensor."""
    chunks = param.__create_chunk_list__() if _is_dtensor(type(param)) else []
    return sum(map(operator.mul, chunks[0].offsets, param.stride())) if chunks else 0


def _gradients(params, members, group) -> list[torch.Tensor]:
    """Return the parameters' gradients, as plain tensors."""
    grads = [param.grad for param in params]
    kinds = list(map(_is_dtensor, {*map(type, params), *map(type, grads)}))
    if not any(kinds):
        return grads
    if all(kinds) and all(map(operator.is_, map(_spec_of, params), map(_spec_of, grads))):
        return list(map(_local_of, grads))
    for param, grad, index in zip(params, grads, members, strict=True):
        ours, theirs = getattr(param, "_spec", None), getattr(grad, "_spec", None)
        if ours is not theirs and getattr(ours, "placements", None) != getattr(theirs, "placements", None):
            raise InvalidArgument(
                f"parameter {index} of group {group} lies on its mesh as {param.placements}, its gradient as "
                f"{grad.placements}: redistribute it"
            )
    return list(map(_local, grads))


def _to_device(value, device):
    """Return a scalar for a device: one of another GPU is copied there. Only a CPU waits for it."""
    if isinstance(value, torch.Tensor) and not value.is_cpu and value.device != device:
        return value.to(device, non_blocking=device.type != "cpu")
    return value


def _by_device(params, numbers=None) -> dict[int, list[int]]:
    """Return the indices of the parameters that have gradients, by device (-1: the CPU).

    ``numbers``: the indices to look at; None: all.
    """
    members: dict[int, list[int]] = {}
    for index, param in enumerate(params) if numbers is None else ((each, params[each]) for each in numbers):
        if param.grad is not None:
            members.setdefault(param.get_device(), []).append(index)
    return members
