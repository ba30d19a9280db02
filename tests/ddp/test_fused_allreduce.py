"""The hook on real ranks against plain DDP over Gloo and against one rank with the whole batch."""

import pytest
import torch
from torch import nn

import collectives
from tests.ddp.training import Branches, buckets_of, loss_of, make_model, over_gloo, run, train, wrap

MODES = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters, bucket views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 25},
}


@over_gloo
def trained(ctx, hook, options, steps=4, accumulate=1):
    model = Branches() if options.get("find_unused_parameters") else make_model()
    ddp = wrap(model, hook, **options)
    result = train(ddp, steps, ctx.rank, accumulate=accumulate)
    assert (buckets_of(ddp) > 1) == ("bucket_cap_mb" not in options)
    return result


def same_bits(a, b):
    return a is b is None or torch.equal(a, b)


def assert_equal_on_ranks(results):
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert all(same_bits(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, list) else same_bits(a, b)


def assert_close(ours, plain):
    """Within fp32 rounding of a sum of a few terms."""
    for a, b in zip(ours, plain, strict=True):
        if a is None or b is None:
            assert a is b is None
        else:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mode, ranks, hook",
    [
        *((mode, 2, "torch") for mode in MODES),
        ("unused parameters", 3, "torch"),
        ("default", 2, "alone"),
        ("bucket views", 3, "alone"),
    ],
)
def test_gradients_are_those_of_plain_ddp(tmp_path, mode, ranks, hook):
    ours = run(trained, ranks, tmp_path / "ours", hook, MODES[mode])
    plain = run(trained, ranks, tmp_path / "plain", "plain", MODES[mode])
    assert_equal_on_ranks([[g for step in grads for g in step] + params for grads, params in ours])
    for (our_grads, our_params), (plain_grads, plain_params) in zip(ours, plain, strict=True):
        for a, b in zip(our_grads, plain_grads, strict=True):
            assert_close(a, b)
        assert_close(our_params, plain_params)


@pytest.mark.parametrize("bucket_views", [False, True])
def test_no_sync_accumulates(tmp_path, bucket_views):
    options = {"gradient_as_bucket_view": bucket_views}
    ours = run(trained, 2, tmp_path / "ours", "torch", options, 3, 3)
    plain = run(trained, 2, tmp_path / "plain", "plain", options, 3, 3)
    for (our_grads, _), (plain_grads, _) in zip(ours, plain, strict=True):
        for a, b in zip(our_grads, plain_grads, strict=True):
            assert_close(a, b)


def test_two_runs_are_equal_bit_for_bit(tmp_path):
    first, second = (run(trained, 3, tmp_path / name, "torch", {}, 20) for name in "ab")
    for (grads, params), (grads_again, params_again) in zip(first, second, strict=True):
        for a, b in zip([*grads, params], [*grads_again, params_again], strict=True):
            assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@over_gloo
def hundred_steps(ctx):
    return train(wrap(make_model(), "torch"), 100, ctx.rank)[1]


def test_two_ranks_end_where_one_rank_with_the_whole_batch_ends(tmp_path):
    results = run(hundred_steps, 2, tmp_path / "store")
    assert_equal_on_ranks(results)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
    for ours, whole in zip(results[0], model.parameters(), strict=True):
        torch.testing.assert_close(ours, whole.detach(), rtol=1e-4, atol=1e-5)


@over_gloo
def low_precision(ctx, name):
    dtype = getattr(torch, name)
    model = nn.Linear(12, 5).to(dtype)
    ddp = wrap(model, "torch")
    x = torch.full((1, 12), 1.0 + ctx.rank / 64, dtype=dtype)
    (ddp(x).sum() * (ctx.rank + 1)).backward()
    local = (x * (ctx.rank + 1)).double().expand(5, 12)
    return model.weight.grad, local


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float32"])
def test_averages_are_rounded_once(tmp_path, dtype):
    results = run(low_precision, 3, tmp_path / "store", dtype)
    total = sum(local for _, local in results)
    exact = total / 3 if dtype == "float64" else (total.float() / 3).to(getattr(torch, dtype))
    for grad, _ in results:
        assert torch.equal(grad, exact)


