"""Communicator on every device: its operations, streams, groups, memory, what it refuses, graphs, arrays of CuPy."""

from __future__ import annotations

import pytest
import torch

from collectives.errors import InvalidArgument, InvalidUsage, Mismatch
from collectives.gradients.streams import CommStream
from collectives.sharded.streams import SideStream
from tests.comm.test_communicator_ranks import every_operation
from tests.gpu.devices import check, compare, everywhere, on


def operations(place, use_async):
    """What the host engine's tests call, for some dtypes; and premultiplied sums."""
    comm = place.new_communicator()
    assert comm.device == place.device and comm.engine.name == place.engine
    for dtype in ("float32", "bfloat16", "int64", "bool"):
        every_operation(comm, 5, dtype, use_async)
    tensor = place.full(comm.rank + 1.0, 1000)
    for op, factor in (("avg", 1 / comm.size), (0.5, 0.5)):
        comm.all_reduce(tensor, op)
        assert tensor.unique().tolist() == [comm.size * (comm.size + 1) / 2 * factor]
        tensor.fill_(comm.rank + 1.0)
    for shape in ((), (0,)):
        comm.all_reduce(place.full(1.0, *shape))
    comm.barrier()
    comm.close()


@everywhere(["blocking", "async"])
def test_every_operation(device, ranks, case):
    on(device, operations, ranks, case == "async")


def ordered_by_streams(place):
    """Blocking calls are ordered on the current stream or the one that they are given, asynchronous ones behind it."""
    comm = place.comm
    t = place.full(1.0, 1 << 20)
    side = place.new_stream()
    with place.use(side):
        place.delay()
        t.add_(1)
        assert comm._fast_path.all_reduce(t, "sum")  # the short way that a plain call takes: on the current stream
    place.join(side)
    assert t.unique().tolist() == [2 * comm.size]
    other = place.new_stream()
    with place.use(other):
        place.delay()
        t.fill_(1.0)
    comm.all_reduce(t, stream=None if other is None else other.cuda_stream)
    place.join(other)
    assert t.unique().tolist() == [comm.size]
    place.delay()
    t.fill_(1.0)
    work = comm.all_reduce(t, async_op=True)
    assert work.future().wait() is not None
    t.add_(1)
    assert t.unique().tolist() == [comm.size + 1]
    assert work.wait(timeout=30) and work.done() and work.exception() is None
    for number in range(50):  # nobody keeps tensor or Work
        comm.all_reduce(place.full(float(number), 1 << 18), async_op=True)
    comm.barrier()
    return t


@everywhere()
def test_streams_and_futures(device, ranks):
    check(device, ordered_by_streams, ranks)


def checks(place):
    comm = place.new_communicator()
    if not place.is_host:
        with pytest.raises(InvalidArgument, match=rf"on cpu.*\.to\('{place.device}'\)"):
            comm.all_reduce(torch.ones(3))
    t = place.full(1.0, 8)
    with pytest.raises(InvalidArgument, match=r"\.contiguous\(\)"):
        comm.all_reduce(t[::2])
    with pytest.raises(InvalidArgument, match="elements"), comm.group():
        comm.all_reduce(t)  # of a group that fails nothing is sent
        comm.all_gather(t[: comm.size * 2], t[:1])
    assert t.unique().tolist() == [1.0]
    overlapping = place.full(float(comm.rank), 16)  # the input is copied first
    comm.all_gather(overlapping[1 : 1 + comm.size * 2], overlapping[:2])
    assert overlapping[1 : 1 + comm.size * 2].tolist() == [float(r) for r in range(comm.size) for _ in range(2)]
    comm.all_reduce(t)
    assert t.unique().tolist() == [comm.size]
    comm.close()
    with pytest.raises(InvalidUsage, match="closed"):
        comm.all_reduce(t)


@everywhere()
def test_checks(device, ranks):
    on(device, checks, ranks)


