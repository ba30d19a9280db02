"""FSDP2's methods of a sharded module: each has its meaning here, or is refused by an error that says what to do."""

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor

import collectives
from collectives.errors import InvalidArgument, InvalidUsage
from collectives.sharded import (
    FSDPModule,
    ShardedModule,
    Unit,
    fully_shard,
    register_forward_method,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.ranks import run_ranks
from tests.sharded.programs import averaged, differences, full_grads, full_params
from tests.sharded.training import RULES, full, loss_of, over_comm, same, sharded, steps_of

# Older versions of torch have no such class, and no such argument either.
MESH_DIMS = fsdp.DataParallelMeshDims(shard="shard") if hasattr(fsdp, "DataParallelMeshDims") else "any"


def test_all_methods_of_torch_are_there():
    public = [name for name in dir(TorchFSDPModule) if not name.startswith("_")]
    assert len(public) > 15 and not [name for name in public if not hasattr(ShardedModule, name)]
    assert FSDPModule is ShardedModule and register_fsdp_forward_method is register_forward_method


def raised(call, *errors):
    with pytest.raises(errors or (InvalidArgument, InvalidUsage)) as caught:
        call()
    return str(caught.value)


def grads_of(model, rank):
    model.zero_grad()
    loss_of(model, rank).backward()
    return full_grads(model)


def theirs(ctx, make=make_model, backward=lambda model, rank: loss_of(model, rank).backward()):
    return averaged(ctx, make(), backward)


class Gathers:
    """Torch's own all-gather, with FSDP2's interface; counts its calls."""

    calls = 0

    def __call__(self, output, inp, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output, inp, group=group, async_op=async_op)


class Scatters(Gathers):
    def __call__(self, output, inp, group, op, async_op=False):
        self.calls += 1
        assert op == dist.ReduceOp.AVG
        summed = inp.clone()
        dist.all_reduce(summed, group=group)
        output.copy_(summed.chunk(group.size())[group.rank()] / group.size())


def custom_collectives(ctx):
    model = sharded()
    gathers, scatters = Gathers(), Scatters()
    for unit in (model, *model[::2]):
        unit.set_custom_all_gather(gathers)
        unit.set_custom_reduce_scatter(scatters)
    assert not differences(grads_of(model, ctx.rank), theirs(ctx))
    assert gathers.calls >= 4 and scatters.calls == 4


def hooks_and_divisors(ctx):
    model = sharded()
    grads = grads_of(model, ctx.rank)
    shapes = []

    def halve(reduced):
        shapes.append(reduced.dim())
        reduced.mul_(0.5)

    for unit in (model, *model[::2]):
        unit.set_all_reduce_hook(halve)
    halved = grads_of(model, ctx.rank)
    assert all(torch.equal(halved[name], grad * 0.5) for name, grad in grads.items()) and shapes == [1] * 4
    for unit in (model, *model[::2]):
        unit.set_all_reduce_hook(None)
    assert not same(grads_of(model, ctx.rank), grads)
    model[0].set_gradient_divide_factor(ctx.size * 2.0, recurse=False)
    divided = grads_of(model, ctx.rank)
    assert all(torch.equal(divided[name], g * (0.5 if name.startswith("0.") else 1)) for name, g in grads.items())
    model.set_reduce_scatter_divide_factor(float(ctx.size))
    assert not same(grads_of(model, ctx.rank), grads)


def unshard_and_prefetch(ctx):
    model = sharded()
    before = model[0].weight
    model[0].unshard(async_op=True).wait()
    assert not isinstance(model[0].weight, DTensor) and torch.equal(model[0].weight, make_model()[0].weight)
    model[0].reshard()
    assert model[0].weight is before and isinstance(before, DTensor)
    model[0].set_modules_to_forward_prefetch([model[2], model[4]])
    model[4].set_modules_to_backward_prefetch([model[2], model[0]])
    model.set_reshard_after_backward(False)
    assert not differences(grads_of(model, ctx.rank), theirs(ctx))
    assert model[2]._sharded_unit.is_unsharded and isinstance(model[2].weight, DTensor)
    model = sharded()
    model.set_reshard_after_forward(False)
    loss = loss_of(model, ctx.rank)
    assert all(part._sharded_unit.is_unsharded for part in (model, *model[::2]))
    loss.backward()
    assert not differences(full_grads(model), theirs(ctx))


def last_backward(ctx):
    def both(model, rank):
        for step in range(2):
            if hasattr(model, "unshard"):
                model.set_is_last_backward(step == 1)
            loss_of(model, rank, step).backward()

    model = sharded()
    both(model, ctx.rank)
    assert not differences(full_grads(model), theirs(ctx, backward=both))


class Two(nn.Module):
    """A module with another forward method."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.embed = nn.Linear(12, 5), nn.Embedding(7, 12)

    def encode(self, x):
        return self.inner(x + self.embed(torch.arange(len(x)) % 7))


def forward_method(ctx):
    def backward(model, rank):
        model.encode(batch(0, rank)[0]).sum().backward()

    model = fully_shard(Two())
    # T5's generate() calls inner modules, too: the message names the cure.
    for call in (lambda: model.encode(batch(0, ctx.rank)[0]), lambda: model.inner(torch.ones(2, 12))):
        assert "register_forward_method" in raised(call, InvalidUsage)
    register_forward_method(model, "encode")
    backward(model, ctx.rank)
    assert not differences(full_grads(model), theirs(ctx, Two, backward))
    assert "unit" in repr(model) and "Two" in repr(model)
    register_forward_method(nn.Linear(2, 2), "forward")  # no sharded module: nothing is done
    assert "no method" in raised(lambda: register_forward_method(model, "decode"))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.linear = nn.Embedding(20, 6), nn.Linear(6, 5)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens))


def unshard_in_backward(ctx):
    """An embedding's backward needs no weights."""
    model = Embedded()
    fully_shard(model.embedding)
    fully_shard(model)
    gathers = Gathers()
    model.embedding.set_custom_all_gather(gathers)
    model.embedding.set_unshard_in_backward(False)

    def backward(model, rank):
        model(torch.arange(9) + rank).square().mean().backward()

    for _ in range(2):
        model.zero_grad()
        backward(model, ctx.rank)
        assert not differences(full_grads(model), theirs(ctx, Embedded, backward))
    assert gathers.calls == 2


def fixed_settings(ctx):
    """What is always so is accepted, and what never is isn't."""
    model = sharded()
    model.set_requires_all_reduce(False), model.set_requires_all_reduce(True)
    model.set_reduce_scatter_unused_params(True), model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True), model.set_reduce_scatter_max_input_buffers(1)
    model.set_separate_reduce_scatter_group(False)
    model.set_post_optim_event(torch.Event("cpu"))
    on_another = fully_shard(nn.Linear(2, 2), comm=ctx.communicator())
    replicated = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (ctx.size, 1)))
    refused = {
        "shards and replicas at once": lambda: replicated.set_requires_all_reduce(False),
        "zeros": lambda: model.set_reduce_scatter_unused_params(False),
        "the engine's memory": lambda: model.set_allocate_memory_from_process_group_for_comm(False),
        "one reduction": lambda: model.set_reduce_scatter_max_input_buffers(2),
        "share a communicator": lambda: model.set_separate_reduce_scatter_group(),
        "torch's symmetric memory": lambda: model.set_symm_mem_for_comm(),
        "must be a torch.Event": lambda: model.set_post_optim_event(3),
        "interval of a unit's flat buffer": lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda param: None),
        "as the mesh": lambda: fully_shard(nn.Linear(2, 2), dp_mesh_dims=MESH_DIMS),
        "only sharded modules": lambda: share_comm_ctx([model, nn.Linear(2, 2)]),
        "different communicators": lambda: share_comm_ctx([model, on_another]),
        "must be a function": lambda: model.set_all_reduce_hook(3),
        "stores gradients": lambda: model.set_all_reduce_hook(print, stream=1),
        "a number above 0": lambda: model.set_gradient_divide_factor(0),
    }  # fmt: skip
    wrong = {text: message for text, call in refused.items() if text not in (message := raised(call))}
    assert not wrong
    share_comm_ctx([model, model[0]])


