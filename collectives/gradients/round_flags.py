"""Flags that the ranks exchange in a round of `GradientBuckets`: problems, buckets to resend,
gradients that are there.

On the host all ranks wait for the exchange. On CUDA that would block each rank until its GPU has
made all gradients. There a rank whose round is usual goes on as if all rounds were, and checks the
others' flags when they have arrived. A rank whose round is unusual waits for the flags, and then
takes part in the operations of the ranks that have gone on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..comm.communicator import Communicator
from ..cuda_state import has_completed, refuse_capture
from ..errors import CollectivesError, InvalidArgument, InvalidUsage

__all__ = ["RoundFlags", "RoundResult"]

_OP = "GradientBuckets"


class RoundResult(NamedTuple):
    """Combined flags of all ranks: an entry is set if any rank has set it."""

    failing: int | None  # a rank with a gradient that can't be averaged
    some_go_on: bool  # whether some rank has not waited
    inconsistent: bool  # whether a bucket was changed on some ranks alone after it was sent, where some may not wait
    resend: list  # by bucket
    used: list  # by parameter

    def error(self, when: str = "") -> CollectivesError:
        """Return the error to raise.

        `when`: the round that the flags belong to, if it isn't this one.
        """
        if self.failing is not None:
            kind, left = InvalidArgument, "nothing was changed"
            if when:  # this rank has gone on from that round
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
    """Flags over a communicator's ranks, for a number of buckets and of parameters."""

    def __init__(self, comm: Communicator, buckets: int, params: int):
        self._buckets = buckets
        # A rank with a problem, from 1; whether a rank doesn't wait; buckets to resend, buckets
        # that aren't; gradients.
        length = 2 + 2 * buckets + params
        self._on_cuda = comm.device.type == "cuda"
        self.is_async = self._on_cuda
        self._sent = comm.empty(length, torch.int32)
        self._own = torch.empty(length, dtype=torch.int32, device="cpu") if self._on_cuda else self._sent
        self._numbers = self._own.numpy()
        self._usual = self._accumulated = self._copy = self._copied = None

    def exchange(self, comm: Communicator, problem: bool, resend: list, have: list) -> RoundResult | None:
        """Combine the ranks' flags.

        None where this rank's round is usual and it doesn't wait. A collective.
        """
        usual = self.is_async and not problem and not any(resend) and all(have)
        if not usual or self._usual is None:
            refuse_capture(
                comm.device,
                "the host reads the ranks' flags here: make some steps before the capture, in the captured one "
                "give each parameter a gradient, with overlap=True by one backward",
            )
        if usual:
            if self._usual is None:
                self._write(comm, problem, usual, resend, have)
                self._usual, self._accumulated = self._sent.clone(), torch.zeros_like(self._sent)
            self._sent.copy_(self._usual)
        else:
            self._write(comm, problem, usual, resend, have)
        if self._on_cuda:
            comm.all_reduce(self._sent, "max", async_op=True).wait()
        else:
            comm.all_reduce(self._sent, "max")
        if usual:
            self._copy_async()
            return None
        if self._on_cuda:
            self._own.copy_(self._sent)  # waits for the GPU
        return self._read(self._numbers.tolist())

    def _write(self, comm, problem, usual, resend, have) -> None:
        numbers, first, second = self._numbers, 2 + self._buckets, 2 + 2 * self._buckets
        numbers[0] = comm.rank + 1 if problem else 0
        numbers[1] = usual
        numbers[2:first] = resend
        numbers[first:second] = [not each for each in resend]
        numbers[second:] = have
        if self._on_cuda:
            self._sent.copy_(self._own)

    def _read(self, found: list) -> RoundResult:
        first, second = 2 + self._buckets, 2 + 2 * self._buckets
        resend = found[2:first]
        pairs = zip(resend, found[first:second], strict=True)
        inconsistent = self.is_async and any(one and other for one, other in pairs)
        return RoundResult(found[0] - 1 if found[0] else None, bool(found[1]), inconsistent, resend, found[second:])

    # ---- Without waiting.

    def _copy_async(self) -> None:
        """Accumulate this round's flags and copy the result to the host, unless an earlier copy is
        still running.
        """
        torch.maximum(self._accumulated, self._sent, out=self._accumulated)
        if not self._on_cuda:
            self._copy = self._accumulated
        elif self._copied is None and not torch.cuda.is_current_stream_capturing():
            if self._copy is None:
                self._copy = torch.empty(self._accumulated.shape, dtype=torch.int32, pin_memory=True, device="cpu")
            self._copy.copy_(self._accumulated, non_blocking=True)
            self._copied = torch.cuda.current_stream(self._accumulated.device).record_event()

    def check_earlier_rounds(self) -> None:
        """Raise the error of an earlier round for which this rank didn't wait, if the flags have
        arrived.
        """
        if self._copy is None:
            return
        if self._on_cuda:
            if self._copied is None or torch.cuda.is_current_stream_capturing() or not has_completed(self._copied):
                return
            self._copied = None
        found = self._read(self._copy.tolist())
        if found.failing is not None or found.inconsistent:
            raise found.error(" in an earlier call")
