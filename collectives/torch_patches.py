"""Patches: changes to torch's own objects, each recorded with its reason and its undo.

`patch_attribute` and `record_patch` make all of them. docs/side-effects.md lists what is changed,
and when.

One is made when collectives is imported (`install`), and not with the DDP hook: in
``ddp.register_comm_hook(None, collectives.fused_allreduce)`` Python looks up the method first.

``DistributedDataParallel.register_comm_hook``: a hook gets buckets of parameters, which don't say
which module they belong to, nor over which ranks. The wrapper calls the observers first, so that
they can refuse, then torch's own method, and then records the module.

One is made when `collectives.gradients` is imported, which the DDP hook, sharded modules and
`GradientBuckets` use (`record_scalers`).

``GradScaler.scale`` and ``._lazy_init_scale_growth_tracker``: the gradients that a hook gets are
multiplied by a scaler's factor and don't say by whose. A scaler is recorded when it begins to
scale: by the first method where scaling began before this import, by the second in subclasses with
a ``scale`` of their own.

These are made when `collectives.sharded` is imported: `patch_state_dict`, `patch_distribution`,
`patch_optimizer_load`. One is made at the first sharded module: `patch_data_parallel`. One where a hook
steps an optimizer: `patch_scaler_checks`. One at the first `collectives.horovod.DistributedOptimizer`:
`patch_unscale`. One in the process of a ``torchrun --rdzv-backend collectives``: the class of its agent
(collectives/elastic/agent.py). `collectives.auto` makes its changes to ``DistributedDataParallel`` with
`patch_attribute`, when a program asks for them.

All records are weak references in the program's own order, which is the same on all ranks. Nothing
is found by a walk over Python's objects, whose result depends on the garbage collector.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from .torch_compat import fsdp_state_class
from .weak_tensors import WeakTensorDict

__all__ = [
    "Patch",
    "applied_patches",
    "count_hook_registrations",
    "find_active_scalers",
    "find_hooked_ddps",
    "install",
    "observe_comm_hooks",
    "patch_attribute",
    "patch_data_parallel",
    "patch_distribution",
    "patch_optimizer_load",
    "patch_scaler_checks",
    "patch_state_dict",
    "patch_unscale",
    "record_patch",
    "record_scalers",
    "undo_patch",
]


# ---- The patches of this process.


class Patch(NamedTuple):
    """A change to one of torch's objects: its target, its reason, and a function that undoes it."""

    target: str
    reason: str
    undo: Callable[[], None]


_patches: list[Patch] = []


def patch_attribute(owner, name: str, replacement, reason: str) -> Patch:
    """Replace an attribute of a class or module of torch's.

    `reason`: why torch's own isn't enough.
    """
    own = name in vars(owner)
    original = vars(owner).get(name)

    def undo():
        setattr(owner, name, original) if own else delattr(owner, name)

    setattr(owner, name, replacement)
    return record_patch(f"{owner.__name__}.{name}", reason, undo)


def record_patch(target: str, reason: str, undo: Callable[[], None]) -> Patch:
    """Record a change that was made in another way than by an attribute.

    `undo` restores torch's own.
    """
    patch = Patch(target, reason, undo)
    _patches.append(patch)
    return patch


def applied_patches() -> list[Patch]:
    """Return the changes that are in force, oldest first."""
    return list(_patches)


def undo_patch(patch: Patch) -> None:
    """Restore torch's own. Of two changes to one target the newer must be undone first."""
    _patches.remove(patch)
    patch.undo()


# ---- DDP objects with a hook, and GradScalers in use.

_ddps = WeakTensorDict()  # parameter -> weak references to the DDP objects with a hook that have it, oldest first
_hook_registrations = 0
_scalers: weakref.WeakSet = weakref.WeakSet()
_observers: list = []


def observe_comm_hooks(observer) -> None:
    """Call ``observer(ddp, state, hook)`` before a hook is registered on a DDP object.

    An exception prevents that.
    """
    _observers.append(observer)


def find_hooked_ddps(parameter) -> list[DistributedDataParallel]:
    """Return the live DDP objects with a hook that synchronise a parameter.

    They are in the order of registration.
    """
    return [ddp for reference in _ddps.get(parameter, ()) if (ddp := reference()) is not None]


def count_hook_registrations() -> int:
    """Return how many hooks were registered on DDP objects of this process so far."""
    return _hook_registrations


def find_active_scalers() -> list[torch.amp.GradScaler]:
    """Return the live, enabled GradScalers that have scaled something."""
    return [scaler for scaler in list(_scalers) if scaler.is_enabled() and scaler._scale is not None]


def _record_ddp(ddp) -> None:
    global _hook_registrations
    _hook_registrations += 1
    for parameter in ddp.module.parameters():
        known = [reference for reference in _ddps.get(parameter, ()) if reference() not in (None, ddp)]
        _ddps[parameter] = [*known, weakref.ref(ddp)]


@functools.cache
def install() -> None:
    """Let DDP's ``register_comm_hook`` call the observers and record the object; once per process."""
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def register_comm_hook(self, state, hook):
        for observer in _observers:
            observer(self, state, hook)
        register(self, state, hook)
        _record_ddp(self)

    patch_attribute(
        DistributedDataParallel, "register_comm_hook", register_comm_hook,
        "a hook's buckets don't say which module and ranks they belong to",
    )  # fmt: skip


