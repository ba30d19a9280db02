"""sgd_step and adam_step: bad arguments are refused before anything is written."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidArgument

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
LR = 1e-3


def zeros(*counts, dtype=F32):
    return [torch.zeros(count, dtype=dtype) for count in counts]


def shared():
    block = torch.zeros(20)
    return [block[:10], block[9:19]]


def freed(offset=0):
    tensor = torch.zeros(10)[offset:]
    tensor.untyped_storage().resize_(0)
    return tensor


BAD = {
    "momentum 0 has no memory": lambda: kernels.sgd_step(zeros(8), zeros(8), [freed(2)], lr=LR, momentum_factor=0.5),
    "master 0 begins at an address that is no multiple": lambda: kernels.sgd_step(
        torch.zeros(3, dtype=BF16),
        torch.zeros(3),
        master=torch.from_numpy(np.frombuffer(bytearray(13), np.float32, offset=1)),
        lr=LR,
    ),
    "grad 1 has 4 elements and param 1 has 5": lambda: kernels.sgd_step(zeros(3, 5), zeros(3, 4), lr=LR),
    "momentum 0 has 2 elements and param 0 has 3": lambda: kernels.sgd_step(
        zeros(3), zeros(3), zeros(2), lr=LR, momentum_factor=0.5
    ),
    "there are 1 of grad and 2 of param": lambda: kernels.sgd_step(zeros(3, 5), zeros(3), lr=LR),
    "there is no param": lambda: kernels.sgd_step([], [], lr=LR),
    "param 1 is int32: it must be fp32, bf16, fp16 or fp64": lambda: kernels.sgd_step(
        [*zeros(3), *zeros(5, dtype=torch.int32)], zeros(3, 5), lr=LR
    ),
    "grad 1 is float64: it must be fp32, bf16 or fp16": lambda: kernels.sgd_step(
        zeros(3, 5), [*zeros(3), *zeros(5, dtype=F64)], lr=LR
    ),
    "grad 0 is complex64: it must be": lambda: kernels.sgd_step(zeros(3), zeros(3, dtype=torch.complex64), lr=LR),
    "grad 0 is int64: it must be": lambda: kernels.sgd_step(zeros(3), zeros(3, dtype=torch.int64), lr=LR),
    "grad 1 is None": lambda: kernels.sgd_step(zeros(3, 4), [torch.zeros(3), None], lr=LR),
    "exp_avg 0 is bfloat16: it must be float32": lambda: kernels.adam_step(
        zeros(3, dtype=BF16), zeros(3), zeros(3, dtype=BF16), zeros(3), lr=LR, step=1
    ),
    "exp_avg_sq 0 is float32: it must be float64": lambda: kernels.adam_step(
        zeros(3, dtype=F64), zeros(3), zeros(3, dtype=F64), zeros(3), lr=LR, step=1
    ),
    "param 0 is float32 and needs no master": lambda: kernels.sgd_step(zeros(3), zeros(3), master=zeros(3), lr=LR),
    "master 0 is bfloat16: it must be float32": lambda: kernels.sgd_step(
        zeros(3, dtype=BF16), zeros(3), master=zeros(3, dtype=BF16), lr=LR
    ),
    "param 0 and param 1 overlap": lambda: kernels.sgd_step(shared(), zeros(10, 10), lr=LR),
    "grad 0 and param 0 overlap": lambda: kernels.sgd_step(*([each] for each in shared()), lr=LR),
    "exp_avg 0 and exp_avg_sq 0 overlap": lambda: kernels.adam_step(
        zeros(10), zeros(10), *([each] for each in shared()), lr=LR, step=1
    ),
    "exp_avg 1 is missing": lambda: kernels.adam_step(
        zeros(3, 4), zeros(3, 4), [torch.zeros(3), None], zeros(3, 4), lr=LR, step=1
    ),
    "momentum 0 is missing": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=LR, momentum_factor=0.9),
    "momentum_factor is 0, so no momentum is kept": lambda: kernels.sgd_step(zeros(3), zeros(3), zeros(3), lr=LR),
    "nesterov needs a momentum_factor": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=LR, nesterov=True),
    "lr must be a finite number from 0, not -1": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=-1),
    "lr must be a number, not str": lambda: kernels.sgd_step(zeros(3), zeros(3), lr="0.1"),
    r"lr must have one element, not the shape \(2,\)": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=torch.ones(2)),
    "clip must be a finite number": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=LR, clip=math.nan),
    "weight_decay must be a finite number": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=LR, weight_decay=-0.1),
    r"betas\[1\] must be a finite number from 0 and below 1, not 1.0": lambda: kernels.adam_step(
        zeros(3), zeros(3), zeros(3), zeros(3), lr=LR, betas=(0.9, 1.0), step=1
    ),
    "step 0 must be a whole number from 1, not 0": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=LR, step=0),
    "step 0 must be a whole number from 1, not -3": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=LR, step=-3),
    "step 1 must be a whole number from 1, not 1.5": lambda: kernels.sgd_step(
        zeros(3, 4), zeros(3, 4), lr=LR, step=[1, 1.5]
    ),
    "there are 3 of step and 2 of param": lambda: kernels.sgd_step(zeros(3, 4), zeros(3, 4), lr=LR, step=[1, 2, 3]),
    "step, the number of this step from 1, is missing": lambda: kernels.adam_step(
        zeros(3), zeros(3), zeros(3), zeros(3), lr=LR, step=None
    ),
    "position 0 must be a whole number from 0": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=LR, position=-1),
    "there are 3 of position and 2 of param": lambda: kernels.sgd_step(
        zeros(3, 4), zeros(3, 4), lr=LR, position=[1, 2, 3]
    ),
    "seed must be a whole number": lambda: kernels.sgd_step(zeros(3, dtype=BF16), zeros(3), lr=LR, seed=0.5),
    "seed asks for rounding at random, which is for bf16": lambda: kernels.sgd_step(zeros(3), zeros(3), lr=LR, seed=1),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(InvalidArgument, match=message) as raised:
        BAD[message]()
    assert raised.value.op in ("sgd_step", "adam_step")


def test_nothing_is_written_where_an_argument_is_bad():
    param = torch.ones(5)
    with pytest.raises(InvalidArgument):
        kernels.sgd_step([param, torch.ones(3)], [torch.ones(5), torch.ones(4)], lr=1.0)
    assert torch.equal(param, torch.ones(5))


def test_a_table_looks_again_after_a_bad_gradient():
    table = kernels.ParameterTable("sgd_step", [torch.zeros(3)], [torch.ones(3)])
    wrong = [torch.ones(3, dtype=F64)]
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="grad 0 is float64"):
            table.set_grads(wrong)
