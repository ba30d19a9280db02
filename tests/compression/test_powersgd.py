"""PowerSGD as a wire: what ranks get, what they keep, and what travels."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives.compression import Bucket, Scaling, low_rank
from collectives.compression.powersgd import PowerSGD
from collectives.parameter_names import ParameterNames
from tests.ddp.training import over_gloo, run

# At rank 1 the first, the third and the last are compressed; what is not lies in three places.
SHAPES = [(24, 20), (7,), (16, 3, 3, 3), (4, 4), (1,), (20, 30), (3,)]
COMPRESSED = {0: (24, 20), 2: (16, 27), 5: (20, 30)}


def make(shapes=SHAPES, dtype=torch.float32):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    offsets, total = [], 0
    for param in params:
        offsets.append(total)
        total += param.numel()
    return Bucket(torch.zeros(total, dtype=dtype), params, offsets, 0)


def parts(bucket, flat):
    return [flat[begin : begin + param.numel()] for param, begin in zip(bucket.params, bucket.offsets, strict=True)]


def gradient(bucket, step, rank):
    """Matrices of full rank, with a little of low rank in front, as gradients have it."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    draw = [torch.randn(param.shape, generator=generator, dtype=torch.float64) for param in bucket.params]
    for each in draw:
        if each.dim() > 1:
            flat = each.view(each.shape[0], -1)
            flat += 4 * flat[:, :1] * flat[:1]
    return torch.cat([each.flatten() for each in draw]).to(bucket.flat.dtype)


def reduce(wire, ctx, bucket, step, factor=None, **options):
    bucket.flat.copy_(gradient(bucket, step, ctx.rank))
    sent = wire.reduce(ctx.communicator(), bucket, factor or Scaling(divisor=ctx.size), **options)
    return bucket.flat.clone(), sent


def mean(bucket, step, size):
    return sum(gradient(bucket, step, rank).double() for rank in range(size)) / size


def full_rank(ctx):
    """With as many columns as the matrix has, nothing is lost."""
    errors = {}
    factors = {"mean": Scaling(divisor=ctx.size), "sum": Scaling(), "predivided": Scaling(0.5, 0, 2 / ctx.size)}
    with mock.patch.object(low_rank, "_MIN_GAIN", 0):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for feedback in (True, False):
                for name, factor in factors.items():
                    bucket = make(dtype=dtype)
                    wire = PowerSGD(64, error_feedback=feedback)
                    got, _ = reduce(wire, ctx, bucket, 0, factor)
                    wanted = mean(bucket, 0, ctx.size) * (ctx.size if name == "sum" else 1)
                    error = (got.double() - wanted).abs().max() / wanted.abs().max() / torch.finfo(dtype).eps
                    errors[str(dtype), feedback, name] = error.item()
    return errors


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_as_large_as_the_matrix_gives_the_average(ranks):
    for errors in run(full_rank, ranks):
        assert max(errors.values()) < 40, errors  # units of the last place of the largest


def telescopes(ctx, dtype, before):
    bucket = make(dtype=dtype)
    wire = PowerSGD(1)
    factor = Scaling(divisor=ctx.size) if before == 1 else Scaling(before, 0, 1 / before / ctx.size)
    applied, wanted, sent, first, stats = 0, 0, [], [], []
    for step in range(6):
        grad_stats = torch.zeros(2, dtype=torch.float64)
        got, nbytes = reduce(wire, ctx, bucket, step, factor, grad_stats=grad_stats)
        first.append(got)
        sent.append(nbytes)
        stats.append((grad_stats, got.double().square().sum().item()))
        applied, wanted = applied + got.double(), wanted + mean(bucket, step, ctx.size)
    left = wire.residuals.get(bucket).double()
    left = sum(torch.from_numpy(each) for each in ctx.exchange(left.numpy())) / ctx.size / before
    return {
        "results": first,
        "bytes": sent,
        "stats": stats,
        "lost": (parts(bucket, left)[0]).abs().max().item(),
        "error": (applied + left - wanted).abs().max().item() / wanted.abs().max().item(),
    }


@pytest.mark.parametrize(
    ("ranks", "dtype", "before"),
    [(2, torch.float32, 1), (3, torch.float32, 0.25), (2, torch.bfloat16, 1), (2, torch.float64, 1)],
)
def test_what_is_applied_and_what_is_left_add_up(ranks, dtype, before):
    results = run(telescopes, ranks, dtype, before)
    # What isn't compressed is reduced in the bucket's dtype, in which each sum is rounded once and has no residual.
    limit = 0.02 if dtype == torch.bfloat16 else 1e-6
    rest = sum(make().params[index].numel() for index in range(len(SHAPES)) if index not in COMPRESSED)
    factors = sum(rows + columns for rows, columns in COMPRESSED.values()) * (8 if dtype == torch.float64 else 4)
    for result in results:
        assert result["error"] < limit
        assert result["lost"] > 0.1  # there was something to lose
        for nbytes in result["bytes"]:
            assert abs(nbytes - 2 * (ranks - 1) / ranks * (factors + rest * dtype.itemsize)) < 2
        for mine, other in zip(results[0]["results"], result["results"], strict=True):
            assert torch.equal(mine, other)
    for step in range(6):
        total = sum(result["stats"][step][0] for result in results)
        assert total[0] == pytest.approx(results[0]["stats"][step][1], rel=1e-5)
        assert total[1] == 0


