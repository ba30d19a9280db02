"""All optimizers of torch.optim, and ours, over RaggedTensors: the parameters and state of one process."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import collectives
from collectives.errors import InvalidArgument, InvalidUsage
from collectives.sharded.placement import RaggedShard
from collectives.sharded.ragged_tensor import RaggedTensor
from collectives.sharded.scaler import ShardedGradScaler
from tests.ddp.training import over_gloo, run
from tests.sharded.shards import mesh_of, params_of, set_grads, sharded, values, whole

LR = 0.01
RULES = {  # element by element: to the bit, but where torch's fused kernels compute the last elements otherwise
    "SGD": dict(momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": dict(amsgrad=True),
    "AdamW": dict(weight_decay=0.1),
    "Adamax": {},
    "NAdam": dict(decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": {},
    "RMSprop": dict(momentum=0.5, centered=True),
    "Rprop": {},
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {},
}
CLOSE = {"Adafactor": {}, "LBFGS": dict(max_iter=3)}  # norms and products of whole tensors
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def step(optimizer, params, seed):
    set_grads(params, values(seed))
    # LBFGS calls the closure several times: the gradients are those of a quadratic there.
    if isinstance(optimizer, torch.optim.LBFGS):

        def closure():
            loss = sum(param.square().sum() for param in params)
            loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            for param in params:
                param.grad = 2 * param.detach()
            return loss

        optimizer.step(closure)
    else:
        optimizer.step()


def ways():
    for name, options in {**RULES, **CLOSE}.items():
        kinds = [{}] if name in CLOSE else [{"foreach": False}, {"foreach": True}]
        for kind in kinds + [{"fused": True}] * (name in FUSED):
            more = {key: value for key, value in options.items() if not (kind.get("fused") and key == "centered")}
            yield f"{name} {kind}", lambda params, n=name, o=more, k=kind: getattr(torch.optim, n)(params, LR, **o, **k)
    yield "tensor lr", lambda params: torch.optim.AdamW(params, torch.tensor(LR), foreach=False)
    yield "our SGD", lambda params: collectives.optim.SGD(params, LR, momentum=0.9, weight_decay=0.1)
    yield "our Adam", lambda params: collectives.optim.Adam(params, LR, amsgrad=True)
    yield "our AdamW", lambda params: collectives.optim.AdamW(params, LR)


@over_gloo
def train(ctx):
    mesh = mesh_of()
    found = {}
    for name, make in ways():
        plain, shards = params_of(values(0)), [nn.Parameter(each) for each in sharded(values(0), mesh)]
        ours, theirs = make(shards), make(plain)
        for seed in range(1, 4):
            step(theirs, plain, seed)
            step(ours, shards, seed)
        if "LBFGS" not in name:  # a checkpoint in memory
            ours, before = make(shards), ours
            file = io.BytesIO()
            torch.save(before.state_dict(), file)
            file.seek(0)
            ours.load_state_dict(torch.load(file, weights_only=True))
            step(theirs, plain, 5)
            step(ours, shards, 5)
        pairs = [(whole(a), whole(b)) for a, b in zip(shards, plain, strict=True)]
        for a, b in zip(shards, plain, strict=True):
            assert ours.state[a].keys() == theirs.state[b].keys(), name
            for key, value in theirs.state[b].items():
                if isinstance(value, torch.Tensor) and value.shape == b.shape and key != "step":
                    assert isinstance(ours.state[a][key], RaggedTensor) or not b.dim(), (name, key)
                if isinstance(value, torch.Tensor):
                    pairs.append((whole(ours.state[a][key]), value))
        found[name] = all(torch.equal(a, b) for a, b in pairs)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_are_those_of_one_process(ranks, tmp_path):
    for found in run(train, ranks, tmp_path / "store"):
        assert len(found) == 32
        inexact = [name for name, same in found.items() if not same and "fused" not in name]
        assert set(inexact) <= {"Adafactor {}", "LBFGS {}"}


@over_gloo
def checkpoint(ctx, path):
    """State of each kind through torch.distributed.checkpoint, to other bounds."""
    mesh = mesh_of()
    for make in (
        lambda params: torch.optim.NAdam(params, LR),
        lambda params: torch.optim.ASGD(params, LR),
        lambda params: torch.optim.AdamW(params, LR),
        lambda params: collectives.optim.AdamW(params, LR),
    ):
        model, other = nn.ParameterList(sharded(values(0), mesh)), nn.ParameterList(sharded(values(3), mesh))
        for index in (0, 1):
            full = values(3)[index]
            cuts = RaggedShard([0, *[full.shape[0]] * ctx.size])
            other[index] = nn.Parameter(RaggedTensor.from_full(full, mesh, cuts))
        first, second = make(model.parameters()), make(other.parameters())
        step(first, list(model), 1)
        state = {"optimizer": get_optimizer_state_dict(model, first)}
        dcp.save(state, checkpoint_id=path)
        state = {"optimizer": get_optimizer_state_dict(other, second)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(other, second, state["optimizer"])
        for a, b in zip(model, other, strict=True):
            b.data.copy_(torch.distributed.tensor.DTensor.from_local(whole(a), mesh, run_check=False))
        step(first, list(model), 2)
        step(second, list(other), 2)
        for a, b in zip(model, other, strict=True):
            assert torch.equal(whole(a), whole(b))
        torch.distributed.barrier()


def test_state_goes_through_a_checkpoint(tmp_path):
    run(checkpoint, 2, tmp_path / "store", str(tmp_path / "checkpoint"))


@over_gloo
def scale(ctx):
    """A gradient that isn't finite on one rank skips the step on all."""
    mesh = mesh_of()
    skipped = []
    for make in (
        lambda params: torch.optim.AdamW(params, LR),
        lambda params: torch.optim.AdamW(params, LR, fused=True),
        lambda params: collectives.optim.AdamW(params, LR),
    ):
        for scaler in (
            torch.amp.GradScaler("cpu", init_scale=4.0),
            ShardedGradScaler("cpu", init_scale=4.0),
            ShardedGradScaler("cpu", init_scale=4.0, process_group=torch.distributed.group.WORLD),
        ):
            params = [nn.Parameter(each) for each in sharded(values(0), mesh)]
            params.append(nn.Parameter(torch.ones(3)))  # that isn't sharded
            params[-1].grad = torch.full((3,), 4.0)
            optimizer = make(params)
            scaler.scale(torch.ones(()))
            set_grads(params[:-1], [4 * each for each in values(1)])
            if ctx.rank == ctx.size - 1:
                params[1].grad.to_local()[1] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            kept = all(torch.equal(whole(a), b) for a, b in zip(params[:-1], values(0), strict=True))
            skipped.append((kept, scaler.get_scale()))
            set_grads(params[:-1], [2 * each for each in values(1)])
            params[-1].grad = torch.full((3,), 2.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            expected = params_of(values(0))
            set_grads(expected, values(1))
            torch.optim.AdamW(expected, LR).step()
            for a, b in zip(params[:-1], expected, strict=True):
                torch.testing.assert_close(whole(a), whole(b))
    # A rank without gradients agrees over the process group.
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=torch.distributed.group.WORLD)
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], 1.0)
    if ctx.rank == 0:
        param.grad = torch.full((3,), torch.inf)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    skipped.append(([float(each) for each in found.values()] == [1.0], 2.0))
    return skipped


