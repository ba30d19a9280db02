"""The fast path of the hook is left at the first difference, and an error ends it. tests/gpu has its bits."""

import gc
import os
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives import HookState, errors
from collectives.recorder import Recorder, recording
from collectives.rendezvous.process_groups import get_communicator
from tests.ddp.training import buckets_of, gradients, loss_of, make_model, over_gloo, run, wrap
from tests.ranks import run_ranks

ENV = {"COLLECTIVES_OVERLAP": "0"}  # also where the ranks have cores to spare
SETTLED = 6  # steps after which DDP has its final buckets and the path is open


def state_of(state):
    return collectives.ddp.hook._default_state if state is None else state


def step(ddp, number, rank):
    ddp.zero_grad()
    loss_of(ddp, number, rank).backward()
    return gradients(ddp)


def settle(ddp, rank, state=None):
    for number in range(SETTLED):
        step(ddp, number, rank)
    assert state_of(state).fast_path.is_open


def mean_of_ranks(model, number, size):
    """The mean gradients of a plain copy of a model, summed in rank order."""
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    total = None
    for rank in range(size):
        own = step(plain, number, rank)
        total = own if total is None else [a + b for a, b in zip(total, own, strict=True)]
    return [each / size for each in total]


def right(ctx, ddp, number):
    found, want = step(ddp, number, ctx.rank), mean_of_ranks(ddp.module, number, ctx.size)
    return all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def goes_on(ctx, state):
    """Train another module of a state, from the full path to the fast one."""
    ddp = wrap(make_model(), "torch", state)
    return all([right(ctx, ddp, number) for number in range(SETTLED)]) and state.fast_path.is_open


