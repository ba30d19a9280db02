"""Trace of a bucket's reduction: when it began and ended on its communication stream, and what it was."""

from __future__ import annotations

import time

import torch

from ..compression import Bucket
from .streams import CommStream

__all__ = ["begin_trace", "end_trace"]


def begin_trace(comm_stream: CommStream) -> int | torch.cuda.Event:
    """Return the start of a bucket's reduction: nanoseconds on the host, else an event on its stream."""
    if comm_stream.stream is None:
        return time.perf_counter_ns()
    return comm_stream.stream.record_event(torch.cuda.Event(enable_timing=True))


def end_trace(
    recorder, comm_stream: CommStream, begun: int | torch.cuda.Event, name: str, bucket: Bucket, nbytes: int,
    wire: str = "fp32",
) -> None:  # fmt: skip
    """Add a bucket's reduction, which ends here on its stream, to the trace.

    `name`: its first word is that of a collective, by which a timeline's report goes. `nbytes`: that
    this rank has sent.
    """
    recorder.about["engine"] = comm_stream.comm.engine.name
    dtype = str(bucket.flat.dtype).removeprefix("torch.")
    details = {"bucket": bucket.index, "bytes": nbytes, "dtype": dtype, "parameters": bucket.describe()}
    if wire != "fp32":  # that one sends gradients as they are
        details["wire"] = wire
    if comm_stream.stream is None:
        recorder.add(comm_stream.trace_row, name, begun, time.perf_counter_ns(), **details)
    else:
        end = comm_stream.stream.record_event(torch.cuda.Event(enable_timing=True))
        recorder.add_cuda(comm_stream.trace_row, name, begun, end, **details)
