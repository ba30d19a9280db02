"""A HookState over units does what it does over DDP's buckets; quantized all-gathers."""

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import collectives
from collectives import HookState
from collectives.errors import InvalidArgument, InvalidUsage
from collectives.layout import WIRE_FORMATS
from collectives.sharded import (
    MixedPrecisionPolicy,
    ShardedDataParallel,
    ShardedGradScaler,
    ShardingStrategy,
    fully_shard,
    get_optimizer_state_dict,
)
from collectives.sharded.module import units_in
from tests.ddp.training import Branches, loss_of, make_model, over_gloo, run


def shard(state, model=None, **options):
    model = make_model() if model is None else model
    for layer in model:
        if isinstance(layer, nn.Linear) and layer.out_features != 5:
            fully_shard(layer, hook_state=state, **options)
    return fully_shard(model, hook_state=state, **options)  # whose own parameters are the last layer's


def hooked(state):
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=25)
    ddp.register_comm_hook(state, collectives.fused_allreduce)
    return ddp


def full(model):
    """Return the parameters as their owners have them."""
    found = []
    for unit in units_in(model):
        for group in unit.groups:
            whole = group.flat
            if unit.ranks.shard is not None:
                whole = torch.empty(group.unsharded_numel, dtype=group.dtype)
                unit.ranks.shard.all_gather(whole, group.flat)
            found += [whole[param.offset :][: param.count].view(param.shape).clone() for param in group.params]
    return found


def by_unit(ddp):
    """Return DDP's parameters in the order of `full`."""
    layers = [ddp.module[6], ddp.module[0], ddp.module[2], ddp.module[4]]
    return [param.detach().clone() for layer in layers for param in layer.parameters()]


def adamw(params):
    return collectives.optim.AdamW(params, lr=1e-2)


