"""Programs over sharded modules: gradients and parameters are those of one process with all ranks' batches."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from collectives.sharded import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.ddp.training import over_gloo
from tests.ranks import run_ranks
from tests.sharded.programs import (
    Block,
    Net,
    averaged,
    batch,
    differences,
    full_grads,
    full_params,
    loss_of,
    shard_blocks,
    train_both,
)

ROUGH = 0.2, 0.05  # of bf16


class Checkpointed(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedParts(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.reentrant = reentrant

    def forward(self, x):
        part = nn.Sequential(self.first, nn.Tanh(), self.second, nn.Tanh())
        return checkpoint(part, x, use_reentrant=self.reentrant)


class Experts(nn.Module):
    """One of three experts, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.unused = nn.Linear(3, 3)

    def forward(self, x, which):
        return x + self.experts[which](x)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x, which):
        for layer, expert in zip(self.layers, which, strict=True):
            x = layer(x, expert)
        return self.head(x)


class Repeated(nn.Module):
    """A block that a forward runs three times, on inputs with and without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.second(self.first(self.first(x))) + self.first(x))


class Frozen(Net):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)
        self.inp.requires_grad_(False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(10, 16), Block(), nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


@dataclasses.dataclass(frozen=True)
class Output:
    y: torch.Tensor
    name: str = "frozen"


class Views(nn.Module):
    """Returns its own parameter, a view of it, and a view that was changed through another one."""

    def __init__(self):
        super().__init__()
        self.lin, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x):
        h = self.lin(x)
        base = h.view(-1)
        view = base.view_as(h)
        base.mul_(2)
        return Output(view), {"own": self.scale, "views": [self.lin.weight[:2]]}


class UsesViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Views(), nn.Linear(16, 2)

    def forward(self, x):
        output, more = self.inner(x)
        return self.head(output.y * more["own"]) + more["views"][0].mean()


class Opaque:
    """A class that torch's trees know nothing of."""

    def __init__(self, y):
        self.y = y


class ReturnsOpaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x):
        return Opaque(self.lin(x))


class UsesOpaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = ReturnsOpaque(), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.inner(x).y)


def shard_parts(*names):
    def shard(model):
        for name in names:
            fully_shard(model.get_submodule(name))
        fully_shard(model)

    return shard


def other_experts(model, rank, step):
    which = [(rank + step) % 3, step % 2, (rank * step) % 3]
    return model(batch(rank, step), which).square().mean()


def tokens(model, rank, step):
    return model(torch.arange(5) + rank).square().mean()


def by_jvp(model, rank, step):
    out, tangent = torch.func.jvp(model, (batch(rank, step),), (batch(rank, step + 50),))
    return out.square().mean() + tangent.square().mean()


def by_vjp(model, rank, step):
    out, pull = torch.func.vjp(model, batch(rank, step))
    return out.square().mean() + pull(torch.ones_like(out))[0].square().mean()


def over_mesh(shape, **options):
    return lambda model: shard_blocks(model, mesh=init_device_mesh("cpu", shape), **options)


def lists(net):
    fully_shard([net.blocks[0], net.blocks[1]])
    fully_shard(net.blocks[2])
    fully_shard([net.inp, net.head])


