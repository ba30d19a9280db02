"""What a sharded module's state_dict() gives and load_state_dict() takes: full tensors, or this rank's pieces.

While a unit's part of a state dict is made or loaded, its modules hold, in the places of the pieces, what they are to
give or to fill: full tensors, gathered unit by unit, or `Piece` objects. So the modules' own hooks and key names work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import torch
from torch import nn

from ...errors import InvalidArgument, InvalidUsage
from ..fsdp1.api import StateDictConfig, StateDictType
from ..unit import Unit
from .shard_tensor import Piece

__all__ = [
    "Form", "Taking", "begin_load", "end_load", "form_of", "make_state_dict", "making", "piece_of", "read_options",
    "shown_masters", "take_shown",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Form:
    """How tensors are given: `full`, or as pieces; `on_cpu`: on the host; `rank0_only`: nothing on the others."""

    full: bool = True
    on_cpu: bool = False
    rank0_only: bool = False

    @staticmethod
    def of(kind: StateDictType, config: StateDictConfig) -> Form:
        """Read FSDP1's settings."""
        full = kind.name == StateDictType.FULL_STATE_DICT.name
        return Form(full, config.offload_to_cpu, full and getattr(config, "rank0_only", False))


_now = threading.local()  # .form: what `making` has set in this thread


@contextlib.contextmanager
def making(form: Form):
    """Let state dicts have a form inside of the block, whatever units have as theirs."""
    before, _now.form = getattr(_now, "form", None), form
    try:
        yield
    finally:
        _now.form = before


def form_of(unit: Unit) -> Form:
    """Give the form in which a unit's state dict is to be made now."""
    return getattr(_now, "form", None) or unit.form or Form()


def piece_of(slot, tensor: torch.Tensor | None = None) -> Piece:
    """Give a slot's piece, or a tensor of its shape, as an entry of a state dict."""
    here = slot.piece if tensor is None else tensor
    return Piece(here, slot.shape, slot.start)


def _show_pieces(unit: Unit) -> None:
    for slot in unit.slots:
        slot.shown = nn.Parameter(piece_of(slot), requires_grad=slot.piece.requires_grad)
    unit.register_shown()


@torch.inference_mode(False)
@torch.no_grad()
def _show_masters(unit: Unit, device: torch.device | None, copies: bool) -> None:
    """Gather a unit and have its modules hold the full parameters, as copies of their own or views of the buffer."""
    for group, flat in zip(unit.groups, unit.order.gather_masters(unit), strict=True):
        for slot in group.slots:
            full = flat[slot.offset : slot.offset + slot.count].view(slot.shape)
            if copies:
                full = full.to(flat.device if device is None else device, copy=True)
            slot.shown = nn.Parameter(full, requires_grad=slot.piece.requires_grad)
    unit.register_shown()


@contextlib.contextmanager
def shown_masters(
    units: list[Unit], *, keep: bool = True, gradients: bool = False, device: torch.device | None = None,
    rank0_only: bool = False,
):  # fmt: skip
    """Have modules hold full parameters, in the dtypes of the pieces, inside of the block.

    `keep`: what is written there. `gradients`: the full gradients, too. `device`: where copies are to lie; None: views
    of what is gathered. `rank0_only`: the others hold their pieces. A collective.
    """
    try:
        for unit in units:
            unit.reshard()
            unit.copies.wait()
            if rank0_only and unit.ranks.world.rank:
                unit.order.gather_masters(unit)
            else:
                _show_masters(unit, device, copies=device is not None or not keep)
            if gradients:
                unit.order.meet(f"summon_full_params(with_grads=True) of unit {unit.index}")
                unit.gather_gradients()
        yield
    finally:
        for unit in units:
            if unit.shows:
                if keep:
                    take_shown(unit.slots)
                    if gradients:
                        unit.take_gradients_back()
                unit.register_form()


