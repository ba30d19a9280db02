"""What goes wrong around operations: on one rank alone, in signal handlers, in threads, and after the end of a job."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from collectives.comm.communicator import Communicator
from collectives.comm.engine import get_engine
from collectives.errors import InvalidUsage, TransportError
from collectives.horovod import operations as ops
from collectives.horovod.basics import World, activate, current
from collectives.horovod.settings import read_settings
from collectives.rendezvous.peers import PeerInfo
from tests.ranks import run_ranks

from .started import started


def memory(ctx):
    """What lies beside a tensor, or has come out of the same fusion, is nobody's business."""
    with started(ctx) as hvd:
        whole = torch.arange(8.0)
        for _ in range(2):
            hvd.grouped_allreduce_([whole[0:3], whole[4:7]], op=hvd.Sum, prescale_factor=1.0 / ctx.size)
        hvd.grouped_allreduce_([whole[:4], whole[4:]], op=hvd.Average)  # where there is nothing in between
        assert torch.equal(whole, torch.arange(8.0)), whole
        handles = [hvd.allreduce_async(torch.full((4,), float(number)), name=f"{number}") for number in range(8)]
        results = [hvd.synchronize(handle) for handle in handles]
        weight = torch.ones(4, requires_grad=True)
        loss = (results[3] * weight).sum()
        for other in results[:3] + results[4:]:
            other.zero_()
        loss.backward()
        assert weight.grad.tolist() == [3.0] * 4
        rows, _ = hvd.alltoall(torch.arange(float(ctx.size)), splits=torch.ones(ctx.size).int().numpy())
        assert rows.tolist() == [float(ctx.rank)] * ctx.size
    return True


def joins(ctx):
    """Uneven numbers of operations without names, one that failed, and one in another thread's hands."""
    with started(ctx) as hvd:
        for _ in range(ctx.rank + 1):
            hvd.allreduce(torch.ones(2), op=hvd.Sum)
        failing = hvd.allreduce_async(torch.ones(2 + ctx.rank), name="failing")
        hvd.join()
        with pytest.raises(hvd.HorovodInternalError, match="differ in shape"):
            hvd.synchronize(failing)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [ctx.size] * 2
        hvd.barrier()
        # A name that was refused isn't taken.
        ended = threading.Event()
        if ctx.rank == 0:
            thread = threading.Thread(target=lambda: (hvd.join(), ended.set()))
            thread.start()
            while not current().controller(hvd.global_process_set)._join_requested:
                time.sleep(0.001)
            with pytest.raises(ValueError, match="has joined"):
                hvd.allreduce_async(torch.ones(1), name="late")
            ctx.exchange(None)
            thread.join(30)
            assert ended.is_set()
        else:
            ctx.exchange(None)
            hvd.join()
        return hvd.allreduce(torch.ones(1), name="late", op=hvd.Sum).item()


def one_alone(ctx):
    """A failure of one rank's own ends the operation on all, while that rank goes on with something else."""
    found = []
    for failure in (MemoryError("no room"), InvalidUsage("no room"), TransportError("no room")):
        with started(ctx) as hvd:
            if ctx.rank == 0:

                def fail(*_, failure=failure):
                    raise failure

                current().controller(hvd.global_process_set)._executor.run = fail
            try:
                hvd.allreduce(torch.ones(3), name="x")
            except hvd.HorovodInternalError as error:
                found.append((type(error.__cause__).__name__, "no room" in str(error)))
            ctx.exchange(None)  # nobody has shut down before this
    return found


def interrupted(ctx):
    """A signal handler that waits is refused, and one that shuts down does so, in the midst of an operation."""
    found = []
    with started(ctx, HOROVOD_CYCLE_TIME=1000) as hvd:  # the interrupted thread runs the cycle, not the background one
        if ctx.rank == 0:

            def handler(*_):
                try:
                    hvd.allreduce(torch.ones(1), name="inside")
                except hvd.HorovodInternalError as error:
                    found.append("set a flag" in str(error))
                hvd.shutdown()
                raise KeyboardInterrupt

            before = signal.signal(signal.SIGUSR1, handler)
            hvd.allreduce_async(torch.ones(2), name="in the background")
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            try:
                hvd.allreduce(torch.ones(3), name="x")
            except KeyboardInterrupt:
                found.append("interrupted")
            signal.signal(signal.SIGUSR1, before)
            ctx.exchange(None)
        else:
            ctx.exchange(None)
            try:
                hvd.allreduce(torch.ones(3), name="x")
            except hvd.HorovodInternalError:
                found.append("raised")
    return found


