"""Ranks as real processes for tests: ``run_ranks(function, n, ...)`` calls it on n of them and collects the results.

The processes are reused, and forked from a server that has imported torch, since that takes about a second. Every
call has a hard time limit: past it the Python stacks of all ranks become part of the failure, and the processes are
killed and replaced. Usage::

    from tests.ranks import run_ranks

    def add(ctx, count):                 # a function of an importable module; runs once on each rank
        comm = ctx.communicator()        # collectives.Communicator, cached; ctx.comm() is the binding's own Comm
        tensor = torch.full((count,), float(ctx.rank))
        comm.all_reduce(tensor)
        return tensor[0].item()          # pickled back to the test

    def test_add():
        assert run_ranks(add, 3, 10) == [3.0, 3.0, 3.0]
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from tests import rank_process

__all__ = ["Died", "RankFailure", "fork_server", "run_ranks"]

ROOT = Path(__file__).resolve().parent.parent
ENTRY = Path(__file__).with_name("rank_process.py")
# Once one rank has failed, the others get this long (seconds) to end by themselves before they are dumped and killed.
GRACE = 3.0
LOG_TAIL = 12_000


class RankFailure(AssertionError):
    """A rank raised, hung or died; the text holds every rank's traceback or stack. ``.errors``: rank -> exception."""

    def __init__(self, text, errors=None):
        super().__init__(text)
        self.errors = errors or {}


@dataclasses.dataclass(frozen=True)
class Died:
    """The result of a rank that ended its process, where the test expected that. ``signal`` is 0 after a plain exit."""

    signal: int
    exitcode: int


def load_exception(pickled: bytes | None) -> BaseException | None:
    """The exception itself where it can be rebuilt in this process; its text has come beside it."""
    try:
        return pickle.loads(pickled) if pickled else None
    except Exception:
        return None


