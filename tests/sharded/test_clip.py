"""Norms over shards are those of full gradients, by each function, and the same bits on all ranks."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.nn.utils import clip_grad_norm_ as imported_early
from torch.nn.utils import get_total_norm as norm_imported_early

from collectives.errors import InvalidArgument
from collectives.sharded import fully_shard
from collectives.sharded.module import units_in
from tests.ddp.training import loss_of, make_model, over_gloo, run


def shard():
    model = make_model()
    fully_shard(model[0])
    fully_shard(model[2])
    return fully_shard(model, ignored_params=[model[6].bias])


def backward(ctx, factor=1.0):
    """Return a sharded model with gradients, and the same model unsharded."""
    model, whole = shard(), make_model()
    model[6].bias.register_hook(lambda grad: grad * 0 + 0.25)  # the same on all ranks
    whole[6].bias.register_hook(lambda grad: grad * 0 + 0.25)
    (loss_of(model, 0, ctx.rank) * factor).backward()
    (sum(loss_of(whole, 0, rank) for rank in range(ctx.size)) / ctx.size * factor).backward()
    return model, whole


def gradients(model, comm):
    found = {}
    for unit in units_in(model):
        for group in unit.groups:
            flat = torch.empty(group.unsharded_numel)
            comm.all_gather(flat, group.gradients.flat)
            found.update({id(param): flat[param.offset :][: param.count].view(param.shape) for param in group.params})
    order = [units_in(model)[at] for at in (1, 2, 0)]
    return [found[id(param)] for unit in order for param in unit.params] + [model[6].bias.grad]


@over_gloo
def clip(ctx):
    ways = [
        (lambda model, p: model.clip_grad_norm_(0.05, p), 2.0),
        (lambda model, p: model.clip_grad_norm_(0.05, norm_type=p), math.inf),
        (lambda model, p: imported_early(model.parameters(), 0.05, p), 2),
        (lambda model, p: nn.utils.clip_grad_norm_(model.parameters(), 0.05, p, foreach=False), 3.0),
        (lambda model, p: nn.utils.clip_grad_norm_(model.parameters(), 0.05, p, foreach=True), 1.0),
    ]
    rows = []
    for way, p in ways:
        model, whole = backward(ctx)
        both = [norm_imported_early([param.grad.detach() for param in each.parameters()], p) for each in (model, whole)]
        torch.testing.assert_close(*both)
        norm = way(model, p)
        wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.05, p)
        assert norm.dtype == wanted.dtype and norm.shape == wanted.shape
        torch.testing.assert_close(norm, wanted)
        for a, b in zip(gradients(model, ctx.communicator()), whole.parameters(), strict=True):
            torch.testing.assert_close(a, b.grad)
        rows.append(norm.item())
    model, _ = backward(ctx, factor=math.inf if ctx.rank else 1.0)
    for raises in (
        lambda: model.clip_grad_norm_(1.0, error_if_nonfinite=True),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, math.inf, error_if_nonfinite=True),
    ):
        with pytest.raises(RuntimeError, match="non-finite"):
            raises()
    with pytest.raises(InvalidArgument, match="above 0"):
        model.clip_grad_norm_(1.0, 0)
    # One rank's shard alone isn't finite.
    model, _ = backward(ctx)
    with contextlib.suppress(StopIteration):
        if ctx.rank == 0:
            next(param for param in model.parameters() if param.numel()).grad.view(-1)[0] = math.nan
    rows += [str(model.clip_grad_norm_(1.0, p).item()) for p in (2, math.inf)]
    model.zero_grad()
    rows.append(model.clip_grad_norm_(1.0).item())
    # Tensors of no shard: a local call, as without sharding.
    if ctx.rank == 0:
        rows.append(nn.utils.get_total_norm([torch.ones(4)]).item())

    # Gradients of torch's own FSDP2 are DTensors, which have no storage: the norm is torch's, even if a
    # sharded model of ours has gradients.
    model, _ = backward(ctx)
    torchs, whole = make_model(), make_model()
    fully_shard_of_torch(torchs)
    loss_of(torchs, 0, ctx.rank).backward()
    (sum(loss_of(whole, 0, rank) for rank in range(ctx.size)) / ctx.size).backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.05) for each in (torchs, whole)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    return rows


@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_are_of_the_whole(ranks, tmp_path):
    first, *others = run(clip, ranks, tmp_path / "store")
    assert first[-4:] == ["nan", "nan", 0.0, 2.0]
    assert all(other == first[:-1] for other in others)
