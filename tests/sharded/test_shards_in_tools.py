"""Shards in torch's tools: DTensor's calls, checkpoints of shards themselves, optimizers' own state dicts, averages of
a model, and FSDP1's older functions.
"""

import copy
import functools
import inspect
import io
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torchs
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import collectives
from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage
from collectives.sharded import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardedDataParallel,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    save,
)
from tests.ddp.training import over_gloo, run
from tests.sharded.states import IDS, Net, adamw, differences, optimizer_of, sharded, train

FULL = torchs.StateDictOptions(full_state_dict=True)


def plain(steps=3):
    """Return a trained unsharded model and its optimizer."""
    model = Net()
    optimizer = optimizer_of(adamw, model)
    train(model, optimizer, steps)
    return model, optimizer


def backward(model):
    model(IDS).square().mean().backward()


def raises(error, match, call):
    with pytest.raises(error, match=match):
        call()


# ---- DTensor's calls.


def whole_tensors(ctx, model):
    """Check full_tensor() of parameters, gradients and optimizer state against an unsharded model."""
    reference, optimizer = plain()
    ours = optimizer_of(adamw, model)
    train(model, ours)
    backward(model)
    backward(reference)
    theirs = dict(reference.named_parameters())
    close = torch.equal if ctx.size != 3 else lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-5)
    states = ours.state_dict()["state"]
    numbers = [p for group in ours.param_groups for p in group["params"]]
    for name, param in model.named_parameters():
        if ctx.size == 3 and name not in ("emb.weight", "small", "net.0.bias"):  # with fewer cores each call takes long
            continue
        want = theirs[name]
        # Operations on a plain Parameter and its plain gradient take torch's fast path.
        assert type(param) is nn.Parameter and type(param.grad) is torch.Tensor
        assert param.global_shape == param.grad.global_shape == want.shape
        for ours_, theirs_ in ((param, want), (param.grad, want.grad)):
            full = ours_.full_tensor()
            assert full.shape == want.shape and close(full, theirs_) and not full.requires_grad, name
            assert full.untyped_storage().data_ptr() != ours_.untyped_storage().data_ptr()
            local = ours_.to_local()
            assert local.data_ptr() == ours_.data_ptr() and local.shape == ours_.shape and not local.requires_grad
        entries = states[next(at for at, each in enumerate(numbers) if each is param)]
        assert close(entries["exp_avg"].full_tensor(), optimizer.state[want]["exp_avg"]), name
        assert entries["exp_avg"].data_ptr() == ours.state[param]["exp_avg"].data_ptr()
        assert not hasattr(entries["step"], "full_tensor")
    return param


@over_gloo
def dtensor_calls(ctx):
    model = sharded()  # kept: shards of a module that is gone are plain tensors
    param = whole_tensors(ctx, model)
    (placement,) = param.placements
    if ctx.size == 1:
        assert placement == Replicate()
    else:
        assert placement.is_shard() and not placement.is_shard(0) and not placement.is_replicate()
        assert not placement.is_partial() and placement == param.grad.placements[0] != Shard(0)
        assert str(placement) == "FlatShard()" and len({placement, param.grad.placements[0]}) == 1
    assert param.device_mesh.size() == ctx.size and param.device_mesh.device_type == "cpu"
    raises(InvalidUsage, r"use_dtensor=True", lambda: param.redistribute(placements=[Replicate()]))
    if ctx.size == 2:
        for policy in ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"reshard_after_forward": False}):
            whole_tensors(ctx, sharded(**policy))
        whole_tensors(ctx, ShardedDataParallel(Net(), sharding_strategy="NO_SHARD"))
    # In the shards' own dtype, whatever the unit computes in.
    half = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert torch.equal(half.conv.weight.full_tensor(), Net().conv.weight)
    # What isn't a shard has no such attribute, and a program's own attribute is its own.
    for other in (torch.ones(3), nn.Parameter(torch.ones(3)), param * 2, copy.deepcopy(param), param.detach()):
        assert not any(hasattr(other, name) for name in ("full_tensor", "placements", "global_shape", "device_mesh"))
    other.placements = "mine"
    assert other.placements == "mine"
    del other.placements
    assert not hasattr(other, "placements")
    torch.overrides.get_overridable_functions()  # reads every attribute, for torch.compile
    param.grad = param.grad * 2  # the user's own gradient of a shard
    assert param.grad.full_tensor().shape == param.global_shape
    # Errors.
    bare = sharded(comm=ctx.communicator())
    assert torch.equal(bare.conv.weight.full_tensor(), Net().conv.weight)
    raises(InvalidUsage, "needs a process group", lambda: bare.conv.weight.device_mesh)
    raises(InvalidArgument, "is distributed already", lambda: fully_shard(nn.ParameterList([bare.conv.weight])))
    if ctx.size > 1:
        model = sharded()
        which = model.conv.weight if ctx.rank else model.small
        raises(CollectivesError, "don't make the same call", which.full_tensor)
        assert torch.equal(model.conv.weight.full_tensor(), Net().conv.weight)  # and on it goes


