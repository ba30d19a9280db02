"""What collectives.optim refuses: options, gradients, arguments of steps and functions."""

from __future__ import annotations

import pytest
import torch

from collectives import errors, kernels, optim
from tests.optim.stepping import make, set_grads


def test_bad_options():
    for build, message in [
        (lambda: optim.SGD(make(), lr=-1), "Invalid learning rate: -1"),
        (lambda: optim.AdamW(make(), lr=torch.ones(2)), "Tensor lr must be 1-element"),
        (lambda: optim.SGD(make(), momentum=-0.1), "Invalid momentum value: -0.1"),
        (lambda: optim.SGD(make(), weight_decay=-1), "Invalid weight_decay value: -1"),
        (lambda: optim.SGD(make(), nesterov=True), "Nesterov momentum requires a momentum"),
        (lambda: optim.Adam(make(), eps=-1), "Invalid epsilon value: -1"),
        (lambda: optim.Adam(make(), betas=(1.0, 0.9)), "Invalid beta parameter at index 0: 1.0"),
        (lambda: optim.Adam(make(), betas=(0.9, torch.tensor(0.9))), "Invalid beta parameter at index 1"),
        (lambda: optim.Adam(make(), differentiable=True), "differentiable steps aren't offered"),
        (
            lambda: optim.Adam([{"params": make()}, {"params": [torch.zeros(3, dtype=torch.complex64)]}]),
            "parameter 0 of group 1 is complex64: it must be fp32",
        ),
    ]:
        with pytest.raises(errors.InvalidArgument, match=message) as raised:
            build()
        assert isinstance(raised.value, ValueError)
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.SGD([])


def test_bad_gradients_are_named_by_parameter_and_group_and_nothing_is_stepped():
    params = make([(4,), (6,), (5, 3)])
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    params[0].grad = torch.ones(4)
    first = params[0].detach().clone()
    for wrong, message in [
        (torch.zeros(5, 3).to_sparse(), "grad of parameter 1 of group 1 is a sparse_coo tensor"),
        (torch.zeros(3, 5).t(), r"grad of parameter 1 of group 1 of shape \(5, 3\) .*isn't contiguous"),
    ]:
        params[2].grad = wrong
        params[1].grad = None
        before = params[2].detach().clone()
        for _ in range(2):
            with pytest.raises(errors.InvalidArgument, match=message):
                optimizer.step()
        assert torch.equal(params[2], before) and torch.equal(params[0], first)
    params[2].grad = torch.ones(5, 3)
    optimizer.step()
    assert optimizer.state[params[2]]["step"] == 1
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(errors.InvalidArgument, match="lr must be a finite number from 0"):
        optimizer.step()
    assert optimizer.state[params[2]]["step"] == optimizer.state[params[0]]["step"] == 1
    optimizer.param_groups[1]["lr"] = 0.1
    with pytest.raises(errors.InvalidArgument, match="clip must be a number"):
        optimizer.step(clip="1")


def test_parameters_of_another_order_than_dense():
    params = [torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])]
    params[0].grad = torch.ones(4, 3)
    with pytest.raises(errors.InvalidArgument, match="param of parameter 0 of group 0 of shape .*isn't contiguous"):
        optim.SGD(params).step()


def test_gradients_are_not_copied_but_the_cure_is_told():
    (param,) = params = make([(5,)])
    param.grad = torch.ones(1).expand(5)
    optimizer = optim.SGD(params, lr=1.0)
    before = param.detach().clone()
    with pytest.raises(errors.InvalidArgument, match=r"isn't contiguous: copy it by it.contiguous\(\) and"):
        optimizer.step()
    param.grad = param.grad.contiguous()
    optimizer.step()
    assert torch.equal(param.detach(), before - 1)


def test_bad_arguments_of_functions_and_steps():
    params = make([(5,)])
    set_grads(params, 0)
    statistics = kernels.Statistics()
    for call, message in [
        (lambda: optim.SGD(params).step(found_nonfinite="no"), "found_nonfinite must be a number"),
        (lambda: optim.SGD(params).step(found_nonfinite=torch.ones(2)), "found_nonfinite must be a number"),
        (lambda: optim.Adam(params, betas=None), "betas must be two numbers"),
        (lambda: optim.Adam(params, betas=(0.9, torch.tensor(0.9))), "it must be a number, not Tensor"),
        (lambda: optim.SGD(params, seed=-1), "seed must be a whole number from 0"),
        (lambda: optim.clip_factor(statistics, None), "max_norm must be a number"),
        (lambda: optim.clip_factor(torch.ones(1), 1.0), "statistics must be a Statistics"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=message):
            call()
