"""How a communicator ends: closed by the program, aborted, or ended by the watchdog.

Registered memory, arrays and scratch are released after the last operation that may use them has ended.
"""

from __future__ import annotations

from functools import partial
from threading import get_ident

import torch

from ..cuda_state import is_capturing
from ..errors import Aborted, CollectivesError, CudaError, InvalidUsage
from .group import open_groups
from .lifetime import Gone, kept, opened
from .multinode.comm import NoFastPath
from .watchdog import unwatch

__all__ = ["abort", "close", "fail", "refuse_in_capture"]

_ABORT_SECONDS = 1.0  # how long abort() waits for its queue, which fails what is in it at once


def close(comm) -> None:
    """Wait for what is in flight on a communicator, then free it; nothing where it is closed."""
    if _has_ended(comm):
        return
    group = open_groups.get(get_ident())
    if group is not None and group.uses(comm):
        raise InvalidUsage("close() inside a group that holds calls of this communicator", rank=comm.rank)
    refuse_in_capture(comm, "close")
    comm._lane.drain(None)
    if not comm._on_host:
        with comm._guard():  # blocking calls are on torch's streams, and may hang: the watchdog still looks
            _synchronize(comm, comm.abort)
    native, comm._native = comm._native, Gone("the communicator is closed", comm.rank)
    if type(native) is Gone:
        comm._native = native
        _has_ended(comm)
        return
    short, comm._short = comm._short, NoFastPath()
    try:
        native.wait_for_calls()  # of other threads
    except BaseException:  # a signal handler's, on top of a call
        comm._native, comm._short = native, short
        raise
    opened.pop(id(comm), None)
    unwatch(comm)
    with comm._guard():
        if not comm._on_host:
            _synchronize(comm, native.abort)  # what other threads have issued meanwhile
        comm._lane.close()
        _free(comm, native)


def abort(comm) -> None:
    """End everything in flight on a communicator, from any thread, and close it."""
    if not comm.closed:
        comm._lane.give_up(Aborted("abort() closed the communicator during the operation", rank=comm.rank))
    native, comm._native = comm._native, Gone("the communicator was aborted", comm.rank)
    if type(native) is Gone:
        comm._native = native
        native.seen = True
        return
    _leave(comm)
    with comm._guard():
        native.abort()
    # Bounded, since abort() may run in a signal handler on top of a call that only then can end.
    if comm._lane.quiet(_ABORT_SECONDS):
        comm._lane.close()
        comm._registered.clear()
    else:
        kept.append((comm._lane, comm._registered))


def fail(comm, error: CollectivesError) -> None:
    """End a communicator because of an error that the watchdog found; the program's next calls raise it."""
    native, comm._native = comm._native, Gone(error.message, comm.rank, error=error)
    if type(native) is Gone:
        comm._native = native
        return
    _leave(comm)
    comm._lane.fail(error, native.abort)
    kept.append((comm._lane, comm._registered))  # a thread of the program's may be inside


def refuse_in_capture(comm, name: str) -> None:
    """Raise `InvalidUsage` where a CUDA graph is being captured on the current stream."""
    if not comm._on_host:
        with comm._guard():
            if is_capturing(None):
                raise InvalidUsage(
                    f"{name}() waits for the GPU, which can't be done while a CUDA graph is captured",
                    op=name, rank=comm.rank,
                )  # fmt: skip


def _leave(comm) -> None:
    opened.pop(id(comm), None)
    unwatch(comm)
    if comm._algorithms is not None:
        comm._algorithms.abort()


def _has_ended(comm) -> bool:
    """Tell whether a communicator was closed before; raise the error that has ended it, if no call has yet."""
    if comm.closed and comm._native.error is not None and not comm._native.seen:
        comm._native.refuse("close")
    return comm.closed


def _synchronize(comm, abort) -> None:
    try:
        torch.cuda.synchronize(comm.device)
    except RuntimeError as error:
        abort()
        raise CudaError(f"what was in flight failed: {error}", op="close", rank=comm.rank) from error


def _free(comm, native) -> None:
    """Free what the engine has, in reverse; the first error is raised when all has had its turn."""
    steps = [partial(native.deregister, registration.handle) for registration in comm._registered]
    if comm._algorithms is not None:
        steps.append(comm._algorithms.close)
    failed = None
    for step in (*steps, native.destroy):
        try:
            step()
        except CollectivesError as error:
            failed = failed or error
    comm._registered.clear()
    if failed is not None:
        raise failed
