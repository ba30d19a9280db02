"""Our collectives in torch's FSDP2: training equals that over Gloo; buffers return to the pool; errors."""

import contextlib
import gc
import os
import types
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from collectives.comm.shared_memory_pool import SharedMemoryPool
from collectives.errors import EngineUnavailable, InvalidArgument, InvalidUsage
from collectives.rendezvous.process_groups import get_communicator
from collectives.sharded import fsdp2
from tests.ddp.training import over_gloo, run

with contextlib.suppress(ImportError):
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

pytestmark = pytest.mark.skipif(fsdp2._protocol is None, reason="this torch has no custom collectives in FSDP2")

# The first layer's buffers are large enough for the pool; no size here is divisible by the ranks.
WIDTHS = (37, 601, 41, 5)


def make_model():
    torch.manual_seed(21)
    layers = []
    for wide, narrow in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def shard(model, ours, **options):
    """Shard by layers, over Gloo or with our collectives; one pair of objects serves all modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        for layer in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
            fully_shard(layer, **options)
    if ours:
        gather, scatter = fsdp2.AllGather(), fsdp2.ReduceScatter()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
    return model


def train(model, rank, steps=2, accumulate=1):
    """Return the gradients of the last step and the parameters after it, all in full."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            model.set_requires_gradient_sync(part == accumulate - 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x, y = torch.randn(8, WIDTHS[0], generator=generator), torch.randint(0, 5, (8,), generator=generator)
            nn.functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return [*grads, *(p.detach().full_tensor() for p in model.parameters())]


def both(rank, tolerance=(1e-5, 1e-6), accumulate=1, prepare=lambda model: model, **options):
    """Train over Gloo and by ours, compare, and return ours."""
    theirs = train(prepare(shard(make_model(), False, **options)), rank, accumulate=accumulate)
    ours = train(prepare(shard(make_model(), True, **options)), rank, accumulate=accumulate)
    for expected, found in zip(theirs, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance[0], atol=tolerance[1])
    return ours


def divided_by(factor):
    def prepare(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
        return model

    return prepare


@over_gloo
def all_ways(ctx):
    """All settings in one pair of processes: starting them takes longer than what they do."""
    given = {
        "resharded": both(ctx.rank),
        "kept": both(ctx.rank, reshard_after_forward=False),
        "accumulated": both(ctx.rank, accumulate=3),
    }
    # Gloo sums bf16 in bf16, ours in fp32: the difference is a rounding of bf16, 2**-8.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    given["bf16"] = both(ctx.rank, tolerance=(3e-2, 3e-3), mp_policy=policy)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given["bf16, summed in fp32"] = both(ctx.rank, tolerance=(1e-5, 1e-5), mp_policy=policy)
    # fp16 is divided before and after, around a sum.
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float16)
    given["fp16 sums"] = both(ctx.rank, tolerance=(1e-2, 1e-3), mp_policy=policy)
    # Gloo knows no premultiplied sum: 2 is what the factor makes of the average of n ranks' gradients.
    exact = train(divided_by(2.0 * ctx.size)(shard(make_model(), True)), ctx.rank, steps=1)
    half = [grad * 2.0 for grad in exact[: len(exact) // 2]]
    whole = train(shard(make_model(), True), ctx.rank, steps=1)
    for expected, found in zip(whole, half, strict=False):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return given


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_equals_gloo(ranks, tmp_path):
    first, *others = run(all_ways, ranks, str(tmp_path / "store"))
    for other in others:
        for way, tensors in first.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, other[way], strict=True)), way


@over_gloo
def two_dimensions(ctx):
    """Two replicas of two shards: ours over the shards' groups, torch's own all-reduce over the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    ours = both(ctx.rank, accumulate=2, mesh=mesh)
    opened = get_communicator(mesh.get_group("shards"), torch.device("cpu"))
    assert (opened.rank, opened.size) == (ctx.rank % 2, 2)
    return ours


def test_hybrid_sharding(tmp_path):
    first, *others = run(two_dimensions, 4, str(tmp_path / "store"))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def shared_bytes():
    """Return this process's resident shared memory, of which the pool's blocks are, in bytes."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssShmem:"))
    return int(line.split()[1]) << 10


def at_rest(pool):
    return [*pool._free, *(block for block, _ in pool._returned)]