def train(model, optimizer, rank, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


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
        theirs, ours, fused = states = [HookState(**options) for _ in range(3)]
        for state in states:
            state.grad_scaler = False  # it would be looked for
        ddp = hooked(theirs)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), ctx.rank)
        model = shard(ours)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), ctx.rank)
        stepped = shard(fused)
        fused.optimizer = collectives.optim.SGD(stepped.parameters(), lr=0.1, momentum=0.9)
        train(stepped, fused.optimizer, ctx.rank)
        assert all(param.grad is None for param in stepped.parameters())
        rows.append((by_unit(ddp), full(model), full(stepped), theirs, ours, fused))
    return [
        (*parts, *((state.grad_norm, state.nonfinite, state.bytes_on_wire, state.stats()) for state in states))
        for *parts, a, b, c in rows
        for states in [(a, b, c)]
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_over_ddp(ranks, tmp_path):
    for rows in run(against_ddp, ranks, tmp_path / "store"):
        for options, (theirs, ours, stepped, known, found, fused) in zip(options_for(ranks), rows, strict=True):
            exact = options.get("wire") is None and "max_norm" not in options
            for a, b, c in zip(theirs, ours, stepped, strict=True):
                if exact:
                    assert torch.equal(a, b), options
                else:  # DDP's blocks and norms begin elsewhere, and its wires round the sum as well
                    close = 1e-6 if "wire" not in options else 2e-2
                    torch.testing.assert_close(b, a, rtol=0, atol=close, msg=str(options))
                assert torch.equal(b, c), options  # torch.optim.SGD's foreach form
            if "max_norm" in options:
                assert found[0] == pytest.approx(known[0], rel=1e-6 if "wire" not in options else 0.02)
                assert fused[0] == found[0]
            assert found[1] == known[1] == fused[1]
            assert found[3]["backwards"] == 3 and found[3]["buckets"] == 12
            if "wire" not in options:
                assert found[3]["ratio"] == 1.0
                assert abs(found[2] - known[2] / 2) < 64 * ranks * 4  # half of an all-reduce, and padding


def gradients_of(ctx, step, ranks):
    """Return each rank's own full gradients of one unsharded step."""
    found = []
    for rank in range(ranks):
        model = make_model()
        loss_of(model, step, rank).backward()
        found.append([param.grad for layer in (6, 0, 2, 4) for param in model[layer].parameters()])
    return found


@over_gloo
def feed_back(ctx):
    state = HookState(wire="int8", error_feedback=True)
    model = shard(state)
    sums = [torch.zeros_like(param) for param in full(model)]
    for _ in range(3):
        model.zero_grad()
        loss_of(model, 0, ctx.rank).backward()
        units = [group for unit in units_in(model) for group in unit.groups]
        whole = []
        for group in units:
            flat = torch.empty(group.unsharded_numel)
            ctx.communicator().all_gather(flat, group.gradients.flat)
            whole += [flat[param.offset :][: param.count].view(param.shape) for param in group.params]
        for total, each in zip(sums, whole, strict=True):
            total += each
    kept = pickle.loads(pickle.dumps(state)).compressor.state_dict()["residuals"]
    mean = state.state_dict()["wire"]["residuals"]
    saved = state.state_dict()
    references = [weakref.ref(param.shard) for unit in units_in(model) for param in unit.params]
    references += [weakref.ref(param.full) for unit in units_in(model) for param in unit.params]
    del model, units, group
    gc.collect()
    assert [each() for each in references] == [None] * 16
    again = HookState(wire="int8", error_feedback=True)
    again.load_state_dict(saved)
    other = shard(again)
    loss_of(other, 0, ctx.rank).backward()
    taken = again.compressor.residuals.unclaimed_names()
    return sums, kept, mean, gradients_of(ctx, 0, ctx.size), taken


def test_error_feedback_carries_over(tmp_path):
    results = run(feed_back, 2, tmp_path / "store")
    (sums, kept, mean, grads, taken), (_, others, *_) = results
    names = [f"{layer}.{name}" for layer in (6, 0, 2, 4) for name in ("weight", "bias")]
    assert sorted(kept) == sorted(mean) == sorted(names) and taken == []
    for at, (name, total) in enumerate(zip(names, sums, strict=True)):
        owed = sum(each[at] for each in grads) * 3 / 2
        # Applied gradients and residuals add up to all gradients.
        residual = (kept[name] + others[name]).view(total.shape) / 2
        torch.testing.assert_close(total + residual, owed, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mean[name], (kept[name] + others[name]) / 2)
        assert (total - owed).abs().max() > 1e-6  # int8 does lose


@over_gloo
def gather_in_fewer_bits(ctx):
    rows = {}
    for name in ("bf16", "int8", "fp8_e4m3"):
        state = HookState(gather=name)
        model = shard(state, reshard_after_forward=False)
        masters = full(model)
        seen = []
        for module in (model, model[0], model[2], model[4]):
            module.unshard()
            seen += [param.detach().clone() for param in module._parameters.values()]
            seen += [] if module is not model else [param.detach().clone() for param in model[6].parameters()]
            module._unit.reshard(write_back=True)  # what was not written to stays
        assert all(map(torch.equal, masters, full(model)))
        with torch.no_grad(), model[0]._unit.unsharded(write_back=True):
            model[0].bias[:2] = 7.0
        changed = model[0]._unit.params[1]
        after = full(model)[[param for unit in units_in(model) for param in unit.params].index(changed)]
        assert after[:2].tolist() == [7.0, 7.0]
        optimizer = adamw(model.parameters())
        train(model, optimizer, ctx.rank, 2)
        rows[name] = masters, seen, state.stats()["bytes_gathered"]
    models = [shard(HookState(gather="int8"), reshard_after_forward=keep) for keep in (True, False)]
    for model in models:
        train(model, adamw(model.parameters()), ctx.rank, 2)
    assert all(map(torch.equal, *map(full, models)))  # padding has no influence
    # bf16 parameters with gather="bf16": no quantized all-gather, and the same bits as without.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    state = HookState(gather="bf16")
    models = [shard(each, mp_policy=policy) for each in (None, state)]
    for model in models:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), ctx.rank, 2)
    assert all(map(torch.equal, *map(full, models)))
    return rows