def memory(place):
    """Memory of the library's own, registered or not, and a split."""
    comm = place.new_communicator()
    t = comm.empty(1000, torch.bfloat16)
    assert t.device == comm.device and t.dtype == torch.bfloat16
    t.fill_(1.0)
    view = t[10:20]
    registration = comm.register(t)
    comm.all_reduce(t)
    assert view.float().unique().tolist() == [comm.size]
    comm.deregister(registration)
    # Torch's own memory; on the host the ranks must share it.
    large = comm.empty(1 << 20).fill_(1.0) if place.is_host else place.full(1.0, 1 << 20)
    registration = comm.register(large)
    works = [comm.all_reduce(large, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    assert large.unique().tolist() == [comm.size**2]
    child = comm.split(0, key=-comm.rank)
    assert child.rank == comm.size - 1 - comm.rank
    child.all_reduce(place.full(1.0, 3))
    child.close()
    # What is registered is let go of by close(), after what is under way.
    comm.all_reduce(t, async_op=True)
    comm.all_reduce(large, async_op=True)
    comm.close()
    place.synchronize()
    return t, large


@everywhere()
def test_memory_and_split(device, ranks):
    check(device, memory, ranks)


def algorithms(place):
    """ring and direct, blocking and not, one after another on the same scratch."""
    comm, results = place.comm, []
    for algorithm in ("ring", "direct"):
        tensors = [place.random(5000, seed=seed) for seed in range(4)]
        with place.use(place.new_stream()):
            comm.all_reduce(tensors[0], algorithm=algorithm)
            place.synchronize()
        work = comm.all_reduce(tensors[1], algorithm=algorithm, async_op=True)
        comm.all_reduce(tensors[2], algorithm=algorithm)
        work.wait()
        comm.all_reduce(tensors[3], "avg", algorithm=algorithm)
        part = place.full(0.0, 5000 // comm.size)
        comm.reduce_scatter(part, tensors[0], algorithm=algorithm)
        whole = place.full(0.0, 5000)
        comm.all_gather(whole, part, algorithm=algorithm)
        results += [*tensors, whole]
    return results


@everywhere()
def test_algorithms(device, ranks):
    # Two ranks' sum has the same bits in any order, so native, ring and direct agree, too.
    for found in check(device, algorithms, ranks):
        compare(found[:5], found[5:])


def captured(place):
    """Blocking and asynchronous calls and groups in a graph, replayed after the handles are gone and others ran."""
    comm = place.comm
    t, u, v = (place.full(0.0, 4096) for _ in range(3))
    total = place.full(0.0, 4096)

    def step():
        comm.all_reduce(t)
        first = comm.all_reduce(u, async_op=True)
        second = comm.all_reduce(v, "avg", async_op=True)
        first.wait()
        second.wait()
        with comm.group():
            comm.broadcast(t, 0)
            comm.broadcast(u, 0)
        comm.all_reduce(v, algorithm="direct")
        comm.all_reduce(u, algorithm="ring")
        total.copy_(t).add_(u).add_(v)

    found = []
    step()
    place.synchronize()
    replay = place.capture(step)
    for number in range(3):
        for tensor, factor in ((t, 1.0), (u, 2.0), (v, 3.0)):
            tensor.fill_(factor * (number + 1) * (place.rank + 1))
        replay()
        found.append(total.clone())
        other = place.full(1.0, 64)
        work = comm.all_reduce(other, async_op=True)  # beside the graph, whose handles are not looked at
        assert work.wait(timeout=30) and other.unique().tolist() == [comm.size]
    comm.barrier()
    return found


@everywhere()
def test_captured_in_a_graph(device, ranks):
    check(device, captured, ranks)


def cupy_arrays(place):
    import cupy

    comm = place.comm
    array = cupy.ones(5, cupy.float32)
    cupy.cuda.Device().synchronize()
    comm.all_reduce(array)
    place.synchronize()
    assert array.tolist() == [comm.size] * 5
    with pytest.raises(InvalidArgument, match="ascontiguousarray"):
        comm.all_reduce(array[::2])


@everywhere(devices=["cuda"])
def test_cupy_arrays(device, ranks):
    pytest.importorskip("cupy")
    on(device, cupy_arrays, ranks)


def mismatch(place):
    comm = place.comm
    comm.all_reduce(place.full(1.0, 3))
    with pytest.raises(Mismatch) as caught:
        comm.all_reduce(place.full(1.0, 3 + comm.rank))
    comm.barrier()  # nothing was sent
    return str(caught.value)


@everywhere(devices=["cuda"], ranks=(2,))
def test_mismatch_is_found_where_asked_for(device, ranks):
    for text in on(device, mismatch, ranks, env={"COLLECTIVES_CHECK": "1"}):
        assert "rank 0: all_reduce float32 count=3" in text and "rank 1: all_reduce float32 count=4" in text


def priorities(place):
    """Give the priorities of the streams on which the package communicates, and of the one that computes."""
    comm, tensor = place.new_communicator(), place.full(1.0, 64)
    comm.all_reduce(tensor, async_op=True).wait()
    comm.all_reduce(tensor, algorithm="ring")
    streams = [comm._queue._side_stream, *comm._algorithms._streams, CommStream(comm, "lane 0").stream]
    with SideStream(place.device).ordered_alone():
        streams.append(torch.cuda.current_stream())
    found = [stream.priority for stream in streams], torch.cuda.current_stream().priority
    comm.close()
    return found


@everywhere(devices=("simulated", "cuda"))
def test_streams_that_communicate_have_a_high_priority(device, ranks):
    for communicating, computing in on(device, priorities, ranks):
        assert computing == 0 and len(communicating) == 5
        assert all(priority < computing for priority in communicating)