def half_of_matrices(ctx):
    """In 16 bits the compressed ones have residuals of what rounding loses, too."""
    bucket = make([(64, 64)], torch.bfloat16)
    wire = PowerSGD(2)
    applied = wanted = 0
    for step in range(5):
        got, _ = reduce(wire, ctx, bucket, step)
        applied, wanted = applied + got.double(), wanted + mean(bucket, step, ctx.size)
    left = wire.residuals.get(bucket).double()
    left = sum(torch.from_numpy(each) for each in ctx.exchange(left.numpy())) / ctx.size
    return ((applied + left - wanted).abs().max() / wanted.abs().max()).item()


def test_rounding_to_16_bits_is_in_the_residual():
    assert max(run(half_of_matrices, 2)) < 1e-6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES])


def bucket_over(module, indices=None, index=0):
    params = list(module.parameters())
    params = params if indices is None else [params[i] for i in indices]
    bucket = make([param.shape for param in params])
    return Bucket(bucket.flat, params, bucket.offsets, index)


def resumed(ctx, rank):
    net = Net()
    names = ParameterNames()
    names.register(net)
    bucket = bucket_over(net)
    wire = PowerSGD(rank, parameter_names=names)
    for step in range(3):
        reduce(wire, ctx, bucket, step)
    saved = wire.state_dict()
    on = [reduce(wire, ctx, bucket, step)[0] for step in range(3, 6)]
    other = PowerSGD(rank, parameter_names=names)
    other.load_state_dict(saved)
    again = other.state_dict()  # before its parameters have come
    again_on = [reduce(other, ctx, bucket, step)[0] for step in range(3, 6)]

    # In other buckets: everything goes along, and the batches in which factors are made orthonormal are others.
    split = PowerSGD(rank, parameter_names=names)
    split.load_state_dict(again)
    halves = [bucket_over(net, range(0, 4)), bucket_over(net, range(4, 7), 1)]
    apart = []
    for step in range(3, 6):
        whole, at = gradient(bucket, step, ctx.rank), 0
        for half in halves:
            half.flat.copy_(whole[at : at + half.flat.numel()])
            at += half.flat.numel()
            split.reduce(ctx.communicator(), half, Scaling(divisor=ctx.size))
        apart.append(torch.cat([half.flat for half in halves]))
        if step == 4:  # back in one bucket
            halves = [bucket]
    errors = []
    for given, load in (("rank", PowerSGD(rank + 1)), ("feedback", PowerSGD(rank, error_feedback=False))):
        try:
            load.load_state_dict(saved)
        except collectives.errors.InvalidArgument as error:
            errors.append((given, str(error)))
    return saved, again, on, again_on, apart, errors


