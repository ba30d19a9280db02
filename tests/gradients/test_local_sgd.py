"""Post-local SGD: when the ranks' models are averaged, what is averaged, and that no rank is waited for in vain."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torchs_optimizer

from collectives import optim
from collectives.compression import Bucket
from collectives.errors import InvalidArgument, InvalidUsage, Mismatch
from collectives.gradients import local_sgd
from collectives.gradients.local_sgd import LocalSGD
from tests.ddp.training import BUCKET_MB, loss_of, make_model, over_gloo, run, wrap


def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    local, comm = state
    if local.observe_bucket(comm, Bucket(bucket.buffer(), bucket.parameters(), None, bucket.index())):
        comm.all_reduce(bucket.buffer(), "avg")
    if bucket.is_last():
        local.end_backward()
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def wrapped(local, ctx, model=None, **options):
    # Plain first: the hook is not collectives' own.
    ddp = wrap(make_model() if model is None else model, "plain", bucket_cap_mb=BUCKET_MB, **options)
    ddp.register_comm_hook((local, ctx.communicator()), hook)
    return ddp


def parameters(model):
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


def step(ddp, optimizer, number, rank):
    optimizer.zero_grad()
    loss_of(ddp, number, rank).backward()
    optimizer.step()


@over_gloo
def beside_torchs(ctx, every, after):
    seen, ends = [], []
    local = LocalSGD(every, after)
    ddp = wrapped(local, ctx)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for number in range(10):
        step(ddp, optimizer, number, ctx.rank)
        seen.append(parameters(ddp))
    ends.append(seen[-1])
    counters = local.state_dict()

    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_MB)
    state = PostLocalSGDState(None, None, start_localSGD_iter=after, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook)
    # Torch's averages after the first local step, and then after each period; ours at the end of each.
    averager = PeriodicModelAverager(period=every, warmup_steps=after + every - 1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for number in range(10):
        step(ddp, optimizer, number, ctx.rank)
        averager.average_parameters(ddp.parameters())
    ends.append(parameters(ddp))
    del ddp
    return seen, ends, counters


@pytest.mark.parametrize(("ranks", "every", "after"), [(2, 3, 4), (3, 2, 0)])
def test_the_same_as_torchs(tmp_path, ranks, every, after):
    results = run(beside_torchs, ranks, str(tmp_path / "store"), every, after)
    for seen, (ours, torchs), counters in results:
        assert torch.allclose(ours, torchs, rtol=1e-5, atol=1e-6)
        assert counters["modules"] == [{"backwards": 10, "waiting": None}]
        for number, (mine, first) in enumerate(zip(seen, results[0][0], strict=True), 1):
            equal = number <= after or (number - after) % every == 0
            assert torch.equal(mine, first) == (equal or mine is first), number


@over_gloo
def of_many_kinds(ctx):
    """Two modules with optimizers of their own on one state, one module with two, and a resumed count."""
    local = LocalSGD(2)
    first, second = wrapped(local, ctx), wrapped(local, ctx)
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    halves = list(second.parameters())
    two = [torch.optim.Adam(halves[:3]), torch.optim.SGD(halves[3:], lr=0.1)]
    outcome = []
    for number in range(1, 5):
        step(first, one, number, ctx.rank)
        if number > 1:  # one backward behind
            loss_of(second, number, ctx.rank).backward()
            two[0].step()
            half = parameters(second)
            two[1].step()
            outcome.append((number, parameters(first), half, parameters(second)))
            second.zero_grad()
    saved = local.state_dict()

    # The counters go on: the next of the first module's backwards is its fifth.
    resumed = LocalSGD(2)
    resumed.load_state_dict(saved)
    first, second = wrapped(resumed, ctx), wrapped(resumed, ctx)
    for ddp in (first, second):
        step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 1, ctx.rank)
    later = parameters(first), parameters(second), resumed.state_dict()
    resumed.average()
    del ddp
    return outcome, saved, later, parameters(first)


def test_several_modules_and_optimizers(tmp_path):
    mine, other = run(of_many_kinds, 2, str(tmp_path / "store"))
    for (number, first, half, second), theirs in zip(mine[0], other[0], strict=True):
        assert torch.equal(first, theirs[1]) == (number % 2 == 0)
        ends = 12 * 40 + 40 + 40 * 30  # of the parameters of the first optimizer
        averaged = number == 3  # the second module's second backward
        assert torch.equal(half[:ends], theirs[2][:ends]) == averaged
        assert torch.equal(half[ends:], theirs[2][ends:]) == (not averaged)  # as they were before this step
        assert torch.equal(second, theirs[3]) == averaged
    assert [each["backwards"] for each in mine[1]["modules"]] == [4, 3]
    assert [each["backwards"] for each in mine[2][2]["modules"]] == [5, 4]
    assert not torch.equal(mine[2][0], other[2][0]) and torch.equal(mine[2][1], other[2][1])
    assert torch.equal(mine[3], other[3])


@over_gloo
def with_a_scaler(ctx):
    """One rank's scaler leaves out a step at which the models were to be averaged."""
    local = LocalSGD(2)
    ddp = wrapped(local, ctx, broadcast_buffers=True, model=nn.Sequential(make_model(), nn.BatchNorm1d(5)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for number in range(1, 6):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(ddp, number, ctx.rank))
        if number in (2, 3) and ctx.rank == number - 2:
            loss = loss * torch.inf
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(parameters(ddp))
    del ddp
    return seen


def test_a_step_that_one_rank_leaves_out_is_waited_for(tmp_path):
    mine, other = run(with_a_scaler, 2, str(tmp_path / "store"))
    equal = [torch.equal(a, b) for a, b in zip(mine, other, strict=True)]
    # Due after backward 2, where rank 0 doesn't step, nor rank 1 after backward 3.
    assert equal == [False, False, False, True, False]
    assert torch.equal(mine[0], mine[1]) and torch.equal(other[1], other[2])
    assert all(values.isfinite().all() for values in mine + other)


@over_gloo
def with_masters(ctx):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)).to(torch.bfloat16)
    model = model.to(memory_format=torch.channels_last)
    model.append(Cast()).append(nn.Linear(5, 5))
    local = LocalSGD(1)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook((local, ctx.communicator()), hook)
    optimizer = optim.AdamW(ddp.parameters(), lr=0.01, master_weights=True)
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + ctx.rank)
        optimizer.zero_grad()
        ddp(torch.randn(4, 3, 4, 4, generator=generator).bfloat16()).square().sum().backward()
        optimizer.step()
    at_average = parameters(ddp)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # what the parameters are is now what their masters are
    del ddp
    return at_average, parameters(model), [optimizer.state[p].get("master_param") for p in model.parameters()]