@functools.cache
def record_scalers() -> None:
    """Let a GradScaler be recorded when it scales; once per process."""
    cls = torch.amp.GradScaler
    scale, init_scale = cls.scale, cls._lazy_init_scale_growth_tracker

    @functools.wraps(scale)
    def recording_scale(self, outputs):
        _scalers.add(self)
        return scale(self, outputs)

    @functools.wraps(init_scale)
    def recording_init_scale(self, *args, **kwargs):
        _scalers.add(self)
        return init_scale(self, *args, **kwargs)

    reason = "a hook's gradients don't say which scaler has multiplied them"
    patch_attribute(cls, "scale", recording_scale, reason)
    patch_attribute(cls, "_lazy_init_scale_growth_tracker", recording_init_scale, reason)


# ---- Sharded gradients and parameters.


@functools.cache
def patch_scaler_checks(exchange) -> None:
    """Call ``exchange(scaler, optimizer)`` after a GradScaler has checked an optimizer's gradients.

    It makes the scaler's findings those of all ranks.
    """
    cls = torch.amp.GradScaler
    unscale, check = cls.unscale_, cls._check_inf_per_device
    reason = "a scaler checks its own rank's gradients, and ranks with shards would go on with different scales"

    @functools.wraps(unscale)
    def unscale_(self, optimizer):
        unscale(self, optimizer)
        if self.is_enabled():
            exchange(self, optimizer)

    @functools.wraps(check)
    def _check_inf_per_device(self, optimizer):
        check(self, optimizer)
        exchange(self, optimizer)
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    patch_attribute(cls, "unscale_", unscale_, reason)
    patch_attribute(cls, "_check_inf_per_device", _check_inf_per_device, reason)


@functools.cache
def patch_unscale(reduce) -> None:
    """Call ``reduce(optimizer)`` before a GradScaler unscales or checks an optimizer's gradients.

    ``unscale_`` and, for optimizers that unscale in their step, ``step`` come to the changed method.
    """
    cls = torch.amp.GradScaler
    unscale = cls._unscale_grads_

    @functools.wraps(unscale)
    def _unscale_grads_(self, optimizer, *args, **kwargs):
        reduce(optimizer)
        return unscale(self, optimizer, *args, **kwargs)

    patch_attribute(
        cls, "_unscale_grads_", _unscale_grads_,
        "gradients of an optimizer that reduces in its step would be checked before they are reduced",
    )  # fmt: skip


@functools.cache
def patch_state_dict(**replacements) -> None:
    """Replace functions of torch.distributed.checkpoint.state_dict.

    `replacements`: each is called with torch's own function before that function's arguments. The
    module's public functions look these up by their names, so that it doesn't matter who has
    imported them, and when.
    """
    _replace_functions(
        "torch.distributed.checkpoint.state_dict", replacements,
        "a module that gives whole tensors by default is to give shards, as torch's own FSDP does there",
    )  # fmt: skip


@functools.cache
def patch_distribution(**replacements) -> None:
    """Replace functions of torch.distributed._state_dict_utils, by which whole tensors become shards.

    `replacements`: as of `patch_state_dict`.
    """
    _replace_functions(
        "torch.distributed._state_dict_utils", replacements, "torch's own know even shards only, and raise for others"
    )


def _replace_functions(module: str, replacements: dict, reason: str) -> None:
    target = importlib.import_module(module)
    for name, replacement in replacements.items():
        own = getattr(target, name)
        patch_attribute(target, name, functools.wraps(own)(functools.partial(replacement, own)), reason)


@functools.cache
def patch_optimizer_load(convert) -> None:
    """Let an optimizer's own ``load_state_dict()`` load ``convert(optimizer, state_dict)``."""
    cls = torch.optim.Optimizer
    load = cls.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self, state_dict):
        return load(self, convert(self, state_dict))

    patch_attribute(
        cls, "load_state_dict", load_state_dict,
        "torch takes any placement: whole or evenly sharded state beside shards of other bounds fails in a later step",
    )  # fmt: skip


@functools.cache
def patch_data_parallel(refuse) -> None:
    """Call ``refuse(module, name, ignored)`` before torch's own data parallelism takes a module:
    DistributedDataParallel, FullyShardedDataParallel and FSDP2's ``fully_shard``.

    `ignored`: the parameters that it is to leave alone. FSDP2's function may have been imported by
    name before, so what it calls is changed.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel  # which takes long to import

    reason = "torch's own would take one rank's shards for whole parameters"
    ddp, fsdp, fsdp2 = DistributedDataParallel, FullyShardedDataParallel, fsdp_state_class()
    init_ddp, init_fsdp, init_state = ddp.__init__, fsdp.__init__, fsdp2.init

    @functools.wraps(init_ddp)
    def ddp_init(self, module, *args, **kwargs):
        names = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        ignored = [param for name, param in module.named_parameters() if name in names] if names else []
        refuse(module, "DistributedDataParallel", ignored)
        init_ddp(self, module, *args, **kwargs)

    @functools.wraps(init_fsdp)
    def fsdp_init(self, module, *args, **kwargs):
        refuse(module, "FullyShardedDataParallel", [])
        init_fsdp(self, module, *args, **kwargs)

    @functools.wraps(init_state)
    def state_init(self, modules, *args, **kwargs):
        try:
            for module in modules:
                refuse(module, "torch.distributed.fsdp.fully_shard", [])
        except Exception:
            for module in modules:
                _drop_state(module, self)
            raise
        init_state(self, modules, *args, **kwargs)

    patch_attribute(ddp, "__init__", ddp_init, reason)
    patch_attribute(fsdp, "__init__", fsdp_init, reason)
    patch_attribute(fsdp2, "init", state_init, reason)


def _drop_state(module: torch.nn.Module, state) -> None:
    """Remove from a module what ``fully_shard`` has registered there before it was refused."""
    for value in list(module.__dict__.values()):
        if isinstance(value, dict):
            for key in [key for key, held in value.items() if held is state]:
                del value[key]
