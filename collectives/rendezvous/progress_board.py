"""Progress board: how far each rank of a communicator has come in a sequence of collectives, in
memory that the ranks of a node share.

A rank writes its own line and reads the others', so the board takes no message. A line has a word:
an epoch, a position and a `Status`. In an epoch all ranks make the same collectives in one order,
and the position counts those that a rank has entered. An epoch ends for all ranks at once, at one
position:

- all ranks have left (`leave`): none of them is to make the collective at that position.
- all ranks have failed (`fail`, `recover`).

So a rank that finds another one in a later epoch knows that all ranks have ended the earlier one.

A rank that fails at a position takes part in the collectives before it, and in no later one. A rank
that enters a collective writes ARRIVING, looks for failures, and then writes RUNNING. A rank that
fails writes that, waits until such writes of the others are visible, and then looks for ranks that
have entered its position: it takes part in what they have entered (`is_needed`), and no rank enters
more. So all ranks fail at one position, and none of them waits for a collective that another one
doesn't make.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

from ..comm.agree import all_gather_object
from ..comm.communicator import Communicator
from ..comm.liveness import exit_reason, this_process
from ..comm.waiting import RankWait
from ..errors import TransportError

__all__ = ["ProgressBoard", "Status", "open_board"]

_LINE = 8  # words of a rank: its own cache line. Line 0 has the newest epoch in which a rank has failed
_WANT, _REASON, _PROGRESS = 1, 3, 5  # in a line, two words each: of even and of odd epochs
_POSITION, _EPOCH = 3, 39  # bits below
_STEP = 1 << _POSITION
_STATUS = _STEP - 1
_POSITIONS = (1 << _EPOCH - _POSITION) - 1
_VISIBLE_S = 1e-3  # after it a write is visible to all ranks
_SPINS = 200
_OPEN_TIMEOUT_S = 300.0  # where the communicator has no limit of its own


class Status(enum.IntEnum):
    """What a rank does at its position.

    RUNNING: it has entered all collectives before it. ARRIVING: it is about to enter the one at it.
    LEFT: it waits for the others, since it doesn't want that one. FAILED: it has raised an error.
    INTERRUPTED: another error than ours has ended what it did.
    """

    RUNNING, ARRIVING, LEFT, FAILED, INTERRUPTED = range(5)


class ProgressBoard:
    """The lines of all ranks. `memory`: shared by them, at least ``size_of(size)`` bytes of zeros.

    `processes`: the ranks' identities, as `this_process` returns them. `timeout`: a function that
    returns the limit of a wait in seconds; None: no limit.
    """

    def __init__(self, memory, rank: int, processes: list[str], timeout: Callable[[], float | None]):
        self.rank = rank
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._processes = processes
        self._timeout = timeout
        self._lines = {each: (1 + each) * _LINE for each in range(len(processes)) if each != rank}
        self._own = (1 + rank) * _LINE
        self._epoch = 0
        self.progress: list[int] = [0] * len(processes)  # of all ranks, as `leave` or `recover` found it last
        self._begin_epoch()

    @staticmethod
    def size_of(ranks: int) -> int:
        """Return the bytes of a board."""
        return (1 + ranks) * _LINE * 8

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._memory.close()

    @property
    def position(self) -> int:
        """The collectives that this rank has entered in this epoch."""
        return self._word >> _POSITION & _POSITIONS

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._word = self._epoch << _EPOCH
        self._words[self._own] = self._word

    def _read(self, rank: int) -> tuple[int, int, Status]:
        word = self._words[self._lines[rank]]
        return word >> _EPOCH, word >> _POSITION & _POSITIONS, self._as_status(word & _STATUS, rank)

    def _as_status(self, number: int, rank: int) -> Status:
        try:
            return Status(number)
        except ValueError:
            text = f"the line of rank {rank} in the memory that the ranks share has been overwritten"
            raise TransportError(text, op="fully_shard", rank=self.rank, peers=(rank,)) from None

    # ---- Entering a collective.

    def enter(self) -> int | None:
        """Enter the next collective; return None. If a rank has failed that takes no part in it,
        enter nothing and return that rank.
        """
        words = self._words
        words[self._own] = self._word | 1  # ARRIVING
        if words[0] == self._epoch and (failed := self._find_failed()) is not None:
            return failed
        self._word += _STEP
        words[self._own] = self._word
        return None

    def _find_failed(self) -> int | None:
        for rank in self._lines:
            epoch, position, status = self._read(rank)
            if epoch == self._epoch and status >= Status.FAILED and position <= self.position:
                return rank
        return None

    # ---- Leaving.

    def leave(self, want: int, reason: int, progress: int = 0) -> tuple[list[int] | None, int | None]:
        """Wait until each other rank has left at this position, or has entered the collective at
        it. Blocks on the host.

        `want`, `reason`, `progress`: numbers that the others may read. Returns (what each rank wants,
        None) where all ranks have left, and begins an epoch; `self.progress` then has theirs. (None,
        None): a rank has entered it. (None, a rank): that one has failed. Raises `RemoteError` for a
        rank whose process has ended and `CollectiveTimeout` past the limit, both with the rank.
        """
        self._write_notes(want, reason, progress)
        self._words[self._own] = self._word | Status.LEFT
        here = self.position
        entered: list[int] = []

        def is_over(rank: int, position: int, status: Status) -> bool:
            if position > here:
                entered.append(rank)
            return position > here or (status >= Status.FAILED and position == here)

        def find_missing() -> list[int]:
            return self._find_missing(is_over, lambda position, status: status is not Status.LEFT or position < here)

        self._wait("to the same collective of a sharded step", find_missing)
        if (failed := self._find_failed()) is not None:
            return None, failed
        if entered:
            return None, None
        return self._end_epoch(), None

    def _write_notes(self, want: int, reason: int, progress: int) -> None:
        side = self._epoch & 1
        self._words[self._own + _WANT + side] = want
        self._words[self._own + _REASON + side] = reason
        self._words[self._own + _PROGRESS + side] = progress

    def _end_epoch(self) -> list[int]:
        """Begin an epoch; return what each rank wants in the one before, and keep their progress."""
        lines, side = range(_LINE, (1 + len(self._processes)) * _LINE, _LINE), self._epoch & 1
        wants = [self._words[line + _WANT + side] for line in lines]
        self.progress = [self._words[line + _PROGRESS + side] for line in lines]
        self._begin_epoch()
        return wants

    def reason_of(self, rank: int) -> tuple[Status, int]:
        """Return the status of a rank that has failed in this epoch, and its reason."""
        return self._read(rank)[2], self._words[self._lines[rank] + _REASON + (self._epoch & 1)]

    def progress_of(self, rank: int) -> int:
        """Return the progress of a rank that has failed in this epoch, as it gave it to `fail`."""
        return self._words[self._lines[rank] + _PROGRESS + (self._epoch & 1)]

    # ---- Failing.

    def fail(self, status: Status, reason: int, progress: int = 0) -> None:
        """Write that this rank takes no part in the collective at its position and in later ones.

        The caller must take part in those for which `is_needed` returns True.
        """
        self._write_notes(status, reason, progress)
        self._status = status
        self._words[self._own] = self._word | status
        self._words[0] = max(self._words[0], self._epoch)
        time.sleep(_VISIBLE_S)

    def is_needed(self) -> bool:
        """Whether another rank has entered the collective at which this one has failed.

        This rank's position then moves behind it. Waits for ranks that are about to enter it.
        """
        self._wait("to a collective or its error", lambda: self._find(Status.ARRIVING))
        if not any(position > self.position for _, position, _ in self._others_in_epoch()):
            return False
        self._word += _STEP
        self._words[self._own] = self._word | self._status
        return True

    def _others_in_epoch(self) -> list[tuple[int, int, Status]]:
        found = [(rank, *self._read(rank)) for rank in self._lines]
        return [(rank, position, status) for rank, epoch, position, status in found if epoch == self._epoch]

    def _find(self, wanted: Status) -> list[int]:
        return [
            rank for rank, position, status in self._others_in_epoch() if status is wanted and position >= self.position
        ]

    def recover(self) -> list[Status] | None:
        """Wait until all ranks have failed, and begin an epoch; return how each has, and keep their
        progress in `self.progress`. Blocks on the host; raises as `leave` does.

        None: another rank has entered a collective since `fail`; call `is_needed` first.
        """
        needed: list[int] = []

        def is_over(rank: int, position: int, status: Status) -> bool:
            if position > self.position:
                needed.append(rank)
            return position > self.position

        def find_missing() -> list[int]:
            return self._find_missing(is_over, lambda position, status: status < Status.FAILED)

        self._wait("to the error of a sharded step", find_missing)
        if needed:
            return None
        return [self._as_status(number, rank) for rank, number in enumerate(self._end_epoch())]

    # ---- Waiting.

    def _find_missing(
        self, is_over: Callable[[int, int, Status], bool], is_missing: Callable[[int, Status], bool]
    ) -> list[int]:
        """Return the ranks that haven't come yet to where an epoch ends.

        `is_over`, of (rank, position, status): whether the wait is over because of that rank;
        `is_missing`, of (position, status): whether a rank is still to come.
        """
        missing = []
        for rank in self._lines:
            epoch, position, status = self._read(rank)
            if epoch > self._epoch:
                return []  # that rank has seen all of them there
            if epoch < self._epoch:  # it doesn't know yet that the last epoch has ended
                missing.append(rank)
            elif is_over(rank, position, status):
                return []
            elif is_missing(position, status):
                missing.append(rank)
        return missing

    def _wait(self, purpose: str, find_missing: Callable[[], list[int]]) -> None:
        if not find_missing():
            return
        limit = self._timeout()
        wait = RankWait(
            purpose, self.rank, len(self._processes), float("inf") if limit is None else limit, op="fully_shard",
            exit_reason=lambda rank: exit_reason(self._processes[rank]),
        )  # fmt: skip
        spins = 0
        while find_missing():
            spins += 1
            time.sleep(0 if spins < _SPINS else min(1e-3, 1e-5 * (spins - _SPINS)))
            wait.check(find_missing)


def open_board(control: Communicator, timeout: Callable[[], float | None]) -> ProgressBoard | None:
    """Open a board over the ranks of a communicator on host memory. A collective; None for ranks on
    several nodes.

    `timeout`: as in `ProgressBoard`. Rank 0 makes the memory and passes it on by a socket. Raises
    `TransportError` on all ranks where one rank can't open it.
    """
    if len(control.machines) > 1:
        return None
    seconds = control.timeout or _OPEN_TIMEOUT_S
    with contextlib.ExitStack() as stack:
        name = f"\0collectives-board-{secrets.token_hex(16)}"
        record = {"process": this_process()}
        if control.rank == 0:
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            server.settimeout(seconds)
            server.bind(name)
            server.listen(control.size)
            record["name"] = name
        records = all_gather_object(control, record)
        nbytes, memory, failed = ProgressBoard.size_of(control.size), None, ""
        try:
            memory = (
                _serve_memory(server, nbytes, control.size - 1)
                if control.rank == 0
                else _receive_memory(records[0]["name"], nbytes, seconds)
            )
        except OSError as error:
            failed = f"{type(error).__name__}: {error}"
        bad = [rank for rank, text in enumerate(all_gather_object(control, failed)) if text]
        if bad:
            raise TransportError(
                f"rank {bad[0]} could not share a page of memory with the others{failed and ': '}{failed}",
                op="fully_shard", rank=control.rank, peers=bad[:1],
            )  # fmt: skip
    return ProgressBoard(memory, control.rank, [each["process"] for each in records], timeout)


def _serve_memory(server: socket.socket, nbytes: int, peers: int) -> mmap.mmap:
    """Make a file without a name, pass it to the peers of this user, and map it."""
    fd = os.memfd_create("collectives-board", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        while peers:
            peer = server.accept()[0]
            with peer:
                peer.settimeout(server.gettimeout())
                _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if uid == os.getuid():
                    socket.send_fds(peer, [b"\0"], [fd])
                    peers -= 1
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _receive_memory(name: str, nbytes: int, seconds: float) -> mmap.mmap:
    """Map the file that rank 0 passes on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(seconds)
        peer.connect(name)
        _, fds, _, _ = socket.recv_fds(peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise ConnectionError("rank 0 has passed no file")
    try:
        return mmap.mmap(fds[0], nbytes)
    except ValueError as error:
        raise ConnectionError(f"rank 0 has passed another file: {error}") from error
    finally:
        os.close(fds[0])