def test_parameters_are_gathered_in_fewer_bits(tmp_path):
    first, second = run(gather_in_fewer_bits, 2, tmp_path / "store")
    for name, (masters, seen, sent) in first.items():
        wire = WIRE_FORMATS[name]
        limit = max(param.abs().max() for param in masters)
        for exact, given, theirs in zip(masters, seen, second[name][1], strict=True):
            assert torch.equal(given, theirs)  # all ranks compute with the same values, the owner too
            s = limit / wire.limit if wire.scaled else 1.0
            assert ((exact - given).abs() <= wire.relative * exact.abs() + wire.absolute * s + 1e-9).all()
            assert not torch.equal(exact, given)
        assert sent > 0


@over_gloo
def scaled(ctx):
    """GradScalers: one rank alone has a non-finite gradient in its shard; all ranks skip the step."""
    rows = []
    for make, fused, options in (
        (lambda params: torch.optim.AdamW(params, lr=1e-2), False, {}),
        (adamw, False, {"max_norm": 0.1}),
        (adamw, True, {"max_norm": 0.1}),
        (adamw, True, {}),
    ):
        for scaler in (
            torch.amp.GradScaler("cpu", init_scale=1024.0),
            ShardedGradScaler("cpu", init_scale=1024.0, process_group=None),
        ):
            state = HookState(**options)
            model = shard(state)
            optimizer = make(model.parameters())
            if fused:
                state.optimizer = optimizer
            state.grad_scaler = scaler
            reference = make_model()
            other = torch.optim.AdamW(reference.parameters(), lr=1e-2)
            for step in range(4):
                optimizer.zero_grad()
                loss = loss_of(model, step, ctx.rank)
                scaler.scale(loss).backward()
                if step == 1:
                    if ctx.rank == ctx.size - 1:
                        next(p for p in model.parameters() if p.grad is not None and p.numel()).grad.view(-1)[0] = (
                            torch.inf
                        )
                    before = full(model)
                scaler.step(optimizer)
                scaler.update()
                if step == 1:
                    assert all(map(torch.equal, before, full(model)))
                    continue
                other.zero_grad()
                sum(loss_of(reference, step, rank) / ctx.size for rank in range(ctx.size)).backward()
                if "max_norm" in options:
                    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
                other.step()
            found = full(model)
            wanted = [param for layer in (6, 0, 2, 4) for param in reference[layer].parameters()]
            for a, b in zip(wanted, found, strict=True):
                torch.testing.assert_close(b, a.detach(), rtol=1e-4, atol=1e-5)
            rows.append((found, scaler.get_scale()))
    return rows


def test_scalers_agree(tmp_path):
    first, second = run(scaled, 2, tmp_path / "store")
    for (ours, scale), (theirs, other) in zip(first, second, strict=True):
        assert all(map(torch.equal, ours, theirs)) and scale == other == 512.0


@over_gloo
def steps_in_backward(ctx):
    unused_branches(ctx)
    steps_that_are_left_out(ctx)
    frozen_parameters(ctx)
    strategies_with_max_norm(ctx)
    refused_states(ctx)
    return True


