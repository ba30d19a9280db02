"""The hook in DDP's modes and on parameters of all kinds: what plain DDP gives. And what the hook refuses."""

import contextlib

import pytest
import torch
from torch import nn

import collectives
from collectives import HookState, optim
from collectives.errors import InvalidArgument, InvalidUsage
from tests.ddp.training import Branches, batch, buckets_of, gradients, loss_of, make_model, over_gloo, run, wrap

VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
# A model, DDP's options, and those of the hook and of the training: `inside` is the optimizer in the hook, `parts`
# backwards make a step, all but the last in no_sync; with `uneven` each rank has two steps more than the one before.
MODES = [
    (make_model, {}, {"parts": 3}),
    (make_model, VIEWS, {"parts": 3}),
    (make_model, {"bucket_cap_mb": 25}, {}),
    (make_model, {"static_graph": True}, {"max_norm": 0.3}),
    (make_model, {"static_graph": True, **VIEWS}, {}),
    (make_model, VIEWS, {"inside": True, "check_finite": True, "parts": 2}),
    (Branches, UNUSED, {}),
    (Branches, {**UNUSED, **VIEWS}, {"inside": True, "streams": 2}),
    (make_model, {}, {"inside": True, "max_norm": 0.3, "uneven": True}),
]


def trained(ctx, hook, make, how, options):
    """Train five steps; return the gradients, where the training sees averaged ones, and the parameters."""
    options, model, seen = dict(options), make().to(ctx.device), []
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inside, uneven, parts = options.pop("inside", False), options.pop("uneven", False), options.pop("parts", 1)
    state = HookState(optimizer=optimizer if inside else None, **options) if hook == "torch" else None
    ddp = wrap(model, hook, state, **how)
    with ddp.join(enable=uneven):
        for step in range(5 + (2 * ctx.rank if uneven else 0)):
            for part in range(parts):
                with ddp.no_sync() if part < parts - 1 else contextlib.nullcontext():
                    loss_of(ddp, 10 * step + part, ctx.rank).backward()
            if hook != "torch" and "max_norm" in options:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
            seen += [] if inside else gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    assert (buckets_of(ddp) > 1) == ("bucket_cap_mb" not in how)
    return seen, [param.detach().clone() for param in model.parameters()]


def assert_on_all_ranks(ctx, grad):
    """What is there is an average: the same on every rank."""
    numbers = None if grad is None else grad.detach().view(torch.uint8).tolist()
    assert all(each == numbers for each in ctx.exchange(numbers))


def assert_same(ours, plain):
    """Within the rounding of a sum of a few terms; None where there is no gradient."""
    for one, other in zip(ours, plain, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)


def in_all_modes(ctx):
    """Compare with plain DDP; also on a GPU, by tests/gpu."""
    found = []
    for make, how, options in MODES:
        plain = trained(ctx, "plain", make, how, options)
        for hook in ("torch", "alone") if options.keys() <= {"parts"} else ("torch",):
            ours = trained(ctx, hook, make, how, options)
            assert_same(ours[0] + ours[1], plain[0] + plain[1])
            found += ours[1]
    return found


@over_gloo
def on_the_host(ctx):
    return in_all_modes(ctx)


@pytest.mark.parametrize("overlap", "01")
def test_training_is_that_of_plain_ddp(tmp_path, overlap):
    first, *others = run(on_the_host, 3, tmp_path / "store", env={"COLLECTIVES_OVERLAP": overlap})
    for other in others:
        assert all(map(torch.equal, first, other))


# ---- Parameters of all kinds.


def averages_are_rounded_once(ctx, dtype):
    model = nn.Linear(12, 5).to(dtype)
    rows = [torch.full((1, 12), (1.0 + rank / 64) * (rank + 1), dtype=dtype) for rank in range(ctx.size)]
    ddp = wrap(model, "torch")
    ddp(rows[ctx.rank]).sum().backward()
    total = sum(row.double() for row in rows)
    exact = total / ctx.size if dtype == torch.float64 else (total.float() / ctx.size).to(dtype)
    assert torch.equal(model.weight.grad, exact.expand(5, 12))


