"""Operations under way: Work, and the lanes (queues on the host, side streams on CUDA) that they run on.

A `Flight` is one submission to a lane and holds its arrays until the engine has done with them, whether or not anybody
keeps the `Work`.

What is issued while a stream is captured becomes part of a CUDA graph, and runs when that is replayed. Its flight is
`captured`: nobody asks whether it has ended, and its arrays are held as long as the communicator is open, since no
graph of torch's says when it goes away.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from datetime import timedelta

import torch

from .._nccl import check
from ..cuda_state import capture_id, is_capturing, queries_allowed, stream_from_address
from ..errors import Aborted, CollectivesError, CollectiveTimeout, CudaError, InvalidArgument, InvalidUsage

__all__ = ["CudaLane", "HostLane", "Work"]


class Flight:
    """One submission: its ticket or event, the arrays it uses, and how it ended."""

    __slots__ = ("captured", "ended", "error", "held", "mark", "op", "owners", "seen", "verdict")

    def __init__(self, op: str, held: tuple):
        self.op = op
        self.held = held
        self.mark = None  # host: the queue's ticket; CUDA: an event
        self.captured: int | None = None  # the capture that it is part of, if it is: it runs when the graph does
        self.ended = False
        self.error: CollectivesError | None = None
        self.owners = 0
        self.seen = False  # somebody was told of the error
        self.verdict = None  # of several steps, of which the last may end well all the same: gives the error of one

    def end(self, error: CollectivesError | None = None) -> None:
        if self.ended:  # by the watchdog's error, which made the operation end
            return
        if self.verdict is not None:
            error = self.verdict() or error
            self.verdict = None
        self.error = error
        self.ended = True
        self.held = ()
        if not self.owners:
            self.complain()

    def complain(self) -> None:
        """Warn of an error that nobody can be told of any more. After an abort here it is no news."""
        if self.error is not None and not self.seen and not isinstance(self.error, Aborted):
            self.seen = True
            warnings.warn(f"{self.op} failed and nobody waited for it: {self.error}", RuntimeWarning, stacklevel=2)


class Work:
    """Stand for an operation that was started with ``async_op=True``.

    The arrays stay alive until the engine has done with them, also where the Work is dropped.
    """

    __slots__ = ("__weakref__", "_flight", "_future", "_lane", "_result", "nbytes", "op")

    def __init__(self, op: str, nbytes: int, result):
        self.op = op
        self.nbytes = nbytes
        self._result = result
        self._lane = None
        self._flight: Flight | None = None
        self._future = None

    def _start(self, lane, flight: Flight) -> None:
        self._lane = lane
        flight.owners += 1
        self._flight = flight

    def _flying(self) -> Flight:
        if self._flight is None:
            raise InvalidUsage(
                "the group that this operation belongs to hasn't been issued: leave its `with` block first "
                "(an exception inside it drops all its operations)",
                op=self.op,
            )
        return self._flight

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; return True or raise the operation's error.

        On the host the call blocks. On CUDA, without a timeout, it orders torch's current stream after the operation
        and returns at once, as torch's own Work does; with a timeout it blocks. Raises `CollectiveTimeout` when the
        time runs out: the operation stays in flight and can be waited for again.

        Of an operation that was captured in a CUDA graph: inside the capture it orders the current stream; later there
        is nothing to wait for, since the stream that replays the graph has the order. With a timeout, and in `done` and
        `exception`, it is `InvalidUsage`.
        """
        flight = self._flying()
        if timeout is None:
            pass
        elif isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        elif isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise InvalidArgument(f"timeout must be in seconds, or None for no limit, not {timeout!r}", op=self.op)
        if not flight.ended and not self._lane.wait(flight, timeout):
            raise self._lane.overdue(self, timeout)
        if flight.error is not None:
            flight.seen = True
            raise flight.error
        return True

    def release(self) -> None:
        """Let go of the arrays before the end; a local call, behind `wait()`.

        On CUDA: for arrays that were allocated on the stream that has waited, which takes their memory again in its own
        order. Else they are held until the host sees that the operation has ended, and a host that runs ahead of the
        GPU needs the memory of all of them. On the host `wait()` has let go of them.
        """
        self._flying().held = ()

    def done(self) -> bool:
        """Tell whether the operation has ended, well or badly; never blocks."""
        flight = self._flying()
        if not flight.ended:
            self._lane.look(flight)
        return flight.ended

    is_completed = done

    def exception(self) -> CollectivesError | None:
        """Give the error with which the operation ended, or None; never blocks."""
        if not self.done():
            return None
        self._flight.seen = True
        return self._flight.error

    def result(self):
        """Wait as `wait()` does and give the output array."""
        self.wait()
        return self._result

    def future(self, result=None) -> torch.futures.Future:
        """Give a future of the output array, or of `result` in its place; on CUDA it must be a torch tensor.

        On the host its callbacks run in the communicator's queue: they must not wait for operations of this
        communicator. On CUDA it is complete at once and carries the stream's event.
        """
        flight = self._flying()
        if self._future is None:
            self._future = self._lane.future(flight, self._result if result is None else result)
        return self._future

    def __repr__(self):
        flight = self._flight
        state = (
            "not issued" if flight is None
            else "in a CUDA graph" if flight.captured is not None
            else "in flight" if not flight.ended
            else "done" if flight.error is None
            else f"failed: {flight.error}"
        )  # fmt: skip
        return f"<Work {self.op} of {self.nbytes} bytes, {state}>"

    def __del__(self):
        flight = getattr(self, "_flight", None)  # torch.compile makes objects without __init__
        if flight is not None:
            flight.owners -= 1
            if flight.ended and not flight.owners:
                flight.complain()


