"""Communicator's CUDA side without a GPU: what it asks of streams and events, and when, with doubles of torch.cuda's.

The doubles stand for the hardware: an event has happened when the test says so, and a question during a capture fails,
as CUDA's do.
"""

import contextlib
import gc
import threading
import types
import warnings
import weakref

import pytest
import torch

from collectives import cuda_state, errors
from collectives.comm import closing, communicator, cuda_queue, launch, memory
from collectives.comm.communicator import Communicator
from collectives.comm.config import CommConfig
from collectives.comm.engine import Engine
from collectives.comm.registration import Registration
from collectives.horovod.controller import Controller
from collectives.rendezvous import world

DEVICE = torch.device("cuda", 1)


class Event:
    def __init__(self, gpu, stream, capture):
        self.gpu, self.stream, self.capture, self.happened = gpu, stream, capture, False

    def query(self):
        self.gpu.log.append("query")
        if self.capture is not None or (self.gpu.capture is not None and not self.gpu.allowed):
            self.gpu.spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.happened


class Stream:
    device = DEVICE

    def __init__(self, gpu, number):
        self.gpu, self.cuda_stream, self.waited = gpu, number, []

    def record_event(self, event=None):
        self.gpu.events.append(Event(self.gpu, self, self.gpu.capture))
        return self.gpu.events[-1]

    def wait_event(self, event):
        if event.capture != self.gpu.capture:
            self.gpu.spoilt = True
            raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
        self.waited.append(event)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Gpu:
    """A GPU's state as the tests set it, and what was asked of it."""

    def __init__(self):
        self.log, self.events = [], []
        self.capture = None  # the number of the capture that all streams are part of
        self.allowed = False  # queries of what isn't captured
        self.spoilt = False  # the capture, or what CUDA refuses
        self.current = Stream(self, 5)


class Library:
    is_host = False

    def __init__(self, log):
        self.log = log

    def mem_free(self, ptr):
        self.log.append("mem_free")


class Native:
    rank, size, handle = 0, 2, 1

    def __init__(self, log):
        self.log, self.state = log, 0

    def __getattr__(self, name):
        return lambda *args, **options: self.log.append(name)

    def async_error(self):
        return self.state


# Functions that a build of torch for CUDA has, and that raise where there is no driver.
ASK_THE_DRIVER = """_cuda_getCurrentRawStream _cuda_getCurrentStream _cuda_getDefaultStream _cuda_getDevice
    _cuda_init _cuda_isCurrentStreamCapturing _cuda_setDevice _cuda_setStream _cuda_synchronize""".split()


def no_driver(*args):
    raise RuntimeError("Found no NVIDIA driver on your system.")