# What each rank process has set. Libraries read these once, so the fork server has them, too.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@functools.cache
def fork_server():
    """Start the fork server; return its multiprocessing context."""
    context = multiprocessing.get_context("forkserver")
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    before = {key: os.environ.get(key) for key in (*ONE_THREAD, "PYTHONPATH")}
    os.environ.update(ONE_THREAD, PYTHONPATH=os.pathsep.join([str(ROOT), before["PYTHONPATH"] or ""]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    return context


def _is_read_by_collectives_alone(variable: str) -> bool:
    """The fork server has torch and not collectives, which may so still read a variable for the first time."""
    return variable.startswith("COLLECTIVES_") and variable not in SIMULATED


class Worker:
    """One rank process, its pipe and its log (an unlinked file that gets its stdout and stderr).

    It is forked from the server, unless torch or a library must find one of the variables `env` when it is loaded.
    """

    def __init__(self, env: dict[str, str]):
        parent, child = Pipe()
        self.log = tempfile.TemporaryFile()
        settings = {**os.environ, **ONE_THREAD, **env}
        self._forked = all(map(_is_read_by_collectives_alone, env))
        if self._forked:
            log = f"/proc/{os.getpid()}/fd/{self.log.fileno()}"
            self.process = fork_server().Process(
                target=rank_process.main_in_fork, args=(child, log, settings), daemon=True
            )
            self.process.start()
        else:
            self.process = subprocess.Popen(
                [sys.executable, str(ENTRY), str(child.fileno())],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env=settings,
            )
        child.close()
        self.pipe: Connection = parent
        self.log_start = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.is_alive() if self._forked else self.process.poll() is None

    def _wait(self) -> int:
        """Wait for the process's end; return its exit code, negative for a signal."""
        if not self._forked:
            return self.process.wait()
        self.process.join()
        return self.process.exitcode

    def dump_stacks(self) -> None:
        """Have the process write its threads' stacks into its log."""
        if self.alive():
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        if self.alive():
            self.process.kill()
        self._wait()
        self.pipe.close()
        self.log.close()

    def log_text(self) -> str:
        """What the process wrote since its present call began."""
        size = os.fstat(self.log.fileno()).st_size
        start = max(self.log_start, size - LOG_TAIL)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace").strip()

    def died(self) -> Died:
        code = self._wait()
        return Died(signal=max(0, -code), exitcode=max(0, code))


class Pool:
    """Long-lived workers; a run with n ranks takes the first n. Workers of a failed run are killed, never reused.

    `start_env`: what is set in all of them before they start, by rank; the last one holds for all that follow.
    """

    def __init__(self, start_env: tuple[dict[str, str], ...] = ({},)):
        self.start_env = start_env
        self.workers: list[Worker] = []
        self.owner = os.getpid()

    def take(self, n: int) -> list[Worker]:
        of_its_rank = len(self.start_env) > 1 or SIMULATED.items() <= self.start_env[0].items()
        if of_its_rank and any(not w.alive() for w in self.workers):
            self.drop(list(self.workers))  # each has its rank's variables, or its GPU, and can't become another rank
        self.drop([w for w in self.workers if not w.alive()])
        while len(self.workers) < n:
            self.workers.append(Worker(_of_rank(self.start_env, len(self.workers))))
        return self.workers[:n]

    def drop(self, workers: list[Worker]) -> None:
        self.workers = [w for w in self.workers if w not in workers]
        for worker in workers:
            worker.kill()

    def close(self) -> None:
        if os.getpid() == self.owner:
            self.drop(list(self.workers))


# Of a process with simulated GPUs (tests/streams): each rank has one, and there are more.
SIMULATED = {"COLLECTIVES_TEST_SIMULATED_GPU": "4"}
_pools: dict[tuple, Pool] = {}  # by what was set before their processes started


def _of_rank(envs, rank: int) -> dict[str, str]:
    return envs[min(rank, len(envs) - 1)]


def _by_rank(env) -> tuple[dict[str, str], ...]:
    """Return one dictionary of texts for each rank; one alone holds for all."""
    envs = (env or {},) if isinstance(env, dict | None) else tuple(env)
    return tuple({key: str(value) for key, value in each.items()} for each in envs)


def _pool_of(start_env) -> Pool:
    envs = _by_rank(start_env)
    key = tuple(tuple(sorted(each.items())) for each in envs)
    if key not in _pools:
        _pools[key] = Pool(envs)
        atexit.register(_pools[key].close)
    return _pools[key]


class Run:
    """One call of a function on n ranks: feeds the pipes, answers exchanges, enforces the time limit."""

    def __init__(self, workers: list[Worker], timeout: float, deaths: frozenset[int]):
        self.workers = workers
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.deaths = deaths
        self.results: dict[int, object] = {}
        self.errors: dict[int, tuple[object, str]] = {}  # rank -> (exception or None, text)
        self.exchanges: dict[tuple[int, ...], dict[int, object]] = {}
        self.late: set[int] = set()

    def start(self, call: dict) -> None:
        for rank, worker in enumerate(self.workers):
            worker.log_start = os.fstat(worker.log.fileno()).st_size
            worker.pipe.send({**call, "rank": rank, "env": _of_rank(call["envs"], rank)})

    def open_ranks(self) -> list[int]:
        return [r for r in range(len(self.workers)) if r not in self.results and r not in self.errors]

    def finish(self) -> None:
        """Serve the ranks until each has answered or died, or the time is over."""
        failed_at = None
        while open_ranks := self.open_ranks():
            now = time.monotonic()
            if self.errors and failed_at is None:
                failed_at = now
            limit = self.deadline if failed_at is None else min(self.deadline, failed_at + GRACE)
            if now >= limit:
                self.late = set(open_ranks)
                return
            ready = wait([self.workers[r].pipe for r in open_ranks], limit - now)
            for rank in open_ranks:
                if self.workers[rank].pipe in ready:
                    self.receive(rank)

    def receive(self, rank: int) -> None:
        try:
            kind, *body = self.workers[rank].pipe.recv()
        except (EOFError, ConnectionResetError):
            self.rank_died(rank)
            return
        if kind == "result":
            self.results[rank] = body[0]
        elif kind == "error":
            self.errors[rank] = (load_exception(body[0]), body[1])
        elif kind == "exchange":
            self.exchanges.setdefault(tuple(body[0]), {})[rank] = body[1]
        self.answer_exchanges()

    def rank_died(self, rank: int) -> None:
        died = self.workers[rank].died()
        if rank in self.deaths:
            self.results[rank] = died
        else:
            how = f"killed by {signal.Signals(died.signal).name}" if died.signal else f"exit code {died.exitcode}"
            self.errors[rank] = (None, f"the process ended unexpectedly ({how})")
        self.answer_exchanges()

    def answer_exchanges(self) -> None:
        open_ranks = self.open_ranks()
        for ranks, values in list(self.exchanges.items()):
            gone = [r for r in ranks if r not in values and r not in open_ranks]
            if len(values) == len(ranks):
                answer = ("values", [values[r] for r in ranks])
            elif gone:
                answer = ("broken", f"rank(s) {gone} ended without taking part in the exchange between {list(ranks)}")
            else:
                continue
            del self.exchanges[ranks]
            for r in values:
                if r in open_ranks:
                    self.workers[r].pipe.send(answer)

    def dump_late(self) -> dict[int, str]:
        """Stacks of the ranks that did not answer, written by faulthandler into their logs."""
        for rank in self.late:
            self.workers[rank].dump_stacks()
        time.sleep(0.7)
        return {rank: self.workers[rank].log_text() for rank in self.late}

    def failure(self, title: str) -> RankFailure:
        parts = [title]
        stacks = self.dump_late()
        for rank in range(len(self.workers)):
            if rank in self.errors:
                log = self.workers[rank].log_text()
                parts.append(
                    f"---- rank {rank}: {self.errors[rank][1].rstrip()}" + (f"\nits output: {log}" if log else "")
                )
            elif rank in self.late:
                parts.append(f"---- rank {rank} had not ended:\n{stacks[rank]}")
            elif isinstance(self.results[rank], Died):
                parts.append(f"---- rank {rank} ended its process, as expected: {self.results[rank]}")
            else:
                parts.append(f"---- rank {rank} ended well")
        errors = {rank: exception for rank, (exception, _) in self.errors.items()}
        return RankFailure("\n".join(parts), errors)


def run_ranks(fn, n, *args, timeout=60.0, env=None, engine="host", fresh=False, deaths=(), start_env=None, device=""):
    """Call ``fn(ctx, *args)`` on n rank processes and return the n results, in rank order.

    ``ctx`` is a :class:`tests.rank_process.RankContext`. ``fn`` is a module-level function. ``timeout``: seconds
    for the whole call, start of the processes included. ``env``: set in the processes during the call; with
    ``fresh=True`` before they start, in processes of their own that are ended afterwards. ``start_env``: set before the
    processes start, which are kept for later calls with the same one: for libraries that read a variable once. Either
    is a dictionary for all ranks or a list with one for each rank. ``deaths``: ranks that are to end their process,
    whose result is a :class:`Died`. ``device="simulated"``: in processes with simulated GPUs, with engine "nccl" in
    front of the host engine (tests/streams/README.md). Raises RankFailure when a rank raises, hangs, dies unexpectedly,
    or was to die and lived.
    """
    __tracebackhide__ = True
    if device == "simulated":
        from tests.streams.build import build_all

        build_all()
        engine, start_env = "nccl", {**SIMULATED, **(start_env or {})}
    envs, deaths = _by_rank(env), frozenset(deaths)
    pool = _pool_of(start_env)
    if fresh:
        workers = [Worker({**_of_rank(pool.start_env, r), **_of_rank(envs, r)}) for r in range(n)]
    else:
        workers = pool.take(n)
    run = Run(workers, timeout, deaths)
    code = fn.__code__
    keep = False
    try:
        run.start(
            {
                "module": fn.__module__,
                "file": code.co_filename,
                "name": fn.__qualname__,
                "args": args,
                "size": n,
                "engine": engine,
                "device": device,
                "envs": envs,
                "timeout": timeout,
                "path": list(sys.path),
                "pids": [w.pid for w in workers],
            }
        )
        run.finish()
        what = f"{fn.__module__}.{fn.__qualname__} on {n} ranks"
        if run.errors:
            raise run.failure(f"{what}: failed on rank(s) {sorted(run.errors)}")
        if run.late:
            raise run.failure(f"{what}: rank(s) {sorted(run.late)} not done after {timeout:g} s")
        survived = [r for r in deaths if not isinstance(run.results[r], Died)]
        if survived:
            raise run.failure(f"{what}: rank(s) {survived} were to die and lived")
        keep = not fresh
        return [run.results[r] for r in range(n)]
    finally:
        if not keep:
            # A process with simulated GPUs keeps its rank, and so its GPU.
            pool.drop([*pool.workers, *workers] if device else workers)
