"""The DDP hook on every device: each wire, streams, clipping, optimizers in the hook; torch's modes of DDP."""

from __future__ import annotations

import functools
import math
import re

import torch
from torch import nn

import collectives
from collectives import HookState, optim
from collectives.comm.mem_pool import is_pooled
from tests.ddp.test_modes import in_all_modes
from tests.ddp.training import buckets_of, wrap
from tests.gpu.devices import check, compare, everywhere, in_group, on
from tests.gpu.training import RATE, STEPS, alone, batches, make_terms

WIRES = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8")
OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
}

# What HookState is given; "optimizer" names one of OPTIMIZERS. Those whose bits the host engine shares with NCCL:
EXACT = {
    "fp32": {},
    "direct": {"algorithm": "direct"},
    "ring": {"algorithm": "ring"},
    "deterministic": {"deterministic": True},
    "sum": {"average": False},
    "streams": {"streams": 2},
    "check_finite": {"check_finite": True},
    **{wire: {"wire": wire} for wire in WIRES},
    **{f"{wire}, feedback": {"wire": wire, "error_feedback": True} for wire in WIRES},
    "int8, blocks of 128, streams": {"wire": "int8", "block": 128, "streams": 2, "error_feedback": True},
    "int8, stochastic": {"wire": "int8", "stochastic_rounding": True},
    "optimizer": {"optimizer": "adamw"},
    "optimizer, momentum": {"optimizer": "sgd"},
    "optimizer, streams": {"optimizer": "adamw", "streams": 2},
    "optimizer, check_finite": {"optimizer": "adamw", "check_finite": True},
    "optimizer, bf16, feedback": {"optimizer": "sgd", "wire": "bf16", "error_feedback": True},
    "optimizer, int8": {"optimizer": "adamw", "wire": "int8", "error_feedback": True},
}
# Those with a norm, whose bits depend on the device:
CLOSE = {
    "max_norm": {"max_norm": 0.5},
    "max_norm, deterministic": {"max_norm": 0.5, "deterministic": True},
    "max_norm, norm_type 1": {"max_norm": 5.0, "norm_type": 1},
    "max_norm, norm_type inf": {"max_norm": 0.1, "norm_type": math.inf},
    "optimizer, max_norm": {"optimizer": "adamw", "max_norm": 0.5},
    "everything": {
        "optimizer": "adamw", "wire": "int8", "error_feedback": True, "max_norm": 0.5, "check_finite": True,
        "streams": 2,
    },
}  # fmt: skip
CASES = {**EXACT, **CLOSE}
EVERYDAY = {"fp32", "streams", "int8, feedback", "optimizer", "max_norm", "everything"}
# How far from the gradients that were not rounded, of numbers around 1.
LOSS = {"bf16": 2e-2, "fp16": 3e-3, "fp8_e4m3": 0.3, "fp8_e5m2": 0.6, "int8": 6e-2, "fp32": 1e-5}


def make_state(rank, model, options) -> tuple[HookState, object]:
    """Give the state, and the optimizer that the training loop steps, or None where the hook does."""
    options = dict(options)
    inside = options.pop("optimizer", None)
    if inside is not None:
        options["optimizer"] = OPTIMIZERS[inside](model.parameters())
    state = HookState(comm=rank.comm, **options)
    return state, None if inside is not None else torch.optim.SGD(model.parameters(), RATE)


def train(rank, ddp, model, optimizer, steps=STEPS):
    seen = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batches(step, rank.rank, rank.device)).backward()
        if optimizer is None:
            continue
        seen.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
    return seen, [param.detach().clone() for param in model.parameters()]


@in_group
def trained(rank, case, views):
    model = make_terms(rank.device)
    state, optimizer = make_state(rank, model, CASES[case])
    ddp = wrap(model, "torch", state, gradient_as_bucket_view=views)
    seen, ends = train(rank, ddp, model, optimizer)
    assert buckets_of(ddp) > 2
    return {"gradients": seen, "parameters": ends, "norm": state.grad_norm, "nonfinite": state.nonfinite}


@everywhere(CASES, everyday=EVERYDAY)
def test_training(device, ranks, case):
    options = CASES[case]
    tolerance = {} if case in EXACT else {"exact": False, "rtol": 1e-4, "atol": 1e-5}
    if options.get("stochastic_rounding"):  # at random, on both
        tolerance = {"exact": False, "rtol": 4 * LOSS["int8"], "atol": 4 * LOSS["int8"]}
    elif rounded_once(options):
        tolerance = {"exact": False, "rtol": LOSS[options["wire"]], "atol": LOSS[options["wire"]]}
    elif "check_finite" in options:  # the norm, which is found in other passes
        tolerance = {"exact": False, "rtol": 1e-5, "atol": 1e-6}
    (found, *_) = check(device, trained, ranks, case, True, **tolerance)
    grads, ends = expected(ranks, options.get("optimizer"), options.get("average", True))
    if {"wire", "max_norm"} & set(options):
        if options.get("wire") in LOSS and "optimizer" not in options:
            slack = LOSS[options["wire"]] * (4 if options.get("stochastic_rounding") else 1)
            for mine, wanted in zip(found["gradients"][0], grads[0], strict=True):
                compare(mine, wanted, exact=False, rtol=slack, atol=slack)
        return
    compare(found["parameters"], ends)
    if "optimizer" not in options:
        compare(found["gradients"], grads)
    if "check_finite" in options:
        assert found["nonfinite"] == 0


