"""Communicator in a world of one: Work, groups, memory, other communicators, and the end."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch

import collectives
from collectives import errors
from collectives.comm.communicator import Communicator
from collectives.comm.engine import get_engine


@pytest.fixture
def comm():
    engine = get_engine("host")
    with Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cpu") as opened:
        yield opened


@pytest.fixture
def gate(comm):
    """Hold the communicator's queue until the event is set."""
    comm.all_reduce(torch.zeros(1), async_op=True).wait()
    event = threading.Event()
    comm._queue._native.call(lambda: event.wait(30))
    yield event
    event.set()


# ---- Work.


def test_work(comm):
    array = torch.ones(3)
    work = comm.all_reduce(array, 2.0, async_op=True)
    assert work.wait() is True and work.wait(timeout=0) is True
    assert work.done() and work.is_completed() and work.exception() is None
    assert work.result() is array and array.tolist() == [2, 2, 2]
    assert work.future().wait() is array and "done" in repr(work)
    assert work.op == "all_reduce" and work.nbytes == 12


def test_future_is_fulfilled_by_the_queue(comm, gate):
    array = torch.ones(3)
    work = comm.all_reduce(array, async_op=True)
    future = work.future()
    assert future is work.future() and not future.done()
    chained = future.then(lambda done: done.value().sum().item())
    gate.set()
    assert chained.wait() == 3.0 and future.wait() is array


def test_a_dropped_work_holds_its_arrays(comm, gate):
    array = torch.ones(1000)
    gone = weakref.ref(array)
    comm.all_reduce(array, async_op=True)
    del array
    gc.collect()
    assert gone() is not None
    gate.set()
    comm.all_reduce(torch.zeros(1), async_op=True).wait()
    gc.collect()
    assert gone() is None


def test_memory_is_held_where_a_tensor_is_given_another(comm, gate):
    library = comm.engine.library
    before = library.memory_in_use()
    array = comm.empty(1 << 16, torch.float32)
    work = comm.all_reduce(array.fill_(1), 3.0, async_op=True)
    array.data = torch.zeros(3)  # as module.half() does
    gc.collect()
    assert library.memory_in_use() > before, "the engine would write to memory that was given back"
    gate.set()
    work.wait(10)
    gc.collect()
    assert library.memory_in_use() == before and array.tolist() == [0, 0, 0]


def test_blocking_calls_come_after_queued_ones(comm, gate):
    array = torch.ones(1)
    comm.all_reduce(array, 3.0, async_op=True)
    threading.Timer(0.2, gate.set).start()
    comm.all_reduce(array, 2.0)
    assert array.item() == 6.0


def test_abort_ends_what_is_in_flight(comm, gate):
    work = comm.all_reduce(torch.ones(1), async_op=True)
    comm.all_reduce(torch.ones(1), async_op=True)
    threading.Timer(0.2, gate.set).start()  # what holds the queue here isn't the engine's
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # not even of the one that nobody holds
        comm.abort()
    with pytest.raises(errors.Aborted):
        work.wait()
    assert isinstance(work.exception(), errors.Aborted) and work.done()
    with pytest.raises(errors.InvalidUsage, match="was aborted"):
        comm.barrier()


# ---- Groups.


def test_group_is_issued_at_its_end(comm):
    a, b = torch.ones(2), torch.zeros(2)
    with comm.group():
        comm.send(a, 0)
        comm.recv(b, 0)
        comm.all_reduce(a, 5)
        assert b.tolist() == [0, 0] and a.tolist() == [1, 1]
    assert a.tolist() == [5, 5] and b.sum() > 0


def test_async_group(comm):
    a, b = torch.ones(1), torch.zeros(1)
    with comm.group():
        sent = comm.send(a, 0, async_op=True)
        received = comm.recv(b, 0, async_op=True)
        with pytest.raises(errors.InvalidUsage, match="leave its `with` block"):
            sent.wait()
        assert "not issued" in repr(sent)
    assert sent.wait(10) and received.result().item() == 1


def test_group_refuses(comm):
    with comm.group():
        comm.all_reduce(torch.ones(1))
        with pytest.raises(errors.InvalidUsage, match="all blocking or all async_op"):
            comm.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(errors.InvalidUsage, match="barrier"):
            comm.barrier()
        with pytest.raises(errors.InvalidUsage, match="inside a group"):
            comm.close()
    for name in ("send", "recv"):
        with pytest.raises(errors.InvalidUsage, match="same `with comm.group"):
            getattr(comm, name)(torch.ones(1), 0)


# ---- Memory.


def test_empty_is_freed_with_its_last_view(comm):
    library = comm.engine.library
    before = library.memory_in_use()
    tensor = comm.empty(1 << 20)
    assert tensor.shape == (1 << 20,) and tensor.dtype == torch.float32 and tensor.device == comm.device
    assert library.memory_in_use() >= before + (4 << 20)
    view = tensor[10:].view(torch.int32)
    tensor.fill_(2.0)
    comm.all_reduce(tensor, 0.5)
    kept = view.numpy()
    del tensor, view
    gc.collect()
    assert library.memory_in_use() >= before + (4 << 20) and (kept.view(np.float32) == 1.0).all()
    del kept
    gc.collect()
    assert library.memory_in_use() == before


def test_empty_outlives_the_communicator():
    engine = get_engine("host")
    comm = Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cpu")
    tensor = comm.empty(7, torch.int16)
    comm.close()
    tensor.fill_(3)
    assert pickle.loads(pickle.dumps(tensor)).tolist() == copy.deepcopy(tensor).tolist() == [3] * 7


