"""What collectives.optim has beside torch.optim's options: master weights, stochastic rounding, factors of the
gradient and steps that are left out.
"""

from __future__ import annotations

import io

import pytest
import torch

from collectives import kernels, optim
from tests.optim.stepping import BF16, F16, F32, RULES, assert_same, cls, make, set_grads


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_master_weights_step_as_fp32_parameters_do(rule, dtype):
    halves = make(dtype=dtype)
    masters = [torch.nn.Parameter(param.detach().float()) for param in halves]
    mine = cls(optim, rule)(halves, master_weights=True, **RULES[rule])
    other = cls(torch.optim, rule)(masters, foreach=True, **RULES[rule])
    for step in range(4):
        set_grads(halves, step)
        for master, param in zip(masters, halves, strict=True):
            master.grad = param.grad.float()
        mine.step()
        other.step()
        assert_same([mine.state[param]["master_param"] for param in halves], masters)
        assert_same(halves, [master.to(dtype) for master in masters])
        if step == 1:  # by way of a file: torch casts state to the parameter's dtype, which would spoil the masters
            buffer = io.BytesIO()
            torch.save(mine.state_dict(), buffer)
            buffer.seek(0)
            mine = cls(optim, rule)(halves)
            mine.load_state_dict(torch.load(buffer))
            assert mine.param_groups[0]["master_weights"]
    for state in mine.state.values():
        assert all(value.dtype == F32 for value in state.values())


def test_masters_follow_what_others_write_to_the_parameters():
    (param,) = params = make([(1000,)], BF16)
    optimizer = optim.SGD(params, lr=0.001, master_weights=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    master = optimizer.state[param]["master_param"].clone()
    with torch.no_grad():
        param[:500] = 3.0  # an averaged model, a constraint, a loaded checkpoint
        param[500:].mul_(1.0)  # written, but the same
    optimizer.step()
    expected = torch.cat([torch.full((500,), 3.0), master[500:]]) - 0.001
    torch.testing.assert_close(optimizer.state[param]["master_param"], expected, rtol=0, atol=1e-6)
    assert torch.equal(param, optimizer.state[param]["master_param"].bfloat16())


def test_writes_that_no_counter_sees_are_taken_over_on_demand():
    (param,) = params = make([(1000,)], BF16)
    optimizer = optim.SGD(params, lr=0.01, master_weights=True)
    set_grads(params, 0)
    optimizer.step()
    master = optimizer.state[param]["master_param"].clone()
    param.data[:500] = 5.0
    optimizer.refresh_masters()
    param.grad.zero_()
    optimizer.step()
    assert bool((param[:500] == 5).all())
    assert torch.equal(optimizer.state[param]["master_param"][500:], master[500:])


def test_a_wider_model_needs_no_masters():
    model = torch.nn.Linear(3, 2).bfloat16()
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, master_weights=True)
    for wide in (False, True):
        model = model.float() if wide else model
        before = model.weight.detach().float().clone()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert ("master_param" in optimizer.state[model.weight]) is not wide
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_inference_parameters_step_in_their_mode_and_after_it():
    with torch.inference_mode():
        params = [torch.ones(4), torch.ones(3, dtype=BF16)]
        optimizer = optim.AdamW(params, lr=0.1, weight_decay=0.0, master_weights=True)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.step()
    for param in params:
        assert optimizer.state[param]["step"] == 2
        torch.testing.assert_close(param.float(), torch.full(param.shape, 0.8), rtol=0, atol=4e-3)


def test_low_precision_state_of_torch_becomes_fp32():
    params, twins = make(dtype=BF16), make(dtype=BF16)
    theirs = torch.optim.AdamW(params)
    set_grads(params, 0)
    theirs.step()
    ours = optim.AdamW(twins)
    ours.load_state_dict(theirs.state_dict())
    for param, twin in zip(params, twins, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            value = ours.state[twin][key]
            assert value.dtype == F32 and torch.equal(value, theirs.state[param][key].float())
    set_grads(twins, 1)
    ours.step()
    seen = []
    ours.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.state[twins[0]]["exp_avg"].dtype))
    ours.load_state_dict(ours.state_dict())
    assert seen == [F32]


