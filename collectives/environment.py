"""Environment variables of this package: their names, and functions that read and check them.

docs/environment.md says what each one sets. A variable whose values only one module knows is read
in that module.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping

from .errors import InvalidArgument

__all__ = ["KNOWN", "check_variables", "find_unknown", "parse_whole_number", "read_label", "read_switch"]

_PREFIX = "COLLECTIVES_"
KNOWN = frozenset(
    _PREFIX + name
    for name in """
    AUTO AUTO_CHILDREN BLOCK CHECK CHUNK CMA ELASTIC_RANKS ELASTIC_STORE ENGINE
    FLIGHT_DIR FLIGHT_LINES HOST_CHUNK HOST_ID HOST_LIBRARY ISA JOB_ID KERNEL_THREADS NCCL_LIBRARY NO_FLIGHT
    OVERLAP REQUIRE_GPU SECRET SECRET_FILE STREAMS TIMELINE WIRE
    """.split()
)
_OTHERS = ("COLLECTIVES_TEST_",)  # the tests' own
_LONGEST_LABEL = 255

_warned: set[str] = set()


def read_switch(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return the value of a variable that is 0 or 1; not set or empty means 0.

    Raises `InvalidArgument` for anything else.
    """
    value = (os.environ if environ is None else environ).get(name, "").strip()
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"{name} must be 0 or 1, not {value!r}")
    return value == "1"


def read_label(name: str) -> str:
    """Return the value of a variable that is a name, "" where it isn't set.

    Raises `InvalidArgument` where it is set and empty, or too long.
    """
    value = os.environ.get(name)
    if value is None:
        return ""
    value = value.strip()
    if not 0 < len(value) <= _LONGEST_LABEL:
        wrong = f"has more than {_LONGEST_LABEL} letters" if value else "is set and empty: unset it, or give it a value"
        raise InvalidArgument(f"{name} {wrong}")
    return value


def parse_whole_number(text: str, least: int, most: int) -> int | None:
    """Return the whole number that a text is; None where it is none, or not from `least` to `most`."""
    if not (text.isascii() and text.isdigit() and len(text) < 11 and least <= int(text) <= most):
        return None
    return int(text)


def check_variables() -> None:
    """Check the variables that all communicators use; warn once of each unknown COLLECTIVES_ one.

    Raises `InvalidArgument` for invalid values.
    """
    read_switch("COLLECTIVES_CHECK")
    read_label("COLLECTIVES_HOST_ID")
    for name, near in find_unknown(os.environ).items():
        if name not in _warned:
            _warned.add(name)
            hint = f": is {near} meant?" if near else ""
            # A later version may know it, so it is no error.
            warnings.warn(f"the variable {name} is unknown to this version and sets nothing{hint}", stacklevel=3)


def find_unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the COLLECTIVES_ variables that are set and unknown, and the known name that each one
    resembles, "" where none does.
    """
    found = {}
    known = [each.removeprefix(_PREFIX) for each in sorted(KNOWN)]
    for name in environ:
        if name.startswith(_PREFIX) and name not in KNOWN and not name.startswith(_OTHERS):
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1)
            found[name] = _PREFIX + near[0] if near else ""
    return found
