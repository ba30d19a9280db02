"""A HookState over units does what it does over DDP's buckets; quantized all-gathers."""

import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import collectives
from collectives import HookState
from collectives.errors import InvalidArgument, InvalidUsage, Mismatch
from collectives.layout import WIRE_FORMATS
from collectives.sharded import MixedPrecisionPolicy, fully_shard
from collectives.sharded.managed_params import units_in
from tests.ddp.training import Branches, loss_of, make_model, over_gloo, run


def shard(state, model=None, **options):
    model = make_model() if model is None else model
    for layer in model:
        if isinstance(layer, nn.Linear) and layer.out_features != 5:
            fully_shard(layer, hook_state=state, **options)
    return fully_shard(model, hook_state=state, **options)  # whose own parameters are the last layer's


def full(model):
    """Return the parameters by name, as their owners have them."""
    return {
        name: param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach().clone()
        for name, param in model.named_parameters()
    }


def same(*models):
    first, *others = (model if isinstance(model, dict) else full(model) for model in models)
    return all(torch.equal(first[name], each[name]) for each in others for name in first)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return collectives.optim.AdamW(params, lr=1e-2)


def train(model, optimizer, rank, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def stepped(state, **options):
    """Return a model that its state's optimizer steps in the backward."""
    model = shard(state, **options)
    state.optimizer = adamw(model.parameters())
    return model


# ---- As over DDP.

OPTIONS = [
    {},
    {"average": False, "algorithm": "direct"},
    {"check_finite": True},
    {"max_norm": 0.1, "norm_type": 3},
    {"wire": "bf16"},
    {"max_norm": 0.1},
    {"wire": "int8", "error_feedback": True, "max_norm": 0.1},
]


def options_for(ranks):
    return OPTIONS if ranks == 2 else [{}, *OPTIONS[-2:]]


@over_gloo
def against_ddp(ctx):
    rows = []
    for options in options_for(ctx.size):
        states = [HookState(grad_scaler=False, **options) for _ in range(3)]
        ddp = DistributedDataParallel(make_model(), bucket_cap_mb=25)
        ddp.register_comm_hook(states[0], collectives.fused_allreduce)
        train(ddp, sgd(ddp.parameters()), ctx.rank)
        model = shard(states[1])
        train(model, sgd(model.parameters()), ctx.rank)
        fused = shard(states[2])
        states[2].optimizer = collectives.optim.SGD(fused.parameters(), lr=0.1, momentum=0.9)
        train(fused, states[2].optimizer, ctx.rank)
        assert all(param.grad is None for param in fused.parameters())
        if not options:
            plain = shard(None)
            train(plain, sgd(plain.parameters()), ctx.rank)
            assert same(plain, model)
        found = [(state.grad_norm, state.nonfinite, state.bytes_on_wire, state.stats()) for state in states]
        rows.append(([full(each) for each in (ddp.module, model, fused)], found))
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_over_ddp(ranks, tmp_path):
    for rows in run(against_ddp, ranks, tmp_path / "store"):
        for options, (models, (known, found, fused)) in zip(options_for(ranks), rows, strict=True):
            for name, theirs in models[0].items():
                if "wire" in options or "max_norm" in options:
                    # DDP's blocks and norms begin elsewhere, and its wires round the sum as well.
                    close = 1e-6 if "wire" not in options else 2e-2
                    torch.testing.assert_close(models[1][name], theirs, rtol=0, atol=close, msg=str(options))
                else:
                    assert torch.equal(models[1][name], theirs), options
            assert same(*models[1:]), options  # torch.optim.SGD's foreach form
            if "max_norm" in options:
                assert found[0] == pytest.approx(known[0], rel=1e-6 if "wire" not in options else 0.02)
                assert fused[0] == found[0]
            assert found[1] == known[1] == fused[1]
            assert found[3]["backwards"] == 3 and found[3]["buckets"] == 12
            if "wire" not in options:
                assert found[3]["ratio"] == 1.0
                assert abs(found[2] - known[2] / 2) < 64 * ranks * 4  # half of an all-reduce, and padding


# ---- Error feedback.


@over_gloo
def feed_back(ctx):
    state = HookState(wire="int8", error_feedback=True)
    model = shard(state)
    sums = {name: torch.zeros_like(param) for name, param in full(model).items()}
    for _ in range(3):
        model.zero_grad()
        loss_of(model, 0, ctx.rank).backward()
        for name, param in model.named_parameters():
            sums[name] += param.grad.full_tensor()
    kept = pickle.loads(pickle.dumps(state)).compressor.state_dict()["residuals"]
    saved = state.state_dict()
    references = [weakref.ref(each) for unit in units_in(model) for p in unit.params for each in (p.sharded, p.full)]
    del model, param
    gc.collect()
    assert [each() for each in references] == [None] * 16
    again = HookState(wire="int8", error_feedback=True)
    again.load_state_dict(saved)
    other = shard(again)
    loss_of(other, 0, ctx.rank).backward()
    assert again.compressor.residuals.unclaimed_names() == []
    grads = []
    for rank in range(ctx.size):
        alone = make_model()
        loss_of(alone, 0, rank).backward()
        grads.append({name: param.grad for name, param in alone.named_parameters()})
    return sums, kept, saved, grads


@over_gloo
def go_on(ctx, saved):
    """Go on with the state of more ranks: residuals that one rank has are applied."""
    state = HookState(wire="int8", error_feedback=True)
    state.load_state_dict(saved)
    model, plain = shard(state), make_model()
    for each in (model, plain):
        loss_of(each, 0, 0).backward()
    return {
        name: param.grad.full_tensor() - other.grad
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True)
    }


