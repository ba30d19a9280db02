"""The three ways to end a communicator: `close`, `abort`, the watchdog's `abort_with_error`.

Registered memory, arrays and scratch are released after the last operation that may use them has
ended.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from threading import get_ident

import torch

from ..cuda_state import refuse_capture
from ..errors import Aborted, CollectivesError, CudaError, InvalidUsage
from .flight_recorder import detach
from .group import open_groups
from .lifetime import ClosedHandle, never_freed, open_comms
from .memory import free_dropped
from .multinode.comm import NoFastPath
from .watchdog import unwatch

__all__ = [
    "abort",
    "abort_with_error",
    "call_all",
    "close",
    "discard",
    "end_registration",
    "leave",
    "refuse_in_capture",
]

_ABORT_SECONDS = 1.0  # how long abort() waits for its queue, which fails what is in it at once


def close(comm) -> None:
    """Wait for the operations in flight on a communicator, then free it.

    Does nothing where it is closed.
    """
    if _is_closed(comm):
        return
    group = open_groups.get(get_ident())
    if group is not None and group.has_calls_of(comm):
        raise InvalidUsage("close() inside a group that holds calls of this communicator", rank=comm.rank)
    refuse_in_capture(comm, "close")
    if comm._refusal is not None and not comm._refusal[0].done():  # the other ranks may never come to that call
        _wait_for_earlier(comm)
        abort(comm)
        return
    while comm._owned:
        comm._owned.pop().close()
    comm._queue.drain(None)
    if not comm._on_host:
        with comm._device_guard():  # blocking calls are on torch's streams, and may hang: the watchdog still polls
            _synchronize(comm, comm.abort)
    native = _take_native(comm, "the communicator is closed")
    if native is None:
        _is_closed(comm)
        return
    fast_path, comm._fast_path = comm._fast_path, NoFastPath()
    try:
        native.wait_for_calls()  # of other threads
    except BaseException:  # a signal handler's, which interrupted a call
        comm._native, comm._fast_path = native, fast_path
        raise
    open_comms.pop(id(comm), None)
    unwatch(comm)
    with comm._device_guard():
        if not comm._on_host:
            _synchronize(comm, native.abort)  # what other threads have issued meanwhile
            free_dropped()
        comm._queue.close()
        detach(comm, "closed")
        _free(comm, native)


def _wait_for_earlier(comm) -> None:
    """Wait for the operations before the call that this rank couldn't make."""
    work, earlier_ended = comm._refusal
    with contextlib.suppress(CollectivesError):  # which their callers get
        while not earlier_ended() and not work.done():
            time.sleep(1e-3)


def abort(comm) -> None:
    """Abort the operations in flight on a communicator, from any thread, and close it."""
    for owned in reversed(comm._owned):
        owned.abort()
    if not comm.closed:
        comm._queue.set_abort_error(Aborted("abort() closed the communicator during the operation", rank=comm.rank))
    native = _take_native(comm, "the communicator was aborted")
    if native is None:
        comm._native.reported = True
        return
    _unregister(comm)
    detach(comm, "aborted")
    with comm._device_guard():
        native.abort()
    # Bounded, since abort() may run in a signal handler that interrupted a call which only then can
    # end.
    if comm._queue.drain_all(_ABORT_SECONDS):
        comm._queue.close()
        comm._registrations.clear()
    else:
        never_freed.append((comm._queue, comm._registrations))


def abort_with_error(comm, error: CollectivesError) -> None:
    """Abort a communicator because of an error that the watchdog found.

    The program's next calls raise it.
    """
    for owned in reversed(comm._owned):
        owned._abort_with_error(error)
    native = _take_native(comm, error.message, error)
    if native is None:
        return
    _unregister(comm)
    detach(comm, "failed", error)
    comm._queue.abort_with_error(error, native.abort)
    never_freed.append((comm._queue, comm._registrations))  # a thread of the program's may be inside the engine


def discard(comm) -> None:
    """Abort the binding object of a communicator that couldn't be opened to its end."""
    native, comm._native = comm._native, ClosedHandle("the communicator could not be opened", -1)
    open_comms.pop(id(comm), None)
    unwatch(comm)
    with comm._device_guard():
        native.abort()


def leave(comm, failed: bool) -> None:
    """End a communicator at the end of its ``with`` block; `failed`: by an exception."""
    if failed and (comm.closed or comm._queue.busy() or (comm._on_host and comm._pending_info() is not None)):
        comm.abort()  # what is in flight may never end
    else:
        comm.close()


def refuse_in_capture(comm, name: str) -> None:
    """Raise `InvalidUsage` where a CUDA graph is being captured on the current stream."""
    refuse_capture(comm.device, f"{name}() waits for the GPU; call it before the capture", op=name, rank=comm.rank)


def _take_native(comm, reason: str, error: CollectivesError | None = None):
    """Return a communicator's binding object, and put a `ClosedHandle` in its place.

    None where another thread has done so.
    """
    native, comm._native = comm._native, ClosedHandle(reason, comm.rank, error=error)
    if type(native) is not ClosedHandle:
        return native
    comm._native = native
    return None


def _unregister(comm) -> None:
    open_comms.pop(id(comm), None)
    unwatch(comm)
    if comm._algorithms is not None:
        comm._algorithms.abort()


def _is_closed(comm) -> bool:
    """Return whether a communicator is closed.

    Raise the watchdog's error if no call has raised it yet.
    """
    if comm.closed and comm._native.error is not None and not comm._native.reported:
        comm._native.raise_closed("close")
    return comm.closed


def _synchronize(comm, abort) -> None:
    try:
        torch.cuda.synchronize(comm.device)
    except RuntimeError as error:
        abort()
        raise CudaError(f"what was in flight failed: {error}", op="close", rank=comm.rank) from error


def _free(comm, native) -> None:
    """Free the engine's resources in reverse order.

    Raise the first error after all of them were freed.
    """
    steps = [partial(end_registration, native, registration) for registration in comm._registrations]
    if comm._algorithms is not None:
        steps.append(comm._algorithms.close)
    call_all([*steps, native.destroy, comm._registrations.clear])


def end_registration(native, registration) -> None:
    """Deregister memory from a binding object, as what it was registered."""
    if registration.kind == "window":
        native.window_deregister(registration.handle)
    elif registration.kind == "buffer":
        native.deregister(registration.handle)


def call_all(functions) -> None:
    """Call functions that free something, all of them; then raise the first error."""
    first_error = None
    for function in functions:
        try:
            function()
        except CollectivesError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
