"""ShardedDataParallel, FSDP1's interface: bits as DDP in all strategies, and what its arguments and methods do."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp import ShardingStrategy as Theirs

import collectives
from collectives.errors import CollectivesError
from collectives.sharded import (
    CPUOffload,
    CustomPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ModuleWrapPolicy,
    RaggedTensor,
    ShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.sharded.training import RULES, by_ddp, full, same, steps_of

STRATEGIES = list(ShardingStrategy)
LINEARS = ModuleWrapPolicy({nn.Linear})


def sharded(model=None, **how):
    return ShardedDataParallel(make_model() if model is None else model, **{"auto_wrap_policy": LINEARS, **how})


def check(function, tmp_path, ranks=2):
    """Run checks that return, by name, what is wrong."""
    for rank, found in enumerate(run(function, ranks, str(tmp_path / "store"))):
        assert found and not {name: wrong for name, wrong in found.items() if wrong}, rank


# ---- Strategies.


@over_gloo
def train_all_ways(ctx, rules):
    found = {}
    for rule in rules:
        expected, losses = by_ddp(make_model, rule, ctx.rank, 6)
        for strategy in STRATEGIES:
            model = sharded(sharding_strategy=strategy)
            got = steps_of(model, RULES[rule](model.parameters()), 6, ctx.rank)
            found[rule, strategy.name] = same(full(model), expected), got == losses
        model = make_model()
        for each in (model[0], model[2], model[4]):
            fully_shard(each, reshard_after_forward=2 if ctx.size == 4 else True)
        fully_shard(model)
        got = steps_of(model, RULES[rule](model.parameters()), 6, ctx.rank)
        found[rule, "fully_shard"] = same(full(model), expected), got == losses
    return found


@pytest.mark.parametrize(("ranks", "rules"), [(2, list(RULES)), (3, ["adamw, foreach"]), (4, ["adamw", "our sgd"])])
def test_bit_for_bit(ranks, rules, tmp_path):
    for rank, found in enumerate(run(train_all_ways, ranks, str(tmp_path / "store"), rules)):
        assert len(found) == len(rules) * (len(STRATEGIES) + 1)
        for way, (differing, same_losses) in found.items():
            assert not differing and same_losses, (rank, way, differing)


def test_strategies_are_torchs():
    for strategy in Theirs:
        assert ShardingStrategy(strategy).name == strategy.name


@over_gloo
def hybrid(ctx):
    found = {}
    expected, _ = by_ddp(make_model, "adamw", ctx.rank, 5)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pair = groups[ctx.rank // 2], groups[2 + ctx.rank % 2]
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        for where in ({"process_group": pair}, {"device_mesh": mesh}):
            model = sharded(sharding_strategy=strategy, **where)
            halves = sum(param.to_local().numel() for param in model.parameters())
            steps_of(model, RULES["adamw"](model.parameters()), 5, ctx.rank)
            found[strategy, str(where.keys())] = same(full(model), expected)
            total = sum(param.numel() for param in make_model().parameters())
            found[strategy, str(where.keys()), "half of it"] = [] if abs(halves - total / 2) < 100 else [halves, total]
    return found


def test_hybrid(tmp_path):
    check(hybrid, tmp_path, 4)


# ---- Arguments.


class Own(nn.Module):
    """A class that is to compute in fp32."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        return torch.addcmul(self.mean, x, self.weight)


def precision(ctx):
    found = {}
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), Own(8), nn.Linear(8, 5))
    low._module_classes_to_ignore = [*low._module_classes_to_ignore, Own]
    seen = []
    model = sharded(model, mixed_precision=low)
    for each in model:
        each.register_forward_hook(lambda m, args, out: seen.append((type(m).__name__, m.weight.dtype, out.dtype)))
    steps_of(model, RULES["adamw"](model.parameters()), 1, ctx.rank)
    half, whole = torch.bfloat16, torch.float32
    found["exempt classes"] = [] if seen == [
        ("Linear", half, half), ("BatchNorm1d", whole, whole), ("Own", whole, whole), ("Linear", half, half),
    ] else seen  # fmt: skip
    found["their buffers"] = [n for n, b in model.named_buffers() if b.is_floating_point() and b.dtype != whole]
    found["parameters"] = [n for n, p in model.named_parameters() if p.dtype != whole or p.grad.dtype != whole]

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(12, 5)
            self.register_buffer("scale", torch.ones(5))

        def forward(self, x):
            return self.inner(x) * self.scale

    model = sharded(Holder(), mixed_precision=MixedPrecision(buffer_dtype=half, cast_forward_inputs=False))
    found["buffers"] = [] if model.scale.dtype == half and model.inner.weight.dtype == whole else [model.scale.dtype]
    return found


