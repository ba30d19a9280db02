"""Muon over shards: each matrix is orthogonalised on one rank, its owner.

torch.optim.Muon on sharded parameters gathers each matrix on every rank, and every rank computes the
same update. Here a matrix goes to one rank, and the update's rows go back: one all-to-all each way in
bf16, in which the orthogonalisation computes, for all matrices of a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..errors import InvalidArgument
from ..rendezvous.process_groups import get_communicator
from .ragged_tensor import RaggedTensor

__all__ = ["Muon"]

_OP = "Muon"
_LEARNING_RATES = ("original", "match_rms_adamw")


class _Matrix(NamedTuple):
    """A parameter that a step updates."""

    param: torch.Tensor
    group: dict[str, Any]
    local: torch.Tensor  # of the parameter
    update: torch.Tensor  # this rank's part, before it is orthogonal


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for sharded parameters: the same arguments, updates and state dicts.

    A step is a collective of the ranks of the shards and blocks on the host engine. All ranks must have
    gradients of the same parameters. An owner holds its matrices in bf16 during the step. The momentum
    is sharded as the parameters are. Plain parameters are stepped on each rank.

    Args:
        params: Matrices, or param groups of them: RaggedTensors, or plain tensors.
        lr: The learning rate, a number or a tensor of one element.
        weight_decay: As in torch.optim.Muon.
        momentum: As in torch.optim.Muon.
        nesterov: As in torch.optim.Muon.
        ns_coefficients: As in torch.optim.Muon.
        eps: As in torch.optim.Muon.
        ns_steps: As in torch.optim.Muon.
        adjust_lr_fn: "original" or None, or "match_rms_adamw", as in torch.optim.Muon.

    Raises:
        InvalidArgument: For parameters that aren't matrices of real numbers, or are DTensors of other
            placements, and for options that torch refuses.
    """

    def __init__(
        self, params: Iterable, lr: float | torch.Tensor = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: str | None = None,
    ):  # fmt: skip
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise InvalidArgument("a tensor lr must have one element", op=_OP)
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not value >= 0:
                raise InvalidArgument(f"{name} must be at least 0, not {value}", op=_OP)
        if not 0 <= ns_steps < 100 or len(ns_coefficients) != 3:
            raise InvalidArgument(f"ns_steps must be below 100, not {ns_steps}, and ns_coefficients 3 numbers", op=_OP)
        if adjust_lr_fn not in (None, *_LEARNING_RATES):
            raise InvalidArgument(f"adjust_lr_fn must be None or in {_LEARNING_RATES}, not {adjust_lr_fn!r}", op=_OP)
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
            eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
        )  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group of matrices.

        Args:
            param_group: The group.

        Raises:
            InvalidArgument: As the constructor.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dim() != 2 or not param.is_floating_point():
                wrong = f"a {param.dtype} tensor of shape {list(param.shape)}: Muon is for matrices of real numbers"
            elif isinstance(param, DTensor) and not isinstance(param, RaggedTensor):
                wrong = f"a DTensor of {param.placements}: use torch.optim.Muon"
            else:
                continue
            del self.param_groups[-1]
            raise InvalidArgument(f"a parameter is {wrong}", op=_OP)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices: dict[Any, list[_Matrix]] = {}  # by mesh; None: plain
        for group in self.param_groups:
            for matrix in self._add_momentum(group):
                mesh = matrix.param._spec.mesh if isinstance(matrix.param, RaggedTensor) else None
                matrices.setdefault(mesh, []).append(matrix)
        for mesh, members in matrices.items():
            if mesh is None or mesh.size(mesh.ndim - 1) == 1:
                parts = [_orthogonalised(each.update.view(each.param.shape), each.group) for each in members]
            else:
                parts = _orthogonalise_on_owners(members)
            for matrix, part in zip(members, parts, strict=True):
                rate = float(matrix.group["lr"])
                matrix.local.mul_(1 - rate * matrix.group["weight_decay"])
                factor = _rate_factor(matrix.param.shape, matrix.group["adjust_lr_fn"])
                matrix.local.add_(part.view(matrix.local.shape), alpha=-rate * factor)
            increment_version([each.param for each in members])
        return loss

    def _add_momentum(self, group) -> list[_Matrix]:
        """Move a group's momenta, and return the matrices with gradients."""
        found = []
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
            buffer = state["momentum_buffer"]
            for what, other in (("gradient", param.grad), ("momentum", buffer)):
                if getattr(other, "placements", None) != getattr(param, "placements", None):
                    raise InvalidArgument(
                        f"a {what} is a {type(other).__name__} of {getattr(other, 'placements', None)}, and its "
                        f"parameter one of {getattr(param, 'placements', None)}: redistribute it",
                        op=_OP,
                    )
            local, grad, buffer = (getattr(each, "_local_tensor", each) for each in (param, param.grad, buffer))
            buffer.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
            found.append(_Matrix(param, group, local, update))
        return found


