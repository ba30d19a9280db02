"""The futures of DDP's hook on a GPU, where DDP asks for them before the last bucket, or where no last bucket comes."""

import pytest
import torch
from torch import nn

import collectives
from collectives import HookState
from tests.ddp.training import buckets_of, wrap
from tests.gpu.devices import check, compare, everywhere, in_group, on
from tests.gpu.training import RATE, Term, alone, batches, make_terms

ENV = {"COLLECTIVES_OVERLAP": "0"}
STEPS = 5


class WithUnused(nn.Module):
    """A model and a parameter that no forward uses, which is alone in DDP's last bucket."""

    def __init__(self, model, device):
        super().__init__()
        self.unused = Term((60, 40)).to(device)
        self.model = model

    def forward(self, batch):
        return self.model(batch)


def steps_of(rank, ddp, model, count=STEPS):
    optimizer, seen = torch.optim.SGD(model.parameters(), RATE), []
    for number in range(count):
        optimizer.zero_grad(set_to_none=False)
        rank.delay()
        ddp(batches(number, rank.rank, rank.device)).backward()
        seen.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
    return seen, [param.detach().clone() for param in model.parameters()]


@in_group
def without_last_bucket(rank):
    model, state = make_terms(rank.device), HookState(comm=rank.comm)
    whole = WithUnused(model, rank.device)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = wrap(whole, "torch", state, gradient_as_bucket_view=True, **options)
    return steps_of(rank, ddp, model)


@everywhere()
def test_a_last_bucket_that_is_left_out(device, ranks):
    """DDP leaves out the buckets of unused parameters, among them the last one."""
    for overlap in "01" if device == "host" else "0":
        (found, *_) = check(device, without_last_bucket, ranks, env={"COLLECTIVES_OVERLAP": overlap})
        compare(list(found), list(alone(ranks, STEPS)))


@in_group
def stages_without_last_bucket(rank):
    model, state = make_terms(rank.device), HookState(comm=rank.new_communicator(), max_norm=1.0)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = wrap(WithUnused(model, rank.device), "torch", state, gradient_as_bucket_view=True, **options)
    with pytest.raises(collectives.errors.InvalidUsage, match="skip_all_reduce_unused_params"):
        ddp(batches(0, rank.rank, rank.device)).backward()
    state.comm.abort()


@everywhere()
def test_stages_without_a_last_bucket(device, ranks):
    on(device, stages_without_last_bucket, ranks)


@in_group
def on_another_stream(rank, views):
    """DDP is made on the default stream and trains on another one, by which its first buckets are freed."""
    model, state = make_terms(rank.device), HookState(comm=rank.comm)
    ddp = wrap(model, "torch", state, gradient_as_bucket_view=views)
    side = rank.new_stream()
    with rank.use(side):
        found = steps_of(rank, ddp, model, 6)
        del ddp
    rank.join(side)
    return found


@everywhere(["views", "copies"])
def test_a_backward_on_another_stream(device, ranks, case):
    (found, *_) = check(device, on_another_stream, ranks, case == "views", env=ENV)
    compare(list(found), list(alone(ranks, 6)))


@in_group
def then_on_another_stream(rank):
    """The fast path is open when the backward comes from a new stream, on which the buckets are freed, too."""
    model, state = make_terms(rank.device), HookState(comm=rank.comm)
    ddp = wrap(model, "torch", state, gradient_as_bucket_view=True)
    steps_of(rank, ddp, model, 6)
    assert state.fast_path.is_open
    side = rank.new_stream()
    with rank.use(side):
        found = steps_of(rank, ddp, model, 2)
        assert state.fast_path.is_open
        del ddp
        for param in model.parameters():
            param.grad = None
    rank.join(side)
    return found


@everywhere()
def test_a_backward_on_a_new_stream(device, ranks):
    check(device, then_on_another_stream, ranks, env=ENV)


@in_group
def registered_in_vain(rank):
    """The hook is refused for a DDP object that has one, which calls `fused_allreduce` and uses its bucket."""
    model, state = make_terms(rank.device), HookState(comm=rank.comm)

    def doubled(state, bucket) -> torch.futures.Future[torch.Tensor]:
        future = collectives.fused_allreduce(state, bucket)
        future.wait()
        return future.then(lambda done: done.value().mul_(2.0))

    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    ddp.register_comm_hook(state, doubled)
    try:
        ddp.register_comm_hook(state, collectives.fused_allreduce)
    except RuntimeError:
        pass
    else:
        raise AssertionError("torch takes a second hook")
    seen, _ = steps_of(rank, ddp, model)
    assert buckets_of(ddp) > 1 and not state.fast_path.is_open
    return seen


@everywhere()
def test_a_hook_that_was_refused(device, ranks):
    (found, *_) = check(device, registered_in_vain, ranks, env=ENV)
    grads, _ = alone(ranks, 1)
    compare(found[0], [2.0 * grad for grad in grads[0]])

