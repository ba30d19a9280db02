"""fully_shard: make a module a unit, in place; its forward and backward then unshard, reshard and
reduce.

The module's class becomes one that derives from `ShardedModule` and from the module's own class.
Nothing is wrapped, and no name changes.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..errors import InvalidArgument, InvalidUsage
from ..gradients.compilation import compile_gradient_kernels
from ..gradients.state import HookState
from ..rendezvous.process_groups import get_communicator
from .clip import patch_clip_grad_norm
from .conversions import install_conversions
from .forward_hooks import register_grad_hooks
from .gathering_parameters import find_unit
from .grad_reducer import get_reducer
from .managed_params import check_parameter, managed_parameters
from .materialize import wrap_init_methods
from .mesh import Ranks, resolve_device, resolve_ranks
from .module import ShardedModule
from .module_changes import AddedParamCheck
from .module_group import ModuleGroup, members_of, parse_modules
from .optimizer_hooks import register_optimizer_hooks, replaced
from .param_reads import gather_at_reads
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .post_forward import parse_reshard_after_forward, set_reshard_after_forward
from .scaler import patch_grad_scaler
from .scheduler import Scheduler, get_scheduler
from .state.state_dict import post_load_state_dict
from .state.torch_state_dict import patch_torch_state_dict
from .torch_wrappers import check_no_torch_wrapper, refuse_sharded_modules
from .unit import Unit

__all__ = ["attach", "fully_shard", "shard"]

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")
_classes: dict[tuple[type, type], type] = {}


def fully_shard(
    module: Modules,
    *,
    comm: Communicator | None = None,
    mesh=None,
    reshard_after_forward: bool | int | None = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params=None,
    hook_state=None,
    shard_placement_fn=None,
    dp_mesh_dims=None,
) -> Modules:
    """Shard a module's parameters, gradients and optimizer state over ranks, in place.

    The module becomes a unit of all its parameters, except those of submodules that are units
    already and those in `ignored_params`: call it on the inner modules first. Outside of forward
    and backward, ``parameters()`` are this rank's shards: make the optimizer after this call. A
    collective, which all ranks must call with the same arguments; blocks. Forward and backward are
    collectives, too; ranks need not run the same units.

    A list of modules becomes one unit: it is gathered before the forward of the first one that
    runs, and resharded after that of the last one, or when the outermost forward ends. Modules with
    a tied weight (an embedding and a head) can be sharded so, and modules that run one after the
    other.

    Args:
        module: The module, or a list of modules that become one unit.
        comm: The communicator of the ranks that own a shard each. None: see `mesh`.
        mesh: A one-dimensional DeviceMesh, or a two-dimensional one whose second dimension shards
            and whose first one replicates. None: that of `comm`, and without one
            torch.distributed's default group.
        reshard_after_forward: True or None: gather again for the backward. False: stay gathered
            until then. An int, which divides the number of ranks: keep 1/int of the parameters, so
            that the backward's all-gather is among that many neighbouring ranks.
        mp_policy: A `MixedPrecisionPolicy`. None: compute in the parameters' dtype.
        offload_policy: `CPUOffloadPolicy()`: keep shards on the host. None: on the device that
            computes.
        ignored_params: Parameters that stay as they are.
        hook_state: A `collectives.HookState`, whose wire, clipping and optimizer are used.
        shard_placement_fn: FSDP2's, and refused.
        dp_mesh_dims: FSDP2's, and refused.

    Returns:
        The module, or the list that was given.

    Raises:
        InvalidUsage: On all ranks where they don't shard the same parameters, and, by name, for a
            weight that is tied to one of another unit, for a module of which an outer one was
            sharded before, and for one under torch's own data parallelism.
        InvalidArgument: For parameters that can't be sharded.
    """
    _check_options(shard_placement_fn, dp_mesh_dims)
    given = module
    if isinstance(module, list | tuple):
        module = parse_modules(module)
    for each in members_of(module):
        _check_module(each)
    if comm is None and mesh is None and isinstance(hook_state, HookState):
        comm = hook_state.comm  # or the communicator of its process group
        if comm is None and hook_state.process_group is not None:
            comm = get_communicator(hook_state.process_group, resolve_device(module, None))
    ranks = resolve_ranks(module, comm, mesh)
    shard(
        module, ShardedModule, ranks, mp_policy=mp_policy, offload_policy=offload_policy,
        ignored_params=() if ignored_params is None else ignored_params, hook_state=hook_state,
        reshard_after_forward=True if reshard_after_forward is None else reshard_after_forward,
    )  # fmt: skip
    return given


def _check_options(shard_placement_fn, dp_mesh_dims) -> None:
    if shard_placement_fn is not None:
        raise InvalidArgument(
            "shard_placement_fn isn't offered: a shard is an interval of a unit's flat buffer, so that gathers need no "
            "copy, and no dimension of a parameter is split. For parameters that other ranks share, shard their module "
            "by a fully_shard of its own with that mesh",
            op="fully_shard",
        )
    if dp_mesh_dims is not None:
        raise InvalidArgument(
            "dp_mesh_dims isn't offered: its parameters are DTensors on a mesh with other dimensions. Give the "
            'dimensions of data parallelism as the mesh: mesh=mesh["replicate", "shard"]',
            op="fully_shard",
        )


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
    base: type,
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
    """Make a module or a `ModuleGroup` a unit, and its class one that derives from `base`:
    `fully_shard` after its checks.
    """
    _patch_torch()
    if not isinstance(ignored_params, Iterable):
        raise InvalidArgument(f"ignored_params must be parameters, not {kind_of(ignored_params)}", op="fully_shard")
    ignored_params = list(ignored_params)
    check_no_torch_wrapper(module, ignored_params, "fully_shard")
    reducer = get_reducer(hook_state, ranks.world)
    scheduler = get_scheduler(ranks.world)
    keep = parse_reshard_after_forward(reshard_after_forward, ranks)
    kind = _name_of(module)
    found = managed_parameters(module, ignored_params, stop=lambda each: isinstance(each, ShardedModule))
    for names, places, param in found:
        _check_not_sharded(param, names[0], places[0], kind, ranks.world.rank)
        check_parameter(param, names[0])
    described = f"{kind}: " + "; ".join(
        f"{' = '.join(names)} {list(param.shape)} {str(param.dtype).removeprefix('torch.')}"
        f"{'' if param.requires_grad else ' frozen'}"
        for names, _, param in found
    )
    described += f"; {strategy or 'sharded'}, over {ranks.size} of {ranks.world.size}, {mp_policy}, {keep}"
    described += "" if reducer is None else f"; {reducer.describe()}"
    values = sum(map(_checksum, (param for _, _, param in found)))
    unit = Unit(
        None, ranks, parameters=found, name=kind, mp_policy=mp_policy, offload_policy=offload_policy,
        persistent=persistent, pool=scheduler.pool, host_copies=scheduler.host_copies,
        align=0 if reducer is None else reducer.align,
        quantized_gather=None if reducer is None else reducer.quantized_gather,
    )  # fmt: skip
    compile_gradient_kernels(
        (param for _, _, param in found), options=None if hook_state is None else hook_state.options, packs=True,
        steps=hook_state is not None and hook_state.optimizer is not None, device=unit.device,
        dtypes=() if mp_policy is None else (mp_policy.param_dtype, mp_policy.reduce_dtype),
    )  # fmt: skip
    scheduler.agreement.create(unit, described)
    if not scheduler.agreement.same_number(values):
        warnings.warn(
            f"the ranks' values of a {kind} with {found[0][0][0]} differ, and each rank's piece is "
            "kept: seed all ranks alike before the model is built, or make them equal, as by sync_module_states=True",
            RuntimeWarning,
            stacklevel=3,
        )
    if reducer is not None:
        reducer.add(unit)
    set_reshard_after_forward(unit, keep)
    for names, _, param in found:
        replaced[param] = f"{names[0]} of {kind}"
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    for buffer_holder in module.modules():
        for name, buffer in buffer_holder._buffers.items():
            if buffer is not None and buffer.device.type != "meta" and buffer.device != unit.device:
                buffer_holder._buffers[name] = buffer.to(unit.device)
    attach(unit, module, base, scheduler, ignored_params)
    if any(param.is_meta for _, _, param in found):
        wrap_init_methods(unit)
    for each in members_of(module):
        each.register_load_state_dict_post_hook(lambda module, _keys: post_load_state_dict(module._unit, module))
    return unit


def _patch_torch() -> None:
    """Make the changes to torch's own objects that sharded modules need, once."""
    register_optimizer_hooks()
    patch_clip_grad_norm()
    patch_grad_scaler()
    patch_torch_state_dict()
    install_conversions()
    refuse_sharded_modules()


