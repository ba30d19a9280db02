"""Changes to torch's own objects: each is made by `patch_attribute` or `record_patch`, with its
reason and its undo.

Two changes are made here when collectives is imported.

``DistributedDataParallel.register_comm_hook``: a hook gets buckets of parameters, which don't say
which module they belong to, nor over which ranks. The wrapper calls the observers first, so that
they can refuse, then torch's own method, and then records the module.

``GradScaler.scale`` and ``._lazy_init_scale_growth_tracker``: the gradients that a hook gets are
multiplied by a scaler's factor and don't say by whose. A scaler is recorded when it begins to
scale: by the first method where scaling began before this import, by the second in subclasses with
a ``scale`` of their own.

All records are weak references in the program's own order, which is the same on all ranks. Nothing
is found by a walk over Python's objects, whose result depends on the garbage collector.

Other modules make theirs when a program first needs them: `sharded.clip`
(``torch.nn.utils.clip_grad_norm_``), `sharded.scaler` (``GradScaler.unscale_``), `sharded.refusals`
(``torch.distributed.checkpoint.state_dict``) and `auto.install` (``DistributedDataParallel``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "Patch",
    "applied_patches",
    "find_active_scalers",
    "find_hooked_ddps",
    "install",
    "observe_comm_hooks",
    "patch_attribute",
    "record_patch",
    "undo_patch",
]


# ---- The patches of this process.


class Patch(NamedTuple):
    """A change to one of torch's objects: what was changed, why, and a function that restores it."""

    target: str
    reason: str
    undo: Callable[[], None]


_patches: list[Patch] = []


def patch_attribute(owner, name: str, replacement, reason: str) -> Patch:
    """Replace an attribute of a class or module of torch's; `reason`: why torch's own doesn't do."""
    own = name in vars(owner)
    original = vars(owner).get(name)

    def undo():
        setattr(owner, name, original) if own else delattr(owner, name)

    setattr(owner, name, replacement)
    return record_patch(f"{owner.__name__}.{name}", reason, undo)


def record_patch(target: str, reason: str, undo: Callable[[], None]) -> Patch:
    """Record a change that was made in another way than by an attribute; `undo` restores torch's
    own.
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

_ddps = WeakIdKeyDictionary()  # parameter -> weak references to the DDP objects with a hook that have it, oldest first
_scalers: weakref.WeakSet = weakref.WeakSet()
_observers: list = []


def observe_comm_hooks(observer) -> None:
    """Call ``observer(ddp, state, hook)`` before a hook is registered on a DDP object; an exception
    prevents that.
    """
    _observers.append(observer)


def find_hooked_ddps(parameter) -> list[DistributedDataParallel]:
    """Return the live DDP objects with a hook that synchronise a parameter, in the order of
    registration.
    """
    found = (reference() for reference in _ddps.get(parameter, ()))
    return [ddp for ddp in found if ddp is not None]


def find_active_scalers() -> list[torch.amp.GradScaler]:
    """Return the live, enabled GradScalers that have scaled something."""
    return [scaler for scaler in list(_scalers) if scaler.is_enabled() and scaler._scale is not None]


def _record_ddp(ddp) -> None:
    for parameter in ddp.module.parameters():
        known = [reference for reference in _ddps.get(parameter, ()) if reference() not in (None, ddp)]
        _ddps[parameter] = [*known, weakref.ref(ddp)]


@functools.cache
def install() -> None:
    """Make the two changes of this module, once per process."""
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


install()
