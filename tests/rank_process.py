"""The other side of tests/ranks.py: a process that runs one call after another as some rank, and its context."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import traceback
import types
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOST_LIBRARY = ROOT / "collectives" / "_lib" / "libcollectives_host.so"
PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def light_package():
    """For a while, where the package itself isn't loaded, let its modules be found without running its ``__init__``."""
    stub = None
    if "collectives" not in sys.modules:
        stub = types.ModuleType("collectives")
        stub.__path__ = [str(ROOT / "collectives")]
        sys.modules["collectives"] = stub
    try:
        yield
    finally:
        if stub is not None:
            del sys.modules["collectives"]


def load_binding():
    """``collectives._nccl`` without ``collectives/__init__.py``, which imports torch: about a second a process."""
    if "collectives._nccl" not in sys.modules:
        with light_package():
            importlib.import_module("collectives._nccl")
    return sys.modules["collectives._nccl"]


def open_ranks(library, size: int) -> list:
    """Open all ranks of a communicator in this process, by one thread: what it calls on them must be in groups."""
    unique_id = library.get_unique_id()
    library.group_start()
    comms = [library.comm_init_rank(size, unique_id, rank) for rank in range(size)]
    library.group_end()
    return comms


def bind_submodules():
    """Make up for load_binding: what was imported before the package itself becomes an attribute of the package."""
    package = sys.modules.get("collectives")
    for name, module in list(sys.modules.items()):
        parent, _, leaf = name.rpartition(".")
        if package is not None and parent == "collectives" and not hasattr(package, leaf):
            setattr(package, leaf, module)


def library_path(engine: str) -> str:
    """Where the library of an engine lies: the environment's override, our own build, or the nvidia-nccl wheel."""
    if engine == "host":
        return os.environ.get("COLLECTIVES_HOST_LIBRARY") or str(HOST_LIBRARY)
    override = os.environ.get("COLLECTIVES_NCCL_LIBRARY")
    if override:
        return override
    spec = importlib.util.find_spec("nvidia.nccl")
    folders = list(spec.submodule_search_locations) if spec else []
    for folder in folders:
        path = Path(folder) / "lib" / "libnccl.so.2"
        if path.exists():
            return str(path)
    return "libnccl.so.2"


class RankContext:
    """What a function of run_ranks gets: who it is, a way to talk to the other ranks' tests, and communicators."""

    libraries: dict = {}  # path -> Library; a library stays loaded for the life of the process
    comms: dict = {}  # (engine, pids of all ranks, environment) -> binding's Comm
    communicators: dict = {}

    def __init__(self, pipe: Connection, call: dict):
        self._pipe = pipe
        self.rank: int = call["rank"]
        self.size: int = call["size"]
        self.engine: str = call["engine"]
        self.timeout: float = call["timeout"]
        self.pids: list[int] = call["pids"]
        self.device_name: str = call["device"]
        envs = tuple(tuple(sorted(each.items())) for each in call["envs"])  # of all ranks, so that all have one key
        self._key = (self.engine, tuple(self.pids), envs)
        self._opened: list = []

    @property
    def device(self):
        """The torch device of this rank: the host, its GPU, or its simulated one (``device=`` of run_ranks)."""
        import torch

        if self.device_name == "simulated":
            return torch.device("cuda", self.rank)
        return torch.device("cpu" if self.engine == "host" else "cuda:0")

    def exchange(self, value, ranks=None) -> list:
        """Give ``value`` to every rank of ``ranks`` (default: all) and return theirs, in rank order. Waits for all."""
        ranks = sorted(ranks) if ranks is not None else list(range(self.size))
        self._pipe.send(("exchange", ranks, value))
        kind, body = self._pipe.recv()
        if kind == "broken":
            raise RuntimeError(body)
        return body

    def barrier(self, ranks=None) -> None:
        self.exchange(None, ranks)

    @property
    def binding(self):
        return load_binding()

    @property
    def library(self):
        path = library_path(self.engine)
        if path not in self.libraries:
            self.libraries[path] = load_binding().Library(path)
        return self.libraries[path]

    def unique_id(self) -> bytes:
        """A new unique id, the same on all ranks: rank 0 asks the library for it."""
        return self.exchange(self.library.get_unique_id() if self.rank == 0 else None)[0]

    def new_comm(self, config=None):
        """A communicator of all ranks, not cached. What the function leaves open is aborted after it."""
        comm = self.library.comm_init_rank(self.size, self.unique_id(), self.rank, config=config)
        self._opened.append(comm)
        return comm

    def comm(self):
        """The binding's communicator of all ranks, opened once for these processes, engine and environment."""
        if self._key not in self.comms:
            self.comms[self._key] = self.library.comm_init_rank(self.size, self.unique_id(), self.rank)
        return self.comms[self._key]

    def new_communicator(self, **options):
        """A ``collectives.Communicator`` of all ranks, not cached: the function closes it."""
        import collectives.comm.communicator
        import collectives.comm.engine

        bind_submodules()
        engine = collectives.comm.engine.get_engine(self.engine)
        settings = {"device": self.device, "local_rank": self.rank, "local_size": self.size, **options}
        return collectives.comm.communicator.Communicator(engine, self.unique_id(), self.rank, self.size, **settings)

    def communicator(self):
        """The ``collectives.Communicator`` of all ranks, opened once as :meth:`comm` is."""
        if self._key not in self.communicators:
            self.communicators[self._key] = self.new_communicator()
        return self.communicators[self._key]

    def close(self) -> None:
        for comm in self._opened:
            if comm.handle:
                comm.abort()


