"""Lookup of the GradScaler whose factor a state's gradients have."""

from __future__ import annotations

import gc
import weakref

import torch

from ..arrays import kind_of
from ..errors import InvalidArgument, InvalidUsage
from ..torch_patches import find_active_scalers

__all__ = ["ScalerLookup"]


class ScalerLookup:
    """The GradScaler of one state: named by the user, or the only one in use when it is first
    needed.
    """

    def __init__(self):
        self._scaler = None  # False: there is none; a weak reference; None: not looked for yet

    @property
    def scaler(self):
        """The GradScaler; None: not known yet, or dead; False: there is none."""
        return self._scaler() if isinstance(self._scaler, weakref.ref) else self._scaler

    @scaler.setter
    def scaler(self, scaler):
        if scaler is not None and scaler is not False and not isinstance(scaler, torch.amp.GradScaler):
            raise InvalidArgument(f"grad_scaler must be a torch.amp.GradScaler, None or False, not {kind_of(scaler)}")
        self._scaler = weakref.ref(scaler) if scaler else scaler

    def find(self):
        """Return the enabled GradScaler that has scaled, or None.

        Raises `InvalidUsage` where several are in use.
        """
        if self._scaler is False:
            return None
        if isinstance(self._scaler, weakref.ref) and self._scaler() is None:
            self._scaler = None  # another one may have replaced it
        if self._scaler is None:
            found = find_active_scalers()
            if len(found) > 1:
                found = None
                gc.collect()  # of an earlier training's scaler, which only a cycle holds; all ranks do it
                found = find_active_scalers()
            if len(found) > 1:
                raise InvalidUsage(
                    f"there are {len(found)} GradScalers in use: name this module's, HookState(grad_scaler=scaler) or "
                    "state.grad_scaler = scaler, or False where its loss isn't scaled"
                )
            self.scaler = found[0] if found else False
        scaler = self.scaler
        return scaler if scaler and scaler.is_enabled() and scaler._scale is not None else None
