"""Which algorithm for which size: what is measured, how it is kept, and how all ranks come to choose alike.

A measurement (`tune`) fits time = alpha + beta * bytes to each algorithm of each operation (R. Hockney, "The
communication challenge for MPP", 1994) and is kept in a JSON file, by machine, engine and number of ranks. What is used
is what rank 0 read when its communicator was opened: it sends that to the others, so that all choose alike.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from platform import node
from threading import get_ident

import torch

from ..._nccl import DTYPES
from ..._nccl import OPS as OP_CODES
from ...arrays import parse_op
from ...errors import CollectivesError, InvalidArgument, InvalidUsage, Mismatch
from ..group import open_groups
from .schedule import ALGORITHMS, OPS

__all__ = ["Line", "Policy", "agree_on", "choices_of", "choose", "fit", "pick", "read_file", "tune", "tune_file"]

_FORMAT = 1
_SIZES = tuple(1 << bits for bits in range(10, 27, 2))  # 1 KiB to 64 MiB
_MARGIN = 0.1  # another algorithm than native has to be predicted to be faster by this much
_CHUNKS = {"host": 256 << 10, "nccl": 4 << 20}  # bytes of a message
_MOST_CALLS = 200

Choices = tuple[list[int], list[str]]  # upper limits in bytes, and one name more than limits


# ---- What is measured, in numbers.


class Line:
    """time = `alpha` (s) + `beta` (s/byte) * bytes; `residual`: the root mean square of the relative errors."""

    __slots__ = ("alpha", "beta", "residual")

    def __init__(self, alpha: float, beta: float, residual: float = 0.0):
        self.alpha = alpha
        self.beta = beta
        self.residual = residual

    def predict(self, nbytes: float) -> float:
        """Give the time in seconds."""
        return self.alpha + self.beta * nbytes


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """Fit a line to (bytes, seconds) by least squares of the relative errors; neither alpha nor beta is negative."""
    points = [(float(x), float(t)) for x, t in points]
    if not points or any(t <= 0 for _, t in points):
        raise InvalidArgument(f"a fit needs points with times above 0, not {points!r:.200}", op="tune")
    # Divided by its time, a point's equation is alpha / t + beta * x / t = 1.
    aa = sum(1 / t**2 for _, t in points)
    ab = sum(x / t**2 for x, t in points)
    bb = sum((x / t) ** 2 for x, t in points)
    a1 = sum(1 / t for _, t in points)
    b1 = sum(x / t for x, t in points)
    determinant = aa * bb - ab * ab
    alpha = beta = -1.0
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant
    if alpha < 0 or beta < 0:  # the best one with one of the two at 0
        ends = [Line(a1 / aa, 0.0)] + ([Line(0.0, b1 / bb)] if bb else [])
        best = min(ends, key=lambda line: sum((line.predict(x) / t - 1) ** 2 for x, t in points))
        alpha, beta = best.alpha, best.beta
    line = Line(alpha, beta)
    line.residual = math.sqrt(sum((line.predict(x) / t - 1) ** 2 for x, t in points) / len(points))
    return line


def choices_of(lines: dict[str, Line], sizes: Sequence[int]) -> Choices:
    """Give which algorithm is best up to which of the measured sizes; native where they are close."""
    best = []
    for nbytes in sorted(sizes):
        times = {name: line.predict(nbytes) for name, line in lines.items()}
        name = min(times, key=times.__getitem__)
        if "native" in times and times[name] > times["native"] * (1 - _MARGIN):
            name = "native"
        best.append((nbytes, name))
    limits, names = [], [best[0][1]]
    for (nbytes, name), (following, other) in zip(best, best[1:], strict=False):
        if other != name:
            limits.append(math.isqrt(nbytes * following))
            names.append(other)
    return limits, names


# ---- What is chosen.


class Policy:
    """What the ranks of a communicator have agreed on. `chunk`: bytes of an algorithm's message; `fixed`: operation ->
    algorithm, from COLLECTIVES_ALGORITHM; `tables`: number of ranks -> operation -> `Choices`."""

    __slots__ = ("chunk", "deterministic", "fixed", "tables")

    def __init__(self, deterministic: bool, chunk: int, fixed: dict[str, str], tables: dict[int, dict[str, Choices]]):
        self.deterministic = deterministic
        self.chunk = chunk
        self.fixed = fixed
        self.tables = tables

    def ordered(self, engine: str, op: str) -> tuple[str, ...]:
        """Give the algorithms of which any may be used: with `deterministic` those that reduce in rank order."""
        if not self.deterministic or op == "all_gather":
            return ALGORITHMS
        return ("native", "direct") if engine == "host" else ("direct",)

    def picks(self, engine: str, size: int) -> dict[str, Choices] | None:
        """Give what to use for each operation of a communicator; None: native, always."""
        if size == 1:
            return None
        picks = {}
        for op in OPS:
            allowed = self.ordered(engine, op)
            limits, names = self.tables.get(size, {}).get(op, ([], ["native"]))
            if op in self.fixed:
                limits, names = [], [self.fixed[op]]
            picks[op] = limits, [name if name in allowed else allowed[0] for name in names]
        return None if all(set(names) == {"native"} for _, names in picks.values()) else picks


def choose(picks: dict[str, Choices], op: str, nbytes: int) -> str:
    """Give the algorithm for an operation on so many bytes (of the larger array)."""
    limits, names = picks[op]
    return names[bisect_left(limits, nbytes)]


def pick(comm, op: str, algorithm, nbytes: int, reduction=None) -> str:
    """Give the algorithm of a communicator's call: the caller's, else the policy's; in a group there is only native.

    Raises `InvalidArgument` for a name that isn't there, `InvalidUsage` for one that is not allowed here.
    """
    grouped = bool(open_groups) and get_ident() in open_groups
    by = algorithm
    if by is None:
        by = choose(comm._picks, op, nbytes) if comm._picks is not None and not grouped else "native"
    elif not isinstance(by, str) or by not in ALGORITHMS:
        names = ", ".join(map(repr, ALGORITHMS))
        raise InvalidArgument(f"algorithm must be {names} or None, not {by!r:.40}", op=op, rank=comm.rank)
    allowed = ALGORITHMS if comm.size == 1 else comm._policy.ordered(comm.engine.name, op)
    # The largest and the smallest are the same in any order.
    if by not in allowed and parse_op(reduction, rank=comm.rank, name=op)[0] not in (OP_CODES["max"], OP_CODES["min"]):
        raise InvalidUsage(
            f"algorithm {by!r}{', which groups take,' * grouped} doesn't reduce in rank order, as deterministic=True "
            f"asks for: use {' or '.join(map(repr, allowed))}, outside of groups",
            op=op, rank=comm.rank,
        )  # fmt: skip
    if grouped and by != "native":
        raise InvalidUsage(
            f"algorithm {by!r} is several steps, which can't stand in a group: call it after the `with` block, or "
            "leave it to 'native'",
            op=op, rank=comm.rank,
        )  # fmt: skip
    return by


def parse_algorithm(text: str) -> dict[str, str]:
    """Read COLLECTIVES_ALGORITHM: a name for all operations, or operation:name pairs with commas between them."""
    found = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        op, colon, name = part.rpartition(":")
        ops = [op.strip()] if colon else OPS
        if name.strip() not in ALGORITHMS or any(each not in OPS for each in ops):
            raise InvalidArgument(
                f"COLLECTIVES_ALGORITHM={text}: {part!r} is no algorithm: use one of {', '.join(ALGORITHMS)} for all "
                f"operations, or {OPS[0]}:ring, with commas between, of {', '.join(OPS)}"
            )
        found.update(dict.fromkeys(ops, name.strip()))
    return found


def _own_policy(deterministic: bool, engine: str, device: torch.device, where: str) -> Policy:
    """Read the variables and the file of this process; `where`: as `_where` has it."""
    text = os.environ.get("COLLECTIVES_CHUNK", "").strip()
    if text and not (text.isascii() and text.isdigit() and 64 <= int(text) < 1 << 40):
        raise InvalidArgument(f"COLLECTIVES_CHUNK={text}: must be a whole number of bytes from 64 up")
    fixed = parse_algorithm(os.environ.get("COLLECTIVES_ALGORITHM", ""))
    policy = Policy(deterministic, int(text) if text else _CHUNKS[engine], fixed, {})
    for op, name in fixed.items():
        if name not in policy.ordered(engine, op):
            raise InvalidUsage(
                f"COLLECTIVES_ALGORITHM has {op}:{name}, which deterministic=True forbids: "
                f"use {' or '.join(policy.ordered(engine, op))}"
            )
    if len(fixed) < len(OPS):
        policy.tables = _tables(read_file(tune_file()), where, device)
    return policy


def agree_on(native, engine: str, device: torch.device, deterministic: bool) -> Policy:
    """Give the policy of rank 0, on all ranks. Blocks until all have come.

    Raises `Mismatch` where the ranks differ in `deterministic`, `InvalidArgument` on all ranks where rank 0's variables
    or its file are no good.
    """
    if native.rank:
        policy = None
    else:
        try:
            policy = _own_policy(deterministic, engine, device, _where(native, engine))
        except CollectivesError as error:
            policy = error
    if native.size > 1:
        policy = _exchange(native, device, deterministic, policy)
    if isinstance(policy, CollectivesError):
        policy.rank = native.rank
        raise policy
    return policy


def _exchange(native, device, deterministic, policy):
    """Send rank 0's policy, or its error, to all: one small all-gather, and a broadcast where there is more to say."""
    said = b""
    chunk = 0
    if isinstance(policy, CollectivesError):
        said = json.dumps({"error": [type(policy).__name__, policy.message]}).encode()
    elif policy is not None:
        chunk = policy.chunk
        if policy.fixed or policy.tables:
            said = json.dumps({"fixed": policy.fixed, "tables": policy.tables}).encode()
    stream = 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream
    mine = torch.tensor([len(said), int(deterministic), chunk], dtype=torch.int64, device=device)
    everyone = torch.empty((native.size, 3), dtype=torch.int64, device=device)
    native.all_gather(mine.data_ptr(), everyone.data_ptr(), 3, DTYPES["int64"], stream)
    (length, wanted, chunk), *_ = table = everyone.tolist()
    unlike = [rank for rank, (_, other, _) in enumerate(table) if other != int(deterministic)]
    if unlike:
        raise Mismatch(
            f"deterministic={deterministic} here, and not on rank {', '.join(map(str, unlike))}: it must be the same "
            "on all ranks",
            op="init", rank=native.rank, peers=unlike,
        )  # fmt: skip
    if not length:
        return policy or Policy(deterministic, chunk, {}, {})
    text = torch.zeros(length, dtype=torch.uint8)
    if native.rank == 0:
        text = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    text = text.to(device)
    native.broadcast(text.data_ptr(), text.data_ptr(), length, DTYPES["uint8"], 0, stream)
    told = json.loads(bytes(text.cpu().numpy()))
    if "error" in told:
        kind, message = told["error"]
        return (InvalidUsage if kind == "InvalidUsage" else InvalidArgument)(message, op="init")
    tables = {int(ranks): {op: tuple(each) for op, each in ops.items()} for ranks, ops in told["tables"].items()}
    return Policy(bool(wanted), chunk, told["fixed"], tables)