def an_embedding_beside_ddp(ctx):
    """docs/custom-wrappers.md: only the embedding in shards, DDP for the rest."""

    def train(model, optimizer):
        ddp = collectives.DistributedDataParallel(model)
        ddp.register_comm_hook(collectives.fused_allreduce)
        for step in range(4):
            tokens = torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(10 * step + ctx.rank))
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(tokens), tokens % 5).backward()
            optimizer.step()

    expected = Embedded()
    train(expected, RULES["adamw"](expected.parameters()))
    model = Embedded()
    fully_shard(model.embedding)
    model._ddp_params_and_buffers_to_ignore = [f"embedding.{name}" for name, _ in model.embedding.named_parameters()]
    train(model, RULES["adamw"](model.parameters()))
    assert not same(full(model), full(expected))


def parts_of_a_unit(ctx):
    """A part of a unit taken alone has DTensors."""
    model = fully_shard(make_model())
    state = model[2].state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    copied = copy.deepcopy(model[2])
    for ours in (state, dict(copied.named_parameters())):
        found = {name: value.full_tensor() for name, value in ours.items()}
        assert not same(found, dict(make_model()[2].named_parameters()))
    assert copied.weight is not model[2].weight
    assert copied.weight.to_local().data_ptr() != model[2].weight.to_local().data_ptr()


class ReadsAnnotations(nn.Linear):
    """A model whose class reads the annotations of every class made from it, as those of transformers do."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.annotations = typing.get_type_hints(cls)


def classes(ctx):
    assert "weight" in type(fully_shard(ReadsAnnotations(2, 2))).annotations
    plain, sliced = fully_shard(nn.Linear(2, 2)), fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))[:1]
    assert type(sliced) is nn.Sequential and type(plain).__name__ == "Linear" and isinstance(plain, nn.Linear)


class Scaled(nn.Module):
    """A unit inside of one whose own parameter is reduced at the backward's end."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
        self._unit = "cm"  # a name of the user's

    def forward(self, x):
        return self.linear(x) * self.scale


