"""HookState(optimizer=): the same training as with the same optimizer after the backward, in DDP, bit for bit."""

import contextlib
import copy
import io
import math
import re
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import HookState, errors, optim
from collectives.gradients import bucket_gradients
from tests.ddp.training import Branches, loss_of, make_model, over_gloo, run, wrap

BF16 = torch.bfloat16


class Convolutions(nn.Module):
    """Parameters in channels_last, of two groups' sizes, one of no elements in the last rank's part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(13)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 5, 2)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x):
        return self.net(x.repeat(1, 4).reshape(-1, 3, 4, 4)).mean(dim=(2, 3))


RULES = {
    "momentum": (optim.SGD, make_model, torch.float32, {"lr": 0.05, "momentum": 0.9}),
    "plain SGD": (optim.SGD, make_model, torch.float32, {"lr": 0.1}),
    "adamw": (optim.AdamW, make_model, torch.float32, {"lr": 0.01}),
    "amsgrad": (optim.AdamW, make_model, torch.float32, {"lr": 0.01, "amsgrad": True}),
    "masters": (optim.AdamW, make_model, BF16, {"lr": 0.01, "master_weights": True}),
    "random": (optim.Adam, make_model, BF16, {"lr": 0.01, "stochastic_rounding": True, "seed": 5}),
    "channels_last": (optim.AdamW, Convolutions, torch.float32, {"lr": 0.01}),
}


def make(rule):
    """Return a model and its optimizer, which has two groups."""
    kind, model, dtype, arguments = RULES[rule]
    model = model().to(dtype)
    params = list(model.parameters())
    return model, kind([{"params": params[1::2]}, {"params": params[::2], "weight_decay": 0.1}], **arguments)


def spoil(gradient):
    """Make an element infinite that the last rank owns: behind the middle of its bucket, and before the rest."""
    gradient = gradient.clone()
    gradient.view(-1)[400] = torch.inf
    return gradient


def train(ctx, rule, inside, options, *, parts=1, calls_step=False, scaled=False, writes=False, **how):
    """Train six steps with the optimizer in the hook, or after the backward with torch's clipping."""
    model, optimizer = make(rule)
    dtype = RULES[rule][2]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    kept = {key: value for key, value in options.items() if inside or key not in ("max_norm", "check_finite")}
    state = HookState(optimizer=optimizer if inside else None, **kept)
    ddp = wrap(model, "torch", state, **how)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    norms = []
    for step in range(6):
        # In step 3 one rank alone finds an infinity, and only in what it owns itself after the reduction.
        spoils = scaled and step == 3 and ctx.rank == ctx.size - 1
        handle = model[0].weight.register_hook(spoil) if spoils else None
        for part in range(parts):
            with ddp.no_sync() if part < parts - 1 else contextlib.nullcontext():
                scaler.scale(loss_of(ddp, step * parts + part, ctx.rank, dtype)).backward()
        if handle is not None:
            handle.remove()
        if inside:
            norms.append(state.grad_norm)
        elif "max_norm" in options:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"]).item())
        if not inside or scaled or calls_step:
            scaler.step(optimizer)
            scaler.update()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()  # doesn't say that the optimizer was not stepped
        optimizer.zero_grad()
        for param in model.parameters() if writes and step in (1, 2) else ():
            # By others: seen by autograd's counters, and not.
            (param.detach() if step == 1 else param.data).mul_(0.75)
        if writes and step == 2:
            optimizer.refresh_masters()
    held = sum(v.numel() for s in optimizer.state.values() for k, v in s.items() if k not in ("step", "shard"))
    full = state.optimizer_state_dict() if inside else optimizer.state_dict()
    return {"params": [p.detach().clone() for p in model.parameters()], "state": full, "scale": scaler.get_scale(),
            "norms": norms, "held": held, "sent": state.bytes_on_wire}  # fmt: skip


