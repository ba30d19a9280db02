"""Policy: which algorithm a communicator uses for which operation and size, the same on all ranks.

`fit` and `best_algorithms` make a table from measured times. An algorithm's time is modelled as
alpha + beta * bytes (R. Hockney, "The communication challenge for MPP", 1994). Rank 0 reads a
communicator's policy from its variables and its tune file when the communicator is opened, and
sends it to the other ranks.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import get_ident

import torch

from ..._nccl import OPS as OP_CODES
from ...errors import CollectivesError, InvalidArgument, InvalidUsage, Mismatch
from ..agree import all_gather_object
from ..arguments import parse_op
from ..group import open_groups
from .schedule import ALGORITHMS, OPS
from .tune_file import Choices, file_engine, read_tune_file, tables_of, tune_file

__all__ = [
    "AlphaBetaModel",
    "Policy",
    "agree_on_policy",
    "best_algorithms",
    "fit",
    "look_up_choice",
    "parse_algorithm",
    "select_algorithm",
    "use_policy",
]

_MARGIN = 0.1  # another algorithm than native has to be predicted to be faster by this much
_CHUNKS = {"host": 256 << 10, "nccl": 4 << 20}  # bytes of a message


# ---- The model of an algorithm's time.


@dataclass
class AlphaBetaModel:
    """Model of an algorithm's time: `alpha` (s) + `beta` (s/byte) * bytes.

    `residual`: the root mean square of the relative errors.
    """

    alpha: float
    beta: float
    residual: float = 0.0

    def predict(self, nbytes: float) -> float:
        """Return the time in seconds."""
        return self.alpha + self.beta * nbytes


def fit(points: Iterable[tuple[float, float]]) -> AlphaBetaModel:
    """Fit a model to (bytes, seconds) by least squares of the relative errors.

    Neither alpha nor beta is negative.
    """
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
        ends = [AlphaBetaModel(a1 / aa, 0.0)] + ([AlphaBetaModel(0.0, b1 / bb)] if bb else [])
        best = min(ends, key=lambda model: sum((model.predict(x) / t - 1) ** 2 for x, t in points))
        alpha, beta = best.alpha, best.beta
    model = AlphaBetaModel(alpha, beta)
    model.residual = math.sqrt(sum((model.predict(x) / t - 1) ** 2 for x, t in points) / len(points))
    return model


def best_algorithms(models: dict[str, AlphaBetaModel], sizes: Sequence[int]) -> Choices:
    """Return the fastest algorithm by size, from each algorithm's model.

    Native where they are close.
    """
    best = []
    for nbytes in sorted(sizes):
        times = {name: model.predict(nbytes) for name, model in models.items()}
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


# ---- The choice.


@dataclass(slots=True)
class Policy:
    """Policy of a communicator, the same on all its ranks.

    `deterministic`: reductions are in rank order; `chunk`: bytes of an algorithm's message;
    `fixed`: operation -> algorithm, from COLLECTIVES_ALGORITHM; `tables`: number of ranks ->
    operation -> `Choices`.
    """

    deterministic: bool
    chunk: int
    fixed: dict[str, str]
    tables: dict[int, dict[str, Choices]]

    def allowed_algorithms(self, engine: str, op: str) -> tuple[str, ...]:
        """Return the algorithms that may be used: where `deterministic`, those in rank order."""
        if not self.deterministic or op == "all_gather":
            return ALGORITHMS
        return ("native", "direct") if engine == "host" else ("direct",)

    def choices_for(self, engine: str, size: int) -> dict[str, Choices] | None:
        """Return the choices for each operation of a communicator of `size` ranks.

        None: always native.
        """
        if size == 1:
            return None
        choices = {}
        for op in OPS:
            allowed = self.allowed_algorithms(engine, op)
            limits, names = self.tables.get(size, {}).get(op, ([], ["native"]))
            if op in self.fixed:
                limits, names = [], [self.fixed[op]]
            choices[op] = limits, [name if name in allowed else allowed[0] for name in names]
        return None if all(set(names) == {"native"} for _, names in choices.values()) else choices


def use_policy(comm, policy: Policy) -> None:
    """Set the policy by which a communicator selects algorithms."""
    comm._policy, comm._choices = policy, policy.choices_for(comm.engine.name, comm.size)
    comm._fast_path.set_native_by_default(comm._choices is None)


def look_up_choice(choices: dict[str, Choices], op: str, nbytes: int) -> str:
    """Return the algorithm for an operation on so many bytes (of the larger array)."""
    limits, names = choices[op]
    return names[bisect_left(limits, nbytes)]


def select_algorithm(comm, op: str, algorithm, nbytes: int, reduction=None) -> str:
    """Return the algorithm of a communicator's call: the caller's, else the policy's.

    In a group it is always native. `nbytes`: of the larger array; `reduction`: the op that the
    caller passed. Raises `InvalidArgument` for an unknown name, `InvalidUsage` for an algorithm
    that is not allowed here.
    """
    if algorithm is None and comm._choices is None:
        return "native"
    grouped = bool(open_groups) and get_ident() in open_groups
    chosen = algorithm
    if chosen is None:
        chosen = look_up_choice(comm._choices, op, nbytes) if comm._choices is not None and not grouped else "native"
    elif not isinstance(chosen, str) or chosen not in ALGORITHMS:
        names = ", ".join(map(repr, ALGORITHMS))
        raise InvalidArgument(f"algorithm must be {names} or None, not {chosen!r:.40}", op=op, rank=comm.rank)
    allowed = ALGORITHMS if comm.size == 1 else comm._policy.allowed_algorithms(comm.engine.name, op)
    exact = (OP_CODES["max"], OP_CODES["min"])  # the same in any order
    if chosen not in allowed and parse_op(reduction, rank=comm.rank, name=op)[0] not in exact:
        raise InvalidUsage(
            f"algorithm {chosen!r}{', which groups take,' * grouped} doesn't reduce in rank order, as "
            f"deterministic=True asks for: use {' or '.join(map(repr, allowed))}, outside of groups",
            op=op, rank=comm.rank,
        )  # fmt: skip
    if grouped and chosen != "native":
        raise InvalidUsage(
            f"algorithm {chosen!r} is several steps, which can't stand in a group: call it after the `with` block, or "
            "leave it to 'native'",
            op=op, rank=comm.rank,
        )  # fmt: skip
    return chosen


def parse_algorithm(text: str) -> dict[str, str]:
    """Parse COLLECTIVES_ALGORITHM: one name for all operations, or operation:name,... pairs."""
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


def _read_policy(deterministic: bool, engine: str, device: torch.device, in_file: str) -> Policy:
    """Read the policy from this process's variables and tune file.

    `in_file`: the engine's name in the file.
    """
    text = os.environ.get("COLLECTIVES_CHUNK", "").strip()
    if text and not (text.isascii() and text.isdigit() and 64 <= int(text) < 1 << 40):
        raise InvalidArgument(f"COLLECTIVES_CHUNK={text}: must be a whole number of bytes from 64 up")
    fixed = parse_algorithm(os.environ.get("COLLECTIVES_ALGORITHM", ""))
    policy = Policy(deterministic, int(text) if text else _CHUNKS[engine], fixed, {})
    for op, name in fixed.items():
        if name not in policy.allowed_algorithms(engine, op):
            raise InvalidUsage(
                f"COLLECTIVES_ALGORITHM has {op}:{name}, which deterministic=True forbids: "
                f"use {' or '.join(policy.allowed_algorithms(engine, op))}"
            )
    if len(fixed) < len(OPS):
        policy.tables = tables_of(read_tune_file(tune_file()), in_file, device)
    return policy


def agree_on_policy(comm, deterministic: bool) -> Policy:
    """Return the policy of rank 0, on all ranks of a communicator that is being opened; blocks.

    Raises `Mismatch` where the ranks differ in `deterministic` or in the communicator's config,
    `InvalidArgument` on all ranks where rank 0's variables or its file are invalid.
    """
    arguments = {"deterministic": deterministic, "config": comm.config.to_dict()}
    own: dict = dict(arguments)
    if comm.rank == 0:
        name = comm.engine.name
        try:
            policy = _read_policy(deterministic, name, comm.device, file_engine(comm._native, name))
        except CollectivesError as error:
            own["error"] = [type(error).__name__, error.message]
        else:
            own.update(chunk=policy.chunk, fixed=policy.fixed, tables=policy.tables)
    values = all_gather_object(comm, own)
    for name, argument in arguments.items():
        others = [rank for rank, value in enumerate(values) if value[name] != argument]
        if others:
            raise Mismatch(
                f"{name}={argument} here, and not on rank {', '.join(map(str, others))}: it must be the same on all "
                "ranks",
                op="init", rank=comm.rank, peers=others,
            )  # fmt: skip
    received = values[0]
    if "error" in received:
        kind, message = received["error"]
        raise (InvalidUsage if kind == "InvalidUsage" else InvalidArgument)(message, op="init", rank=comm.rank)
    tables = {int(ranks): {op: tuple(each) for op, each in ops.items()} for ranks, ops in received["tables"].items()}
    return Policy(deterministic, received["chunk"], received["fixed"], tables)
