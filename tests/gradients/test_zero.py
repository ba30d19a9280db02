"""HookState(optimizer=): the same training as with the same optimizer after the backward, in DDP."""

import io
import math
import re
from unittest import mock

import pytest
import torch

import collectives
from collectives import HookState, errors, optim
from collectives.gradients import bucket_gradients
from tests.ddp.training import Branches, loss_of, make_model, over_gloo, run, wrap

MAKE = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
    "momentum": lambda params: optim.SGD(params, lr=0.05, momentum=0.9),
}


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def backwards(ctx, ddp, amp, step, accumulate):
    """Those of one step, of which the last is synchronised; with a scaler one rank's loss is infinite in step 3."""
    for part in range(accumulate - 1):
        with ddp.no_sync():
            amp.scale(loss_of(ddp, 100 + step * accumulate + part, ctx.rank)).backward()
    loss = loss_of(ddp, step, ctx.rank)
    if amp.is_enabled() and step == 3 and ctx.rank == 1:
        loss = loss * math.inf
    amp.scale(loss).backward()


@over_gloo
def inside(ctx, kind, options, *, steps=6, accumulate=1, calls_step=False, scaler=False, **how):
    """Train with the optimizer in the hook; give parameters, full state, norms."""
    model = make_model()
    optimizer = MAKE[kind](model.parameters())
    scheduler = scheduler_of(optimizer)
    state = HookState(optimizer=optimizer, **options)
    ddp = wrap(model, "torch", state, **how)
    amp = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
    norms = []
    for step in range(steps):
        backwards(ctx, ddp, amp, step, accumulate)
        if scaler:
            amp.step(optimizer)
            amp.update()
        elif calls_step:
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        norms.append(state.grad_norm)
    held = sum(v.numel() for s in optimizer.state.values() for k, v in s.items() if k not in ("step", "shard"))
    return [p.detach().clone() for p in model.parameters()], state.optimizer_state_dict(), norms, held, amp.get_scale()


@over_gloo
def outside(ctx, kind, options, *, steps=6, accumulate=1, calls_step=True, scaler=False, **how):
    """Train with the optimizer after the backward, and torch's clipping."""
    model = make_model()
    optimizer = MAKE[kind](model.parameters())
    scheduler = scheduler_of(optimizer)
    kept = {key: value for key, value in options.items() if key not in ("max_norm", "check_finite")}
    ddp = wrap(model, "torch", HookState(**kept), **how)
    amp = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
    norms = []
    for step in range(steps):
        backwards(ctx, ddp, amp, step, accumulate)
        if "max_norm" in options:
            amp.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"]).item())
        amp.step(optimizer)
        amp.update()
        scheduler.step()
        optimizer.zero_grad()
    held = sum(v.numel() for s in optimizer.state.values() for k, v in s.items() if k != "step")
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict(), norms, held, amp.get_scale()


@over_gloo
def branched(ctx, where):
    """Parameters without a gradient in some steps: AdamW leaves them alone, decay and momentum included."""
    model = Branches()
    model.step = ctx.rank if where.endswith("apart") else 0  # then each is used on one rank
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    state = HookState(optimizer=None if where.startswith("outside") else optimizer)
    ddp = wrap(model, "torch", state, find_unused_parameters=True)
    known = bucket_gradients.find_unused_parameters

    def as_on_a_gpu(comm, bucket):
        """What the ranks find, as tensors that the host doesn't look at."""
        unused, _ = known(comm, bucket)
        here = [at for at, param in enumerate(bucket.params) if param.grad is None]
        return set(), {at: torch.tensor([float(at in unused)]) for at in here}

    finds = as_on_a_gpu if where.startswith("on a GPU") else known
    with mock.patch.object(bucket_gradients, "find_unused_parameters", finds):
        for step in range(5):
            loss_of(ddp, step, ctx.rank).backward()
            if where.startswith("outside"):
                optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["", ", apart"])
def test_unused_parameters_are_left_alone(tmp_path, how):
    plain = run(branched, 2, tmp_path / "outside", "outside" + how)
    for where in ("inside", "on a GPU"):
        ours = run(branched, 2, tmp_path / where, where + how)
        assert all(torch.equal(a, b) for found in ours for a, b in zip(found, plain[0], strict=True))


def go(ctx, path, where, kind, options, how):
    return where(ctx, path, kind, options, **how)


