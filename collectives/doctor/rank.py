"""A rank of the self-test: verified all-reduces, timed, on our communicator, on our c10d backend and on Gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from .. import init
from ..bench.processes import end_with_parent
from ..comm.agree import all_gather_object
from ..comm.liveness import this_process
from ..errors import InternalError
from ..launcher import detect_launcher

__all__ = ["run_rank"]

_CALLS = {1 << 10: 200, 25 << 20: 9}  # of ours, by bytes
_FEW_CALLS = {1 << 10: 20, 25 << 20: 3}  # over torch.distributed, Gloo among it
_PERIOD = 13  # of the pattern that is summed; sums stay exact in float32


def _measure(name: str, all_reduce: Callable[[torch.Tensor], object], calls: dict[int, int], comm) -> dict[str, float]:
    """Verify a sum of each size, time it, and verify another one.

    Returns, by bytes, the median seconds of the slowest rank.
    """
    rank, size, device = comm.rank, comm.size, torch.device(comm.device)
    found = {}
    for nbytes, count in calls.items():
        pattern = torch.arange(nbytes // 4, device=device) % _PERIOD
        times = []
        for number in range(count + 4):  # the first and the last one are verified, and two warm up
            values = (pattern + rank).float() if number in (0, count + 3) else torch.zeros(nbytes // 4, device=device)
            _synchronize(device)
            begin = time.perf_counter()
            all_reduce(values)
            _synchronize(device)
            times.append(time.perf_counter() - begin)
            if number in (0, count + 3):
                wrong = int((values != (pattern * size + size * (size - 1) // 2).float()).sum())
                if wrong:
                    text = f"{name}: {wrong} of {values.numel()} sums are wrong"
                    raise InternalError(text, op="all_reduce", rank=rank)
        found[str(nbytes)] = max(all_gather_object(comm, statistics.median(times[3:-1])))
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_rank(emit: Callable[..., None], engine: str, parent: int, folder: str | None, timeout: float) -> None:
    """Run one rank; `emit` is called with what is known so far.

    `folder`: where the ranks meet for torch.distributed, None: at the launcher's MASTER_ADDR, or
    not at all. `timeout`: seconds of each wait for another rank.
    """
    end_with_parent(parent)
    torch.set_num_threads(1)
    emit(stage="open the communicator")
    with init(engine, timeout=timeout) as comm:
        rank, size = comm.rank, comm.size
        emit(rank=rank, size=size, device=str(comm.device))
        emit(stage=f"all_reduce on engine {engine!r}")
        emit(times=_measure(engine, comm.all_reduce, _CALLS, comm))
        nodes = len({process.split("|")[0] for process in all_gather_object(comm, this_process())})
        emit(nodes=nodes)
        if folder is None and nodes == 1 and detect_launcher().master_addr is None:
            emit(stage="")
            return
        emit(stage="init_process_group('collectives')")
        meet = f"file://{folder}/store" if folder else "env://"
        dist.init_process_group("collectives", init_method=meet, rank=rank, world_size=size)
        emit(stage="dist.all_reduce on backend 'collectives'")
        emit(c10d=_measure("backend 'collectives'", dist.all_reduce, _FEW_CALLS, comm))
        if torch.device(comm.device).type == "cpu" and dist.is_gloo_available():
            emit(stage="Gloo, for comparison")
            gloo = dist.new_group(backend="gloo")
            emit(gloo=_measure("Gloo", lambda values: dist.all_reduce(values, group=gloo), _FEW_CALLS, comm))
        dist.destroy_process_group()
    emit(stage="")