def test_error_feedback_carries_over(tmp_path):
    (sums, kept, saved, grads), (_, others, *_) = run(feed_back, 2, tmp_path / "store")
    mean = saved["wire"]["residuals"]
    assert kept.keys() == mean.keys() == sums.keys()
    for name, total in sums.items():
        owed = sum(each[name] for each in grads) * 3 / 2
        # Applied gradients and residuals add up to all gradients.
        residual = (kept[name] + others[name]).view(total.shape) / 2
        torch.testing.assert_close(total + residual, owed, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mean[name], (kept[name] + others[name]) / 2)
        assert (total - owed).abs().max() > 1e-6  # int8 does lose
    for name, applied in run(go_on, 1, tmp_path / "alone", saved)[0].items():
        torch.testing.assert_close(applied.view(-1), mean[name], rtol=1e-4, atol=1e-6)


# ---- Quantized all-gathers.


@over_gloo
def gather_in_fewer_bits(ctx):
    rows = {}
    for name in ("bf16", "int8", "fp8_e4m3"):
        state = HookState(gather=name)
        model = shard(state, reshard_after_forward=False)
        masters, seen = full(model), {}
        for unit in units_in(model):
            with unit.unsharded(write_back=True):  # what was not written to stays
                for prefix, part in model.named_modules():
                    seen |= {
                        f"{prefix}.{key}": param.detach().clone()
                        for key, param in part._parameters.items()
                        if not hasattr(param, "full_tensor")
                    }
        assert same(masters, model)
        with torch.no_grad(), model[0]._sharded_unit.unsharded(write_back=True):
            model[0].bias[:2] = 7.0
        assert full(model)["0.bias"][:2].tolist() == [7.0, 7.0]
        train(model, adamw(model.parameters()), ctx.rank, 2)
        rows[name] = masters, seen, state.stats()["bytes_gathered"]
    with pytest.raises(InvalidUsage, match="leave HookState's gather out"):
        model.set_custom_all_gather(lambda *args: None)
    models = [shard(HookState(gather="int8"), reshard_after_forward=keep) for keep in (True, False)]
    for model in models:
        train(model, adamw(model.parameters()), ctx.rank, 2)
    assert same(*models)  # padding has no influence
    # bf16 parameters with gather="bf16": no quantized all-gather, and the same bits as without.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    models = [shard(state, mp_policy=policy) for state in (None, HookState(gather="bf16"))]
    for model in models:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), ctx.rank, 2)
    assert same(*models)
    return rows