@pytest.mark.parametrize("ranks", [3, 2, 1])
def test_dtensors_calls(tmp_path, ranks):
    run(dtensor_calls, ranks, str(tmp_path / "store"))


# ---- torch.distributed.checkpoint.


class AppState(Stateful):
    """As in torch's tutorial."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = torchs.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        torchs.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


# What a program may hand to torch's save and load.
FORMS = {
    "app": lambda model, optimizer: {"app": AppState(model, optimizer)},
    "modules": lambda model, optimizer: {"model": model, "optim": optimizer},
    "shards": lambda model, optimizer: {"params": dict(model.named_parameters()), "optim": optimizer.state_dict()},
    "pieces": lambda model, optimizer: {
        "model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer),
    },
}  # fmt: skip


@over_gloo
def save_all(ctx, folder):
    model = sharded()
    optimizer = optimizer_of(adamw, model)
    train(model, optimizer)
    for name, form in FORMS.items():
        dcp.save(form(model, optimizer), checkpoint_id=f"{folder}/{name}")
        if name in ("shards", "pieces"):
            dcp.async_save(form(model, optimizer), checkpoint_id=f"{folder}/{name}_async").result()
    if "async_stager" in inspect.signature(dcp.async_save).parameters:  # torch 2.9 and newer
        stager = {"async_stager": BlockingAsyncStager()}
        dcp.async_save(FORMS["shards"](model, optimizer), checkpoint_id=f"{folder}/shards_staged", **stager).result()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(BaseException, match="flatten_state_dict=False can't take shards"):
        dcp.save(dict(model.named_parameters()), checkpoint_id=f"{folder}/unflattened", planner=planner)


@over_gloo
def load_all(ctx, folder):
    reference, optimizer = plain()
    want = list(torchs.get_state_dict(reference, optimizer))
    staged = ["shards_staged"] if "async_stager" in inspect.signature(dcp.async_save).parameters else []
    for name in (*FORMS, "shards_async", "pieces_async", *staged) if ctx.size > 1 else ("modules", "shards"):
        model = sharded(seed=9)
        ours = optimizer_of(adamw, model)
        train(model, ours, 1)  # so that there is state to load into
        for group in ours.param_groups:
            group["lr"] = 5.0
        state = FORMS[name.split("_")[0]](model, ours)
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        if "shards" in name:
            ours.load_state_dict(state["optim"])
            model.seen.copy_(reference.seen)
        elif "pieces" in name:
            collectives.sharded.set_model_state_dict(model, state["model"])
            collectives.sharded.set_optimizer_state_dict(model, ours, state["optim"])
        got = list(torchs.get_state_dict(model, ours, options=FULL))
        assert not differences(got, want), name
    train(model, ours, 1)
    train(reference, optimizer, 1)
    assert not differences(dict(model.state_dict()), dict(reference.state_dict())) or ctx.size == 3


def test_what_dcp_saves_is_whole(tmp_path):
    run(save_all, 2, str(tmp_path / "store"), str(tmp_path))
    for ranks in (3, 1):
        run(load_all, ranks, str(tmp_path / f"store{ranks}"), str(tmp_path))


# ---- An optimizer's own state dict.

RULES = {
    "adamw": adamw,
    "foreach": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "nadam": lambda params: torch.optim.NAdam(params, 0.01),
    "asgd": lambda params: torch.optim.ASGD(params, 0.01),
    "ours": lambda params: collectives.optim.AdamW(params, 0.01),
}


def loaded_by_pickle(given):
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    return torch.load(file)


def own_state_dicts(ctx):
    """Load an unsharded optimizer's state, and this optimizer's own, and go on training."""
    comm = ctx.communicator()
    for name, rule in RULES.items():
        reference = Net()
        theirs = optimizer_of(rule, reference)
        train(reference, theirs)
        want = copy.deepcopy(theirs.state_dict())
        before = dict(copy.deepcopy(reference).state_dict())
        train(reference, theirs, 1)
        for again in (lambda made: made, copy.deepcopy, loaded_by_pickle):
            model = sharded(comm=comm)
            model.load_state_dict(before)
            ours = optimizer_of(rule, model)
            ours.load_state_dict(copy.deepcopy(want))  # torch takes over the tensors
            ours.load_state_dict(again(ours.state_dict()))
            kept = [value for entries in ours.state.values() for value in entries.values()]
            assert {type(value) for value in kept if isinstance(value, torch.Tensor)} == {torch.Tensor}
            train(model, ours, 1)
            assert not differences(dict(model.state_dict()), dict(reference.state_dict())), name
    made = loaded_by_pickle(ours.state_dict())
    # A program's hooks may give state dicts another form.
    hooks = [
        ours.register_state_dict_post_hook(lambda _, state_dict: {"all": state_dict}),
        ours.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict["all"]),
    ]
    given = ours.state_dict()
    assert list(given) == ["all"]
    ours.load_state_dict(given)
    for hook in hooks:
        hook.remove()
    assert not differences(made["state"][0], loaded_by_pickle(ours.state_dict())["state"][0])
    return made


def refused(ctx, saved):
    """What is of other shards is refused by name at the call, and leaves the optimizer as it was."""
    for rule in (RULES["adamw"], RULES["ours"]):
        model = sharded(comm=ctx.communicator())
        optimizer = optimizer_of(rule, model)
        train(model, optimizer, 1)
        state = copy.deepcopy(optimizer.state_dict())
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        assert numbers == [number for group in state["param_groups"] for number in group["params"]]
        by_name = r"exp_avg of parameter \d+, emb.weight, has shape .*number of ranks"
        raises(InvalidArgument, by_name, functools.partial(optimizer.load_state_dict, saved))
        wrong = copy.deepcopy(state)
        wrong["state"][1]["exp_avg"] = torch.zeros(2, 2)
        raises(
            InvalidArgument,
            r"neither that of the parameter, \[11, 7\]",
            functools.partial(optimizer.load_state_dict, wrong),
        )
        assert not differences(
            [e["exp_avg"].detach() for e in optimizer.state_dict()["state"].values()],
            [e["exp_avg"].detach() for e in state["state"].values()],
        )
    # By place, where the shapes are equal: this rank's piece of another layer of the same shape.
    other = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(other, comm=ctx.communicator())
    optimizer = torch.optim.Adam(other.parameters(), 0.1)
    other(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    piece = get_optimizer_state_dict(other, optimizer)["state"]["0.weight"]["exp_avg"]
    state["state"][0]["exp_avg"] = piece
    optimizer.load_state_dict(state)
    if ctx.size > 1 and ctx.rank:
        state["state"][1]["exp_avg"] = piece
        raises(InvalidArgument, "exp_avg of parameter 1, 1.weight", lambda: optimizer.load_state_dict(state))

    # An optimizer of somebody else may have entries of any shape beside those.
    class Blocks(torch.optim.Adam):
        __module__ = "elsewhere"

    blocks = Blocks(other.parameters(), 0.1)
    state = optimizer.state_dict()
    for entries in state["state"].values():
        entries["absmax"] = torch.ones(3)
    blocks.load_state_dict(state)
    assert all(entries["absmax"].shape == (3,) for entries in blocks.state.values())


def test_optimizers_own_state_dicts():
    saved = run(own_state_dicts, 2)
    for ranks in (3, 1):
        run(refused, ranks, saved[0])


@over_gloo
def refuses_dtensors(ctx):
    model = sharded()
    optimizer = optimizer_of(adamw, model)
    state = plain()[1].state_dict()
    mesh = init_device_mesh("cpu", (ctx.size,))
    entry = state["state"][1]
    entry["exp_avg"] = DTensor.from_local(entry["exp_avg"], mesh, [Replicate()], run_check=False)
    raises(
        InvalidArgument, "is a DTensor: load it by set_optimizer_state_dict", lambda: optimizer.load_state_dict(state)
    )


def test_dtensors_go_by_set_optimizer_state_dict(tmp_path):
    run(refuses_dtensors, 2, str(tmp_path / "store"))


# ---- Averages of a model.


def with_norm():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def average(model, averaged):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)


def averages(ctx, folder):
    comm = ctx.communicator()
    ways = (
        {},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        {"avg_fn": lambda mean, new, n: mean * 0.9 + new * 0.1, "use_buffers": True},
    )
    for how in ways:
        reference = with_norm()
        want = AveragedModel(reference, **how)
        average(reference, want)
        model = with_norm()
        averaged = AveragedModel(model, **how)  # of the unsharded model
        for each in (model, averaged.module):
            fully_shard(each[0], comm=comm)
            fully_shard(each, comm=comm)
        average(model, averaged)
        assert not differences(dict(averaged.state_dict()), dict(want.state_dict())), how
        batches = [torch.randn(6, 5, generator=torch.Generator().manual_seed(step)) for step in range(3)]
        update_bn(batches, want)
        update_bn(batches, averaged)
        assert not differences(dict(averaged.state_dict()), dict(want.state_dict())), how
        save(f"{folder}/averaged", averaged, overwrite=True)
        again = AveragedModel(with_norm())
        fully_shard(again.module, comm=comm)
        load(f"{folder}/averaged", again)
        again.eval(), want.eval()
        assert torch.equal(again(batches[0]), want(batches[0]))  # with gradients, and no backward
        del averaged, again, model
    model = with_norm()
    fully_shard(model, comm=comm)
    raises(InvalidUsage, "make an AveragedModel of the unsharded model", lambda: AveragedModel(model))


def test_averages(tmp_path):
    run(averages, 2, str(tmp_path))


# ---- FSDP1.


def older_names(ctx):
    reference, theirs = plain()
    full = torchs.get_optimizer_state_dict(reference, theirs)
    model = ShardedDataParallel(
        Net(), comm=ctx.communicator(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential, nn.Conv1d})
    )
    fsdp = ShardedDataParallel

    def state_of(optimizer):
        return get_optimizer_state_dict(model, optimizer, full_state_dict=True)

    optimizer = optimizer_of(adamw, model)
    optimizer.load_state_dict(fsdp.shard_full_optim_state_dict(full, model, optim=optimizer))
    assert not differences(state_of(optimizer), full)
    pieces = fsdp.sharded_optim_state_dict(model, optimizer)
    again = optimizer_of(adamw, model)
    again.load_state_dict(fsdp.flatten_sharded_optim_state_dict(pieces, model, again))
    assert not differences(state_of(again), full)
    # Without an optimizer: one of model.parameters(), or of what is given.
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    for scatter in (False, True):
        again = optimizer_of(adamw, model)
        if scatter:
            local = fsdp.scatter_full_optim_state_dict(full if ctx.rank == 0 else None, model, groups)
        else:
            local = fsdp.shard_full_optim_state_dict(full, model, groups)
        again.load_state_dict(local)
        assert not differences(state_of(again), full)
    one = torch.optim.AdamW(reference.parameters(), 0.01)
    train(reference, one, 1)
    again = torch.optim.AdamW(model.parameters(), 0.01)
    again.load_state_dict(fsdp.shard_full_optim_state_dict(torchs.get_optimizer_state_dict(reference, one), model))
    assert not differences(state_of(again), torchs.get_optimizer_state_dict(reference, one))
    # By names and by numbers.
    for owner, of in ((reference, theirs), (model, optimizer)):
        named = fsdp.rekey_optim_state_dict(theirs.state_dict(), OptimStateKeyType.PARAM_NAME, owner, optim=of)
        assert not differences(named["state"], full["state"])
        numbered = fsdp.rekey_optim_state_dict(named, "PARAM_ID", owner, optim=of)
        assert not differences(numbered, theirs.state_dict())
    raises(
        InvalidArgument, "has elsewhere",
        lambda: fsdp.rekey_optim_state_dict(
            {"state": {"elsewhere": {}}, "param_groups": []}, OptimStateKeyType.PARAM_ID, model),
    )  # fmt: skip
    assert model.check_is_root() and not model.net.check_is_root() and not model.conv.check_is_root()
    assert model._fsdp_wrapped_module is model
    raises(InvalidUsage, "HookState", lambda: model.register_comm_hook(None, lambda *args: None))
    for name in ("flat_param", "_handle"):
        raises(AttributeError, re.escape("p.full_tensor() is a whole one"), lambda name=name: getattr(model, name))


def test_fsdp1s_older_names():
    run(older_names, 2)
