"""Agent of torchrun that starts a worker again without the others.

torch's agent ends all workers of its node when one has failed, and starts them together. This one
starts the one that has failed; the others go on, and it joins them at their next commit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError
from torch.distributed.launcher import api as launcher

from ..comm.liveness import identify_process
from ..errors import InvalidArgument, TransportError
from ..rendezvous.launcher_store import StoreMoved
from ..torch_patches import patch_attribute
from .agent_rendezvous import BACKEND, AgentRendezvous
from .workers import describe_end

__all__ = ["ElasticAgent", "install_agent"]

_LOG = logging.getLogger("collectives.elastic")
_POLL_S = 0.1


@functools.cache
def install_agent() -> None:
    """Have torchrun make an `ElasticAgent` in this process, where the rendezvous is ours."""
    patch_attribute(launcher, "LocalElasticAgent", _make_agent, "it ends all workers of a node when one fails")


def _make_agent(spec, *args, **kwargs) -> LocalElasticAgent:
    cls = ElasticAgent if isinstance(spec.rdzv_handler, AgentRendezvous) else LocalElasticAgent
    return cls(spec, *args, **kwargs)


@dataclass
class _Running:
    """A worker that runs: its numbers, torch's handler of its process, and how often it was started again."""

    local_rank: int
    rank: int
    handler: object
    identity: str = ""
    life: int = 0

    def __post_init__(self):
        self.identity = identify_process(self.handler.proc.pid)


