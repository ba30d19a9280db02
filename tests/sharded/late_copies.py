"""Test double of torch.cuda's streams, whose copies from a device to the host are late, as on a busy GPU.

The "device" is ``cpu:0``, and the host ``cpu``: torch takes them for two. The result of a copy to the
host is NaN until an event after it was waited for; `Cuda.waits` counts these waits.
"""

import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cpu", 0)


class Event:
    def __init__(self, cuda):
        self.cuda = cuda
        self.copies = list(cuda.late)

    def synchronize(self):
        self.cuda.waits += 1
        for each in self.copies:
            if each in self.cuda.late:
                self.cuda.late.remove(each)
                each()


class Stream:
    def __init__(self, cuda):
        self.cuda = cuda

    def wait_stream(self, other):
        pass

    def record_event(self):
        self.cuda.events += 1
        return Event(self.cuda)


class Cuda:
    """What `HostCopies` calls of torch.cuda."""

    def __init__(self):
        self.late: list = []  # copies that have not been made
        self.waits = self.events = 0
        self.recorded: list = []  # tensors that are kept for another stream
        self.main = self.now = Stream(self)

    def Stream(self, device):
        return Stream(self)

    def current_stream(self, device):
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


class _Late(TorchDispatchMode):
    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copies = function is torch.ops.aten.copy_.default and self.cuda.now is not self.cuda.main
        if copies and (kwargs.get("non_blocking") or args[2:] == (True,)):
            to, source = args[0], args[1].clone()
            to.fill_(float("nan"))
            self.cuda.late.append(lambda: to.copy_(source))
            return to
        return function(*args, **kwargs)


@contextlib.contextmanager
def late_copies(cuda):
    """Make copies to the host late inside the block; yield the sizes of the page-locked allocations."""
    empty, pinned = torch.empty, []

    def ask(*args, pin_memory=False, **kwargs):
        if pin_memory:
            pinned.append(args)
        return empty(*args, **kwargs)

    def record(tensor, stream):
        cuda.recorded.append((tensor.shape, stream))

    with (
        mock.patch("collectives.sharded.group_buffers.torch.empty", ask),
        mock.patch.object(torch.Tensor, "record_stream", record),
        _Late(cuda),
    ):
        yield pinned
