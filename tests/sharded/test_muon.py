"""Muon on owners of matrices: the updates and the state of torch.optim.Muon in one process."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from collectives.errors import InvalidArgument
from collectives.sharded.muon import Muon
from collectives.sharded.ragged_tensor import RaggedTensor
from tests.ddp.training import over_gloo, run
from tests.sharded.shards import mesh_of, params_of, set_grads, sharded, values, whole

SHAPES = [(8, 6), (40, 16), (16, 40), (33, 33), (3, 100), (1, 5), (64, 64)]
OPTIONS = [{}, dict(nesterov=False, adjust_lr_fn="match_rms_adamw", weight_decay=0.3, ns_steps=3, momentum=0.8)]

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")


def step(optimizers, several, seed):
    grads = values(seed, SHAPES)
    for optimizer, params in zip(optimizers, several, strict=True):
        set_grads(params, grads)
        params[5].grad = params[5].grad if seed % 2 else None
        optimizer.step()


@over_gloo
def train(ctx, path, replicas):
    mesh = mesh_of(replicas, ctx.size // replicas) if replicas > 1 else mesh_of()
    for options in OPTIONS:
        plain, shards = params_of(values(0, SHAPES)), nn.ParameterList(sharded(values(0, SHAPES), mesh))
        ignored = params_of(values(0, SHAPES)[:1])[0]
        theirs = torch.optim.Muon(plain, 0.02, **options)
        groups = [{"params": [*shards[:3]]}, {"params": [*shards[3:], ignored]}]
        ours = Muon(groups, 0.02, **options)
        for seed in range(3):
            ignored.grad = values(seed, SHAPES)[0]
            before = shards[0]._version
            step([theirs, ours], [plain, list(shards)], seed)
            assert shards[0]._version > before
        assert torch.equal(ignored, plain[0])
        # Through a checkpoint, to other bounds.
        rotated = sharded([whole(each) for each in [*shards[1:], shards[0]]], mesh)
        other = nn.ParameterList([rotated[-1], *rotated[:-1]])
        saved, again = Muon(shards.parameters(), 0.02, **options), Muon(other.parameters(), 0.02, **options)
        saved.state.update({param: ours.state[param] for param in shards})
        dcp.save({"optimizer": get_optimizer_state_dict(shards, saved)}, checkpoint_id=path)
        state = {"optimizer": get_optimizer_state_dict(other, again)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(other, again, state["optimizer"])
        step([theirs, again], [plain, list(other)], 3)
        for a, b in zip(other, plain, strict=True):
            assert torch.equal(whole(a), b.detach()), (ctx.rank, a.shape)
            buffer = again.state[a]["momentum_buffer"]
            assert isinstance(buffer, RaggedTensor) and buffer.placements == a.placements
            assert torch.equal(whole(buffer), theirs.state[b]["momentum_buffer"])


@needs_muon
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_updates_are_those_of_one_process(ranks, replicas, tmp_path):
    run(train, ranks, tmp_path / "store", str(tmp_path / "checkpoint"), replicas)


@over_gloo
def misuse(ctx):
    mesh = mesh_of()
    shards = [nn.Parameter(each) for each in sharded(values(0, SHAPES), mesh)]
    for wrong, match in (
        (dict(lr=-1.0), "lr must be at least 0"),
        (dict(ns_steps=100), "ns_steps"),
        (dict(adjust_lr_fn="x"), "adjust_lr_fn"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            Muon(shards, **wrong)
    with pytest.raises(InvalidArgument, match="shape .5."):
        Muon([nn.Parameter(torch.ones(5))])
    with pytest.raises(InvalidArgument, match=r"Shard\(dim=0\)"):
        Muon([nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))])
    optimizer = Muon(shards, torch.tensor(0.1))
    shards[0].grad = distribute_tensor(values(0, SHAPES)[0], mesh, [Replicate()])
    with pytest.raises(InvalidArgument, match="a gradient is a DTensor of .*redistribute"):
        optimizer.step()
    shards[0].grad = None
    assert optimizer.step(lambda: 3) == 3
    with pytest.raises(InvalidArgument, match="matrices"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, 2))]})
    assert len(optimizer.param_groups) == 1
    copy.deepcopy(optimizer.state_dict())


def test_misuse(tmp_path):
    run(misuse, 2, tmp_path / "store")
