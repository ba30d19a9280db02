"""``python -m collectives.horovod program.py ...``: run a Horovod program under any launcher."""

from __future__ import annotations

import os
import runpy
import sys

from . import install

__all__ = ["main"]

_USAGE = """usage: python -m collectives.horovod PROGRAM.py [arguments]
       python -m collectives.horovod -m MODULE [arguments]

Runs a program that imports horovod.torch on this package. Put it between the launcher and the program:
mpirun -np 4 python -m collectives.horovod train.py --epochs 3
"""


def main(arguments: list[str]) -> None:
    """Install Horovod's names and run a program as Python does.

    Exits with 2 for arguments that name none.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return
    module = arguments[:1] == ["-m"]
    program = arguments[1:] if module else arguments
    if not program or (not module and program[0].startswith("-")):
        print(_USAGE, end="", file=sys.stderr)
        raise SystemExit(2)
    if not module and not os.path.exists(program[0]):
        missing = f"can't open file {program[0]!r}: no such file in {os.getcwd()}"
        print(f"python -m collectives.horovod: {missing}", file=sys.stderr)
        raise SystemExit(2)
    install()
    sys.argv = program
    if module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    # The first entry after install's own is the current folder, from -m. A script has its own
    # folder there.
    folder = os.path.dirname(os.path.realpath(program[0]))
    if not getattr(sys.flags, "safe_path", False):
        current = next((at for at, entry in enumerate(sys.path) if entry in ("", os.getcwd())), None)
        if current is not None:
            del sys.path[current]
        sys.path.insert(0, folder)
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