@over_gloo
def all_programs(ctx):
    found = {}
    for reshard in (None, True, False):
        for reentrant in (None, True, False):
            make = Net if reentrant is None else lambda reentrant=reentrant: Checkpointed(reentrant)
            found[f"reshard_after_forward={reshard}, use_reentrant={reentrant}"] = train_both(
                ctx, make, lambda net, reshard=reshard: shard_blocks(net, reshard_after_forward=reshard)
            )
    for reentrant in (True, False):
        found[f"parts, use_reentrant={reentrant}"] = train_both(
            ctx, lambda reentrant=reentrant: nn.Sequential(*(CheckpointedParts(reentrant) for _ in range(2))),
            shard_parts("0"), lambda model, rank, step: model(batch(rank, step).requires_grad_()).square().mean(),
        )  # fmt: skip
    found["experts"] = train_both(
        ctx, Mixture, shard_parts("layers.0", "layers.1", "layers.2"), other_experts, steps=6
    )
    found["repeated"] = train_both(ctx, Repeated, shard_parts("first", "second"))
    found["frozen"] = train_both(ctx, Frozen, shard_blocks)
    found["tied"] = train_both(ctx, Tied, shard_parts("block"), tokens)
    found["tied in a list"] = train_both(
        ctx, Tied, lambda model: (fully_shard(model.block), fully_shard([model.embed, model.head])), tokens
    )
    found["sparse"] = train_both(
        ctx, lambda: nn.Sequential(nn.Embedding(10, 16, sparse=True), nn.Linear(16, 3)),
        lambda model: shard_parts("1")(model), lambda model, rank, step: _dense(model, rank),
    )  # fmt: skip
    found["views"] = train_both(ctx, UsesViews, shard_parts("inner"))
    found["opaque"] = train_both(ctx, UsesOpaque, shard_parts("inner"))
    found["lists"] = train_both(ctx, Net, lists)
    found["offload"] = train_both(ctx, Net, lambda net: shard_blocks(net, offload_policy=CPUOffloadPolicy()))
    found["replicas"] = train_both(ctx, Net, over_mesh((ctx.size, 1)))
    found["clip"] = train_both(ctx, Net, shard_blocks, clip=0.1)
    if ctx.size == 4:
        found["hybrid"] = train_both(ctx, Net, over_mesh((2, 2)))
        found["neighbours"] = train_both(ctx, Net, lambda net: shard_blocks(net, reshard_after_forward=2))
    for policy in (MixedPrecisionPolicy(torch.bfloat16), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        found[f"{policy}"] = train_both(
            ctx, Net, lambda net, policy=policy: shard_blocks(net, mp_policy=policy), tolerance=ROUGH
        )
    for loss in (by_jvp, by_vjp):
        found[loss.__name__] = train_both(ctx, Net, shard_blocks, loss)
    return found


def _dense(model, rank):
    loss = tokens(model, rank, 0)
    if not hasattr(model, "unshard"):  # one process compares and steps dense gradients
        model[0].sparse = False
        loss = tokens(model, rank, 0)
    return loss


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_programs(ranks, tmp_path):
    for found in run_ranks(all_programs, ranks, str(tmp_path / "store"), timeout=120):
        assert len(found) > 20
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


@over_gloo
def several_backwards(ctx):
    """Accumulation with and without reductions, a graph that is kept, two forwards before a backward."""
    found = {}

    def start():
        torch.manual_seed(0)
        reference = Net()
        torch.manual_seed(0)
        return shard_blocks(Net()), reference

    def three(model, rank):
        for step in range(3):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(step == 2)
            loss_of(model, rank, step).backward()

    def three_reduced(model, rank):
        for step in range(3):
            loss_of(model, rank, step).backward()

    def kept(model, rank):
        loss = loss_of(model, rank, 7)
        loss.backward(retain_graph=True)
        loss.backward()

    def two_forwards(model, rank):
        first, second = loss_of(model, rank, 1), loss_of(model, rank, 2)
        first.backward()
        second.backward()

    def two_in_one(model, rank):
        (loss_of(model, rank, 1) + loss_of(model, rank, 2)).backward()

    for backward in (three, three_reduced, kept, two_forwards, two_in_one):
        model, reference = start()
        backward(model, ctx.rank)
        found[backward.__name__] = differences(full_grads(model), averaged(ctx, reference, backward))
    return found


def test_several_backwards(tmp_path):
    for found in run_ranks(several_backwards, 2, str(tmp_path / "store")):
        assert found == dict.fromkeys(found, [])


@over_gloo
def after_exceptions(ctx):
    """An exception on all ranks in a forward, and in a backward: the next step is right."""
    torch.manual_seed(0)
    reference = Net()
    torch.manual_seed(0)
    model = shard_blocks(Net())
    found = {}
    for name, register in (
        ("forward", model.blocks[1].register_forward_hook),
        ("backward", model.blocks[1].register_full_backward_hook),
    ):
        handle = register(lambda *args: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                loss_of(model, ctx.rank, 0).backward()
        handle.remove()
        held = all(hasattr(param, "full_tensor") for param in model.parameters())
        model.zero_grad()
        loss_of(model, ctx.rank, 1).backward()
        theirs = averaged(ctx, reference, lambda model, rank: loss_of(model, rank, 1).backward())
        found[name] = differences(full_grads(model), theirs), name == "backward" or held
    return found


def test_exceptions(tmp_path):
    for found in run_ranks(after_exceptions, 2, str(tmp_path / "store")):
        assert found == {"forward": ([], True), "backward": ([], True)}


@over_gloo
def parameters_that_nobody_uses(ctx):
    """They keep None, so that an optimizer's momentum and decay leave them alone."""
    torch.manual_seed(0)
    model = Mixture()
    shard_parts("layers.0", "layers.1", "layers.2")(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    before = full_params(model)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(ctx.rank, step), [ctx.rank % 2, 0, 1]).square().mean().backward()
        optimizer.step()
    grads, after = full_grads(model), full_params(model)
    dist.barrier()
    unused = [name for name, grad in grads.items() if grad is None]
    return unused, [name for name in unused if not torch.equal(before[name], after[name])]


def test_parameters_that_nobody_uses(tmp_path):
    for unused, moved in run_ranks(parameters_that_nobody_uses, 2, str(tmp_path / "store")):
        names = [f"layers.{layer}.unused" for layer in range(3)]
        names += ["layers.0.experts.2", "layers.1.experts.1", "layers.1.experts.2", "layers.2.experts.0"]
        names += ["layers.2.experts.2"]
        assert set(unused) == {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
        assert moved == []