@torch.no_grad()
def take_shown(slots: list, module: nn.Module | None = None) -> None:
    """Take over into the pieces what a module, or each slot's first one, holds in the place of what was shown to it."""
    for slot in slots:
        holder, attribute = next(place for place in slot.places if module is None or place[0] is module)
        held = holder._parameters[attribute]
        if held.is_meta and not slot.piece.is_meta:
            raise InvalidUsage(f"{slot.name} was left on the meta device by its initialisation")
        piece_of(slot).copy_(held)
        if not slot.piece.is_inference():
            torch.autograd.graph.increment_version(slot.piece)


# ---- Giving.


def make_state_dict(unit: Unit, make, args: tuple, kwargs: dict):
    """Call a module's own `state_dict` with its unit's parameters in the form that is asked for."""
    form = form_of(unit)
    first = unit.ranks.world.rank == 0
    if form.full and (first or not form.rank0_only):
        _show_masters(unit, torch.device("cpu") if form.on_cpu else None, copies=True)
    else:
        if form.full:
            unit.order.gather_masters(unit)  # rank 0 needs it
        _show_pieces(unit)
    try:
        made = make(*args, **kwargs)
    finally:
        unit.register_form()
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    if form.rank0_only and not first:
        for key in [key for key in made if key.startswith(prefix)]:
            del made[key]
    elif form.on_cpu:
        for key, value in made.items():
            if key.startswith(prefix) and isinstance(value, torch.Tensor) and value.device.type != "cpu":
                made[key] = value.cpu()
    return made


# ---- Taking.


def begin_load(unit: Unit, state_dict: dict, prefix: str) -> None:
    """Have a unit's modules hold what takes from full tensors, and from pieces, this rank's part. A local call.

    What is on the meta device gets memory.
    """
    unit.reshard()
    unit.copies.wait()
    empty = [slot for group in unit.groups if group.flat.is_meta for slot in group.slots]
    for group in unit.groups:
        group.give_memory()
    for name, module in unit.module().named_modules(prefix=prefix.removesuffix(".")):
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and f"{name}.{key}".removeprefix(".") in state_dict:
                module._buffers[key] = torch.empty_like(buffer, device=unit.device)
    _show_pieces(unit)
    for slot in empty:
        slot.shown.filled = not slot.count


def end_load(unit: Unit) -> None:
    """Take over what was assigned, and give the modules their pieces again."""
    if not unit.shows:
        return
    try:
        for slot in unit.slots:
            holder, attribute = slot.places[0]
            if not slot.shown.filled and holder._parameters[attribute] is slot.shown:
                raise InvalidUsage(
                    f"{slot.name} was on the meta device and is not in the state dict: give it values first, by "
                    "materialize()",
                    op="load_state_dict",
                )
        take_shown(unit.slots)
    finally:
        unit.register_form()


# ---- Torch's options.


@dataclasses.dataclass(frozen=True)
class Taking:
    """What of torch's StateDictOptions is about loading, or about what is given at all."""

    strict: bool = True
    broadcast: bool = False
    ignore_frozen: bool = False


def read_options(options, full_state_dict: bool, cpu_offload: bool, rank0_only: bool) -> tuple[Form, Taking]:
    """Read keyword arguments, or torch's StateDictOptions in their place, in which full on the host is rank 0's."""
    if options is None:
        if rank0_only and not full_state_dict:
            raise InvalidArgument("rank0_only gives full tensors to rank 0: give full_state_dict=True, too")
        return Form(bool(full_state_dict), bool(cpu_offload), bool(rank0_only)), Taking()
    if not hasattr(options, "full_state_dict"):
        raise InvalidArgument(f"options must be a StateDictOptions, not {type(options).__name__}")
    if getattr(options, "flatten_optimizer_state_dict", False):
        raise InvalidArgument("flatten_optimizer_state_dict is not offered: leave it out")
    full, on_cpu = options.full_state_dict, options.cpu_offload
    return Form(full, on_cpu, full and on_cpu), Taking(
        options.strict, options.broadcast_from_rank0, options.ignore_frozen_params
    )
