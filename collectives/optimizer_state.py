"""State of the fused optimizers: the tensors of each parameter, step counts and fp32 masters; and the
factor that clips their gradients.
"""

from __future__ import annotations

import itertools
import math
import operator

import torch

from .cuda_state import refuse_capture

__all__ = [
    "HALF_DTYPES",
    "clip_coefficient",
    "increment_steps",
    "init_state",
    "new_state_tensor",
    "random_bit_offsets",
    "same_objects",
    "state_dtype",
    "state_values",
    "step_count",
    "update_master",
]

HALF_DTYPES = (torch.bfloat16, torch.float16)


def clip_coefficient(norm, max_norm: float):
    """Return min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` clips.

    `norm`: a float, where the result is a float, or a tensor, where it is a tensor; NaN for NaN.
    """
    coefficient = max_norm / (norm + 1e-6)
    if isinstance(coefficient, torch.Tensor):
        return coefficient.clamp(max=1.0)
    return min(1.0, coefficient) if not math.isnan(coefficient) else math.nan


def state_dtype(param) -> torch.dtype:
    """Return the dtype of a parameter's state: fp64 for fp64, else fp32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def new_state_tensor(param) -> torch.Tensor:
    """Return zeros for a parameter's state, in the parameter's shape and memory order."""
    return torch.zeros_like(param, dtype=state_dtype(param), memory_format=torch.preserve_format)


def state_values(states, keys) -> list:
    """Return the values of `keys` in the parameters' states, key by key; None for a missing one."""
    return [state.get(key) for key in keys for state in states]


def same_objects(some, others) -> bool:
    """Return whether two lists hold the same objects in the same order."""
    return len(some) == len(others) and not any(map(operator.is_not, some, others))


def step_count(param, value) -> torch.Tensor:
    """Return a number of steps as a tensor on a parameter's device."""
    return torch.tensor(float(value), dtype=torch.float32, device=param.device)


def _refuse_capture(param) -> None:
    refuse_capture(param.device, "each replay would make the optimizer's state anew: make a step first")


def init_step_count(param, state, columns) -> None:
    """Put the number of steps into a parameter's state, on its device."""
    step = state.get("step")
    if step is None:
        _refuse_capture(param)
        # torch's SGD keeps no number: with a buffer there was a step.
        state["step"] = step_count(param, 0 if all(state.get(key) is None for key in columns) else 1)
    elif not isinstance(step, torch.Tensor) or step.get_device() != param.get_device() or step.is_inference():
        state["step"] = step_count(param, step)


def init_state(param, state, columns, *, counts: bool, masters: bool, zeros, master) -> None:
    """Add what is missing in a parameter's state.

    `columns`: keys of the tensors that ``zeros()`` makes; `counts`: it has the number of steps;
    `masters`: a 16-bit parameter has a master, which ``master()`` makes.
    """
    if counts:
        init_step_count(param, state, columns)
    for key in columns:
        if state.get(key) is None:
            _refuse_capture(param)
            state[key] = zeros()
    if masters:
        if param.dtype not in HALF_DTYPES:
            state.pop("master_param", None)  # after model.float(): the parameter is as wide itself
        elif state.get("master_param") is None:
            _refuse_capture(param)
            state["master_param"] = master()


def increment_steps(steps, found, one=None) -> None:
    """Count a step of each parameter, unless the kernels have skipped it.

    ``found``: a tensor on a GPU, not 0 where the step was skipped; None: it was done. ``one``: a
    tensor of 1.0.
    """
    if not steps:
        return
    if found is not None:
        # A list: torch's form for one tensor reads it on the host, but where a device has a kernel
        # of its own for it.
        torch._foreach_add_(steps, [(found == 0).to(torch.float32).reshape(())] * len(steps))
    elif steps[0].is_cpu:
        one = torch.tensor(1.0, device="cpu") if one is None else one  # 4 times as fast as a number
        torch._foreach_add_(steps, one, alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)


def random_bit_offsets(params, members, position) -> list[int]:
    """Return where the random bits of some parameters begin in the sequence of one step.

    ``params``: of a group; ``members``: the parameters' indices in it; ``position``: where the
    group begins.
    """
    starts = list(itertools.accumulate((param.numel() for param in params), initial=position))
    return [starts[index] for index in members]


@torch.inference_mode()  # in which inference tensors may be written
def update_master(master, param, at_random) -> None:
    """Update a master where others have written to its parameter.

    These are the elements in which the parameter isn't the rounded master. ``at_random``: the
    parameter is rounded stochastically.
    """
    rounded = master.to(param.dtype)
    other = rounded != param
    if at_random and param.dtype == torch.bfloat16:
        # Either neighbour may be the rounded master: the bits of the one toward 0, or the next.
        above = param.view(torch.int16) - (master.view(torch.int32) >> 16).to(torch.int16)
        other &= (above != 0) & (above != 1)
    master.copy_(torch.where(other, param.to(master.dtype), master))