def settings_of_modules(ctx):
    """CustomPolicy's settings of one module; ignored modules and parameters; offloading."""
    found = {}
    own = {"sharding_strategy": Theirs.NO_SHARD, "mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}
    model = make_model()
    special = model[2]
    policy = CustomPolicy(lambda module: own if module is special else isinstance(module, nn.Linear))
    model = sharded(model, auto_wrap_policy=policy, ignored_states=[model[4].bias], cpu_offload=CPUOffload(True))
    found["own strategy"] = [] if model[2].weight.to_local().shape == (30, 40) else [model[2].weight.to_local().shape]
    found["own precision"] = [] if model[2]._sharded_unit.mp_policy.reduce_dtype == torch.bfloat16 else ["fp32"]
    found["others"] = [] if model[0]._sharded_unit.mp_policy.reduce_dtype is None else ["bf16"]
    found["ignored"] = [] if type(model[4].bias) is nn.Parameter else [type(model[4].bias)]
    model(batch(0, ctx.rank)[0]).sum().backward()
    found["gradients"] = [n for n, p in model.named_parameters() if p.grad is None]
    model = make_model()
    skipped = model[2]
    sharded(model, ignored_modules=[skipped])
    found["ignored modules"] = [n for n, p in skipped.named_parameters() if isinstance(p, RaggedTensor)]
    return found


def values(ctx):
    """Rank 0's values for all ranks, also where the others are on the meta device."""
    found = {}
    for meta in (False, True):
        torch.manual_seed(ctx.rank)
        with torch.device("meta" if meta and ctx.rank else "cpu"):
            model = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
        if ctx.rank == 0:
            model[1].running_mean.fill_(5)
            expected = {name: value.clone() for name, value in model.state_dict().items()}
        ours = sharded(
            model, sync_module_states=True, param_init_fn=lambda m: m.to_empty(device="cpu", recurse=False)
        ).state_dict()
        if ctx.rank == 0:
            found["rank 0's", meta] = same(ours, expected)
        sums = [value.sum().item() for value in ours.values()]
        every = [None] * ctx.size
        dist.all_gather_object(every, sums)
        found["on all ranks", meta] = [] if len(set(map(tuple, every))) == 1 else every
    return found


# ---- Methods.


def methods(ctx):
    found = {}
    model = sharded()
    found["module"] = [] if model.module is model else [model.module]
    found["check_is_root"] = [] if model.check_is_root() and not model[0].check_is_root() else ["root"]
    modules = ShardedDataParallel.fsdp_modules(model)
    found["fsdp_modules"] = [] if modules == [model, *model[::2]] else modules
    roots = ShardedDataParallel.fsdp_modules(nn.ModuleList([model, nn.Linear(2, 2)]), root_only=True)
    found["roots"] = [] if roots == [model] else roots
    for name in ("flat_param", "_handle"):
        with pytest.raises(AttributeError, match="there is no flat parameter"):
            getattr(model, name)
    expected, losses = by_ddp(make_model, "adamw", ctx.rank, 4, micro=3)
    got = steps_of(model, RULES["adamw"](model.parameters()), 4, ctx.rank, micro=3)
    found["no_sync"] = [n for n, value in full(model).items() if not torch.allclose(value, expected[n], 1e-4, 1e-5)]
    found["losses"] = [] if torch.allclose(torch.tensor(got), torch.tensor(losses), 1e-4) else [got, losses]
    theirs = make_model()
    ddp = nn.parallel.DistributedDataParallel(theirs)
    ddp.register_comm_hook(None, collectives.fused_allreduce)
    ours = sharded()
    norms = []
    for each in (ddp, ours):
        x, y = batch(7, ctx.rank)
        nn.functional.cross_entropy(each(x), y).backward()
        norms.append(float(ours.clip_grad_norm_(1) if each is ours else nn.utils.clip_grad_norm_(each.parameters(), 1)))
    found["clip_grad_norm_"] = [] if abs(norms[0] - norms[1]) < 1e-5 else norms
    return found


def summoned(ctx):
    found = {}
    model = sharded()
    shapes = {name: param.shape for name, param in make_model().named_parameters()}
    model(batch(0, ctx.rank)[0]).sum().backward()
    with ShardedDataParallel.summon_full_params(model, with_grads=True):
        found["whole"] = [
            name for name, param in model.named_parameters()
            if type(param) is not nn.Parameter or param.shape != shapes[name] or param.grad.shape != shapes[name]
        ]  # fmt: skip
        with torch.no_grad():
            model[0].weight.fill_(3)
    found["written"] = [] if (model[0].weight.full_tensor() == 3).all() else ["lost"]
    with ShardedDataParallel.summon_full_params(model, writeback=False), torch.no_grad():
        model[0].weight.fill_(4)
    found["not written"] = [] if (model[0].weight.full_tensor() == 3).all() else ["written"]
    with ShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        found["rank 0"] = [] if isinstance(model[0].weight, RaggedTensor) == (ctx.rank > 0) else [ctx.rank]
    with ShardedDataParallel.summon_full_params(model, recurse=False):
        found["not those inside"] = [] if isinstance(model[0].weight, RaggedTensor) else ["gathered"]
    with ShardedDataParallel.summon_full_params(model):
        pass
    model(batch(1, ctx.rank)[0]).sum().backward()
    return found


def state_dicts(ctx):
    fsdp = ShardedDataParallel
    found = {}
    model = sharded()
    optimizer = RULES["adamw"](model.parameters())
    steps_of(model, optimizer, 2, ctx.rank)
    whole = model.state_dict()
    found["full"] = [name for name, value in whole.items() if type(value) is not torch.Tensor]
    found["its values"] = same(whole, full(model))
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT, *config):
        streamed = model.state_dict()
        state = fsdp.optim_state_dict(model, optimizer)
        found["rank 0 only"] = [] if bool(streamed) == bool(state) == (ctx.rank == 0) else [len(streamed), len(state)]
        if ctx.rank == 0:
            found["streamed"] = same(streamed, whole)
        other = sharded()
        fresh = RULES["adamw"](other.parameters())
        found["another model"] = [] if not fsdp.get_state_dict_type(other).state_dict_config.rank0_only else ["set"]
        fsdp.set_state_dict_type(other, StateDictType.FULL_STATE_DICT, *config)
        fresh.load_state_dict(fsdp.optim_state_dict_to_load(other, fresh, state))
    fsdp.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
    other.load_state_dict(whole)
    going_on(ctx, found, "full", model, optimizer, other, fresh)
    whole = model.state_dict()
    before = fsdp.set_state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )  # fmt: skip
    found["set before"] = [] if before.state_dict_type is StateDictType.FULL_STATE_DICT else [before]
    pieces, state = model.state_dict(), copy.deepcopy(fsdp.optim_state_dict(model, optimizer))
    found["sharded"] = [name for name, value in pieces.items() if not isinstance(value, RaggedTensor)]
    moments = state["state"]["0.weight"]["exp_avg"]
    found["sharded state"] = [] if isinstance(moments, RaggedTensor) else [type(moments)]
    other = sharded(sharding_strategy="SHARD_GRAD_OP")
    fresh = RULES["adamw"](other.parameters())
    other.load_state_dict(pieces)
    fsdp.optim_state_dict_to_load(other, fresh, state, load_directly=True)
    found["loaded"] = same(full(other), whole)
    going_on(ctx, found, "sharded", model, optimizer, other, fresh)
    return found