@over_gloo
def complex_model(ctx, hook):
    torch.manual_seed(3)
    model = nn.Linear(4, 3, dtype=torch.complex64)
    ddp = wrap(model, hook)
    x = torch.randn(2, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(ctx.rank))
    ddp(x).abs().sum().backward()
    return model.weight.grad


@pytest.mark.skipif(torch.__version__ < "2.9", reason="DDP itself: Gloo of torch 2.8 broadcasts no complex numbers")
def test_complex_parameters(tmp_path):
    ours = run(complex_model, 2, tmp_path / "ours", "torch")
    plain = run(complex_model, 2, tmp_path / "plain", "plain")
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(ours[0], plain[0])


@over_gloo
def mixed_dtypes(ctx, hook):
    torch.manual_seed(3)
    model = nn.ModuleDict({"a": nn.Linear(12, 5), "b": nn.Linear(5, 5).double(), "c": nn.Linear(12, 1)})
    model["c"].requires_grad_(False)  # frozen

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["b"](self.parts["a"](x).double()) * self.parts["c"](x).double()

    ddp = wrap(Both(), hook)
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(ctx.rank))
    ddp(x).square().sum().backward()
    return [p.grad for p in ddp.parameters()]


def test_mixed_dtypes_and_frozen_parameters(tmp_path):
    ours = run(mixed_dtypes, 2, tmp_path / "ours", "torch")
    plain = run(mixed_dtypes, 2, tmp_path / "plain", "plain")
    assert_close(ours[0], plain[0])
    assert_equal_on_ranks(ours)


@over_gloo
def summed(ctx):
    model = nn.Linear(12, 5)
    ddp = wrap(model, "torch", collectives.HookState(average=False))
    ddp(torch.full((1, 12), ctx.rank + 1.0)).sum().backward()
    return model.weight.grad.unique().tolist()


def test_sum_instead_of_average(tmp_path):
    assert run(summed, 3, tmp_path / "store") == [[6.0]] * 3


@over_gloo
def joined(ctx, hook):
    ddp = wrap(make_model(), hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 + 2 * ctx.rank):  # uneven inputs
            optimizer.zero_grad()
            loss_of(ddp, step, ctx.rank).backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def test_join_with_uneven_inputs(tmp_path):
    ours = run(joined, 2, tmp_path / "ours", "torch")
    assert_equal_on_ranks(ours)


@over_gloo
def two_modules(ctx, hook):
    """The backward of one loss goes through two modules, whose buckets interleave."""
    first, second = make_model(), make_model()
    a, b = wrap(first, hook), wrap(second, hook)
    grads = []
    for step in range(3):
        for model in (first, second):
            model.zero_grad()
        (loss_of(a, step, ctx.rank) + 2 * loss_of(b, step + 50, ctx.rank)).backward()
        grads += [p.grad.clone() for model in (first, second) for p in model.parameters()]
    return grads


def test_two_modules_in_one_backward(tmp_path):
    ours = run(two_modules, 2, tmp_path / "ours", "torch")
    plain = run(two_modules, 2, tmp_path / "plain", "plain")
    assert_equal_on_ranks(ours)
    assert_close(ours[0], plain[0])


@over_gloo
def views_share_memory(ctx):
    """The hook returns the bucket's own buffer, so gradients stay views of it and keep their addresses."""
    ddp = wrap(make_model(), "torch", gradient_as_bucket_view=True)
    addresses = []
    for step in range(4):
        for p in ddp.parameters():
            p.grad = p.grad if p.grad is None else p.grad.zero_()
        loss_of(ddp, step, ctx.rank).backward()
        addresses.append([p.grad.data_ptr() for p in ddp.parameters()])
    return addresses[2] == addresses[3]


def test_no_copy_with_bucket_views(tmp_path):
    assert run(views_share_memory, 2, tmp_path / "store") == [True, True]