def changes(ctx):
    """Differences from the last backward, one after the other."""
    state = HookState()
    ddp = wrap(make_model(), "torch", state, gradient_as_bucket_view=True)
    settle(ddp, ctx.rank, state)
    with ddp.no_sync():
        step(ddp, 6, ctx.rank)
    assert state.fast_path.is_open and right(ctx, ddp, 7)

    recording.active = recorder = Recorder()  # records this path
    try:
        assert right(ctx, ddp, 8)
    finally:
        recording.active = None
    assert state.fast_path.is_open and len(recorder.marks) == 1
    rows = {"hook": [], "lane 0": []}
    for row, name, _, _, details in recorder.events:
        rows[row].append((name.split()[0], details))
    assert len(rows["hook"]) == len(rows["lane 0"]) == buckets_of(ddp)
    assert [details["bucket"] for _, details in rows["lane 0"]] == list(range(buckets_of(ddp)))
    names = [name for _, details in rows["lane 0"] for name in details["parameters"].split(", ")]
    assert sorted(names) == sorted(name for name, _ in ddp.module.named_parameters())

    get_communicator(dist.group.WORLD, torch.device("cpu")).close()  # opened again by the next backward
    assert right(ctx, ddp, 9)
    settle(ddp, ctx.rank, state)

    with ddp.join():  # uneven inputs, after even ones
        assert right(ctx, ddp, 10)
        assert not state.fast_path.is_open
        for number in range(3 * ctx.rank):
            step(ddp, number, ctx.rank)
    del ddp

    ddp = wrap(make_model(), "torch", state)
    settle(ddp, ctx.rank, state)
    with pytest.raises(errors.InvalidUsage, match="divide_by_initial_world_size"):  # noqa: SIM117
        with ddp.join(divide_by_initial_world_size=False):
            step(ddp, 11, ctx.rank)
    del ddp

    other = wrap(make_model(), "torch", state)
    settle(other, ctx.rank, state)
    own = collectives.optim.AdamW(other.parameters(), lr=0.01)
    before = [p.detach().clone() for p in other.parameters()]
    state.optimizer = own
    step(other, 13, ctx.rank)
    assert not state.fast_path.is_open
    assert not any(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def two_modules(ctx, own):
    """Two modules of one state (None: the default one) in turn, then one of them alone, and one that has died."""
    state = HookState() if own else None
    first, second = (wrap(make_model(), "torch", state) for _ in range(2))
    for number in range(5):
        assert right(ctx, first, number) and right(ctx, second, number + 1)
    settle(first, ctx.rank, state)
    assert right(ctx, second, 3) and right(ctx, first, 4)
    settle(second, ctx.rank, state)
    path = state_of(state).fast_path
    del second
    gc.collect()
    assert not path.is_open and not path._buckets  # which hold the buffers
    assert right(ctx, first, 5)
    settle(first, ctx.rank, state)
    again = wrap(first.module, "torch", state)  # over the same parameters
    for number in range(SETTLED):
        assert right(ctx, again, number)


def other_buffers(ctx):
    """A buffer that isn't the one of the last backward, by object, by memory, or by its place."""
    state = HookState()
    for change in ("copy", "dtype", "memory", "index"):
        ddp = wrap(make_model(), "torch", state, gradient_as_bucket_view=True)
        settle(ddp, ctx.rank, state)
        path, index = state.fast_path, 0
        buffer = path._buckets[0].buffer
        if change == "copy":
            buffer = buffer.clone()
        elif change == "dtype":
            buffer = buffer.to(torch.float64)
        elif change == "memory":
            buffer.data = buffer.data.clone()
        else:
            index = len(path._buckets)
        assert not path.takes(state, None, index, buffer) and not path.is_open, change
        del ddp


def stopped(ctx):
    """Ctrl-C on one rank in the checks before the bucket's all-reduce, for which the other rank waits."""
    state = HookState()
    ddp = wrap(make_model(), "torch", state)
    settle(ddp, ctx.rank, state)
    comm, count = state.fast_path.comm, state.fast_path._count
    stops = {"side_effect": KeyboardInterrupt} if ctx.rank == 0 else {"wraps": count.begin_backward}
    with mock.patch.object(count, "begin_backward", **stops):  # noqa: SIM117
        with pytest.raises(errors.RemoteError if ctx.rank else KeyboardInterrupt):
            step(ddp, 7, ctx.rank)
    assert comm.closed and not state.fast_path.is_open
    del ddp
    assert goes_on(ctx, state)


def new_default_group(ctx, path):
    """The default group is destroyed and made again between two backwards."""
    state = HookState()
    ddp = wrap(make_model(), "torch", state)
    settle(ddp, ctx.rank, state)
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(errors.InvalidUsage, match="isn't initialised"):
        step(ddp, 7, ctx.rank)
    del ddp
    gc.collect()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    assert goes_on(ctx, state)


@over_gloo
def differences(ctx, path):
    changes(ctx)
    two_modules(ctx, True)
    two_modules(ctx, False)
    other_buffers(ctx)
    stopped(ctx)
    new_default_group(ctx, path)


def test_what_differs_takes_the_full_path(tmp_path):
    run(differences, 2, tmp_path / "a", str(tmp_path / "b"), env=ENV)


@over_gloo
def beside_other_threads(ctx):
    state = HookState()
    ddp = wrap(make_model(), "torch", state)
    return [right(ctx, ddp, number) and not state.fast_path.is_open for number in range(SETTLED + 2)]


def test_where_other_threads_reduce_it_stays_closed(tmp_path):
    assert all(map(all, run(beside_other_threads, 2, tmp_path / "a", env={"COLLECTIVES_OVERLAP": "1"})))


def loses_a_rank(ctx, how):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # DDP's own; the hook's has 2 ranks
    state = HookState(ctx.new_communicator())
    ddp = wrap(make_model(), "torch", state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    settle(ddp, ctx.rank, state)
    if ctx.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.rank == 0 or how == "killed":
        optimizer.step()
    text = "in gradient bucket 0, of .*can't go on after its hook has failed"
    with pytest.raises(errors.RemoteError if how == "killed" else errors.Mismatch, match=text) as raised:
        step(ddp, 7, ctx.rank)
    assert how == "mismatch" or raised.value.peers == (1,)
    assert not state.fast_path.is_open
    state.comm.abort()
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["killed", "mismatch"])
def test_a_rank_that_fails(how):
    run_ranks(loses_a_rank, 2, how, env=ENV, deaths=(1,) if how == "killed" else ())
