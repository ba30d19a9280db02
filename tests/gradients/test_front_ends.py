"""All front ends, with clipping, a GradScaler, non-finite gradients and a resumed run: one training, one oracle.

The oracle is one process that computes every rank's gradients itself, adds them up in rank order and divides, clips by
a norm in float64, and steps the same optimizer. Bits are compared where they are promised: everywhere but where a norm
is added up from parts.
"""

import contextlib
import functools
import io
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from collectives import GradientBuckets, HookState, optim
from collectives import horovod as hvd
from collectives.sharded import (
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from tests.ddp.training import loss_of, make_model, over_gloo, run, wrap
from tests.horovod.optimizer_training import a_job

STEPS, BAD, STOP, MAX_NORM = 6, 3, 3, 0.3


def adamw(params):
    return optim.AdamW(params, lr=0.01)


class FrontEnd:
    """A model, its optimizer and what its user writes in a step."""

    clips = False  # by HookState's max_norm

    def __init__(self, options, saved=None):
        self.state = None
        self.module = make_model()
        if saved is not None:
            self.module.load_state_dict(saved["model"])
        self.make(options, saved)
        if saved is not None and saved.get("optimizer") is not None:
            self.load_optimizer(saved["optimizer"])

    def load_optimizer(self, saved):
        self.optimizer.load_state_dict(saved)

    def save(self):
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def params(self):
        return [param.detach().clone() for param in self.module.parameters()]

    # ---- A step.

    def synchronize(self):
        """Average the gradients, where the backward has not."""

    def steps(self):
        return contextlib.nullcontext()

    def is_finite(self):
        if self.state is not None:
            return self.state.nonfinite == 0
        return all(param.grad.isfinite().all() for param in self.module.parameters())

    def step(self, loss, scaler, max_norm, checks):
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.synchronize()
        if max_norm is not None and not self.clips:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        with self.steps():
            if scaler is not None:
                scaler.step(self.optimizer)
                scaler.update()
            elif not checks or self.is_finite():
                self.optimizer.step()


class DDP(FrontEnd):
    clips, inside = True, False

    def make(self, options, saved):
        self.optimizer = adamw(self.module.parameters())
        self.state = HookState(**options) if saved is None else saved["state"]
        self.state.grad_scaler = options.get("grad_scaler")
        if self.inside:
            self.state.optimizer = self.optimizer
        self.model = wrap(self.module, "torch", self.state)

    def save(self):
        return {**super().save(), "state": self.state, **({"optimizer": None} if self.inside else {})}


class DDPInHook(DDP):
    inside = True

    def is_finite(self):
        return True  # the hook has left the step out


class Buckets(FrontEnd):
    def make(self, options, saved):
        self.optimizer, self.model = adamw(self.module.parameters()), self.module
        self.buckets = GradientBuckets(self.module.named_parameters(), bucket_cap_mb=0.004, first_bucket_mb=0.001)

    def synchronize(self):
        self.buckets.all_reduce()


class Sharded(FrontEnd):
    clips, inside = True, False

    def make(self, options, saved):
        self.state, self.model = HookState(**options), self.module
        for layer in self.module[:-1]:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, hook_state=self.state)
        fully_shard(self.module, hook_state=self.state)
        self.optimizer = adamw(self.module.parameters())
        if self.inside:
            self.state.optimizer = self.optimizer

    def params(self):
        return [value.clone() for value in get_model_state_dict(self.module, full_state_dict=True).values()]

    def save(self):
        model = get_model_state_dict(self.module, full_state_dict=True)
        return {
            "model": model,
            "optimizer": get_optimizer_state_dict(self.module, self.optimizer, full_state_dict=True),
        }

    def load_optimizer(self, saved):
        set_optimizer_state_dict(self.module, self.optimizer, saved)


class ShardedInBackward(Sharded):
    inside = True

    def is_finite(self):
        return True


class Horovod(FrontEnd):
    def make(self, options, saved):
        self.model = self.module
        self.optimizer = hvd.DistributedOptimizer(
            adamw(self.module.parameters()), named_parameters=self.module.named_parameters()
        )

    def synchronize(self):
        self.optimizer.synchronize()

    def steps(self):
        return self.optimizer.skip_synchronize()


FRONT_ENDS = {
    "ddp": DDP,
    "ddp, optimizer in the hook": DDPInHook,
    "buckets": Buckets,
    "sharded": Sharded,
    "sharded, optimizer in the backward": ShardedInBackward,
    "horovod": Horovod,
}


class Case(NamedTuple):
    max_norm: float | None = None
    scaled: bool = False  # by a GradScaler
    checks: bool = False  # whether gradients are finite
    stops: bool = False  # and goes on with new objects


