"""The check, before anything else of the package, of what its import needs: torch and the extensions.

``python -m collectives.doctor`` imports the package first, as Python does for every ``-m``. The
doctor must run where that import fails, so it runs from here, before it.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence

from .errors import EngineUnavailable

__all__ = ["check_requirements", "is_doctor"]

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_DOCTOR = os.path.join(_FOLDER, "doctor", "__main__.py")
_EXTENSIONS = ("_nccl", "_kernels")
_WITH_VALUE = "WX"  # Python's options of one letter whose value is the rest of the word, or the next word


def is_doctor(words: Sequence[str]) -> bool:
    """Return whether a command line of Python, as in ``sys.orig_argv``, runs this package's doctor."""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            return False
        letters = "" if word.startswith("--") else word[1:]
        for place, letter in enumerate(letters, 1):  # several in one word, as in "-um collectives.doctor"
            if letter == "m":
                return (letters[place:] or next(rest, "")) == "collectives.doctor"
            if letter in _WITH_VALUE:
                if not letters[place:]:
                    next(rest, "")
                break
    return False


def check_requirements() -> None:
    """Raise `EngineUnavailable`, an ImportError, where torch or an extension isn't there."""
    missing = ""
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        missing = "torch is not installed for this Python: pip install torch"
    for name in _EXTENSIONS:
        if importlib.util.find_spec(f"{__package__}.{name}") is None:
            missing = missing or (
                f"the extension collectives.{name} is not built in {_FOLDER} for this Python: install the package "
                "(pip install -e . in a checkout), or start Python in another folder if it is installed elsewhere"
            )
    if missing:
        raise EngineUnavailable(f"{missing}. All that is wrong: python {_DOCTOR}")


# While Python looks for the module of `-m`, sys.argv[0] is "-m"; in any other program it isn't.
if sys.argv[:1] == ["-m"] and is_doctor(sys.orig_argv):
    runpy.run_path(_DOCTOR, run_name="__main__")  # it ends the process

check_requirements()
