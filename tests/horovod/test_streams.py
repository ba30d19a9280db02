"""What hvd asks of CUDA's streams: who waits for whom, what is recorded, whose device a thread has.
No GPU: a record.

tests/streams/ looks at the same code with memory and order checked; here each call is looked at by
itself.
"""

from __future__ import annotations

import contextlib
import threading
import types

import pytest
import torch

from collectives.gradients import bucket as gradient_bucket
from collectives.gradients.bucket_filler import BucketFiller
from collectives.horovod import adasum_optimizer, fusion, sync_batch_norm
from collectives.horovod.compression import Compression
from collectives.horovod.controller import Controller
from collectives.horovod.gradient_buckets import AllreduceBucket
from collectives.horovod.messages import Request, TensorTableEntry, cached_request
from collectives.horovod.settings import Settings

GPU = torch.device("cuda", 1)


class Gpu:
    """Streams that only take notes: each call is (what, stream, of what), with the thread that made
    it.
    """

    def __init__(self, monkeypatch):
        self.calls = []
        self.threads = []
        self.local = threading.local()
        self.main, self.numbers = self.stream("main"), 0
        for name, value in {
            "Stream": lambda device, priority: self.stream("hvd", device),
            "stream": self.on,
            "device": self.on_device,
            "current_stream": lambda device=None: getattr(self.local, "stream", self.main),
            "set_device": lambda device: self.note("set_device", None, device),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(fusion, "on_stream", self.on)
        monkeypatch.setattr(gradient_bucket, "current_stream", torch.cuda.current_stream)

    def note(self, what, stream, of):
        self.calls.append((what, stream, of))
        self.threads.append(threading.current_thread())

    def stream(self, name, device=GPU):
        stream = types.SimpleNamespace(name=name, device=device)
        stream.wait_event = lambda event: self.note("waits", name, event)
        stream.wait_stream = lambda other: self.note("waits", name, other.name)
        stream.record_event = lambda: self.event(name)
        return stream

    def event(self, name):
        self.numbers += 1
        event = f"{name}'s event {self.numbers}"
        self.note("records", name, event)
        return event

    @contextlib.contextmanager
    def on(self, stream):
        before = getattr(self.local, "stream", self.main)
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = before

    @contextlib.contextmanager
    def on_device(self, device):
        self.note("device", None, device)
        yield

    def tensor(self, values, name):
        """A tensor that is on the GPU as far as hvd can tell."""
        tensor = torch.tensor(values).as_subclass(OnGpu)
        tensor.gpu, tensor.label = self, name
        return tensor


class OnGpu(torch.Tensor):
    is_cuda = property(lambda self: True)

    def record_stream(self, stream):
        self.gpu.note("recorded", stream.name, self.label)


class Comm:
    """One rank, whose operations are noted."""

    def __init__(self, gpu=None):
        self.gpu, self.size, self.rank, self.device, self.closed = gpu, 1, 0, GPU if gpu else torch.device("cpu"), False
        self._on_host = gpu is None

    def all_reduce(self, tensor, op, out=None):
        out = tensor if out is None else out
        out.copy_(2 * tensor)
        out.gpu, out.label = self.gpu, "result"
        self.gpu.note("all_reduce", torch.cuda.current_stream().name, op)

    def abort(self):
        pass

    close = abort


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.fixture
def controller(gpu):
    controller = Controller(Comm(), {"cpu": Comm(), "cuda": Comm(gpu)}, [0], Settings())
    yield controller
    controller.close()


def entry(tensor, name, outputs=None, op="sum"):
    request = Request("allreduce", name, ("float32",), (tuple(tensor.shape),), "cuda", op=op)
    return TensorTableEntry(cached_request(request), [tensor], outputs)


def test_inputs_are_recorded_before_they_are_dropped(gpu, controller):
    """``hvd.allreduce_async(x * 2)``: nobody else holds it once it is queued."""
    there = entry(gpu.tensor([1.0, 2.0], "input"), "x")
    controller.submit(there, waits=True)
    controller.wait(there)
    assert there.inputs == [] and there.results[0].tolist() == [2.0, 4.0]
    assert gpu.calls == [
        ("records", "main", "main's event 1"),
        ("device", None, GPU),
        ("waits", "hvd", "main's event 1"),
        ("recorded", "hvd", "input"),
        ("all_reduce", "hvd", "sum"),
        ("records", "hvd", "hvd's event 2"),
        ("waits", "main", "hvd's event 2"),
        ("recorded", "main", "result"),
    ]


def test_outputs_are_recorded_too(gpu, controller):
    given, out = gpu.tensor([1.0], "input"), gpu.tensor([0.0], "output")
    apart, in_place = entry(given, "x", [out]), entry(out, "y", [out])
    in_place.outputs = in_place.inputs
    for each in (apart, in_place):
        controller.submit(each, waits=True)
        controller.wait(each)
    recorded = [of for what, stream, of in gpu.calls if (what, stream) == ("recorded", "hvd")]
    assert recorded == ["input", "output", "result"]  # the last one: out, each once


def test_an_operation_that_fails_has_recorded_what_it_read(gpu, controller, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no such operation")

    monkeypatch.setattr(Comm, "all_reduce", fails)
    there = entry(gpu.tensor([1.0], "input"), "x")
    controller.submit(there, waits=True)
    with pytest.raises(RuntimeError, match="no such operation"):
        controller.wait(there)
    assert there.inputs == [] and ("recorded", "hvd", "input") in gpu.calls


def test_a_result_that_was_waited_for_twice_is_ordered_on_both_streams(gpu, controller):
    there = entry(gpu.tensor([1.0], "input"), "x")
    controller.submit(there, waits=True)
    controller.wait(there)
    with torch.cuda.stream(gpu.stream("side")):
        controller.wait(there)
    assert gpu.calls[-2:] == [("waits", "side", "hvd's event 2"), ("recorded", "side", "result")]


def test_the_background_thread_has_this_ranks_gpu(gpu, controller):
    """Its first call of CUDA says which: a thread begins with GPU 0, where it would open a context."""
    there = entry(gpu.tensor([1.0], "input"), "x")
    controller.submit(there)
    for _ in range(2000):
        if there.done:
            break
        threading.Event().wait(0.005)
    assert there.done
    of_thread = [call for call, thread in zip(gpu.calls, gpu.threads, strict=True) if thread is controller._thread]
    assert of_thread[0] == ("set_device", None, GPU) and ("all_reduce", "hvd", "sum") in of_thread


def test_adasums_step_follows_its_reduction(gpu, controller, monkeypatch):
    """The optimizer reads what was reduced: its stream waits for hvd's."""
    params = [torch.nn.Parameter(torch.ones(2))]

    def reduce(sent, **options):
        changes = [tensor.as_subclass(OnGpu) for tensor in sent]
        changes[0].gpu, changes[0].label = gpu, "changes"
        there = entry(changes[0], "changes", changes, "sum")
        controller.submit(there, waits=True)
        return there

    monkeypatch.setattr(adasum_optimizer, "grouped_allreduce_async_", reduce)
    monkeypatch.setattr(adasum_optimizer, "synchronize", controller.wait)
    monkeypatch.setattr(adasum_optimizer, "current", lambda: types.SimpleNamespace(check_process_set=lambda _: None))
    process_set = types.SimpleNamespace(included=lambda: True, size=lambda: 2)
    reducer = adasum_optimizer.AdasumReducer({}, Compression.none, process_set)

    def step():
        with torch.no_grad():
            params[0].add_(1.0)

    reducer.step(types.SimpleNamespace(param_groups=[{"params": params}]), step)
    assert params[0].tolist() == [3.0, 3.0]
    finished = next(of for what, stream, of in gpu.calls if (what, stream) == ("records", "hvd"))
    assert ("waits", "main", finished) in gpu.calls


def test_a_bucket_waits_for_all_streams_of_its_gradients(gpu, monkeypatch):
    """A model may run on several streams; each gradient is made on that of its forward."""
    monkeypatch.setattr(gradient_bucket, "pack", lambda *_: gpu.note("packs", torch.cuda.current_stream().name, None))
    monkeypatch.setattr(gradient_bucket, "cuda_current_raw_stream", lambda _: id(torch.cuda.current_stream()))
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    bucket = AllreduceBucket(
        "bucket", [(f"p{i}", param) for i, param in enumerate(params)], torch.float32, {"op": "sum"}
    )
    bucket.device, bucket.on_cuda = GPU, True
    bucket.flat = torch.empty(12)
    monkeypatch.setattr(gradient_bucket, "ReusableTable", lambda tensors, dtype: None)

    class Owner:
        def bucket_ready(self, bucket):
            for param, name in zip(params, bucket.names(), strict=True):
                param.grad = gpu.tensor([1.0, 2.0], name)
                param.grad.gpu, param.grad.label = gpu, name
            bucket._wait_for_backward()
            bucket._collect()

    owner = Owner()
    filler = BucketFiller(owner)
    for param in params:
        filler.watch(param)
    filler.attach([bucket])
    one, two = gpu.stream("one"), gpu.stream("two")
    for param, stream in zip(params, (one, two, two), strict=True):
        with torch.cuda.stream(stream):
            (param * 1.0).sum().backward()
    assert gpu.calls == [
        ("waits", "two", "one"),
        ("recorded", "two", "p0"),
        ("recorded", "two", "p1"),
        ("recorded", "two", "p2"),
        ("packs", "two", None),
    ]


class Unread(torch.Tensor):
    """A tensor on a GPU whose value nobody asks for: the host would wait."""

    is_cuda = property(lambda self: True)

    def item(self):
        raise AssertionError("the host waits for the GPU")

    tolist = __float__ = __bool__ = item


@pytest.mark.parametrize("momentum", [0.1, None])
def test_sync_batch_norm_reads_nothing_back(monkeypatch, momentum):
    monkeypatch.setattr(sync_batch_norm, "allgather_async", lambda own, *_, **__: own)
    monkeypatch.setattr(sync_batch_norm, "allreduce_async", lambda own, **_: own)
    monkeypatch.setattr(sync_batch_norm, "synchronize", lambda own: own.as_subclass(Unread))
    monkeypatch.setattr(sync_batch_norm, "current", lambda: types.SimpleNamespace(size=2))
    ours, theirs = sync_batch_norm.SyncBatchNorm(3, momentum=momentum), torch.nn.BatchNorm1d(3, momentum=momentum)
    ours.num_batches_tracked = ours.num_batches_tracked.as_subclass(Unread)
    values = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    found, wanted = values.clone().requires_grad_(), values.clone().requires_grad_()
    for _ in range(2):
        (ours(found) ** 3).sum().as_subclass(torch.Tensor).backward()
        (theirs(wanted) ** 3).sum().backward()
    for one, other in [(found.grad, wanted.grad), *zip(ours.buffers(), theirs.buffers(), strict=True)]:
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other)