CASES = {
    "plain": Case(),
    "clip": Case(max_norm=MAX_NORM),
    "scaler": Case(scaled=True),
    "clip and scaler": Case(max_norm=MAX_NORM, scaled=True),
    "non-finite": Case(checks=True),
    "resume": Case(stops=True),
    "clip, resume": Case(max_norm=MAX_NORM, stops=True),
}


def make_scaler(scaled):
    return torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None


def loss_in(model, step, rank, size, case):
    loss = loss_of(model, step, rank)
    return loss * math.inf if (case.scaled or case.checks) and step == BAD and rank == size - 1 else loss


@over_gloo
def trained(ctx, name, cases):
    """Train by a front end, case by case; give parameters after each step, norms, the scale."""
    found = {}
    for each in cases:
        case, kind = CASES[each], FRONT_ENDS[name]
        scaler = make_scaler(case.scaled)
        options = {"max_norm": case.max_norm, "check_finite": case.checks, "grad_scaler": scaler or False}
        seen, norms = [], []
        with a_job(ctx) if kind is Horovod else contextlib.nullcontext():
            front = kind(options)
            for step in range(STEPS):
                if case.stops and step == STOP:
                    file = io.BytesIO()
                    torch.save(front.save(), file)
                    del front
                    front = kind(options, torch.load(io.BytesIO(file.getvalue()), weights_only=False))
                front.optimizer.zero_grad()
                loss = loss_in(front.model, step, ctx.rank, ctx.size, case)
                front.step(loss, scaler, case.max_norm, case.checks)
                seen.append(front.params())
                norms.append(None if front.state is None else front.state.grad_norm)
            del front, loss
        found[each] = seen, norms, None if scaler is None else scaler.get_scale()
    return found


def oracle(ctx, size, case):
    """The same in one process: all ranks' gradients, summed in rank order."""
    model, case = make_model(), CASES[case]
    params = list(model.parameters())
    optimizer = adamw(params)
    scale = 1024.0 if case.scaled else 1.0
    seen, norms = [], []
    for step in range(STEPS):
        grads = []
        for rank in range(size):
            model.zero_grad()
            (loss_in(model, step, rank, size, case) * scale).backward()
            grads.append([param.grad for param in params])
        average = [sum(parts[1:], parts[0]) / size / scale for parts in zip(*grads, strict=True)]
        finite = all(grad.isfinite().all() for grad in average)
        norm = sum(grad.double().square().sum() for grad in average).sqrt()
        for param, grad in zip(params, average, strict=True):
            param.grad = grad if case.max_norm is None else (grad * min(1.0, case.max_norm / (norm + 1e-6))).float()
        if finite:
            optimizer.step()
        elif case.scaled:
            scale /= 2
        seen.append([param.detach().clone() for param in params])
        norms.append(norm.item())
    return seen, norms, scale if case.scaled else None


@functools.cache
def results_of(name, ranks):
    """The ranks' results of a front end: of all cases on two ranks, else of the plain one."""
    with tempfile.TemporaryDirectory() as folder:
        return run(trained, ranks, Path(folder, "store"), name, list(CASES) if ranks == 2 else ["plain"], timeout=120)


@functools.cache
def expected(size, case):
    return run(oracle, 1, size, case)[0]


@pytest.mark.parametrize("case, ranks", [*((case, 2) for case in CASES), ("plain", 3)])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_end(name, case, ranks):
    results = [found[case] for found in results_of(name, ranks)]
    wanted, wanted_norms, scale = expected(ranks, case)
    how, (first, norms, _) = CASES[case], results[0]
    for seen, _, found in results:
        assert found == scale
        for ours, theirs in zip(seen, first, strict=True):
            assert all(map(torch.equal, ours, theirs))  # on all ranks
    for step, (ours, theirs) in enumerate(zip(first, wanted, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            if how.max_norm is None:
                assert torch.equal(one, other), step
            else:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=f"step {step}")
    if how.scaled or how.checks:
        assert all(map(torch.equal, first[BAD], first[BAD - 1]))  # the step was left out
    if FRONT_ENDS[name].clips and how.max_norm is not None and not how.scaled:
        assert norms == pytest.approx(wanted_norms, rel=1e-5)


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_clipped_training_goes_on(name):
    """A norm's last bits depend on the buckets. DDP's first ones after loading are others; units are the same."""
    rel = 1e-6 if name.startswith("ddp") else 0.0
    for found in results_of(name, 2):
        whole, resumed = found["clip"], found["clip, resume"]
        assert resumed[1] == (pytest.approx(whole[1], rel=rel) if rel else whole[1])
        for ours, theirs in zip(whole[0], resumed[0], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=rel, atol=rel)
