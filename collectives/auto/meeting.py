"""How all ranks of a group agree, between two backwards, that they stand at the same place.

Over torch's store and not the group: a rank that has counted wrong stands in another collective of the group, where
one of ours would be taken for its own. Such a rank doesn't come, and the meeting ends without a result.
"""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from ..comm.liveness import Fates
from ..comm.waiting import Wait
from ..errors import CollectivesError
from ..rendezvous.process_groups import get_group_timeout
from ..torch_compat import default_store, sequence_number

__all__ = ["all_alike"]

_SECONDS = 300.0  # at most: a rank may be saving or validating meanwhile


def all_alike(group, value: dict) -> str:
    """Compare a value with all ranks of a group; blocks until all have come. Give "" or what differs.

    It waits for 300 s at most, and half of the group's timeout: a rank that doesn't come may stand in a collective of
    the group, which must not run out of time meanwhile. A rank that is known to have ended isn't waited for.
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
    seconds = min(_SECONDS, get_group_timeout(group, torch.device("cpu")) / 2)
    keys = [f"{prefix}/{other}" for other in range(size)]
    fates = Fates(store, dist.get_process_group_ranks(group))
    wait = Wait("to the same step", rank, size, seconds, fate=fates.of)
    pause, found = 0.001, "all"
    try:
        while not store.check(keys):
            wait.look(lambda: [other for other in range(size) if not store.check([keys[other]])])
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
    except CollectivesError as error:
        found = error.message
    verdict = store.compare_set(f"{prefix}/verdict", "", found).decode()
    if verdict != "all":
        return f"not all ranks came to the same step: {verdict}"
    values = [json.loads(store.get(f"{prefix}/{other}")) for other in range(size)]
    for other, theirs in enumerate(values):
        if theirs["error"] is not None:
            return f"rank {other}: {theirs['error']}"
        for name in theirs:
            if theirs[name] != values[0][name]:
                return f"{name}: {theirs[name]!r:.80} on rank {other}, {values[0][name]!r:.80} on rank 0"
    return ""
