"""The hook of DDP and GradientBuckets on the simulated GPU: the host engine's numbers, and nothing to report."""

from __future__ import annotations

import contextlib

import pytest
import torch

import collectives
from tests.ddp.training import batch, make_model, over_gloo, run, wrap
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation

# The first steps may wait: the communicator is made, the ranks compare options, DDP makes its buckets again.
WARM = 3


def batches_on(ctx, count):
    return [tuple(each.to(ctx.device) for each in batch(step, ctx.rank)) for step in range(count)]


def loss_of(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)


def on_host(tensors):
    return [each.detach().cpu() for each in tensors]


def compare(program, tmp_path, *args, ranks=2, same=torch.equal):
    """Run a program on the simulated GPU and on the host, and compare what it gives; bit for bit by default."""
    there = run(program, ranks, tmp_path / "simulated", *args, device="simulated")
    here = run(program, ranks, tmp_path / "host", *args)
    for rank in range(ranks):
        for number, (one, other) in enumerate(zip(there[rank], here[rank], strict=True)):
            assert same(one, other), (rank, number, (one.double() - other.double()).abs().max())
    return there


def nearly(one, other):
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@over_gloo
def trained(ctx, options, ddp_options=None, scaled=False):
    """Train with a state of these options; give the parameters at the end."""
    model = make_model().to(ctx.device)
    options = dict(options)
    stepped = options.pop("optimizer", None)
    state = collectives.HookState(**options)
    if stepped:
        state.optimizer = getattr(collectives.optim, stepped)(model.parameters(), lr=0.1)
    ddp = wrap(model, "state", state, **(ddp_options or {}))
    optimizer = None if stepped else torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(ctx.device.type, init_scale=8.0) if scaled else None
    for number, (x, y) in enumerate(batches_on(ctx, WARM + 2)):
        with steps(ctx, number >= WARM):
            ddp.zero_grad()
            loss = loss_of(ddp, x, y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if optimizer is not None and scaler is None:
                optimizer.step()
        if scaler is not None:  # torch's own waits for its answer
            scaler.step(optimizer)
            scaler.update()
    return on_host(model.parameters())


def thorough(*cases):
    return [pytest.param(*each, marks=pytest.mark.thorough) for each in cases]


OPTIONS = [
    {},
    {"streams": 2},
    {"wire": "bf16"},
    {"wire": "int8", "error_feedback": True, "streams": 2},
    {"max_norm": 0.1},
    {"optimizer": "AdamW", "max_norm": 0.1, "streams": 2},
    *thorough(
        *([{"algorithm": name}] for name in ("direct", "ring")),
        *([{"wire": wire}] for wire in ("fp16", "fp8_e4m3", "fp8_e5m2", "int8")),
        [{"max_norm": 0.1, "wire": "int8", "streams": 2}],
        [{"check_finite": True}],
        [{"optimizer": "SGD"}],
    ),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.sampled(one_in=3)
def test_hook(tmp_path, options):
    # NCCL adds 16-bit values; the host engine adds them in fp32, and the squares for a norm in another order.
    rounded = options.get("wire") in ("bf16", "fp16") or "max_norm" in options
    compare(trained, tmp_path, options, same=nearly if rounded else torch.equal)


@pytest.mark.parametrize("ddp_options", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_modes_of_ddp(tmp_path, ddp_options):
    compare(trained, tmp_path, {}, ddp_options)


def test_gradscaler(tmp_path):
    compare(trained, tmp_path, {"max_norm": 0.1}, None, True, same=nearly)


@over_gloo
def bucketed(ctx, options, parts):
    """Train with GradientBuckets, each step of several backwards."""
    model = make_model().to(ctx.device)
    comm = ctx.communicator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buckets = collectives.GradientBuckets(model.named_parameters(), 0.004, first_bucket_mb=0.004, comm=comm, **options)
    batches = batches_on(ctx, (WARM + 2) * parts)
    # With overlap buckets are sent in the first backward; which the second one changes is agreed on, and they go again.
    strict = parts == 1 or options.get("overlap") is False or "wire" in options
    with contextlib.closing(buckets):
        for number in range(WARM + 2):
            with steps(ctx, number >= WARM and strict):
                optimizer.zero_grad()
                for x, y in batches[number * parts : (number + 1) * parts]:
                    loss_of(model, x, y).backward()
                buckets.all_reduce()
                optimizer.step()
    return on_host(model.parameters())


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, 1),
        ({"overlap": False}, 2),
        *thorough(({}, 2), ({"overlap": False}, 1)),
        *thorough(*(({"wire": "int8", "error_feedback": True}, parts) for parts in (1, 2))),
    ],
    ids=str,
)
def test_gradient_buckets(tmp_path, options, parts):
    compare(bucketed, tmp_path, options, parts)


@over_gloo
def bucketed_on_two_streams(ctx):
    """Train two models, each on a stream of its own, whose gradients share buckets."""
    models = [make_model().to(ctx.device) for _ in range(2)]
    params = [param for pair in zip(*(model.parameters() for model in models), strict=True) for param in pair]
    optimizer = torch.optim.SGD(params, lr=0.1)
    on_gpu = ctx.device.type == "cuda"
    main, side = (torch.cuda.current_stream(), torch.cuda.Stream()) if on_gpu else (None, None)
    with collectives.GradientBuckets(params, comm=ctx.communicator(), overlap=True) as buckets:
        buckets.all_reduce()  # makes the hooks
        for number, (x, y) in enumerate(batches_on(ctx, WARM + 2)):
            with steps(ctx, number >= WARM):
                optimizer.zero_grad()
                if on_gpu:
                    side.wait_stream(main)
                with torch.cuda.stream(side) if on_gpu else contextlib.nullcontext():
                    losses = [loss_of(models[0], x, y)]
                if on_gpu:
                    main.wait_stream(side)
                    for each in (x, y):
                        each.record_stream(side)
                (losses[0] + loss_of(models[1], x, y)).backward()
                losses[0].record_stream(main) if on_gpu else None
                buckets.all_reduce()
                optimizer.step()
    return on_host(params)


def test_gradient_buckets_of_models_on_two_streams(tmp_path):
    compare(bucketed_on_two_streams, tmp_path)
