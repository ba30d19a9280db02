"""GradientBuckets on every device: inside and beside the backward, sums, compressed wires, gradients changed late."""

from __future__ import annotations

import torch

import collectives
from tests.gpu.devices import check, compare, everywhere
from tests.gpu.test_ddp import rounded_once
from tests.gpu.training import RATE, STEPS, alone, batches, make_terms, run_backward_on_two_streams

CASES = {
    "inside": {"overlap": False},
    "beside": {"overlap": True},
    "sum": {"average": False},
    "one bucket": {"bucket_cap_mb": 25, "first_bucket_mb": 25},
    **{wire: {"wire": wire} for wire in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8")},
    "int8, feedback": {"wire": "int8", "error_feedback": True},
}


def trained(rank, case):
    options = {"bucket_cap_mb": 0.004, "first_bucket_mb": 0.002, **CASES[case]}
    model = make_terms(rank.device)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    seen = []
    with collectives.GradientBuckets(model.named_parameters(), comm=rank.comm, **options) as buckets:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batches(step, rank.rank, rank.device)).backward()
            buckets.all_reduce()
            seen.append([param.grad.clone() for param in model.parameters()])
            optimizer.step()
    return seen, [param.detach().clone() for param in model.parameters()]


@everywhere(CASES, everyday={"inside", "beside", "int8, feedback"})
def test_training(device, ranks, case):
    close = {"exact": False, "rtol": 2e-2, "atol": 2e-2} if rounded_once(CASES[case]) else {}
    (found, *_) = check(device, trained, ranks, case, **close)
    if "wire" not in CASES[case]:
        compare(list(found), list(alone(ranks, average=CASES[case].get("average", True))))


def changed_late(rank):
    """Two backwards of which the first has sent its buckets, and a gradient that is written to behind them; on all
    ranks, since a rank on a GPU doesn't wait for what another one alone has changed."""
    model = make_terms(rank.device)
    sizes = {"bucket_cap_mb": 0.004, "first_bucket_mb": 0.002}
    with collectives.GradientBuckets(model.parameters(), comm=rank.comm, overlap=True, **sizes) as buckets:
        for step in range(STEPS):
            model.zero_grad()
            model(batches(step, rank.rank, rank.device)).backward()
            model(batches(10 + step, rank.rank, rank.device)).backward()
            model.terms[0].weight.grad.mul_(2)
            buckets.all_reduce()
        assert len(buckets.buckets) > 2
    return [param.grad.clone() for param in model.parameters()]


@everywhere()
def test_gradients_that_change_behind_their_bucket(device, ranks):
    check(device, changed_late, ranks)


def trained_on_two_streams(rank):
    """Two models, each on a stream of its own, whose gradients share buckets."""
    models = [make_terms(rank.device) for _ in range(2)]
    params = [param for pair in zip(*(model.parameters() for model in models), strict=True) for param in pair]
    optimizer = torch.optim.SGD(params, RATE)
    with collectives.GradientBuckets(params, comm=rank.comm, overlap=True) as buckets:
        buckets.all_reduce()  # makes the hooks, which see each gradient's stream
        for step in range(STEPS):
            optimizer.zero_grad()
            run_backward_on_two_streams(rank, models, step)
            buckets.all_reduce()
            optimizer.step()
    return [param.detach().clone() for param in params]


@everywhere()
def test_models_on_two_streams(device, ranks):
    check(device, trained_on_two_streams, ranks)