@pytest.fixture(params=["built without CUDA", "built for CUDA"])
def gpu(request, monkeypatch):
    gpu = Gpu()
    if request.param == "built for CUDA":
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "_lazy_init", no_driver)
        for name in ASK_THE_DRIVER:
            monkeypatch.setattr(torch._C, name, no_driver, raising=False)

    @contextlib.contextmanager
    def allowed():
        gpu.allowed = True
        yield
        gpu.allowed = False

    def put(name, value):
        monkeypatch.setattr(torch.cuda, name, value, raising=False)

    put("current_stream", lambda device=None: gpu.current)
    put("Stream", lambda device=None, priority=0: Stream(gpu, 7))
    put("is_current_stream_capturing", lambda: gpu.capture is not None)
    put("current_device", lambda: DEVICE.index)
    put("device", lambda device: contextlib.nullcontext())
    put("stream", lambda stream: contextlib.nullcontext())
    put("synchronize", lambda device=None: gpu.log.append("synchronize"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (5, index, 1), raising=False)
    monkeypatch.setattr(cuda_state, "_known_streams", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE.index, raising=False)
    monkeypatch.setattr(cuda_queue, "capture_id", lambda stream: gpu.capture)
    monkeypatch.setattr(cuda_state, "queries_allowed", allowed)
    # Its thread would look at these doubles at times of its own; it has tests of its own.
    monkeypatch.setattr(communicator, "watch", lambda comm, status=None: None)
    return gpu


@pytest.fixture
def comm(gpu):
    engine = Engine("nccl", "cuda", "2.29.7", "libnccl.so.2", Library(gpu.log))
    comm = Communicator.__new__(Communicator)
    comm._initialize(Native(gpu.log), engine, DEVICE, 0, 1, 60.0, False, CommConfig())
    yield comm
    for event in gpu.events:
        event.happened = True
    gpu.capture = None
    comm.close()


def start(comm, array):
    """What ``all_reduce(array, async_op=True)`` does once the array was read."""
    steps = (("all_reduce", (0, 0, 1, 7, 0)),)
    return launch.launch(comm, "all_reduce", steps, (array,), array, 4, None, True, None)


class Array(list):
    """What can be held, and seen to be let go of."""


def test_arrays_are_held_until_the_event(gpu, comm):
    array = Array()
    gone = weakref.ref(array)
    pending = start(comm, array)
    del array
    gc.collect()
    assert not pending.done()
    event = gpu.events[-1]
    pending._result = None
    assert gone() is not None and pending.wait() and gpu.current.waited[-1] is event
    event.happened = True
    assert pending.done() and pending.exception() is None
    gc.collect()
    assert gone() is None


def test_a_capture_is_not_spoilt(gpu, comm):
    """Nothing is queried or swept in it, though something else is in flight; its own Works order its streams."""
    before = start(comm, Array())
    gpu.log.clear()
    gpu.capture = 3
    one, two = start(comm, Array()), start(comm, Array())
    assert one.wait() and two.wait() and [each.capture for each in gpu.current.waited[-2:]] == [3, 3]
    assert not before.done() and comm._queue.busy()
    assert "query" not in gpu.log and not gpu.spoilt
    for blocks in (comm.barrier, comm.close, lambda: before.wait(timeout=1)):
        with pytest.raises(errors.InvalidUsage, match="capture"):
            blocks()
    assert "synchronize" not in gpu.log and not comm.closed


def test_a_work_that_was_captured(gpu, comm):
    """After its capture, and in another one, there is nothing to wait for, and nobody knows when it runs."""
    gpu.capture = 3
    captured = start(comm, Array())
    captured.wait()
    pending_op = captured._pending_op
    assert pending_op.capture_id == 3 and "in a CUDA graph" in repr(captured)
    for capture in (None, 4):
        gpu.capture = capture
        ordered = len(gpu.current.waited)
        assert captured.wait() and len(gpu.current.waited) == ordered
        for asks in (captured.done, captured.exception, lambda: captured.wait(timeout=1)):
            with pytest.raises(errors.InvalidUsage, match=r"captured in a CUDA graph.*replay"):
                asks()
    gpu.capture = None
    assert not comm._queue.busy() and comm._queue.drain(1.0)
    start(comm, Array())  # sweeps
    assert not gpu.spoilt


def test_what_ended_before_a_capture_can_be_waited_for_in_it(gpu, comm):
    before, running = start(comm, Array()), start(comm, Array())
    before._pending_op.completion[0].happened = True
    gpu.capture = 3
    assert before.wait()
    with pytest.raises(errors.InvalidUsage, match="started before it"):
        running.wait()
    assert not gpu.spoilt


def test_arrays_of_a_capture_live_as_long_as_the_communicator(gpu, comm):
    array = Array()
    gone = weakref.ref(array)
    gpu.capture = 3
    start(comm, array).wait()
    del array
    gpu.capture = None
    for _ in range(2):
        start(comm, Array())
        gpu.events[-1].happened = True
    comm._queue.drain(1.0)
    gc.collect()
    assert gone() is not None
    gpu.log.clear()
    comm.close()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_submission_after_another_threads_end_raises_that_the_communicator_is_closed(gpu, comm, monkeypatch, end):
    """The other thread closes the communicator right after this one has checked that it is open."""
    check_open = comm._check_open

    def checked(name):
        check_open(name)
        monkeypatch.setattr(comm, "_check_open", check_open)
        thread = threading.Thread(target=getattr(comm, end))
        thread.start()
        thread.join(30)

    monkeypatch.setattr(comm, "_check_open", checked)
    with pytest.raises(errors.InvalidUsage, match="all_reduce.*: the communicator (is closed|was aborted)"):
        start(comm, Array())
    assert comm.closed and comm._queue._lock.acquire(blocking=False)
    comm._queue._lock.release()


def test_another_threads_close_waits_for_a_submission_that_is_open(gpu, comm):
    handle = comm._queue.begin("all_reduce")
    thread = threading.Thread(target=comm._queue.close)
    thread.start()
    assert handle == 7 and thread.is_alive()
    comm._queue.end("all_reduce", ())
    thread.join(30)
    assert not thread.is_alive()


def test_a_stream_that_cannot_be_made_closes_what_was_opened(gpu, monkeypatch):
    def fail(device=None, priority=0):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", fail, raising=False)
    engine = Engine("nccl", "cuda", "2.29.7", "libnccl.so.2", Library(gpu.log))
    comm = Communicator.__new__(Communicator)
    with pytest.raises(RuntimeError, match="out of memory"):
        comm._initialize(Native(gpu.log), engine, DEVICE, 0, 1, 60.0, False, CommConfig())
    assert gpu.log == ["abort"] and comm.closed


def test_a_submission_that_fails_may_have_begun(gpu, comm, monkeypatch):
    """Ctrl-C as a call returns: the operation is on its way, and its arrays are held as another one's are."""
    array = Array()
    gone = weakref.ref(array)

    def interrupted(comm, call, steps, stream):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_issue", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        start(comm, array)
    del array, caught
    gc.collect()
    assert gone() is not None and comm._queue.busy()
    gpu.events[-1].happened = True
    assert not comm._queue.busy()
    gc.collect()
    assert gone() is None


def test_an_event_that_fails_ends_the_operation(gpu, comm, monkeypatch):
    pending = start(comm, Array())

    def query():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.events[-1].query = query
    with pytest.raises(errors.CudaError, match="illegal memory access"):
        pending.wait(timeout=5)


def test_nccls_error_lets_go_of_no_array(gpu, comm):
    """A peer is gone: the kernel that waits for it is still there, with the arrays' addresses."""
    array = Array()
    gone = weakref.ref(array)
    pending = start(comm, array)
    comm._native.state = 6

    class Check:
        def __call__(self, code, library, native):
            raise errors.RemoteError("gone", code=code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_queue, "check", Check())
        assert isinstance(pending.exception(), errors.RemoteError)
    pending._result = None
    del array
    gc.collect()
    assert gone() is not None


@pytest.mark.parametrize("kind, call", [("buffer", ["deregister"]), ("window", ["window_deregister"]), (None, [])])
def test_registered_memory_is_released_after_a_wait_and_before_the_communicator(gpu, comm, kind, call):
    for number in range(2):
        comm._registrations.add(Registration(Array(), 64 * number, 4, 7, kind, None))
    gpu.log.clear()
    comm.deregister(next(iter(comm._registrations)))
    assert gpu.log == ["synchronize", *call]
    gpu.log.clear()
    comm.close()
    assert gpu.log == ["synchronize", "wait_for_calls", "synchronize", *call, "destroy"]


def test_abort_lets_go_of_what_has_left_the_gpu(gpu, comm, monkeypatch):
    monkeypatch.setattr(closing, "_ABORT_SECONDS", 0.05)
    done, array, registered = start(comm, Array()), Array(), Array()
    gone, freed = weakref.ref(array), weakref.ref(registered)
    pending = start(comm, array)
    done._pending_op.completion[0].happened = True
    comm._registrations.add(Registration(registered, 64, 4, 7, "buffer", None))
    pending._result = None
    del array, registered
    comm.abort()  # it waits for the event, but not for ever
    gc.collect()
    assert gone() is not None and freed() is not None, "the aborted operation's kernels may still be there"
    assert done.wait() and done.exception() is None
    with pytest.raises(errors.Aborted):
        pending.wait()
    for event in gpu.events:
        event.happened = True
    assert isinstance(pending.exception(), errors.Aborted)


def test_memory_is_freed_after_a_wait_and_not_in_a_capture(gpu, monkeypatch):
    monkeypatch.setattr(memory, "is_capturing", lambda stream: gpu.capture is not None)
    library = Library(gpu.log)
    memory._drop(library, 64, DEVICE, None, memory.os.getpid())
    memory._drop(library, 128, DEVICE, None, memory.os.getpid())
    gpu.capture = 3
    memory.free_dropped()
    assert gpu.log == []
    gpu.capture = None
    memory.free_dropped()
    memory.free_dropped()
    assert gpu.log == ["synchronize", "mem_free", "mem_free"]


def test_memory_is_kept_where_the_wait_fails(gpu, monkeypatch):
    def fail(device):
        raise RuntimeError("the GPU is captured by another thread")

    memory._drop(Library(gpu.log), 64, DEVICE, None, memory.os.getpid())
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="another thread"):
        patch.setattr(memory.torch.cuda, "synchronize", fail)
        memory.free_dropped()
    assert gpu.log == []
    memory.free_dropped()
    assert gpu.log == ["synchronize", "mem_free"]


