"""Windows in which a communicator's units are gathered in turn on GPUs, and the communicator that
gathers.

A window is memory that all ranks' kernels and copy engines can address (NCCL's symmetric windows).
The tensors of an all-gather must begin at the same place of the same window on all ranks, whatever
each of them has gathered at that time. So a unit's window follows from its number alone: of three,
as a unit is gathered while the one before is computed with and the one after it begins. A unit that
is still gathered in a window that another one needs moves to memory of its own.

Units that stay gathered for long have no window: those that are not resharded after the forward, and
those with other units inside.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ..comm.communicator import Communicator
from ..comm.config import gather_config, launches_in_order
from ..comm.registration import Registration
from ..cuda_state import wait_for_stream
from ..environment import read_switch
from ..errors import InvalidUsage
from ..torch_compat import storage_use_count
from .managed_params import units_in
from .streams import current_stream

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["GatherWindows", "UnitWindow", "get_gather_comm", "get_windows"]

_COUNT = 3
_ALIGNMENT = 256  # bytes; of the groups' places in a window

_gather_comms: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()
_windows: weakref.WeakKeyDictionary[Communicator, GatherWindows] = weakref.WeakKeyDictionary()


def get_gather_comm(comm: Communicator) -> Communicator:
    """Return the communicator that gathers the parameters of a communicator's units; the first call
    may be a collective.

    On GPUs it is one of its own, so that gathers and reductions run at the same time, where NCCL
    keeps two communicators' kernels in one order. Its gathers use the copy engines where NCCL can.
    It is closed with the communicator.
    """
    if comm._on_host or comm.size == 1:
        return comm
    found = _gather_comms.get(comm)
    if found is None and launches_in_order(comm.engine.library):
        found = _gather_comms[comm] = comm.split(0, config=gather_config(comm.engine.library))
        comm._owned.append(found)
    return comm if found is None else found


def get_windows(comm: Communicator) -> GatherWindows | None:
    """Return the windows of a communicator's units; None where there are none: on the host, before
    NCCL 2.27, and with COLLECTIVES_NO_WINDOWS=1, which must be the same on all ranks.
    """
    found = _windows.get(comm)
    if found is None and _has_windows(comm):
        found = _windows[comm] = GatherWindows()
    return found


def _has_windows(comm: Communicator) -> bool:
    library = comm.engine.library
    return not comm._on_host and library.has("ncclCommWindowRegister") and not read_switch("COLLECTIVES_NO_WINDOWS")


class _Window:
    """One window: its memory, and the unit that is or was gathered in it."""

    __slots__ = ("memory", "registration", "stream", "unit", "users")

    def __init__(self, memory: torch.Tensor, registration: Registration):
        self.memory = memory
        self.registration = registration
        self.users = storage_use_count(memory)  # of its storage, while nothing is gathered in it
        self.unit: weakref.ref | None = None  # that is gathered in it
        self.stream = None  # on which that was computed with last


class GatherWindows:
    """The windows of one communicator's units."""

    def __init__(self):
        self._windows: list[_Window] = []
        self._largest = 0  # bytes of the largest unit
        self._suits: weakref.WeakKeyDictionary[Unit, bool] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._windows)

    def takes(self, unit: Unit) -> bool:
        """Whether a unit is gathered in a window; the same on all ranks."""
        suits = self._suits.get(unit)
        if suits is None:
            suits = self._suits[unit] = (
                not unit.persistent
                and _places(unit)[-1] > 0
                and not any(group.quantized_gather is not None for group in unit.groups)
                and len(units_in(unit.module())) == 1
            )
        return suits and unit.reshard_after_forward and unit.custom_all_gather is None

    def prepare(self, unit: Unit) -> None:
        """Empty the unit's window before the ranks agree on the all-gather, which a rank that raises
        would leave to the others. A local call; raises `InvalidUsage` as `acquire`.
        """
        if _places(unit)[-1] <= self._largest:
            self._empty(self._windows[unit.index % _COUNT], unit)

    def acquire(self, unit: Unit, comm: Communicator) -> list[torch.Tensor]:
        """Return the buffer of each of a unit's groups in the unit's window. The first call is a
        collective; so is the first one for a larger unit than all before.

        Raises `InvalidUsage` where a tensor still views what was gathered in the window.
        """
        places = _places(unit)
        if places[-1] > self._largest:
            self._grow(unit, comm)
        window = self._windows[unit.index % _COUNT]
        self._empty(window, unit)
        if window.stream is not None:
            wait_for_stream(window.stream)
        window.unit = weakref.ref(unit)
        return [
            window.memory[begin : begin + group.gathered_bytes].view(group.gather_dtype)
            for group, begin in zip(unit.groups, places, strict=False)
        ]

    def release(self, unit: Unit) -> None:
        """Take a unit's window back, for what comes after the current stream's work."""
        for window in self._windows:
            if window.unit is not None and window.unit() is unit:
                window.unit = None
                window.stream = current_stream(window.memory.device)

    def _grow(self, unit: Unit, comm: Communicator) -> None:
        """Make windows for a unit that is larger than these, and end the registration of these. What
        is gathered in one of these keeps its memory.
        """
        shard = unit.ranks.shard
        units = (each for each in unit.scheduler.units if each.ranks.shard is shard and self.takes(each))
        self._largest = max(_places(each)[-1] for each in units)
        before, self._windows = self._windows, [self._make(comm) for _ in range(_COUNT)]
        for window in before:  # now, as all ranks' gathers in them are behind them
            comm.deregister(window.registration)

    def _make(self, comm: Communicator) -> _Window:
        memory = comm.empty(self._largest, torch.uint8, window=True)
        return _Window(memory, comm.register_window(memory))

    def _empty(self, window: _Window, unit: Unit) -> None:
        """Move the unit out that is gathered in a window; raise where a tensor still views it."""
        before = None if window.unit is None else window.unit()
        if before is not None and before is not unit:
            before.move_gathered()
        if storage_use_count(window.memory) > window.users:
            raise InvalidUsage(
                f"a tensor still views gathered parameters of a unit that was resharded, and {unit!r} needs their "
                "window: clone() what is to stay (module.weight.detach().clone()), or set COLLECTIVES_NO_WINDOWS=1",
                op="fully_shard",
            )