def older_optimizer_states(ctx):
    """The functions that torch calls deprecated, on which older programs rely; by number and by name."""
    fsdp = ShardedDataParallel
    found = {}
    model = sharded()
    optimizer = RULES["adamw"](model.parameters())
    steps_of(model, optimizer, 2, ctx.rank)
    state = fsdp.full_optim_state_dict(model, optimizer)
    found["rank 0"] = [] if bool(state) == (ctx.rank == 0) else [len(state)]
    every = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = make_model()
    numbered = fsdp.rekey_optim_state_dict(every, OptimStateKeyType.PARAM_ID, plain)
    torch.optim.AdamW(plain.parameters()).load_state_dict(numbered)
    named = fsdp.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, plain)
    found["numbers"] = [] if set(numbered["state"]) == set(range(8)) else list(numbered["state"])
    found["names"] = named["state"].keys() ^ every["state"].keys()
    for way in ("scatter", "shard", "flatten", "by number"):
        other = sharded()
        fresh = RULES["adamw"](other.parameters())
        if way == "scatter":
            local = fsdp.scatter_full_optim_state_dict(state if ctx.rank == 0 else None, other, optim=fresh)
        elif way == "shard":
            local = fsdp.shard_full_optim_state_dict(every, other)
        elif way == "flatten":
            pieces = copy.deepcopy(fsdp.sharded_optim_state_dict(model, optimizer))  # these are the optimizer's own
            local = fsdp.flatten_sharded_optim_state_dict(pieces, other, fresh)
        else:
            local = numbered
        fresh.load_state_dict(local)
        other.load_state_dict(model.state_dict())
        going_on(ctx, found, way, model, optimizer, other, fresh)
        state = fsdp.full_optim_state_dict(model, optimizer)
        every = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
        numbered = fsdp.rekey_optim_state_dict(every, OptimStateKeyType.PARAM_ID, plain)
    return found


