"""fully_shard: make a module a unit, in place; its forward and backward then unshard, reshard and
reduce.

The module's class becomes one that derives from `ShardedModule` and from the module's own class.
Nothing is wrapped, and no name changes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..arrays import kind_of
from ..comm.agree import all_gather_object, verify_same
from ..comm.communicator import Communicator
from ..errors import InvalidArgument, InvalidUsage
from ..gradients.compilation import compile_gradient_kernels
from ..weak_tensors import WeakTensorDict
from .hook_state import get_reducer, ranks_of
from .managed_params import check_parameter, managed_parameters
from .mesh import Ranks, resolve_mesh
from .module import ShardedModule
from .param import checksum
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .state import watch_state_dicts
from .torch_wrappers import check_no_torch_wrapper, refuse_sharded_modules
from .unit import Unit

__all__ = ["fully_shard", "shard"]

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")
_classes: dict[tuple[type, type], type] = {}
_sharded_before = WeakTensorDict()  # an original parameter -> its name and its unit's


def fully_shard(
    module: Modules,
    *,
    comm: Communicator | None = None,
    mesh=None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params=None,
    hook_state=None,
    block: int = 1,
    shard_placement_fn=None,
    dp_mesh_dims=None,
) -> Modules:
    """Shard a module's parameters, gradients and optimizer state over ranks, in place.

    The module becomes a unit of all its parameters, except those of submodules that are units
    already and those in `ignored_params`: call it on the inner modules first. Outside of forward
    and backward, ``parameters()`` are this rank's shards, DTensors: make the optimizer after this
    call. A collective, which all ranks must call with the same arguments; blocks. Forward and
    backward are collectives, too: all ranks must run the same units in the same order.

    A list of modules becomes one unit: it is gathered before the forward of the first one that
    runs, and resharded after all have run, or when the outermost forward ends. Modules with a tied
    weight (an embedding and a head) can be sharded so, and modules that run one after the other.

    Args:
        module: The module, or a list of modules that become one unit.
        comm: The communicator of the ranks that own a shard each. None: see `mesh`.
        mesh: A one-dimensional DeviceMesh, or a two-dimensional one whose second dimension shards
            and whose first one replicates. None: that of `comm`, else that of the ranks that
            `hook_state` names, else torch.distributed's default group.
        reshard_after_forward: True: gather again for the backward. False: stay gathered until then.
            None: False for the outermost unit, with which the backward begins, else True. An int,
            which divides the number of ranks: keep 1/int of the parameters, so that the backward's
            all-gather is among that many neighbouring ranks.
        mp_policy: A `MixedPrecisionPolicy`. None: compute in the parameters' dtype.
        offload_policy: `CPUOffloadPolicy()`: keep shards on the host. None: on the device that
            computes.
        ignored_params: Parameters that stay as they are.
        hook_state: A `collectives.HookState`, whose wire, clipping and optimizer are used.
        block: Rows of a parameter that stay on one rank, for quantized or matrix optimizers.
        shard_placement_fn: FSDP2's, and refused.
        dp_mesh_dims: FSDP2's, and refused.

    Returns:
        The module, or the list that was given.

    Raises:
        Mismatch: On all ranks where they don't shard the same parameters.
        InvalidUsage: By name, for a weight that is tied to one of another unit, and for a module
            under torch's own data parallelism.
        InvalidArgument: For parameters that can't be sharded, as those of an outer unit.
    """
    if shard_placement_fn is not None:
        raise InvalidArgument(
            "shard_placement_fn isn't offered: a shard is an interval of a unit's flat buffer, so that gathers need no "
            "copy, and no other dimension of a parameter is split",
            op="fully_shard",
        )
    if dp_mesh_dims is not None:
        raise InvalidArgument(
            "dp_mesh_dims isn't offered: its parameters are DTensors on a mesh with other dimensions. Give the "
            'dimensions of data parallelism as the mesh: mesh=mesh["replicate", "shard"]',
            op="fully_shard",
        )
    modules = _parse_modules(module)
    group = None
    if comm is None and mesh is None:
        comm, group = ranks_of(hook_state)
    shard(
        modules, ShardedModule, resolve_mesh(modules[0], comm, mesh, group=group), mp_policy=mp_policy,
        offload_policy=offload_policy, ignored_params=() if ignored_params is None else ignored_params,
        hook_state=hook_state, reshard_after_forward=reshard_after_forward, block=block,
    )  # fmt: skip
    return module


def _parse_modules(given) -> list[nn.Module]:
    """Return the modules that become one unit, without those that are inside others of them."""
    modules = list(given) if isinstance(given, list | tuple) else [given]
    strangers = [kind_of(module) for module in modules if not isinstance(module, nn.Module)]
    if strangers or not modules:
        what = f"a list with {strangers[0]}" if strangers else "an empty list"
        if not isinstance(given, list | tuple):
            what = strangers[0]
        raise InvalidArgument(f"module must be a torch.nn.Module or a list of them, not {what}", op="fully_shard")
    for module in modules:
        if modules.count(module) > 1:
            raise InvalidArgument(f"a {type(module).__name__} is in the list twice", op="fully_shard")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise InvalidArgument(
                f"a {type(module).__name__} has no forward, in which its parameters would be gathered: shard its "
                "members",
                op="fully_shard",
            )
        if isinstance(module, ShardedModule):
            raise InvalidUsage(f"this {type(module).__name__} is sharded already", op="fully_shard")
    inside = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if module not in inside]


def shard(
    modules: list[nn.Module], base: type, ranks: Ranks, *, reshard_after_forward: bool | int | None = None,
    ignored_params=(), hook_state=None, mp_policy=None, offload_policy=None, block: int = 1,
) -> Unit:  # fmt: skip
    """Make modules one unit, and their classes ones that derive from `base`: `fully_shard` after its checks."""
    if not isinstance(ignored_params, Iterable):
        raise InvalidArgument(f"ignored_params must be parameters, not {kind_of(ignored_params)}", op="fully_shard")
    ignored = list(ignored_params)
    refuse_sharded_modules()
    _watch_optimizers()
    kind = type(modules[0]).__name__ if len(modules) == 1 else f"[{', '.join(type(each).__name__ for each in modules)}]"
    for module in modules:
        check_no_torch_wrapper(module, ignored, "fully_shard")
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    found = managed_parameters(root, ignored, stop=lambda module: isinstance(module, ShardedModule))
    for names, _, param in found:
        check_parameter(param, names[0])
        _check_not_sharded(param, names[0], kind, ranks.world.rank)
    reducer = get_reducer(hook_state, ranks)
    options = {
        "mp_policy": mp_policy, "reshard_after_forward": reshard_after_forward, "block": block,
        "hook_state": None if reducer is None else reducer.describe(),
    }  # fmt: skip
    _compare(found, kind, ranks, options)
    unit = Unit(
        None, ranks=ranks, parameters=found, name=kind, mp_policy=mp_policy, offload_policy=offload_policy, block=block,
        multiple=1 if reducer is None else reducer.multiple,
    )  # fmt: skip
    unit.set_reshard_after_forward(reshard_after_forward)
    for names, _, param in found:
        _sharded_before[param] = f"{names[0]} of {kind}"
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)  # the memory goes
    compile_gradient_kernels(
        (param.sharded for param in unit.params), options=None if hook_state is None else hook_state.options,
        steps=reducer is not None and reducer.steps, packs=any(group.casts_grads for group in unit.groups),
        dtypes=(unit.mp_policy.param_dtype, unit.mp_policy.reduce_dtype), device=unit.device,
    )  # fmt: skip
    unit.modules = modules
    skipped = set(map(id, ignored))
    unit.ignored = {
        (part, name) for part in root.modules() for name, param in part._parameters.items() if id(param) in skipped
    }
    watch_state_dicts(unit)
    if reducer is not None:
        reducer.add(unit)
    for module in modules:
        module.__class__ = _class_of(base, type(module))
        object.__setattr__(module, "_sharded_unit", unit)
        _move_buffers(module, unit.device)
    return unit


@functools.cache
def _watch_optimizers() -> None:
    """Let optimizers of parameters that were sharded later raise at their next step."""
    register_optimizer_step_pre_hook(_refuse_old_parameters)


def _refuse_old_parameters(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    for group in optimizer.param_groups:
        first = next(iter(group["params"]), None)
        if first in _sharded_before:
            raise InvalidUsage(
                f"the optimizer has {_sharded_before.get(first)}, which was sharded after the optimizer was made, and "
                "would train nothing: make the optimizer after fully_shard, of model.parameters()",
                op=f"{type(optimizer).__name__}.step",
            )


def _check_not_sharded(param: nn.Parameter, name: str, kind: str, rank: int) -> None:
    """Raise `InvalidUsage`, with both names, for a parameter that is of another unit already."""
    if param in _sharded_before:
        raise InvalidUsage(
            f"{name} of this {kind} is tied to {_sharded_before.get(param)}, which was sharded before as a part of "
            "another unit: tied weights must be of one unit; shard both modules together, as fully_shard([a, b]), or "
            "the smallest module that holds both, and not the inner one, or leave it out by ignored_params",
            op="fully_shard", rank=rank,
        )  # fmt: skip


def _compare(found, kind: str, ranks: Ranks, options: dict) -> None:
    """Raise `Mismatch` where the ranks shard other parameters; warn where they have other values."""
    described = {
        " = ".join(names): f"{list(param.shape)} {param.dtype}{'' if param.requires_grad else ' frozen'}"
        for names, _, param in found
    }
    verify_same(
        ranks.world, f"the ranks shard other parameters of a {kind}, or in another way",
        {"ranks that share it": ranks.comm.size, **options, **described},
        "build the same model on all ranks, and call fully_shard with the same arguments",
    )  # fmt: skip
    sums = all_gather_object(ranks.world, sum(checksum(param) for _, _, param in found))
    if len(set(sums)) > 1:
        warnings.warn(
            f"the ranks' values of a {kind} with {found[0][0][0]} differ, and each rank's part is kept: seed all ranks "
            "alike before the model is built, or make them equal, as by sync_module_states=True",
            RuntimeWarning,
            stacklevel=4,
        )


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                part._buffers[name] = buffer.to(device)


def _class_of(base: type, cls: type) -> type:
    """Return the class that derives from `base` and from a module's own class."""
    if (base, cls) not in _classes:

        def new(self, *args, **kwargs):  # a slice of nn.Sequential makes an object of the same class
            return cls(*args, **kwargs)

        body = {"__new__": new, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _classes[base, cls] = type(cls.__name__, (base, cls), body)
    return _classes[base, cls]