@over_gloo
def pooled(ctx):
    model = shard(make_model(), True)
    (pool,) = fsdp2._shared.values()
    train(model, ctx.rank, steps=2)
    held, blocks = pool.reserved, {block.data_ptr() for block in at_rest(pool)}
    least = 4 * WIDTHS[1] * (WIDTHS[0] + 1)  # bytes of a pooled buffer: at least the first layer's parameters
    train(model, ctx.rank, steps=4)
    # No block is new or still in use: gradients, which live on, are not in the pool.
    assert pool.reserved == held >= pool.max_allocated >= least
    assert {block.data_ptr() for block in at_rest(pool)} == blocks
    assert sum(block.numel() for block in at_rest(pool)) == held
    assert held < 3 * least, "all-gather and reduce-scatter take turns with two blocks at the most"
    during = shared_bytes()
    del model, pool
    gc.collect()
    assert not len(fsdp2._shared)
    assert shared_bytes() <= during - least
    return held


def test_buffers_return_to_the_pool(tmp_path):
    run(pooled, 2, str(tmp_path / "store"))


@over_gloo
def misuse(ctx):
    gather, scatter, group = fsdp2.AllGather(), fsdp2.ReduceScatter(), dist.group.WORLD
    # What FSDP2 waits for is an instance of torch's class.
    part = torch.full((3,), float(ctx.rank))
    out = torch.empty(3 * ctx.size)
    work = gather(out, part, group, async_op=True)
    assert isinstance(work, dist.Work) and work.wait() and work.is_completed()
    assert torch.equal(out, torch.arange(ctx.size).repeat_interleave(3).float())
    assert work.get_future().wait()[0] is out
    assert gather(out, part, group) is None
    # A block is in use as long as any view of it lives, and is reused afterwards.
    like = {"dtype": torch.float32, "device": torch.device("cpu")}
    first = gather.allocate((2, 10_000), **like)
    view, address = first[1, 5:], first.data_ptr()
    del first
    other = gather.allocate((20_000,), **like)
    assert other.data_ptr() != address
    del view
    assert gather.allocate((20_000,), **like).data_ptr() == address

    half, mine = torch.ones(2 * ctx.size, dtype=torch.bfloat16), torch.empty(2, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="op must be one of"):
        scatter(mine, half, group, dist.ReduceOp.BAND)
    with pytest.raises(InvalidArgument, match="bool"):
        scatter(mine.bool(), half.bool(), group, dist.ReduceOp.SUM)
    with pytest.raises(InvalidArgument):
        gather(torch.empty(7), part, group)
    with pytest.raises(InvalidArgument):
        gather(out.double(), part, group)
    # 1 + 2**-9 + 2**-9 is 1 in bf16 sums, and the next number after 1 rounded once.
    small = torch.full((ctx.size,), 2.0**-8 if ctx.rank else 1.0, dtype=torch.bfloat16)
    total = torch.empty(1, dtype=torch.bfloat16)
    scatter(total, small, group, dist.ReduceOp.SUM)
    assert total.item() == 1 + 2.0**-7
    alone = dist.new_group([0])
    comm = get_communicator(group, torch.device("cpu"))
    if ctx.rank == 0:
        with pytest.raises(InvalidUsage, match="rank 0 of 1"):
            fsdp2.AllGather(comm)(out, out, alone)
    # An unsharding ahead of its use, which takes the Work.
    model = shard(make_model(), True)
    model[0].unshard(async_op=True).wait()
    assert model[0].weight.shape == (WIDTHS[1], WIDTHS[0])
    assert torch.equal(model[0].weight, make_model()[0].weight)


def test_calls_and_refusals(tmp_path):
    run(misuse, 3, str(tmp_path / "store"))


def test_objects():
    assert fsdp2.AllGather().allocate((3, 5), dtype=torch.int8, device=torch.device("cpu")).shape == (3, 5)
    assert "the module's group" in repr(fsdp2.ReduceScatter())
    with pytest.raises(InvalidArgument, match="comm must be"):
        fsdp2.AllGather("nccl")
    with mock.patch.object(fsdp2, "_protocol", None), pytest.raises(EngineUnavailable, match=r"torch 2\.9"):
        fsdp2.ReduceScatter()


def test_a_forked_child_takes_nothing_of_its_parent():
    made = []  # never freed, as the engine's is not in a child

    def empty(n, dtype):
        made.append(torch.empty(n, dtype=dtype))
        return made[-1]

    comm = types.SimpleNamespace(empty=empty)
    pool = SharedMemoryPool()
    block = pool.allocate(comm, 100_000, torch.uint8)
    address = block.data_ptr()
    del block
    child = os.fork()
    if not child:
        mine = pool.allocate(comm, 50_000, torch.uint8)
        os._exit(int(mine.data_ptr() == address or pool.reserved != 50_000))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.allocate(comm, 50_000, torch.uint8).data_ptr() == address
