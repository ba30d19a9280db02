"""ParameterTable: memory that moves between steps, plans and the gradients they are for, and what is refused."""

from __future__ import annotations

import functools
import gc
import weakref

import numpy
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


def test_arrays_of_numpy_and_other_strides_are_looked_at_too():
    param = numpy.ones(1 << 16, numpy.float32)
    table = kernels.ParameterTable("sgd_step", [param], [numpy.ones(1 << 16, numpy.float32)])
    table.sgd(lr=0.5)
    assert (param == 0.5).all()
    param.resize(4, refcheck=False)
    with pytest.raises(InvalidArgument, match="param 0 doesn't lie where it did"):
        table.sgd(lr=0.5)
    param = torch.ones(3, 2)
    table = kernels.ParameterTable("sgd_step", [param], [torch.ones(3, 2)])
    param.t_()
    with pytest.raises(InvalidArgument, match="param 0 doesn't lie where it did"):
        table.sgd(lr=0.5)


def test_a_gradient_in_storage_that_is_too_small_is_refused():
    _, table = adam()
    grad = torch.ones(1 << 16)
    grad.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgument, match="grad 0 "):
        table.set_grads([grad])


def test_a_plan_is_for_the_gradients_of_its_making():
    param, grad = torch.ones(8), torch.ones(8)
    table = kernels.ParameterTable("sgd_step", [param], [grad])
    plan = table.plan_sgd(lr=0.5)
    table.set_grads([grad[:]])  # there, too
    plan()
    table.set_grads([torch.full((8,), 2.0)])
    with pytest.raises(InvalidArgument, match="the table has other gradients than when this step was planned"):
        plan()
    with pytest.raises(InvalidArgument, match="grad 0 is float64"):
        table.set_grads([torch.ones(8, dtype=torch.float64)])
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


def test_bad_arguments_are_refused_before_anything_is_written():
    p, g = torch.ones(4), torch.ones(4)
    negative = torch.conj(torch.tensor([0.1j])).imag
    sgd, step = functools.partial(kernels.sgd_step, [p], [g]), functools.partial(kernels.adam_step, p, g, g + 0, g + 0)
    for call, message in [
        (lambda: kernels.sgd_step([p], None, lr=1.0), "grad must be a list"),
        (lambda: kernels.sgd_step([p], 5, lr=1.0), "grad must be a list"),
        (lambda: kernels.sgd_step(None, g, lr=1.0), "param 0 is None"),
        (lambda: kernels.sgd_step([None], [g], lr=1.0), "param 0 is None"),
        (lambda: sgd(lr=1.0, position=None), "position must be a list"),
        (lambda: sgd(lr=10**400), "lr must be a finite number"),
        (lambda: sgd(lr=negative), "lr is a lazily negated view"),
        (lambda: sgd(lr=torch.tensor(0.1).to_sparse()), "lr is a sparse_coo tensor"),
        (lambda: sgd(lr=torch.tensor(-1.0)), "lr must be a finite number from 0"),
        (lambda: step(lr=1.0, step=torch.tensor(0.0)), "step 0 must be a whole number from 1"),
        (lambda: step(lr=1.0, step=10**400), "step 0 must be a whole number"),
        (lambda: step(lr=1.0, step=1, betas=(0.9,)), "betas must be two numbers"),
        (lambda: step(lr=1.0, step=1, betas=None), "betas must be two numbers"),
        (lambda: sgd(lr=1.0, found_nonfinite="no"), "found_nonfinite must be a number"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            call()
    for seed in (-1, 2**64):
        with pytest.raises(InvalidArgument, match="seed must be a whole number from 0 and below 2"):
            kernels.sgd_step(p.bfloat16(), g, lr=1.0, seed=seed)
    assert torch.equal(p, torch.ones(4))


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
