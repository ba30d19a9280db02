"""Parameters, gradients and rules for the tests of optimizers."""

from __future__ import annotations

import torch

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
RULES = {
    "SGD": dict(lr=0.1),
    "SGD momentum": dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "SGD nesterov": dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adam": dict(lr=0.01, weight_decay=0.1, betas=(0.3, 0.5), eps=1e-3),
    "Adam amsgrad": dict(lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "AdamW": dict(lr=0.01),
    "AdamW amsgrad": dict(lr=0.01, amsgrad=True, weight_decay=0.2, maximize=True),
}
SHAPES = [(7, 5), (4099,), (), (0, 3), (3, 2, 4, 4)]


def cls(library, rule):
    return getattr(library, rule.partition(" ")[0])


def make(shapes=SHAPES, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params, seed, dtype=None):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype or param.dtype)


def exact():
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        if exact():
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
