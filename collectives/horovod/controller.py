"""Controller of a process set: negotiates operations in cycles, and carries them out.

A cycle is a small all-gather or two: of the number of a plan, where all ranks submit again what
they have submitted before, else of what they submit. A thread that waits for an operation runs the
cycles itself. While no thread waits, a background thread runs them, HOROVOD_CYCLE_TIME milliseconds
(default 1) after an operation was submitted, so that what was submitted in the meantime is fused. A
rank that has no operation under way takes no part in cycles and so holds up the others until it
submits one: they can't go on without it anyway. A rank whose operations all wait for other ranks
takes part with nothing new after a pause, and at once when an operation is submitted.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from operator import attrgetter

import torch

from ..comm.communicator import Communicator
from ..cuda_state import set_thread_device
from ..errors import Aborted, CollectiveTimeout, Mismatch, RemoteError
from ..recorder import recording
from .cycle_pause import CyclePause
from .exceptions import HorovodInternalError
from .fusion import Executor
from .message_table import CachedPlan, FusedResponse, MessageTable, fuse_responses
from .messages import CachedRequest, TensorTableEntry
from .request_exchange import RequestExchange
from .settings import Settings

__all__ = ["Controller"]

_cached_of = attrgetter("cached")
# Which the other ranks get, too, so that they don't wait for this one.
_BLOCKED_S = 1.0  # after which a wait of all threads that have submitted something is taken for one of no end
_EVERY_RANKS_ERRORS = (Mismatch, RemoteError, CollectiveTimeout, Aborted)


class Controller:
    """Negotiates and carries out the operations of one process set.

    ``control``: communicator on host memory for the cycles. ``comms``: communicator for each device
    type. It owns them. ``ranks``: the members of the process set, for messages. ``known_requests``:
    of operations on one tensor, by their arguments; for who submits them. ``outstanding``: entries
    that other ranks know of and that are not carried out, by key. ``broken``: the error after which
    nothing more is carried out.
    """

    def __init__(self, control: Communicator, comms: dict[str, Communicator], ranks: list[int], settings: Settings):
        self.control = control
        self.comms = comms
        self.ranks = ranks
        self.size = control.size
        self.rank = control.rank
        self.settings = settings
        self.known_requests: dict[tuple, CachedRequest] = {}
        self.outstanding: dict[str, TensorTableEntry] = {}
        self._negotiating: list[TensorTableEntry] = []  # entries that the running cycle sends
        self.broken: BaseException | None = None
        self._message_table = MessageTable(self.size)
        self._executor = Executor(comms, control)
        self._queue: deque[TensorTableEntry] = deque()
        self._names: set[str] = set()  # of entries under way
        self._blocked: dict[int, float] = {}  # threads that wait for an operation here, and since when
        self._exchange = RequestExchange(control)
        self._sequence = 0
        self._cycle_lock = threading.Lock()  # held during a cycle
        self._driver_thread = 0  # id of the thread that runs a cycle, or 0
        self._cycle_ended = threading.Condition()  # for threads that wait while another one runs the cycles
        self._waiting = 0  # threads at _cycle_ended
        self._pause = CyclePause(settings.cycle_time)
        self._join_requested = False
        self._join_sent = False
        self._last_joined: int | None = None
        self._join_done: _Completion | None = None
        self._thread: threading.Thread | None = None
        self._work_available = threading.Event()
        self._stopped = False
        self.forked = False
        _controllers.add(self)

    # ---- Submitting and waiting; from any thread.

    def submit(self, entry: TensorTableEntry, waits: bool = False) -> None:
        """Submit an operation.

        ``waits``: the caller waits for it next, so that no other thread need run the cycles. Raises
        `ValueError` where one of that name is under way, `HorovodInternalError` once the controller
        is broken.
        """
        if self.broken is not None or self.forked:
            self._raise_if_broken()
        if self._join_requested:
            raise ValueError("this rank has joined: it can't submit anything before all others have")
        if name := entry.key:
            if name in self._names:
                raise ValueError(
                    f"{name!r} is under way on this rank already: synchronize() it first, or give the second one "
                    "another name"
                )
            self._names.add(name)
        self._queue.append(entry)
        if self._pause.active:
            self._pause.end()
        if not waits and not self._work_available.is_set():
            if self._thread is None:
                self._start_thread()
            self._work_available.set()

    def wait(self, entry: TensorTableEntry) -> None:
        """Block until an operation is done, running cycles where no other thread does.

        Raises the operation's error. On CUDA it is done once it is enqueued: the current stream
        waits for it, and the host doesn't.
        """
        if not entry.done:
            self._wait_until_done(entry)
        if entry.error is not None:
            raise entry.error
        if entry.finish_event is not None:
            stream = torch.cuda.current_stream(self.comms["cuda"].device)
            stream.wait_event(entry.finish_event)
            for result in entry.results:
                if result.is_cuda:  # alltoall's counts aren't
                    result.record_stream(stream)

    def _wait_until_done(self, waited) -> None:
        """Block until an entry or a `_Completion` is done."""
        if self.forked:
            self._raise_if_broken()
        thread, outer = threading.get_ident(), self._blocked.get(threading.get_ident())
        self._blocked[thread] = time.monotonic()
        try:
            while not waited.done:
                if self._cycle_lock.acquire(False):
                    self._drive_cycle(waited)
                else:
                    self._wait_for_driver(waited)
        finally:
            if outer is None:
                del self._blocked[thread]
            else:  # this wait was a signal handler's
                self._blocked[thread] = outer

    def _is_blocked(self) -> bool:
        """Return whether this rank submits nothing more before an operation here ends: all threads of the
        program wait here, and have for a while. Any other thread might submit what the ranks wait for.
        """
        before = time.monotonic() - _BLOCKED_S
        blocked = {thread for thread, since in list(self._blocked.items()) if since < before}
        if not blocked or self._join_requested:
            return False
        return all(
            thread.ident in blocked for thread in threading.enumerate() if not thread.name.startswith("collectives")
        )

    def _drive_cycle(self, waited) -> None:
        """Run a cycle unless what is waited for is done, and release the cycle lock."""
        try:
            self._driver_thread = threading.get_ident()
            if not waited.done:
                self._run_cycle()
        finally:
            self._driver_thread = 0
            self._cycle_lock.release()
            if self._waiting:
                self._notify_waiters()

    def _wait_for_driver(self, waited) -> None:
        """Block until what is waited for is done, or no other thread runs the cycles.

        A wait for the cycle lock itself isn't enough: the thread that has it acquires it again for
        its next cycle before any other thread does, for as long as it waits for an operation of its
        own.
        """
        if self._driver_thread == threading.get_ident():
            raise HorovodInternalError(
                "hvd can't be waited for from a signal handler or a finalizer that has interrupted this thread's own "
                "operation: set a flag there, and act on it in the program"
            )
        with self._cycle_ended:
            self._waiting += 1
            try:
                while not waited.done and self._cycle_lock.locked():
                    self._cycle_ended.wait()
            finally:
                self._waiting -= 1

    def _notify_waiters(self) -> None:
        with self._cycle_ended:
            self._cycle_ended.notify_all()

    def join(self) -> int:
        """Take part with zeros in what the others submit until all have joined.

        Return the rank that joined last.
        """
        self._raise_if_broken()
        # Operations under way here go on. Their errors are raised in the threads that wait for
        # them, and all of them end before the join does.
        self._join_done = completion = _Completion()
        self._join_requested = True
        try:
            self._wait_until_done(completion)
            self._raise_if_broken()
            return self._last_joined
        finally:
            self._join_requested = self._join_sent = False
            self._last_joined = None

    def _raise_if_broken(self) -> None:
        if self.forked:
            raise HorovodInternalError("hvd was initialised in the parent process and can't be used in a forked child")
        if self.broken is not None:
            raise HorovodInternalError(str(self.broken)) from self.broken

    # ---- One cycle; the cycle lock is held.

    def _run_cycle(self) -> None:
        if self.broken is not None:
            self._fail_all(self.broken)
            return
        if self._queue or (self._join_requested and not self._join_sent):
            self._pause.reset()
        elif self.outstanding or self._join_sent:
            self._pause.wait(lambda: self._queue or self._join_sent)
        else:
            return
        try:
            new = self._drain_queue()
            plan = self._negotiate(new)
            if plan is not None:
                self._perform_plan(plan, new)
            else:
                self._perform_ready()
        except BaseException as error:
            self._fail_all(error)
            if not isinstance(error, _EVERY_RANKS_ERRORS):
                self._abort_comms()  # the error is this rank's alone, and the others wait
            if not isinstance(error, Exception):  # Ctrl-C during an all-gather: the ranks' tables may differ
                raise

    def _drain_queue(self) -> list[TensorTableEntry]:
        queue, new = self._queue, []
        self._negotiating = new
        while queue:
            new.append(queue.popleft())
        return new

    def _add_outstanding(self, new: list[TensorTableEntry]) -> None:
        """Add entries that aren't carried out at once to ``outstanding``, by their keys."""
        keys = self._message_table.keys_of(self.rank, map(_cached_of, new))
        for entry, key in zip(new, keys, strict=True):
            entry.key = key
            self.outstanding[key] = entry
        self._negotiating = []

    def _negotiate(self, new: list[TensorTableEntry]) -> CachedPlan | None:
        """Exchange new entries with the other ranks and add all ranks' ones to the message table.

        Returns a plan where all ranks have sent the same: then the table has nothing to add. After
        a cycle of a plan, which all ranks know of, they compare the numbers of their plans first.
        """
        table, exchange = self._message_table, self._exchange
        requests = tuple(map(_cached_of, new))
        join = self._join_requested and not self._join_sent
        if table.planned:
            plan = None if join else table.find_plan(requests)
            if exchange.agree(plan.number if plan is not None else 0):
                table.use_plan(plan)
                return plan
        if join:
            self._join_sent = True
        same = exchange.gather(requests, join=join, blocked=not requests and self._is_blocked())
        if same is not None:
            plan = table.plan_for(same, self.settings.fusion_threshold)
            if plan is not None:
                return plan
        self._add_outstanding(new)
        messages = exchange.messages()
        table.add_messages(messages)
        if all(each.blocked for each in messages) and table.waiting:
            self._fail_waiting()
        return None

    def _fail_waiting(self) -> None:
        """Fail all operations under way, on all ranks: each rank waits for one that others don't submit."""
        table = self._message_table
        text = f"the ranks wait for different operations, and none can be carried out: {table.describe_waiting()}"
        table.drop_waiting()
        for key, entry in list(self.outstanding.items()):
            del self.outstanding[key]
            self._names.discard(entry.key)
            entry.inputs, entry.outputs = [], None
            entry.error = HorovodInternalError(f"{_name(entry)}: {text}")
            entry.done = True

    def _perform_plan(self, plan: CachedPlan, new: list[TensorTableEntry]) -> None:
        if len(plan.items) == 1:  # of all of them, in their order
            self._perform_operation(plan.items[0][0], new)
        else:
            for item, positions in plan.items:
                self._perform_operation(item, [new[position] for position in positions])
        self._negotiating = []

    def _perform_ready(self) -> None:
        """Carry out what all ranks have submitted by now, and end the join where all have joined."""
        table = self._message_table
        for item in fuse_responses(table.pop_ready(), self.settings.fusion_threshold):
            self._perform_operation(item, [self.outstanding.get(response.key) for response in item.responses])
        last = table.finish_join() if table.joined else None
        if last is not None:
            self._last_joined = last
            self._join_done.done = True

    def _perform_operation(self, item: FusedResponse, entries: list[TensorTableEntry | None]) -> None:
        recorder, error = recording.active, item.error
        begun = time.perf_counter_ns() if recorder is not None else 0
        if error is None:
            self._executor.run(item, entries)
        if recorder is not None:
            name = _name(entries[0]) if entries[0] is not None else "for others"
            name = name if len(entries) == 1 else f"{len(entries)} fused, {name} first"
            recorder.add("horovod", name, begun, time.perf_counter_ns())
        outstanding, names = self.outstanding, self._names
        for entry in entries:
            self._sequence += 1
            if entry is not None:
                entry.sequence = self._sequence
                outstanding.pop(entry.key, None)
                names.discard(entry.key)
                entry.inputs = []
                if error is not None:
                    entry.error = HorovodInternalError(f"{entry.key}: {error}")
                entry.done = True

    def _fail_all(self, error: BaseException) -> None:
        """End all operations under way with an error, and break the controller."""
        error = self.broken = self.broken or error  # the first error is the cause
        failing = [each for each in self._negotiating if not each.done] + self._drain_queue()
        self._negotiating = []
        failing += [self.outstanding.popitem()[1] for _ in range(len(self.outstanding))]
        for entry in failing:
            failure = HorovodInternalError(f"{_name(entry)}: {error}")
            failure.__cause__ = error
            self._names.discard(entry.key)
            entry.inputs, entry.outputs = [], None
            entry.error = failure
            entry.done = True
        if self._join_done is not None:
            self._join_done.done = True

    # ---- The background thread, which runs the cycles while no thread waits.

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._background_loop, name="collectives horovod", daemon=True)
        self._thread.start()

    def set_thread_device(self) -> None:
        """Make this rank's GPU the calling thread's device; our threads call it first."""
        for comm in self.comms.values():
            set_thread_device(comm.device)

    def _background_loop(self) -> None:
        self.set_thread_device()
        while True:
            self._work_available.wait()
            if self._stopped:
                return
            self._work_available.clear()
            while (self._queue or self.outstanding) and not self._stopped:
                remaining = self._remaining_cycle_time()
                if remaining > 0:
                    time.sleep(remaining)
                    continue
                self._cycle_lock.acquire()
                self._drive_cycle(_Completion(not self._queue and not self.outstanding))

    def _remaining_cycle_time(self) -> float:
        """Return the seconds before the background thread runs a cycle.

        Until then waiting threads run it, and further entries can be fused.
        """
        if self.outstanding:
            return 0.0
        try:
            return self._queue[0].submit_time + self.settings.cycle_time - time.monotonic()
        except IndexError:  # another thread has just taken it
            return 0.0

    # ---- Stalls.

    def stalled_entries(self, seconds: float) -> list[tuple[TensorTableEntry, str, list[int]]]:
        """Return old entries of this rank: entry, name, and the job's ranks that it waits for."""
        before = time.monotonic() - seconds
        found = []
        known = [*self.outstanding.items(), *((_name(each), each) for each in (*self._negotiating, *list(self._queue)))]
        for key, entry in known:
            if entry.submit_time > before or entry.done:
                continue
            missing = self._message_table.missing_ranks(key)
            if not missing and (pending := self.control._pending_info()) is not None:
                missing = list(pending.peers)  # they take no part in the cycle: they have nothing under way
            found.append((entry, key, [self.ranks[rank] for rank in missing]))
        return found

    # ---- The end.

    def abort(self, error: BaseException) -> None:
        """End all operations under way with an error; from any thread."""
        self.broken = self.broken or error
        self._abort_comms()
        if self._driver_thread == threading.get_ident():  # a signal handler during a cycle
            self._fail_all(error)
        else:
            with self._cycle_lock:
                self._fail_all(error)
            self._notify_waiters()
        self._stop_thread()

    def _abort_comms(self) -> None:
        for comm in (self.control, *self.comms.values()):
            comm.abort()

    def close(self) -> None:
        """Close the communicators and end the thread; operations under way fail."""
        if self.forked:
            return
        error = HorovodInternalError("hvd.shutdown() was called")
        under_way = self._queue or self.outstanding or any(not each.done for each in self._negotiating)
        if under_way or self._join_requested or self.broken is not None:
            self.abort(error)
            return
        self.broken = error
        self._stop_thread()
        for comm in (self.control, *self.comms.values()):
            comm.close()

    def _stop_thread(self) -> None:
        self._stopped = True
        self._work_available.set()
        interrupted = self._driver_thread == threading.get_ident()  # the thread may wait for this one's cycle to end
        if self._thread is not None and self._thread is not threading.current_thread() and not interrupted:
            self._thread.join()


class _Completion:
    """Completion flag of what a thread waits for, where that is no entry."""

    __slots__ = ("done",)

    def __init__(self, done: bool = False):
        self.done = done


def _name(entry: TensorTableEntry) -> str:
    return entry.key or f"{entry.request.kind}.noname"


_controllers: weakref.WeakSet[Controller] = weakref.WeakSet()


def _after_fork() -> None:
    for controller in list(_controllers):
        controller.forked = True


os.register_at_fork(after_in_child=_after_fork)
