"""The small exchange of a round of `GradientBuckets`: who has a problem, which buckets go again, who has what gradient.

On the host all ranks wait for it. On CUDA that would hold each rank up until its GPU has made all gradients; there a
rank that has nothing unusual to say goes on as if nobody had, and looks at what the others said when it is there.
Whoever has something to say waits for the flags, and does what those need that have gone on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..comm.communicator import Communicator
from ..cuda_state import has_completed
from ..errors import CollectivesError, InvalidArgument, InvalidUsage

__all__ = ["Found", "RoundFlags"]

_OP = "GradientBuckets"


class Found(NamedTuple):
    """What the ranks have said; each list has what any of them did."""

    failing: int | None  # a rank with a gradient that can't be averaged
    goes_on: bool  # whether some rank has not waited
    apart: bool  # whether a bucket was changed on some ranks alone after it was sent, where some may not wait
    again: list
    used: list

    def error(self, when: str = "") -> CollectivesError:
        if self.failing is not None:
            kind, left = InvalidArgument, "nothing was changed"
            if when:  # which this rank has gone on from
                kind, left = InvalidUsage, "what was averaged here lacked it"
            return kind(
                f"rank {self.failing} has a gradient that can't be averaged{when}, as its own error says; {left}",
                op=_OP, peers=[self.failing],
            )  # fmt: skip
        return InvalidUsage(
            f"gradients were changed after they had been sent{when}, on some ranks and not on all, so that these have "
            "averaged others: make all but the last backward in no_sync(), or give GradientBuckets overlap=False",
            op=_OP,
        )  # fmt: skip


class RoundFlags:
    """Flags over a communicator's ranks, of so many buckets and parameters."""

    def __init__(self, comm: Communicator, buckets: int, params: int):
        self._buckets = buckets
        # A rank with a problem, from 1; whether a rank doesn't wait; buckets that go again, that don't; gradients.
        length = 2 + 2 * buckets + params
        self._on_cuda = comm.device.type == "cuda"
        self.lags = self._on_cuda
        self._sent = comm.empty(length, torch.int32)
        self._own = torch.empty(length, dtype=torch.int32) if self._on_cuda else self._sent
        self._numbers = self._own.numpy()
        self._usual = self._seen = self._copy = self._copied = None

    def exchange(self, comm: Communicator, problem: bool, again: list, have: list) -> Found | None:
        """Give what the ranks have said; None where this one has nothing to say and doesn't wait."""
        quiet = self.lags and not problem and not any(again) and all(have)
        if quiet:
            if self._usual is None:
                self._write(comm, problem, quiet, again, have)
                self._usual, self._seen = self._sent.clone(), torch.zeros_like(self._sent)
            self._sent.copy_(self._usual)
        else:
            self._write(comm, problem, quiet, again, have)
        if self._on_cuda:
            comm.all_reduce(self._sent, "max", async_op=True).wait()
        else:
            comm.all_reduce(self._sent, "max")
        if quiet:
            self._keep()
            return None
        if self._on_cuda:
            self._own.copy_(self._sent)  # waits for the GPU
        return self._read(self._numbers.tolist())

    def _write(self, comm, problem, quiet, again, have) -> None:
        numbers, first, second = self._numbers, 2 + self._buckets, 2 + 2 * self._buckets
        numbers[0] = comm.rank + 1 if problem else 0
        numbers[1] = quiet
        numbers[2:first] = again
        numbers[first:second] = [not each for each in again]
        numbers[second:] = have
        if self._on_cuda:
            self._sent.copy_(self._own)

    def _read(self, found: list) -> Found:
        first, second = 2 + self._buckets, 2 + 2 * self._buckets
        again = found[2:first]
        apart = self.lags and any(one and other for one, other in zip(again, found[first:second], strict=True))
        return Found(found[0] - 1 if found[0] else None, bool(found[1]), apart, again, found[second:])

    # ---- Without waiting.

    def _keep(self) -> None:
        """Add what was said in this round, and have all of it copied to the host, unless an earlier copy runs."""
        torch.maximum(self._seen, self._sent, out=self._seen)
        if not self._on_cuda:
            self._copy = self._seen
        elif self._copied is None and not torch.cuda.is_current_stream_capturing():
            if self._copy is None:
                self._copy = torch.empty(self._seen.shape, dtype=torch.int32, pin_memory=True)
            self._copy.copy_(self._seen, non_blocking=True)
            self._copied = torch.cuda.current_stream(self._seen.device).record_event()

    def look(self) -> None:
        """Raise what ranks have said in earlier rounds in which this one didn't wait, as far as it is known."""
        if self._copy is None:
            return
        if self._on_cuda:
            if self._copied is None or torch.cuda.is_current_stream_capturing() or not has_completed(self._copied):
                return
            self._copied = None
        found = self._read(self._copy.tolist())
        if found.failing is not None or found.apart:
            raise found.error(" in an earlier call")