def test_queries_are_allowed_by_the_threads_mode(monkeypatch):
    modes = [0]  # the driver's, of this thread: 0 global, 2 relaxed

    def exchange(mode):
        old, modes[:] = modes[0], [mode._obj.value]
        mode._obj.value = old
        return 0

    driver = types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(cuda_state, "_driver", lambda: driver)
    with cuda_state.queries_allowed():
        assert modes == [2]
        with cuda_state.queries_allowed():
            assert modes == [2]
        assert modes == [2]
    assert modes == [0]
    driver.cuThreadExchangeStreamCaptureMode = lambda mode: 3
    with pytest.raises(errors.CudaError, match="CUresult 3"), cuda_state.queries_allowed():
        pass


def test_a_threads_first_call_asks_for_a_capture(gpu, monkeypatch):
    """The driver knows no context in a thread before the runtime has been called there."""
    ready = []

    def ask(stream, status, number, *rest):
        status._obj.value, number._obj.value = 1, 9
        return 0 if ready else 201

    monkeypatch.setattr(cuda_state, "_driver", lambda: types.SimpleNamespace(cuStreamGetCaptureInfo_v2=ask))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: ready.append(1))
    assert cuda_state.capture_id(None) == 9
    ready.clear()
    assert cuda_state.capture_id(gpu.current) == 9


