"""Settings of ``collectives.auto``: checked environment variables, as arguments of `HookState`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from ..compression.base import parse_wire
from ..ddp.hook import HookState
from ..environment import check_variables, read_switch
from ..errors import InvalidArgument
from ..layout import WIRE_BLOCKS

__all__ = ["read_settings", "read_timeout"]

_TIMEOUT = "COLLECTIVES_AUTO_TIMEOUT"
_TIMEOUT_S = 300.0
_PREFIX = "COLLECTIVES_"


def read_settings(environ: Mapping[str, str] | None = None) -> dict | None:
    """Return `HookState`'s arguments for the variables that are set.

    None where ``COLLECTIVES_AUTO`` is 0. `environ`: default ``os.environ``; an empty value counts
    as unset. Raises `InvalidArgument`, which names the variable, for a value that can't be used,
    and for values that can't be combined.
    """
    if environ is None:
        environ = os.environ
        check_variables()
    values = {name: environ.get(_PREFIX + name, "").strip() for name in ("AUTO", *_READERS)}
    if values["AUTO"] and not _switch("AUTO", values["AUTO"]):
        return None
    read_timeout(environ)
    settings = {name.lower(): reader(name, values[name]) for name, reader in _READERS.items() if values[name]}
    if settings:
        try:
            HookState(**settings)
        except InvalidArgument as error:
            variables = ", ".join(f"{_PREFIX}{name.upper()}={values[name.upper()]}" for name in settings)
            raise InvalidArgument(f"{variables}: {error.message}") from error
    return settings


def read_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Return the seconds that a rank waits for others to come to the same step.

    Raises `InvalidArgument` where the variable has no such value.
    """
    value = (os.environ if environ is None else environ).get(_TIMEOUT, "").strip()
    try:
        seconds = float(value) if value else _TIMEOUT_S
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidArgument(f"{_TIMEOUT} must be a number of seconds above 0, not {value!r}")
    return seconds


def _switch(name: str, value: str) -> bool:
    return read_switch(_PREFIX + name, {_PREFIX + name: value})


def _wire(name: str, value: str) -> str:
    try:
        parse_wire(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{_PREFIX}{name}: {error.message}") from error
    return value


def _streams(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 64):
        raise InvalidArgument(f"{_PREFIX}{name} must be a whole number from 1 to 64, not {value!r}")
    return int(value)


def _block(name: str, value: str) -> int:
    if value not in map(str, WIRE_BLOCKS):
        raise InvalidArgument(f"{_PREFIX}{name} must be one of {', '.join(map(str, WIRE_BLOCKS))}, not {value!r}")
    return int(value)


_READERS = {
    "WIRE": _wire,
    "STREAMS": _streams,
    "BLOCK": _block,
    "ERROR_FEEDBACK": _switch,
    "STOCHASTIC_ROUNDING": _switch,
}
