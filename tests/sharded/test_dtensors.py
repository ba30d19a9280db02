"""Sharded state as DTensors, and torch.distributed.checkpoint.state_dict's functions over sharded modules."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torchs
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from collectives.errors import InvalidArgument, InvalidUsage
from collectives.sharded import (
    MixedPrecisionPolicy,
    Piece,
    ShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.ddp.training import over_gloo, run
from tests.sharded.states import Net, adamw, differences, optimizer_of, sharded, train


def plain(steps=3):
    """Return a trained unsharded model, its optimizer, and their state by torch's own functions."""
    model = Net()
    optimizer = optimizer_of(adamw, model)
    train(model, optimizer, steps)
    return model, optimizer, dict(model.state_dict()), torchs.get_optimizer_state_dict(model, optimizer)


def full_tensors(made):
    """Return nested dictionaries with each DTensor's whole tensor."""
    if isinstance(made, dict):
        return {key: full_tensors(value) for key, value in made.items()}
    return made.full_tensor() if isinstance(made, DTensor) else made


def check_rows(made, whole, size, rank):
    """Check that a DTensor has the rows that torch.chunk gives this rank."""
    assert isinstance(made, DTensor) and made.shape == whole.shape and made.stride() == whole.stride()
    assert made.device_mesh.size() == dist.get_world_size()
    if size > 1 and whole.dim():
        assert made.placements == (Shard(0),)
        assert torch.equal(made.to_local(), dict(enumerate(whole.chunk(size))).get(rank, whole[:0]))
    else:
        assert made.placements == (Replicate(),) and torch.equal(made.to_local(), whole)


@over_gloo
def by_our_functions(ctx):
    _, _, want, want_state = plain()
    for how in ("fully_shard", "bf16", "NO_SHARD", "FULL_SHARD"):
        if how.isupper():
            model = ShardedDataParallel(Net(), sharding_strategy=how)
        else:
            model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16) if how == "bf16" else None)
            if how == "bf16":
                model.load_state_dict(want)
        optimizer = optimizer_of(adamw, model)
        if how != "bf16":
            train(model, optimizer)
        made = get_model_state_dict(model, use_dtensor=True)
        assert list(made) == list(want)
        names = dict(model.named_parameters(remove_duplicate=False))
        for name, value in made.items():
            if name in names:
                check_rows(value, want[name], 1 if how == "NO_SHARD" else ctx.size, ctx.rank)
            else:
                assert torch.equal(value, want[name])  # a buffer
        assert not differences(full_tensors(made), want)
        on_cpu = get_model_state_dict(model, use_dtensor=True, cpu_offload=True)
        assert not differences(full_tensors(on_cpu), want)
        # They are copies; loaded back they are what they were.
        model.apply(lambda part: nn.init.ones_(part.weight) if getattr(part, "weight", None) is not None else None)
        assert not differences(full_tensors(made), want)
        set_model_state_dict(model, made)
        assert not differences(dict(model.state_dict()), want)
        if how == "bf16":
            continue
        state = get_optimizer_state_dict(model, optimizer, use_dtensor=True)
        assert isinstance(state["state"]["conv.weight"]["exp_avg"], DTensor)
        assert not differences(full_tensors(state), want_state), how
        other = optimizer_of(adamw, model)
        set_optimizer_state_dict(model, other, state)
        assert not differences(get_optimizer_state_dict(model, other, full_state_dict=True), want_state)
    # By FSDP1's configurations.
    configs = ShardedStateDictConfig(_use_dtensor=True), ShardedOptimStateDictConfig(_use_dtensor=True)
    with ShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        assert not differences(full_tensors(dict(model.state_dict())), want)
        made = ShardedDataParallel.optim_state_dict(model, optimizer)
        assert isinstance(made["state"]["conv.weight"]["exp_avg"], DTensor)
        assert not differences(full_tensors(made), want_state)
    with ShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert isinstance(model.state_dict()["conv.weight"], Piece)
    # Of any placements, as tensor parallelism or FSDP2 have them.
    mesh = init_device_mesh("cpu", (ctx.size,))
    weight = torch.arange(3 * 7 * 3.0).view(3, 7, 3)
    for placement in (Shard(0), Shard(1), Replicate()):
        given = torch.distributed.tensor.distribute_tensor(weight, mesh, [placement])
        model.load_state_dict({**want, "conv.weight": given})
        assert torch.equal(model.state_dict()["conv.weight"], weight)
    with pytest.raises(InvalidArgument, match="give one of them"):
        get_model_state_dict(model, full_state_dict=True, use_dtensor=True)
    with pytest.raises(InvalidUsage, match="needs a process group of torch's"):
        get_model_state_dict(sharded(comm=ctx.communicator()), use_dtensor=True)
    if ctx.rank == 0:
        with pytest.raises(InvalidUsage, match="takes full tensors"):
            set_model_state_dict(model, made_of(model, mesh), broadcast_from_rank0=True)
    else:
        with pytest.raises(InvalidUsage, match="on rank 0: broadcast_from_rank0 takes full tensors"):
            set_model_state_dict(model, {}, broadcast_from_rank0=True)


