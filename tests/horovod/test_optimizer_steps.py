"""Steps of hvd.DistributedOptimizer that aren't an average's: Adasum, closures, sums, several models, schedules."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from collectives import horovod as hvd
from tests.ranks import run_ranks

from .optimizer_training import a_job


def adasum(ctx):
    """Gradients that have nothing in common add up, equal ones count once."""
    params = [
        nn.Parameter(torch.ones(4)),
        nn.Parameter(torch.ones(4)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ]
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.5), op=hvd.Adasum, compression=hvd.Compression.bf16)
    own = torch.zeros(4)
    own[ctx.rank] = 2.0
    for _ in range(2):
        wrapped.zero_grad()
        (params[0] @ own + params[1].sum()).backward()
        wrapped.synchronize()  # does nothing, as in Horovod
        assert torch.equal(params[0].grad, own)
        wrapped.step()
    assert params[0].tolist() == [-1.0, -1.0, 1.0, 1.0] and params[1].tolist() == [0.0] * 4
    with pytest.raises(AssertionError, match="Adasum"), wrapped.skip_synchronize():
        pass
    loss = wrapped.step(lambda: params[0].sum())
    assert isinstance(loss, torch.Tensor)


def closures(ctx):
    """LBFGS, whose line search goes by the loss, finds the minimum of the ranks' average."""
    point = nn.Parameter(torch.zeros(3))
    target = torch.full((3,), float(ctx.rank))
    lbfgs = torch.optim.LBFGS([point], line_search_fn="strong_wolfe", max_iter=8)
    wrapped = hvd.DistributedOptimizer(lbfgs)

    def closure():
        wrapped.zero_grad()
        loss = (point - target).square().sum()
        loss.backward()
        return loss

    first = wrapped.step(closure)
    assert torch.equal(first, torch.tensor(1.5))  # of 0 and 3
    torch.testing.assert_close(point.detach(), torch.full((3,), 0.5))
    assert lbfgs.state is wrapped.state and lbfgs.param_groups is wrapped.param_groups


def sums(ctx):
    """A second synchronize() reduces nothing again, though gradients lie where they are reduced."""
    for _ in range(2):
        weight = nn.Parameter(torch.ones(2))
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        for _ in range(2):
            wrapped.zero_grad()
            (weight.sum() * (ctx.rank + 1)).backward()
            wrapped.synchronize()
            assert weight.grad.tolist() == [3.0, 3.0]
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                wrapped.step()
            assert "skip_synchronize" in str(warned[0].message)
            assert weight.grad.tolist() == [3.0, 3.0]
        assert weight.tolist() == [-5.0, -5.0]


def backward_of_all(ctx, nets):
    sum(net(torch.ones(2)).sum() * (ctx.rank + 1) for net in nets).backward()


def same_mean(nets):
    return nets[0].weight.grad.tolist() == nets[1].weight.grad.tolist() == [[1.5, 1.5]] * 2


def two_optimizers(ctx, nets):
    """Two optimizers whose parameters have the same names, on their way at once."""
    both = [hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()) for net in nets]
    for _ in range(3):
        for each in both:
            each._reducer._overlaps = True
            each.zero_grad()
        backward_of_all(ctx, nets)
        for each in both:
            each.step()
        assert same_mean(nets)


def several_models(ctx, nets):
    """One optimizer over the parameters of several models, whose names collide; and what Horovod asserts."""
    for named in (
        [net.named_parameters() for net in nets],
        {"first": nets[0].named_parameters(), "second": nets[1].named_parameters()},
        {"first": nets[0].weight, "second": nets[1].weight},
    ):
        chained = itertools.chain(*(net.parameters() for net in nets))
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(chained, lr=0.1), named)
        wrapped.zero_grad()
        backward_of_all(ctx, nets)
        wrapped.step()
        assert same_mean(nets)

    wrapped.zero_grad()
    nets[0](torch.ones(2)).sum().backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after"):
        wrapped.zero_grad()
    with pytest.raises(AssertionError, match="Gradients were computed more than backward_passes_per_step"):
        nets[0](torch.ones(2)).sum().backward()


def schedules(ctx, net):
    """A learning-rate schedule, made before and after the wrapping."""
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    wrapped = hvd.DistributedOptimizer(plain, net.named_parameters())
    late = torch.optim.lr_scheduler.StepLR(wrapped, 1, 0.1)
    counts = []
    wrapped.register_step_pre_hook(lambda *_: counts.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schedule in (early, late):
            wrapped.zero_grad()
            (net(torch.ones(2)).sum() * (ctx.rank + 1)).backward()
            wrapped.step()
            schedule.step()
            assert net.weight.grad.tolist() == [[1.5, 1.5]] * 2
    assert plain.param_groups[0]["lr"] == pytest.approx(0.05) and len(counts) == 2


def other_steps(ctx):
    with a_job(ctx):
        adasum(ctx)
        closures(ctx)
        sums(ctx)
        nets = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
        two_optimizers(ctx, nets)  # its optimizers are freed behind it, and their hooks with them
        several_models(ctx, nets)
        schedules(ctx, nets[0])
    return True


def test_adasum_closures_and_several_models():
    assert run_ranks(other_steps, 2, timeout=60) == [True, True]