def test_parameters_are_gathered_in_fewer_bits(tmp_path):
    first, second = run(gather_in_fewer_bits, 2, tmp_path / "store")
    for name, (masters, seen, sent) in first.items():
        wire = WIRE_FORMATS[name]
        limit = max(param.abs().max() for param in masters.values())
        assert masters.keys() == seen.keys() and sent > 0
        for key, exact in masters.items():
            assert torch.equal(seen[key], second[name][1][key])  # all ranks compute with the same values, the owner too
            s = limit / wire.limit if wire.scaled else 1.0
            assert ((exact - seen[key]).abs() <= wire.relative * exact.abs() + wire.absolute * s + 1e-9).all()
            assert not torch.equal(exact, seen[key])


# ---- GradScalers.


@over_gloo
def scaled(ctx):
    """One rank alone has a non-finite gradient in its shard; all ranks skip the step."""
    rows = []
    for make, fused, options in (
        (lambda params: torch.optim.AdamW(params, lr=1e-2), False, {}),
        (adamw, False, {"max_norm": 0.1}),
        (adamw, True, {"max_norm": 0.1}),
        (adamw, True, {}),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        state = HookState(grad_scaler=scaler, **options)
        model, reference = shard(state), make_model()
        optimizer, other = make(model.parameters()), torch.optim.AdamW(reference.parameters(), lr=1e-2)
        if fused:
            state.optimizer = optimizer
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, ctx.rank)).backward()
            if step == 1:
                before = full(model)
                if ctx.rank == ctx.size - 1:
                    parts = [param.grad._local_tensor for param in model.parameters()]
                    next(part for part in parts if part.numel()).view(-1)[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            if step == 1:
                assert same(before, model)
                continue
            other.zero_grad()
            sum(loss_of(reference, step, rank) / ctx.size for rank in range(ctx.size)).backward()
            if "max_norm" in options:
                nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            other.step()
        for name, value in full(model).items():
            torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)
        rows.append((full(model), scaler.get_scale()))
    return rows


def test_scalers_agree(tmp_path):
    for (ours, scale), (theirs, other) in zip(*run(scaled, 2, tmp_path / "store"), strict=True):
        assert same(ours, theirs) and scale == other == 512.0


# ---- The optimizer in the backward.


@over_gloo
def steps_in_backward(ctx):
    unused_branches(ctx)
    state_of_one_element(ctx)
    steps_that_are_left_out(ctx)
    frees_memory(ctx)
    frozen_parameters(ctx)
    strategies_with_max_norm(ctx)
    pickled(ctx)
    refused_states(ctx)
    return True


def branches(state):
    model = Branches()
    for branch in model.branches:
        fully_shard(branch, hook_state=state)
    return fully_shard(model, hook_state=state)