# ---- The file.


def tune_file() -> Path:
    """Give the file in which measurements are kept: COLLECTIVES_TUNE_FILE, or one in the user's cache folder."""
    named = os.environ.get("COLLECTIVES_TUNE_FILE", "").strip()
    if named:
        return Path(os.path.expanduser(named))  # pathlib's raises where a user has no home, as in some containers
    cache = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return Path(os.path.expanduser(cache)) / "collectives" / "tune.json"


def read_file(path: Path) -> list[dict]:
    """Give a file's entries, of all machines; none where there is no file. Raises `InvalidArgument` if it is broken."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        if not os.environ.get("COLLECTIVES_TUNE_FILE", "").strip():
            return []  # another user's home, as under sudo: nobody has asked for what lies there
        raise _broken(path, f"can't be read ({error})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, f"can't be read ({error})") from error
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise _broken(path, f"has format {content['format']!r:.20}, and this version reads {_FORMAT}")
        for entry in content["entries"]:
            for limits, names in (entry["choices"][op] for op in entry["choices"]):
                numbers = all(type(limit) is int for limit in limits) and limits == sorted(limits)
                if not (numbers and set(names) <= set(ALGORITHMS) and len(names) == len(limits) + 1):
                    raise ValueError(f"choices {limits} {names}")
            if not set(entry["choices"]) <= set(OPS) or type(entry["ranks"]) is not int:
                raise ValueError(f"operations {sorted(entry['choices'])}")
            _ = entry["machine"], entry["engine"], entry["device"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CollectivesError):
            raise
        raise _broken(path, f"is no result of collectives.tune() ({type(error).__name__}: {error})") from error
    return content["entries"]


def _broken(path: Path, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{path} {what}: delete it and run collectives.tune() again, or let COLLECTIVES_TUNE_FILE name another file"
    )


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _where(native, engine: str) -> str:
    """Name an engine in the file: on several machines it has other times than with as many ranks on one."""
    machines = getattr(native, "num_nodes", 1)
    return engine if machines == 1 else f"{engine} on {machines} machines"


def _tables(entries: list[dict], engine: str, device: torch.device) -> dict[int, dict[str, Choices]]:
    """Give what was measured here: what other machines or engines gave is no guide."""
    here = node(), engine, _device_name(device)
    return {
        entry["ranks"]: {op: (limits, names) for op, (limits, names) in entry["choices"].items()}
        for entry in entries
        if (entry["machine"], entry["engine"], entry["device"]) == here
    }


def _write(path: Path, entry: dict) -> None:
    """Put an entry into the file in place of the one before, by a rename: a reader sees the old file or the new one."""
    key = ("machine", "engine", "device", "ranks")
    entries = [each for each in read_file(path) if any(each[name] != entry[name] for name in key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files nobody else may read: a file may serve all users of a machine.
    new = path.with_name(f"{path.name}.{node()}.{os.getpid()}")
    try:
        new.write_text(json.dumps({"format": _FORMAT, "entries": [*entries, entry]}, indent=1), encoding="utf-8")
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


# ---- The measurement.


def tune(
    comm, *, ops: Sequence[str] = OPS, sizes: Sequence[int] = _SIZES, algorithms: Sequence[str] = ALGORITHMS,
    dtype: torch.dtype = torch.float32, seconds: float = 0.1, write: bool = True,
) -> dict:  # fmt: skip
    """Measure the algorithms on a communicator, use the result on it from now on, and keep it in a file.

    All ranks call it with the same arguments, while nothing else runs. `sizes`: bytes of the larger array, from the
    smallest to the largest, at least 2 of them; `seconds`: for one algorithm of one operation at one size, warm-up left
    out; `write`: rank 0 writes the file that `tune_file` names. Gives the entry of the file, the same on all ranks: for
    each operation and algorithm ``times_us`` (medians of the slowest rank), ``alpha_us``, ``beta_us_per_mib``,
    ``residual`` (root mean square of the fit's relative errors), and in ``choices`` what is used up to which size.
    Communicators that are opened later choose by it, those made of this one by `split` or `shrink` do, too. Raises
    `InvalidArgument`; on all ranks where the file can't be written.
    """
    ops, sizes, algorithms = _checked(comm, ops, sizes, algorithms, dtype, seconds)
    device = comm.device
    entry = {
        "machine": node(), "engine": _where(comm._native, comm.engine.name), "device": _device_name(device),
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
            call, used_bytes = _prepared(comm, op, nbytes, dtype)
            used.append(used_bytes)
            for name in algorithms:
                times[name].append(_measure(comm, call, name, seconds))
        lines = {name: fit(zip(used, times[name], strict=True)) for name in algorithms}
        for name, line in lines.items():
            found[name] = {
                "alpha_us": line.alpha * 1e6, "beta_us_per_mib": line.beta * 1e6 * 2**20, "residual": line.residual,
                "times_us": [t * 1e6 for t in times[name]],
            }  # fmt: skip
        entry["ops"][op] = found
        entry["choices"][op] = [*choices_of(lines, used)]
    failed = None
    if write and comm.rank == 0:
        try:
            _write(tune_file(), entry)
        except (OSError, InvalidArgument) as error:
            failed = error
    told = torch.tensor([int(failed is not None)], dtype=torch.uint8, device=device)
    comm.broadcast(told)
    if told.item():
        raise InvalidArgument(
            f"rank 0 could not write {tune_file()}" + (f": {failed}" if failed is not None else ""),
            op="tune", rank=comm.rank,
        ) from failed  # fmt: skip
    mine = {op: (limits, names) for op, (limits, names) in entry["choices"].items()}
    policy = comm._policy
    tables = {**policy.tables, comm.size: {**policy.tables.get(comm.size, {}), **mine}}
    comm._use(Policy(policy.deterministic, policy.chunk, policy.fixed, tables))
    return entry


def _checked(comm, ops, sizes, algorithms, dtype, seconds):
    def wrong(text):
        return InvalidArgument(text, op="tune", rank=comm.rank)

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
        common = [set(comm._policy.ordered(comm.engine.name, op)) for op in ops]
        algorithms = [name for name in algorithms if all(name in each for each in common)]
        if not algorithms:
            raise InvalidUsage("deterministic=True leaves none of these algorithms", op="tune", rank=comm.rank)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 3600:
        raise wrong(f"seconds must be a number above 0, not {seconds!r}")
    return ops, sizes, algorithms


def _prepared(comm, op: str, nbytes: int, dtype: torch.dtype):
    """Give a function of the algorithm's name, and the bytes that the larger array has: a multiple for each rank."""
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
    """Give the median time of a call in seconds, on the slowest rank. All ranks make the same number of calls."""

    def agreed(value: float) -> float:
        shared = torch.tensor([value], dtype=torch.float64, device=comm.device)
        comm.all_reduce(shared, "max", algorithm="native")
        return shared.item()

    def timed() -> float:
        begun = time.perf_counter()
        call(name)
        if comm.device.type != "cpu":
            torch.cuda.current_stream(comm.device).synchronize()
        return time.perf_counter() - begun

    call(name)  # allocates, compiles
    comm.barrier()
    first = agreed(timed())
    count = max(3, min(_MOST_CALLS, int(seconds / max(first, 1e-6))))
    return agreed(statistics.median(timed() for _ in range(count)))
