"""Patches of torch's DistributedDataParallel, by which ``collectives.auto`` observes DDP models.

They are applied once.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import InvalidUsage
from ..torch_patches import patch_attribute
from .model import Model
from .presence import Presence, announce

__all__ = ["install", "leave_alone"]

# Tables, because attributes of the object would be copied and pickled with it.
_models: weakref.WeakKeyDictionary[DistributedDataParallel, Model] = weakref.WeakKeyDictionary()
_presences: weakref.WeakKeyDictionary[DistributedDataParallel, Presence] = weakref.WeakKeyDictionary()


def install(settings: dict) -> None:
    """Observe every DDP object from its next forward on. `settings`: arguments of `HookState`.

    Dynamo must not trace the wrapper of `forward`. Marking it imports dynamo, which takes more than
    a second and which DDP's constructor imports anyway. So methods are patched at the first
    construction, or at once where dynamo is imported and DDP objects may exist.
    """
    if not dist.is_available():
        return
    construct = DistributedDataParallel.__init__
    patch_methods = functools.cache(lambda: (_wrap_forward(settings), _wrap_hook_registration()))
    if "torch._dynamo" in sys.modules:
        patch_methods()

    @functools.wraps(construct)
    def __init__(self, *args, **kwargs):
        patch_methods()
        presence = announce(args, kwargs)
        try:
            construct(self, *args, **kwargs)
        except BaseException:
            if presence is not None:
                presence.withdraw()
            raise
        if presence is not None:
            _presences[self] = presence
            missing = presence.describe_missing() if presence.compared else ""
            if missing:
                _models[self] = model = Model(self, None)
                model.leave_alone(missing, logging.WARNING, everywhere=True)

    patch_attribute(
        DistributedDataParallel, "__init__", __init__, "collectives.auto chooses a hook for each new DDP object"
    )


def leave_alone(ddp: DistributedDataParallel) -> None:
    """Keep torch's own all-reduce for one DDP object, whatever ``collectives.auto`` does with the
    others.

    All ranks must call it, best before the object's first forward; a local call. Raises
    `InvalidUsage` once `fused_allreduce` is registered on it, which can't be undone.
    """
    model = _models.get(ddp)
    if model is not None and model.registered:
        raise InvalidUsage(
            "leave_alone(): collectives.auto has registered its hook on this DDP object already, and a hook can't be "
            "taken off: call it before the first forward, or build the object again"
        )
    if model is None:
        _models[ddp] = Model(ddp, None)
    elif model.observing:
        model.leave_alone("leave_alone() was called")


def _wrap_forward(settings: dict) -> None:
    plain = DistributedDataParallel.forward

    @torch.compiler.disable
    def before(ddp):
        model = _models.get(ddp)
        if model is None:
            model = _models[ddp] = Model(ddp, settings, _presences.get(ddp))
        if model.observing:
            model.before_forward(ddp)
        return model

    @torch.compiler.disable
    def after(ddp, model):
        model.after_forward(ddp)

    @functools.wraps(plain)
    def forward(self, *inputs, **kwargs):
        model = _models.get(self)
        if model is not None and not model.observing:
            return plain(self, *inputs, **kwargs)
        model = before(self)
        output = plain(self, *inputs, **kwargs)
        after(self, model)
        return output

    # What is inside of DDP's own forward is compiled as before.
    forward = torch.compiler.disable(forward, recursive=False)
    patch_attribute(DistributedDataParallel, "forward", forward, "the time of a forward decides which hook is used")


def _wrap_hook_registration() -> None:
    """Let a hook that the user registers later replace ours; DDP itself would raise an error."""
    register = DistributedDataParallel.register_comm_hook
    register_builtin = DistributedDataParallel._register_builtin_comm_hook
    join_hook = DistributedDataParallel.join_hook

    @functools.wraps(register)
    def register_comm_hook(self, state, hook):
        model = _models.get(self)
        if model is None or not model.registered:
            return register(self, state, hook)
        if model.user_hook_active:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        model.use_user_hook(functools.partial(hook, state))

    @functools.wraps(register_builtin)
    def _register_builtin_comm_hook(self, comm_hook_type):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model = _models.get(self)
        if model is None or not model.registered:
            register_builtin(self, comm_hook_type)
            if model is not None:
                model.leave_alone("it has a hook of its own")
            else:
                _models[self] = Model(self, None)
            return None
        same = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        return register_comm_hook(self, self.process_group, same[comm_hook_type])

    @functools.wraps(join_hook)
    def join_hook_(self, **kwargs):
        model = _models.get(self)
        if model is not None and model.registered and not kwargs.get("divide_by_initial_world_size", True):
            raise InvalidUsage(
                "join(divide_by_initial_world_size=False) divides by the ranks that have not joined, which a hook is "
                "not told, and the hook of collectives.auto can't be taken off: set COLLECTIVES_AUTO=0"
            )
        return join_hook(self, **kwargs)

    reason = "DDP refuses a second hook, and ours must make way for the user's"
    patch_attribute(DistributedDataParallel, "register_comm_hook", register_comm_hook, reason)
    patch_attribute(DistributedDataParallel, "_register_builtin_comm_hook", _register_builtin_comm_hook, reason)
    reason = "a registered hook can't be right in join() with the divisor of the remaining ranks"
    patch_attribute(DistributedDataParallel, "join_hook", join_hook_, reason)