CASES = {
    "adamw": ("adamw", {}, {}),
    "momentum, 3 ranks": ("momentum", {}, {}),
    "one bucket, views": ("adamw", {}, {"bucket_cap_mb": 25, "gradient_as_bucket_view": True}),
    "step() is called": ("adamw", {"streams": 2}, {"calls_step": True}),
    "accumulation": ("adamw", {}, {"accumulate": 3}),
    "GradScaler": ("adamw", {}, {"scaler": True, "gradient_as_bucket_view": True}),
    "bf16": ("momentum", {"wire": "bf16", "error_feedback": True}, {}),
    "max_norm": ("adamw", {"max_norm": 0.5}, {}),
    "max_norm, GradScaler, accumulation": ("momentum", {"max_norm": 0.5}, {"scaler": True, "accumulate": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_optimizer_after_the_backward(tmp_path, case):
    ranks = 3 if "3 ranks" in case else 2
    kind, options, how = CASES[case]
    ours = run(go, ranks, tmp_path / "ours", inside, kind, options, how)
    plain = run(go, ranks, tmp_path / "plain", outside, kind, options, how)
    exact = "max_norm" not in options and "wire" not in options
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-2, "atol": 2e-3} if "wire" in options else {}
    for found in ours:
        for a, b in zip(found[0], plain[0][0], strict=True):
            torch.testing.assert_close(a, b, **tolerance)
        assert all(torch.equal(a, b) for a, b in zip(found[0], ours[0][0], strict=True))
        assert found[4] == plain[0][4]
    full, theirs = ours[0][1], plain[0][1]
    assert full["state"].keys() == theirs["state"].keys() and full["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        for key, value in state.items():
            if value is not None:
                torch.testing.assert_close(full["state"][number][key], value, **tolerance)
    if "max_norm" in options:
        finite = [pair for pair in zip(ours[0][2], plain[0][2], strict=True) if math.isfinite(pair[1])]
        assert len(finite) >= 5
        if not how.get("scaler"):  # of which the norm has the factor
            assert all(a == pytest.approx(b, rel=1e-4) for a, b in finite)
    else:  # 1/n, and less than 16 bytes a rank and bucket; at most 8 buckets, of 2 states
        assert ours[0][3] <= plain[0][3] / ranks + 4 * ranks * 8 * 2


@over_gloo
def stopped(ctx, stop, options):
    """Six steps of AdamW in the hook; with `stop`, the second half in new objects."""

    def make(state=None):
        model = make_model()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        if state is None:
            state = HookState(optimizer=optimizer, **options)
        else:
            state.optimizer = optimizer
        return model, optimizer, state

    model, optimizer, state = make()
    ddp = wrap(model, "torch", state)
    for step in range(6):
        if stop and step == 3:
            file = io.BytesIO()
            torch.save({"state": state, "model": model.state_dict()}, file)
            del ddp, state, model, optimizer
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            model, optimizer, state = make(saved["state"])
            model.load_state_dict(saved["model"])
            ddp = wrap(model, "torch", state)
        loss_of(ddp, step, ctx.rank).backward()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "options, tolerance", [({}, 0.0), ({"wire": "int8", "error_feedback": True, "max_norm": 0.5}, 4e-3)], ids=str
)
def test_training_goes_on(tmp_path, options, tolerance):
    """Bit for bit with fp32. A wire's blocks and a norm's parts begin elsewhere in DDP's first buckets after loading.

    An element may then move by a part of a step, which is 0.01; with lost moments most would, by more.
    """
    whole, halves = (run(stopped, 2, tmp_path / str(stop), stop, options) for stop in (False, True))
    for ranks in (whole, halves):
        assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))
    for one, other in zip(whole[0], halves[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


@over_gloo
def wrong_uses(ctx):
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    state = HookState(optimizer=optimizer)
    ddp = wrap(model, "torch", state)
    with pytest.raises(errors.InvalidUsage, match="no synchronised backward"):
        optimizer.step()
    loss_of(ddp, 0, ctx.rank).backward()
    optimizer.step()
    with pytest.raises(errors.InvalidUsage, match="no synchronised backward"):
        optimizer.step()
    with pytest.raises(errors.InvalidUsage, match="steps no optimizer"):
        HookState().optimizer_state_dict()
    part = wrap(make_model(), "torch", HookState(optimizer=optim.SGD(list(make_model().parameters())[:2])))
    with pytest.raises(errors.InvalidArgument, match="doesn't have"):
        loss_of(part, 0, ctx.rank).backward()


def test_wrong_uses(tmp_path):
    run(wrong_uses, 2, tmp_path / "store")
    assert collectives.optim is optim


@over_gloo
def different_steps(ctx, kind, key, value, when):
    """From a step on rank 1 has another value in its second group."""
    model = make_model()
    params = list(model.parameters())
    optimizer = MAKE[kind]([{"params": params[:4]}, {"params": params[4:]}])
    ddp = wrap(model, "torch", HookState(optimizer=optimizer))
    for step in range(when):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9  # as a scheduler does on all ranks
        loss_of(ddp, step, ctx.rank).backward()
        optimizer.zero_grad()
    before = [p.detach().clone() for p in params]
    if ctx.rank == 1:
        optimizer.param_groups[1][key] = value
    with pytest.raises(errors.Mismatch) as caught:
        loss_of(ddp, when, ctx.rank).backward()
    assert all(map(torch.equal, before, params))
    return str(caught.value), caught.value.peers


@pytest.mark.parametrize(
    "kind, key, value, when",
    [
        ("adamw", "lr", 0.5, 0),
        ("momentum", "lr", 0.5, 3),
        ("adamw", "betas", (0.5, 0.9), 1),
        ("momentum", "weight_decay", 1.0, 2),
    ],
)
def test_ranks_that_would_step_differently_are_refused(tmp_path, kind, key, value, when):
    for rank, (text, peers) in enumerate(run(different_steps, 2, tmp_path / "store", kind, key, value, when)):
        named = rf"{key} of group 1: .* on rank 0; {re.escape(str(value))} on rank 1"
        assert re.search(rf"different hyperparameters \({named}\)", text), text
        assert peers == (1 - rank,)
