"""What is kept from step to step by a bucket's stream, and goes on in another one's: residuals, wire buffers.

Which orders and records there are is looked at here on the host, with streams that are names; that they suffice is for
the simulated GPU.
"""

import contextlib
from unittest import mock

import torch
from torch import nn

from collectives.compression import Bucket, error_feedback, scratch
from collectives.compression.error_feedback import Residuals
from collectives.compression.scratch import get_wire_buffer, use_on_current_stream


class Stream:
    """A stream, which is nothing but itself here."""


class OnGPU:
    device = torch.device("cuda", 0)

    def __init__(self):
        self.recorded = []

    def record_stream(self, stream):
        self.recorded.append(stream)


def test_use_waits_and_records():
    one, other, memory, waited = Stream(), Stream(), OnGPU(), []
    with (
        mock.patch.object(scratch, "current_stream", lambda device: now),
        mock.patch.object(scratch, "wait_for_stream", waited.append),
    ):
        now = one
        assert use_on_current_stream(None, memory) is one and use_on_current_stream(one, memory) is one
        assert memory.recorded == [] and waited == []
        now = other
        assert use_on_current_stream(one, memory) is other
        assert memory.recorded == [other] and waited == [one]
    assert use_on_current_stream(None, torch.ones(1)) is None


class Streams:
    """Stands for `use_on_current_stream`: what was used last by which stream, and is used now by `current`."""

    def __init__(self):
        self.current = "a"
        self.last: dict[int, str] = {}  # by address of the memory

    def use(self, last, *tensors):
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            assert last is None or self.last[address] == last
            self.last[address] = self.current
        return self.current


class Alone:
    def empty(self, count, dtype):
        return torch.empty(count, dtype=dtype)


def test_what_moves_between_buckets_follows_its_stream():
    """All memory that a bucket reads was taken over by its stream: its own, and that of the buckets before."""
    streams = Streams()
    params = [nn.Parameter(torch.ones(20, 30)) for _ in range(4)]
    residuals, comm = Residuals(), Alone()

    def step(*groups):
        for name, group in zip("ab", groups, strict=True):
            streams.current = name
            bucket = Bucket(torch.ones(600 * len(group)), [params[at] for at in group], None, group[0])
            read = [view[1] for view in map(residuals._views.get, map(id, bucket.params)) if view is not None]
            residuals.get(bucket)
            assert all(streams.last[each.untyped_storage().data_ptr()] == name for each in read)

    with contextlib.ExitStack() as stack:
        for module in (scratch, error_feedback):
            stack.enter_context(mock.patch.object(module, "use_on_current_stream", streams.use))
        step([0, 1], [2, 3])
        step([2, 0], [3, 1])  # DDP has made its buckets anew
        step([2, 0], [3, 1])
        step([3, 1], [2, 0])  # the same buckets on the other streams
        memory = get_wire_buffer(comm, 64)
        streams.current = "c"
        assert get_wire_buffer(comm, 32) is memory and streams.last[memory.untyped_storage().data_ptr()] == "c"