def test_empty_refuses(comm):
    assert comm.empty(0, torch.bool).shape == (0,)
    for n in (-1, 1.5, True, (2, 3)):
        with pytest.raises(errors.InvalidArgument, match="n must be an int"):
            comm.empty(n)
    with pytest.raises(errors.InvalidArgument, match="torch.dtype"):
        comm.empty(3, np.float32)


def test_registration_holds_its_array(comm):
    tensor = comm.empty(1 << 16)
    gone = weakref.ref(tensor)
    registration = comm.register(tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    comm.deregister(registration)
    with pytest.raises(errors.InvalidArgument, match="ended before"):
        comm.deregister(registration)
    del registration
    gc.collect()
    assert gone() is None


# ---- Other communicators, and the end.


def test_split_and_shrink(comm):
    child = comm.split(3, key=-5)
    assert (child.rank, child.size, child.engine, child.timeout) == (0, 1, comm.engine, comm.timeout)
    assert comm.split(None) is None and comm.split(-1) is None
    for color in (-2, 0.5, True):
        with pytest.raises(errors.InvalidArgument, match="color"):
            comm.split(color)
    with pytest.raises(errors.InvalidArgument, match="must not call shrink"):
        comm.shrink([0])
    with pytest.raises(errors.InvalidArgument, match="exclude"):
        comm.shrink([1])
    child.close()


def test_a_timeout_that_is_refused_leaves_nothing_open():
    engine = get_engine("host")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(errors.InvalidArgument, match="timeout"):
            Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cpu", timeout=0)
        gc.collect()
    assert not [each for each in warned if issubclass(each.category, ResourceWarning)]


def test_timeout(comm):
    assert comm.timeout == 1800
    comm.timeout = None
    comm.timeout = 2.5
    assert comm.timeout == 2.5
    with pytest.raises(errors.InvalidArgument, match="above 0"):
        comm.timeout = 0


def test_after_close(comm):
    comm.close()
    comm.close()
    assert comm.closed and "closed" in repr(comm)
    one = torch.ones(1)
    for use in (
        lambda: comm.all_reduce(one),
        lambda: comm.all_reduce(one, async_op=True),
        lambda: comm.all_gather(torch.ones(1), one),
        lambda: comm.send(one, 0),
        lambda: comm.group().__enter__(),
        lambda: comm.empty(1),
        lambda: comm.register(one),
        lambda: comm.split(0),
        comm.barrier,
    ):
        with pytest.raises(errors.InvalidUsage, match="closed|same `with"):
            use()


def test_close_waits_for_what_is_queued(comm, gate):
    array = torch.ones(1)
    work = comm.all_reduce(array, 2.0, async_op=True)
    threading.Timer(0.2, gate.set).start()
    comm.close()
    assert work.done() and work.wait() and array.item() == 2.0


def test_is_not_pickled(comm):
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(errors.InvalidUsage, match="open one in each process"):
            use(comm)


@pytest.mark.parametrize("rank, size", [(1, 1), (-1, 2), (True, 2), (0, 0), (0, 1.0), (0.0, 1)])
def test_rank_and_size(rank, size):
    engine = get_engine("host")
    with pytest.raises(errors.InvalidArgument):
        Communicator(engine, engine.library.get_unique_id(), rank, size, device="cpu")


def test_device_of_the_engine():
    engine = get_engine("host")
    with pytest.raises(errors.InvalidArgument, match="cpu"):
        Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cuda:0")
    with pytest.raises(errors.InvalidArgument, match="get_engine"):
        Communicator("host", bytes(128), 0, 1, device="cpu")


def test_a_forked_child_can_use_nothing(comm, gate):
    tensor = comm.empty(4)
    work = comm.all_reduce(torch.ones(1), async_op=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12: fork beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            uses = [lambda: comm.all_reduce(torch.ones(1)), comm.barrier, work.wait, lambda: comm.empty(1)]
            refused = 0
            for use in uses:
                try:
                    use()
                except errors.InvalidUsage:
                    refused += 1
            comm.close()
            del tensor
            gc.collect()
            code = 0 if refused == len(uses) and comm.forked else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    assert work.wait(10)
    tensor.fill_(1.0)
    comm.all_reduce(tensor)


# ---- init() and the end of the interpreter, in a process of its own.

PROGRAM = """
import os, time
import collectives, torch
from collectives import errors
comm = collectives.init()
assert collectives.init() is comm and collectives.init("host", device="cpu") is comm
assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)
for wrong in (lambda: collectives.init("nccl"), lambda: collectives.init("other")):
    try:
        wrong()
    except (errors.InvalidUsage, errors.InvalidArgument) as error:
        print("refused", error)
comm.close()
comm = collectives.init()
t = torch.ones(2)
comm.all_reduce(t, 2)
print(t.tolist(), flush=True)
child = os.fork()
if child == 0:
    try:
        collectives.init()
    except errors.InvalidUsage as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
comm.all_reduce(t, async_op=True)
comm._queue._native.call(lambda: time.sleep(1))
work = comm.all_reduce(t, async_op=True)
future = work.future().then(lambda f: print("settled", flush=True))
"""


def test_init_alone_and_an_exit_with_work_in_flight():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert time.monotonic() - started < 40
    assert done.stdout.count("refused") == 2 and "[2.0, 2.0]" in done.stdout and "settled" in done.stdout
    assert "init(): the communicator was opened in the parent process" in done.stdout


def test_public_names():
    for name in collectives.__all__:
        assert getattr(collectives, name) is not None
    assert sorted(collectives.__all__) == collectives.__all__
    for name in errors.__all__:
        assert getattr(collectives.errors, name) is getattr(errors, name)
