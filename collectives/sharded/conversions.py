"""Conversions of modules with sharded ones inside (``half()``, ``to(...)``, ``to_empty(...)``): they
take place as a whole, or not at all.

``nn.Module._apply`` converts a module's tensors one after the other, and a unit refuses a dtype or
a device that its shards can't have. What was converted before the refusal is restored then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import nn

from ..torch_patches import patch_conversions
from .managed_params import units_in
from .unit import Unit

__all__ = ["install_conversions", "restored_on_error"]


def install_conversions() -> None:
    """Let modules that aren't sharded, and contain sharded ones, convert as a whole, too."""
    patch_conversions(restored_on_error)


_now = threading.local()  # .active: inside of `restored_on_error`


@contextlib.contextmanager
def restored_on_error(module: nn.Module) -> Iterator[None]:
    """Restore a module's parameters, gradients and buffers where the block raises. The outermost
    block does it.

    Until the block ends, the memory of converted tensors stays allocated.
    """
    if getattr(_now, "active", False):
        yield
        return
    units = units_in(module)
    if not units or any(unit.registration.has_substitutes for unit in units):
        yield
        return
    for unit in units:
        unit.reshard()
    before = [_Tensors(each) for each in module.modules()]
    _now.active = True
    try:
        yield
    except BaseException:
        for each in before:
            each.restore()
        for unit in units:
            _restore_shards(unit)
        raise
    finally:
        _now.active = False


def _restore_shards(unit: Unit) -> None:
    for param in unit.params:
        holder, attribute = param.places[0]
        param.shard = holder._parameters[attribute]


class _Tensors:
    """The parameters, gradients and buffers that a module itself holds."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._buffers = dict(module._buffers)
        self._params = []
        for name, param in module._parameters.items():
            if param is not None:
                grad = param.grad
                self._params.append((name, param, param.data, grad, None if grad is None else grad.data))

    def restore(self) -> None:
        module = self._module
        for name, param, data, grad, grad_data in self._params:
            if module._parameters.get(name) is not param:
                setattr(module, name, param)
            param.grad = None  # of another dtype, perhaps
            param.data = data
            if grad is not None:
                grad.data = grad_data
            param.grad = grad
        module._buffers.update(self._buffers)
