"""State dicts of sharded modules and of their optimizers: the unsharded ones' values, in and out, in all forms."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import collectives
from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage
from collectives.sharded import (
    MixedPrecisionPolicy,
    RaggedTensor,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from collectives.sharded.checkpointer import load, save
from collectives.sharded.managed_params import units_in
from collectives.sharded.state import unsharded_params
from tests.ddp.training import over_gloo, run
from tests.sharded.states import IDS, Net, differences, full_state_dict, optimizer_of, sharded, train

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def other_values(state):
    return {key: value + 1 if value.is_floating_point() else value for key, value in state.items()}


def one_unit(seed):
    """Return the model with other bounds of the shards than `sharded`'s."""
    return fully_shard(Net(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


@over_gloo
def models(ctx):
    want = dict(Net().state_dict())
    model = sharded()
    parent = nn.ModuleDict({"inside": model})  # not sharded itself
    got = model.state_dict()
    assert list(got) == list(want), "the order of keys is the module's, too"
    shards = {key: value for key, value in got.items() if isinstance(value, RaggedTensor)}
    assert want.keys() - shards.keys() == {"seen"}
    assert sum(value.to_local().numel() for value in shards.values()) < sum(value.numel() for value in want.values())
    whole = full_state_dict(model)
    assert not differences(dict(whole), want)
    assert whole["emb.weight"] is whole["head.weight"], "tied"
    assert not differences(dict(full_state_dict(parent)), {f"inside.{key}": value for key, value in want.items()})
    # Rank 0 alone, by all the names for it.
    alone = want if ctx.rank == 0 else {}
    for one in (
        full_state_dict(model, cpu_offload=True, rank0_only=True),
        get_model_state_dict(model, full_state_dict=True, rank0_only=True),
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
        torchs.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
    ):
        assert not differences(dict(one), alone)
    # A part of a unit alone.
    assert all(isinstance(value, RaggedTensor) for value in model.head.state_dict().values())
    model.conv.load_state_dict({"weight": torch.ones(3, 7, 3), "bias": torch.ones(3)})
    assert torch.equal(full_state_dict(model)["conv.weight"], torch.ones(3, 7, 3))
    model(IDS)  # stays gathered, for a backward that never comes
    assert all(isinstance(value, RaggedTensor) for value in model.conv.state_dict().values())
    model(IDS)
    model.conv.load_state_dict({"weight": torch.ones(3, 7, 3), "bias": torch.zeros(3)})
    assert not full_state_dict(model)["conv.bias"].any()
    # What is loaded: whole tensors, shards of other bounds, evenly sharded DTensors; by torch's functions, too.
    mesh = init_device_mesh("cpu", (ctx.size,))
    other = other_values(want)
    even = {key: distribute_tensor(v, mesh, [Shard(0)]) if v.dim() and key != "seen" else v for key, v in other.items()}
    bounds = one_unit(9)
    bounds.load_state_dict(other)
    pairs = zip(bounds.parameters(), model.parameters(), strict=True)
    assert any(a.placements != b.placements for a, b in pairs) == (ctx.size > 1)
    ways = {
        "whole": lambda m: m.load_state_dict(other),
        "assign": lambda m: m.load_state_dict(other, assign=True),
        "even": lambda m: m.load_state_dict(even),
        "other bounds": lambda m: m.load_state_dict(bounds.state_dict()),
        "ours": lambda m: set_model_state_dict(m, get_model_state_dict(bounds)),
        "rank 0": lambda m: set_model_state_dict(m, other if ctx.rank == 0 else {}, broadcast_from_rank0=True),
        "torch's": lambda m: torchs.set_model_state_dict(m, dict(other), options=FULL),
        "torch's, rank 0": lambda m: torchs.set_model_state_dict(
            m, dict(other) if ctx.rank == 0 else {}, options=FROM_RANK_0
        ),
        "torch's, shards": lambda m: torchs.set_model_state_dict(m, torchs.get_model_state_dict(bounds)),
    }
    for way, give in ways.items():
        again = sharded(5)
        params = list(again.parameters())
        give(again)
        assert not differences(dict(full_state_dict(again)), other), way
        assert all(a is b for a, b in zip(params, again.parameters(), strict=True)), way
        assert all(isinstance(param, RaggedTensor) for param in again.parameters()), way
        again(IDS).sum().backward()
    # By name.
    part = {"net.0.weight": want["net.0.weight"], "unknown": torch.ones(1)}
    result = model.load_state_dict(part, strict=False)
    assert result.unexpected_keys == ["unknown"] and "emb.weight" in result.missing_keys
    wrong = {**want, "conv.weight": torch.zeros(2, 2), "net.0.bias": torch.zeros(4)}
    for give in (
        model.load_state_dict, lambda state: torchs.set_model_state_dict(model, state, options=FULL),
        lambda state: torchs.set_model_state_dict(model, state, options=FROM_RANK_0),
        lambda state: set_model_state_dict(model, state if ctx.rank == 0 else {}, broadcast_from_rank0=True),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"mismatch for net.0.bias(.|\n)*conv.weight.*\[2, 2\].*\[3, 7, 3\]"):
            give(dict(wrong))
    frozen = sharded()
    frozen.net.requires_grad_(False)
    got = get_model_state_dict(frozen, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    assert want.keys() - got.keys() == {key for key in want if key.startswith("net.")}
    with pytest.raises(InvalidArgument, match="needs full_state_dict"):
        get_model_state_dict(model, rank0_only=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_models(tmp_path, ranks):
    run(models, ranks, str(tmp_path / "store"))


class Own(torch.optim.Optimizer):
    """A user's optimizer, with a number in a 0-dim tensor, one in a 1-element tensor, and a Python number."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["t"], state["u"], state["n"] = torch.zeros(()), torch.zeros(1), 0
                        state["m"] = torch.zeros_like(param)
                    state["t"] += 1
                    state["u"] += 1
                    state["n"] += 1
                    state["m"].lerp_(param.grad, 0.1)
                    param.sub_(state["m"] * (group["lr"] / (1 + float(state["t"])) * float(state["u"])))


RULES = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "amsgrad": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, 0.01),
    "asgd": lambda params: torch.optim.ASGD(params, 0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(
        [{**group, "params": [param for param in group["params"] if param.numel()]} for group in groups], 0.01
    ),
    "our adamw": lambda params: collectives.optim.AdamW(params, 0.01),
    "own": Own,
}


@over_gloo
def optimizers(ctx, rule):
    make = RULES[rule]
    plain = Net()
    reference = optimizer_of(make, plain)
    train(plain, reference)
    want = torchs.get_optimizer_state_dict(plain, reference)
    model = sharded()
    optimizer = optimizer_of(make, model)
    train(model, optimizer)
    got = get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    assert got.keys() == want.keys() and not differences(got["param_groups"], want["param_groups"])
    exact = rule != "adafactor"  # its means are sums over several ranks
    assert not exact or not differences(got, want)
    alone = got if ctx.rank == 0 else {}
    for options in ({"rank0_only": True, "full_state_dict": True},
                    {"options": StateDictOptions(full_state_dict=True, cpu_offload=True)}):  # fmt: skip
        assert not differences(get_optimizer_state_dict(model, optimizer, **options), alone)
    if optimizer.state:
        assert not differences(torchs.get_optimizer_state_dict(model, optimizer, options=FULL), got)
    mesh = init_device_mesh("cpu", (ctx.size,))
    even = copy.deepcopy(got)
    for name, entries in even["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == want["state"][name][key].shape:
                entries[key] = distribute_tensor(value, mesh, [Shard(0)])
    shards = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    own = copy.deepcopy(optimizer.state_dict())
    by_number = reference.state_dict() if exact else own
    torchs_own = copy.deepcopy(torchs.get_optimizer_state_dict(model, optimizer)) if optimizer.state else None
    loads = {
        "whole": lambda m, o: set_optimizer_state_dict(m, o, got),
        "rank 0": lambda m, o: set_optimizer_state_dict(m, o, alone, broadcast_from_rank0=True),
        "numbers": lambda m, o: set_optimizer_state_dict(m, o, copy.deepcopy(by_number)),
        "shards": lambda m, o: set_optimizer_state_dict(m, o, shards),
        "its own": lambda m, o: o.load_state_dict(own),
    }
    if optimizer.state:  # torch's functions raise where there is none
        loads |= {
            "torch's": lambda m, o: torchs.set_optimizer_state_dict(m, o, torchs_own),
            "torch's, whole": lambda m, o: torchs.set_optimizer_state_dict(m, o, copy.deepcopy(got), options=FULL),
            "torch's, rank 0": lambda m, o: torchs.set_optimizer_state_dict(
                m, o, copy.deepcopy(alone), options=FROM_RANK_0
            ),
        }
    if rule in ("momentum", "amsgrad", "fused"):
        loads["even"] = lambda m, o: set_optimizer_state_dict(m, o, even)
        loads["unsharded"] = lambda m, o: o.load_state_dict(by_number)
    before = full_state_dict(model)
    train(model, optimizer, 1)
    after = dict(full_state_dict(model))
    for way, give in loads.items():
        again = one_unit(7)
        other = optimizer_of(make, again)
        other.param_groups[0]["lr"] = 5.0
        give(again, other)
        again.load_state_dict(before)
        train(again, other, 1)
        if exact:
            assert not differences(dict(full_state_dict(again)), after), way
        else:
            torch.testing.assert_close(dict(full_state_dict(again)), after)
    return True


@pytest.mark.parametrize("rule", RULES)
def test_optimizers(tmp_path, rule):
    run(optimizers, 2, str(tmp_path / "store"), rule)


@over_gloo
def refusals(ctx):
    model = sharded()
    optimizer = optimizer_of(RULES["amsgrad"], model)
    train(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    errors = []

    def refused(error, call):
        with pytest.raises(error) as caught:
            call()
        errors.append(str(caught.value))

    wrong = {**state["state"], "conv.weight": {"exp_avg": torch.zeros(4, 4)}}
    shorter = {**state, "param_groups": state["param_groups"][:1]}
    for bad in (shorter, {**state, "state": {"elsewhere": {}}}, {**state, "state": wrong}, {}):
        refused(InvalidArgument, lambda: set_optimizer_state_dict(model, optimizer, bad))  # noqa: B023
    assert not differences(get_optimizer_state_dict(model, optimizer, full_state_dict=True), state)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    refused(InvalidUsage, lambda: get_optimizer_state_dict(model, stranger))
    optimizer.state[model.conv.weight]["blocks"] = torch.ones(3)
    refused(InvalidArgument, lambda: get_optimizer_state_dict(model, optimizer))
    return errors


def test_refused(tmp_path):
    wanted = [
        "has no scale", "model has no elsewhere", "exp_avg of conv.weight: its shape is [4, 4]",
        '"state" and "param_groups"', "not the model's", "blocks of conv.weight is a plain tensor [3]",
    ]  # fmt: skip
    for errors in run(refusals, 2, str(tmp_path / "store")):
        assert len(errors) == len(wanted)
        for text, want in zip(errors, wanted, strict=True):
            assert want in text


@over_gloo
def pickled(ctx, data):
    """A job's pickled shards are another job's where it has as many ranks, and are refused where it has not."""
    model = sharded(3 if data is None else 4)
    if data is None:
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        return stream.getvalue()
    state = torch.load(io.BytesIO(data[min(ctx.rank, 1)]))
    if ctx.size == 2:
        model.load_state_dict(state)
        assert not differences(dict(full_state_dict(model)), dict(Net().state_dict()))
    else:
        with pytest.raises(InvalidArgument, match="one of 2 shards of another job"):
            model.load_state_dict(state)
    return None


def test_pickled_shards(tmp_path):
    data = run(pickled, 2, str(tmp_path / "store"), None)
    for ranks in (2, 1):
        run(pickled, ranks, str(tmp_path / f"store {ranks}"), data)


@over_gloo
def alone(ctx):
    """Rank 0 makes a full state dict, and the other rank goes away."""
    model = sharded()
    train(model, optimizer_of(RULES["momentum"], model))
    if ctx.rank == 0:
        with pytest.raises(CollectivesError, match="in state_dict.. of [a-z0-9.]*: all ranks must call it"):
            full_state_dict(model)
    units_in(model)[0].world.close()


def test_a_rank_alone_says_what_it_waits_in(tmp_path):
    run(alone, 2, str(tmp_path / "store"))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 30)
        self.memory = nn.LSTM(30, 8)
        self.last = nn.Linear(8, 40)
        self.tied = nn.Linear(40, 30)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(30)

    def forward(self, x):
        return self.tied(self.last(self.memory(self.norm(self.first(x)))[0]))


@over_gloo
def from_meta(ctx, folder):
    torch.manual_seed(1)
    plain = Deep()
    want = dict(plain.state_dict())

    def made(parts=lambda model: [model.memory, [model.last, model.norm]]):
        with torch.device("meta"):
            model = Deep()
        for part in (*parts(model), model):
            fully_shard(part)
        return model

    def to_empty(model):
        model.to_empty(device="cpu")
        model.load_state_dict(want)

    def given():  # what is assigned is the module's then
        return copy.deepcopy(want) if ctx.rank == 0 else {}

    first = made(lambda model: [model.last])
    to_empty(first)
    save(f"{folder}/checkpoint", first)
    ways = {
        "assign": lambda model: model.load_state_dict(copy.deepcopy(want), assign=True),
        "ours": lambda model: set_model_state_dict(model, copy.deepcopy(want)),
        "rank 0": lambda model: set_model_state_dict(model, given(), broadcast_from_rank0=True),
        "torch's": lambda model: torchs.set_model_state_dict(model, copy.deepcopy(want), options=FULL),
        "torch's, rank 0": lambda model: torchs.set_model_state_dict(model, given(), options=FROM_RANK_0),
        "load": lambda model: load(f"{folder}/checkpoint", model),
    }
    for way, begin in ways.items():
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        begin(model)
        assert not differences(dict(full_state_dict(model)), want), way
        model(torch.ones(4, 40)).sum().backward()
        optimizer.step()
        assert "first.weight" in str(differences(dict(full_state_dict(model)), want)), way
    with pytest.raises(InvalidUsage, match="last.weight is on the meta device and not in"):
        made().load_state_dict({key: v for key, v in want.items() if key != "last.weight"}, strict=False, assign=True)


def test_from_the_meta_device(tmp_path):
    run(from_meta, 2, str(tmp_path / "store"), str(tmp_path))


@over_gloo
def whole_parameters(ctx):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(mp_policy=policy)
    want = dict(Net().named_parameters())
    model(IDS).float().square().mean().backward()
    shards = list(model.parameters())
    grads = [param.grad.full_tensor() for param in shards]
    with unsharded_params(units_in(model), with_grads=True):
        held = dict(model.named_parameters())
        assert not differences({name: param.detach() for name, param in held.items()},
                               {name: param.detach() for name, param in want.items()})  # fmt: skip
        assert all(type(param) is nn.Parameter for param in held.values()) and model.head.weight is model.emb.weight
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert torch.equal(param.grad, grad)
        assert not differences(dict(model.state_dict()), dict(Net().state_dict()))
        with torch.no_grad():
            model.conv.weight.fill_(2.0)
            model.conv.weight.grad.fill_(3.0)
    assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
    assert torch.equal(model.conv.weight.full_tensor(), torch.full((3, 7, 3), 2.0))
    assert torch.equal(model.conv.weight.grad.full_tensor(), torch.full((3, 7, 3), 3.0))
    with unsharded_params(units_in(model), writeback=False, rank0_only=True, offload_to_cpu=True):
        assert isinstance(model.conv.weight, RaggedTensor) == (ctx.rank != 0)
        with torch.no_grad():
            model.conv.weight.fill_(5.0) if ctx.rank == 0 else None
    assert torch.equal(model.conv.weight.full_tensor(), torch.full((3, 7, 3), 2.0))
    with pytest.raises(ZeroDivisionError), unsharded_params(units_in(model)):
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
    with pytest.raises(InvalidArgument, match="writeback=False"), unsharded_params(units_in(model), rank0_only=True):
        pass
    # A forward inside computes with them.
    other = sharded()
    with unsharded_params(units_in(other), writeback=False):
        nn.init.zeros_(other.emb.weight)
        with torch.no_grad():
            assert torch.equal(other(IDS), torch.ones(11, 11))
        with pytest.raises(InvalidUsage, match="summon_full_params"):
            other(IDS)
    assert not torch.equal(other(IDS), torch.ones(11, 11))
    # A copy of a part has shards of its own, and loads.
    part = copy.deepcopy(model.conv)
    part.load_state_dict({"weight": torch.ones(3, 7, 3), "bias": torch.ones(3)})
    assert torch.equal(part.weight.full_tensor(), torch.ones(3, 7, 3))
    assert torch.equal(model.conv.weight.full_tensor(), torch.full((3, 7, 3), 2.0))


def test_whole_parameters(tmp_path):
    run(whole_parameters, 2, str(tmp_path / "store"))


@over_gloo
def replicas(ctx, folder):
    """Replicas and shards on a 2-d mesh: all forms, to and from a one-dimensional mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    optimizer = optimizer_of(RULES["amsgrad"], model)
    train(model, optimizer)
    want = [dict(full_state_dict(model)), get_optimizer_state_dict(model, optimizer, full_state_dict=True)]
    save(f"{folder}/checkpoint", model, optimizer)
    shards = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    for way in ("load", "shards"):
        for seed, where in ((5, mesh), (6, init_device_mesh("cpu", (4,)))):
            again = sharded(seed, mesh=where)
            other = optimizer_of(RULES["amsgrad"], again)
            if way == "load":
                load(f"{folder}/checkpoint", again, other)
            else:
                again.load_state_dict(model.state_dict())
                set_optimizer_state_dict(again, other, shards)
            got = [dict(full_state_dict(again)), get_optimizer_state_dict(again, other, full_state_dict=True)]
            assert not differences(got, want), (way, seed)


def test_replicas(tmp_path):
    run(replicas, 4, str(tmp_path / "store"), str(tmp_path))