CASES = {
    **{rule: (rule, {}, {"writes": True}) for rule in RULES},
    "one bucket, views": ("adamw", {}, {"bucket_cap_mb": 25, "gradient_as_bucket_view": True}),
    "step() is called": ("adamw", {"streams": 2}, {"calls_step": True}),
    "accumulation": ("adamw", {}, {"parts": 3}),
    "GradScaler": ("adamw", {}, {"scaled": True, "gradient_as_bucket_view": True}),
    "GradScaler, masters": ("masters", {}, {"scaled": True}),
    "bf16": ("momentum", {"wire": "bf16", "error_feedback": True}, {}),
    "max_norm": ("adamw", {"max_norm": 0.5}, {}),
    "int8, max_norm": ("momentum", {"wire": "int8", "error_feedback": True, "max_norm": 0.5}, {}),
    "max_norm, GradScaler, accumulation": ("momentum", {"max_norm": 0.5}, {"scaled": True, "parts": 2}),
}


def check_case(ctx, case):
    rule, options, how = CASES[case]
    ours, plain = (train(ctx, rule, inside, options, **how) for inside in (True, False))
    exact = "max_norm" not in options and "wire" not in options
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-2, "atol": 2e-3} if "wire" in options else {}
    torch.testing.assert_close(ours["params"], plain["params"], **tolerance)
    assert [param.stride() for param in ours["params"]] == [param.stride() for param in plain["params"]]
    assert ours["scale"] == plain["scale"] == (128.0 if how.get("scaled") else 1.0), case
    full, theirs = ours["state"], plain["state"]
    assert full["state"].keys() == theirs["state"].keys() and full["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert full["state"][number].keys() == state.keys()
        for key, value in state.items():
            if value is not None:
                torch.testing.assert_close(full["state"][number][key], value, **tolerance)
    if "max_norm" in options:
        finite = [pair for pair in zip(ours["norms"], plain["norms"], strict=True) if math.isfinite(pair[1])]
        assert len(finite) >= 5
        if not how.get("scaled"):  # of which the norm has the factor
            assert all(a == pytest.approx(b, rel=1e-2 if "wire" in options else 1e-4) for a, b in finite)
    elif exact:  # 1/n, and less than 16 bytes a rank and bucket; at most 8 buckets, of 3 states
        assert ours["held"] <= plain["held"] / ctx.size + 16 // RULES[rule][2].itemsize * ctx.size * 8 * 3, case
        assert how.get("scaled") or ours["sent"] == pytest.approx(plain["sent"], rel=0.1), case
    return ours["params"]


@over_gloo
def all_cases(ctx, cases):
    return [param for case in cases for param in check_case(ctx, case)]


@pytest.mark.parametrize(
    "ranks, cases", [(1, ["amsgrad", "random"]), (2, list(CASES)), (3, ["momentum", "random"])], ids=["1", "2", "3"]
)
def test_training_is_that_of_the_optimizer_after_the_backward(tmp_path, ranks, cases):
    first, *others = run(all_cases, ranks, tmp_path / "store", cases)
    for other in others:
        assert all(map(torch.equal, first, other))


def branched(ctx, where, apart):
    """Parameters without a gradient in some steps: AdamW leaves them alone, decay and momentum included."""
    model = Branches()
    model.step = ctx.rank if apart else 0  # then each is used on one rank
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    state = HookState(optimizer=None if where == "outside" else optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=where == "scaled")  # which defers the updates
    ddp = wrap(model, "torch", state, find_unused_parameters=True)
    known = bucket_gradients.find_unused_parameters

    def as_on_a_gpu(comm, bucket):
        """What the ranks find, as tensors that the host doesn't look at."""
        unused, _ = known(comm, bucket)
        here = [at for at, param in enumerate(bucket.params) if param.grad is None]
        return set(), {at: torch.tensor([float(at in unused)]) for at in here}

    finds = as_on_a_gpu if where == "on a GPU" else known
    with mock.patch.object(bucket_gradients, "find_unused_parameters", finds):
        for step in range(5):
            scaler.scale(loss_of(ddp, step, ctx.rank)).backward()
            if where in ("outside", "scaled"):
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@over_gloo
def unused_parameters(ctx):
    for apart in (False, True):
        plain = branched(ctx, "outside", apart)
        for where in ("inside", "on a GPU", "scaled"):
            assert all(map(torch.equal, branched(ctx, where, apart), plain)), (where, apart)


def test_unused_parameters_are_left_alone(tmp_path):
    run(unused_parameters, 2, tmp_path / "store")


# ---- State.


def inside(rule, order=torch.preserve_format):
    """Return DDP with the optimizer in the hook, the state and the optimizer. `order`: of the parameters' elements."""
    model, optimizer = make(rule)
    model.to(memory_format=order)
    state = HookState(optimizer=optimizer)
    return wrap(model, "torch", state), state, optimizer


def steps(ddp, numbers):
    """Step on the same data on all ranks, whose average is that of any number of them, but for its rounding."""
    for number in numbers:
        ddp.zero_grad()
        loss_of(ddp, number, 0, next(ddp.parameters()).dtype).backward()


@over_gloo
def save(ctx, rule, file):
    ddp, state, optimizer = inside(rule)
    steps(ddp, range(3))
    full, own = state.optimizer_state_dict(), state.optimizer_state_dict(full=False)
    if ctx.rank == 0:
        torch.save((full, ddp.module.state_dict()), file)
    # Loaded by another one of the same rank, whose first buckets are others: its state moves.
    buffer = io.BytesIO()
    torch.save(own, buffer)
    again, other, _ = inside(rule)
    again.module.load_state_dict(ddp.module.state_dict())
    other.load_optimizer_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    for number in (3, 4):
        steps(ddp, [number])
        steps(again, [number])
        assert all(map(torch.equal, ddp.parameters(), again.parameters()))
    # Full states that are loaded unsharded, by ours and, where it knows what's in there, by torch's.
    alone, theirs = make(rule)
    theirs.load_state_dict(full)
    if rule == "adamw":
        torch.optim.AdamW(theirs.param_groups, lr=0.1).load_state_dict(full)
    with pytest.raises(errors.InvalidArgument, match="one rank's shard"):
        alone, theirs = make(rule)
        theirs.load_state_dict(own)
        loss_of(alone, 0, 0, RULES[rule][2]).backward()
        theirs.step()
    shard = copy.deepcopy(own)
    next(iter(shard["state"].values()))["shard"][4] += 1
    with pytest.raises(errors.InvalidArgument, match=r"rank \d of 2, and this is rank \d of 2: save and load the full"):
        state.load_optimizer_state_dict(shard)
    # A state that one rank alone has loaded.
    third, _, optimizer = inside(rule)
    if ctx.rank == 0:
        optimizer.load_state_dict(full)
    text = "of group 0: .* on rank 0; .* on rank 1.*: load the same full state on all"
    with pytest.raises(errors.Mismatch, match=text):
        steps(third, [0])
    return [p.detach().clone() for p in ddp.parameters()]


@over_gloo
def resume(ctx, rule, file, through):
    """Go on with the elements of model and state in another order, where they were in channels_last."""
    full, parameters = torch.load(file)
    ddp, state, optimizer = inside(rule, torch.contiguous_format)
    ddp.module.load_state_dict(parameters)
    (state.load_optimizer_state_dict if through else optimizer.load_state_dict)(full)
    steps(ddp, (3, 4))
    assert all(param.is_contiguous() for param in ddp.parameters())
    own = state.optimizer_state_dict(full=False)
    assert all(each["exp_avg"].dim() == 1 for each in own["state"].values())
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("rule", ["adamw", "masters", "channels_last"])
def test_saved_on_two_ranks_and_resumed_on_three(tmp_path, rule):
    file = tmp_path / "full.pt"
    after = run(save, 2, tmp_path / "two", rule, file)[0]
    for found in run(resume, 3, tmp_path / "three", rule, file, rule == "adamw"):
        torch.testing.assert_close(found, after, rtol=1e-5, atol=1e-6, check_stride=False)
    if rule == "adamw":  # the average of two alike is the gradient itself
        assert all(map(torch.equal, run(resume, 1, tmp_path / "one", rule, file, False)[0], after))


# ---- What is refused.


def refused(error, text):
    return pytest.raises(error, match=text)


def wrong_uses(ctx):
    ddp, state, optimizer = inside("adamw")
    with refused(errors.InvalidUsage, "no synchronised backward since the last step"):
        optimizer.step()
    loss_of(ddp, 0, ctx.rank).backward()
    optimizer.step()
    with refused(errors.InvalidUsage, "no synchronised backward"):
        optimizer.step()
    with refused(errors.InvalidArgument, "no closure"):
        optimizer.step(lambda: 0.0)
    with refused(errors.InvalidArgument, "takes no clip"):
        optimizer.step(clip=0.5)
    loss_of(ddp, 1, ctx.rank).backward()
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.ones(1)
    with refused(errors.InvalidUsage, "still scaled"):
        optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    optimizer.step()
    stray = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [stray]})
    stray.grad = torch.ones(3)
    loss_of(ddp, 2, ctx.rank).backward()
    with refused(errors.InvalidUsage, r"parameter 0 of group 2 \(shape \(3,\)\).*in no bucket"):
        optimizer.step()
    with refused(errors.InvalidUsage, "steps no optimizer"):
        HookState().optimizer_state_dict()
    model = make_model()
    part = wrap(model, "torch", HookState(optimizer=optim.SGD(list(model.parameters())[1:])))
    with refused(errors.InvalidArgument, "doesn't have 0.weight: give it all"):
        loss_of(part, 0, ctx.rank).backward()


