"""What goes wrong in training with the hook: ranks that differ, interruptions, dead ranks, dead modules."""

import copy
import gc
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives import HookState, errors
from collectives.gradients.streams import get_comm_streams
from tests.ddp.training import Fails, FailsMidway, buckets_of, loss_of, make_model, over_gloo, run, train, wrap
from tests.ranks import run_ranks

# ---- Ranks with other options.


def different(ctx):
    for given, words in (
        ({"wire": "int8"}, "wire: 'fp32' on rank 0; 'int8' on rank 1"),
        ({"max_norm": 1.0}, "max_norm"),
        ({"streams": 2}, "streams"),
        ({"optimizer": True}, "SGD"),
    ):
        options, model = dict(given) if ctx.rank else {}, make_model()
        if "optimizer" in options:
            options["optimizer"] = collectives.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(errors.InvalidUsage, match="HookStates differ") as caught:
            module = wrap(model, "torch", HookState(**options))
            loss_of(module, 0, ctx.rank).backward()
        assert words in str(caught.value) and "gradient bucket 0" in str(caught.value)
    train(wrap(make_model(), "torch", HookState()), 1, ctx.rank)


# ---- Interrupted.


def interrupt(ctx, late=1.0):
    """An interrupt ends the other rank's backward, too."""
    state = HookState(streams=2, max_norm=1.0)
    module = wrap(make_model(), "torch", state)
    train(module, 2, ctx.rank)
    if ctx.rank == 1:
        time.sleep(late)
    else:
        threading.Timer(late / 2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(errors.RemoteError if ctx.rank else KeyboardInterrupt) as caught:
        loss_of(module, 2, ctx.rank).backward()
    if ctx.rank or sys.version_info >= (3, 11):  # which has notes
        text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "in gradient bucket" in text and ".bias" in text
    assert not state.reducer.pending
    del module
    _, params = train(wrap(make_model(), "torch", state), 2, ctx.rank)
    return params


def fails_in_a_thread(ctx):
    """An error in a stream's thread ends the other rank's backward, too."""
    state = HookState(streams=2)
    module = wrap(make_model(), "torch", state)
    train(module, 2, ctx.rank)
    reduce, calls = state.compressor.reduce, itertools.count()

    def short_of_memory(*args, **options):
        if next(calls) == 1:
            raise MemoryError("none left")
        return reduce(*args, **options)

    kind = MemoryError if ctx.rank == 0 else errors.RemoteError
    with mock.patch.object(state.compressor, "reduce", short_of_memory if ctx.rank == 0 else reduce):
        with pytest.raises(kind):
            loss_of(module, 2, ctx.rank).backward()
    return train(wrap(make_model(), "torch", state), 2, ctx.rank)[1]


def killed(ctx):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # DDP's own; the hook's has 3 ranks
    comm = ctx.new_communicator()
    state, model = HookState(comm, streams=2), make_model()
    module = wrap(model, "torch", state)
    train(module, 2, ctx.rank)
    if ctx.rank == 2:
        model[2].weight.register_hook(lambda grad: os._exit(7))
    with pytest.raises(errors.RemoteError) as caught:
        loss_of(module, 2, ctx.rank).backward()
    comm.abort()
    unique_id = ctx.exchange(ctx.library.get_unique_id(), [0, 1])[0]
    state.comm = collectives.Communicator(comm.engine, unique_id, ctx.rank, 2, device="cpu")
    _, params = train(wrap(make_model(), "torch", state), 2, ctx.rank)
    state.comm.close()
    dist.destroy_process_group()
    error = caught.value
    return pickle.dumps((str(error), error.op, error.rank, error.peers, params))


def test_the_others_go_on_after_a_rank_was_killed_in_a_backward():
    results = run_ranks(killed, 3, env={"COLLECTIVES_OVERLAP": "1"}, deaths=(2,))
    one, other = map(pickle.loads, results[:2])
    for rank, (text, op, who, peers, _) in enumerate((one, other)):
        assert op == "all_reduce" and who == rank and 2 in peers and "gradient bucket" in text and "weight" in text
    assert all(map(torch.equal, one[4], other[4]))


# ---- What is kept, what is let go, what is refused.


def kept(ctx):
    state = HookState(wire="int8", error_feedback=True, streams=2)
    for name, value in (("wire", "bf16"), ("max_norm", 1.0), ("streams", 1)):
        with pytest.raises(errors.InvalidUsage, match=f"{name} is fixed"):
            setattr(state, name, value)
    module = wrap(make_model(), "torch", state)
    train(module, 3, ctx.rank)
    assert len(state.compressor._plans) == buckets_of(module)  # none of the first backward's buckets
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(state))))  # twice, and not used between
    residuals, kept = (each.compressor.state_dict()["residuals"] for each in (again, state))
    assert residuals.keys() == kept.keys() and all(torch.equal(residuals[name], kept[name]) for name in kept)
    for other in (HookState(), HookState(wire="int8")):
        with pytest.raises(errors.InvalidArgument, match="the state to load"):
            other.load_state_dict({"wire": state.compressor.state_dict(), "optimizer": None})
    nearest = HookState(wire="int8")
    nearest.load_state_dict({"wire": {"residuals": {}, "steps": 3, "seed": 5}, "optimizer": None})
    assert nearest.compressor.seed is None
    param = weakref.ref(module.module[0].weight)
    del module
    gc.collect()
    assert param() is None and not state.compressor._plans and not state.compressor.residuals._views
    scaler = torch.amp.GradScaler("cpu")
    state.grad_scaler = scaler
    del scaler
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    assert state.find_scaler() is scaler  # the dead one's place


def streams_of_closed_communicators(ctx):
    before = threading.active_count()
    for _ in range(3):
        comm = ctx.new_communicator()
        for comm_stream in get_comm_streams(comm, 2):
            comm_stream.submit(int).wait()
        beside = get_comm_streams(comm, 2)[1].comm
        comm.close()
    comm = ctx.new_communicator()
    get_comm_streams(comm, 1)
    assert beside.closed
    limit = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert threading.active_count() <= before
    comm.close()


def test_comm_streams_close_with_their_communicator():
    run(streams_of_closed_communicators, 2)


def fails_between_buckets(ctx):
    """A backward fails between its buckets on all ranks; the same parameters go on in another DDP object."""
    found = []
    for state in (None, HookState(), HookState(max_norm=1.0)):
        used, model = state or collectives.ddp.hook._default_state, FailsMidway()
        module = wrap(model, "torch", state)
        train(module, 2, ctx.rank)
        Fails.on = True
        with pytest.raises(ArithmeticError):
            loss_of(module, 2, ctx.rank).backward()
        Fails.on = False
        assert used.reducer.pending  # buckets were on their way
        del module
        gc.collect()
        plain = copy.deepcopy(model)
        ours = train(wrap(model, "torch", state, bucket_cap_mb=1), 2, ctx.rank)[1]
        assert not used.reducer.pending
        if used.max_norm is None:
            torch.testing.assert_close(ours, train(wrap(plain, "plain"), 2, ctx.rank)[1], rtol=2e-5, atol=1e-6)
        found += ours
    return found


@over_gloo
def hostile(ctx, overlap):
    params = interrupt(ctx)
    if overlap == "1":
        different(ctx)
        kept(ctx)
        params += fails_in_a_thread(ctx) + fails_between_buckets(ctx)
    return params


@pytest.mark.parametrize("overlap", "01")
def test_two_ranks_go_on(tmp_path, overlap):
    one, other = run(hostile, 2, tmp_path / "store", overlap, env={"COLLECTIVES_OVERLAP": overlap})
    assert all(map(torch.equal, one, other))
