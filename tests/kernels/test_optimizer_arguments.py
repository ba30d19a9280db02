"""sgd_step and adam_step: bad arguments are refused before anything is written."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidArgument

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def zeros(*counts, dtype=F32):
    return [torch.zeros(count, dtype=dtype) for count in counts]


def sgd(*arrays, **how):
    kernels.sgd_step(*arrays, **{"lr": 1e-3} | how)


def adam(*arrays, **how):
    kernels.adam_step(*arrays, **{"lr": 1e-3, "step": 1} | how)


def alone(**how):
    """A step of one parameter by Adam."""
    adam(*(zeros(3) for _ in range(4)), **how)


def two(**how):
    sgd(zeros(3, 4), zeros(3, 4), **how)


def shared():
    block = torch.zeros(20)
    return [block[:10], block[9:19]]


def freed(offset=0):
    tensor = torch.zeros(10)[offset:]
    tensor.untyped_storage().resize_(0)
    return tensor


ODD = torch.from_numpy(np.frombuffer(bytearray(13), np.float32, offset=1))
NEGATED = torch.conj(torch.tensor([0.1j])).imag
HALF = zeros(3, dtype=BF16)
BAD = {
    "momentum 0 has no memory": lambda: sgd(zeros(8), zeros(8), [freed(2)], momentum_factor=0.5),
    "master 0 begins at an address that is no multiple": lambda: sgd(HALF, zeros(3), master=[ODD]),
    "grad 1 has 4 elements and param 1 has 5": lambda: sgd(zeros(3, 5), zeros(3, 4)),
    "momentum 0 has 2 elements and param 0 has 3": lambda: sgd(zeros(3), zeros(3), zeros(2), momentum_factor=0.5),
    "there are 1 of grad and 2 of param": lambda: sgd(zeros(3, 5), zeros(3)),
    "there is no param": lambda: sgd([], []),
    "param 1 is int32: it must be fp32, bf16": lambda: sgd([*zeros(3), *zeros(5, dtype=torch.int32)], zeros(3, 5)),
    "grad 1 is float64: it must be fp32, bf16": lambda: sgd(zeros(3, 5), [*zeros(3), *zeros(5, dtype=F64)]),
    "grad 0 is complex64: it must be": lambda: sgd(zeros(3), zeros(3, dtype=torch.complex64)),
    "grad 0 is int64: it must be": lambda: sgd(zeros(3), zeros(3, dtype=torch.int64)),
    "grad 1 is None": lambda: sgd(zeros(3, 4), [torch.zeros(3), None]),
    "grad must be a list": lambda: sgd(zeros(3), None),
    "grad must be a list, .* int": lambda: sgd(zeros(3), 5),
    "param 0 is None": lambda: sgd(None, torch.zeros(3)),
    "^sgd_step: param 0 is None": lambda: sgd([None], zeros(3)),
    "exp_avg 0 is bfloat16: it must be float32": lambda: adam(HALF, zeros(3), HALF, zeros(3)),
    "exp_avg_sq 0 is float32: it must be float64": lambda: adam(
        zeros(3, dtype=F64), zeros(3), zeros(3, dtype=F64), zeros(3)
    ),
    "param 0 is float32 and needs no master": lambda: sgd(zeros(3), zeros(3), master=zeros(3)),
    "master 0 is bfloat16: it must be float32": lambda: sgd(HALF, zeros(3), master=zeros(3, dtype=BF16)),
    "param 0 and param 1 overlap": lambda: sgd(shared(), zeros(10, 10)),
    "grad 0 and param 0 overlap": lambda: sgd(*([each] for each in shared())),
    "exp_avg 0 and exp_avg_sq 0 overlap": lambda: adam(zeros(10), zeros(10), *([each] for each in shared())),
    "exp_avg 1 is missing": lambda: adam(zeros(3, 4), zeros(3, 4), [torch.zeros(3), None], zeros(3, 4)),
    "momentum 0 is missing": lambda: sgd(zeros(3), zeros(3), momentum_factor=0.9),
    "momentum_factor is 0, so no momentum is kept": lambda: sgd(zeros(3), zeros(3), zeros(3)),
    "nesterov needs a momentum_factor": lambda: two(nesterov=True),
    "lr must be a finite number from 0, not -1": lambda: two(lr=-1),
    "lr must be a number, not str": lambda: two(lr="0.1"),
    "lr must be a finite number": lambda: two(lr=10**400),
    "lr must be a finite number from 0, not -2": lambda: two(lr=torch.tensor(-2.0)),
    "lr is a lazily negated view": lambda: two(lr=NEGATED),
    "lr is a sparse_coo tensor": lambda: two(lr=torch.tensor(0.1).to_sparse()),
    r"lr must have one element, not the shape \(2,\)": lambda: two(lr=torch.ones(2)),
    "clip must be a finite number": lambda: two(clip=math.nan),
    "weight_decay must be a finite number": lambda: two(weight_decay=-0.1),
    r"betas\[1\] must be a finite number from 0 and below 1, not 1.0": lambda: alone(betas=(0.9, 1.0)),
    r"betas must be two numbers, not \(0.9": lambda: alone(betas=(0.9,)),
    "betas must be two numbers, not None": lambda: alone(betas=None),
    "step 0 must be a whole number from 1, not 0": lambda: two(step=0),
    "step 0 must be a whole number from 1, not -3": lambda: two(step=-3),
    "step 0 must be a whole number from 1": lambda: alone(step=torch.tensor(0.0)),
    "step 0 must be a whole number": lambda: alone(step=10**400),
    "step 1 must be a whole number from 1, not 1.5": lambda: two(step=[1, 1.5]),
    "there are 3 of step and 2 of param": lambda: two(step=[1, 2, 3]),
    "step, the number of this step from 1, is missing": lambda: alone(step=None),
    "position 0 must be a whole number from 0": lambda: two(position=-1),
    "position must be a list": lambda: two(position=None),
    "there are 3 of position and 2 of param": lambda: two(position=[1, 2, 3]),
    "found_nonfinite must be a number": lambda: two(found_nonfinite="no"),
    "seed must be a whole number": lambda: sgd(HALF, zeros(3), seed=0.5),
    "seed must be a whole number from 0 and below 2": lambda: sgd(HALF, zeros(3), seed=-1),
    "seed must be a whole number from 0 and below 2.*, not 1844": lambda: sgd(HALF, zeros(3), seed=2**64),
    "seed asks for rounding at random, which is for bf16": lambda: two(seed=1),
}


def test_bad_input():
    for message, call in BAD.items():
        with pytest.raises(InvalidArgument, match=message) as raised:
            call()
            pytest.fail(f"not refused: {message}")
        assert raised.value.op in ("sgd_step", "adam_step")


def test_nothing_is_written_where_an_argument_is_bad():
    param = torch.ones(5)
    with pytest.raises(InvalidArgument):
        kernels.sgd_step([param, torch.ones(3)], [torch.ones(5), torch.ones(4)], lr=1.0)
    assert torch.equal(param, torch.ones(5))


def test_a_scalar_that_the_step_would_overwrite():
    param, grad, momentum = torch.ones(8), torch.ones(8), torch.zeros(8)
    table = kernels.ParameterTable("sgd_step", [param], [grad], [momentum])
    for name, scalar, where in (("lr", param[:1], "param 0"), ("clip", momentum[7:], "momentum 0")):
        with pytest.raises(InvalidArgument, match=f"{name} lies inside of {where}, which is written: give a copy"):
            table.sgd(**{"lr": 0.1, "momentum": 0.9, name: scalar})
    table.sgd(lr=grad[:1], momentum=0.9)  # only read
    param.fill_(1.0)
    with pytest.raises(InvalidArgument, match="step 0 lies inside of param 0"):
        sgd(param, grad, momentum, momentum_factor=0.9, step=param[3:4])
    assert bool((param == 1).all())
