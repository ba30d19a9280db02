"""collectives.optim: that it reads, saves, loads and steps as torch.optim does; what is new beside it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch

from collectives import errors, kernels, optim

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
RULES = {
    "SGD": dict(lr=0.1),
    "SGD momentum": dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "SGD nesterov": dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adam": dict(lr=0.01, weight_decay=0.1),
    "Adam amsgrad": dict(lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "AdamW": dict(lr=0.01),
    "AdamW amsgrad": dict(lr=0.01, amsgrad=True, weight_decay=0.2, maximize=True),
}
SHAPES = [(7, 5), (4099,), (), (0, 3), (3, 2, 4, 4)]


@pytest.fixture(autouse=True)
def nearest_square_root(monkeypatch):
    """Torch's on CPUs (MKL's) is off by one unit here and there; with this one all bits should be the same."""
    monkeypatch.setattr(torch, "_foreach_sqrt", lambda some: [torch.tensor(np.sqrt(each.numpy())) for each in some])


def cls(library, rule):
    return getattr(library, rule.partition(" ")[0])


def make(shapes=SHAPES, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params, seed, dtype=None):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype or param.dtype)


def exact():
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        if exact():
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def flat_state(optimizer):
    state = optimizer.state_dict()["state"]
    return {(number, key): value for number, each in state.items() for key, value in each.items() if value is not None}


# ---- As torch.optim.
@pytest.mark.parametrize("rule", RULES)
def test_steps_as_torch_with_groups_schedulers_and_missing_gradients(rule):
    ours, theirs = make(), make()
    optimizers = []
    for library, params in ((optim, ours), (torch.optim, theirs)):
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.003, "weight_decay": 0.3}]
        optimizers.append(cls(library, rule)(groups, foreach=True, **RULES[rule]))
    mine, torchs = optimizers
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    for step in range(6):
        for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
            set_grads(params, step)
            if step in (0, 3):
                params[1].grad = None
            optimizer.step()
        for each in schedulers:
            each.step()
        assert_same(ours, theirs)
    assert [group["lr"] for group in mine.param_groups] == [group["lr"] for group in torchs.param_groups]
    saved, wanted = flat_state(mine), flat_state(torchs)
    for key, value in wanted.items():
        assert_same([saved[key]], [value])
    mine.zero_grad()
    assert all(param.grad is None for param in ours)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("direction", ["ours to torch", "torch to ours", "ours to ours"])
def test_state_dicts_travel_both_ways(rule, direction):
    source, target = direction.split(" to ")
    libraries = {"ours": optim, "torch": torch.optim}
    params, twins = make(), make()
    first = cls(libraries[source], rule)(params, **RULES[rule])
    for step in range(3):
        set_grads(params, step)
        first.step()
    with torch.no_grad():
        for twin, param in zip(twins, params, strict=True):
            twin.copy_(param)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = cls(libraries[target], rule)(twins, lr=7.0)
    second.load_state_dict(torch.load(buffer))
    for group in second.param_groups:
        assert group["lr"] == RULES[rule]["lr"]
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["foreach"] = True
    for step in range(3, 6):
        for optimizer, some in ((first, params), (second, twins)):
            set_grads(some, step)
            optimizer.step()
        assert_same(params, twins)
    if "Adam" in rule:
        assert [s["step"].item() for s in second.state.values()] == [6.0] * len(SHAPES)


def test_group_options_are_those_of_torch():
    for name in ("SGD", "Adam", "AdamW"):
        ours = set(getattr(optim, name)(make()).state_dict()["param_groups"][0])
        theirs = set(getattr(torch.optim, name)(make()).state_dict()["param_groups"][0])
        assert theirs <= ours | {"capturable"}
        new = {"master_weights", "stochastic_rounding", "seed", "capturable", "decoupled_weight_decay"}
        assert ours - theirs <= new


@pytest.mark.parametrize("rule", ["SGD momentum", "AdamW"])
def test_a_closure_runs_with_gradients_and_its_loss_comes_back(rule):
    params = make([(5,)])
    optimizer = cls(optim, rule)(params, **RULES[rule])
    before = params[0].detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert torch.equal(loss, (before**2).sum()) and not torch.equal(params[0], before)


def test_the_learning_rate_may_be_a_tensor():
    ours, theirs = make(), make()
    lr = torch.tensor(0.01)
    mine = optim.AdamW(ours, lr=lr)
    other = torch.optim.AdamW(theirs, lr=float(lr), foreach=True)
    for step in range(4):
        set_grads(ours, step)
        set_grads(theirs, step)
        lr.fill_(0.01 / (step + 1))  # in place: no new table, no new launch arguments
        other.param_groups[0]["lr"] = lr.item()
        mine.step()
        other.step()
        assert_same(ours, theirs)


def test_a_group_that_is_added_later():
    params = make([(9,), (8,)])
    optimizer = optim.SGD(params[:1], lr=1.0)
    set_grads(params, 0)
    optimizer.step()
    optimizer.add_param_group({"params": params[1], "lr": 0.5})
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1].detach(), before - 0.5 * params[1].grad)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_go_on_by_themselves(how):
    params = make()
    optimizer = optim.AdamW(params, lr=0.01, stochastic_rounding=True)
    set_grads(params, 0)
    optimizer.step()
    other = pickle.loads(pickle.dumps(optimizer)) if how == "pickle" else copy.deepcopy(optimizer)
    twins = other.param_groups[0]["params"]
    for each in (params, twins):
        set_grads(each, 1)
    optimizer.step()
    kept = [param.detach().clone() for param in params]
    assert not any(torch.equal(twin, param) for twin, param in zip(twins, params, strict=True) if param.numel())
    other.step()
    assert_same(twins, kept)
    assert_same(params, kept)


def test_hooks_and_profiler():
    params = make([(3,)])
    optimizer = optim.Adam(params)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    set_grads(params, 0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert seen == ["before", "after"]
    assert "Optimizer.step#Adam.step" in {event.key for event in profile.key_averages()}


def test_autograd_notices_that_parameters_have_changed():
    params = make([(3,)])
    optimizer = optim.SGD(params, lr=0.1)
    loss = (params[0] ** 2).sum()
    set_grads(params, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_named_parameters():
    model = torch.nn.Linear(3, 2)
    optimizer = optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_torch_compile_goes_on_around_a_step():
    params = make([(5,)])
    optimizer = optim.SGD(params, lr=0.5)

    @torch.compile(backend="eager")
    def step(x):
        loss = (params[0] * x).sum()
        loss.backward()
        optimizer.step()
        return loss * 2

    before = params[0].detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(torch.full((5,), 2.0))
    assert torch.equal(params[0].detach(), before - 1.0)


# ---- Memory that moves.
def test_other_memory_of_gradients_parameters_and_state_is_seen():
    ours, theirs = make(), make()
    mine = optim.AdamW(ours, lr=0.01)
    other = torch.optim.AdamW(theirs, lr=0.01, foreach=True)
    for step in range(8):
        for optimizer, params in ((mine, ours), (other, theirs)):
            if step % 2:
                set_grads(params, step)
            elif step:
                with torch.no_grad():
                    for param in params:
                        param.grad.mul_(0.5)  # the same memory
            else:
                set_grads(params, step)
            if step == 3:
                params[0].data = params[0].data.clone()
            if step == 4:
                optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"] * 2
            if step == 5:
                state = optimizer.state[params[0]]["exp_avg_sq"]
                state.data = state.data.clone() * 3
            if step == 6:
                del optimizer.state[params[3]]
                optimizer.state.pop(params[4])
            if step == 7:
                optimizer.param_groups[0]["amsgrad"] = True
                for param in params:
                    optimizer.state[param]["max_exp_avg_sq"] = torch.ones_like(param)
            optimizer.step()
        assert_same(ours, theirs)


def test_channels_last():
    ours = [torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))]
    theirs = [torch.nn.Parameter(ours[0].detach().clone())]
    mine, other = optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=True)
    for step in range(3):
        grad = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(step))
        ours[0].grad = theirs[0].grad = grad.to(memory_format=torch.channels_last)
        mine.step()
        other.step()
        assert_same(ours, theirs)
        # A state dict that has been saved from contiguous parameters.
        state = mine.state_dict()
        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].contiguous()
        mine.load_state_dict(state)
    ours[0].grad = grad.contiguous()
    with pytest.raises(errors.InvalidArgument, match="grad of parameter 0 of group 0 has strides"):
        mine.step()


def test_dtensors_step_by_their_local_parts():
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        (plain,) = make([(8, 3)])
        whole = torch.nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
        mine, other = optim.AdamW([whole], lr=0.1), optim.AdamW([plain], lr=0.1)
        for step in range(3):
            set_grads([plain], step)
            whole.grad = distribute_tensor(plain.grad, mesh, [Shard(0)])
            mine.step()
            other.step()
            assert_same([whole.full_tensor()], [plain])
        assert type(mine.state[whole]["exp_avg"]) is type(whole.data)
    finally:
        dist.destroy_process_group()


# ---- What is new.
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


def test_state_is_of_the_width_that_the_kernels_need():
    for dtype, wanted in ((F64, F64), (F32, F32), (BF16, F32), (F16, F32)):
        params = make([(5,)], dtype)
        optimizer = optim.Adam(params)
        set_grads(params, 0)
        optimizer.step()
        assert optimizer.state[params[0]]["exp_avg"].dtype == wanted


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


# ---- Bad input.
def test_bad_options():
    for build, message in [
        (lambda: optim.SGD(make(), lr=-1), "Invalid learning rate: -1"),
        (lambda: optim.AdamW(make(), lr=torch.ones(2)), "Tensor lr must be 1-element"),
        (lambda: optim.SGD(make(), momentum=-0.1), "Invalid momentum value: -0.1"),
        (lambda: optim.SGD(make(), weight_decay=-1), "Invalid weight_decay value: -1"),
        (lambda: optim.SGD(make(), nesterov=True), "Nesterov momentum requires a momentum"),
        (lambda: optim.Adam(make(), eps=-1), "Invalid epsilon value: -1"),
        (lambda: optim.Adam(make(), betas=(1.0, 0.9)), "Invalid beta parameter at index 0: 1.0"),
        (lambda: optim.Adam(make(), betas=(0.9, torch.tensor(0.9))), "Invalid beta parameter at index 1"),
        (lambda: optim.Adam(make(), differentiable=True), "differentiable steps aren't offered"),
        (
            lambda: optim.Adam([{"params": make()}, {"params": [torch.zeros(3, dtype=torch.complex64)]}]),
            "parameter 0 of group 1 is complex64: it must be fp32",
        ),
    ]:
        with pytest.raises(errors.InvalidArgument, match=message) as raised:
            build()
        assert isinstance(raised.value, ValueError)
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.SGD([])


def test_bad_gradients_are_named_by_parameter_and_group_and_nothing_is_stepped():
    params = make([(4,), (6,), (5, 3)])
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    params[0].grad = torch.ones(4)
    first = params[0].detach().clone()
    for wrong, message in [
        (torch.zeros(5, 3).to_sparse(), "grad of parameter 1 of group 1 is a sparse_coo tensor"),
        (torch.zeros(3, 5).t(), r"grad of parameter 1 of group 1 of shape \(5, 3\) .*isn't contiguous"),
    ]:
        params[2].grad = wrong
        params[1].grad = None
        before = params[2].detach().clone()
        for _ in range(2):
            with pytest.raises(errors.InvalidArgument, match=message):
                optimizer.step()
        assert torch.equal(params[2], before) and torch.equal(params[0], first)
    params[2].grad = torch.ones(5, 3)
    optimizer.step()
    assert optimizer.state[params[2]]["step"] == 1
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(errors.InvalidArgument, match="lr must be a finite number from 0"):
        optimizer.step()
    assert optimizer.state[params[2]]["step"] == optimizer.state[params[0]]["step"] == 1
    optimizer.param_groups[1]["lr"] = 0.1
    with pytest.raises(errors.InvalidArgument, match="clip must be a number"):
        optimizer.step(clip="1")


def test_parameters_of_another_order_than_dense():
    params = [torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])]
    params[0].grad = torch.ones(4, 3)
    with pytest.raises(errors.InvalidArgument, match="param of parameter 0 of group 0 of shape .*isn't contiguous"):
        optim.SGD(params).step()


def test_the_default_device_changes_nothing():
    for rule in ("SGD momentum", "AdamW"):
        params, twins = make(), make()
        optimizers = [cls(optim, rule)(each, **RULES[rule]) for each in (params, twins)]
        for step in range(3):
            set_grads(params, step)
            set_grads(twins, step)
            optimizers[1].step()
            torch.set_default_device("meta")
            try:
                optimizers[0].step()
                assert optim.SGD(params, stochastic_rounding=True).defaults["seed"] >= 0
            finally:
                torch.set_default_device(None)
        assert_same(params, twins)


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


def test_state_follows_a_model_to_another_memory_format():
    models = [torch.nn.Conv2d(3, 4, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optim.AdamW(models[0].parameters()), torch.optim.AdamW(models[1].parameters())]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 1:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            model(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))).sum().backward()
            optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


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


def test_gradients_are_not_copied_but_the_cure_is_told():
    (param,) = params = make([(5,)])
    param.grad = torch.ones(1).expand(5)
    optimizer = optim.SGD(params, lr=1.0)
    before = param.detach().clone()
    with pytest.raises(errors.InvalidArgument, match=r"isn't contiguous: copy it by it.contiguous\(\) and"):
        optimizer.step()
    param.grad = param.grad.contiguous()
    optimizer.step()
    assert torch.equal(param.detach(), before - 1)


def test_bad_arguments_of_functions_and_steps():
    params = make([(5,)])
    set_grads(params, 0)
    statistics = kernels.Statistics()
    for call, message in [
        (lambda: optim.SGD(params).step(found_nonfinite="no"), "found_nonfinite must be a number"),
        (lambda: optim.SGD(params).step(found_nonfinite=torch.ones(2)), "found_nonfinite must be a number"),
        (lambda: optim.Adam(params, betas=None), "betas must be two numbers"),
        (lambda: optim.Adam(params, betas=(0.9, torch.tensor(0.9))), "it must be a number, not Tensor"),
        (lambda: optim.SGD(params, seed=-1), "seed must be a whole number from 0"),
        (lambda: optim.clip_factor(statistics, None), "max_norm must be a number"),
        (lambda: optim.clip_factor(torch.ones(1), 1.0), "statistics must be a Statistics"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=message):
            call()


# ---- GPUs.
@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_gpu_steps_as_the_host_and_waits_for_nothing(rule):
    host, gpu = make(dtype=BF16), [torch.nn.Parameter(param.detach().cuda()) for param in make(dtype=BF16)]
    optimizers = [cls(optim, rule)(each, master_weights=True, **RULES[rule]) for each in (host, gpu)]
    for step in range(5):
        set_grads(host, step)
        for one, other in zip(host, gpu, strict=True):
            other.grad = one.grad.cuda()
        found = torch.tensor(float(step == 2))
        optimizers[0].step(found_nonfinite=found)
        found = found.cuda()
        if step:  # the first one compiles and makes the state
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizers[1].step(found_nonfinite=found)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(one, other.cpu()) for one, other in zip(host, gpu, strict=True))


@pytest.mark.gpu
def test_gpu_with_grad_scaler_and_host_parameters_beside():
    params = [torch.nn.Parameter(torch.ones(1000, device="cuda")), torch.nn.Parameter(torch.ones(10))]
    optimizer = optim.AdamW(params, lr=0.1, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    for bad in (True, False):
        params[0].grad, params[1].grad = torch.full((1000,), 8.0, device="cuda"), torch.full((10,), 8.0)
        if bad:
            params[0].grad[3] = float("inf")
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(optimizer)
        scaler.update()
        for param in params:
            torch.testing.assert_close(param.detach().cpu(), torch.full((len(param),), 1.0 if bad else 0.9))
