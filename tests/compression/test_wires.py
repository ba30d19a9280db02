"""HookState's wires and what follows the sum, on real ranks: precision, bytes, error feedback, norm, resuming."""

import io
import math
import os
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives import HookState, errors, optim
from collectives.compression import Bucket, Scaling
from collectives.compression.quantized import Quantized
from collectives.layout import WIRE_FORMATS
from tests.ddp.training import loss_of, make_model, over_gloo, run, train, wrap

WIRES = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8"]


def same_bits(results):
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# ---- One wire by itself.


COUNTS = [0, 1, 5, 256 * 3 + 7, 300_001]


def lossy(ctx):
    """Reduce made-up buckets by each wire; by count give this rank's own values, and the averages by wire."""
    comm, found = ctx.communicator(), []
    for count in COUNTS:
        own, by_wire = torch.randn(count, generator=torch.Generator().manual_seed(7 + ctx.rank)), {}
        for name in WIRES:
            flat = own.clone()
            grad_stats = torch.zeros(2, dtype=torch.float64)
            bucket = Bucket(flat, [flat], [0], 0)
            sent = Quantized(name).reduce(comm, bucket, Scaling(divisor=ctx.size), grad_stats=grad_stats)
            comm.all_reduce(grad_stats)
            by_wire[name] = (flat, sent, grad_stats)
        found.append((own, by_wire))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_are_within_two_roundings(ranks):
    for count, *results in zip(COUNTS, *run(lossy, ranks), strict=True):
        owns = torch.stack([own for own, _ in results]).double()
        exact = owns.mean(0)
        for name in WIRES:
            flats = [found[name][0] for _, found in results]
            assert all(torch.equal(flat, flats[0]) for flat in flats)
            if not count:
                continue
            form = WIRE_FORMATS[name]
            # A block's scale is at most that of the largest value.
            scale = owns.abs().max() / form.limit if form.scaled else 1.0
            one = form.relative * owns.abs().mean(0) + form.absolute * scale
            both = 1.001 * (one + form.relative * (exact.abs() + one) + form.absolute * scale) + 1e-6
            if ranks == 1:
                assert torch.equal(flats[0], results[0][0])
            assert ((flats[0] - exact).abs() <= both).all()
            grad_stats = results[0][1][name][2]
            assert grad_stats[0].item() == pytest.approx(flats[0].double().square().sum().item(), rel=1e-4)
            assert grad_stats[1] == 0
            if count > 1000 and ranks > 1:
                fp32 = 2 * (ranks - 1) * 4 * count / ranks
                ratio = results[0][1][name][1] / fp32
                assert 0.49 < ratio < 0.51 if form.itemsize == 2 else 0.25 < ratio < 0.27


def with_infinity(ctx):
    for wire in ("int8", "bf16"):
        flat = torch.ones(1000)
        if ctx.rank == 1:
            flat[10] = math.inf
        grad_stats, bucket = torch.zeros(2, dtype=torch.float64), Bucket(flat, [flat], [0], 0)
        Quantized(wire).reduce(ctx.communicator(), bucket, Scaling(divisor=2), grad_stats=grad_stats)
        ctx.communicator().all_reduce(grad_stats)
        assert not flat[10].isfinite() and flat[600:].isfinite().all() and grad_stats[1] >= 1, wire


def test_a_value_that_is_not_finite_arrives_as_such_everywhere():
    run(with_infinity, 2)


def fed_back(ctx, name, seed, factor):
    comm = ctx.communicator()
    wire = Quantized(name, 128, error_feedback=True, seed=seed)
    params = [nn.Parameter(torch.empty(700)), nn.Parameter(torch.empty(501))]
    generator = torch.Generator().manual_seed(ctx.rank)
    true, applied = torch.zeros(1201), torch.zeros(1201)
    for step in range(12):
        flat = torch.randn(1201, generator=generator)
        true += flat
        wire.begin_backward()
        if step >= 6:  # the buckets are made again: the second parameter comes first
            flat = torch.cat([flat[700:], flat[:700]])
        bucket = Bucket(flat, params, [0, 700], 0) if step < 6 else Bucket(flat, params[::-1], [0, 501], 0)
        wire.reduce(comm, bucket, factor)
        applied += flat if step < 6 else torch.cat([flat[501:], flat[:501]])
    left = wire.residuals.get(bucket)
    return true, applied, torch.cat([left[501:], left[:501]])


