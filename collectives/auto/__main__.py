"""``python -m collectives.auto script.py ...``: run a program with ``collectives.auto``."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import traceback

from .settings import read_settings

__all__ = []

_USAGE = """usage: python -m collectives.auto SCRIPT [ARGUMENT ...]
       python -m collectives.auto -m MODULE [ARGUMENT ...]

Run a program as python itself would, with DDP models sped up as by `import collectives.auto`.
Python processes that the program starts get it, too (those of this environment, unless started with -I, -E or -S).
Under a launcher: torchrun --nproc-per-node 2 -m collectives.auto SCRIPT [ARGUMENT ...]
Settings: COLLECTIVES_WIRE, COLLECTIVES_STREAMS and others, listed in docs/environment.md."""


def main() -> None:
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        sys.exit(0)
    as_module = words[:1] == ["-m"]
    words = words[1:] if as_module else words
    _reach_children()
    if not words or words[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = words
    if as_module:
        sys.excepthook = _make_excepthook(_file_of(words[0]))
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        if not os.path.exists(words[0]):
            print(f"python -m collectives.auto: can't open file {words[0]!r}", file=sys.stderr)
            sys.exit(2)
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # there python -m has put the working folder
        sys.excepthook = _make_excepthook(words[0])
        runpy.run_path(words[0], run_name="__main__")


def _reach_children() -> None:
    """Have the Python processes that the program starts import ``collectives.auto``, too.

    Launchers inside of a program start the other ranks by ``sys.argv``, which no longer has ``-m
    collectives.auto``.
    """
    if read_settings() is None:
        return
    folders = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "children")]
    folders += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folders[0]]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.environ["COLLECTIVES_AUTO_CHILDREN"] = sys.prefix


def _file_of(module: str) -> str | None:
    """Return the file that ``-m`` runs.

    None where the module doesn't exist, which runpy reports better.
    """
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{module}.__main__")
    except ImportError:
        return None
    return None if found is None else found.origin


def _make_excepthook(path: str | None):
    """Return an excepthook that prints no frames above the program's own."""

    def print_program_trace(kind, error, trace):
        first = trace
        while first is not None and first.tb_frame.f_code.co_filename != path:
            first = first.tb_next
        traceback.print_exception(kind, error, first or trace)

    return print_program_trace


main()
