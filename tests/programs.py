"""Programs in processes that are forked with their imports done: what `subprocess` starts, without the seconds that
importing torch takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.rank_process import program_in_fork
from tests.ranks import fork_server

__all__ = ["FORKING", "ForkedProgram", "run_forked", "run_python"]

FORKING = str(Path(__file__).with_name("forking.py"))  # runs a launcher's program, whose ranks are then forked, too


class ForkedProgram:
    """``python words...`` in a session of its own, forked from the server; it ends with this process.

    `env`: all of its environment. `stdout` and `stderr`: open files of this process.
    """

    def __init__(self, words: list[str], env: dict[str, str], stdout, stderr, cwd):
        logs = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (stdout, stderr)]
        arguments = (words, str(cwd), env, *logs)
        self._words = words
        self._process = fork_server().Process(target=program_in_fork, args=arguments, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def run_python(text: str, *, timeout: float = 120, **env: str) -> subprocess.CompletedProcess:
    """Run a program's text to its end, in a folder of its own, with these variables beside this process's."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(text)
        return run_forked([str(program)], {**os.environ, **env}, timeout, folder)


def run_forked(words: list[str], env: dict[str, str], timeout: float, cwd=None) -> subprocess.CompletedProcess:
    """Run ``python words...`` to its end, with this environment; then what is left of its session is killed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = ForkedProgram(words, env, out, err, cwd or tempfile.gettempdir())
        try:
            code = process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())
