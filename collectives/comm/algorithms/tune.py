"""Tuning: measures the algorithms on a communicator and stores the fastest one by size."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterable, Sequence
from platform import node

import torch

from ...errors import InvalidArgument, InvalidUsage
from ..agree import all_gather_object
from .policy import Policy, best_algorithms, fit, use_policy
from .schedule import ALGORITHMS, OPS
from .tune_file import device_name, file_engine, tune_file, write_entry

__all__ = ["tune"]

_SIZES = tuple(1 << bits for bits in range(10, 27, 2))  # 1 KiB to 64 MiB
_MAX_CALLS = 200


def tune(
    comm, *, ops: Sequence[str] = OPS, sizes: Sequence[int] = _SIZES, algorithms: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32, seconds: float = 0.1, write: bool = True,
) -> dict:  # fmt: skip
    """Measure the algorithms on a communicator, use the result on it, and write it to a file.

    All ranks call it with the same arguments, while nothing else runs. `sizes`: bytes of the larger
    array, from the smallest to the largest, at least 2 of them; `algorithms`: None for all of them
    on NCCL and for native alone on the host, where the others are slower at every size, and are
    measured only if they are named; `seconds`: for one algorithm of one
    operation at one size, without the warm-up; `write`: rank 0 writes the file that `tune_file`
    names. Returns the entry of the file, the same on all ranks: for each operation and algorithm
    ``times_us`` (medians of the slowest rank), ``alpha_us``, ``beta_us_per_mib``, ``residual``
    (root mean square of the fit's relative errors), and in ``choices`` what is used up to which
    size. Communicators that are opened later use the result, and so do those that `split` or
    `shrink` make from this one. Raises `InvalidArgument`; on all ranks where the file can't be
    written.
    """
    ops, sizes, algorithms = _check_arguments(comm, ops, sizes, algorithms, dtype, seconds)
    device = comm.device
    entry = {
        "machine": node(), "engine": file_engine(comm._native, comm.engine.name), "device": device_name(device),
        "ranks": comm.size,
        "version": comm.engine.version, "torch": torch.__version__, "dtype": str(dtype).removeprefix("torch."),
        "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "chunk": comm._policy.chunk, "sizes": sizes, "ops": {}, "choices": {},
    }  # fmt: skip
    for op in ops:
        found = {}
        used = []
        times: dict[str, list[float]] = {name: [] for name in algorithms}
        for nbytes in sizes:
            call, used_bytes = _make_call(comm, op, nbytes, dtype)
            used.append(used_bytes)
            for name in algorithms:
                times[name].append(_measure(comm, call, name, seconds))
        models = {name: fit(zip(used, times[name], strict=True)) for name in algorithms}
        for name, model in models.items():
            found[name] = {
                "alpha_us": model.alpha * 1e6, "beta_us_per_mib": model.beta * 1e6 * 2**20, "residual": model.residual,
                "times_us": [t * 1e6 for t in times[name]],
            }  # fmt: skip
        entry["ops"][op] = found
        entry["choices"][op] = [*best_algorithms(models, used)]
    failed = problem = None
    if write and comm.rank == 0:
        try:
            write_entry(tune_file(), entry)
        except (OSError, InvalidArgument) as error:
            failed, problem = error, f"rank 0 could not write {tune_file()}: {error}"
    problem = all_gather_object(comm, problem)[0]
    if problem is not None:
        raise InvalidArgument(problem, op="tune", rank=comm.rank) from failed
    measured = {op: (limits, names) for op, (limits, names) in entry["choices"].items()}
    policy = comm._policy
    tables = {**policy.tables, comm.size: {**policy.tables.get(comm.size, {}), **measured}}
    use_policy(comm, Policy(policy.deterministic, policy.chunk, policy.fixed, tables))
    return entry


def _check_arguments(comm, ops, sizes, algorithms, dtype, seconds):
    def wrong(text):
        return InvalidArgument(text, op="tune", rank=comm.rank)

    if algorithms is None:
        algorithms = ("native",) if comm.device.type == "cpu" else ALGORITHMS
    for name, given in (("ops", ops), ("sizes", sizes), ("algorithms", algorithms)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise wrong(f"{name} must be a list, not {given!r:.40}")
    ops, sizes, algorithms = (list(each) for each in (ops, sizes, algorithms))
    if not isinstance(dtype, torch.dtype):
        raise wrong(f"dtype must be a torch.dtype, not {dtype!r:.40}")
    if not ops or not all(each in OPS for each in ops):
        raise wrong(f"ops must be some of {', '.join(OPS)}, not {ops}")
    if len(sizes) < 2 or any(type(each) is not int or each < 1 for each in sizes) or sizes != sorted(set(sizes)):
        raise wrong(f"sizes must be at least 2 numbers of bytes that rise, not {sizes}")
    if not algorithms or not all(each in ALGORITHMS for each in algorithms):
        raise wrong(f"algorithms must be some of {', '.join(ALGORITHMS)}, not {algorithms}")
    if comm.deterministic:
        common = [set(comm._policy.allowed_algorithms(comm.engine.name, op)) for op in ops]
        algorithms = [name for name in algorithms if all(name in each for each in common)]
        if not algorithms:
            raise InvalidUsage("deterministic=True leaves none of these algorithms", op="tune", rank=comm.rank)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 3600:
        raise wrong(f"seconds must be a number above 0, not {seconds!r}")
    return ops, sizes, algorithms


def _make_call(comm, op: str, nbytes: int, dtype: torch.dtype):
    """Return a function that makes one call by an algorithm, and the larger array's bytes."""
    part = -(-nbytes // (comm.size * dtype.itemsize))
    large = torch.zeros(part * comm.size, dtype=dtype, device=comm.device)
    small = torch.zeros(part, dtype=dtype, device=comm.device)
    call = {
        "all_reduce": lambda name: comm.all_reduce(large, algorithm=name),
        "reduce_scatter": lambda name: comm.reduce_scatter(small, large, algorithm=name),
        "all_gather": lambda name: comm.all_gather(large, small, algorithm=name),
    }[op]
    return call, large.nbytes


def _measure(comm, call, name: str, seconds: float) -> float:
    """Return the median time of a call in seconds, on the slowest rank.

    All ranks make the same number of calls.
    """

    def max_over_ranks(value: float) -> float:
        shared = torch.tensor([value], dtype=torch.float64, device=comm.device)
        comm.all_reduce(shared, "max", algorithm="native")
        return shared.item()

    def time_call() -> float:
        begun = time.perf_counter()
        call(name)
        if comm.device.type != "cpu":
            torch.cuda.current_stream(comm.device).synchronize()
        return time.perf_counter() - begun

    call(name)  # allocates, compiles
    comm.barrier()
    first = max_over_ranks(time_call())
    count = max(3, min(_MAX_CALLS, int(seconds / max(first, 1e-6))))
    return max_over_ranks(statistics.median(time_call() for _ in range(count)))
