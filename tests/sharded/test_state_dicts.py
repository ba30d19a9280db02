"""State dicts of sharded modules equal the unsharded module's, saved and loaded."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs_get
from torch.distributed.fsdp import ShardingStrategy as TorchsStrategy

import collectives
from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage
from collectives.sharded import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    ShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    materialize,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from collectives.sharded.fsdp1 import state_dict_type as settings
from collectives.sharded.state.shard_tensor import ShardTensor
from tests.ddp.training import run
from tests.ranks import run_ranks
from tests.sharded.states import IDS, Net, differences, optimizer_of, sharded, train

RULES = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "amsgrad": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "our adamw": lambda params: collectives.optim.AdamW(params, 0.01),
}
PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def model_both_ways(ctx):
    comm = ctx.communicator()
    want = dict(Net().state_dict())
    strategies = [each for each in ShardingStrategy if "HYBRID" not in each.name]
    for how in (
        *({"sharding_strategy": each} for each in (*strategies, TorchsStrategy.SHARD_GRAD_OP, "NO_SHARD")),
        {"mixed_precision": PRECISION},
    ):  # fmt: skip
        if "mixed_precision" in how:
            model = sharded(comm=comm, mp_policy=PRECISION)
        else:
            model = ShardedDataParallel(Net(), comm=comm, **how)
        parent = nn.ModuleDict({"inside": model})  # not sharded itself
        got = model.state_dict()
        assert list(got) == list(Net().state_dict()), "the order of keys is the module's, too"
        assert not differences(dict(got), want), how
        assert not differences(dict(parent.state_dict()), {f"inside.{key}": value for key, value in want.items()})
        assert got["emb.weight"].data_ptr() == got["head.weight"].data_ptr()
        assert len({value.untyped_storage().data_ptr() for key, value in got.items() if value.numel()}) == len(got) - 2
        if ctx.rank == 0:
            model.state_dict()  # alone: helped by what the others do next
        model(IDS).sum().backward()
        model.unshard()
        other = {key: value + 1 if value.is_floating_point() else value for key, value in want.items()}
        parent.load_state_dict({f"inside.{key}": value for key, value in other.items()})
        assert not differences(dict(model.state_dict()), other), how
        part = {"net.0.weight": want["net.0.weight"], "unknown": torch.ones(1)}
        result = model.load_state_dict(part, strict=False, assign=ctx.size == 1)
        assert result.unexpected_keys == ["unknown"] and "emb.weight" in result.missing_keys
        other["net.0.weight"] = want["net.0.weight"]
        assert not differences(dict(model.state_dict()), other), how
        with pytest.raises(RuntimeError, match=r"size mismatch for conv.weight.*\[2, 2\].*\[3, 7, 3\]"):
            model.load_state_dict({**want, "conv.weight": torch.zeros(2, 2)})
        assert all(type(param) is nn.Parameter for param in model.parameters())
        shards = get_model_state_dict(model)
        assert sum(value.to_local().numel() for value in shards.values() if isinstance(value, ShardTensor)) == sum(
            param.numel() for name, param in model.named_parameters(remove_duplicate=False)
        )
        with pytest.raises(InvalidUsage, match="only copying and checkpoints"):
            shards["emb.weight"] + 1
        model.load_state_dict(want)
        # What is returned in shards views the memory; clones don't.
        assert torch.equal(shards["small"].to_local(), torch.ones_like(shards["small"].to_local()))
        model.apply(lambda part: nn.init.ones_(part.weight) if getattr(part, "weight", None) is not None else None)
        assert torch.equal(model.state_dict()["conv.weight"], torch.ones(3, 7, 3))
        set_model_state_dict(model, want if ctx.rank == 0 else {}, broadcast_from_rank0=True)
        assert not differences(dict(model.state_dict()), want), how
    # Rank 0 alone, by all the names for it.
    alone = [
        lambda: get_model_state_dict(model, full_state_dict=True, rank0_only=True),
        lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
    ]
    for kind in (StateDictType.FULL_STATE_DICT, "FULL_STATE_DICT"):
        with settings.state_dict_type(model, kind, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            alone.append(dict(model.state_dict()).copy)
    for give in alone:
        assert not differences(dict(give()), want if ctx.rank == 0 else {})
    with settings.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert isinstance(model.state_dict()["emb.weight"], ShardTensor)
    assert not differences(dict(model.state_dict()), want)
    frozen = Net()
    frozen.conv.requires_grad_(False)
    fully_shard(frozen, comm=comm)
    got = get_model_state_dict(frozen, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    assert want.keys() - got.keys() == {"conv.weight", "conv.bias"}


def forward_without_backward(ctx):
    """A rank makes a state dict, and another one a forward, after a forward whose backward never comes."""
    model = sharded(comm=ctx.communicator().split(0))
    model(IDS)
    if ctx.rank == 0:
        model.state_dict()  # the other rank helps
    model(IDS).sum().backward()
    return True


def another_module_after_it(ctx):
    """The forward without a backward was that of another module on the same communicator, on one rank only."""
    comm = ctx.communicator().split(0)
    before = sharded(comm=comm)
    before(IDS)
    before._scheduler.agreement.follower.is_unfinished = ctx.rank == 0
    model = sharded(comm=comm)
    if ctx.rank == 0:
        model.state_dict()
    model(IDS).sum().backward()
    return before._scheduler.agreement.follower.is_unfinished


def test_a_state_dict_after_a_forward_without_a_backward():
    assert run_ranks(forward_without_backward, 2) == [True, True]
    assert run_ranks(another_module_after_it, 2) == [False, False]


def test_models(tmp_path):
    for ranks in (2, 1):
        run(model_both_ways, ranks)


def optimizers_both_ways(ctx):
    comm = ctx.communicator()
    for rule, make in RULES.items():
        plain = Net()
        reference = optimizer_of(make, plain)
        train(plain, reference)
        want = torchs_get(plain, reference)
        model = sharded(comm=comm)
        optimizer = optimizer_of(make, model)
        train(model, optimizer)
        assert not differences(get_optimizer_state_dict(model, optimizer, full_state_dict=True), want), rule
        alone = want if ctx.rank == 0 else {}
        for options in ({"rank0_only": True, "full_state_dict": True},
                        {"options": StateDictOptions(full_state_dict=True, cpu_offload=True)}):  # fmt: skip
            assert not differences(get_optimizer_state_dict(model, optimizer, **options), alone), rule
        assert not differences(settings.full_optim_state_dict(model, optimizer), alone)
        config = FullOptimStateDictConfig(rank0_only=True)
        with settings.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config):
            assert not differences(settings.optim_state_dict(model, optimizer), alone)
            to_load = settings.optim_state_dict_to_load(model, optimizer, alone)
        loads = (
            lambda m, o: set_optimizer_state_dict(m, o, want),  # noqa: B023
            lambda m, o: set_optimizer_state_dict(m, o, alone, broadcast_from_rank0=True),  # noqa: B023
            lambda m, o: set_optimizer_state_dict(m, o, reference.state_dict()),  # noqa: B023
            lambda m, o: set_optimizer_state_dict(m, o, get_optimizer_state_dict(model, optimizer)),  # noqa: B023
            lambda m, o: o.load_state_dict(to_load),  # noqa: B023
            lambda m, o: o.load_state_dict(settings.scatter_full_optim_state_dict(alone, m, optim=o)),  # noqa: B023
        )
        last = dict(plain.state_dict())
        for load in loads:
            again = sharded(comm=comm)
            other = optimizer_of(make, again)
            other.param_groups[0]["lr"] = 5.0
            load(again, other)
            again.load_state_dict(last)
            assert not differences(get_optimizer_state_dict(again, other, full_state_dict=True), want), rule
        train(plain, reference, 1)
        train(again, other, 1)
        assert not differences(dict(again.state_dict()), dict(plain.state_dict())), rule
    errors = []
    shorter = {**want, "param_groups": want["param_groups"][:1]}
    wrong = {**want["state"], "conv.weight": {"exp_avg": torch.zeros(4, 4)}}
    for bad in (shorter, {**want, "state": {"elsewhere": {}}}, {**want, "state": wrong}, {}):
        with pytest.raises(InvalidArgument) as caught:
            set_optimizer_state_dict(again, other, bad)
        errors.append(str(caught.value))
    if ctx.size > 1:
        with pytest.raises(CollectivesError) as caught:
            if ctx.rank == 0:
                get_optimizer_state_dict(again, other, full_state_dict=True)
            else:
                again(IDS).sum().backward()
        errors.append(str(caught.value))
        train(again, other, 1)  # and on it goes
    return errors


def test_optimizers():
    wanted = ["it has none of", "the model has no elsewhere", "exp_avg of conv.weight", '"state" and "param_groups"',
              "don't make the same call (rank 0 get_optimizer_state_dict() | rank 1 reduces "]  # fmt: skip
    for errors in run(optimizers_both_ways, 2):
        assert len(errors) == len(wanted)
        for text, want in zip(errors, wanted, strict=True):
            assert want in text


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


def reset(model):
    torch.manual_seed(1)
    for each in model.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()


def from_meta(ctx):
    comm = ctx.communicator()
    plain = Deep()
    reset(plain)
    want = dict(plain.state_dict())

    def made():
        with torch.device("meta"):
            model = Deep()
        for part in (model.memory, model.last, model):
            fully_shard(part, comm=comm)
        return model

    def init(each):
        each.to_empty(device="cpu", recurse=False)
        each.reset_parameters()

    def by_fsdp2(model):
        model.to_empty(device="cpu")
        reset(model)

    ways = {
        "materialize": materialize,
        "param_init_fn": lambda model: materialize(model, param_init_fn=init),
        "to_empty": by_fsdp2,
        "load_state_dict": lambda model: model.load_state_dict(want),
        "assign": lambda model: model.load_state_dict(want, assign=True),
        "rank 0": lambda model: set_model_state_dict(model, want if ctx.rank == 0 else {}, broadcast_from_rank0=True),
    }
    for way, begin in ways.items():
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if way != "to_empty" else None
        with pytest.raises(InvalidArgument, match="on the meta device"):
            model(torch.ones(4, 40))
        torch.manual_seed(1)
        begin(model)
        assert not differences(dict(model.state_dict()), want), way
        model(torch.ones(4, 40)).sum().backward()
        if optimizer is not None:
            optimizer.step()
            assert differences(dict(model.state_dict()), want), way
    with pytest.raises(InvalidUsage, match="first.weight is on the meta|first.weight of Deep is on the meta"):
        made().first.reset_parameters()
    with pytest.raises(InvalidUsage, match="was on the meta device and is not in"):
        made().load_state_dict({key: value for key, value in want.items() if key != "last.weight"}, strict=False)
    with pytest.raises(InvalidUsage, match=r"no reset_parameters\(\)"):
        materialize(sharded(comm=comm, device="meta"))
    with pytest.raises(InvalidUsage, match="left on the meta device"):
        materialize(made(), param_init_fn=lambda each: None)


def test_from_the_meta_device():
    run(from_meta, 2)