def find_function(call: dict):
    sys.path[:] = [*call["path"], *(p for p in sys.path if p not in call["path"])]
    try:
        module = importlib.import_module(call["module"])
    except ModuleNotFoundError as error:
        if error.name is None or not call["module"].startswith(error.name):
            raise
        spec = importlib.util.spec_from_file_location(call["module"], call["file"])
        module = importlib.util.module_from_spec(spec)
        sys.modules[call["module"]] = module
        spec.loader.exec_module(module)
    bind_submodules()
    found = module
    for part in call["name"].split("."):
        found = getattr(found, part)
    return found


def state_of_process() -> dict:
    """What a test may leave behind in a process that serves the next one too, and then breaks another test."""
    found = {"warnings are errors": any(each[0] == "error" and each[1] is None for each in warnings.filters)}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_default_dtype"):
        found["torch's default dtype"] = torch.get_default_dtype()
        found["gradients are computed"] = torch.is_grad_enabled()
        found["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    horovod = sys.modules.get("collectives.horovod")
    found["hvd is initialised"] = horovod is not None and horovod.is_initialized()
    return found


def check_left_behind(before: dict) -> None:
    """Raise where a call has left the process otherwise than it was; the process is then not used again."""
    after = state_of_process()
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    if changed:
        raise AssertionError(f"left behind in the rank's process (before, after): {changed}")


def serve(pipe: Connection) -> None:
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        # The parent enforces the limit; this is for the case that the parent can't.
        faulthandler.dump_traceback_later(call["timeout"] + 60, exit=True)
        before = {key: os.environ.get(key) for key in call["env"]}
        os.environ.update(call["env"])
        ctx = RankContext(pipe, call)
        try:
            function = find_function(call)
            state = state_of_process()
            if call["device"] == "simulated":
                from tests.streams.running import simulated

                with simulated(ctx, call):
                    answer = ("result", function(ctx, *call["args"]))
            else:
                answer = ("result", function(ctx, *call["args"]))
            check_left_behind(state)
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the test decides what they mean
            answer = ("error", error, "".join(traceback.format_exception(error)))
        try:
            ctx.close()
        except Exception as error:
            answer = (
                "error",
                error,
                "closing what the call left open: " + "".join(traceback.format_exception(error)),
            )
        world = sys.modules.get("collectives.rendezvous.world")
        if world is not None:
            world._world = None  # an elastic training leaves it open, and init() would give it to the next call
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        faulthandler.cancel_dump_traceback_later()
        send(pipe, answer)


def send(pipe: Connection, answer: tuple) -> None:
    if answer[0] == "error":
        try:
            with light_package():
                error = pickle.dumps(answer[1])
        except Exception:  # its text goes in any case
            error = None
        answer = ("error", error, answer[2])
    try:
        with light_package():  # pickling an error of ours imports the module that it is from
            pipe.send(answer)
    except BrokenPipeError:
        return
    except Exception as error:
        pipe.send(("error", None, f"the result can't be sent back: {error!r}\n{answer[1]!r}"))


def main(pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if os.environ.get("COLLECTIVES_TEST_SIMULATED_GPU"):  # tests/streams: before torch is imported
        from tests.streams import start

        start.start(int(os.environ["COLLECTIVES_TEST_SIMULATED_GPU"]))
    with light_package():  # then `from collectives.errors import ...` in a test does not import torch
        importlib.import_module("collectives.errors")
    serve(pipe)
    # Interpreter shutdown with communicators still open is not what these processes test.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def become_forked(env: dict[str, str], stdout: str, stderr: str) -> None:
    """Make a child of the fork server a process with this environment and these files; it may have children."""
    if "torch" not in sys.modules:
        raise RuntimeError("the fork server has not imported torch (tests/preloaded.py)")
    os.environ.clear()
    os.environ.update(env)
    written = os.O_WRONLY | os.O_APPEND
    for fd, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), (stdout, written), (stderr, written))):
        file = os.open(path, flags)
        os.dup2(file, fd)
        os.close(file)
    multiprocessing.current_process()._config["daemon"] = False


def main_in_fork(pipe: Connection, log: str, env: dict[str, str]) -> None:
    """Go on as a rank process in a child of the fork server, which ends with the process that runs the tests."""
    become_forked(env, log, log)
    main(pipe)


def program_in_fork(words: list[str], cwd: str, env: dict[str, str], stdout: str, stderr: str) -> None:
    """Go on as ``python words...`` in a child of the fork server."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    become_forked(env, stdout, stderr)
    os.chdir(cwd)
    run_program(words)


def run_program(words: list[str]) -> None:
    """Run ``python words...``, a script or ``-m`` and a module, in this process, which ends with it."""
    is_module = words[0] == "-m"
    words = words[is_module:]
    sys.argv[:] = words
    first = os.getcwd() if is_module else str(Path(words[0]).parent)
    sys.path[:0] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if is_module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except Exception:  # as Python itself does, where multiprocessing's children print it in a way of their own
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing's children leave out


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    from tests import rank_process

    rank_process.main(Connection(int(sys.argv[1])))