@pytest.mark.parametrize("name, seed", [("int8", None), ("int8", 5), ("bf16", None), ("fp8_e5m2", None)])
def test_what_was_applied_and_what_is_kept_add_up(name, seed):
    results = run(fed_back, 3, name, seed, Scaling(divisor=3))
    applied = results[0][1]
    assert all(torch.equal(applied, other) for _, other, _ in results)
    mean = sum(true for true, _, _ in results) / 3
    kept = sum(left for _, _, left in results) / 3
    assert (mean - applied).abs().max() > 1e-4  # something was lost
    torch.testing.assert_close(applied + kept, mean, rtol=1e-4, atol=2e-5)


# ---- In DDP.


@over_gloo
def trained(ctx, ways):
    """Train in each way, (options of HookState, how it is used); give the values, the bytes sent, and what it says."""
    found = []
    for options, how in ways:
        with mock.patch.dict(os.environ, {"COLLECTIVES_OVERLAP": how.get("overlap", "0")}):
            state = HookState(**options)
            ddp = wrap(make_model(), "torch", state, **{key: how[key] for key in how if key != "overlap"})
            seen, params = train(ddp, 4, ctx.rank)
        found.append(([g for step in seen for g in step] + params, state.bytes_on_wire, state.stats(), repr(state)))
    return found


def test_deterministic_bits_depend_on_no_bucket_no_stream_no_thread(tmp_path):
    ways = [
        ({"deterministic": True}, {}),
        ({"deterministic": True, "streams": 3}, {}),
        ({"deterministic": True, "streams": 2}, {"overlap": "1"}),
        ({"deterministic": True, "algorithm": "direct"}, {"bucket_cap_mb": 25}),
        ({}, {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": True, "overlap": "1"}),
    ]
    caps = [({"deterministic": True, "max_norm": 0.3}, {"bucket_cap_mb": cap}) for cap in (0.001, 25)]
    found = [values for values, *_ in run(trained, 3, tmp_path / "store", ways + caps)[0]]
    assert same_bits(found[:5]) and same_bits(found[5:]) and not same_bits(found[4:6])


WIRED = [{"wire": "int8"}, {"wire": "bf16", "streams": 2}, {"wire": "fp16"}]


def test_compressed_training_is_close_and_equal_on_all_ranks(tmp_path):
    ways = [({}, {}), *((options, {"overlap": "1"}) for options in WIRED), *((options, {}) for options in WIRED)]
    results = run(trained, 2, tmp_path / "store", ways)
    exact, sent, *_ = results[0][0]
    for i, options in enumerate(WIRED, 1):
        assert same_bits([found[at][0] for found in results for at in (i, i + len(WIRED))])
        ours, nbytes, stats, text = results[0][i]
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
        ratio = nbytes / sent
        # Buckets of a few blocks have much padding.
        assert 0.5 <= ratio < 0.53 or (options["wire"] == "int8" and 0.25 <= ratio < 0.4)
        assert stats["bytes_on_wire"] == pytest.approx(4 * nbytes, rel=0.1)  # the first step has other buckets
        assert stats["ratio"] == pytest.approx(ratio, rel=0.1)
        assert options["wire"] in text


# ---- Norm and statistics.


@over_gloo
def clipped(ctx, cases):
    """Our clipping, and torch's after plain DDP."""
    for options, norm_type in cases:
        state = HookState(max_norm=0.5, norm_type=norm_type, check_finite=True, **options)
        ours, plain = wrap(make_model(), "torch", state), wrap(make_model(), "plain")
        over = []
        for step in range(3):
            for ddp in (ours, plain):
                ddp.zero_grad()
                (loss_of(ddp, step, ctx.rank) * (0.05 if step == 1 else 1.0)).backward()
            total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=norm_type)
            assert state.nonfinite == 0
            assert state.grad_norm == pytest.approx(total.item(), rel=1e-2 if "wire" in options else 1e-5)
            over.append(total.item() > 0.5)
            for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
                tolerance = 0.03 if "wire" in options else 1e-6
                torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)
            mine = torch.cat([p.grad.flatten() for p in ours.parameters()])
            other = mine.clone()
            dist.broadcast(other, 0)
            assert torch.equal(mine, other), "the ranks have other bits"
        assert over in ([True, False, True], [True] * 3, [False] * 3)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [({}, 2)]),
        (2, [({}, 2), ({}, 1), ({}, math.inf), ({"wire": "int8"}, 2), ({"wire": "bf16"}, 3)]),
        (3, [({"streams": 2}, 2), ({"algorithm": "ring"}, 2)]),
    ],
    ids=["1", "2", "3"],
)
def test_clipping_is_that_of_torch(tmp_path, ranks, cases):
    run(clipped, ranks, tmp_path / "store", cases)


