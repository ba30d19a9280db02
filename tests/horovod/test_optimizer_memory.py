"""hvd.DistributedOptimizer's gradients: views of the memory that is reduced, whatever is done with them or by whom."""

import pickle
import warnings

import pytest
import torch
from torch import nn

from collectives import horovod as hvd
from tests.ddp.training import batch, make_model
from tests.ranks import run_ranks

from .optimizer_training import MAKERS, a_job, same_on_all


class Training:
    """A model with a convolution in channels_last, and steps whose gradients are compared with the ranks' mean."""

    def __init__(self, ctx):
        self.ctx = ctx
        self.model = make_model()
        self.model.append(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))  # whose gradients have strides
        self.params = list(self.model.parameters())
        self.wrapped = hvd.DistributedOptimizer(MAKERS["sgd"](self.params), self.model.named_parameters())

    def step(self, to_none=True, inside=None):
        """Make one step; ``inside`` is called between the backward and the reduction."""
        ctx, model, params, wrapped = self.ctx, self.model, self.params, self.wrapped
        wrapped.zero_grad(set_to_none=to_none)
        images, labels = batch(0, ctx.rank)
        pictures = torch.full((2, 3, 5, 5), ctx.rank + 1.0)
        (nn.functional.cross_entropy(model[:-1](images), labels) + model[-1](pictures).mean()).backward()
        local = [param.grad.clone() for param in params]
        if inside is not None:
            inside()
        wrapped.synchronize()
        everyone = ctx.exchange(pickle.dumps([grad.tolist() for grad in local]))
        mean = zip(*(map(torch.tensor, pickle.loads(each)) for each in everyone), strict=True)
        for param, grads in zip(params, mean, strict=True):
            torch.testing.assert_close(param.grad, sum(grads) / ctx.size, rtol=1e-6, atol=1e-7)
        with wrapped.skip_synchronize():
            wrapped.step()


def views_of_the_bucket(training):
    params, reducer = training.params, training.wrapped._reducer
    packs = []
    executor = reducer._controller._executor
    executor._buffer = lambda *arguments: packs.append(arguments) or type(executor)._buffer(executor, *arguments)
    training.step()
    assert packs  # of single gradients
    packs.clear()
    (bucket,) = reducer._buckets
    view_of = dict(zip(map(id, bucket.params), bucket._views, strict=True))
    places = [view_of[id(param)].data_ptr() for param in params]
    for to_none in (True, True, False, False, True):
        training.step(to_none)
        assert [param.grad.data_ptr() for param in params] == places
    assert not packs  # reduced where they lie
    assert params[-2].grad.stride() == params[-2].stride() != torch.empty(params[-2].shape).stride()
    low, high = bucket.flat.data_ptr(), bucket.flat.data_ptr() + bucket.flat.nbytes
    assert all(low <= place < high for place in places)


def gradients_that_users_change(training):
    params, wrapped = training.params, training.wrapped
    kept = params[0].grad
    before = kept.clone()
    params[0].grad = kept * 1.0  # an assigned one
    wrapped.synchronize()
    assert params[0].grad is kept and torch.equal(kept, before)  # an average of what is equal everywhere
    params[0].grad = torch.ones(params[0].shape[0], 1).expand(params[0].shape)  # one with no memory of its own
    wrapped.synchronize()
    assert torch.equal(params[0].grad, torch.ones_like(params[0]))
    for change in (lambda: params[3].grad.mul_(0.5), lambda: setattr(params[3], "grad", None)):
        with pytest.raises(AssertionError, match=r"gradient of 2\.bias was changed .*synchronize\(\) first"):
            training.step(inside=change)
    training.step()


def second_derivatives(training):
    """A second derivative goes by autograd.grad; backward(create_graph=True) is refused."""
    ctx, model, params, wrapped = training.ctx, training.model, training.params, training.wrapped
    wrapped.zero_grad()
    loss = model[:-1](batch(1, ctx.rank)[0]).square().mean()
    (inner,) = torch.autograd.grad(loss, [params[0]], create_graph=True)
    (loss + inner.square().sum()).backward()
    wrapped.step()
    wrapped.zero_grad()
    with pytest.raises(AssertionError, match="create_graph"):
        model[:-1](batch(1, ctx.rank)[0]).square().mean().backward(create_graph=True)
    wrapped.load_state_dict(wrapped.state_dict())  # drops the backward
    wrapped.zero_grad()


def scaled_losses(ctx, make):
    """A GradScaler as in a program of one process. Horovod's own way: tests/gradients/test_front_ends.py."""
    model = make_model()
    params = list(model.parameters())
    wrapped = hvd.DistributedOptimizer(make(params))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, infinite in enumerate((False, True, False)):
        wrapped.zero_grad()
        images, labels = batch(step, ctx.rank)
        loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss * (float("inf") if infinite and ctx.rank == 0 else 1.0)).backward()
        was = params[0].detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.step(wrapped)
        scaler.update()
        assert torch.equal(was, params[0].detach()) == infinite  # left out on all ranks
    assert scaler.get_scale() == 512.0 and same_on_all(ctx, model)


def other_dtypes(ctx, dtype):
    """Gradients of another dtype, some with no elements."""
    odd = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((3,), (), (0, 2), (2, 5))]
    other = hvd.DistributedOptimizer(torch.optim.SGD(odd, lr=1.0))
    for _ in range(3):
        other.zero_grad()
        sum((param * (ctx.rank + 1)).sum().abs() for param in odd).backward()
        other.synchronize()
        for param in odd:
            torch.testing.assert_close(param.grad, torch.full_like(param, 1.5))
    with other.skip_synchronize():
        other.step()


def memory(ctx):
    with a_job(ctx):
        training = Training(ctx)
        views_of_the_bucket(training)
        gradients_that_users_change(training)
        second_derivatives(training)
        for make in (MAKERS["sgd"], MAKERS["adam, fused"]):
            scaled_losses(ctx, make)
        for dtype in (torch.float64, torch.bfloat16, torch.complex64):
            other_dtypes(ctx, dtype)
    return True


def test_gradients_lie_where_they_are_reduced():
    assert run_ranks(memory, 2, timeout=60) == [True, True]
