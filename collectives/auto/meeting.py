"""How all ranks of a group agree, between two backwards, that they stand at the same place.

Over torch's store and not the group: a rank that has counted wrong stands in another collective of the group, where
one of ours would be taken for its own. Such a rank doesn't come, and the meeting ends without a result.
"""

from __future__ import annotations

import json
from datetime import timedelta

from ..torch_compat import default_store, sequence_number

__all__ = ["all_alike"]

_SECONDS = 300.0  # a rank may be saving or validating meanwhile


def all_alike(group, value: dict) -> str:
    """Compare a value with all ranks of a group; blocks until all have come, at most 300 s. Give "" or what differs.

    The answer is the same on all ranks as to whether it is "": the first verdict in the store counts. `value`: what
    JSON takes; "error" in it, when not None, is what keeps this rank from going on.
    """
    store = default_store()
    rank, size = group.rank(), group.size()
    prefix = f"collectives/auto/{group.group_name}/{size}"
    # Counted in the store itself, which may outlive a group and its name.
    prefix += f"/{store.add(f'{prefix}/met/{rank}', 1)}"
    value = {"sequence": sequence_number(group), **value}
    store.set(f"{prefix}/{rank}", json.dumps(value))
    try:
        store.wait([f"{prefix}/{other}" for other in range(size)], timedelta(seconds=_SECONDS))
        found = "all"
    except RuntimeError:  # stores differ in the class; one that is gone fails again below
        found = "late"
    if store.compare_set(f"{prefix}/verdict", "", found).decode() != "all":
        return f"not all ranks came to the same step within {_SECONDS:.0f} s"
    values = [json.loads(store.get(f"{prefix}/{other}")) for other in range(size)]
    for other, theirs in enumerate(values):
        if theirs["error"] is not None:
            return f"rank {other}: {theirs['error']}"
        for name in theirs:
            if theirs[name] != values[0][name]:
                return f"{name}: {theirs[name]!r:.80} on rank {other}, {values[0][name]!r:.80} on rank 0"
    return ""