class Lane:
    """Where a communicator's asynchronous operations run, in order: what both engines' lanes share.

    A submission is ``begin()``, the calls, ``end()``; the lane is locked between the two, so that what is recorded at
    the end is the submission's own and not that of another thread.
    """

    def __init__(self, comm):
        self._comm = comm
        self._pending: deque[Flight] = deque()
        self._kept: list[tuple] = []  # arrays of which nobody can say when they are let go of: held until the end
        self._lock = threading.RLock()
        self._given_up: CollectivesError | None = None

    def begin(self, stream: int | None = None) -> int:
        """Open a submission and give the stream to issue it on; `end` or `cancel` must follow."""
        self._lock.acquire()
        try:
            return self._open(stream)
        except BaseException:
            self._lock.release()
            raise

    def end(self, op: str, held: tuple, works=(), verdict=None) -> Flight:
        """Close a submission: hold its arrays until it has ended, and start its Works."""
        try:
            flight = Flight(op, held)
            flight.verdict = verdict
            for work in works:  # before another thread can see it end
                work._start(self, flight)
            self._follow(flight)
            self._sweep()
            return flight
        finally:
            self._lock.release()

    def cancel(self, op: str, held: tuple) -> None:
        """Close a submission that failed. A part of it may have been issued, so its arrays are held all the same."""
        try:
            flight = Flight(op, held)
            flight.seen = True  # the error is being raised
            self._follow(flight)
        except Exception:
            pass  # the arrays are kept; what is being raised has the cause
        finally:
            self._lock.release()

    def _follow(self, flight: Flight) -> None:
        """Mark the end of what was issued for a flight, and hold its arrays until then."""
        try:
            flight.mark, flight.captured = self._record()
        except BaseException as error:  # CUDA's are RuntimeErrors
            self._kept.append(flight.held)
            known = isinstance(error, CollectivesError)
            flight.end(error if known else CudaError(f"{type(error).__name__}: {error}", op=flight.op))
            raise
        if flight.captured is None:
            self._pending.append(flight)
        else:
            self._kept.append(flight.held)

    def busy(self) -> bool:
        """Tell whether something is in flight; never blocks."""
        with self._lock:
            self._sweep()
            return bool(self._pending)

    def give_up(self, error: CollectivesError) -> None:
        """Have what is in flight end with an error, since the communicator is about to be aborted; takes no lock."""
        self._given_up = self._given_up or error

    def settled(self) -> bool:
        """Tell whether all that is in flight was seen to end; a look that changes nothing, as a finalizer needs it."""
        return all(flight.ended for flight in tuple(self._pending))

    def drain(self, timeout: float | None) -> bool:
        """Block until all that is in flight has ended; False when the time ran out. Errors stay with their flights."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._sweep()
                if not self._pending:
                    return True
                flight = self._pending[-1]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.block(flight, left):
                return False

    def leave(self, gone) -> tuple:
        """Forget, in a forked child, the parent's operations; give what must not be freed here."""
        kept = (self._pending, self._kept, self.__dict__.get("_queue"))
        self._lock = threading.RLock()
        self._pending, self._kept = deque(), []
        self._queue = gone
        return kept

    def fail(self, error: CollectivesError, end) -> None:
        """End all that is in flight with an error, by calling `end`, behind which nothing uses its arrays any more.

        A thread that hangs inside of the engine may hold the lock: it comes out of there by `end`.
        """
        locked = self._lock.acquire(timeout=1.0)
        try:
            if locked:
                self._sweep()
            held = [flight.held for flight in self._pending]
            for flight in tuple(self._pending):
                flight.end(error)
            end()
            del held
        finally:
            if locked:
                self._lock.release()

    def _sweep(self) -> None:
        pending = self._pending
        while pending:
            flight = pending[0]
            if not flight.ended:
                self.look(flight)
                if not flight.ended:
                    return
            pending.popleft()