def made_of(model, mesh):
    return {name: DTensor.from_local(torch.ones(2), mesh, run_check=False) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 1])
def test_dtensors_of_our_functions(tmp_path, ranks):
    run(by_our_functions, ranks, str(tmp_path / "store"))


@over_gloo
def save_by_torch(ctx, folder):
    """DCP's own recipe, which knows nothing of this package."""
    model = sharded()
    optimizer = optimizer_of(adamw, model)
    train(model, optimizer)
    model_state, optim_state = torchs.get_state_dict(model, optimizer)
    for value in (model_state["conv.weight"], optim_state["state"]["conv.weight"]["exp_avg"]):
        assert isinstance(value, DTensor) and value.placements == (Shard(0),)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    full = StateDictOptions(full_state_dict=True)
    rank0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    _, _, *want = plain()
    assert not differences(list(torchs.get_state_dict(model, optimizer, options=full)), want)
    assert not differences(
        list(torchs.get_state_dict(model, optimizer, options=rank0)), want if ctx.rank == 0 else [{}, {}]
    )


@over_gloo
def load_by_torch(ctx, folder):
    _, _, want, want_state = plain()
    full = StateDictOptions(full_state_dict=True)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = want, want_state
    loads = {
        "dcp": lambda model, optimizer: from_checkpoint(model, optimizer, folder),
        "full": lambda model, optimizer: torchs.set_state_dict(
            model, optimizer, model_state_dict=want, optim_state_dict=want_state, options=full),
        "broadcast": lambda model, optimizer: (
            torchs.set_model_state_dict(model, want if ctx.rank == 0 else {}, options=broadcast),
            torchs.set_optimizer_state_dict(
                model, optimizer, want_state if ctx.rank == 0 else {}, options=broadcast)),
        "one by one": lambda model, optimizer: (
            torchs.set_model_state_dict(model, want), torchs.set_optimizer_state_dict(model, optimizer, want_state)),
    }  # fmt: skip
    for name, load in loads.items():
        model = sharded(seed=9)
        optimizer = optimizer_of(adamw, model)
        load(model, optimizer)
        got = (
            torchs.get_model_state_dict(model, options=full),
            torchs.get_optimizer_state_dict(model, optimizer, options=full),
        )
        assert not differences(got[0], given[0]), name
        assert not differences(got[1], given[1]), name
        train(model, optimizer, 1)
    unsharded, other, *_ = plain()
    train(unsharded, other, 1)
    assert not differences(dict(model.state_dict()), dict(unsharded.state_dict()))
    # Options.
    frozen = Net()
    frozen.conv.requires_grad_(False)
    fully_shard(frozen)
    for cpu_offload in (False, True):
        options = StateDictOptions(full_state_dict=cpu_offload, cpu_offload=cpu_offload, ignore_frozen_params=True)
        got = torchs.get_model_state_dict(frozen, options=options)
        assert (want.keys() - got.keys() == {"conv.weight", "conv.bias"}) or (cpu_offload and ctx.rank and not got)
    on_cpu = torchs.get_optimizer_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    assert isinstance(on_cpu["state"]["conv.weight"]["exp_avg"], DTensor)
    with pytest.raises(InvalidArgument, match="flatten_optimizer_state_dict is not offered"):
        torchs.get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    # Over a communicator alone: pieces, which DCP takes, too.
    model = sharded(comm=ctx.communicator())
    optimizer = optimizer_of(adamw, model)
    model_state, optim_state = torchs.get_state_dict(model, optimizer)
    assert isinstance(model_state["conv.weight"], Piece) and isinstance(
        optim_state["state"]["conv.weight"]["exp_avg"], Piece
    )
    from_checkpoint(model, optimizer, folder)
    assert not differences(dict(model.state_dict()), want)
    # What has no units is torch's.
    unsharded, other, *_ = plain(0)
    from_checkpoint(unsharded, other, folder)
    assert not differences(dict(unsharded.state_dict()), want)
    assert not differences(torchs.get_optimizer_state_dict(unsharded, other), want_state)


