"""reshard_after_forward: how much of a unit's parameters a rank keeps from the forward to the
backward.

An int n splits the ranks into groups of n neighbouring ranks, each of which keeps all parameters.
The backward's all-gather is inside such a group.
"""

from __future__ import annotations

import weakref

from ..comm.communicator import Communicator
from ..errors import InvalidArgument
from .mesh import Ranks
from .unit import Unit

__all__ = ["parse_reshard_after_forward", "set_reshard_after_forward"]


def parse_reshard_after_forward(value, ranks: Ranks) -> bool | int:
    """Check the argument of `fully_shard` and return it; True for the number of ranks."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 2 or ranks.size % value:
        raise InvalidArgument(
            f"reshard_after_forward must be True, False, or an int from 2 that divides {ranks.size} ranks, "
            f"not {value!r:.40}",
            op="fully_shard",
        )
    return True if value == ranks.size else value


def set_reshard_after_forward(unit: Unit, keep: bool | int) -> None:
    """Set how a unit is resharded after its forward. A collective at the first use of an int."""
    unit.reshard_after_forward = bool(keep)
    unit.post_forward_comm = None
    if keep is not True and keep:
        unit.post_forward_comm = _post_forward_comm(unit.ranks.shard, keep)


def _post_forward_comm(comm: Communicator, size: int) -> Communicator:
    """Return the communicator of `size` neighbouring ranks; one for all units."""
    known = _comms.setdefault(comm, {})
    if size not in known or known[size].closed:
        known[size] = comm.split(comm.rank // size)
    return known[size]


_comms: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> {size: communicator of neighbours}