@pytest.mark.parametrize("masters", [False, True])
def test_stochastic_rounding(masters):
    """Steps of a tenth of the distance between neighbours are lost by rounding to nearest, and kept on average here."""
    count, steps = 20000, 20

    def train(**how):
        param = torch.nn.Parameter(torch.ones(count, dtype=BF16))
        optimizer = optim.SGD([param], lr=1.0, master_weights=masters, **how)
        for _ in range(steps):
            param.grad = torch.full((count,), -0.1 / 128, dtype=F32).to(BF16)
            optimizer.step()
        return param.detach()

    exact = 1 + steps * torch.tensor(0.1 / 128).to(BF16).item()
    one = train(stochastic_rounding=True, seed=3)
    assert abs(one.float().mean().item() - exact) < 0.05 * (exact - 1)
    assert torch.equal(one, train(stochastic_rounding=True, seed=3))
    assert not torch.equal(one, train(stochastic_rounding=True, seed=4))
    assert not torch.equal(one, train(stochastic_rounding=True))
    if not masters:
        assert (train() == 1).all()
    torch.manual_seed(5)
    drawn = optim.SGD(make(), stochastic_rounding=True).param_groups[0]["seed"]
    torch.manual_seed(5)
    assert optim.SGD(make(), stochastic_rounding=True).param_groups[0]["seed"] == drawn


def test_parameters_round_by_bits_of_their_own():
    params = [torch.nn.Parameter(torch.full((2000,), 1.0, dtype=BF16)) for _ in range(2)]
    optimizer = optim.SGD(params, lr=1.0, stochastic_rounding=True, seed=1)
    for param in params:
        param.grad = torch.full_like(param, -0.5 / 128)
    optimizer.step()
    assert 0.4 < (params[0] != params[1]).float().mean() < 0.6


def test_factors_of_the_gradient():
    ours, theirs = make(), make()
    mine, other = optim.AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01, foreach=True)
    for step in range(3):
        set_grads(ours, step)
        set_grads(theirs, step)
        statistics = kernels.Statistics()
        flat = torch.empty(8192)
        kernels.pack([param.grad for param in ours], flat, statistics=statistics)
        factor = optim.clip_factor(statistics, 2.0)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
        torch.testing.assert_close(statistics.norm.float(), norm.reshape(1))
        torch.testing.assert_close(factor.item(), min(1.0, 2.0 / (norm.item() + 1e-6)))
        for param in ours:
            param.grad.mul_(4)
        mine.step(grad_scale=0.25, clip=factor, found_nonfinite=statistics)
        other.step()
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    statistics.sum_of_squares.fill_(1e-4)
    assert optim.clip_factor(statistics, 2.0).item() == 1.0


@pytest.mark.parametrize("found", [1, True, float("nan"), torch.tensor(1.0), torch.tensor([3])])
@pytest.mark.parametrize("rule", ["SGD momentum", "AdamW"])
def test_a_step_that_is_left_out_counts_nowhere(rule, found):
    params, twins = make(), make()
    optimizer, other = (cls(optim, rule)(each, **RULES[rule]) for each in (params, twins))
    for step in range(4):
        set_grads(params, step)
        if step in (0, 2):
            params[0].grad.fill_(float("inf"))
            before = [param.detach().clone() for param in params]
            optimizer.step(found_nonfinite=found)
            assert_same(params, before)
        else:
            set_grads(twins, step)
            optimizer.step(found_nonfinite=0)
            other.step()
            assert_same(params, twins)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("rule", ["SGD momentum", "Adam", "AdamW amsgrad"])
def test_grad_scaler(rule, unscale):
    ours, theirs = make([(50, 3), (7,)]), make([(50, 3), (7,)])
    results = []
    for library, params in ((optim, ours), (torch.optim, theirs)):
        optimizer = cls(library, rule)(params, foreach=True, **RULES[rule])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            loss = sum((param * (step + 1)).square().sum() for param in params)
            scaler.scale(loss).backward()
            if step == 3:
                params[0].grad[1, 1] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append(scales)
        assert not hasattr(optimizer, "found_inf")
    assert results[0] == results[1] and results[0][3] < results[0][2]
    assert_same(ours, theirs)