def wrong_uses_with_a_scaler(ctx):
    scaler = torch.amp.GradScaler("cpu")
    ddp, state, optimizer = inside("adamw")
    state.grad_scaler = scaler
    scaler.scale(loss_of(ddp, 0, ctx.rank)).backward()
    with refused(errors.InvalidUsage, r"buckets still wait for optimizer.step\(\)"):
        scaler.scale(loss_of(ddp, 0, ctx.rank)).backward()
    ddp, state, optimizer = inside("adamw")
    state.grad_scaler = scaler
    scaler.scale(loss_of(ddp, 0, ctx.rank)).backward()
    scaler.unscale_(optimizer)
    with refused(errors.InvalidUsage, "leave unscale_ out"):
        scaler.step(optimizer)


def different_steps(ctx, rule, key, value, when):
    """From a step on rank 1 has another value in its second group."""
    ddp, _, optimizer = inside(rule)
    params = list(ddp.parameters())
    for step in range(when):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9  # as a scheduler does on all ranks
        loss_of(ddp, step, ctx.rank).backward()
        optimizer.zero_grad()
    before = [p.detach().clone() for p in params]
    if ctx.rank == 1:
        optimizer.param_groups[1][key] = value
    named = rf"\({key} of group 1: .* on rank 0; {re.escape(str(value))} on rank 1\)"
    with pytest.raises(errors.Mismatch, match=rf"different hyperparameters {named}") as caught:
        loss_of(ddp, when, ctx.rank).backward()
    assert all(map(torch.equal, before, params)) and caught.value.peers == (1 - ctx.rank,)


@over_gloo
def all_refused(ctx):
    wrong_uses(ctx)
    wrong_uses_with_a_scaler(ctx)
    different_steps(ctx, "adamw", "lr", 0.5, 0)
    different_steps(ctx, "momentum", "lr", 0.5, 3)
    different_steps(ctx, "adamw", "betas", (0.5, 0.9), 1)
    different_steps(ctx, "momentum", "weight_decay", 1.0, 2)


def test_wrong_uses_and_ranks_that_would_step_differently(tmp_path):
    run(all_refused, 2, tmp_path / "store")
