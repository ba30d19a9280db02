"""The coordinator of a process set: cycles in which the ranks tell what is new, and carry out what all have submitted.

A cycle is one small all-gather. Whoever waits for an operation drives it in its own thread; while nobody waits, a
background thread does, HOROVOD_CYCLE_TIME milliseconds (default 1) after a submission, so that what came in the
meantime is fused. A rank that has nothing under way doesn't take part, and so holds up the others until it submits
something: they couldn't go on without it anyway. A rank whose operations all wait for others takes part without
anything new after a pause, and at once when something is submitted.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque

import numpy
import torch

from ..comm.communicator import Communicator
from ..cuda_state import set_thread_device
from ..errors import CollectivesError, InvalidArgument
from ..recorder import recording
from .exceptions import HorovodInternalError
from .fusion import Executor
from .messages import Submission, decode, encode
from .negotiation import Batch, Plan, Ready, Table, fuse, key_of
from .settings import Settings

__all__ = ["Coordinator"]

_WORDS = 256  # int32 in a row: flags, bytes of what follows in a second exchange, count of numbers, the numbers
_HEAD = 3
_JOINS, _AFRESH, _BEHIND = 1, 2, 4  # flags; _BEHIND: the numbers had no room in the row
_MOST_KNOWN = 8192  # signatures that the others remember of a rank
_FIRST_PAUSE = 50e-6  # seconds; of a rank that takes part with nothing new


class Coordinator:
    """Negotiates and carries out the operations of one process set; ``control`` and ``comms`` are its own.

    ``name``: of the process set, for messages; ``ranks``: its members, for messages.
    """

    def __init__(self, control: Communicator, comms: dict[str, Communicator], ranks: list[int], settings: Settings):
        self.control = control
        self.comms = comms
        self.ranks = ranks
        self.size = control.size
        self.rank = control.rank
        self.settings = settings
        self.outstanding: dict[str, Submission] = {}  # announced, and not carried out
        self._announced: list[Submission] = []  # of the cycle under way
        self.broken: BaseException | None = None
        self._table = Table(self.size)
        self._executor = Executor(comms, control)
        self._queue: deque[Submission] = deque()
        self._names: set[str] = set()  # of what is under way
        self._numbers: dict = {}  # signature -> its number with the others
        self._unnamed: dict[str, int] = {}
        self._sequence = 0
        self._driver = threading.Lock()  # held through a cycle
        self._driving = 0  # the thread that holds it, while it does a cycle
        self._turn = threading.Condition()  # for threads that wait while another one drives
        self._followers = 0
        self._fresh = threading.Condition()
        self._resting = False
        self._pause = _FIRST_PAUSE
        self._wants_join = False
        self._joining = False
        self._last_joined: int | None = None
        self._join_end: _End | None = None
        self._row = numpy.zeros(_WORDS, dtype=numpy.int32)
        self._rows = numpy.zeros((self.size, _WORDS), dtype=numpy.int32)
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()
        self._ended = False
        self.forked = False
        _all.add(self)

    # ---- Submitting and waiting; from any thread.

    def submit(self, submission: Submission, *, waits: bool = False) -> None:
        """Enter an operation. ``waits``: the caller waits for it next, so that no other thread need drive it.

        Raises `ValueError` where one of that name is under way, `HorovodInternalError` once the coordinator is broken.
        """
        self._check()
        if self._wants_join:
            raise ValueError("this rank has joined: it can't submit anything before all others have")
        name = submission.key
        if name:
            if name in self._names:
                raise ValueError(
                    f"{name!r} is under way on this rank already: synchronize() it first, or give the second one "
                    "another name"
                )
            self._names.add(name)
        self._queue.append(submission)
        if self._resting:
            with self._fresh:
                self._fresh.notify()
        if not waits and not self._awake.is_set():
            if self._thread is None:
                self._begin()
            self._awake.set()

    def wait(self, submission: Submission) -> None:
        """Block until an operation is done, driving the cycles where nobody does; raises its error.

        On CUDA it is done once it is queued: the current stream is ordered after it, and the host doesn't wait.
        """
        self._until(submission)
        if submission.error is not None:
            raise submission.error
        if submission.finished is not None:
            stream = torch.cuda.current_stream(self.comms["cuda"].device)
            stream.wait_event(submission.finished)
            for result in submission.results:
                if result.is_cuda:  # alltoall's counts aren't
                    result.record_stream(stream)

    def _until(self, end) -> None:
        """Block until a submission or an `_End` is done."""
        while not end.done:
            if self._driver.acquire(blocking=False):
                self._drive(end)
            else:
                self._follow(end)

    def _drive(self, end) -> None:
        """Do a cycle unless there is no need any more, and give the driver's lock back."""
        try:
            self._driving = threading.get_ident()
            if not end.done:
                self._cycle()
        finally:
            self._driving = 0
            self._driver.release()
            self._wake()

    def _follow(self, end) -> None:
        """Leave the driving to another thread, until what is waited for is done or nobody drives.

        To wait for the driver's lock itself won't do: the thread that has it takes it again for its next cycle before
        any other gets it, for as long as it waits for something of its own.
        """
        if self._driving == threading.get_ident():
            raise HorovodInternalError(
                "hvd can't be waited for from a signal handler or a finalizer that has interrupted this thread's own "
                "operation: set a flag there, and act on it in the program"
            )
        with self._turn:
            self._followers += 1
            try:
                while not end.done and self._driver.locked():
                    self._turn.wait()
            finally:
                self._followers -= 1

    def _wake(self) -> None:
        if self._followers:
            with self._turn:
                self._turn.notify_all()

    def join(self) -> int:
        """Take part with zeros in what the others submit until they all have joined; give the last one's rank."""
        self._check()
        # What is under way here goes on: its errors are for who waits for it, and all of it ends before this does.
        self._join_end = end = _End()
        self._wants_join = True
        try:
            self._until(end)
            self._check()
            return self._last_joined
        finally:
            self._wants_join = self._joining = False
            self._last_joined = None

    def _check(self) -> None:
        if self.forked:
            raise HorovodInternalError("hvd was initialised in the parent process and can't be used in a forked child")
        if self.broken is not None:
            raise HorovodInternalError(str(self.broken)) from self.broken

    # ---- One cycle; the driver's lock is held.

    def _cycle(self) -> None:
        if self.broken is not None:
            self._fail(self.broken)
            return
        if not self._queue and not (self._wants_join and not self._joining):
            if not self.outstanding and not self._joining:
                return
            with self._fresh:
                self._resting = True
                if not self._queue and not self._joining:
                    self._fresh.wait(self._pause)
                self._resting = False
            self._pause = min(2 * self._pause, self.settings.cycle_time or _FIRST_PAUSE)
        else:
            self._pause = _FIRST_PAUSE
        try:
            new = self._drain()
            plan = self._exchange(new)
            if plan is not None:
                for item, places in plan.items:
                    self._carry_out(item, [new[place] for place in places])
                self._announced = []
            for item in fuse(self._table.take(), self.settings.fusion_threshold):
                members = item.members if isinstance(item, Batch) else [item]
                self._carry_out(item, [self.outstanding.get(member.key) for member in members])
            last = self._table.all_joined() if self._table.joined else None
            if last is not None:
                self._unnamed.clear()  # this rank hasn't counted what the others did after it had joined
                self._last_joined = last
                self._join_end.done = True
        except Exception as error:
            self._fail(error)
            if not isinstance(error, CollectivesError) or isinstance(error, InvalidArgument):
                self._abort_comms()  # it is of this rank alone, and the others wait
        except BaseException as error:  # Ctrl-C in the midst of an exchange: the ranks no longer agree
            self._fail(error)
            self._abort_comms()
            raise

    def _drain(self) -> list[Submission]:
        queue = self._queue
        self._announced = new = [queue.popleft() for _ in range(len(queue))]
        return new

    def _enter(self, new: list[Submission]) -> None:
        """Have submissions wait under their names, where they aren't carried out at once."""
        for submission in new:
            if not submission.key:
                submission.key = key_of(submission.signature, self._unnamed)
            self.outstanding[submission.key] = submission
        self._announced = []

    def _exchange(self, new: list[Submission]) -> Plan | None:
        """Tell the others what is new here, and enter what is new anywhere; or give the plan of what is alike."""
        row, known = self._row, self._numbers
        flags = 0
        if self._wants_join and not self._joining:
            flags, self._joining = _JOINS, True
        requests = [each.request for each in new]
        unknown = [each for each in dict.fromkeys(requests) if each not in known]
        if len(known) + len(unknown) > _MOST_KNOWN:
            known.clear()
            unknown = list(dict.fromkeys(requests))
            flags |= _AFRESH
        for each in unknown:
            known[each] = len(known)
        numbers = [known[each] for each in requests]
        behind = len(numbers) > _WORDS - _HEAD
        extra = b""
        if unknown or behind:
            extra = encode([each.signature for each in unknown], numbers if behind else None)
        row[:_HEAD] = flags | (_BEHIND if behind else 0), len(extra), len(numbers)
        if not behind:
            row[_HEAD:] = 0
            row[_HEAD : _HEAD + len(numbers)] = numbers
        rows = self._gather(row)
        table = self._table
        if not flags and not extra and (rows == row).all():
            plan = table.plan_alike(tuple(numbers), self.settings.fusion_threshold)
            if plan is not None:
                for kind, count in plan.unnamed.items():
                    self._unnamed[kind] = self._unnamed.get(kind, 0) + count
                return plan
        self._enter(new)
        extras = self._gather_extras(rows, extra)
        for rank, (theirs, told) in enumerate(zip(rows, extras, strict=True)):
            flags, _, count = theirs[:_HEAD].tolist()
            numbers = theirs[_HEAD : _HEAD + count].tolist()
            if told:
                learnt, listed = decode(told, rank)
                table.learn(rank, learnt, afresh=bool(flags & _AFRESH))
                numbers = listed if flags & _BEHIND else numbers
            if numbers:
                table.announce(rank, numbers)
            if flags & _JOINS:
                table.join(rank)
        return None

    def _gather(self, row):
        if self.size == 1:
            return row[None]
        self.control.all_gather(self._rows, row)
        return self._rows

    def _gather_extras(self, rows, extra: bytes) -> list[bytes]:
        lengths = rows[:, 1].tolist()
        longest = max(lengths)
        if not longest:
            return [b""] * self.size
        sent = numpy.zeros(longest, dtype=numpy.uint8)
        sent[: len(extra)] = numpy.frombuffer(extra, dtype=numpy.uint8)
        got = sent[None]
        if self.size > 1:
            got = numpy.empty((self.size, longest), dtype=numpy.uint8)
            self.control.all_gather(got, sent)
        return [bytes(data[:length]) for data, length in zip(got, lengths, strict=True)]

    def _carry_out(self, item: Ready | Batch, own: list[Submission | None]) -> None:
        begun = time.perf_counter_ns()
        error = None if isinstance(item, Batch) else item.error
        if error is None:
            with torch.no_grad(), torch.inference_mode(False):
                self._executor.run(item, own)
        if recording.active is not None:
            name = _name(own[0]) if own[0] is not None else "for others"
            name = name if len(own) == 1 else f"{len(own)} fused, {name} first"
            recording.active.add("horovod", name, begun, time.perf_counter_ns())
        outstanding, names = self.outstanding, self._names
        for submission in own:
            self._sequence += 1
            if submission is not None:
                submission.sequence = self._sequence
                outstanding.pop(submission.key, None)
                names.discard(submission.key)
                submission.inputs = []
                if error is not None:
                    submission.error = HorovodInternalError(f"{submission.key}: {error}")
                submission.done = True

    def _fail(self, error: BaseException) -> None:
        """End everything that is under way with an error, for good."""
        error = self.broken = self.broken or error  # the first one is the cause
        failing = [each for each in self._announced if not each.done] + self._drain()
        self._announced = []
        failing += [self.outstanding.popitem()[1] for _ in range(len(self.outstanding))]
        for submission in failing:
            failure = HorovodInternalError(f"{_name(submission)}: {error}")
            failure.__cause__ = error
            self._names.discard(submission.key)
            submission.inputs, submission.outputs = [], None
            submission.error = failure
            submission.done = True
        if self._join_end is not None:
            self._join_end.done = True

    # ---- The thread that drives the cycles while nobody waits.

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._work, name="collectives horovod", daemon=True)
        self._thread.start()

    def take_device(self) -> None:
        """Make this rank's GPU the calling thread's device; a thread of ours does so before anything else."""
        for comm in self.comms.values():
            set_thread_device(comm.device)

    def _work(self) -> None:
        self.take_device()
        while True:
            self._awake.wait()
            if self._ended:
                return
            self._awake.clear()
            while (self._queue or self.outstanding) and not self._ended:
                early = self._early()
                if early > 0:
                    time.sleep(early)
                    continue
                self._driver.acquire()
                self._drive(_End(not self._queue and not self.outstanding))

    def _early(self) -> float:
        """Give the seconds for which this thread leaves what was submitted to those who wait, and to be fused."""
        if self.outstanding:
            return 0.0
        try:
            return self._queue[0].begun + self.settings.cycle_time - time.monotonic()
        except IndexError:  # somebody has just taken it
            return 0.0

    # ---- What is stuck.

    def stalled(self, seconds: float) -> list[tuple[Submission, str, list[int]]]:
        """Give what was submitted here so long ago: submission, name, and the ranks (of the job) that it waits for."""
        before = time.monotonic() - seconds
        found = []
        known = [*self.outstanding.items(), *((_name(each), each) for each in (*self._announced, *list(self._queue)))]
        for key, submission in known:
            if submission.begun > before or submission.done:
                continue
            missing = self._table.missing(key)
            if not missing and (pending := self.control._pending()) is not None:
                missing = list(pending.peers)  # they haven't come to the cycle, so they have nothing under way at all
            found.append((submission, key, [self.ranks[rank] for rank in missing]))
        return found

    # ---- The end.

    def abort(self, error: BaseException) -> None:
        """End all that is under way with an error, from any thread."""
        self.broken = self.broken or error
        self._abort_comms()
        if self._driving == threading.get_ident():  # a signal handler in the midst of a cycle
            self._fail(error)
        else:
            with self._driver:
                self._fail(error)
            self._wake()
        self._stop()

    def _abort_comms(self) -> None:
        for comm in (self.control, *self.comms.values()):
            comm.abort()

    def close(self) -> None:
        """End the coordinator; what is under way fails."""
        if self.forked:
            return
        error = HorovodInternalError("hvd.shutdown() was called")
        under_way = self._queue or self.outstanding or any(not each.done for each in self._announced)
        if under_way or self._wants_join or self.broken is not None:
            self.abort(error)
            return
        self.broken = error
        self._stop()
        for comm in (self.control, *self.comms.values()):
            comm.close()

    def _stop(self) -> None:
        self._ended = True
        self._awake.set()
        interrupted = self._driving == threading.get_ident()  # the thread may wait for this one's cycle to end
        if self._thread is not None and self._thread is not threading.current_thread() and not interrupted:
            self._thread.join()


class _End:
    """What can be waited for beside a submission."""

    __slots__ = ("done",)

    def __init__(self, done: bool = False):
        self.done = done


def _name(submission: Submission) -> str:
    return submission.key or f"{submission.signature.kind}.noname"


_all: weakref.WeakSet[Coordinator] = weakref.WeakSet()


def _after_fork() -> None:
    for coordinator in list(_all):
        coordinator.forked = True


os.register_at_fork(after_in_child=_after_fork)