def complex_numbers(ctx, hook):
    model = nn.Linear(4, 3, dtype=torch.complex64)
    x = torch.randn(2, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(ctx.rank))
    ddp = wrap(model, hook)
    ddp(x).abs().sum().backward()
    return gradients(model)


class Mixed(nn.Module):
    """Parameters in fp32, in fp64, and frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(12, 5), nn.Linear(5, 5).double(), nn.Linear(12, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).double()) * self.frozen(x).double()


def mixed_dtypes(ctx, hook):
    model = Mixed()
    ddp = wrap(model, hook)
    ddp(batch(0, ctx.rank)[0]).square().sum().backward()
    return gradients(model)


def two_modules(ctx, hook):
    """The backward of one loss goes through two modules, whose buckets interleave."""
    models, found = [make_model() for _ in range(2)], []
    first, second = (wrap(model, hook) for model in models)
    for step in range(3):
        for model in models:
            model.zero_grad()
        (loss_of(first, step, ctx.rank) + 2 * loss_of(second, step + 50, ctx.rank)).backward()
        found += [grad for model in models for grad in gradients(model)]
    return found


def double_backward(ctx, hook):
    """DDP refuses it, as it writes averages into gradients that have a graph; a penalty on inputs' gradients works."""
    x = batch(0, ctx.rank)[0].requires_grad_()
    ddp = wrap(make_model(), hook)
    with pytest.raises(RuntimeError, match="in-place operation"):
        ddp(x).square().mean().backward(create_graph=True)
    model = make_model()
    ddp = wrap(model, hook)
    y = ddp(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (slope.square().mean() + y.mean()).backward()
    return gradients(model)


@over_gloo
def of_all_kinds(ctx):
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        averages_are_rounded_once(ctx, dtype)
    programs = [mixed_dtypes, two_modules, double_backward]
    if torch.__version__ >= "2.9":  # DDP itself: Gloo of torch 2.8 broadcasts no complex numbers
        programs.append(complex_numbers)
    for program in programs:
        found = []
        for hook in ("plain", "torch"):
            torch.manual_seed(3)
            found.append(program(ctx, hook))
        assert_same(found[1], found[0])
        for grad in found[1]:
            assert_on_all_ranks(ctx, grad)
    model = nn.Linear(12, 5)
    ddp = wrap(model, "torch", HookState(average=False))
    ddp(torch.full((1, 12), ctx.rank + 1.0)).sum().backward()
    assert model.weight.grad.unique().tolist() == [6.0]


def test_parameters_of_all_kinds(tmp_path):
    run(of_all_kinds, 3, tmp_path / "store")


# ---- What is refused.


@over_gloo
def refused(ctx):
    with pytest.raises(InvalidUsage, match="divides by the ranks that have not joined"):  # noqa: SIM117
        with (ddp := wrap(make_model(), "torch")).join(divide_by_initial_world_size=False):
            loss_of(ddp, 0, ctx.rank).backward()
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    ddp = wrap(model, "torch", HookState(optimizer=optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(InvalidUsage, match="a rank that has joined doesn't call"):
        with ddp.join():
            scaler.scale(loss_of(ddp, 0, ctx.rank)).backward()
    ddp = wrap(nn.Embedding(10, 3, sparse=True), "torch")
    with pytest.raises(InvalidArgument, match=r"sparse=False.*of weight. A .*build it again"):
        ddp(torch.tensor([1])).sum().backward()
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    for module in (wrapped, torch.compile(wrapped)):
        with pytest.raises(InvalidArgument, match="DistributedDataParallel already.*register the hook on it"):
            collectives.DistributedDataParallel(module)
    with pytest.raises(InvalidArgument, match=r"register_comm_hook\(HookState\(\)"):
        HookState(wrapped)


def test_what_a_hook_can_not_do_is_refused(tmp_path):
    run(refused, 2, tmp_path / "store")


class Wrapper(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer holds one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_wrapped_optimizer_is_refused():
    with pytest.raises(InvalidArgument, match=r"pass its \.optimizer"):
        HookState(optimizer=Wrapper(optim.AdamW(nn.Linear(2, 2).parameters())))