def _orthogonalise_on_owners(matrices: list[_Matrix]) -> list[torch.Tensor]:
    """Return this rank's parts of the orthogonal updates of matrices of one mesh. A collective."""
    first = matrices[0].param
    mesh, rank = first._spec.mesh, first.shard_rank
    ranks = mesh.size(mesh.ndim - 1)
    device = matrices[0].update.device
    comm = get_communicator(mesh.get_group(mesh.ndim - 1), device)
    owners = _assign_owners([each.param.shape for each in matrices], ranks)
    by_owner = [[index for index, owner in enumerate(owners) if owner == peer] for peer in range(ranks)]
    elements = [_elements(each.param) for each in matrices]  # of each rank

    # Sent to each owner: this rank's parts of its matrices. Received: all ranks' parts of this rank's matrices.
    order = [index for members in by_owner for index in members]
    own = by_owner[rank]
    sent = [sum(elements[index][rank] for index in members) for members in by_owner]
    received = [sum(elements[index][peer] for index in own) for peer in range(ranks)]
    there = torch.empty(sum(sent), dtype=torch.bfloat16, device=device)
    parts = dict(zip(order, there.split([elements[index][rank] for index in order]), strict=True))
    torch._foreach_copy_(list(parts.values()), [matrices[index].update.reshape(-1) for index in order])
    here = torch.empty(sum(received), dtype=torch.bfloat16, device=device)
    comm.all_to_all(here, there, received, sent)

    pieces = here.split([elements[index][peer] for peer in range(ranks) for index in own])
    for place, index in enumerate(own):
        of_matrix = pieces[place :: len(own)]
        full = torch.cat(of_matrix).view(matrices[index].param.shape)
        made = _orthogonalised(full, matrices[index].group).reshape(-1)
        torch._foreach_copy_(list(of_matrix), list(made.split(elements[index])))
    comm.all_to_all(there, here, sent, received)
    return [parts[index] for index in range(len(matrices))]


def _elements(param: RaggedTensor) -> list[int]:
    """Return how many elements of a matrix each rank has."""
    return [count * (param.shape[1] if param.ragged.by_rows else 1) for count in param.ragged.counts]


def _assign_owners(shapes: list[torch.Size], ranks: int) -> list[int]:
    """Return the owner of each matrix; the ranks' costs differ by at most one matrix."""
    costs = [shape.numel() * min(shape) for shape in shapes]
    loads, owners = [0] * ranks, [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        owners[index] = min(range(ranks), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners


def _orthogonalised(update: torch.Tensor, group) -> torch.Tensor:
    """Return a matrix's nearest orthogonal one, roughly, by torch.optim.Muon's iteration in its order."""
    a, b, c = group["ns_coefficients"]
    matrix = update.to(torch.bfloat16, copy=True)
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        matrix = matrix.T
    matrix.div_(matrix.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if is_tall else matrix


def _rate_factor(shape: torch.Size, how: str | None) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(shape)) if how == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
