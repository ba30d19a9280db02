"""ParameterTable: memory that moves between steps, plans and the gradients they are for, and what is refused."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch

from collectives import kernels, optim
from collectives.errors import InvalidArgument


def adam(count=1 << 16):
    arrays = {name: torch.ones(count) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    step = torch.zeros(())
    table = kernels.ParameterTable(
        "adam_step",
        [arrays["param"]],
        [arrays["grad"]],
        [arrays["exp_avg"]],
        second=[arrays["exp_avg_sq"]],
        steps_done=[step],
    )
    return {**arrays, "step": step}, table


@pytest.mark.parametrize("name", ["param", "grad", "exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("how", ["data", "freed", "shrunk"])
def test_memory_that_has_moved_is_refused(name, how):
    arrays, table = adam()
    plan = table.plan_adam(lr=0.1)
    if how == "data":
        arrays[name].data = torch.zeros(4)
    else:
        arrays[name].untyped_storage().resize_(0 if how == "freed" else 1)
    for step in (plan, functools.partial(table.adam, lr=0.1)):
        with pytest.raises(InvalidArgument, match=f"{name} 0 doesn't lie where it did .* make the table again"):
            step()


def test_a_plan_is_for_the_gradients_of_its_making():
    param, grad = torch.ones(8), torch.ones(8)
    table = kernels.ParameterTable("sgd_step", [param], [grad])
    plan = table.plan_sgd(lr=0.5)
    table.set_grads([grad[:]])  # there, too
    plan()
    table.set_grads([torch.full((8,), 2.0)])
    with pytest.raises(InvalidArgument, match="the table has other gradients than when this step was planned"):
        plan()
    wrong = [torch.ones(8, dtype=torch.float64)]
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="grad 0 is float64"):
            table.set_grads(wrong)
    table.sgd(lr=0.25)  # by the last ones that were good
    assert param.tolist() == [0.0] * 8


def test_what_a_table_held_goes_with_it():
    grad = torch.ones(8)
    seen = weakref.ref(grad)
    gc.disable()
    try:
        kernels.sgd_step([torch.ones(8)], [grad], lr=0.5)
        del grad
        assert seen() is None  # without waiting for the collector of cycles
    finally:
        gc.enable()


def test_a_scalar_that_has_moved_is_refused():
    lr = torch.tensor(0.5)
    plan = kernels.ParameterTable("sgd_step", [torch.ones(8)], [torch.ones(8)]).plan_sgd(lr=lr)
    lr.data = torch.tensor(0.25)
    with pytest.raises(InvalidArgument, match="lr doesn't lie where it did"):
        plan()


def test_a_master_takes_over_what_unpack_writes():
    param = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    optimizer = optim.SGD([param], lr=0.5, master_weights=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    kernels.unpack(torch.full((5000,), 5.0), [param])
    optimizer.step()
    assert bool((param == 4.5).all())
    kernels.reduce_n([torch.full((5000,), 3.0)] * 2, param, op="avg")
    optimizer.step()
    assert bool((param == 2.5).all())
