"""A launcher's program whose ranks are forked with their imports done, run by tests as a program itself::

    python tests/forking.py -m collectives.run -n 2 script.py ...      # or a script in place of -m and a module

It is the launcher itself, but that the Python of a rank, which takes seconds to import torch, is not started: a process
that was forked before the launcher began forks itself. The ranks are the launcher's children, as those of `Popen` are.
"""

from __future__ import annotations

import ctypes
import inspect
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing import reduction

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import registry

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

    def start(self, words: list[str], env: dict[str, str], new_session: bool, files: dict[int, int]) -> int:
        """Start ``python words...`` with this environment; return its process's number.

        `files`: its number of a file -> ours; the others are this process's.
        """
        self._pipe.send((words, env, new_session, list(files)))
        for file in files.values():
            reduction.send_handle(self._pipe, file, None)
        return self._pipe.recv()


def serve(pipe) -> None:
    """Fork what is asked for until the other side ends."""
    while True:
        try:
            words, env, new_session, numbers = pipe.recv()
        except EOFError:
            os._exit(0)
        files = [reduction.recv_handle(pipe) for _ in numbers]
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            between, pid = os.getpid(), os.fork()
            if pid == 0:
                while os.getppid() == between:  # its parent's end may be a signal to it, and that is the launcher's
                    time.sleep(0.0005)
                for file, number in zip(files, numbers, strict=True):
                    os.dup2(file, number)
                become(words, env, new_session, (reading, writing, pipe.fileno(), *files))
            os.write(writing, pid.to_bytes(4, "little"))
            os._exit(0)  # its child is now the launcher's
        for file in (writing, *files):
            os.close(file)
        pid = int.from_bytes(os.read(reading, 4), "little")
        os.close(reading)
        os.waitpid(between, 0)
        pipe.send(pid)


def become(words: list[str], env: dict[str, str], new_session: bool, fds) -> None:
    """Go on as ``python words...``."""
    for fd in fds:
        os.close(fd)
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    process = multiprocessing.get_context("fork").Process(target=run_program, args=(words,))
    os._exit(process._bootstrap())


class ForkedPopen(subprocess.Popen):
    """A Popen that forks where it is to start a script or a module by this Python."""

    def _execute_child(self, *given):
        call = inspect.signature(super()._execute_child).bind(*given).arguments
        command = call["args"]
        words = command[2:] if list(command[1:2]) == ["-u"] else command[1:]
        if isinstance(command, str) or command[0] != sys.executable or words[0] == "-c":
            super()._execute_child(*given)
            return
        assert not (call["preexec_fn"] or call["pass_fds"] or call["cwd"] or call["shell"]), command
        files = {0: call["p2cread"], 1: call["c2pwrite"], 2: call["errwrite"]}
        files = {number: file for number, file in files.items() if file != -1}
        env = dict(os.environ if call["env"] is None else call["env"])
        self.pid = forker.start(list(words), env, call["start_new_session"], files)
        self._child_created = True
        self._close_pipe_fds(*(call[each] for each in "p2cread p2cwrite c2pread c2pwrite errread errwrite".split()))


def callers(context: int = 1) -> list[inspect.FrameInfo]:
    """What `inspect.stack` returns, without lines of source.

    torch's launcher asks for the names of its callers at each step of a rendezvous, and `inspect.stack` goes through
    all modules for each line: two seconds of a launcher with what the fork server has imported.
    """
    frame, found = sys._getframe(1), []
    while frame is not None:
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return found


if __name__ == "__main__":
    forker = Forker()  # before anything of ours is imported
    subprocess.Popen = subprocess_handler.Popen = ForkedPopen
    inspect.stack = callers
    registry._register_out_of_tree_handlers()  # of this program's PYTHONPATH: torch was imported before it was set
    run_program(sys.argv[1:])