@over_gloo
def scaled(ctx, name):
    """A GradScaler is found, and clipping is of the gradients without its factor."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = HookState(max_norm=0.5, check_finite=True)
    if name:
        state.grad_scaler = scaler
    ours, plain = wrap(make_model(), "torch", state), wrap(make_model(), "plain")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler.scale(loss_of(ours, 0, ctx.rank)).backward()
    loss_of(plain, 0, ctx.rank).backward()
    total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert state.grad_norm == pytest.approx(total.item(), rel=1e-4)
    scaler.unscale_(optimizer)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    ours.zero_grad()
    scaler.step(optimizer)
    scaler.update()
    loss = loss_of(ours, 1, ctx.rank)
    scaler.scale(loss * (math.inf if ctx.rank == 1 else 1.0)).backward()
    assert state.nonfinite > 0
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("name", [True, False])
def test_with_a_grad_scaler(tmp_path, name):
    assert run(scaled, 2, tmp_path / "store", name) == [512.0, 512.0]


def interleaved(ctx):
    comm = ctx.communicator()
    state = HookState(comm, max_norm=1.0)
    flats = [torch.ones(8), torch.ones(8)]
    state.reducer.reduce_bucket(comm, Bucket(flats[0], flats[:1], [0], 0), flats[0], False)
    with pytest.raises(errors.CollectivesError, match="interleave on one HookState"):
        state.reducer.reduce_bucket(comm, Bucket(flats[1], flats[1:], [0], 0), flats[1], True)


def test_what_looks_at_a_whole_backward_takes_one_module_at_a_time():
    run(interleaved, 2)


# ---- Stopping and going on.


@over_gloo
def resumed(ctx, options, stop):
    """Eight steps; with `stop`, the second half in a new DDP with what was saved by torch.save after the first."""

    def stepped(state, model):
        """The optimizer, which the state steps where the options say so."""
        if "optimizer" not in options:
            return torch.optim.SGD(model.parameters(), lr=0.1)
        state.optimizer = optim.AdamW(model.parameters(), lr=0.01)
        return state.optimizer

    model = make_model()
    state = HookState(**{name: value for name, value in options.items() if name != "optimizer"})
    if options.get("stochastic_rounding"):
        state.compressor.seed = 3
    optimizer = stepped(state, model)
    ddp = wrap(model, "torch", state)
    for step in range(8):
        if stop and step == 4:
            file = io.BytesIO()
            torch.save({"state": state, "model": model.state_dict()}, file)
            file.seek(0)
            del ddp, state
            saved = torch.load(file, weights_only=False)
            model = make_model()
            model.load_state_dict(saved["model"])
            state = saved["state"]
            optimizer = stepped(state, model)
            ddp = wrap(model, "torch", state)
        optimizer.zero_grad()
        loss_of(ddp, step, ctx.rank).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], state.stats()["backwards"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": True},
        {"wire": "bf16", "error_feedback": True},
        {"wire": "int8", "error_feedback": True, "stochastic_rounding": True},
        {"wire": "int8", "error_feedback": True, "optimizer": True, "max_norm": 1.0},
    ],
    ids=["fp32", "optimizer", "bf16", "int8", "int8, optimizer"],
)
def test_training_goes_on(tmp_path, options):
    """Bit for bit; but a new DDP has other buckets in its first backward, in which a wire rounds in other places."""
    whole, halves = (run(resumed, 2, tmp_path / str(stop), options, stop) for stop in (False, True))
    assert whole[0][1] == halves[0][1] == 8
    assert same_bits([found for found, _ in whole]) and same_bits([found for found, _ in halves])
    tolerance = {"bf16": 1e-3, "int8": 1e-2}.get(options.get("wire"), 0)
    for found, expected in zip(halves[0][0], whole[0][0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@over_gloo
def saved_whole(ctx, given):
    """Some steps with feedback; the consolidated state, and what the ranks keep."""
    state = HookState(wire="int8", error_feedback=True)
    if given is not None:
        state.load_state_dict(pickle.loads(given))
    model = make_model()
    ddp = wrap(model, "torch", state)
    for step in range(3, 4) if given else range(3):
        loss_of(ddp, step, ctx.rank).backward()
    return state.state_dict(), state.compressor.residuals.state_dict()


def test_residuals_of_another_number_of_ranks(tmp_path):
    before = run(saved_whole, 2, tmp_path / "two", None)
    whole = before[0][0]
    for name, mean in whole["wire"]["residuals"].items():
        torch.testing.assert_close(mean, (before[0][1][name] + before[1][1][name]) / 2)
        assert torch.equal(mean, before[1][0]["wire"]["residuals"][name]) and mean.abs().max() > 0
    after = run(saved_whole, 3, tmp_path / "three", pickle.dumps(whole))
    assert after[0][0]["size"] == 3 and after[0][0]["wire"]["steps"] == 4
    names = dict(make_model().named_parameters()).keys()
    assert after[0][0]["wire"]["residuals"].keys() == whole["wire"]["residuals"].keys() == names


@over_gloo
def begun(ctx, folder):
    model, state = make_model(), HookState(wire="int8", error_feedback=True, max_norm=1.0)
    ddp = wrap(model, "torch", state)
    train(ddp, 3, ctx.rank)
    torch.save({"state": state, "model": ddp.module.state_dict()}, folder / f"{ctx.rank}.pt")


@over_gloo
def gone_on(ctx, folder):
    """Go on with what was saved on 2 ranks; a third has no state. Give the first gradients, and what they lacked."""
    saved = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    model, alone = make_model(), make_model()
    for each in (model, alone):
        each.load_state_dict(saved[0]["model"])
    state = HookState(wire="int8", error_feedback=True, max_norm=1.0)
    if ctx.rank < 2:
        state = saved[ctx.rank]["state"]
    owed = saved[0]["state"].compressor.state_dict()["residuals"]
    loss_of(alone, 0, ctx.rank).backward()
    wanted = [p.grad + owed[name].view_as(p) for name, p in alone.named_parameters()]
    seen, params = train(wrap(model, "torch", state), 4, ctx.rank)
    norm = math.sqrt(sum(grad.square().sum().item() for grad in wanted))
    return seen[0], [grad * min(1.0, 1.0 / norm) for grad in wanted], params, max(map(torch.max, owed.values()))


def test_states_go_on_with_another_number_of_ranks(tmp_path):
    run(begun, 2, tmp_path / "store", tmp_path)
    assert same_bits([params for _, _, params, _ in run(gone_on, 3, tmp_path / "three", tmp_path)])
    ((seen, wanted, _, owed),) = run(gone_on, 1, tmp_path / "one", tmp_path)
    assert owed > 0
    for a, b in zip(seen, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


# ---- What is refused when it is made.


@pytest.mark.parametrize(
    "options, text",
    [
        ({"wire": "fp4"}, "wire must be one of 'fp32'"),
        ({"wire": "fp8"}, "'fp8_e4m3' has .*'fp8_e5m2' has"),
        ({"error_feedback": True}, "error_feedback: the fp32 wire .* wire='int8'"),
        ({"stochastic_rounding": True}, "stochastic_rounding: the fp32 wire"),
        ({"wire": None}, "wire must be one of"),
        ({"wire": "powersgd:2"}, "PowerSGD is torch's"),
        ({"block": 100}, "block must be one of 128, 256, 512"),
        ({"block": 256.0}, "block must be"),
        ({"error_feedback": 1}, "True or False"),
        ({"algorithm": "tree"}, "algorithm must be one of"),
        ({"algorithm": "ring", "wire": "bf16"}, "leave algorithm out"),
        ({"algorithm": "ring", "deterministic": True}, "order of summing"),
        ({"deterministic": True, "wire": "int8"}, "where buckets begin and end"),
        ({"deterministic": True, "wire": "bf16", "stochastic_rounding": True}, "random bits"),
        ({"streams": 0}, "streams must be"),
        ({"streams": 1.5}, "streams must be"),
        ({"max_norm": -1.0}, "max_norm must be a number above 0"),
        ({"max_norm": math.inf}, "max_norm must be"),
        ({"norm_type": 0}, "norm_type must be"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=1.0)}, "collectives.optim"),
        (
            {"deterministic": True, "max_norm": 1.0, "optimizer": collectives.optim.SGD([torch.ones(1)])},
            "without optimizer",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_the_reason(options, text):
    with pytest.raises(errors.InvalidArgument, match=text):
        HookState(**options)


def test_streams_of_the_environment():
    with mock.patch.dict(os.environ, {"COLLECTIVES_STREAMS": "3"}):
        assert HookState().streams == 3 and HookState(streams=1).streams == 1
    with mock.patch.dict(os.environ, {"COLLECTIVES_STREAMS": "no"}), pytest.raises(errors.InvalidArgument, match="=no"):
        HookState()