def unused_branches(ctx):
    """Unused branches; the optimizer's state; what optimizer.step() and DDP refuse."""
    state = HookState()
    model = branches(state)
    state.optimizer = optimizer = adamw(model.parameters())
    plain = Branches()
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    ddp.register_comm_hook(None, collectives.fused_allreduce)
    other = adamw(ddp.parameters())
    with pytest.raises(InvalidUsage, match="no synchronised backward"):
        optimizer.step()
    train(model, optimizer, ctx.rank)
    train(ddp, other, ctx.rank)
    assert same(model, plain)
    check_optimizer_state(state, other)
    model.set_requires_gradient_sync(False)
    loss_of(model, 3, ctx.rank).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(InvalidUsage, match="no synchronised backward"):
        optimizer.step()
    with pytest.raises(InvalidUsage, match="has used the gradients in the backward"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(InvalidUsage, match="serves sharded modules"):
        collectives.fused_allreduce(state, None)
    with pytest.raises(InvalidUsage, match="reduced as its HookState says"):
        model.set_all_reduce_hook(lambda grad: None)


def check_optimizer_state(state, other):
    """The state is that of DDP's optimizer `other`, and another sharded model loads it, and its own part."""
    whole, wanted = state.optimizer_state_dict(), other.state_dict()["state"]
    assert whole["state"].keys() == wanted.keys()
    for number, each in whole["state"].items():
        assert all(torch.equal(value, wanted[number][key]) for key, value in each.items())
    for saved in (whole, state.optimizer_state_dict(full=False)):
        again = HookState()
        again.optimizer = adamw(branches(again).parameters())
        again.load_optimizer_state_dict(pickle.loads(pickle.dumps(saved)))
        found = again.optimizer_state_dict()["state"]
        assert all(torch.equal(found[n][key], value) for n, each in wanted.items() for key, value in each.items())


def state_of_one_element(ctx):
    """The state of parameters of one element loads, whole and as a part, and another shape is refused by name."""
    states = [HookState(), HookState()]
    for state in states:
        model = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 1))
        fully_shard(model, hook_state=state)
        state.optimizer = adamw(model.parameters())
        if state is states[0]:
            model(torch.ones(2, 12)).sum().backward()
            state.optimizer.step()
    want = states[0].optimizer_state_dict()
    for full in (True, False):
        states[1].load_optimizer_state_dict(states[0].optimizer_state_dict(full=full))
        found = states[1].optimizer_state_dict()["state"]
        for number, entries in want["state"].items():
            assert all(torch.equal(found[number][key], value) for key, value in entries.items())
    want["state"][0]["exp_avg"] = torch.ones(3)
    with pytest.raises(InvalidArgument, match=r"exp_avg to load of 0.weight has the shape \(3,\): neither"):
        states[1].load_optimizer_state_dict(want)


def steps_that_are_left_out(ctx):
    """Non-finite gradients leave the step out; backwards that come in parts are refused."""
    state = HookState(check_finite=True)
    model = stepped(state)
    before = full(model)
    (loss_of(model, 0, ctx.rank) * (torch.inf if ctx.rank else 1.0)).backward()
    state.optimizer.step()
    assert same(before, model) and state.nonfinite > 0
    state = HookState()
    model = stepped(state)
    loss_of(model, 0, ctx.rank).backward()
    with pytest.raises(InvalidUsage, match=r"call optimizer.step\(\) in between"):
        loss_of(model, 0, ctx.rank).backward()
    state = HookState()
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(12, 12), hook_state=state)), hook_state=state)
    state.optimizer = adamw(model.parameters())
    x = torch.randn(4, 12, requires_grad=True)
    for _ in range(2):
        x = checkpoint(model[0], x, use_reentrant=True)
    with pytest.raises(InvalidUsage, match="use_reentrant=True"):
        x.sum().backward()
    model.reset_iter_state()


def frees_memory(ctx):
    """A unit is stepped, and its gradients are freed, before the backward of the unit before begins."""
    state = HookState()
    model = stepped(state)
    weight, seen = model[4].weight, []
    before = weight._local_tensor.clone()

    def see(*_):
        seen.append((weight.grad, model[4]._sharded_unit.is_unsharded, weight._local_tensor.clone()))

    model[2].register_full_backward_hook(see)
    loss_of(model, 0, ctx.rank).backward()
    ((grad, is_unsharded, value),) = seen
    assert grad is None and not is_unsharded and not torch.equal(before, value)
    state.optimizer.step()
    assert torch.equal(value, weight._local_tensor)


def frozen_parameters(ctx):
    found = []
    for fused in (True, False):
        state, model = HookState(), make_model()
        model[2].requires_grad_(False)
        fully_shard(model, hook_state=state)
        optimizer = adamw(param for param in model.parameters() if param.requires_grad)
        if fused:
            state.optimizer = optimizer
        train(model, optimizer, ctx.rank, 2)
        found.append(full(model))
    assert same(*found)


def strategies_with_max_norm(ctx):
    found = []
    for shape, options in ((None, {}), (None, {"reshard_after_forward": False}), ((ctx.size, 1), {})):
        mesh = None if shape is None else init_device_mesh("cpu", shape)
        state = HookState(max_norm=0.1)
        model = stepped(state, mesh=mesh, **options)
        train(model, state.optimizer, ctx.rank, 2)
        found.append((full(model), state.grad_norm))
    (one, norm), (two, _), (three, other) = found
    assert same(one, two) and other == pytest.approx(norm, rel=1e-6)
    for name, value in one.items():
        torch.testing.assert_close(value, three[name])  # the norm is added up from other shards