def handles(ctx):
    """Results nobody asks for go with the job; a thread gets its own result while others' are under way."""
    kept = []
    for _ in range(3):
        with started(ctx) as hvd:
            hvd.synchronize(hvd.allreduce_async(torch.ones(3)))
            kept.append(len(ops._handles))
            mine = [hvd.allreduce_async(torch.ones(3), name=f"{number}") for number in range(20)]
            hvd.barrier()
            failing = hvd.allreduce_async(torch.ones(3), name="of one rank") if ctx.rank == 0 else None
            ctx.exchange(None)
    with started(ctx) as hvd:
        hvd.barrier()
        assert all(hvd.synchronize(handle) is None for handle in mine)
        if failing is not None:
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.synchronize(failing)
            assert caught.value.__cause__ is None and "of one rank" in str(caught.value)
    return max(kept) - kept[0] <= 2 and len(ops._handles) - kept[0] <= 3  # earlier calls here have left some


def all_of_them(ctx):
    return [each(ctx) for each in (memory, joins, one_alone, interrupted, handles)]


def test_mishaps():
    first, second = run_ranks(all_of_them, 2, timeout=90)
    failures = [(name, True) for name in ("MemoryError", "InvalidUsage", "TransportError")]
    assert first == [True, 2.0, failures, [True, "interrupted"], True]
    assert second == [True, 2.0, [("RemoteError", False)] * 3, ["raised"], True]


def begins(ctx):
    """An init that fails leaves nothing behind, and variables that can't be read are named."""
    counts = []
    for _ in range(3):
        with pytest.raises(ValueError, match="between 0 and 1"):
            with started(ctx, process_sets=[ops.ProcessSet([0, 99])]):
                raise AssertionError("there is no rank 99")
        counts.append(len(os.listdir("/proc/self/fd")))
    for name in ("HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"):
        for value in ("soon", "-1", "nan", "1e300"):
            with pytest.raises(ValueError) as caught:
                with started(ctx, **{name: value}):
                    raise AssertionError(f"{name}={value} was taken")
            assert f"{name}={value}: it must be a number" in str(caught.value)
    with started(ctx) as hvd:
        hvd.barrier()
    return counts[0] == counts[-1]


def test_what_begins_badly():
    assert run_ranks(begins, 2) == [True, True]


def between(ctx):
    """A state that is loaded or synced between a backward and its step, and a process set that is removed."""
    with started(ctx) as hvd:
        model = torch.nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
        waited = []
        for turn in range(6):
            optimizer._reducer._overlaps = True  # as with a core to spare
            model(torch.full((1, 3), turn + ctx.rank + 1.0)).pow(2).sum().backward()
            under_way = [bucket.work for bucket in optimizer._reducer._buckets]
            if turn == 3:
                state.sync()
            elif turn == 4:
                optimizer.load_state_dict(optimizer.state_dict())
            else:
                optimizer.step()
            waited.append(bool(under_way) and all(each is not None and each.done for each in under_way))
            optimizer.zero_grad()
        parameters = [each.tolist() for each in model.parameters()]
        theirs = ctx.exchange(parameters)
        assert theirs[0] == theirs[1]
        some = hvd.add_process_set([ctx.size - 1])
        for op in (hvd.Average, hvd.Adasum):
            alone = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=op, process_set=some)
            alone.step()
            hvd.remove_process_set(some)
            with pytest.raises(ValueError, match="isn't a process set of this job"):
                alone.step()
            hvd.add_process_set(some)
    return waited


def test_between_a_backward_and_its_step():
    assert run_ranks(between, 2) == [[False] + [True] * 5] * 2


def a_job_of_one(ctx):
    """When a job shrinks to this rank between a backward and its step, the optimizer goes on."""
    with started(ctx) as hvd:
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        model(torch.ones(1, 2)).sum().backward()
    if ctx.rank:
        return True
    engine = get_engine("host")
    comm = Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cpu")
    activate(World(comm, [PeerInfo(0, "here", "boot", os.getpid())], owns=True, settings=read_settings()))
    try:
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    finally:
        hvd.shutdown()
    return True


def test_a_job_that_shrinks_to_one():
    assert run_ranks(a_job_of_one, 2) == [True, True]