class HostLane(Lane):
    """A communicator's queue on the host engine, made at first use."""

    def __init__(self, comm):
        super().__init__(comm)
        self._queue = None
        self._waiters: dict[int, int] = {}  # waits under way, by thread
        self._closing = False

    def _open(self, stream):
        if self._queue is None:
            self._queue = self._comm.engine.library.queue_create()
        return self._queue.handle

    def _record(self):
        return self._queue.record(), None

    def block(self, flight: Flight, timeout: float | None) -> bool:
        """Block until a flight has ended, at most `timeout` seconds."""
        with self._lock:
            if flight.ended:
                return True
            queue = self._queue
            thread = threading.get_ident()
            self._waiters[thread] = self._waiters.get(thread, 0) + 1
        try:
            if not queue.wait(flight.mark, timeout):
                return False
        except CollectivesError as error:
            flight.end(error)
        else:
            flight.end()
        finally:
            with self._lock:
                left = self._waiters.pop(thread) - 1
                if left:  # this wait is a signal handler's, on top of another one
                    self._waiters[thread] = left
                self._sweep()
                late = self._closing and not self._waiters
            if late:
                self.close()
        return True

    wait = block

    def quiet(self, timeout: float) -> bool:
        """Block until nothing is in flight; False when the time ran out."""
        return self.drain(timeout)

    def look(self, flight: Flight) -> None:
        """Update a flight's state without waiting."""
        try:
            if self._queue.done(flight.mark):
                flight.end()
        except CollectivesError as error:
            flight.end(error)

    def overdue(self, work: Work, timeout: float) -> CollectiveTimeout:
        """Build the error of a wait that ran out, from what the engine is waiting for."""
        comm = self._comm
        info = comm._pending()
        text = f"not done after {timeout} s ({work.nbytes} bytes); it stays in flight and can be waited for again"
        if info is None:
            return CollectiveTimeout(
                f"{text}. Nothing is in progress on the communicator: a callback or another communicator's operation "
                "holds up the queue",
                op=work.op, rank=comm.rank, nbytes=work.nbytes,
            )  # fmt: skip
        missing = ", ".join(map(str, info.peers)) or "none"
        return CollectiveTimeout(
            f"{text}. In progress: {info.op} number {info.seq} of {info.nbytes} bytes; ranks that have not arrived: "
            f"{missing}",
            op=work.op, rank=comm.rank, peers=info.peers, seq=info.seq, nbytes=work.nbytes,
        )  # fmt: skip

    def future(self, flight: Flight, result) -> torch.futures.Future:
        """Give a future that the queue's thread fulfils."""
        future = torch.futures.Future()

        def settle():
            if not flight.ended:
                self.look(flight)
            _fulfil(future, flight, result)

        with self._lock:
            if not flight.ended:
                self.look(flight)
            if not flight.ended:
                self._queue.call(settle)
                return future
        settle()
        return future

    def mark(self, stream: int):
        """Give a function that tells whether what the queue holds now has ended, for the watchdog."""
        with self._lock:
            queue = self._queue
            if queue is None:
                return lambda: True
            ticket = queue.record()
        return lambda: queue.done(ticket)

    def close(self) -> None:
        """End the queue's thread, after what is queued has run; `drain` comes first."""
        while True:
            with self._lock:
                self._closing = True
                if threading.get_ident() in self._waiters:
                    return  # in a signal handler on top of a wait: that one closes when it comes out
                if not self._waiters:
                    queue, self._queue = self._queue, None
                    break
            time.sleep(1e-4)  # all has ended: other threads are just coming out of their waits
        if queue is not None:
            queue.close()
        self._kept.clear()