class ElasticAgent(LocalElasticAgent):
    """torch's agent, which starts only those workers again that have failed.

    The limit of ``--max-restarts`` is that of all workers of this node together. A worker that is
    not started again any more is done without, as long as the job has its least number of ranks.
    """

    def __init__(self, spec, *args, **kwargs):
        if not isinstance(spec.entrypoint, str):
            raise InvalidArgument(f"--rdzv-backend {BACKEND} starts programs, and not functions (--run-path)")
        super().__init__(spec, *args, **kwargs)
        self._job: AgentRendezvous = spec.rdzv_handler
        self._job.ranks = spec.local_world_size
        self._watched = None  # torch's context of the workers that are watched
        self._running: list[_Running] = []
        self._failures: dict[int, ProcessFailure] = {}  # of workers that are not started again
        self._lost = False  # one of them failed while the job was running
        self._store_gone: tuple[float, TransportError] | None = None  # since when, and the error
        self._moves = 0  # of the store, that this agent has followed

    # ---- What torch's loop calls.

    def _assign_worker_ranks(self, store, group_rank, group_world_size, spec) -> list[Worker]:
        """Return the workers, with ranks for the order of the first round."""
        count, size = spec.local_world_size, group_world_size * spec.local_world_size
        return [
            Worker(
                local_rank=number, global_rank=group_rank * count + number, role_rank=group_rank * count + number,
                world_size=size, role_world_size=size,
            )
            for number in range(count)
        ]  # fmt: skip

    def _monitor_workers(self, worker_group) -> RunResult:
        if self._watched is not self._pcontext:
            self._begin(worker_group)
        try:
            for worker in list(self._running):
                code = worker.handler.proc.poll()
                if code is not None:
                    self._running.remove(worker)
                    self._take_end(worker_group, worker, code)
            self._follow_store()
            if not self._job.agents.keep_alive([worker.identity for worker in self._running]):
                return self._enter_again()
            return self._judge(worker_group)
        except StoreMoved:
            return RunResult(WorkerState.HEALTHY)  # the next call follows it
        except TransportError as error:
            return self._go_on_without_store(worker_group, error)

    def _exit_barrier(self) -> None:
        """Serve the store until the other agents have ended."""
        until = time.monotonic() + self._exit_barrier_timeout
        with contextlib.suppress(TransportError):
            while self._job.serves and self._job.agents.others() and time.monotonic() < until:
                self._job.agents.keep_alive([])
                time.sleep(_POLL_S)

    def _shutdown(self, *args, **kwargs) -> None:
        super()._shutdown(*args, **kwargs)
        if self._job.agents is None or self._store_gone:
            return
        try:
            for worker in self._running:
                self._job.rounds.report_death(worker.identity)
            self._job.agents.leave()
        except TransportError as error:
            _LOG.warning("collectives: %s", error)

    # ---- The workers.

    def _begin(self, worker_group) -> None:
        self._watched, self._failures, self._lost = self._pcontext, {}, False
        life = worker_group.spec.max_restarts - self._remaining_restarts
        self._running = [
            _Running(each.local_rank, each.global_rank, self._pcontext.subprocess_handlers[each.local_rank], life=life)
            for each in worker_group.workers
        ]

    def _take_end(self, worker_group, worker: _Running, code: int) -> None:
        if code == 0:
            self._job.rounds.end()
            return
        pid, error_file = worker.handler.proc.pid, self._pcontext.error_files[worker.local_rank]
        failure = ProcessFailure(local_rank=worker.local_rank, pid=pid, exitcode=code, error_file=error_file)
        self._failures[worker.rank] = failure
        self._job.rounds.report_death(worker.identity)
        who = f"collectives: rank {worker.rank} (process {pid}) {describe_end(code)}"
        if self._job.rounds.has_ended():
            if worker.life or self._job.late:  # it waited to join
                del self._failures[worker.rank]
            return
        if self._remaining_restarts == 0:
            self._lost = True
            _LOG.warning("%s; it is not started again (--max-restarts)", who)
            return
        self._remaining_restarts -= 1
        _LOG.warning("%s; it is started again, %d times more", who, self._remaining_restarts)
        del self._failures[worker.rank]
        self._start_again(worker_group, worker)

    def _start_again(self, worker_group, worker: _Running) -> None:
        """Start a worker's program again, in its environment and with its files for what it prints."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._pcontext.error_files[worker.local_rank])  # the next failure may write none
        life, (host, _, port) = worker.life + 1, self._job.store.place.rpartition(":")
        env = {
            **os.environ, **self._pcontext.envs[worker.local_rank], "TORCHELASTIC_RESTART_COUNT": str(life),
            "MASTER_ADDR": host, "MASTER_PORT": port,
        }  # fmt: skip
        handler = worker.handler
        handler.proc = handler._popen(handler.proc.args, env)
        worker_group.workers[worker.local_rank].id = handler.proc.pid
        self._running.append(_Running(worker.local_rank, worker.rank, handler, life=life))

    # ---- What follows for the job.

    def _follow_store(self) -> None:
        """Enter the job's store anew where it has moved."""
        moves = self._job.store.moves
        if self._moves != moves:
            self._job.renew([worker.identity for worker in self._running])
            self._moves = moves

    def _judge(self, worker_group) -> RunResult:
        """Return the state of this node's workers."""
        others = self._job.agents.others() if self._failures else []
        ended = self._job.rounds.has_ended() if self._failures else False
        if self._running:
            left = len(self._running) + sum(record.ranks for record in others)
            if not self._lost or ended or left >= self._job.rounds.least:
                return RunResult(WorkerState.HEALTHY)
            _LOG.warning("collectives: %d of at least %d ranks are left: the job ends", left, self._job.rounds.least)
            return self._fail()
        if not self._failures:
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(each.global_rank for each in worker_group.workers))
        if self._job.serves and others and not ended:  # they go on, and need the store
            return RunResult(WorkerState.HEALTHY)
        return self._fail()

    def _fail(self) -> RunResult:
        self._remaining_restarts = 0  # else torch would start all workers again
        return RunResult(WorkerState.FAILED, failures=self._failures)

    def _enter_again(self) -> RunResult:
        """Have torch start all workers of this node again, since other agents go on without them."""
        interval, limit = self._job.alive
        text = f"the other agents have not heard of this one for {limit} s, and go on without its workers"
        if self._remaining_restarts == 0:
            raise RendezvousClosedError(text)
        _LOG.warning("collectives: %s, which are started again", text)
        return RunResult(WorkerState.UNHEALTHY)

    def _go_on_without_store(self, worker_group, error: TransportError) -> RunResult:
        """Wait a while for the workers, which find out by themselves; then end them."""
        now = time.monotonic()
        if self._store_gone is None:
            self._store_gone = now, error
            _LOG.warning("collectives: %s: %s has ended, and with it the job", error, self._server())
        since, first = self._store_gone
        if not self._running and not self._failures:
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(each.global_rank for each in worker_group.workers))
        if self._running and now - since < self._job.alive[1]:
            return RunResult(WorkerState.HEALTHY)
        raise RendezvousConnectionError(f"{first}: {self._server()} has ended, and with it the job") from error

    def _server(self) -> str:
        return f"the agent that served it at {self._job.store.place}"
