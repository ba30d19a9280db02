"""The life of a process group: a number that its ranks agree on, under which it keeps its keys in a store.

torch gives a group's name, and so its part of the store, to another group after the first one's end,
which may have other ranks. What the first one has left there is none of the second one's. A count in
each process would not do: a process that has come later, or was no member before, has another one.
So each rank leaves a request, rank 0 waits for new ones of all, and answers with the next number.
"""

from __future__ import annotations

import contextlib
import json
import time

import torch.distributed as dist

from ..comm.liveness import RankExits, exit_reason, has_ended, this_process
from ..comm.waiting import RankWait, first_line
from ..errors import TransportError
from ..json_records import parse_json, parse_numbers, parse_text
from ..secret import seal, unseal

__all__ = ["begin_life"]

_PAUSE_S = (0.0005, 0.02)  # first and longest pause between two looks at the store
_OLD_S = 60.0  # how long a rank waits for a new request where it finds one of a process that has ended


def begin_life(
    store: dist.Store, rank: int, size: int, seconds: float, purpose: str, exits: RankExits | None = None
) -> dist.Store:
    """Return the part of a group's store that this life of the group has for itself.

    Blocks until all ranks have come, at most `seconds`; `purpose`: what they come for, "to ...";
    `exits`: how ranks have ended that haven't come. Raises `CollectiveTimeout` with the ranks that have
    not come, `RemoteError` where one is known to have ended, `TransportError` where the store has gone
    away.
    """
    try:
        number = _Agreement(store, rank, size, exits).run(purpose, seconds)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        text = f"torch.distributed's store has gone away or failed: {first_line(error)}"
        raise TransportError(text, op="init", rank=rank) from error
    return dist.PrefixStore(f"life{number}", store)


class _Agreement:
    """One agreement on the number of a life, by rank `rank` of `size`.

    Keys: each rank's newest request, a number and its process; and rank 0's answer, the number of the
    life and the numbers of the requests that have gone into it and into those before, by rank.

    A process that was killed while it waited has left its request. It may be of an earlier try, after which
    the rank comes again in another process, so a request that was there before this rank came counts no
    more once its process has ended.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, exits: RankExits | None):
        self._store, self._rank, self._size, self._exits = store, rank, size, exits
        _, answered = self._read_answer()
        requests = [self._read_request(peer) for peer in range(size)]
        self._old = [number if has_ended(process) else 0 for number, process in requests]
        self._old_until = time.monotonic() + _OLD_S
        self._number = 1 + max(requests[rank][0], answered[rank])

    def run(self, purpose: str, seconds: float) -> int:
        """Block until all ranks have come; return the number of the life."""
        key, pause = self._request_key(self._rank), _PAUSE_S[0]
        wait = RankWait(purpose, self._rank, self._size, seconds, exit_reason=self._exit_reason, op="init")
        self._write(key, [self._number, this_process()])
        try:
            while True:
                life, answered = self._read_answer()
                if answered[self._rank] >= self._number:
                    return life
                if self._rank == 0 and not self._find_missing():
                    numbers = [self._read_request(rank)[0] for rank in range(self._size)]
                    self._write("life/answer", [life + 1, numbers + answered[self._size :]])
                    return life + 1
                wait.check(self._find_absent)
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S[1])
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of a store that has gone away
                self._write(key, [self._number, ""])  # it came in vain: no later life must count it
            raise

    def _find_missing(self) -> list[int]:
        """Return the ranks without a new request."""
        _, answered = self._read_answer()
        requests = [self._read_request(rank) for rank in range(self._size)]
        return [
            rank for rank, (number, process) in enumerate(requests)
            if number <= max(answered[rank], self._old[rank]) or not process
        ]  # fmt: skip

    def _find_absent(self) -> list[int]:
        """Return the ranks without a new request, and those whose process has ended since.

        Where all have come and live, it is rank 0 that has not answered.
        """
        missing = self._find_missing()
        absent = [rank for rank in range(self._size) if rank in missing or self._exit_reason(rank)]
        return absent if absent or self._rank == 0 else [0]

    def _exit_reason(self, rank: int) -> str:
        number, process = self._read_request(rank)
        _, answered = self._read_answer()
        if number > answered[rank]:
            is_old = number == self._old[rank] and time.monotonic() < self._old_until
            return "" if is_old else exit_reason(process)
        return "" if self._exits is None else self._exits.reason(rank)

    # ---- The store.

    @staticmethod
    def _request_key(rank: int) -> str:
        return f"life/request/{rank}"

    def _read_request(self, rank: int) -> tuple[int, str]:
        value = self._read(self._request_key(rank))
        return (0, "") if value is None else (parse_numbers(value[:1])[0], parse_text(value[1]))

    def _read_answer(self) -> tuple[int, list[int]]:
        """Return the number of the last life, and the request of each rank that has gone into one."""
        value = self._read("life/answer")
        life, answered = (0, []) if value is None else (parse_numbers(value[:1])[0], parse_numbers(value[1]))
        return life, answered + [0] * (self._size - len(answered))

    def _write(self, key: str, value) -> None:
        self._store.set(key, seal(json.dumps(value).encode(), key))

    def _read(self, key: str):
        if not self._store.check([key]):
            return None
        data = unseal(self._store.get(key), key)
        try:
            value = parse_json(data)
            if len(value) == 2:
                return value
        except (ValueError, TypeError):
            pass
        text = f"what is in the store as {key!r} can't be read: {data[:80]!r}"
        raise TransportError(text, op="init", rank=self._rank)