def _check_not_sharded(param: nn.Parameter, name: str, place: tuple[nn.Module, str], kind: str, rank: int) -> None:
    """Raise `InvalidUsage`, with both names, for a parameter that is of another unit already."""
    problem, outer = None, find_unit(*place)
    if param in replaced:
        problem = (
            f"{name} of this {kind} is tied to {replaced[param]}, which was sharded before as a part of another unit: "
            "tied weights must be of one unit; shard both modules together, as fully_shard([a, b]), or the smallest "
            "module that holds both, and not the inner one, or leave it out by ignored_params"
        )
    elif outer is not None:
        owner = next(each.name for each in outer.params if place in each.places)
        problem = (
            f"{name} of this {kind} is {owner} of a {outer.name} that was sharded before: inner modules are sharded "
            f"first, so call fully_shard on this {kind}, and then on the {outer.name}; modules that share a part are "
            "sharded together, as fully_shard([a, b])"
        )
    if problem is not None:
        raise InvalidUsage(problem, op="fully_shard", rank=rank)


def attach(unit: Unit, module: nn.Module, base: type, scheduler: Scheduler, ignored_params=()) -> None:
    """Let the forward and backward of a module, or of those of a `ModuleGroup`, run a unit of its
    parameters: its class becomes one that derives from `base`. A local call.
    """
    unit.module = weakref.ref(module)
    unit.module_group = module if isinstance(module, ModuleGroup) else None
    unit.scheduler = scheduler
    register_grad_hooks(unit, scheduler)
    gather_at_reads(unit)
    unit.added_params = AddedParamCheck(module, ignored_params)
    for each in members_of(module):
        each.__class__ = _class_of(base, type(each))
        object.__setattr__(each, "_unit", unit)
        object.__setattr__(each, "_scheduler", scheduler)


def _name_of(module: nn.Module) -> str:
    return module.unit_name if isinstance(module, ModuleGroup) else type(module).__name__


def _checksum(param: torch.Tensor) -> int:
    """Return a number that is equal for equal values, and very probably only for these; 0 on the
    meta device.
    """
    if param.is_meta or not param.numel():
        return 0
    octets = param.detach().reshape(-1).view(torch.uint8)
    whole = octets.numel() // 4 * 4
    total = octets[:whole].view(torch.int32).sum(dtype=torch.int64) if whole else 0
    return int(total) + int(octets[whole:].sum(dtype=torch.int64))


def _class_of(base: type, cls: type) -> type:
    """Return the class that derives from `base` and from a module's own class."""
    if (base, cls) not in _classes:

        def new(self, *args, **kwargs):  # a slice of nn.Sequential makes an object of the same class
            return cls(*args, **kwargs)

        body = {"__new__": new, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _classes[base, cls] = type(cls.__name__, (base, cls), body)
    return _classes[base, cls]
