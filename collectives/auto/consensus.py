"""Consensus of a group's ranks, between two backwards, that they are at the same step.

It uses torch's store and not the group: a rank with another count is in another collective of the
group, which would match one of ours. Such a rank doesn't take part, and the check ends with an
error.
"""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from ..comm.agree import ComparedValue, describe_differences
from ..comm.liveness import RankExits
from ..comm.waiting import RankWait
from ..errors import CollectivesError, TransportError
from ..json_records import parse_json
from ..rendezvous.process_groups import get_group_timeout
from ..torch_compat import default_store, sequence_number
from .settings import read_timeout

__all__ = ["verify_same_step"]


def verify_same_step(group, value: dict) -> str:
    """Compare a value between all ranks of a group; blocks until all call it.

    Return "" or the difference. It waits for COLLECTIVES_AUTO_TIMEOUT seconds at most, because a
    rank may save or validate meanwhile. It also waits for at most half of the group's timeout: a
    rank that doesn't call it may be in a collective of the group, which must not time out. It
    doesn't wait for a rank that has ended. All ranks return "" or none does: the first verdict in
    the store counts. `value`: a dict for JSON. Its "error", where not None, is the reason for which
    this rank can't continue.
    """
    store = default_store()
    rank, size = group.rank(), group.size()
    prefix = f"collectives/auto/{group.group_name}/{size}"
    # The store counts the calls, because it may outlive a group and its name.
    prefix += f"/{store.add(f'{prefix}/met/{rank}', 1)}"
    value = {"sequence": sequence_number(group), **value}
    store.set(f"{prefix}/{rank}", json.dumps(value))
    seconds = min(read_timeout(), get_group_timeout(group, torch.device("cpu")) / 2)
    keys = [f"{prefix}/{other}" for other in range(size)]
    exits = RankExits(store, dist.get_process_group_ranks(group))
    wait = RankWait("to the same step", rank, size, seconds, exit_reason=exits.reason)
    pause, found = 0.001, "all"
    try:
        while not store.check(keys):
            wait.check(lambda: [other for other in range(size) if not store.check([keys[other]])])
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
    except CollectivesError as error:
        found = error.message
    verdict = store.compare_set(f"{prefix}/verdict", "", found).decode()
    if verdict != "all":
        return f"not all ranks came to the same step: {verdict}"
    values = [parse_value(store.get(f"{prefix}/{other}"), other) for other in range(size)]
    for other, theirs in enumerate(values):
        if theirs["error"] is not None:
            return f"rank {other}: {theirs['error']}"
    return describe_differences([ComparedValue(each.items()).entries for each in values], range(size))


def parse_value(data: bytes, rank: int) -> dict:
    """Return the dict that a rank has set. Raises `TransportError` for anything else."""
    try:
        value = parse_json(data)
        if not isinstance(value, dict) or "error" not in value:
            raise ValueError("no such dict")
    except ValueError as error:
        text = f"what rank {rank} has set in the store can't be read: {data[:80]!r}"
        raise TransportError(text, peers=(rank,)) from error
    return value
