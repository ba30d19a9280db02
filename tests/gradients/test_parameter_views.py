"""HookState(parameters_as_bucket_view=True): the same training, with parameters that are gathered in place."""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import Communicator, HookState, errors, optim
from tests.ddp.training import over_gloo, run, wrap
from tests.streams.simulated import needs_simulation, steps

WARM = 4  # DDP makes its buckets in the second forward; the third step moves the parameters, the fourth makes tables


def on(ctx, width=16):
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)) for _ in range(3)]
    return nn.Sequential(*blocks).to(ctx.device, torch.bfloat16)


def train(ctx, model, state, count=WARM + 2):
    ddp = wrap(model, "state", state, bucket_cap_mb=0.0005)
    for step in range(count):
        torch.manual_seed(10 * step + ctx.rank)
        batch = torch.randn(4, 16, dtype=torch.bfloat16).to(ctx.device)
        with steps(ctx, step >= WARM) if ctx.device.type == "cuda" else contextlib.nullcontext():
            ddp(batch).square().mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
    return [param.detach().cpu().clone() for param in model.parameters()]


def make_state(model, views, **options):
    optimizer = optim.AdamW(model.parameters(), lr=0.01, master_weights=True)
    return HookState(optimizer=optimizer, parameters_as_bucket_view=views, **options)


@over_gloo
def views_or_not(ctx, options):
    found = []
    for views in (False, True):
        model = on(ctx)
        params, before = list(model.parameters()), [param.data_ptr() for param in model.parameters()]
        strides = [param.stride() for param in params]
        state = make_state(model, views, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "parameters_as_bucket_view")
            found.append(train(ctx, model, state))
        assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
        assert [param.stride() for param in params] == strides
        in_place, buckets = state.pipeline.optimizer_step.gathered_in_place
        assert buckets > 2
        assert (in_place == buckets) == views
        moved = [param.data_ptr() != at for param, at in zip(params, before, strict=True)]
        assert any(moved) == views
        assert f"{buckets} of {buckets} buckets gathered in place" in repr(state) or not views
    return found


@pytest.mark.parametrize(
    "device, options",
    [("host", {}), pytest.param("simulated", {"max_norm": 0.1, "streams": 2}, marks=needs_simulation)],
    ids=str,
)
def test_training_is_the_same(tmp_path, device, options):
    for plain, viewed in run(views_or_not, 2, tmp_path / "store", options, device=device):
        assert all(torch.equal(one, other) for one, other in zip(plain, viewed, strict=True))


def shared_or_odd(ctx):
    """What can not be moved stays."""
    model = on(ctx)
    alias = model[1][0].weight.detach()
    state = make_state(model, True)
    with pytest.warns(UserWarning, match="shares its memory with another tensor") as caught:
        train(ctx, model, state, 6)
    assert len(caught) == 1
    assert torch.equal(alias, model[1][0].weight)
    assert alias.data_ptr() == model[1][0].weight.data_ptr()
    in_place, buckets = state.pipeline.optimizer_step.gathered_in_place
    assert in_place == buckets - 1 > 1
    with pytest.warns(UserWarning, match="no multiple of 16"):
        train(ctx, odd := on(ctx, width=15), make_state(odd, True))


def refused(ctx):
    """Rank 0 finds no memory for its views: it gathers through a buffer, the other rank in place."""
    allocate = Communicator.empty

    def refuse_views(comm, n, dtype=None, **options):
        if dtype == torch.bfloat16:
            raise errors.TransportError("no memory is left")
        return allocate(comm, n, dtype, **options)

    no_memory = mock.patch.object(Communicator, "empty", refuse_views)
    expected = train(ctx, plain := on(ctx), make_state(plain, False))
    model = on(ctx)
    state = make_state(model, True)
    with no_memory if ctx.rank == 0 else contextlib.nullcontext(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = train(ctx, model, state)
    assert all(torch.equal(one, other) for one, other in zip(params, expected, strict=True))
    in_place, buckets = state.pipeline.optimizer_step.gathered_in_place
    assert (in_place == buckets) == (ctx.rank == 1)
    assert any("finds no room in shared memory" in str(each.message) for each in caught) == (ctx.rank == 0)


def others(ctx):
    """A model that is moved itself starts again; a bucket of one parameter is in place without being moved."""
    model = on(ctx)
    state = make_state(model, True)
    train(ctx, model, state)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=False)
    for param in model.parameters():
        param.data = param.data.clone()
    train(ctx, model, state)
    in_place, buckets = state.pipeline.optimizer_step.gathered_in_place
    assert in_place == buckets
    single = nn.Linear(16, 16, bias=False).to(ctx.device, torch.bfloat16)
    before = single.weight.data_ptr()
    state = make_state(single, True)
    train(ctx, single, state)
    assert state.pipeline.optimizer_step.gathered_in_place == (1, 1)
    assert single.weight.data_ptr() == before
    with pytest.raises(errors.InvalidArgument, match="give it one"):
        ddp = wrap(on(ctx), "state", HookState(parameters_as_bucket_view=True))
        ddp(torch.randn(4, 16, dtype=torch.bfloat16).to(ctx.device)).sum().backward()


@over_gloo
def what_stays_and_moves(ctx):
    shared_or_odd(ctx)
    refused(ctx)
    others(ctx)


def test_what_stays_and_what_others_move(tmp_path):
    run(what_stays_and_moves, 2, tmp_path / "store")