class CudaLane(Lane):
    """A communicator's side stream on CUDA, made at first use."""

    def __init__(self, comm):
        super().__init__(comm)
        self._side = None
        self._stream = None

    def _open(self, stream):
        device = self._comm.device
        if stream is not None:
            self._stream = stream_from_address(stream, device)
            return stream
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        self._stream = self._side
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream.cuda_stream

    def _record(self):
        return (self._stream.record_event(), self._stream), capture_id(self._stream)

    def give_up(self, error: CollectivesError) -> None:
        """Have what is in flight end with an error, once it has left the GPU; what has ended before is no failure."""
        for flight in tuple(self._pending):
            if not flight.ended:
                self.look(flight)
        super().give_up(error)

    def wait(self, flight: Flight, timeout: float | None) -> bool:
        """Order torch's current stream after a flight; with a timeout, block."""
        if timeout is not None:
            return self.block(flight, timeout)
        with self._comm._guard():
            capture = capture_id(None)
            if flight.captured is None and capture is not None:
                self._query(flight)  # of what has ended the capture needs to know nothing
                if not flight.ended:
                    raise InvalidUsage(
                        "wait() inside of a CUDA graph's capture for an operation that was started before it: wait for "
                        "it before the capture",
                        op=flight.op, rank=self._comm.rank,
                    )  # fmt: skip
            elif self._given_up is not None:
                flight.seen = True
                raise self._given_up
            elif flight.captured == capture:
                event, _ = flight.mark
                torch.cuda.current_stream().wait_event(event)
        return True

    def block(self, flight: Flight, timeout: float | None) -> bool:
        """Block until a flight has ended, at most `timeout` seconds."""
        self._check_asked(flight)
        with self._comm._guard():
            if is_capturing(None):
                raise InvalidUsage(
                    "the host would wait for a GPU while a CUDA graph is captured, in which nothing runs yet",
                    op=flight.op, rank=self._comm.rank,
                )  # fmt: skip
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 10e-6
        while True:
            self.look(flight)
            if flight.ended:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)

    def look(self, flight: Flight) -> None:
        """Update a flight's state without waiting; inside of a capture nothing is asked."""
        self._check_asked(flight)
        with self._comm._guard():
            if not is_capturing(None):
                self._query(flight)

    def _check_asked(self, flight: Flight) -> None:
        if flight.captured is not None:
            raise InvalidUsage(
                "the operation was captured in a CUDA graph, so it runs when the graph is replayed, and nobody can say "
                "whether it has ended: wait() without a timeout orders the stream inside of the capture; after a "
                "replay, synchronize the stream that replays it",
                op=flight.op, rank=self._comm.rank,
            )  # fmt: skip

    def _query(self, flight: Flight) -> None:
        event, _ = flight.mark
        comm = self._comm
        try:
            with queries_allowed():
                ended = event.query()
        except RuntimeError as error:
            flight.end(CudaError(str(error), op=flight.op, rank=comm.rank))
            return
        if ended:
            flight.end(self._given_up)
        if ended or self._given_up is not None:  # its kernels may be using the arrays until they have ended
            return
        try:
            code = comm._native.async_error()
            if code not in (0, 7):  # 7: ncclInProgress
                check(code, comm.engine.library, comm._native)
        except CollectivesError as error:
            self._kept.append(flight.held)  # its kernels are still there, until the communicator is aborted
            flight.end(error)

    def overdue(self, work: Work, timeout: float) -> CollectiveTimeout:
        """Build the error of a wait that ran out; NCCL doesn't tell which ranks are missing."""
        return CollectiveTimeout(
            f"not done after {timeout} s ({work.nbytes} bytes); it stays in flight and can be waited for again. NCCL "
            "does not tell which ranks have not arrived: NCCL_DEBUG=INFO shows what each one did",
            op=work.op, rank=self._comm.rank, nbytes=work.nbytes,
        )  # fmt: skip

    def future(self, flight: Flight, result) -> torch.futures.Future:
        """Give a future that is complete and carries the stream's event."""
        _, stream = flight.mark
        future = torch.futures.Future(devices=[self._comm.device])
        # The future records its own event on the current stream. The guard, since the stream's end would open a context
        # on the device that the thread comes from.
        with self._comm._guard(), torch.cuda.stream(stream):
            _fulfil(future, flight, result)
        return future

    def quiet(self, timeout: float) -> bool:
        """Block until torch's current stream has nothing to do either; False when the time ran out."""
        with self._lock, self._comm._guard():
            if is_capturing(None):
                return False
            flight = Flight("exit", ())
            flight.seen = True  # nobody has asked for it
            with contextlib.suppress(RuntimeError):  # an error that CUDA keeps: nothing runs any more
                flight.mark = (torch.cuda.current_stream().record_event(), None)
                self._pending.append(flight)
        return self.drain(timeout)

    def mark(self, stream: int):
        """Give a function that tells whether what a stream holds now has ended, for the watchdog's thread.

        None where an event can't be recorded now: the stream is being captured, or is one that its owner may have
        destroyed.
        """
        comm = self._comm
        if stream in comm._foreign:
            return None
        with comm._guard():
            given = stream_from_address(stream, comm.device)
            if is_capturing(given):
                return None
            event = torch.cuda.Event()
            event.record(given)
            if is_capturing(given):  # since just now: the event may be part of it, and must not be queried
                return None

        def has_ended() -> bool:
            with comm._guard(), queries_allowed():
                try:
                    return event.query()
                except RuntimeError as error:
                    if "captur" in str(error).lower():  # a capture has begun and ended just then
                        return True
                    raise CudaError(f"{error}", op="watchdog", rank=comm.rank) from error

        return has_ended

    def close(self) -> None:
        """Let the side stream go, and what graphs were captured with."""
        self._side = self._stream = None
        self._kept.clear()


def _fulfil(future: torch.futures.Future, flight: Flight, result) -> None:
    if flight.error is None:
        future.set_result(result)
    else:
        flight.seen = True
        future.set_exception(flight.error)