class UnitWindow:
    """The window of one unit, from `acquire` to `release`."""

    def __init__(self, unit: Unit):
        self._unit = weakref.ref(unit)
        self._windows: GatherWindows | None = None

    @property
    def is_used(self) -> bool:
        """Whether the unit is gathered in its window."""
        return self._windows is not None

    def prepare(self) -> None:
        """Empty the window; see `GatherWindows.prepare`."""
        if not self._unit().is_sharded_post_forward and (windows := self._find()) is not None:
            windows.prepare(self._unit())

    def acquire(self, post_forward: bool) -> list[torch.Tensor | None]:
        """Return the buffers in which the unit's groups are gathered; None for each where these are
        not in a window.
        """
        unit = self._unit()
        windows = None if post_forward else self._find()
        if windows is None:
            return [None] * len(unit.groups)
        parts = windows.acquire(unit, get_gather_comm(unit.ranks.shard))
        self._windows = windows
        return parts

    def release(self) -> None:
        """Take the window back, for what comes after the current stream's work."""
        windows, self._windows = self._windows, None
        if windows is not None:
            windows.release(self._unit())

    def _find(self) -> GatherWindows | None:
        """Return the windows of which the unit has one; None where it has none."""
        unit = self._unit()
        if unit.ranks.shard is None or unit.scheduler is None:
            return None
        windows = get_windows(unit.ranks.shard)
        return windows if windows is not None and windows.takes(unit) else None


def _places(unit: Unit) -> list[int]:
    """Return where each group begins in a window, in bytes, and the end."""
    places = [0]
    for group in unit.groups:
        places.append(places[-1] + -(-group.gathered_bytes // _ALIGNMENT) * _ALIGNMENT)
    return places
