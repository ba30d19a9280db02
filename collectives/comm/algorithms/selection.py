"""Selection of a call's algorithm: a pure function of the operation, the communicator and the argument."""

from __future__ import annotations

from threading import get_ident

from ..._nccl import OPS as OP_CODES
from ...errors import InvalidArgument, InvalidUsage
from ..group import open_groups
from .schedule import ALGORITHMS

__all__ = ["allowed_algorithms", "select_algorithm"]

_EXACT = (OP_CODES["max"], OP_CODES["min"])  # their results are the same in any order


def allowed_algorithms(op: str, code: int, engine: str, size: int, deterministic: bool) -> tuple[str, ...]:
    """Return the algorithms that a call may use, the default one first.

    `code`: of the reduction, of no meaning for all_gather; `engine`: its name; `size`: the number of
    ranks. All may be used but where `deterministic` asks for sums in rank order.
    """
    if not deterministic or size == 1 or op == "all_gather" or code in _EXACT:
        return ALGORITHMS
    return ("native", "direct") if engine == "host" else ("direct",)


def select_algorithm(comm, op: str, algorithm: str | None, code: int = 0) -> str:
    """Return the algorithm of a communicator's call: the caller's, None for the default.

    `code`: of the reduction. Raises `InvalidArgument` for an unknown name, `InvalidUsage` for an
    algorithm that can't be used here.
    """
    if algorithm is not None and (not isinstance(algorithm, str) or algorithm not in ALGORITHMS):
        names = ", ".join(map(repr, ALGORITHMS))
        raise InvalidArgument(f"algorithm must be {names} or None, not {algorithm!r:.40}", op=op, rank=comm.rank)
    allowed = allowed_algorithms(op, code, comm.engine.name, comm.size, comm.deterministic)
    selected = allowed[0] if algorithm is None else algorithm
    if selected not in allowed:
        raise InvalidUsage(
            f"algorithm {selected!r} doesn't reduce in rank order, as deterministic=True asks for: use "
            f"{' or '.join(map(repr, allowed))}",
            op=op, rank=comm.rank,
        )  # fmt: skip
    if selected != "native" and open_groups and get_ident() in open_groups:
        raise InvalidUsage(
            f"algorithm {selected!r}{', the default with deterministic=True,' * (algorithm is None)} is several steps, "
            "which can't stand in a group: call it after the `with` block",
            op=op, rank=comm.rank,
        )  # fmt: skip
    return selected