def going_on(ctx, found, way, model, optimizer, other, fresh):
    """Note where training goes on otherwise from what was loaded."""
    steps_of(model, optimizer, 2, ctx.rank, first=2)
    steps_of(other, fresh, 2, ctx.rank, first=2)
    found[way, "goes on"] = same(full(other), full(model))


def refused(ctx):
    """Errors name what is wrong, and no rank waits."""
    net, fsdp = nn.Linear, ShardedDataParallel
    model = sharded()
    low = MixedPrecision(keep_low_precision_grads=True)
    custom = CustomPolicy(lambda module: {"device_id": 0} if isinstance(module, net) else False)
    kinds = StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    cases = {
        "strategy": ("sharding_strategy must be", lambda: fsdp(net(2, 2), sharding_strategy="ALL")),
        "precision": ("must be a MixedPrecision", lambda: fsdp(net(2, 2), mixed_precision=torch.bfloat16)),
        "device": ("device_id=99", lambda: fsdp(net(2, 2), device_id=99)),
        "low": ("keep_low_precision_grads", lambda: fsdp(net(2, 2), mixed_precision=low)),
        "buffers": ("buffer_dtype", lambda: fsdp(net(2, 2), mixed_precision=MixedPrecision(buffer_dtype=1))),
        "offload": ("CPUOffload", lambda: fsdp(net(2, 2), cpu_offload=True)),
        "policy": ("no wrap policy", lambda: fsdp(net(2, 2), auto_wrap_policy={nn.Linear})),
        "settings": ("it may set", lambda: sharded(auto_wrap_policy=custom)),
        "ignored": ("nothing left to shard", lambda: fsdp(one := net(2, 2), ignored_modules=[one])),
        "twice": ("sharded already", lambda: fsdp(model)),
        "no module": ("torch.nn.Module", lambda: fsdp(3)),
        "hook": ("HookState", lambda: model.register_comm_hook(None, None)),
        "local": ("LOCAL_STATE_DICT isn't offered", lambda: fsdp.set_state_dict_type(model, kinds[0])),
        "config": ("ShardedStateDictConfig", lambda: fsdp.set_state_dict_type(model, kinds[1], FullStateDictConfig())),
        "rank0_only": ("writeback", lambda: fsdp.summon_full_params(model, rank0_only=True).__enter__()),
    }  # fmt: skip
    found = {}
    for case, (text, call) in cases.items():
        try:
            call()
            found[case] = "nothing was raised"
        except CollectivesError as error:
            found[case] = "" if text in str(error) else str(error)
    with contextlib.suppress(CollectivesError):
        model[0].register_forward_hook(lambda *args: fsdp.summon_full_params(model).__enter__())
        model(batch(0, ctx.rank)[0])
        found["in a forward"] = "nothing was raised"
    return found


@over_gloo
def all_parts(ctx):
    found = {}
    parts = precision, settings_of_modules, values, methods, summoned, state_dicts, older_optimizer_states, refused
    for part in parts:
        found |= {(part.__name__, name): wrong for name, wrong in part(ctx).items()}
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_arguments_and_methods(ranks, tmp_path):
    check(all_parts, tmp_path, ranks)
