"""DDP's modes beside the hook's options, and what they refuse: gradients and parameters are those of plain DDP."""

import contextlib

import pytest
import torch

from collectives import HookState, optim
from collectives.errors import InvalidUsage
from tests.ddp.training import Branches, batch, loss_of, make_model, over_gloo, run, wrap

MODES = [
    (make_model, {"static_graph": True}, {"max_norm": 0.3}),
    (make_model, {"gradient_as_bucket_view": True}, {"inside": True, "check_finite": True, "quiet": 1}),
    (Branches, {"find_unused_parameters": True, "gradient_as_bucket_view": True}, {"inside": True, "streams": 2}),
    (make_model, {}, {"inside": True, "max_norm": 0.3, "uneven": True}),
]


def trained(ctx, hook, make, how, options):
    """Five steps of AdamW; `quiet`: so many backwards in no_sync come first; `uneven`: rank 1 has two steps more."""
    options = dict(options)
    model = make()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    inside, quiet, uneven = (options.pop(name, 0) for name in ("inside", "quiet", "uneven"))
    state = None
    if hook == "torch":
        state = HookState(optimizer=optimizer if inside else None, **options)
    ddp = wrap(model, hook, state, **how)
    with ddp.join(enable=bool(uneven)):
        for step in range(5 + (2 * ctx.rank if uneven else 0)):
            with ddp.no_sync() if step < quiet else contextlib.nullcontext():
                loss_of(ddp, step, ctx.rank).backward()
            if step < quiet:
                continue
            if hook == "plain" and "max_norm" in options:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


@over_gloo
def in_all_modes(ctx):
    for make, how, options in MODES:
        plain, ours = (trained(ctx, hook, make, how, options) for hook in ("plain", "torch"))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_training_is_that_of_plain_ddp(tmp_path):
    run(in_all_modes, 2, tmp_path / "store", env={"COLLECTIVES_OVERLAP": "1"})


@over_gloo
def double_backward(ctx):
    """DDP refuses it, as it writes averages into gradients that have a graph; a penalty on inputs' gradients works."""
    found = []
    for hook in ("plain", "torch"):
        model = make_model()
        x, _ = batch(0, ctx.rank)
        x.requires_grad_()
        ddp = wrap(model, hook)
        loss = ddp(x).square().mean()
        with pytest.raises(RuntimeError, match="in-place operation"):
            loss.backward(create_graph=True)
        model = make_model()
        ddp = wrap(model, hook)
        y = ddp(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (slope.square().mean() + y.mean()).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_double_backward_is_refused_as_by_ddp(tmp_path):
    run(double_backward, 2, tmp_path / "store")


@over_gloo
def joins(ctx):
    ddp = wrap(make_model(), "torch")
    with pytest.raises(InvalidUsage, match="divides by the ranks that have not joined"):
        with ddp.join(divide_by_initial_world_size=False):
            loss_of(ddp, 0, ctx.rank).backward()
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    ddp = wrap(model, "torch", HookState(optimizer=optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(InvalidUsage, match="a rank that has joined doesn't call"):
        with ddp.join():
            scaler.scale(loss_of(ddp, 0, ctx.rank)).backward()


def test_join_refuses_what_a_hook_can_not_do(tmp_path):
    run(joins, 2, tmp_path / "store")