# ---- Devices of threads.


@pytest.fixture
def devices(monkeypatch):
    """(thread, device) of each call of torch.cuda.set_device."""
    found = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: found.append((threading.current_thread().name, device))
    )
    return found


def test_hvds_thread_takes_its_device_first(devices):
    controller = Controller.__new__(Controller)
    controller.comms = {"cuda": types.SimpleNamespace(device=DEVICE)}
    controller._work_available, controller._stopped = threading.Event(), True
    controller._work_available.set()
    controller._start_thread()
    controller._thread.join(10)
    assert devices == [("collectives horovod", DEVICE)]


def test_init_takes_the_device_where_cuda_is_unused(devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuda_state.set_first_device(DEVICE)
        cuda_state.set_first_device(torch.device("cpu"))
    assert [device for _, device in devices] == [DEVICE]


@pytest.mark.parametrize("current, warned", [(0, True), (1, False)])
def test_init_warns_where_another_device_is_in_use(devices, monkeypatch, current, warned):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda_state.set_first_device(DEVICE)
    assert not devices and [("set_device(1)" in str(each.message)) for each in caught] == [True] * warned


def test_init_calls_it_before_anything_is_opened(monkeypatch):
    class Stop(Exception):
        pass

    def first(device):
        raise Stop(device)

    engine = Engine("nccl", "cuda", "2.29.7", "libnccl.so.2", None)
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "get_engine", lambda *args: engine)
    monkeypatch.setattr(world, "set_first_device", first)
    with pytest.raises(Stop, match="cuda:1"):
        world.init(device="cuda:1")