def unused_branches(ctx):
    """Unused branches; the optimizer's state by names; what optimizer.step() and DDP refuse."""
    state = HookState()
    model = Branches()
    for branch in model.branches:
        fully_shard(branch, hook_state=state)
    fully_shard(model, hook_state=state)
    state.optimizer = optimizer = adamw(model.parameters())
    plain = Branches()
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    ddp.register_comm_hook(None, collectives.fused_allreduce)
    other = adamw(ddp.parameters())
    with pytest.raises(InvalidUsage, match="no synchronised backward"):
        optimizer.step()
    for each, steps in ((model, optimizer), (ddp, other)):
        for step in range(3):
            steps.zero_grad()
            loss_of(each, step, ctx.rank).backward()
            steps.step()
    trunk = [plain.trunk, *plain.branches]
    assert all(map(torch.equal, full(model), [param for layer in trunk for param in layer.parameters()]))
    check_optimizer_state(model, state, other)
    model.set_requires_gradient_sync(False)
    loss_of(model, 3, ctx.rank).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(InvalidUsage, match="no synchronised backward"):
        optimizer.step()
    with pytest.raises(InvalidUsage, match="stepped inside of the backward"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(InvalidUsage, match="serves sharded modules"):
        collectives.fused_allreduce(state, None)


def check_optimizer_state(model, state, other):
    """The state is that of DDP's optimizer `other`, and another sharded model loads it."""
    whole = state.optimizer_state_dict()
    wanted = other.state_dict()["state"]
    for number, each in whole["state"].items():
        assert all(torch.equal(value, wanted[number][key]) for key, value in each.items())
    again = HookState()
    copy = Branches()
    for branch in copy.branches:
        fully_shard(branch, hook_state=again)
    fully_shard(copy, hook_state=again)
    again.optimizer = adamw(copy.parameters())
    assert len(get_optimizer_state_dict(copy, again.optimizer)["state"]) == 6  # begins what no step has begun
    again.load_optimizer_state_dict(whole)
    for param, mine in zip(copy.parameters(), model.parameters(), strict=True):
        for key, value in state.optimizer.state[mine].items():
            assert torch.equal(again.optimizer.state[param][key], value)


def steps_that_are_left_out(ctx):
    """Non-finite gradients leave the step out; backwards that come in parts are refused."""
    state = HookState(check_finite=True)
    model = shard(state)
    state.optimizer = optimizer = adamw(model.parameters())
    before = full(model)
    (loss_of(model, 0, ctx.rank) * (torch.inf if ctx.rank else 1.0)).backward()
    optimizer.step()
    assert all(map(torch.equal, before, full(model))) and state.nonfinite > 0
    state = HookState()
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(12, 12), hook_state=state)), hook_state=state)
    state.optimizer = adamw(model.parameters())
    x = torch.randn(4, 12, requires_grad=True)
    for _ in range(2):
        x = checkpoint(model[0], x, use_reentrant=True)
    with pytest.raises(InvalidUsage, match="use_reentrant=True"):
        x.sum().backward()


def frozen_parameters(ctx):
    found = []
    for fused in (True, False):  # frozen parameters are needed after the gradients of the others
        state, model = HookState(), make_model()
        model[2].requires_grad_(False)
        fully_shard(model, hook_state=state)
        optimizer = adamw(param for param in model.parameters() if param.requires_grad)
        if fused:
            state.optimizer = optimizer
        train(model, optimizer, ctx.rank, 2)
        found.append(full(model))
    assert all(map(torch.equal, *found))


def strategies_with_max_norm(ctx):
    found = []
    for strategy in ("FULL_SHARD", "SHARD_OPTIMIZER", "NO_SHARD"):
        state = HookState(max_norm=0.1)
        model = ShardedDataParallel(make_model(), sharding_strategy=ShardingStrategy[strategy], hook_state=state)
        state.optimizer = adamw(model.parameters())
        train(model, state.optimizer, ctx.rank, 2)
        found.append(full(model))
    for one, two, three in zip(*found, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three)  # the norm is added up from other shards


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
    with pytest.raises(InvalidUsage, match="wire='int8'|wire='fp32'"):
        fully_shard(make_model(), hook_state=HookState(wire="int8" if ctx.rank else "fp32"))


def test_the_step_in_backward(tmp_path):
    assert run(steps_in_backward, 2, tmp_path / "store") == [True, True]


def test_gather_is_checked():
    with pytest.raises(InvalidArgument, match="gather must be None or one of"):
        HookState(gather="fp32")
    with pytest.raises(InvalidArgument, match="fully_shard's parameters travel"):
        collectives.fused_allreduce(HookState(gather="int8"), None)