def after_an_error_at_the_end_of_a_backward(ctx):
    """What the backward has left isn't in the next one's gradients."""

    def fail(reduced):
        raise KeyError("planted")

    def step():
        model(torch.ones(1, 2)).sum().backward()
        made = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        for param in model.parameters():
            param.grad = None  # as an optimizer's zero_grad() does, which knows nothing of full gradients
        return made

    torch.manual_seed(0)
    model = Scaled()
    fully_shard(model.linear)
    fully_shard(model)
    assert model._unit == "cm"
    want = step()
    model.linear.set_all_reduce_hook(fail)
    with pytest.raises(KeyError, match="planted"):
        step()
    model.linear.set_all_reduce_hook(None)
    for param in model.parameters():
        param.grad = None
    assert not differences(step(), want)


class Keeps(nn.Module):
    """Keeps a tensor whose loss a program adds by itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.kept = x + self.scale
        return self.kept * 2


def a_loss_of_a_kept_tensor_alone(ctx):
    model = fully_shard(Keeps())
    for _ in range(2):
        model(torch.ones(1, 2, requires_grad=True))
        model.kept.sum().backward()
        assert torch.equal(model.scale.grad.full_tensor(), torch.ones(2))
        model.zero_grad()


def two_models(ctx):
    """Settings of one model, and its reset, leave another one alone."""
    first, second = (fully_shard(nn.Linear(2, 2)) for _ in range(2))
    x = torch.ones(1, 2)
    first.set_is_last_backward(False)
    second(x).sum().backward()
    assert second.weight.grad is not None
    first.set_is_last_backward(True)
    whole = nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2))
    fully_shard(whole)[0].set_is_last_backward(False)
    whole(x).sum().backward()
    assert whole[0].weight.grad is None and whole[1].weight.grad is not None
    second.zero_grad()
    second.set_requires_gradient_sync(False)
    second(x).sum().backward()
    first.reset_iter_state()
    second.set_requires_gradient_sync(True)
    second(x).sum().backward()
    assert torch.equal(second.weight.grad.full_tensor(), torch.full((2, 2), 2.0))


def one_process_with_the_batches(ctx):
    model, alone = sharded(), make_model()
    optimizer, other = (RULES["adamw"](each.parameters()) for each in (model, alone))
    steps_of(model, optimizer, 10, ctx.rank)
    for step in range(10):
        other.zero_grad()
        parts = [batch(10 * step, rank) for rank in range(ctx.size)]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        nn.functional.cross_entropy(alone(x), y).backward()
        other.step()
    assert not differences(full_params(model), full_params(alone), atol=2e-4)


METHODS = [
    custom_collectives, hooks_and_divisors, unshard_and_prefetch, last_backward, forward_method, unshard_in_backward,
    fixed_settings, an_embedding_beside_ddp, parts_of_a_unit, classes, after_an_error_at_the_end_of_a_backward,
    a_loss_of_a_kept_tensor_alone, two_models, one_process_with_the_batches,
]  # fmt: skip


@over_gloo
def all_methods(ctx):
    for method in METHODS:
        method(ctx)


def test_methods(tmp_path):
    run_ranks(all_methods, 2, str(tmp_path / "store"), timeout=120)


# ---- Units by hand.


@over_comm
def unit_by_hand(ctx):
    """A unit on a communicator alone: no torch.distributed, gradients that aren't autograd's."""
    torch.manual_seed(4)
    layer = nn.Linear(5, 3)
    before = [param.detach().clone() for param in layer.parameters()]
    unit = Unit(layer, ctx.communicator())
    assert all(isinstance(piece, DTensor) for piece in unit.pieces())
    assert sum(piece.to_local().numel() for piece in unit.pieces()) < 18 or ctx.size == 1
    with unit.unsharded(write_back=True):
        assert all(torch.equal(*pair) for pair in zip(layer.parameters(), before, strict=True))
        layer.weight.data += 1
    unit.unshard()
    assert torch.equal(layer.weight, before[0] + 1)
    unit.params[0].full.grad = torch.full_like(layer.weight, ctx.rank + 1.0)
    unit.reduce()
    unit.reshard()
    grads = [piece.grad.full_tensor() for piece in unit.pieces()]
    assert torch.equal(grads[0], torch.full((3, 5), (ctx.size + 1) / 2)) and not grads[1].any()
    with pytest.raises(InvalidUsage, match="has nothing gathered"):
        unit.wait_for_unshard()
    model = fully_shard(make_model(), comm=ctx.communicator())
    loss_of(model, ctx.rank).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_torch_distributed(ranks):
    run(unit_by_hand, ranks)
