"""The command. It also runs by its path, ``python .../collectives/doctor/__main__.py``."""

from __future__ import annotations

import os
import sys
import types

__all__ = []


def _add_package() -> None:
    """Make ``collectives`` a package whose ``__init__`` has not run: that one imports torch and the
    extensions, which may be what is broken.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        sys.path.pop(0)  # this folder's modules are no top-level modules
    package = types.ModuleType("collectives")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["collectives"] = package


if __name__ == "__main__":
    if "collectives" not in sys.modules:
        _add_package()
    from collectives.doctor.command import main

    sys.exit(main())