class Cast(nn.Module):
    def forward(self, x):
        return x.float()


def test_master_weights_follow(tmp_path):
    mine, other = run(with_masters, 2, str(tmp_path / "store"))
    assert torch.equal(mine[0], other[0])
    assert torch.equal(mine[0], mine[1])


@over_gloo
def refused(ctx):
    comm = ctx.communicator()
    bucket = Bucket(torch.ones(4), [nn.Parameter(torch.ones(4))], [0], 0)
    messages = []
    for value, limit in ((torch.nan, local_sgd._PATIENCE), (1.0, local_sgd._PATIENCE), (0.0, 2 * local_sgd._PATIENCE)):
        fresh = LocalSGD(1)
        bucket.flat.fill_(value)
        try:
            for number in range(limit + 2):  # noqa: B007
                fresh.observe_bucket(comm, bucket)
                fresh.end_backward()
        except InvalidUsage as error:
            messages.append((number, str(error)))
    return messages


def test_what_can_not_be_averaged_is_an_error(tmp_path):
    for messages in run(refused, 2, str(tmp_path / "store")):
        patience = local_sgd._PATIENCE
        assert [number for number, _ in messages] == [patience + 1, patience + 1]
        assert "not finite" in messages[0][1] and "no torch.optim.Optimizer" in messages[1][1]


def decides_differently(ctx):
    """One rank steps and the other doesn't: both get an error."""
    comm = ctx.new_communicator(timeout=20)
    local = LocalSGD(1)
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=0.1)
    param.grad = torch.ones(4)
    bucket = Bucket(param.grad, [param], [0], 0)
    local.observe_bucket(comm, bucket)
    local.end_backward()
    try:
        if ctx.rank == 0:
            optimizer.step()
        local.observe_bucket(comm, bucket)
        local.end_backward()
    except Mismatch as error:
        return str(error)
    finally:
        comm.abort()


def test_ranks_that_decide_differently_do_not_hang():
    assert all("all_reduce" in message for message in run(decides_differently, 2))


class Pair:
    """A communicator of one rank, whose average is known."""

    size, _on_host = 1, True

    def __init__(self, factor):
        self.factor, self.sizes = factor, []

    def empty(self, n, dtype):
        return torch.empty(n, dtype=dtype)

    def all_reduce(self, flat, op, algorithm=None):
        self.sizes.append(flat.nbytes)
        flat.mul_(self.factor)


def test_parameters_of_all_layouts_in_chunks(monkeypatch):
    monkeypatch.setattr(local_sgd, "_CHUNK_BYTES", 400)
    params = [
        nn.Parameter(torch.randn(3, 5, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(7, dtype=torch.float64)),
        nn.Parameter(torch.randn(6, 9).t()),
        nn.Parameter(torch.randn(5, dtype=torch.complex64)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(0, 3)),
    ]
    before, versions = [param.detach().clone() for param in params], [param._version for param in params]
    comm = Pair(0.5)
    local_sgd.average_parameters(comm, params)
    for param, was, version in zip(params, before, versions, strict=True):
        assert torch.equal(param, was * 0.5)
        assert param.numel() == 0 or param._version > version
    assert sum(comm.sizes) == sum(param.nbytes for param in params)
    assert max(comm.sizes) == 400 and len(comm.sizes) == 5  # 1,180 bytes of fp32, 56 of fp64, 40 of complex
    with pytest.raises(InvalidArgument, match="gaps"):
        local_sgd.average_parameters(comm, [nn.Parameter(torch.randn(4, 6)[:, ::2])])


def test_the_hook_of_all_optimizers_goes():
    gc.collect()
    hooks = torchs_optimizer._global_optimizer_post_hooks
    before = len(hooks)
    first, second = LocalSGD(2), LocalSGD(3, 1)
    assert len(hooks) == before + 1
    del first
    assert len(hooks) == before + 1
    del second
    assert len(hooks) == before
