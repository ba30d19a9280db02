"""Launch of validated operations: at once, into an open group, or into the queue."""

from __future__ import annotations

from threading import get_ident

from .arguments import invalid, stream_handle
from .fingerprint import check_calls
from .group import Call, issue, open_groups
from .memory import storage_of
from .work import Work

__all__ = ["launch"]


def launch(
    comm, name: str, steps, held: tuple, result, nbytes: int, fingerprint, async_op: bool, stream, scalar=None,
    label=None, record=None, copies=(),
) -> Work | None:  # fmt: skip
    """Launch an operation of a communicator whose arguments are valid.

    `steps`, `scalar`, `label`, `record`, `copies`: as in `Call`; `held`: the arrays to keep alive; `result`: what
    `Work.result` returns; `fingerprint`: for COLLECTIVES_CHECK, or a false value; `stream`: as the
    caller passed it.
    """
    group = open_groups.get(get_ident()) if open_groups else None
    handle = 0 if comm._on_host and stream is None else stream_handle(comm, stream)
    if group is not None or async_op:
        held = (*held, *map(storage_of, held), *copies)
    if group is not None:
        comm._check_open(name)
        if async_op and stream is not None:
            raise invalid(comm, name, "in a group, async_op=True takes the communicator's own stream: leave out stream")
        work = Work(name, nbytes, result) if async_op else None
        call = Call(comm, name, steps, held, nbytes, fingerprint, scalar, handle, work, label, record, copies)
        return group.add(call)
    if fingerprint:
        check_calls(comm, [fingerprint], records=[record])
    call = None
    if len(steps) > 1 or scalar is not None or label is not None or copies:
        call = Call(comm, name, steps, held, nbytes, fingerprint, scalar, label=label, copies=copies)
    if not async_op:
        _issue(comm, call, steps, handle)
        return None
    comm._check_open(name)  # before a queue is created
    work = Work(name, nbytes, result)
    queue = comm._queue
    handle = queue.begin(name, None if stream is None else handle)
    try:
        _issue(comm, call, steps, handle)
    except BaseException:
        queue.cancel(name, held)
        raise
    queue.end(name, held, (work,))
    return work


def _issue(comm, call: Call | None, steps, stream: int) -> None:
    """Issue a call on a stream; None: the one plain step in `steps`."""
    if call is None:
        method, args = steps[0]
        if comm._on_host:
            getattr(comm._native, method)(*args, stream)
            return
        with comm._device_guard():
            getattr(comm._native, method)(*args, stream)
    else:
        with comm._device_guard():
            issue([call], [stream])
