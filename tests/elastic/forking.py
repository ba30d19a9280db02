"""``python -m collectives.run`` whose ranks are forked with their imports done, run by tests as a program.

It is the launcher itself, but that a rank's Python, which takes seconds to import torch, is not started: a process
that was forked before the launcher began forks itself. The ranks are the launcher's children, as those of `Popen` are.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys

from tests.rank_process import run_program

PR_SET_CHILD_SUBREAPER = 36


class Forker:
    """A process that forks programs, which become children of the process that made this one."""

    def __init__(self):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._pipe, theirs = multiprocessing.Pipe()
        if os.fork() == 0:
            self._pipe.close()
            serve(theirs)
        theirs.close()

    def start(self, words: list[str], env: dict[str, str]) -> int:
        """Start ``python words...`` with this environment; return its process's number."""
        self._pipe.send((words, env))
        return self._pipe.recv()


def serve(pipe) -> None:
    """Fork what is asked for until the other side ends."""
    while True:
        try:
            words, env = pipe.recv()
        except EOFError:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                become(words, env, (reading, writing, pipe.fileno()))
            os.write(writing, pid.to_bytes(4, "little"))
            os._exit(0)  # its child is now the launcher's
        os.close(writing)
        pid = int.from_bytes(os.read(reading, 4), "little")
        os.close(reading)
        os.waitpid(between, 0)
        pipe.send(pid)


def become(words: list[str], env: dict[str, str], fds) -> None:
    """Go on as ``python words...``."""
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    process = multiprocessing.get_context("fork").Process(target=run_program, args=(words,))
    os._exit(process._bootstrap())


class ForkedPopen(subprocess.Popen):
    """A Popen of ``python -u words...`` that forks."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_):
        assert args[:2] == [sys.executable, "-u"]
        self.pid = forker.start(args[2:], env)
        self._child_created = True


if __name__ == "__main__":
    forker = Forker()  # before anything of ours is imported
    from collectives import run

    subprocess.Popen = ForkedPopen
    sys.exit(run.main(sys.argv[1:]))