@pytest.mark.parametrize("rank", [1, 2])
def test_a_resumed_run_continues(rank):
    for saved, again, on, again_on, apart, errors in run(resumed, 2, rank):
        names = {f"layers.{index}" for index in (COMPRESSED if rank == 1 else (0, 2, 5))}
        assert {name.split(":")[-1] for name in saved["q"]} == names
        assert all(torch.equal(again["q"][name], value) for name, value in saved["q"].items())
        assert again["residuals"].keys() == saved["residuals"].keys()
        assert all(torch.equal(a, b) for a, b in zip(on, again_on, strict=True))
        for a, b in zip(on, apart, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
        assert [given for given, _ in errors] == ["rank", "feedback"]


def recovers(ctx, feedback, dtype, looks):
    with mock.patch.object(low_rank, "_checks_finite", lambda flat: looks):  # False: as on CUDA
        bucket, steady = make(dtype=dtype), make(dtype=dtype)
        wire, other = PowerSGD(1, error_feedback=feedback), PowerSGD(1, error_feedback=feedback)
        for step in range(2):
            reduce(wire, ctx, bucket, step)
            reduce(other, ctx, steady, step)
        kept = [parts(bucket, wire.residuals.get(bucket))[0].clone()] if feedback else []
        bucket.flat.copy_(gradient(bucket, 2, ctx.rank))
        if ctx.rank == 1:
            bucket.flat[5], bucket.flat[6] = torch.nan, torch.inf
        grad_stats = torch.zeros(2, dtype=torch.float64)
        wire.reduce(ctx.communicator(), bucket, Scaling(divisor=ctx.size), grad_stats=grad_stats)
        bad = bucket.flat.clone()
        good, _ = reduce(other, ctx, steady, 2)
        if feedback:
            kept.append(parts(bucket, wire.residuals.get(bucket))[0].clone())
        after = [reduce(wire, ctx, bucket, step)[0] for step in range(3, 6)]
    return bad, good, grad_stats, kept, after


@pytest.mark.parametrize(
    ("feedback", "dtype", "looks"),
    [
        (True, torch.float32, True),
        (False, torch.float32, True),
        (True, torch.float64, True),
        (True, torch.float32, False),
        (True, torch.bfloat16, False),
    ],
)
def test_what_is_not_finite_does_not_stay(feedback, dtype, looks):
    results = run(recovers, 3, feedback, dtype, looks)
    bucket = make()
    for rank, (bad, good, _, kept, after) in enumerate(results):
        matrix, *others = parts(bucket, bad)
        assert matrix.isnan().all()
        for mine, theirs in zip(others, parts(bucket, good)[1:], strict=True):
            assert torch.equal(mine, theirs)  # the other parameters don't notice
        if feedback:
            before, now = kept
            if looks and dtype == torch.float32:  # undone where it lies
                if rank == 1:
                    assert (now[5:7] == 0).all() and before[5:7].all()
                    before[5:7] = 0
                assert torch.allclose(now, before, rtol=0, atol=1e-5 * before.abs().max().item())
            else:
                assert torch.equal(now, before)
        for step, flat in enumerate(after):
            assert flat.isfinite().all()
            assert torch.equal(flat, results[0][4][step])
    assert sum(grad_stats for _, _, grad_stats, _, _ in results)[1] == 24 * 20


def test_dependent_columns_go():
    first, third = torch.randn(2, 50)
    vectors = torch.stack([torch.stack([first, -2 * first, third]), torch.zeros(3, 50)])
    low_rank.orthonormalise(vectors)
    wanted = torch.zeros(2, 3, 3)
    wanted[0, 0, 0] = wanted[0, 2, 2] = 1
    assert torch.allclose(vectors @ vectors.transpose(1, 2), wanted, atol=1e-6)


def degenerate(ctx):
    """Gradients of 0, of a lower rank than the wire's, tiny and huge ones."""
    shapes = [(40, 30)] * 4
    bucket = make(shapes)
    wire = PowerSGD(3)
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(40, 1, generator=generator), torch.randn(1, 30, generator=generator)
    outcome = []
    for step in range(3):
        values = torch.zeros(4, 40, 30)
        values[0] = left @ right
        values[1] = left @ right * 1e-25
        values[2] = left @ right * 1e25
        if step == 2:
            values[3] = left @ right
        bucket.flat.copy_(values.flatten())
        wire.reduce(ctx.communicator(), bucket, Scaling(divisor=ctx.size))
        error = (bucket.flat.view(4, 40, 30) - values).abs().amax((1, 2)) / values.abs().amax((1, 2)).clamp(min=1e-30)
        outcome.append(error)
    return outcome


def test_gradients_of_low_rank_and_of_all_sizes():
    for outcome in run(degenerate, 2):
        assert all((error < 1e-4).all() for error in outcome), outcome


def wrapped_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    wire, comm = state
    wire.reduce(comm, Bucket(bucket.buffer(), bucket.parameters(), None, bucket.index()), Scaling(divisor=comm.size))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@over_gloo
def trained(ctx):
    """DDP makes its buckets anew after the first backward; what is kept goes along."""
    losses, ends = {}, {}
    for name in ("plain", "powersgd"):
        torch.manual_seed(1)
        convolution = nn.Conv2d(6, 16, 3).to(memory_format=torch.channels_last)
        model = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 4, 24), nn.ReLU(), nn.Linear(24, 4))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)
        if name == "powersgd":
            ddp.register_comm_hook((PowerSGD(2), ctx.communicator()), wrapped_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(ctx.rank)
        x = torch.randn(32, 6, 4, 4, generator=generator)
        y = (x[:, :4].amax((2, 3))).argmax(1)
        for _ in range(40):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
        ends[name] = [param.detach().clone() for param in model.parameters()]
        del ddp
    return losses, ends


def test_training_under_ddp(tmp_path):
    results = run(trained, 2, str(tmp_path / "store"))
    for losses, ends in results:
        assert losses["powersgd"] < 0.3 and losses["plain"] < 0.3
        for mine, other in zip(ends["powersgd"], results[0][1]["powersgd"], strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("rank", [0, -1, True, 1.5, "2"])
def test_ranks_that_are_none(rank):
    with pytest.raises(collectives.errors.InvalidArgument, match="from 1 up"):
        PowerSGD(rank)