def pickled(ctx):
    """A pickled state goes on with all bits."""
    state = HookState(wire="int8", error_feedback=True)
    model = stepped(state)
    train(model, state.optimizer, ctx.rank)
    again = pickle.loads(pickle.dumps(state))
    copy = make_model()
    copy.load_state_dict(full(model))
    copy = shard(again, copy)
    again.optimizer = adamw(copy.parameters())
    for each, its in ((model, state), (copy, again)):
        train(each, its.optimizer, ctx.rank, 2)
    assert same(model, copy) and again.stats()["backwards"] == 5


def refused_states(ctx):
    for options, reason in (
        ({"streams": 2}, "one communicator"),
        ({"zero_copy": False}, "always shared"),
        ({"deterministic": True, "max_norm": 1.0}, "where these begin"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            fully_shard(make_model(), hook_state=HookState(**options))
    with pytest.raises(InvalidArgument, match="must be a collectives.HookState"):
        fully_shard(make_model(), hook_state="int8")
    with pytest.raises(InvalidUsage, match="state.optimizer"):
        fully_shard(make_model(), hook_state=HookState(optimizer=adamw(make_model().parameters())))
    with pytest.raises(Mismatch, match="wire='int8'|wire='fp32'"):
        fully_shard(make_model(), hook_state=HookState(wire="int8" if ctx.rank else "fp32"))
    group = dist.new_group([0])
    if ctx.rank == 0:
        with pytest.raises(InvalidUsage, match="names its ranks"):
            fully_shard(
                make_model(), hook_state=HookState(process_group=group), mesh=init_device_mesh("cpu", (ctx.size,))
            )
    else:
        init_device_mesh("cpu", (ctx.size,))
    state = HookState()
    model = shard(state)
    state.optimizer = adamw(list(model.parameters())[:-1])
    with pytest.raises(InvalidArgument, match="doesn't have 6.bias"):
        loss_of(model, 0, ctx.rank).backward()
    model.reset_iter_state()


def test_the_step_in_backward(tmp_path):
    assert run(steps_in_backward, 2, tmp_path / "store") == [True, True]


@over_gloo
def over_replicas(ctx):
    """Two shards by two replicas: the bits, and the norm, of DDP; wires."""
    rows = []
    for options in ({}, {"max_norm": 0.1}, {"wire": "int8", "error_feedback": True}):
        states = [HookState(**options) for _ in range(3)]
        ddp = DistributedDataParallel(make_model(), bucket_cap_mb=25)
        ddp.register_comm_hook(states[0], collectives.fused_allreduce)
        train(ddp, adamw(ddp.parameters()), ctx.rank)
        mesh = init_device_mesh("cpu", (2, 2))
        model, fused = shard(states[1], mesh=mesh), stepped(states[2], mesh=mesh)
        train(model, adamw(model.parameters()), ctx.rank)
        train(fused, states[2].optimizer, ctx.rank)
        assert same(model, fused)
        rows.append(([full(ddp.module), full(model)], states[0].grad_norm, states[2].grad_norm))
    return rows


def test_replicas(tmp_path):
    results = run(over_replicas, 4, tmp_path / "store")
    for (models, known, norm), *others in zip(*results, strict=True):
        assert all(same(models[1], each[0][1]) for each in others)
        assert norm == (known if known is None else pytest.approx(known, rel=1e-6))
    (plain, *_), (clipped, *_), _ = results[0]
    assert same(*plain)
    for name, value in clipped[0].items():
        torch.testing.assert_close(clipped[1][name], value, rtol=0, atol=1e-5)


def test_gather_is_checked():
    with pytest.raises(InvalidArgument, match="gather must be None or one of"):
        HookState(gather="fp32")
    with pytest.raises(InvalidArgument, match="fully_shard's parameters travel"):
        collectives.fused_allreduce(HookState(gather="int8"), None)
