"""HookState, groups and communicators: who averages with whom, what is refused, what comes after a failure."""

import os
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives import HookState, errors
from collectives.ddp import hook as ddp
from collectives.rendezvous import process_groups as torch_groups
from tests.ddp.training import Fails, FailsMidway, loss_of, make_model, over_gloo, run, train, wrap


def one_backward(model, rank):
    model.zero_grad()
    model(torch.full((1, 12), rank + 1.0)).sum().backward()
    return sorted(set(model.module.weight.grad.flatten().tolist()))


# ---- What is refused.


class Group:
    pass


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"comm": "world"}, "collectives.Communicator"),
        ({"process_group": 3}, "ProcessGroup, not int"),
        ({"process_group": Group()}, "ProcessGroup, not"),
        ({"average": 1}, "True or False"),
        ({"average": None}, "True or False"),
    ],
)
def test_arguments_of_the_state(arguments, text):
    with pytest.raises(errors.InvalidArgument, match=text):
        HookState(**arguments)
    with pytest.raises(TypeError):
        HookState(unknown=1)


@pytest.mark.parametrize("state", [3, "fp16", HookState, {}])
def test_a_wrong_state_says_what_was_expected(state):
    with pytest.raises(errors.InvalidArgument, match="must be None or a HookState"):
        collectives.fused_allreduce(state, None)


@pytest.mark.parametrize("bucket, text", [(None, "NoneType"), (torch.ones(3), "Tensor")])
def test_a_wrong_bucket_says_what_was_expected(bucket, text):
    with pytest.raises(errors.InvalidArgument, match=f"takes a torch.distributed.GradBucket.*{text}"):
        collectives.fused_allreduce(None, bucket)


def test_state_is_picklable():
    state = pickle.loads(pickle.dumps(HookState(average=False)))
    assert state.average is False and state.comm is None and state.process_group is None
    assert "average=False" in repr(state)


@over_gloo
def wrong_states(ctx):
    comm = ctx.new_communicator()
    texts = []
    for state in (comm, dist.group.WORLD, "avg"):
        model = wrap(nn.Linear(12, 5), "torch", state)
        with pytest.raises(errors.InvalidArgument) as caught:
            one_backward(model, ctx.rank)
        texts.append(str(caught.value))
    model = collectives.DistributedDataParallel(nn.Linear(12, 5))
    for arguments in ((None,), (HookState(),), (3,)):
        with pytest.raises(errors.InvalidArgument, match=r"\(hook\) or \(state, hook\)"):
            model.register_comm_hook(*arguments)
    part = comm.split(ctx.rank)
    with pytest.raises(errors.InvalidArgument, match="rank 0 of 1, this module's process group rank"):
        model.register_comm_hook(HookState(part), collectives.fused_allreduce)
    with pytest.raises(errors.InvalidArgument, match="give one of them"):
        HookState(comm, process_group=dist.group.WORLD)
    part.close()
    comm.close()
    return texts


def test_wrong_states_in_ddp(tmp_path):
    for comm, group, text in run(wrong_states, 2, tmp_path / "store"):
        assert "HookState(comm=...)" in comm and "HookState(process_group=...)" in group and "not str" in text