def from_checkpoint(model, optimizer, folder):
    model_state, optim_state = torchs.get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=folder)
    torchs.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def test_torchs_functions_and_other_numbers_of_ranks(tmp_path):
    run(save_by_torch, 4, str(tmp_path / "store"), str(tmp_path / "saved"))
    for ranks in (2, 1):
        run(load_by_torch, ranks, str(tmp_path / f"store{ranks}"), str(tmp_path / "saved"))


class Plain(nn.Module):
    """FSDP2 takes no parameters of 0 dimensions."""

    def __init__(self, seed=2):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(6, 5)
        self.outer = nn.Linear(5, 3)

    def forward(self, x):
        return self.outer(self.inner(x))


@over_gloo
def with_fsdp2(ctx, folder):
    """State dicts go from torch's FSDP2 to our shards and back, in memory and by DCP."""
    theirs, ours = Plain(1), Plain(2)
    for shard, model in ((torchs_fully_shard, theirs), (fully_shard, ours)):
        shard(model.inner)
        shard(model)
    optimizers = {id(model): torch.optim.AdamW(model.parameters(), 0.01, foreach=False) for model in (theirs, ours)}
    full = StateDictOptions(full_state_dict=True)

    def whole(model):
        return torchs.get_state_dict(model, optimizers[id(model)], options=full)

    def step(model):
        model(torch.ones(2, 6)).sum().backward()
        optimizers[id(model)].step()
        optimizers[id(model)].zero_grad()

    for source, to in ((theirs, ours), (ours, theirs)):
        step(source)
        model_state, optim_state = torchs.get_state_dict(source, optimizers[id(source)])
        torchs.set_state_dict(to, optimizers[id(to)], model_state_dict=model_state, optim_state_dict=optim_state)
        assert not differences(list(whole(to)), list(whole(source)))
        step(source)
        model_state, optim_state = torchs.get_state_dict(source, optimizers[id(source)])
        path = f"{folder}/{type(source).__name__}{source is ours}"
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=path)
        from_checkpoint(to, optimizers[id(to)], path)
        assert not differences(list(whole(to)), list(whole(source)))


def test_to_fsdp2_and_back(tmp_path):
    run(with_fsdp2, 2, str(tmp_path / "store"), str(tmp_path))


@over_gloo
def over_meshes(ctx):
    """Shards inside a group, replicas over groups: the DTensors are over the shards' group."""
    want = dict(Net().state_dict())
    mesh = init_device_mesh("cpu", (2, 2))
    model = sharded(mesh=mesh)
    made = get_model_state_dict(model, use_dtensor=True)
    weight = made["conv.weight"]
    assert weight.placements == (Shard(0),)
    assert dist.get_process_group_ranks(weight.device_mesh.get_group()) == dist.get_process_group_ranks(
        mesh.get_group(1)
    )
    assert torch.equal(weight.to_local(), want["conv.weight"].chunk(2)[mesh.get_local_rank(1)])
    assert not differences(full_tensors(made), want)
    model.apply(lambda part: nn.init.ones_(part.weight) if getattr(part, "weight", None) is not None else None)
    model.load_state_dict(made)
    assert not differences(dict(model.state_dict()), want)
    # The shards' own calls.
    param = model.conv.weight
    assert torch.equal(param.full_tensor(), want["conv.weight"])
    assert dist.get_process_group_ranks(param.device_mesh.get_group()) == dist.get_process_group_ranks(
        mesh.get_group(1)
    )


def test_over_meshes(tmp_path):
    # In processes of their own: DTensor's caches would find the mesh of another test's group of ranks 0 and 1.
    run(over_meshes, 4, str(tmp_path / "store"), fresh=True)
