"""OrderCheck: do the ranks gather and reduce units in one order? For engines that don't compare calls.

The host engine compares the tags of units on one node. NCCL compares nothing, and between nodes no tag
is sent: there ranks in different units of one size would exchange their values in silence.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable

import torch.distributed as dist

from ..comm import RankWait, first_line, format_ranks, is_on_one_host
from ..comm.communicator import Communicator
from ..comm.liveness import exit_reason
from ..cuda_state import refuse_capture
from ..environment import read_switch
from ..errors import Mismatch, TransportError
from ..json_records import parse_json
from ..rendezvous.job_store import share_store
from ..secret import seal, unseal

__all__ = ["OrderCheck", "compares_order"]

_FIRST_STEPS = 3
_PAUSE_S = (0.0005, 0.02)  # first and longest pause between two looks at the store
_OP = "backward"
_CURE = "all ranks must call the same units in the same order: look for branches that depend on the rank or its data"


def compares_order(world: Communicator) -> bool:
    """Whether the engine of a communicator compares the tags of units itself."""
    return world.size == 1 or is_on_one_host(world)


class OrderCheck:
    """The order of the units' collectives on this rank, step by step, and its comparison with the other ranks'.

    Ranks compare the first three steps, and with COLLECTIVES_CHECK all. After them, a step whose order is that of the
    step before sends nothing. A rank whose order has changed waits until all ranks have changed theirs in that step.
    The ranks meet in a store that `world`'s rank 0 serves. The constructor is a collective and blocks.

    Args:
        world: The communicator of all ranks of the units.
        name_of: Returns the name of a unit for messages, by its index.
    """

    def __init__(self, world: Communicator, name_of: Callable[[int], str]):
        self._world = world
        self._name_of = name_of
        self._always = read_switch("COLLECTIVES_CHECK")
        store, name = share_store(world)
        self._store = dist.PrefixStore(f"order/{name}", store)
        self._step = 0
        self._order: list[tuple[int, str]] = []  # of this step
        self._last: list[tuple[int, str]] | None = None
        self._old_keys: list[list[str]] = []  # of this rank's last two exchanges

    def note(self, unit_index: int, kind: str) -> None:
        """Note that a collective of a unit begins; `kind`: its name, such as "all_gather"."""
        self._order.append((unit_index, kind))

    def end_step(self) -> None:
        """End a step, at the end of an outermost backward.

        Blocks where the ranks compare their orders. Raises `Mismatch` on all ranks with the first unit
        that differs, `CollectiveTimeout` where others didn't change their order after the communicator's
        timeout, and `RemoteError` where one has ended.
        """
        order, last = self._order, self._last
        self._order, self._last = [], order
        self._step += 1
        if self._always or self._step <= _FIRST_STEPS:
            self._compare(order, f"to compare the order of the units in step {self._step}")
        elif order != last:
            at, (now, before) = _first_difference([order, last])
            self._compare(
                order,
                f"to compare the order of the units in step {self._step}, which is another one on rank "
                f"{self._world.rank} than in step {self._step - 1}: {self._describe(now)} and not "
                f"{self._describe(before)} as number {at}. Ranks that did not change their order don't come; {_CURE}",
            )

    # ---- Comparison.

    def _compare(self, order: list[tuple[int, str]], purpose: str) -> None:
        refuse_capture(
            self._world.device, "the hosts compare the order of units: make three steps before the capture, and unset "
            "COLLECTIVES_CHECK", op=_OP, rank=self._world.rank,
        )  # fmt: skip
        digest = hashlib.blake2b(json.dumps(order).encode(), digest_size=8).hexdigest()
        digests = self._exchange("digest", digest, purpose)
        if all(each == digest for each in digests):
            return
        orders = [[tuple(entry) for entry in each] for each in self._exchange("order", order, purpose)]
        at, entries = _first_difference(orders)
        ranks_by_text: dict[str, list[int]] = {}
        for rank, entry in enumerate(entries):
            ranks_by_text.setdefault(self._describe(entry), []).append(rank)
        found = "; ".join(f"{text} on {format_ranks(ranks)}" for text, ranks in ranks_by_text.items())
        raise Mismatch(
            f"the ranks' units are in another order in step {self._step}, from number {at} on: {found}. {_CURE}",
            op=_OP, rank=self._world.rank,
            peers=[rank for rank, each in enumerate(orders) if each != orders[self._world.rank]],
        )  # fmt: skip

    def _describe(self, entry: tuple[int, str] | None) -> str:
        if entry is None:
            return "the end of the backward"
        index, kind = entry
        return f"{kind} of {self._name_of(index)}"

    def _exchange(self, what: str, value, purpose: str) -> list:
        """Return the values of all ranks, in rank order."""
        world, prefix = self._world, f"{self._step}/{what}"
        keys = [f"{prefix}/{rank}" for rank in range(world.size)]
        own = keys[world.rank]
        try:
            self._store.set(own, seal(json.dumps(value).encode(), own))
            self._wait(keys, purpose)
            found = self._store.multi_get(keys)
            self._store.set(f"{own}/read", "")
            if world.rank == 0:  # whose process serves the store, and may end next
                self._wait([f"{key}/read" for key in keys], purpose)
            self._old_keys.append([own, f"{own}/read"])
            if len(self._old_keys) > 2:  # all ranks have come to the last exchange, so all have read those before
                for key in self._old_keys.pop(0):
                    self._store.delete_key(key)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise TransportError(
                f"the store of the ranks' order has gone away, mostly since rank 0 has ended: {first_line(error)}",
                op=_OP, rank=world.rank, peers=(0,),
            ) from error  # fmt: skip
        return [parse_json(unseal(data, key)) for key, data in zip(keys, found, strict=True)]

    def _wait(self, keys: list[str], purpose: str) -> None:
        """Block until the keys of all ranks are there, at most the communicator's timeout."""
        world, pause = self._world, _PAUSE_S[0]
        seconds = world.timeout or math.inf
        wait = RankWait(purpose, world.rank, world.size, seconds, exit_reason=self._exit_reason, op=_OP)
        while not self._store.check(keys):
            wait.check(lambda: [rank for rank, key in enumerate(keys) if not self._store.check([key])])
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S[1])

    def _exit_reason(self, rank: int) -> str:
        peers = self._world.peers
        return "" if peers is None else exit_reason(peers[rank].process)


def _first_difference(orders: list[list]) -> tuple[int, list]:
    """Return the place, from 1, and the entries of lists where they first differ; None stands for an end."""
    at = 0
    while all(at < len(each) for each in orders) and all(each[at] == orders[0][at] for each in orders):
        at += 1
    return at + 1, [each[at] if at < len(each) else None for each in orders]