def rounded_once(options) -> bool:
    """Tell whether the host engine casts on the way into shared memory, and so rounds only the sum."""
    return options.get("wire") in ("bf16", "fp16") and not options.get("error_feedback")


@functools.cache
def expected(ranks, optimizer, average):
    return alone(ranks, make=OPTIMIZERS.get(optimizer), average=average)


@everywhere(["no views"])
def test_gradients_of_their_own_memory(device, ranks, case):
    """Without views of the buckets, which DDP copies gradients in and out of."""
    (found, *_) = check(device, trained, ranks, "streams", False)
    compare([found["gradients"], found["parameters"]], list(expected(ranks, None, True)))


# ---- torch's modes.


@in_group
def modes(rank):
    return in_all_modes(rank)


@everywhere(devices=("simulated", "cuda"))
def test_modes(device, ranks):
    """Gradients and parameters are plain DDP's."""
    on(device, modes, ranks)


@in_group
def of_two_devices(rank):
    """State None opens one communicator for the CPU's buckets and one for the device's."""
    grads = []
    for device in (torch.device("cpu"), rank.device):
        model = nn.Linear(12, 5).to(device)
        module = wrap(model, "alone")
        module(torch.full((1, 12), rank.rank + 1.0).to(device)).sum().backward()
        grads.append(model.weight.grad.unique())
    known = collectives.rendezvous.process_groups._communicators.values()
    engines = {comm.engine.name for _, comm in known if not comm.closed}
    assert engines == {"host", rank.engine}
    return grads


@everywhere()
def test_the_hook_takes_the_buckets_device(device, ranks):
    for grads in check(device, of_two_devices, ranks):
        assert [grad.tolist() for grad in grads] == [[(ranks + 1) / 2]] * 2


# ---- Scalers, accumulation, what goes on after a save.


@in_group
def scaled(rank, where):
    """One rank's loss is infinite in step 2: no rank steps, and the scale falls."""
    model = make_terms(rank.device)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    state = HookState(comm=rank.comm, optimizer=optimizer if where == "inside" else None)
    ddp = wrap(model, "torch", state)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=256.0, growth_interval=2)
    state.grad_scaler = scaler
    scales = []
    for step in range(4):
        with ddp.no_sync():
            scaler.scale(ddp(batches(10 + step, rank.rank, rank.device))).backward()
        loss = ddp(batches(step, rank.rank, rank.device))
        if step == 2 and rank.rank == rank.size - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [param.detach().clone() for param in model.parameters()], scales


@everywhere(["inside", "outside"], everyday=["inside"])
def test_grad_scaler(device, ranks, case):
    found = check(device, scaled, ranks, case)
    assert found[0][1] == [256.0, 512.0, 256.0, 256.0]


def fresh_and_resumed(rank, path, stop):
    """Four steps of int8 with error feedback; with `stop`, the second half in new objects."""
    model, state = make_terms(rank.device), HookState(comm=rank.comm, wire="int8", error_feedback=True)
    ddp = wrap(model, "torch", state)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(4):
        if stop and step == 2:
            torch.save({"state": state, "model": model.state_dict()}, path)
            saved = torch.load(path, weights_only=False, map_location="cpu")
            del ddp, model, optimizer
            model, state = make_terms(rank.device), saved["state"]
            model.load_state_dict(saved["model"])
            state.comm = rank.comm
            ddp = wrap(model, "torch", state)
            optimizer = torch.optim.SGD(model.parameters(), RATE)
        ddp.zero_grad()
        ddp(batches(step, rank.rank, rank.device)).backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@in_group
def whole_and_halves(rank, folder):
    path = f"{folder}/{rank.kind}{rank.size}.{rank.rank}.pt"
    return fresh_and_resumed(rank, path, False), fresh_and_resumed(rank, path, True)


@everywhere(devices=["host", "cuda"])  # torch.save knows no simulated storage
def test_training_goes_on_from_a_saved_state(device, ranks, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    for whole, halves in check(device, whole_and_halves, ranks, str(folder)):
        compare(halves, whole, exact=False, rtol=0, atol=1e-2)  # a new DDP has other buckets in its first backward


LARGE = ((300, 200), (300,), (64, 300))


@in_group
def pooled(rank, how):
    """Train with DDP whose buckets NCCL has registered, or with plain DDP; give the parameters, and what was done."""
    model = make_terms(rank.device, LARGE)
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1}
    state = None if how == "plain" else HookState(comm=rank.comm)
    cls = collectives.DistributedDataParallel if how == "ours" else nn.parallel.DistributedDataParallel
    ddp = cls(model, **options)
    if state is not None:
        ddp.register_comm_hook(state, collectives.fused_allreduce)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS + 3):
        ddp.zero_grad()
        ddp(batches(step, rank.rank, rank.device, LARGE)).backward()
        optimizer.step()
    in_pool = [is_pooled(param.grad) for param in model.parameters()]
    params = [param.detach().clone() for param in model.parameters()]
    rank.synchronize()
    return params, in_pool, repr(state)


@everywhere(["ours", "torch's"])
def test_registered_buckets(device, ranks, case):
    plain = on("host", pooled, ranks, "plain")
    for (params, in_pool, text), (wanted, _, _) in zip(on(device, pooled, ranks, case), plain, strict=True):
        compare(params, wanted)
        if device != "host":
            assert in_pool == [True] * 3
            assert re.search(r"zero_copy: ([1-9]) of \1 buckets registered\)", text), text
