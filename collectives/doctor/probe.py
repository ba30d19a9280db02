"""Probe: a Python program or a command in a process of its own, with a time limit.

What it probes (torch, a library, a driver) may crash or hang without harm to the doctor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["PACKAGE_FOLDER", "Outcome", "Probe", "run_command"]

PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MARK = "DOCTOR "  # begins each line of a result
_GRACE = 3.0  # seconds from a probe's own time limit to its kill
_BEGIN = """
import faulthandler, json, sys
faulthandler.enable()
faulthandler.dump_traceback_later({limit!r}, exit=True)
if sys.path[:1] == [""]:
    del sys.path[0]
sys.path.insert(0, {path!r})
def emit(**values):
    print({mark!r} + json.dumps(values), flush=True)
"""
# By these an import of the package records a trace, or changes DDP.
_NOT_INHERITED = ("COLLECTIVES_TIMELINE", "COLLECTIVES_AUTO_CHILDREN")
_OPTIONS = ("-I",) if sys.flags.isolated else ()  # as this process: without PYTHON's variables and the user's packages
_LINES_OF_ERROR = 40  # of a stack, at most


@dataclass
class Outcome:
    """How a probe ended. `values`: all that it emitted. `error`: "" or its last line of error.

    `output`: the end of what it wrote to stderr, a stack where it crashed or hung.
    """

    values: dict = field(default_factory=dict)
    error: str = ""
    output: str = ""


class Probe:
    """A running Python program. `text` calls ``emit(name=value)`` for each result.

    `limit`: seconds, after which it prints its stacks and ends.
    """

    def __init__(self, text: str, limit: float, environment: Mapping[str, str] | None = None):
        begin = _BEGIN.format(limit=limit, path=os.path.dirname(PACKAGE_FOLDER), mark=_MARK)
        self._limit = limit
        given = os.environ if environment is None else environment
        env = {name: value for name, value in given.items() if name not in _NOT_INHERITED}
        self._process = subprocess.Popen(
            [sys.executable, *_OPTIONS, "-c", begin + text], env=env, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",
        )  # fmt: skip

    def wait(self) -> Outcome:
        """Wait for its end, at most for its time limit and some seconds; then it is killed."""
        late = False
        try:
            out, err = self._process.communicate(timeout=self._limit + _GRACE)
        except subprocess.TimeoutExpired:
            late = True
            self._process.kill()
            out, err = self._process.communicate()
        found = Outcome(output="\n".join(err.splitlines()[-_LINES_OF_ERROR:]))
        for line in out.splitlines():
            if line.startswith(_MARK):
                found.values |= json.loads(line[len(_MARK) :])
        code, lines = self._process.returncode, [line for line in err.splitlines() if line.strip()]
        if code and (late or any(line.startswith("Timeout (") for line in lines)):
            found.error = f"not done within {self._limit:g} s"
        elif code < 0:
            found.error = f"the process was killed by signal {-code}"
        elif code:
            found.error = lines[-1] if lines else f"exit status {code}"
        return found

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def run_command(command: Sequence[str], limit: float) -> tuple[str | None, str]:
    """Run a command; return its output, and why there is none.

    The output is None where the command isn't there, fails, or takes longer than `limit` seconds.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit,
                              stdin=subprocess.DEVNULL)  # fmt: skip
    except FileNotFoundError:
        return None, f"{command[0]} is not installed"
    except OSError as error:
        return None, f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} has not ended within {limit:g} s"
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        return None, f"{command[0]}: {lines[-1] if lines else f'exit status {done.returncode}'}"
    return done.stdout, ""
