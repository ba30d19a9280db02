"""Launch of a process group's collectives: at once, asynchronously, or in a coalescing block."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.parts import refuse_call
from ..comm.parts import refuses as comm_refuses
from ..errors import InvalidArgument
from .options import seconds_of
from .work import BackendWork, completed_work

__all__ = ["Launching", "make_options", "refuses"]


_UNSET = dist.AllreduceOptions().timeout  # what options have where no timeout was set


def make_options(cls, opts, field: str | None = None, value=None, timeout: timedelta | None = None):
    """Return a call's options, an object of `cls`.

    Short calls such as ``pg.allreduce(tensor, op, timeout)`` pass the value of one field in place of
    the object, or as `value`, and the operation's own `timeout`; None leaves torch's default.
    """
    made = opts if isinstance(opts, cls) else cls()
    if made is not opts:
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        given = value if opts is None else opts
        if given is not None and field is not None:
            setattr(made, field, given)
    if timeout is not None:
        made.timeout = timeout
    return made


def _find_comm(group, tensors: list):
    """Return the group's communicator that a call's tensors go to, else the only one, None where there is none."""
    comms = list(group._comms.values())
    found = group._comms.get(tensors[0].device) if tensors else None
    return comms[0] if found is None and len(comms) == 1 else found


def refuses(method):
    """Decorate a process group's collective as `parts.refuses`; an error ends the open coalescing block."""

    @functools.wraps(method)
    def call(group, *args, **options):
        try:
            return method(group, *args, **options)
        except Exception:
            if group._coalesced is not None:  # torch leaves it open
                group.cancel_coalescing()
            raise

    return comm_refuses(call, _find_comm)


class Launching:
    """Mixin of a process group: how its collectives are launched.

    The group has ``communicator(device)``, ``_comms``, the open ones by device, ``_rank``, ``_size``,
    ``_sequence`` (collectives so far) and ``_coalesced``, the list of Works of an open coalescing block or None.
    """

    def _launch(self, opts, outputs, launch, finish=None) -> BackendWork:
        """Launch a collective: at once, or asynchronously where the options say so.

        `launch`: called with `async_op`, returns the communicator's Work, or a list of them;
        `finish`: stores the results. Options with a timeout of their own limit the call, or the
        waits for its Work.
        """
        self._sequence += 1
        limited = getattr(opts, "timeout", _UNSET) != _UNSET
        blocking = self._coalesced is None and not getattr(opts, "asyncOp", True)
        if blocking and not limited:
            launch(False)
            if finish is not None:
                finish()
            return completed_work(outputs)
        works = launch(True)
        limit = seconds_of(opts.timeout) if limited else None
        work = BackendWork(works if isinstance(works, list) else (works,), outputs, finish, limit)
        if blocking:
            work.wait()
        return self._coalesce(work)

    def _launch_grouped(self, comm, opts, outputs, launch, finish=None) -> BackendWork:
        """Launch the operations that `launch` makes as one, as `_launch` does."""

        def grouped(asynchronous):
            with comm.group():
                return launch(asynchronous)

        return self._launch(opts, outputs, grouped, finish)

    def _coalesce(self, work: BackendWork) -> BackendWork:
        """Add a Work to the coalescing block, if one is open; return it."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _parts(self, lists, name: str, comm) -> list[torch.Tensor]:
        """Return the list of one tensor for each rank that torch passes in another list.

        For a list of another length the other ranks of the call get the error, too.
        """
        parts = list(lists[0] if lists and not isinstance(lists[0], torch.Tensor) else lists)
        if len(parts) != self._size:
            text = f"takes a list of {self._size} tensors, one for each rank, not of {len(parts)}"
            error = InvalidArgument(text, op=name, rank=self._rank)
            kind = "all_to_all with splits" if name == "all_to_all" else name  # what the others call
            refuse_call(comm, kind, parts[0].dtype if parts else "", error)
            raise error
        return parts