@over_gloo
def sparse(ctx):
    model = wrap(nn.Embedding(10, 3, sparse=True), "torch")
    with pytest.raises(errors.InvalidArgument, match=r"sparse=False.*of weight. A .*build it again"):
        model(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused(tmp_path):
    run(sparse, 2, tmp_path / "store")


# ---- Who averages with whom.


@over_gloo
def with_own_communicator(ctx):
    comm = ctx.new_communicator()
    state = HookState(comm)
    model = wrap(nn.Linear(12, 5), "torch", state)
    grads = one_backward(model, ctx.rank)
    again = pickle.loads(pickle.dumps(state))
    assert again.comm is None
    grads += one_backward(wrap(nn.Linear(12, 5), "torch", again), ctx.rank)  # reopened over the default group
    comm.close()
    return grads


def test_own_communicator(tmp_path):
    assert run(with_own_communicator, 2, tmp_path / "store") == [[1.5, 1.5]] * 2


@over_gloo
def subgroups(ctx, how):
    group = dist.new_group([0, 2])
    other = dist.new_group([1])
    mine = other if ctx.rank == 1 else group
    if how == "subclass":
        model = collectives.DistributedDataParallel(nn.Linear(12, 5), process_group=mine)
        model.register_comm_hook(collectives.fused_allreduce)
    elif how == "subclass, state":
        model = collectives.DistributedDataParallel(nn.Linear(12, 5), process_group=mine)
        state = HookState()
        model.register_comm_hook(state, collectives.fused_allreduce)
        assert state.process_group is mine
        second = collectives.DistributedDataParallel(nn.Linear(12, 5), process_group=dist.group.WORLD)
        with pytest.raises(errors.InvalidArgument, match="another process group"):
            second.register_comm_hook(state, collectives.fused_allreduce)
        again = pickle.loads(pickle.dumps(state))
        with pytest.raises(errors.InvalidUsage, match="set its process_group"):
            again.get_process_group()
        again.process_group = mine
        assert again.get_process_group() is mine
    else:
        model = wrap(nn.Linear(12, 5), "torch", HookState(process_group=mine), process_group=mine)
    value = [0, 9, 6][ctx.rank]
    world = wrap(nn.Linear(12, 5), "torch")
    return one_backward(model, value) + one_backward(world, value)


@pytest.mark.parametrize("how", ["subclass", "subclass, state", "state"])
def test_subgroups(tmp_path, how):
    # Ranks 0 and 2 average 1 and 7, rank 1 has its own 10, and the world's average is 6.
    assert run(subgroups, 3, tmp_path / "store", how) == [[4.0, 6.0], [10.0, 6.0], [4.0, 6.0]]


def test_default_group_is_opened_again_after_destroy(tmp_path):
    results = run(reinitialised, 2, tmp_path)
    assert results == [[[1.5], [1.5], [1.5]]] * 2


def reinitialised(ctx, folder):
    seen = []
    opened = []
    for name in "abc":
        grads, comm = over_gloo(first_gradients)(ctx, folder / name)
        seen.append(grads)
        opened.append(comm)
    assert [comm.closed for comm in opened] == [True, True, False]
    return seen


def first_gradients(ctx):
    grads = one_backward(wrap(nn.Linear(12, 5), "torch"), ctx.rank)
    return grads, list(torch_groups._communicators.values())[-1][1]


def test_one_communicator_for_each_group(tmp_path):
    run(one_for_each_group, 2, tmp_path / "store")


@over_gloo
def one_for_each_group(ctx):
    states = [None, HookState(), HookState(process_group=dist.group.WORLD)]
    before = len(torch_groups._communicators)
    for state in states:
        one_backward(wrap(nn.Linear(12, 5), "torch", state), ctx.rank)
    torch_groups._close_stale()
    assert len(torch_groups._communicators) == 1, (before, torch_groups._communicators)


def without_a_group(ctx):
    state = HookState()
    with pytest.raises(errors.InvalidUsage, match=r"init_process_group\(\)"):
        state.get_process_group()


def test_without_a_process_group():
    run(without_a_group, 1)


# ---- After something went wrong.


@over_gloo
@mock.patch.dict(os.environ, {"COLLECTIVES_OVERLAP": "1"})
def interrupted(ctx, own_state):
    state = HookState() if own_state else None
    model = FailsMidway()
    module = wrap(model, "torch", state)
    train(module, 2, ctx.rank)
    Fails.on = True
    try:
        with pytest.raises(ArithmeticError):
            loss_of(module, 2, ctx.rank).backward()
    finally:
        Fails.on = False
    left = (state or ddp._default_state).reducer.pending
    assert left > 0  # buckets were on their way
    fresh = make_model()
    grads, params = train(wrap(fresh, "torch", state), 3, ctx.rank)
    assert not (state or ddp._default_state).reducer.pending
    return grads, params


@over_gloo
def undisturbed(ctx):
    return train(wrap(make_model(), "plain"), 3, ctx.rank)


@pytest.mark.parametrize("own_state", [True, False])
def test_a_backward_that_failed_between_buckets(tmp_path, own_state):
    ours = run(interrupted, 2, tmp_path / "ours", own_state)
    plain = run(undisturbed, 2, tmp_path / "plain")
    for a, b in zip(ours[0][1], ours[1][1], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ours[0][1], plain[0][1], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@over_gloo
def one_rank_stays_away(ctx):
    """Rank 1 misses a backward: rank 0 gets the cause, both build again and go on."""
    model = make_model()
    module = wrap(model, "torch")
    train(module, 2, ctx.rank)
    comm = next(comm for _, comm in torch_groups._communicators.values() if not comm.closed)
    text = None
    if ctx.rank == 0:
        comm.timeout = 0.5
        with pytest.raises(errors.CollectiveTimeout) as caught:
            loss_of(module, 5, ctx.rank).backward()
        assert caught.value.peers == (1,)
        text = str(caught.value)
        ctx.barrier()
    else:
        ctx.barrier()
        with pytest.raises(errors.CollectivesError, match="build it again"):
            loss_of(module, 5, ctx.rank).backward()
    _, params = train(wrap(make_model(), "torch"), 3, ctx.rank)
    return text, params


def test_errors_name_the_bucket_and_the_next_module_works(tmp_path):
    (text, params), (_, others) = run(one_rank_stays_away, 2, tmp_path / "store")
    assert "gradient bucket 0" in text and "6.weight" in text and "build it again" in text
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@over_gloo
def different_models(ctx):
    """The ranks' models differ, and DDP's own check is turned off."""
    torch.manual_seed(0)
    model = nn.Linear(12, 5) if ctx.rank == 0 else nn.Linear(12, 6)
    comm = ctx.new_communicator()
    module = wrap(model, "torch", HookState(comm), init_sync=False)
    with pytest.raises(errors.Mismatch) as caught:
        module(torch.ones(1, 12)).sum().backward()
    comm.abort()
    return str(caught.value)


def test_different_models_are_a_mismatch(tmp_path):
    for text in run(different_models, 2, tmp_path / "store"):
        assert "rank 0" in text and "rank 1" in text and "gradient bucket 0" in text
