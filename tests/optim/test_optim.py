"""collectives.optim reads, saves, loads and steps as torch.optim does."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch

from collectives import errors, optim
from tests.optim.stepping import BF16, F32, F64, RULES, SHAPES, assert_same, cls, make, set_grads


def flat_state(optimizer):
    state = optimizer.state_dict()["state"]
    return {(number, key): value for number, each in state.items() for key, value in each.items() if value is not None}


# ---- As torch.optim.
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_steps_as_torch_with_groups_schedulers_and_missing_gradients(rule, dtype):
    ours, theirs = make(dtype=dtype), make(dtype=dtype)
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
def test_within_two_ulps_of_torch_with_its_own_square_root(rule, monkeypatch):
    monkeypatch.undo()  # conftest.py's
    ours, theirs = make([(5003,)]), make([(5003,)])
    other = cls(torch.optim, rule)(theirs, foreach=True, **RULES[rule])
    for step in range(8):
        mine = cls(optim, rule)(ours, **RULES[rule])
        mine.load_state_dict(copy.deepcopy(other.state_dict()))
        for optimizer, params in ((mine, ours), (other, theirs)):
            set_grads(params, step)
            optimizer.step()
        largest = theirs[0].detach().abs().clamp(min=RULES[rule]["lr"])
        ulp = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
        assert ((ours[0].detach() - theirs[0].detach()).abs() / ulp).max() <= 2
        ours[0].data.copy_(theirs[0].detach())


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


def test_late_steps():
    """By the bias corrections of Adam."""
    ours, theirs = make(dtype=F64), make(dtype=F64)
    optimizers = optim.AdamW(ours), torch.optim.AdamW(theirs, foreach=True)
    for step in range(3):
        for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
            set_grads(params, step)
            optimizer.step()
            for param in params:
                optimizer.state[param]["step"].fill_(10 ** (3 * (step + 1)))
        assert_same(ours, theirs)


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
