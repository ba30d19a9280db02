"""Uneven blocks: code in which the ranks need not run the same units."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ..arrays import kind_of
from ..errors import InvalidArgument
from .scheduler import schedulers_in

__all__ = ["uneven"]


@contextlib.contextmanager
def uneven(module: nn.Module) -> Iterator[None]:
    """Let the ranks run other units of a sharded module, or other numbers of forwards and
    backwards, inside of the block.

    For an evaluation on rank 0 alone, ``generate()`` of other lengths on each rank, other numbers
    of micro-batches, of which only the last one reduces gradients. All ranks enter the block and
    leave it together: a collective at both ends, which blocks. Inside it the ranks agree before
    each collective, with a message of 80 bytes, and each host waits for the others there. `module`:
    sharded, or one that holds sharded modules; its communicator's other units are meant, too. Where
    an exception ends the block on some ranks only, all raise `RemoteError` in their next calls, and
    no rank is in the block any more. Raises `InvalidArgument` where nothing in it is sharded.
    """
    schedulers = schedulers_in(module) if isinstance(module, nn.Module) else []
    if not schedulers:
        raise InvalidArgument(f"uneven() takes a sharded module, not {kind_of(module)}", op="uneven")
    with contextlib.ExitStack() as stack:
        for scheduler in schedulers:
            stack.enter_context(scheduler.planner.uneven())
        yield
