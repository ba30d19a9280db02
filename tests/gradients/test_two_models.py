"""Several modules in one process: the names of their parameters, and what a state saves of each and goes on with.

Equal names of parameters, garbage that Python has collected on one rank only, and models that still live beside their
successors: none of it may change a gradient.
"""

import gc
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives import HookState, errors, torch_patches
from collectives import parameter_names as names
from tests.ddp.training import gradients, loss_of, make_model, over_gloo, run, wrap


def generator_and_critic():
    """Two models whose parameters have the same names, and which have other buckets."""
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5)),
        nn.Sequential(nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 10), nn.Tanh(), nn.Linear(10, 5)),
    ]


def wrapped(models, states, ctx, collects):
    found = []
    for model, state in zip(models, states, strict=True):
        found.append(wrap(model, "torch", state))
        if collects and ctx.rank == 1:
            gc.collect()
    return found


def steps(ddps, numbers, rank):
    seen = []
    for number in numbers:
        for which, ddp in enumerate(ddps):
            ddp.zero_grad()
            loss_of(ddp, 10 * number + which, rank).backward()
            seen += gradients(ddp)
            with torch.no_grad():
                for param in ddp.parameters():
                    param.sub_(param.grad, alpha=0.1)
    return seen


def resumed(ctx, stops, collects=False, keeps=False, shared=False):
    """Six steps of both; with `stops`, the last three in new objects, made while those before live (`keeps`) or not."""
    options = {"wire": "int8", "error_feedback": True}
    states = [HookState(**options)] * 2 if shared else [HookState(**options) for _ in range(2)]
    models = generator_and_critic()
    ddps = wrapped(models, states, ctx, collects)
    seen = steps(ddps, range(3), ctx.rank)
    old = None
    if stops:
        file = io.BytesIO()
        torch.save({"states": states, "models": [model.state_dict() for model in models]}, file)
        old = (states, models, ddps)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        if not keeps:
            del old, states, ddps
        states, models = saved["states"], generator_and_critic()
        for model, values in zip(models, saved["models"], strict=True):
            model.load_state_dict(values)
        ddps = wrapped(models, states, ctx, collects)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen += steps(ddps, range(3, 6), ctx.rank)
    kept = [state.compressor.state_dict()["residuals"] for state in states[: 1 if shared else 2]]
    return seen, kept


@over_gloo
def equal_names(ctx):
    found = []
    for shared in (False, True):
        whole, residuals = resumed(ctx, False, shared=shared)
        assert all(each.abs().max() > 0 for kept in residuals for each in kept.values())
        for keeps in (True, False):
            halves, again = resumed(ctx, True, True, keeps, shared)
            for one, expected in zip(halves, whole, strict=True):
                # The first step has other buckets, in which the wire rounds in other places.
                assert (one - expected).norm() <= 0.1 * expected.norm()
            assert [kept.keys() for kept in again] == [kept.keys() for kept in residuals]
            found += halves
        found += whole
    return found


def test_two_models_with_equal_names_go_on(tmp_path):
    one, other = run(equal_names, 2, tmp_path / "store")
    assert all(map(torch.equal, one, other))


