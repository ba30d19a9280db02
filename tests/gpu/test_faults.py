"""What goes wrong on every device ends with an error: a killed rank, one that doesn't come, an abort."""

from __future__ import annotations

import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives.errors import Aborted, CollectivesError, CollectiveTimeout, CudaError, InvalidUsage, RemoteError
from collectives.rendezvous.process_groups import get_communicator
from tests.ddp.training import wrap
from tests.gpu.devices import everywhere, in_group, on
from tests.gpu.training import batches, make_terms
from tests.ranks import Died

LIMIT = 2.0  # seconds that a communicator waits
ENDS = (RemoteError, CollectiveTimeout, Aborted)


def ended(comm, tensor):
    """Start an operation that can't end, wait for it, and give the error and the seconds that it took."""
    begun, errors = time.monotonic(), []
    # The host engine raises at the first call, NCCL at a later one. Where the call itself was blocked, as a
    # simulated one is, it says that the communicator was aborted, and the next one why.
    for _ in range(3):
        with pytest.raises(CollectivesError) as caught:
            comm.all_reduce(tensor)
            work = comm.all_reduce(tensor, async_op=True)
            work.wait(timeout=10 * LIMIT)
        errors.append(caught.value)
    comm.abort()
    known = [error for error in errors if isinstance(error, ENDS)]
    return (known or errors)[0], time.monotonic() - begun


def killed(place):
    comm = place.new_communicator(timeout=LIMIT)
    tensor = place.full(1.0, 1 << 16)
    comm.all_reduce(tensor)
    place.synchronize()
    place.barrier()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ended(comm, tensor)


@everywhere(ranks=(2,))
def test_a_killed_rank(device, ranks):
    (error, seconds), died = on(device, killed, ranks, deaths=[1], fresh=device == "cuda")
    assert died == Died(signal.SIGKILL, 0)
    assert isinstance(error, ENDS), error
    assert seconds < 5 * LIMIT


@in_group
def absent(place):
    comm = get_communicator(dist.group.WORLD, place.device)
    comm.timeout = LIMIT
    tensor = place.full(1.0, 1 << 16)
    comm.all_reduce(tensor)
    place.synchronize()
    if place.rank == 1:
        place.barrier()
        comm.abort()
        return None
    found = ended(comm, tensor)
    place.barrier()
    return found


@everywhere(ranks=(2,))
def test_a_rank_that_does_not_come(device, ranks):
    (error, seconds), _ = on(device, absent, ranks, fresh=device == "cuda")
    assert isinstance(error, CollectiveTimeout), error
    assert error.op == "all_reduce" and 1 in error.peers
    assert LIMIT / 2 < seconds < 5 * LIMIT


def aborted(place):
    """A call under way ends with an abort from another thread of its own rank, and the device is usable."""
    comm = place.new_communicator(timeout=60.0)
    tensor = place.full(1.0, 1 << 16)
    comm.all_reduce(tensor)
    place.synchronize()
    if place.rank == 0:
        aborting = threading.Timer(0.5, comm.abort)
        aborting.start()
        with pytest.raises(CollectivesError) as caught:
            work = comm.all_reduce(tensor, async_op=True)
            work.wait(timeout=20)
        assert not isinstance(caught.value, CollectiveTimeout)
        aborting.join(timeout=20)
        assert not aborting.is_alive()
    place.barrier()
    comm.abort()
    with pytest.raises(InvalidUsage, match="abort"):
        comm.all_reduce(tensor)
    again = place.new_communicator()
    fresh = place.full(1.0, 8)
    again.all_reduce(fresh)
    assert fresh.unique().tolist() == [again.size]
    again.close()


@everywhere(ranks=(2,))
def test_abort(device, ranks):
    on(device, aborted, ranks, fresh=device == "cuda")


@in_group
def killed_in_a_backward(place):
    """The hook's error names the bucket; the process ends by itself, whatever is on the device."""
    comm = place.new_communicator(timeout=LIMIT)
    model = make_terms(place.device)
    ddp = wrap(model, "torch", collectives.HookState(comm=comm))
    for step in range(3):
        ddp(batches(step, place.rank, place.device)).backward()
    place.synchronize()
    place.barrier()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((CollectivesError, RuntimeError)) as caught:
        for step in range(3):  # on a GPU the first one may end before anything is known
            ddp(batches(step, place.rank, place.device)).backward()
            work = comm.all_reduce(place.full(1.0, 8), async_op=True)
            work.wait(timeout=10 * LIMIT)
    os.write(1, f"{type(caught.value).__name__}\n".encode())
    os._exit(7)  # Gloo's teardown is not what is tested


@everywhere(ranks=(2,))
def test_a_rank_that_is_killed_in_training(device, ranks):
    first, second = on(device, killed_in_a_backward, ranks, deaths=[0, 1], fresh=device == "cuda")
    assert first == Died(0, 7) and second == Died(signal.SIGKILL, 0)


def exits_with_operations_under_way(place):
    """The interpreter ends with an operation in flight that its peer never joins."""
    import atexit

    comm = place.new_communicator(timeout=60.0)
    tensor = place.full(1.0, 1 << 16)
    comm.all_reduce(tensor)
    place.synchronize()
    if place.rank == 0:
        comm.all_reduce(tensor, async_op=True)
    place.barrier()
    if place.rank == 0:
        begun = time.monotonic()
        atexit._run_exitfuncs()
        os._exit(3 if time.monotonic() - begun < 30 else 4)
    time.sleep(0.5)
    comm.abort()


@everywhere(ranks=(2,), devices=["host", "cuda"])  # the simulation's operations end in the call
def test_the_interpreter_ends_with_an_operation_under_way(device, ranks):
    first, _ = on(device, exits_with_operations_under_way, ranks, deaths=[0], fresh=device == "cuda")
    assert first == Died(0, 3)


def names_of_threads():
    import threading

    return sorted(thread.name for thread in threading.enumerate())


def current_device(place):
    """No thread of ours opens a context on another device, or changes which one is the caller's."""
    comm = place.comm
    before = None if place.is_host else torch.cuda.current_device()
    comm.all_reduce(place.full(1.0, 8), async_op=True).wait()
    comm.barrier()
    assert before == (None if place.is_host else torch.cuda.current_device()), names_of_threads()


@everywhere()
def test_the_callers_device_stays(device, ranks):
    on(device, current_device, ranks)


def closed_by_another_thread(place):
    comm, raised = place.new_communicator(), []
    tensor = place.full(1.0, 64)

    def work():
        try:
            torch.cuda.set_device(place.device) if not place.is_host else None
            while True:
                comm.all_reduce(tensor, async_op=True)
        except InvalidUsage as error:
            raised.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    comm.close()
    thread.join(30)
    assert not thread.is_alive() and "all_reduce" in raised[0] and "the communicator is closed" in raised[0]


@everywhere(ranks=(1,))
def test_a_communicator_that_another_thread_closes(device, ranks):
    on(device, closed_by_another_thread, ranks)


def an_event_that_fails(place):
    work = place.comm.all_reduce(place.full(1.0, 8), async_op=True)

    def query(event):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with mock.patch.object(torch.cuda.Event, "query", query):
        with pytest.raises(CudaError, match="illegal memory access"):
            work.wait(timeout=5)


@everywhere(ranks=(1,), devices=["simulated"])
def test_an_error_of_cudas(device, ranks):
    on(device, an_event_that_fails, ranks, fresh=True)
