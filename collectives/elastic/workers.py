"""Workers of an elastic job: starts a node's ranks, starts those that died again, and serves the job's store.

``python -m collectives.run --elastic MIN:MAX`` runs it. The ranks agree on their rounds in its store
(`rendezvous.rounds`), so that no rank's end ends the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comm.liveness import identify_process
from ..errors import CollectivesError
from ..rendezvous.launcher_store import LauncherStore, open_store
from ..rendezvous.rounds import RANKS_VARIABLE, STORE_VARIABLE, Rounds

__all__ = ["ElasticJob", "describe_end", "launch"]

_POLL_S = 0.02
_KILL_S = 10.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class ElasticJob:
    """What is started.

    ``command``: of each rank; ``ranks``: of this node; ``nodes``, ``node``: how many there are at
    the start, and this one's number; ``least``, ``most``: ranks of the job; ``restarts``: of this
    node's ranks, all together; ``host``, ``port``: of the store, which node 0 serves; port 0: any.
    """

    command: Sequence[str]
    ranks: int
    nodes: int = 1
    node: int = 0
    least: int = 1
    most: int = 1
    restarts: int = 3
    host: str = "localhost"
    port: int = 0

    @property
    def start(self) -> int:
        """Ranks of the first round."""
        return self.ranks * self.nodes


class _Worker:
    """One rank's process."""

    def __init__(self, job: ElasticJob, local_rank: int, port: int, environ: Mapping[str, str], life: int):
        rank = job.node * job.ranks + local_rank
        self.local_rank, self.rank = local_rank, rank
        place = f"{job.host}:{port}"
        env = {
            **environ, "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(job.start),
            "LOCAL_WORLD_SIZE": str(job.ranks), "MASTER_ADDR": job.host, "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(life),
            STORE_VARIABLE: place, RANKS_VARIABLE: f"{job.start}:{job.least}:{job.most}",
        }  # fmt: skip
        self.process = subprocess.Popen(list(job.command), env=env)
        self.identity = identify_process(self.process.pid)
        self.life = life


def launch(job: ElasticJob, log=None) -> int:
    """Run a node's part of an elastic job; return its exit code.

    Blocks until all ranks of this node have ended. 0 where ranks have ended with 0, and no rank of
    the last round failed after that; else the code of the first one that failed (128 + its number
    for a signal).
    ``log``: a function of one line. Raises `TransportError` where the store can't be opened.
    """
    log = log or (lambda text: print(f"collectives.run: {text}", file=sys.stderr, flush=True))
    store = open_store(f"{job.host}:{job.port}", job.node == 0)
    rounds = Rounds(LauncherStore(store, [f"{job.host}:{store.port}"]), job.start, job.least, job.most)
    workers = [_Worker(job, number, store.port, os.environ, 0) for number in range(job.ranks)]
    stopped: list[int] = []
    before = {number: signal.signal(number, lambda got, _: stopped.append(got)) for number in _SIGNALS}
    try:
        return _watch(job, rounds, workers, store.port, stopped, log)
    finally:
        _end(workers)
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _watch(job: ElasticJob, rounds: Rounds, workers: list[_Worker], port: int, stopped: list[int], log) -> int:
    restarts, done, failure, failed_after = job.restarts, False, 0, 0
    while workers:
        if stopped:
            log(f"ended by {signal.Signals(stopped[0]).name}, and all ranks with it")
            return 128 + stopped[0]
        for worker in list(workers):
            code = worker.process.poll()
            if code is None:
                continue
            workers.remove(worker)
            if code == 0:
                done = True
                _notify(rounds.end, log)
                continue
            gone = not _notify(lambda identity=worker.identity: rounds.report_death(identity), log)
            how, who = describe_end(code), f"rank {worker.rank} (process {worker.process.pid})"
            if done:  # after the training, or it waited to join
                if not gone and _takes_part(worker, rounds, log):
                    log(f"{who} {how}, after another rank's program has ended with 0")
                    failed_after = failed_after or _exit_code(code)
            elif gone:
                log(f"{who} {how}; the job has ended with its store")
                failure = failure or _exit_code(code)
            elif restarts > 0:
                restarts -= 1
                log(f"{who} {how}; it is started again, {restarts} times more")
                workers.append(_Worker(job, worker.local_rank, port, os.environ, worker.life + 1))
            else:
                log(f"{who} {how}; it is not started again (--max-restarts)")
                failure = failure or _exit_code(code)
        if workers and not done and not restarts and job.nodes == 1 and len(workers) < job.least:
            log(f"{len(workers)} of at least {job.least} ranks are left: the job ends")
            return failure or 1
        time.sleep(_POLL_S)
    return failed_after if done else failure


def _takes_part(worker: _Worker, rounds: Rounds, log) -> bool:
    """Return whether a worker was a member of the newest round."""
    members: list[str] = []
    _notify(lambda: members.extend(rounds.newest_processes() or []), log)
    return worker.identity in members


def describe_end(code: int) -> str:
    """Return how a process has ended that has this return code."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _notify(call, log) -> bool:
    """Write to the store; return whether it is there: it isn't when node 0's launcher has ended."""
    try:
        call()
    except CollectivesError as error:
        log(str(error))
        return False
    return True


def _end(workers: list[_Worker]) -> None:
    """End what still runs: SIGTERM, then SIGKILL."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.terminate()
    until = time.monotonic() + _KILL_S
    for worker in workers:
        try:
            worker.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
