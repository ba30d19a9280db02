"""FSDP2's methods and arguments: each has its meaning here, or is refused by an error that says what to do."""

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from collectives.errors import InvalidArgument, InvalidUsage
from collectives.sharded import (
    FSDPModule,
    ShardedDataParallel,
    ShardedModule,
    fully_shard,
    register_forward_method,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.sharded.training import RULES, full, same, steps_of

# Older versions of torch have no such class, and no such argument either.
MESH_DIMS = fsdp.DataParallelMeshDims(shard="shard") if hasattr(fsdp, "DataParallelMeshDims") else "any"


def test_all_methods_of_torch_are_there():
    public = [name for name in dir(TorchFSDPModule) if not name.startswith("_")]
    assert len(public) > 15 and not [name for name in public if not hasattr(ShardedModule, name)]
    assert FSDPModule is ShardedModule and register_fsdp_forward_method is register_forward_method


def sharded(**how):
    model = make_model()
    for each in model[::2]:
        fully_shard(each, **how)
    return fully_shard(model, **how)


def raised(call):
    with pytest.raises((InvalidArgument, InvalidUsage)) as caught:
        call()
    return str(caught.value)


def grads_of(model, rank):
    model.zero_grad()
    x, y = batch(0, rank)
    nn.functional.cross_entropy(model(x), y).backward()
    with ShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        return {name: param.grad.clone() for name, param in model.named_parameters()}


class Recorder:
    """The engine's all-gather by FSDP2's interface; counts."""

    def __init__(self, comm):
        self.comm, self.calls = comm, 0

    def __call__(self, out, inp, group, async_op=False):
        self.calls += 1
        return self.comm.all_gather(out, inp, async_op=async_op)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(20, 6)
        self.linear = nn.Linear(6, 5)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens))


def embed_steps(model, rank):
    optimizer = RULES["sgd"](model.parameters())
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 20, (9,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens % 5).backward()
        optimizer.step()
    return full(model)


@over_gloo
def settings(ctx):
    found = {}
    model = sharded(reshard_after_forward=None)
    grads = grads_of(model, ctx.rank)

    # Hooks of reduced gradients.
    shapes = []

    def halve(reduced):
        shapes.append(reduced.dim())
        reduced.mul_(0.5)

    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_all_reduce_hook(halve)
    halved = grads_of(model, ctx.rank)
    found["hook"] = all(torch.equal(halved[name], grad * 0.5) for name, grad in grads.items()) and set(shapes) == {1}
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_all_reduce_hook(None)
    found["no hook"] = not same(grads_of(model, ctx.rank), grads)
    found["hook, stream"] = "leave it out" in raised(lambda: model.set_all_reduce_hook(halve, stream=1))
    found["hook, kind"] = "must be a function" in raised(lambda: model.set_all_reduce_hook(3))

    # Divisors, of one module or of all.
    model[0].set_gradient_divide_factor(ctx.size * 2.0, recurse=False)
    divided = grads_of(model, ctx.rank)
    found["divided"] = all(
        torch.equal(divided[name], grad * (0.5 if name.startswith("0.") else 1)) for name, grad in grads.items()
    )
    model.set_reduce_scatter_divide_factor(float(ctx.size))

    # An embedding's backward needs no weights; a linear layer's does, and gathers them late.
    expected = Embedded()
    expected = embed_steps(fully_shard(expected), ctx.rank)
    for off in ("embedding", "linear"):
        embedded = Embedded()
        fully_shard(embedded.embedding), fully_shard(embedded.linear)
        fully_shard(embedded)
        part = getattr(embedded, off)
        recorder = Recorder(part._unit.ranks.shard)
        part.set_custom_all_gather(recorder)
        part.set_unshard_in_backward(False)
        found["unshard_in_backward", off] = not same(embed_steps(embedded, ctx.rank), expected)
        found["gathers", off] = recorder.calls == 4 or off == "linear"

    # What is always so is accepted, and what never is isn't.
    model.set_requires_all_reduce(False), model.set_requires_all_reduce(True)
    model.set_reduce_scatter_unused_params(True), model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True), model.set_reduce_scatter_max_input_buffers(1)
    model.set_separate_reduce_scatter_group(False)
    if hasattr(torch, "Event"):
        model.set_post_optim_event(torch.Event("cpu"))
    on_another = fully_shard(nn.Linear(2, 2), comm=ctx.communicator())
    refused = {
        "zeros": lambda: model.set_reduce_scatter_unused_params(False),
        "the engine's memory": lambda: model.set_allocate_memory_from_process_group_for_comm(False),
        "one reduction": lambda: model.set_reduce_scatter_max_input_buffers(2),
        "True isn't offered": lambda: model.set_reduce_scatter_max_input_buffers(True),
        "one communicator": lambda: model.set_separate_reduce_scatter_group(),
        "windows of NCCL": lambda: model.set_symm_mem_for_comm(),
        "must be a torch.Event": lambda: model.set_post_optim_event(3),
        "interval of a unit's flat buffer": lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda param: None),
        "as the mesh": lambda: fully_shard(nn.Linear(2, 2), dp_mesh_dims=MESH_DIMS),
        "only sharded modules": lambda: share_comm_ctx([model, nn.Linear(2, 2)]),
        "different communicators": lambda: share_comm_ctx([model, on_another]),
    }  # fmt: skip
    for text, call in refused.items():
        found[text] = text in raised(call)
    share_comm_ctx([model, model[0]])
    return found


def fail(*_):
    raise ZeroDivisionError


@over_gloo
def failing_backwards(ctx):
    found = {}
    other = sharded()
    hook = other[2].register_full_backward_hook(fail)
    for step in range(2):
        try:
            steps_of(other, RULES["sgd"](other.parameters()), 1, ctx.rank)
        except ZeroDivisionError:
            other.reset_iter_state()
        found["failed", step] = other._scheduler.graph_task is None and all(
            param.full.grad is None for each in other._scheduler.units for param in each.params
        )
    hook.remove()
    plain = sharded()
    for each in (other, plain):
        steps_of(each, RULES["sgd"](each.parameters()), 3, ctx.rank)
    found["went on"] = not same(full(other), full(plain))
    return found


@pytest.mark.parametrize("program", [settings, failing_backwards])
def test_settings(program, tmp_path):
    for found in run(program, 2, str(tmp_path / "store")):
        assert not [key for key, right in found.items() if not right]
