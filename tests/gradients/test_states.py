"""HookState, groups and communicators: who averages with whom, what is refused, what comes after a failure."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives import HookState, errors
from collectives.rendezvous import process_groups as torch_groups
from tests.ddp.training import loss_of, make_model, over_gloo, run, train, wrap


def one_backward(model, rank):
    model.zero_grad()
    model(torch.full((1, 12), rank + 1.0)).sum().backward()
    return sorted(set(model.module.weight.grad.flatten().tolist()))


# ---- What is refused.


class Group:
    pass


def test_arguments():
    for arguments, text in (
        ({"comm": "world"}, "collectives.Communicator"),
        ({"process_group": 3}, "ProcessGroup, not int"),
        ({"process_group": Group()}, "ProcessGroup, not"),
        ({"average": 1}, "True or False"),
        ({"average": None}, "True or False"),
        ({"zero_copy": 1}, "zero_copy must be True or False"),
        ({"grad_scaler": "the first"}, "must be a torch.amp.GradScaler, None or False"),
    ):
        with pytest.raises(errors.InvalidArgument, match=text):
            HookState(**arguments)
    for state in (3, "fp16", HookState, {}):
        with pytest.raises(errors.InvalidArgument, match="must be None or a HookState"):
            collectives.fused_allreduce(state, None)
    for bucket, text in ((None, "NoneType"), (torch.ones(3), "Tensor")):
        with pytest.raises(errors.InvalidArgument, match=f"takes a torch.distributed.GradBucket.*{text}"):
            collectives.fused_allreduce(None, bucket)
    with pytest.raises(errors.InvalidUsage, match=r"init_process_group\(\)"):
        HookState().get_process_group()


def test_a_state_is_picklable():
    assert HookState().zero_copy is True
    state = pickle.loads(pickle.dumps(HookState(average=False, zero_copy=False)))
    assert state.average is False and state.zero_copy is False
    assert state.comm is None and state.process_group is None and "average=False" in repr(state)


def wrong_states(ctx):
    comm, texts = ctx.new_communicator(), []
    for state in (comm, dist.group.WORLD, "avg"):
        model = wrap(nn.Linear(12, 5), "torch", state)
        with pytest.raises(errors.InvalidArgument) as caught:
            one_backward(model, ctx.rank)
        texts.append(str(caught.value))
    assert "HookState(comm=...)" in texts[0] and "HookState(process_group=...)" in texts[1] and "not str" in texts[2]
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


def different_models(ctx):
    """The ranks' models differ, and DDP's own check is turned off."""
    comm = ctx.new_communicator()
    module = wrap(nn.Linear(12, 5 + ctx.rank), "torch", HookState(comm), init_sync=False)
    with pytest.raises(errors.Mismatch, match="(?s)(?=.*rank 0)(?=.*rank 1).*gradient bucket 0"):
        module(torch.ones(1, 12)).sum().backward()
    comm.abort()


# ---- Who averages with whom.


def with_own_communicator(ctx):
    comm = ctx.new_communicator()
    state = HookState(comm)
    assert one_backward(wrap(nn.Linear(12, 5), "torch", state), ctx.rank) == [1.5]
    again = pickle.loads(pickle.dumps(state))
    assert again.comm is None
    assert one_backward(wrap(nn.Linear(12, 5), "torch", again), ctx.rank) == [1.5]  # reopened over the default group
    comm.close()


def one_for_each_group(ctx):
    for state in (None, HookState(), HookState(process_group=dist.group.WORLD)):
        one_backward(wrap(nn.Linear(12, 5), "torch", state), ctx.rank)
    torch_groups._close_stale()
    assert len(torch_groups._communicators) == 1, torch_groups._communicators


def one_rank_stays_away(ctx):
    """Rank 1 misses a backward: rank 0 gets the cause, both build again and go on."""
    module = wrap(make_model(), "torch")
    train(module, 2, ctx.rank)
    comm = next(comm for _, comm in torch_groups._communicators.values() if not comm.closed)
    if ctx.rank == 0:
        comm.timeout = 0.5
        with pytest.raises(errors.CollectiveTimeout, match="gradient bucket 0.*6.weight.*build it again") as caught:
            loss_of(module, 5, ctx.rank).backward()
        assert caught.value.peers == (1,)
        ctx.barrier()
    else:
        ctx.barrier()
        with pytest.raises(errors.CollectivesError, match="build it again"):
            loss_of(module, 5, ctx.rank).backward()
    return train(wrap(make_model(), "torch"), 3, ctx.rank)[1]


@over_gloo
def of_two_ranks(ctx):
    wrong_states(ctx)
    with_own_communicator(ctx)
    one_for_each_group(ctx)
    different_models(ctx)
    return one_rank_stays_away(ctx)


def test_states_and_communicators_of_two_ranks(tmp_path):
    one, other = run(of_two_ranks, 2, tmp_path / "store")
    assert all(map(torch.equal, one, other))


def own_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return collectives.fused_allreduce(state[0], bucket)


def in_a_part(ctx, how, mine):
    """Average over a part of the ranks, then over all."""
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
    else:  # torch's class: without a group it is refused, nothing is registered, and what the message says works
        model = nn.parallel.DistributedDataParallel(nn.Linear(12, 5), process_group=mine)
        for state in (HookState(), None):
            with pytest.raises(errors.InvalidUsage, match=r"HookState\(process_group=group\)"):
                model.register_comm_hook(state, collectives.fused_allreduce)
        model.register_comm_hook(HookState(process_group=mine), collectives.fused_allreduce)
    value = [0, 9, 6][ctx.rank]
    world = wrap(nn.Linear(12, 5), "torch")
    return one_backward(model, value) + one_backward(world, value)


@over_gloo
def subgroups(ctx):
    pair, alone, everybody = dist.new_group([0, 2]), dist.new_group([1]), dist.new_group([0, 1, 2])
    mine = alone if ctx.rank == 1 else pair
    found = [in_a_part(ctx, how, mine) for how in ("subclass", "subclass, state", "state")]
    model = nn.parallel.DistributedDataParallel(nn.Linear(12, 5), process_group=mine)
    model.register_comm_hook([None], own_hook)
    with pytest.raises(errors.InvalidUsage, match=r"HookState\(process_group=group\)"):
        one_backward(model, 0)
    del model
    # Another group of all ranks needn't be named.
    model = nn.parallel.DistributedDataParallel(nn.Linear(12, 5), process_group=everybody)
    model.register_comm_hook(None, collectives.fused_allreduce)
    assert one_backward(model, ctx.rank) == [2.0]
    return found


def test_subgroups(tmp_path):
    # Ranks 0 and 2 average 1 and 7, rank 1 has its own 10, and the world's average is 6.
    assert run(subgroups, 3, tmp_path / "store") == [[[4.0, 6.0]] * 3, [[10.0, 6.0]] * 3, [[4.0, 6.0]] * 3]


def reinitialised(ctx, folder):
    seen, opened = [], []
    for name in "abc":
        grads, comm = over_gloo(first_gradients)(ctx, folder / name)
        seen.append(grads)
        opened.append(comm)
    assert [comm.closed for comm in opened] == [True, True, False]
    return seen


def first_gradients(ctx):
    grads = one_backward(wrap(nn.Linear(12, 5), "torch"), ctx.rank)
    return grads, list(torch_groups._communicators.values())[-1][1]


def test_default_group_is_opened_again_after_destroy(tmp_path):
    assert run(reinitialised, 2, tmp_path) == [[[1.5], [1.5], [1.5]]] * 2