@over_gloo
def loaded_in_place(ctx):
    """A state dict in a new state and a new model, as in a notebook, while the old ones live."""
    state, model = HookState(wire="int8", error_feedback=True), make_model()
    ddp = wrap(model, "torch", state)
    steps([ddp], range(3), ctx.rank)
    saved = state.state_dict()
    other, again = HookState(wire="int8", error_feedback=True), make_model()
    other.load_state_dict(saved)
    again.load_state_dict(model.state_dict())
    ddp_again = wrap(again, "torch", other)
    alone = make_model()
    alone.load_state_dict(model.state_dict())
    loss_of(alone, 7, ctx.rank).backward()
    owed = [p.grad + saved["wire"]["residuals"][name].view_as(p) for name, p in alone.named_parameters()]
    loss_of(ddp_again, 7, ctx.rank).backward()
    assert other.compressor.residuals.unclaimed_names() == [] and len(saved["wire"]["residuals"]) == len(owed)
    for total in owed:
        dist.all_reduce(total)
    lost = [2 * p.grad + _all(residual) for p, residual in zip(again.parameters(), _kept(other, again), strict=True)]
    for a, b in zip(owed, lost, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return len(state.compressor.residuals._views)


def _kept(state, model):
    found = state.compressor.state_dict()["residuals"]
    return [found[name].view_as(param) for name, param in model.named_parameters()]


def _all(tensor):
    dist.all_reduce(tensor)
    return tensor


def test_residuals_go_to_the_new_model_while_the_old_one_lives(tmp_path):
    run(loaded_in_place, 2, tmp_path / "store")


# ---- What doesn't fit.


@over_gloo
def renamed(ctx, wire):
    state = HookState(wire=wire, error_feedback=True)
    before = wrap(make_model(), "torch", state)
    steps([before], range(2), ctx.rank)
    file = io.BytesIO()
    torch.save(state, file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    ddp = wrap(nn.Sequential(make_model()), "torch", state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps([ddp], range(4), ctx.rank)
    assert set(state.compressor.state_dict()["residuals"]) > {"0.weight", "0.0.weight"}  # not lost in the next state
    return sorted(str(each.message) for each in caught if "HookState" in str(each.message))


def test_what_was_loaded_for_no_parameter_is_named(tmp_path):
    for texts in run(renamed, 2, tmp_path / "store", "int8"):
        (text,) = texts
        assert "residuals of 0." in text and "no module that is registered" in text


# ---- The names.


def own_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return collectives.fused_allreduce(state[0], bucket)


@over_gloo
def by_own_hooks(ctx):
    state = HookState(wire="int8", error_feedback=True)
    models = generator_and_critic()
    ddps = [wrap(model, "plain") for model in models]
    for ddp in ddps:
        ddp.register_comm_hook([state], own_hook)
    state.register(models[1])
    steps(ddps, range(1), ctx.rank)
    found = state.compressor.state_dict()["residuals"]
    assert found["0.weight"].numel() == models[1][0].weight.numel()
    assert found["2:0.weight"].numel() == models[0][0].weight.numel()
    assert torch_patches.find_hooked_ddps(models[0][0].weight) == [ddps[0]]
    # The same parameters in another DDP object keep their names.
    again = wrap(models[0], "torch", state, find_unused_parameters=True)
    assert names.find_ddp(list(models[0].parameters())) is again
    steps([again], range(1), ctx.rank)
    assert state.compressor.state_dict()["residuals"].keys() == found.keys()


def test_hooks_of_the_users_own(tmp_path):
    run(by_own_hooks, 2, tmp_path / "store")


def test_nothing_is_found_by_a_walk_over_objects():
    for path in Path(collectives.__file__).parent.rglob("*.py"):
        assert not re.search(r"get_objects|get_referrers", path.read_text()), path


# ---- GradScalers.


class OwnScale(torch.amp.GradScaler):
    def scale(self, outputs):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, OwnScale])
def test_scalers_are_found_once_they_scale(kind):
    gc.collect()
    assert torch_patches.find_active_scalers() == []
    scaler, off = kind("cpu"), kind("cpu", enabled=False)
    assert HookState().find_scaler() is None
    scaler.scale(torch.ones(1))
    state = HookState()
    assert torch_patches.find_active_scalers() == [scaler] and state.find_scaler() is scaler
    second = kind("cpu")
    second.scale(torch.ones(1))
    assert state.find_scaler() is scaler
    with pytest.raises(errors.InvalidUsage, match=r"2 GradScalers in use.*HookState\(grad_scaler=scaler\)"):
        HookState().find_scaler()
    assert HookState(grad_scaler=second).find_scaler() is second and HookState(grad_scaler=False).find_scaler() is None
    second.cycle = second
    del second
    assert HookState().find_scaler() is scaler  # the other one is garbage, collected or not
    del scaler, off


def test_a_scaler_that_began_before_the_import_is_found():
    scaler = torch.amp.GradScaler("cpu")
    torch.amp.GradScaler._lazy_init_scale_growth_tracker.__wrapped__(scaler, torch.device("cpu"))
    assert torch_patches.find_active_scalers() == []
    scaler.scale(torch.ones(1))
    assert torch_patches.find_active_scalers() == [scaler]
