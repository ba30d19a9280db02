"""fully_shard: a module becomes a unit, in place, and its forward and backward gather, let go and reduce.

The module's class becomes one that derives from `ShardedModule` and from the module's own; nothing is wrapped, and no
name changes.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..errors import InvalidArgument, InvalidUsage
from ..gradients.state import HookState
from ..optim import FusedOptimizer
from ..rendezvous.process_groups import get_communicator
from .api import MixedPrecisionPolicy, OffloadPolicy
from .changes import Members
from .clip import clip_grad_norm_, watch_clipping
from .forward_hooks import run_forward, watch_gradients
from .gradient_options import hooks_of
from .materialize import wrap_inits
from .mesh import device_of, ranks_of
from .param import Ranks
from .refusals import check_elementwise, watch_state_dicts
from .scaler import watch_scalers
from .scheduler import Order, all_orders, order_of, orders_of_parameters, units_of_parameters
from .state.state_dict import begin_load, end_load, make_state_dict, shown_masters
from .unit import State, Unit, check_parameter, managed_parameters, units_in

__all__ = ["ShardedModule", "UnshardHandle", "fully_shard", "register_forward_method", "shard", "units_in"]

# Parameters that were replaced by pieces -> their names: an optimizer, or dup module, may still hold them.
_replaced = WeakIdKeyDictionary()
_classes: dict[tuple[type, type], type] = {}


def fully_shard(
    module: nn.Module,
    *,
    comm: Communicator | None = None,
    mesh=None,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params=None,
    hook_state=None,
) -> nn.Module:
    """Shard a module's parameters, gradients and optimizer state over ranks, in place; give the module.

    The module becomes a unit of all its parameters but those of submodules that are units already and those in
    `ignored_params`: call it on the inner modules first. Outside of forward and backward, ``parameters()`` are this
    rank's pieces: make the optimizer behind this call. A collective, which all ranks must call alike; blocks. Forward
    and backward are collectives, too; ranks need not run the same units.

    `comm`: the ranks that have a piece each; `mesh`: a one-dimensional DeviceMesh, or a two-dimensional one whose
    second dimension shards, with replicas over the first; None: torch.distributed's default group.
    `reshard_after_forward`: True: gather again for the backward; False: keep gathered until then; an int, which divides
    the number of ranks: keep 1/int of the parameters, so that the backward's gather is among so many neighbours.
    `mp_policy`: a `MixedPrecisionPolicy`. `offload_policy`: `CPUOffloadPolicy()`: pieces on the host. `hook_state`: a
    `collectives.HookState` whose wire, clipping and optimizer are to be used.

    Raises `InvalidUsage` on all ranks where they don't shard the same parameters, or for a weight that is tied to one
    of dup unit, by name; `InvalidArgument` for parameters that can't be sharded.
    """
    _check_module(module)
    if comm is None and mesh is None and isinstance(hook_state, HookState):
        comm = hook_state.comm  # or its process group's
        if comm is None and hook_state.process_group is not None:
            comm = get_communicator(hook_state.process_group, device_of(module, None))
    ranks = ranks_of(module, comm, mesh)
    unit = shard(
        module, ShardedModule, ranks, mp_policy=mp_policy, offload_policy=offload_policy,
        ignored_params=() if ignored_params is None else ignored_params, hook_state=hook_state,
        reshard_after_forward=reshard_after_forward,
    )  # fmt: skip
    return unit.module()


def _check_module(module) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"module must be a torch.nn.Module, not {kind_of(module)}", op="fully_shard")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise InvalidArgument(
            f"a {type(module).__name__} has no forward, in which its parameters would be gathered: shard its members",
            op="fully_shard",
        )
    if isinstance(module, ShardedModule):
        raise InvalidUsage(f"this {type(module).__name__} is sharded already", op="fully_shard")


def shard(
    module: nn.Module,
    face: type,
    ranks: Ranks,
    *,
    reshard_after_forward: bool | int = True,
    ignored_params=(),
    hook_state=None,
    mp_policy=None,
    offload_policy=None,
    persistent: bool = False,
    strategy: str = "",
) -> Unit:
    """Make a module a unit, and its class one that derives from `face`. What `fully_shard` does, behind its checks."""
    _look_at_optimizers()
    watch_clipping()
    watch_scalers()
    watch_state_dicts()
    if not isinstance(ignored_params, Iterable):
        raise InvalidArgument(f"ignored_params must be parameters, not {kind_of(ignored_params)}", op="fully_shard")
    ignored_params = list(ignored_params)
    hooks = hooks_of(hook_state, ranks.world)
    order = order_of(ranks.world)
    keep = _parse_reshard(reshard_after_forward, ranks)
    found = managed_parameters(module, ignored_params, stop=lambda each: isinstance(each, ShardedModule))
    for names, _, param in found:
        check_parameter(param, names[0])
        if param in _replaced:
            raise InvalidUsage(
                f"{names[0]} of this {type(module).__name__} is tied to {_replaced[param]}, which was sharded before "
                "as a part of dup unit: tied weights must be of one unit; shard the smallest module that holds "
                "both, and not the inner one, or leave it out by ignored_params",
                op="fully_shard", rank=ranks.world.rank,
            )  # fmt: skip
    described = f"{type(module).__name__}: " + "; ".join(
        f"{' = '.join(names)} {list(param.shape)} {str(param.dtype).removeprefix('torch.')}"
        f"{'' if param.requires_grad else ' frozen'}"
        for names, _, param in found
    )
    described += f"; {strategy or 'sharded'}, over {ranks.size} of {ranks.world.size}, {mp_policy}, {keep}"
    described += "" if hooks is None else f"; {hooks.describe()}"
    values = sum(map(_checksum, (param for _, _, param in found)))
    unit = Unit(
        None, ranks, parameters=found, name=type(module).__name__, mp_policy=mp_policy, offload_policy=offload_policy,
        persistent=persistent, loans=order.loans, copies=order.copies, align=0 if hooks is None else hooks.align,
        codec=None if hooks is None else hooks.codec,
    )  # fmt: skip
    order.add(unit, described)
    if not order.same_number(values):
        warnings.warn(
            f"the ranks' values of a {type(module).__name__} with {found[0][0][0]} differ, and each rank's piece is "
            "kept: seed all ranks alike before the model is built, or make them equal, as by sync_module_states=True",
            RuntimeWarning,
            stacklevel=3,
        )
    if hooks is not None:
        hooks.add(unit)
    _set_reshard(unit, keep)
    unit.module = weakref.ref(module)
    unit.order = order
    for names, _, param in found:
        _replaced[param] = f"{names[0]} of {type(module).__name__}"
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    watch_gradients(unit, order)
    unit.members = Members(module, _own_parameters, ignored_params)
    for buffer_holder in module.modules():
        for name, buffer in buffer_holder._buffers.items():
            if buffer is not None and buffer.device.type != "meta" and buffer.device != unit.device:
                buffer_holder._buffers[name] = buffer.to(unit.device)
    module.__class__ = _class_of(face, type(module))
    object.__setattr__(module, "_unit", unit)
    if any(param.is_meta for _, _, param in found):
        wrap_inits(unit)
    module.register_load_state_dict_post_hook(lambda module, _keys: end_load(module._unit))
    object.__setattr__(module, "_order", order)
    return unit


def _own_parameters(module: nn.Module) -> list:
    return managed_parameters(module, stop=lambda each: isinstance(each, ShardedModule))


def _checksum(param: torch.Tensor) -> int:
    """Give a number that is the same where the values are, and most probably only there; 0 on the meta device."""
    if param.is_meta or not param.numel():
        return 0
    octets = param.detach().reshape(-1).view(torch.uint8)
    whole = octets.numel() // 4 * 4
    total = octets[:whole].view(torch.int32).sum(dtype=torch.int64) if whole else 0
    return int(total) + int(octets[whole:].sum(dtype=torch.int64))


def _parse_reshard(value, ranks: Ranks) -> bool | int:
    if isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 2 or ranks.size % value:
        raise InvalidArgument(
            f"reshard_after_forward must be True, False, or an int from 2 that divides {ranks.size} ranks, "
            f"not {value!r:.40}",
            op="fully_shard",
        )
    return True if value == ranks.size else value


def _set_reshard(unit: Unit, keep: bool | int) -> None:
    unit.reshard_after_forward = bool(keep)
    unit.neighbours = None
    if keep is not True and keep:
        unit.neighbours = _neighbours(unit.ranks.shard, keep)


def _neighbours(comm: Communicator, size: int) -> Communicator:
    """Give the communicator of so many ranks beside each other; one for all units."""
    known = _near.setdefault(comm, {})
    if size not in known or known[size].closed:
        known[size] = comm.split(comm.rank // size)
    return known[size]


_near: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> {size: its neighbours}


def _class_of(face: type, cls: type) -> type:
    """Give the class that derives from a face and from a module's own."""
    if (face, cls) not in _classes:

        def new(self, *args, **kwargs):  # nn.Sequential makes one of its own class where it is sliced
            return cls(*args, **kwargs)

        body = {"__new__": new, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _classes[face, cls] = type(cls.__name__, (face, cls), body)
    return _classes[face, cls]


# ---- What people call.


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let dup method of a sharded module be a forward: parameters are gathered for it. Others are left alone."""
    if not isinstance(module, ShardedModule):
        return
    method = getattr(module, name, None)
    if not callable(method):
        raise InvalidArgument(f"{type(module).__name__} has no method {name!r:.60}", op="register_forward_method")

    @functools.wraps(method)
    def call(*args, **kwargs):
        return run_forward(module._unit, method, args, kwargs)

    object.__setattr__(module, name, call)


class UnshardHandle:
    """What ``unshard(async_op=True)`` gives."""

    def __init__(self, unit: Unit):
        self._unit = unit

    def wait(self) -> None:
        """Wait for the gather, and give the module the full parameters."""
        if self._unit.state is State.GATHERING:
            self._unit.show()


class ShardedModule:
    """What `fully_shard` adds to a module's class; the names are FSDP2's."""

    _unit: Unit
    _order: Order

    def __call__(self, *args, **kwargs):
        return run_forward(self._unit, super().__call__, args, kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters, not those of inner units. A collective.

        With `async_op` it gives a handle, whose `wait()` is to come before the parameters are used; so does a forward.
        """
        self._order.gather(self._unit, beside=async_op)
        if async_op:
            return UnshardHandle(self._unit)
        self._unit.show()
        return None

    def reshard(self) -> None:
        """Give the module its pieces again; a local call. What was written to the full parameters is lost."""
        self._unit.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True, keep_bytes: int | None = None
    ) -> None:
        """Say whether backwards reduce gradients; False: full ones add up, on each rank alone, until one does.

        `keep_bytes`: so many bytes of full gradients may be kept; units beyond them reduce in each backward, and add up
        in pieces. The innermost and first come first; None: no limit.
        """
        left = None if keep_bytes is None else int(keep_bytes)
        for unit in reversed(units_in(self, recurse=recurse)):
            unit.syncs = bool(requires_gradient_sync)
            if left is not None and not unit.syncs:
                left -= unit.full_gradient_bytes
                unit.syncs = left < 0

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """FSDP2's name for leaving out the sum over replicas; here they are summed with the pieces: True only."""
        if not requires_all_reduce:
            raise InvalidArgument("gradients are reduced over pieces and replicas at once: set_requires_gradient_sync")

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether to let go of the parameters behind a forward, as `fully_shard` takes it.

        An int is a collective, which all ranks must call.
        """
        for unit in units_in(self, recurse=recurse):
            _set_reshard(unit, _parse_reshard(reshard_after_forward, unit.ranks))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether to let go of the parameters behind a backward; False: the next forward needs no gather.

        That is for accumulation: an optimizer's step lets go of them all the same.
        """
        for unit in units_in(self, recurse=recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Name the modules to gather in advance when this one's forward begins."""
        self._unit.forward_prefetch = [_sharded(module)._unit for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Name the modules to gather in advance when this one's backward begins."""
        self._unit.backward_prefetch = [_sharded(module)._unit for module in modules]

    def set_static_graph(self, static_graph: bool) -> None:
        """Say whether ranks whose steps were the same twice go on with no wait for each other; on GPUs they do.

        False: they agree before each collective, on the host, so that they may take other branches in any step. A
        collective; of all units over the same communicator.
        """
        self._order.set_follows(bool(static_graph))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by this in place of the number of ranks; in each rank, before the sum."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise InvalidArgument(f"factor must be a number above 0, not {factor!r:.40}")
        for unit in units_in(self):
            unit.divide_factor = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clip the gradients of this module's parameters, sharded or not, by their norm over all ranks; give the norm.

        A collective. ``torch.nn.utils.clip_grad_norm_(module.parameters(), ...)`` does the same. `error_if_nonfinite`:
        RuntimeError on all ranks alike. Raises `InvalidUsage` where a HookState's optimizer has taken the gradients.
        """
        return clip_grad_norm_(self, units_in(self), max_norm, norm_type, error_if_nonfinite, foreach)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last one of this step; False leaves open what would end it."""
        self._order.last_backward = bool(is_last_backward)

    def set_custom_all_gather(self, comm) -> None:
        """Gather this module's parameters by somebody else's ``comm(output, input, group, async_op)``.

        It may have FSDP2's ``allocate(size, *, dtype, device)``; it gives None, or what has a ``wait()``.
        """
        self._unit.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm) -> None:
        """Reduce this module's gradients by somebody else's ``comm(output, input, group, op, async_op)``."""
        self._unit.custom_reduce_scatter = comm

    def set_custom_all_reduce(self, comm) -> None:
        """Reduce over replicas by somebody else's ``comm(tensor, group, op, async_op)``, in place."""
        self._unit.custom_all_reduce = comm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the pieces' gradients, and drop full ones that wait for a synchronised backward."""
        super().zero_grad(set_to_none)
        for unit in units_in(self):
            unit.drop_gradients()

    def _apply(self, fn, recurse=True):
        if self._unit.shows:  # full parameters, in an initialisation
            return super()._apply(fn, recurse)
        self._unit.reshard()
        result = super()._apply(fn, recurse)
        self._unit.find_pieces()
        return result

    def state_dict(self, *args, **kwargs):
        """Give the full parameters and buffers; or pieces, by `set_state_dict_type`. A collective.

        Tensors of its own, unsharded in turn, unit by unit; the keys and shapes are the unsharded module's.
        """
        return make_state_dict(self._unit, super().state_dict, args, kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        begin_load(self._unit, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def apply(self, fn):
        """Call `fn` of each module inside, whose parameters are full ones then; keep what it writes. A collective."""
        with shown_masters([self._unit]):
            return super().apply(fn)

    def extra_repr(self) -> str:
        """Tell the unit beside what the module tells of itself."""
        own, unit = super().extra_repr(), self._unit
        count = sum(slot.count for slot in unit.slots)
        here = sum(slot.piece.numel() for slot in unit.slots)
        told = f"unit {unit.index}: {here} of {count} elements on rank {unit.ranks.world.rank}"
        return f"{own}, {told}" if own else told

    def __deepcopy__(self, memo):
        raise InvalidUsage(_NO_COPY, op="deepcopy")

    def __reduce_ex__(self, protocol):
        raise InvalidUsage(_NO_COPY, op="pickle")


_NO_COPY = (
    "a sharded module can't be copied or pickled, since its parameters are on other ranks, too: save its state_dict(), "
    "or copy it before it is sharded"
)


def _sharded(module) -> ShardedModule:
    if not isinstance(module, ShardedModule):
        raise InvalidArgument(f"only sharded modules can be gathered in advance, not {kind_of(module)}")
    return module


# ---- Optimizers.


def _before_step(optimizer, _args, _kwargs) -> None:
    """Refuse what an optimizer can't have meant, and give one of torch's the memory that nothing is gathered into."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in _replaced:
                raise InvalidUsage(
                    f"the optimizer holds {_replaced[param]}, which was sharded after the optimizer was made: make the "
                    "optimizer from the sharded module's parameters()",
                    op=f"{type(optimizer).__name__}.step",
                )
    check_elementwise(optimizer)
    for order in all_orders():
        order.copies.wait()  # gathers may still read what the step writes, where pieces lie on the host
    if not isinstance(optimizer, FusedOptimizer):  # torch's, with temporaries as large as the parameters
        for order in orders_of_parameters(param for group in optimizer.param_groups for param in group["params"]):
            # Where parameters stay gathered until the backward, the blocks are many, and the peak is past.
            if any(unit.reshard_after_forward and unit.gathers and not unit.persistent for unit in order.units):
                order.loans.trim()


def _after_step(optimizer, _args, _kwargs) -> None:
    """Let go of what is gathered, since the pieces are newer."""
    for unit in units_of_parameters(param for group in optimizer.param_groups for param in group["params"]):
        unit.stepped()


@functools.cache
def _look_at_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
