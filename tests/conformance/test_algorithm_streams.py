"""Ring and direct on CUDA's streams and in CUDA graphs."""

from __future__ import annotations

import collections

import pytest

from tests.conformance.worlds import ALGORITHMS, check


class FakeStream:
    """In place of a CUDA stream, without a GPU: what is put on it runs at once; it knows what is ordered before it."""

    cuda_stream = 0  # the host engine's NULL stream

    def __init__(self):
        self.before = collections.Counter()  # stream -> how many of its operations have ended when the next one runs

    def wait_stream(self, other):
        self.before |= other.before

    def wait_event(self, event):
        assert event.recorded is not None, "a wait for what was never recorded"
        self.before |= event.recorded

    def put(self):
        self.before[id(self)] += 1


class FakeEvent:
    recorded = None

    def record(self, stream):
        self.recorded = stream.before.copy()


def on_fake_streams(ctx, algorithm):
    """The CUDA way of running a plan, on host memory: two streams, events, and calls from streams that don't know of
    each other, as an asynchronous call and one on the current stream. Every other call is as in a capture."""
    import contextlib

    import torch

    from collectives.comm.algorithms import plan as plans

    comm, n = ctx.new_communicator(), ctx.size
    grouped, run_kernel = plans.issue_transfers, plans.run_kernel
    transfers, kernels = FakeStream(), FakeStream()
    outers, events, earlier, found = [], [], {}, []

    def run(plan, native, inp, out, factor):
        outer = FakeStream()
        outer.put()
        outers.append(outer)
        graph = len(outers) % 2 == 0  # as in a capture, whose scratch is its own
        before = None if plan._scratch is None else plan._scratch.clone()
        plan.run_on_streams(native, inp, out, factor, outer, transfers, kernels, own_memory=graph)
        if graph and before is not None and not torch.equal(before, plan._scratch):
            found.append("a captured call uses scratch of calls that aren't")
        if outer.before | transfers.before | kernels.before != outer.before:
            found.append("the caller's stream goes on before the call has ended")
        events.append(len(plan._events))
        earlier.update({id(each): each.before[id(each)] for each in (transfers, kernels)})

    def put(own, other, what):
        own.put()
        if own.before[id(other)] < earlier.get(id(other), 0):
            found.append(f"{what} beside {'kernels' if own is transfers else 'transfers'} of the call before it")
        if not own.before[id(outers[-1])]:
            found.append(f"{what} before the caller's stream has come to the call")

    def transfer(*args):
        put(transfers, kernels, "a transfer")
        grouped(*args)

    def kernel(*args):
        put(kernels, transfers, "a kernel")
        run_kernel(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans.ExecutionPlan, "run", run)
        patch.setattr(plans, "issue_transfers", transfer)
        patch.setattr(plans, "run_kernel", kernel)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Event", FakeEvent)
        for factor in (1, 2):
            x = torch.arange(70_000) * factor * (ctx.rank + 1)
            comm.all_reduce(x, 3, algorithm=algorithm)
            assert torch.equal(x, torch.arange(70_000) * (3 * factor * n * (n + 1) // 2))
        for factor in (1, 2):
            x = torch.full((n * 500,), (ctx.rank + 1.0) * factor)
            part = torch.zeros(500)
            comm.reduce_scatter(part, x, algorithm=algorithm)
            comm.all_reduce(x, algorithm=algorithm)
            whole = torch.empty(n * 500)
            comm.all_gather(whole, part, algorithm=algorithm)
            assert torch.equal(x, whole) and torch.equal(x, torch.full_like(x, factor * n * (n + 1) / 2))
    comm.close()
    return [*found, *([] if events[0] == events[1] > 0 and events[2:5] == events[5:] else [f"events {events}"])]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_cuda_way_on_fake_streams(algorithm):
    check(on_fake_streams, "host", 3, algorithm)


def captured(ctx, algorithm):
    """A CUDA graph of a call gives what the call gives, for whatever the arrays hold when it is replayed."""
    import torch

    from collectives.errors import InvalidUsage

    comm = ctx.communicator()
    found = []
    n, count = ctx.size, 100_003
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((count,), ctx.rank + 1.0, dtype=dtype, device=comm.device)
        large = torch.empty(n * 1000, dtype=dtype, device=comm.device)
        small = torch.full((1000,), ctx.rank + 1.0, dtype=dtype, device=comm.device)
        if dtype is torch.float32:
            with pytest.raises(InvalidUsage, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                comm.all_reduce(x[:7], algorithm=algorithm)
            torch.cuda.synchronize()

        def calls(x=x, large=large, small=small):
            comm.all_reduce(x, "avg", algorithm=algorithm)
            comm.all_gather(large, small, algorithm=algorithm)
            comm.reduce_scatter(small, large, "avg", algorithm=algorithm)

        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        for factor in (1.0, 2.0):
            x.fill_((ctx.rank + 1) * factor)
            small.fill_((ctx.rank + 1) * factor)
            graph.replay()
            torch.cuda.synchronize()
            want = (n + 1) / 2 * factor
            for name, got in (("all_reduce", x), ("reduce_scatter", small)):
                if name == "all_reduce" and not torch.all(got == want):
                    found.append(f"{name} {dtype}: {got[:3]}, want {want}")
            whole = torch.arange(1, n + 1, device=comm.device, dtype=dtype).repeat_interleave(1000) * factor
            if not torch.equal(large, whole):
                found.append(f"all_gather {dtype}: {large[:3]}")
            if not torch.all(small == (ctx.rank + 1) * factor):  # its average over ranks that all hold the same
                found.append(f"reduce_scatter {dtype}: {small[:3]}")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", [1, 2])
def test_cuda_graph(algorithm, n):
    check(captured, "nccl", n, algorithm)
