"""What is changed in torch's own classes when collectives is imported: all of it, each change with its reason.

``DistributedDataParallel.register_comm_hook``: a hook gets buckets of parameters, which don't say which module they are
of, nor over which ranks. The module is noted here when a hook is registered, and who asked for it is called first, so
that it can refuse; then torch's own method runs as before.

``GradScaler.scale`` and ``._lazy_init_scale_growth_tracker``: the gradients that a hook gets have a scaler's factor and
don't say whose. A scaler is noted when it begins to scale: by the first method where scaling began before this import,
by the second in subclasses with a ``scale`` of their own.

Everything is held weakly, in the program's own order, which is the same on all ranks; nothing is found by a walk over
Python's objects, whose result depends on the garbage collector.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["ddps_of", "install", "scalers_in_use", "when_registered"]

_ddps = WeakIdKeyDictionary()  # parameter -> weak references to the DDP objects with a hook that have it, oldest first
_scalers: weakref.WeakSet = weakref.WeakSet()
_watchers: list = []


def when_registered(watcher) -> None:
    """Call ``watcher(ddp, state, hook)`` before a hook is registered on a DDP object; what it raises prevents that."""
    _watchers.append(watcher)


def ddps_of(parameter) -> list[DistributedDataParallel]:
    """Give the DDP objects with a hook that are alive and synchronise a parameter, in the order of registration."""
    found = (reference() for reference in _ddps.get(parameter, ()))
    return [ddp for ddp in found if ddp is not None]


def scalers_in_use() -> list[torch.amp.GradScaler]:
    """Give the GradScalers that are alive and enabled and have scaled something."""
    return [scaler for scaler in list(_scalers) if scaler.is_enabled() and scaler._scale is not None]


def _note(ddp) -> None:
    for parameter in ddp.module.parameters():
        known = [reference for reference in _ddps.get(parameter, ()) if reference() not in (None, ddp)]
        _ddps[parameter] = [*known, weakref.ref(ddp)]


@functools.cache
def install() -> None:
    """Make the changes, once a process."""
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def register_comm_hook(self, state, hook):
        for watcher in _watchers:
            watcher(self, state, hook)
        register(self, state, hook)
        _note(self)

    DistributedDataParallel.register_comm_hook = register_comm_hook

    cls = torch.amp.GradScaler
    scale, begin = cls.scale, cls._lazy_init_scale_growth_tracker

    @functools.wraps(scale)
    def scale_(self, outputs):
        _scalers.add(self)
        return scale(self, outputs)

    @functools.wraps(begin)
    def begin_(self, *args, **kwargs):
        _scalers.add(self)
        return begin(self, *args, **kwargs)

    cls.scale, cls._lazy_init_scale_growth_tracker = scale_, begin_


install()