def test_scalers_agree_over_the_ranks(tmp_path):
    for skipped in run(scale, 2, tmp_path / "store"):
        assert skipped == [(True, 2.0)] * 10


@over_gloo
def half(ctx):
    """Masters, rounding at random, clipping factors: what only collectives.optim has."""
    mesh = mesh_of()
    first = values(0, dtype=torch.bfloat16)
    for options in (
        {"master_weights": True},
        {"stochastic_rounding": True, "seed": 5},
        {"master_weights": True, "stochastic_rounding": True, "seed": 5},
    ):
        plain, shards = params_of(first), [nn.Parameter(each) for each in sharded(first, mesh)]
        optimizers = [collectives.optim.AdamW(params, LR, **options) for params in (plain, shards)]
        for seed in range(1, 4):
            for params, optimizer in zip((plain, shards), optimizers, strict=True):
                set_grads(params, values(seed, dtype=torch.bfloat16))
                optimizer.step(clip=0.5, grad_scale=0.25)
            if seed == 2:  # a write of another is taken into the masters
                with torch.no_grad():
                    plain[0].mul_(2)
                    shards[0].mul_(2)
                clone = collectives.optim.AdamW(shards, LR, **options)
                clone.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
                optimizers[1] = clone
        for a, b in zip(shards, plain, strict=True):
            assert torch.equal(whole(a), whole(b)), (options, a.shape)
            for key, value in optimizers[0].state[b].items():
                assert torch.equal(whole(optimizers[1].state[a][key]), value), (options, key)
    # A shard whose memory is exchanged, as `module.to` does: the next step is of the new memory.
    shards = [nn.Parameter(each) for each in sharded(values(0), mesh)]
    optimizer = collectives.optim.SGD(shards, 1.0)
    set_grads(shards, values(1))
    optimizer.step()
    shards[0]._local_tensor = torch.zeros_like(shards[0]._local_tensor)
    optimizer.step()
    assert torch.equal(whole(shards[0]), -values(1)[0])
    shards[0].grad = torch.distributed.tensor.DTensor.from_local(values(1)[0], mesh, run_check=False)
    with pytest.raises(InvalidArgument, match="parameter 0 of group 0 lies on its mesh as .*RaggedShard"):
        optimizer.step()
    shards[0].grad = None
    with pytest.raises(InvalidUsage, match="plain tensor"):
        shards[0].detach().add_(values(1)[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_masters_and_random_bits(ranks, tmp_path):
    run(half, ranks, tmp_path / "store")


@over_gloo
def average(ctx):
    mesh = mesh_of()
    swa = torch.optim.swa_utils
    for options in ({}, {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9)}, {"avg_fn": swa.get_ema_avg_fn(0.9)}):
        models = [nn.ParameterList(values(0)), nn.ParameterList(sharded(values(0), mesh))]
        averages = [swa.AveragedModel(each, **options) for each in models]
        for _ in range(3):
            for model, averaged in zip(models, averages, strict=True):
                averaged.update_parameters(model)
                with torch.no_grad():
                    for param in model:
                        param.mul_(1.5)
        for a, b in zip(averages[1].module, averages[0].module, strict=True):
            assert isinstance(a, RaggedTensor)
            torch.testing.assert_close(whole(a), whole(b))


def test_averaged_models(tmp_path):
    run(average, 2, tmp_path / "store")
