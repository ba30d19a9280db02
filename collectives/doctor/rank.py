"""A rank of the self-test: verified all-reduces, timed, on our communicator, on our c10d backend and on Gloo."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from .. import init
from ..bench.processes import become_rank
from ..comm.agree import all_gather_object
from ..errors import InternalError
from ..launcher import detect_launcher

__all__ = ["BIG", "SMALL", "run_rank"]

SMALL, BIG = 1 << 10, 25 << 20  # bytes
_CALLS = {SMALL: 200, BIG: 9}  # of ours
_FEW_CALLS = {SMALL: 20, BIG: 3}  # over torch.distributed, Gloo among it
_COPIES = 7
_PERIOD = 13  # of the pattern that is summed; sums stay exact in float32


def _pattern(nbytes: int, rank: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(nbytes // 4, device=device) % _PERIOD + rank).float()


def _sum(nbytes: int, size: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(nbytes // 4, device=device) % _PERIOD * size + size * (size - 1) // 2).float()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the median seconds of a call, after two that don't count."""
    times = []
    for _ in range(calls + 2):
        _synchronize(device)
        begin = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def _measure(name: str, all_reduce: Callable[[torch.Tensor], object], calls: dict[int, int], rank: int, size: int,
             device: torch.device) -> dict[str, float]:  # fmt: skip
    """Verify a sum of each size, time it, and verify another one; return seconds by bytes."""
    found = {}
    for nbytes, count in calls.items():
        zeros = torch.zeros(nbytes // 4, device=device)
        for timed in (True, False):
            values = _pattern(nbytes, rank, device)
            all_reduce(values)
            wrong = int((values != _sum(nbytes, size, device)).sum())
            if wrong:
                raise InternalError(f"{name}: {wrong} of {values.numel()} sums are wrong", op="all_reduce", rank=rank)
            if timed:
                found[str(nbytes)] = _time(lambda zeros=zeros: all_reduce(zeros), count, device)
    return found


def run_rank(emit: Callable[..., None], engine: str, parent: int, folder: str | None, timeout: float) -> None:
    """Run one rank; ``emit`` is called with what is known so far.

    ``folder``: where the ranks meet for torch.distributed, None: at the launcher's MASTER_ADDR, or
    not at all. ``timeout``: seconds of each wait for another rank.
    """
    become_rank(parent)
    torch.set_num_threads(1)
    emit(stage="open the communicator")
    with init(engine, timeout=timeout) as comm:
        device, rank, size = comm.device, comm.rank, comm.size
        emit(rank=rank, size=size, engine=comm.engine.name, device=str(device))
        emit(stage=f"all_reduce on engine {engine!r}")
        times = _measure(engine, lambda each: comm.all_reduce(each), _CALLS, rank, size, device)
        emit(times=_slowest(comm, times))
        if device.type == "cpu":
            emit(stage="copy memory")
            source, target = torch.zeros(BIG // 4), torch.zeros(BIG // 4)
            comm.barrier()
            emit(copy=max(all_gather_object(comm, _time(lambda: target.copy_(source), _COPIES, device))))
        nodes = len(set(all_gather_object(comm, _node())))
        cores = all_gather_object(comm, sorted(os.sched_getaffinity(0)))
        emit(nodes=nodes, cores=cores)
        if folder is None and nodes == 1 and detect_launcher().master_addr is None:
            emit(stage="")
            return
        _run_torch_distributed(emit, comm, folder, device)
    emit(stage="")


def _run_torch_distributed(emit: Callable[..., None], comm, folder: str | None, device: torch.device) -> None:
    """The same over torch.distributed: by our backend, and on the CPU by Gloo for comparison."""
    rank, size = comm.rank, comm.size
    emit(stage="init_process_group('collectives')")
    meet = f"file://{folder}/store" if folder else "env://"
    dist.init_process_group("collectives", init_method=meet, rank=rank, world_size=size)
    emit(stage="dist.all_reduce on backend 'collectives'")
    times = _measure("backend 'collectives'", lambda each: dist.all_reduce(each), _FEW_CALLS, rank, size, device)
    emit(c10d=_slowest(comm, times))
    if device.type == "cpu" and dist.is_gloo_available():
        emit(stage="Gloo, for comparison")
        gloo = dist.new_group(backend="gloo")
        times = _measure("Gloo", lambda each: dist.all_reduce(each, group=gloo), _FEW_CALLS, rank, size, device)
        emit(gloo=_slowest(comm, times))
    dist.destroy_process_group()


def _slowest(comm, times: dict[str, float]) -> dict[str, float]:
    """Return the slowest rank's times."""
    ranks = all_gather_object(comm, times)
    return {key: max(each[key] for each in ranks) for key in times}


def _node() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
