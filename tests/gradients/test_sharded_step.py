"""ShardedStep: stepped inside of a DDP hook, an optimizer does what it does after the synchronisation, bit for bit."""

import contextlib
import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import errors, optim
from collectives.compression import Bucket
from collectives.gradients.shard_spec import ShardSpec
from collectives.gradients.zero import ShardedStep
from tests.ddp.training import Branches, loss_of, make_model, over_gloo, run, wrap

BF16 = torch.bfloat16


class Hook:
    """All-reduces, or updates inside of the backward: at once, or by optimizer.step()."""

    def __init__(self, comm, sharded=None, deferred=False, max_norm=None):
        self.comm = comm
        self.sharded = sharded
        self.deferred = deferred
        self.max_norm = max_norm
        self.sent = 0
        self.reports = True  # what isn't finite

    def __call__(self, _, bucket):
        last, flat, params = bucket.is_last(), bucket.buffer(), bucket.parameters()
        future = torch.futures.Future()
        future.set_result(flat)
        if self.sharded is None:
            self.comm.all_reduce(flat, "avg")
            return future
        offsets = [sum(p.numel() for p in params[:at]) for at in range(len(params))]
        bucket = Bucket(flat, params, offsets, bucket.index())
        if bucket.index == 0:
            self.sharded.begin()
            self.found, self.squares = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
        spec = self.sharded.shard_spec(bucket, self.comm.size, self.comm.rank)
        self.comm.reduce_scatter(flat[spec.shard], flat[: spec.sharded_numel], "avg")
        self.comm.all_reduce(flat[spec.remainder], "avg")
        if not self.deferred:
            self.sent += self.sharded.update(self.comm, bucket)
            return future
        mine = torch.cat([flat[spec.shard], flat[spec.remainder] if self.comm.rank == 0 else flat[:0]])
        self.found += (~torch.isfinite(mine)).sum()
        self.squares += mine.double().square().sum()
        if not last:
            self.sharded.defer((self.comm, bucket, None))
            return future
        self.comm.all_reduce(self.found)
        self.comm.all_reduce(self.squares)
        found = self.found if self.reports else None
        self.sharded.defer((self.comm, bucket, None), self.squares.sqrt(), self.max_norm, found)
        return future


class Convolutions(nn.Module):
    """Parameters in channels_last, of two groups' sizes, one of no elements in the last rank's part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(13)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 5, 2)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x):
        return self.net(x.repeat(1, 4).reshape(-1, 3, 4, 4)).mean(dim=(2, 3))


def groups_of(model):
    params = list(model.parameters())
    return [{"params": params[1::2]}, {"params": params[::2], "weight_decay": 0.1}]


RULES = {
    "SGD": (optim.SGD, make_model, torch.float32, dict(lr=0.1, momentum=0.9)),
    "plain SGD": (optim.SGD, make_model, torch.float32, dict(lr=0.1)),
    "AdamW": (optim.AdamW, make_model, torch.float32, dict(lr=0.01, amsgrad=True)),
    "masters": (optim.AdamW, make_model, BF16, dict(lr=0.01, master_weights=True)),
    "random": (optim.Adam, make_model, BF16, dict(lr=0.01, stochastic_rounding=True, seed=5)),
    "branches": (optim.AdamW, Branches, torch.float32, dict(lr=0.01)),
    "channels_last": (optim.AdamW, Convolutions, torch.float32, dict(lr=0.01)),
}


def make(comm, rule, sharded, **how):
    kind, model, dtype, arguments = RULES[rule]
    own = {key: how.pop(key) for key in ("deferred", "max_norm") if key in how}
    model = model().to(dtype)
    optimizer = kind(groups_of(model), **arguments)
    hook = Hook(comm, ShardedStep(optimizer) if sharded else None, **own)
    ddp = wrap(model, "plain", **how)
    ddp.register_comm_hook(None, hook.__call__)
    return ddp, optimizer, hook


def step(ddp, optimizer, number, rank, dtype, parts=1, scaler=None):
    optimizer.zero_grad()
    for part in range(parts):
        with contextlib.nullcontext() if part == parts - 1 else ddp.no_sync():
            loss = loss_of(ddp, number * parts + part, rank, dtype)
            (loss if scaler is None else scaler.scale(loss)).backward()
    optimizer.step() if scaler is None else scaler.step(optimizer)


def same(ours, theirs):
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other), at


def same_states(ours, theirs):
    """Two state dicts, the first as if it had not been sharded."""
    assert ours["param_groups"] == theirs["param_groups"] and ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        same((ours["state"][number][key] for key in state), state.values())


# ---- The same as after the synchronisation.


@over_gloo
def equal(ctx):
    comm = ctx.new_communicator(deterministic=True)
    found = {}
    for rule in [each for each in RULES if each != "branches"] if ctx.size == 2 else ("AdamW", "random"):
        dtype = RULES[rule][2]
        pairs = [make(comm, rule, sharded) for sharded in (True, False)]
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for _, optimizer, _ in pairs]
        for number in range(4):  # DDP makes its buckets again after the first
            for (ddp, optimizer, _), schedule in zip(pairs, schedules, strict=True):
                step(ddp, optimizer, number, ctx.rank, dtype, parts=1 + number % 2)
                schedule.step()
            same(pairs[0][0].parameters(), pairs[1][0].parameters())
            for ddp, optimizer, _ in pairs:  # written by others: seen by autograd's counters, and not
                for param in ddp.parameters() if number in (1, 2) else ():
                    (param.detach() if number == 1 else param.data).mul_(0.75)
                if number == 2:
                    optimizer.refresh_masters()
        sharded, optimizer = pairs[0][2].sharded, pairs[0][1]
        same_states(sharded.state_dict(), pairs[1][1].state_dict())
        keys = ("exp_avg", "momentum_buffer", "master_param")
        held = sum(state[key].numel() for state in optimizer.state.values() for key in keys if key in state)
        buckets = len(sharded._bucket_states)
        if rule == "channels_last":
            other_order(comm, ctx.rank, pairs)
        found[rule] = (held, buckets, pairs[0][2].sent, sum(p.numel() for p in pairs[0][0].parameters()))
        same([torch.cat([p.flatten() for p in pairs[0][0].parameters()])], [gathered(comm, pairs[0][0])])
    comm.close()
    return found


def other_order(comm, rank, pairs):
    """Go on with the state's elements in another order, as the parameters' are."""
    again = []
    for sharded, (ddp, optimizer, _) in zip((True, False), pairs, strict=True):
        state = copy.deepcopy(optimizer.state_dict())
        kept = RULES["channels_last"]
        RULES["channels_last"] = (kept[0], lambda: Convolutions().to(memory_format=torch.contiguous_format), *kept[2:])
        third, second, _ = make(comm, "channels_last", sharded)
        RULES["channels_last"] = kept
        third.module.load_state_dict(ddp.module.state_dict())
        second.load_state_dict(state)
        for number in (4, 5):
            step(third, second, number, rank, torch.float32)
        again.append(third)
    assert all(param.is_contiguous() for param in again[0].parameters())
    same(again[0].parameters(), again[1].parameters())


def gathered(comm, ddp):
    """The parameters of rank 0."""
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    comm.broadcast(flat)
    return flat


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equal_to_the_step_after_the_synchronisation(tmp_path, ranks):
    for result in run(equal, ranks, tmp_path / "store"):
        for rule, (held, buckets, sent, elements) in result.items():
            kinds = {"plain SGD": 0, "masters": 2}.get(rule, 1)
            itemsize = RULES[rule][2].itemsize
            most = elements / ranks + buckets * ranks * (16 // itemsize)
            assert kinds * (elements // ranks - most / 4) <= held <= kinds * most, (rule, held, elements, buckets)
            assert sent <= 4 * elements * itemsize * (ranks - 1) / ranks
            assert sent >= 4 * (elements - 8 * ranks * 16 // itemsize) * itemsize * (ranks - 1) / ranks
            assert buckets > 1 or rule == "channels_last"


# ---- GradScaler, clipping, deferral.


@over_gloo
def scaled(ctx):
    comm = ctx.new_communicator(deterministic=True)
    scales, steps = [], []
    for rule, max_norm, view in (("AdamW", 0.05, False), ("masters", None, True)):
        dtype = RULES[rule][2]
        ddp, optimizer, hook = make(comm, rule, True, deferred=True, max_norm=max_norm, gradient_as_bucket_view=view)
        other, plain, _ = make(comm, rule, False)
        scaler, own = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2))
        for number in range(5):
            # One rank alone finds an infinity, and only in what it owns itself after the reduce-scatter.
            spoilt = [spoil(each) for each in (ddp, other) if number == 2 and ctx.rank == ctx.size - 1]
            step(ddp, optimizer, number, ctx.rank, dtype, scaler=scaler)
            other_step(other, plain, own, number, ctx.rank, dtype, max_norm)
            for each in spoilt:
                each.remove()
            scaler.update()
            own.update()
            if max_norm is None:
                same(ddp.parameters(), other.parameters())
            else:
                for one, theirs in zip(ddp.parameters(), other.parameters(), strict=True):
                    torch.testing.assert_close(one, theirs, rtol=1e-5, atol=1e-7)
            scales.append(scaler.get_scale())
        assert scaler.get_scale() == own.get_scale()
        steps.append(float(next(iter(optimizer.state.values()))["step"]))
        same([gathered(comm, ddp)], [torch.cat([p.detach().flatten() for p in ddp.parameters()])])
    # The hook has not looked: what one rank's scaler finds leaves the step out on all.
    hook.reports = False
    before = [param.detach().clone() for param in ddp.parameters()]
    if ctx.rank == ctx.size - 1:
        spoil(ddp)
    step(ddp, optimizer, 5, ctx.rank, dtype, scaler=scaler)
    same(ddp.parameters(), before)
    comm.close()
    return scales, steps


def spoil(ddp):
    """Make an element infinite that the last rank owns: behind the middle of its bucket, and before the rest."""

    def infinite(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[400] = torch.inf
        return gradient

    return ddp.module[0].weight.register_hook(infinite)


def other_step(ddp, optimizer, scaler, number, rank, dtype, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss_of(ddp, number, rank, dtype)).backward()
    scaler.unscale_(optimizer)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
    scaler.step(optimizer)


def test_scaler_skips_on_all_ranks(tmp_path):
    results = run(scaled, 2, tmp_path / "store")
    assert results[0] == results[1]
    scales, steps = results[0]
    assert steps == [4.0, 4.0] and scales[1] == 2.0**10 and scales[2] == 2.0**9 and scales[4] == 2.0**9


@over_gloo
def branches(ctx):
    """Parameters that no rank has used get no gradient, and aren't stepped, weight decay included."""
    comm = ctx.new_communicator(deterministic=True)
    pairs = [make(comm, "branches", sharded, deferred=True, find_unused_parameters=True) for sharded in (True, False)]
    first = [param.detach().clone() for param in pairs[0][0].module.branches[1].parameters()]
    for number in range(5):
        for ddp, optimizer, _ in pairs:
            ddp.module.step = 0 if number < 2 else number
            step(ddp, optimizer, number, ctx.rank, torch.float32)
        if number < 2:
            same(first, pairs[0][0].module.branches[1].parameters())
        same(pairs[0][0].parameters(), pairs[1][0].parameters())
    same_states(pairs[0][2].sharded.state_dict(), pairs[1][1].state_dict())
    comm.close()


def test_deferred_updates_leave_out_parameters_without_gradients(tmp_path):
    run(branches, 2, tmp_path / "store")


# ---- State.


@over_gloo
def save(ctx, rule, file):
    comm = ctx.new_communicator(deterministic=True)
    ddp, optimizer, hook = make(comm, rule, True)
    for number in range(3):
        step(ddp, optimizer, number, 0, RULES[rule][2])
    full, own = hook.sharded.state_dict(), hook.sharded.state_dict(full=False)
    # Loaded by another one of the same rank, whose first buckets are others: its state moves.
    buffer = io.BytesIO()
    torch.save(own, buffer)
    buffer.seek(0)
    again, second, other = make(comm, rule, True)
    again.module.load_state_dict(ddp.module.state_dict())
    other.sharded.load_state_dict(torch.load(buffer, weights_only=True))
    if ctx.rank == 0:
        torch.save((full, ddp.module.state_dict()), file)
    for number in (3, 4):
        step(ddp, optimizer, number, 0, RULES[rule][2])
        step(again, second, number, 0, RULES[rule][2])
        same(ddp.parameters(), again.parameters())
    # Full states that are loaded unsharded, by ours and, where it knows what's in there, by torch's.
    alone = RULES[rule][1]().to(RULES[rule][2])
    RULES[rule][0](groups_of(alone), lr=0.1).load_state_dict(full)
    if rule == "AdamW":
        torch.optim.AdamW(groups_of(alone), lr=0.1).load_state_dict(full)
    with pytest.raises(errors.InvalidArgument, match="one rank's shard"):
        wrong = RULES[rule][0](groups_of(alone), lr=0.1)
        wrong.load_state_dict(own)
        loss_of(alone, 0, 0, RULES[rule][2]).backward()
        wrong.step()
    shard = copy.deepcopy(own)
    next(iter(shard["state"].values()))["shard"][4] += 1
    with pytest.raises(errors.InvalidArgument, match=r"rank \d of 2, and this is rank \d of 2: save and load the full"):
        hook.sharded.load_state_dict(shard)
    # A state that one rank alone has loaded.
    third, optimizer, hook = make(comm, rule, True)
    if ctx.rank == 0:
        optimizer.load_state_dict(full)
    with pytest.raises(
        errors.Mismatch, match="of group 0: .* on rank 0; .* on rank 1.*: load the same full state on all"
    ):
        step(third, optimizer, 0, 0, RULES[rule][2])
    comm.close()
    return [p.detach().clone() for p in ddp.parameters()]


@over_gloo
def resume(ctx, rule, file, through):
    full, parameters = torch.load(file)
    comm = ctx.new_communicator(deterministic=True)
    ddp, optimizer, hook = make(comm, rule, True)
    ddp.module.load_state_dict(parameters)
    (hook.sharded if through else optimizer).load_state_dict(full)
    for number in (3, 4):
        step(ddp, optimizer, number, 0, RULES[rule][2])
    own = hook.sharded.state_dict(full=False)
    comm.close()
    return [p.detach().clone() for p in ddp.parameters()], own


@pytest.mark.parametrize("rule", ["AdamW", "masters"])
def test_saved_on_two_ranks_and_resumed_on_three(tmp_path, rule):
    """All ranks have the same data, so that the average doesn't depend on how many there are, but for its rounding."""
    file = tmp_path / "full.pt"
    after = run(save, 2, tmp_path / "two", rule, file)[0]
    for found, own in run(resume, 3, tmp_path / "three", rule, file, rule == "AdamW"):
        for one, other in zip(found, after, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert all(state["exp_avg"].dim() == 1 for state in own["state"].values())
    if rule == "AdamW":  # the average of two alike is the gradient itself
        same(run(resume, 1, tmp_path / "one", rule, file, False)[0][0], after)


# ---- What is refused.


@over_gloo
def refusals(ctx):
    comm = ctx.new_communicator()
    ddp, optimizer, hook = make(comm, "AdamW", True)
    with pytest.raises(errors.InvalidUsage, match="no synchronised backward since the last step"):
        optimizer.step()
    step(ddp, optimizer, 0, ctx.rank, torch.float32)
    with pytest.raises(errors.InvalidUsage, match="no synchronised backward"):
        optimizer.step()
    with pytest.raises(errors.InvalidArgument, match="no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(errors.InvalidArgument, match="takes no clip"):
        optimizer.step(clip=0.5)
    loss_of(ddp, 1, ctx.rank).backward()
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.ones(1)
    with pytest.raises(errors.InvalidUsage, match="still scaled"):
        optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss_of(ddp, 1, ctx.rank).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()  # doesn't say that the optimizer was not stepped
    optimizer.step()
    stray = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [stray]})
    stray.grad = torch.ones(3)
    with pytest.raises(errors.InvalidUsage, match=r"parameter 0 of group 2 \(shape \(3,\)\).*in no bucket"):
        step_without_zero(ddp, optimizer, ctx.rank)

    ddp, optimizer, hook = make(comm, "AdamW", True, deferred=True)
    loss_of(ddp, 0, ctx.rank).backward()
    assert hook.sharded.pending == 1  # DDP's first bucket holds all
    with pytest.raises(errors.InvalidUsage, match="buckets still wait for optimizer.step"):
        hook.sharded.begin()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    with pytest.raises(errors.InvalidUsage, match="leave unscale_ out"):
        scaler.step(optimizer)
    hook.sharded.discard()
    hook.sharded.begin()

    model = make_model()
    optimizer = optim.SGD(list(model.parameters())[1:], lr=0.1)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, Hook(comm, ShardedStep(optimizer)).__call__)
    with pytest.raises(errors.InvalidArgument, match="doesn't have 0.weight: give it all"):
        loss_of(ddp, 0, ctx.rank).backward()
    comm.close()


def step_without_zero(ddp, optimizer, rank):
    loss_of(ddp, 2, rank).backward()
    optimizer.step()


def test_what_is_refused(tmp_path):
    run(refusals, 2, tmp_path / "store")


# ---- Who owns what.


@pytest.mark.parametrize(
    "size, ranks, align", [(0, 2, 4), (5, 2, 4), (8, 2, 4), (103, 3, 4), (4096, 3, 256), (64, 1, 4)]
)
def test_shard_spec(size, ranks, align):
    owners = [[] for _ in range(size)]
    cuts = sorted({0, size // 7, size // 3, size})
    for rank in range(ranks):
        spec = ShardSpec(size, ranks, align, rank)
        assert spec.shard_numel % align == 0 and spec.remainder.stop - spec.remainder.start < ranks * align
        for first, end in zip(cuts, cuts[1:], strict=False):
            mine = [first + at + i for at, count in spec.local_spans(first, end - first) for i in range(count)]
            theirs = [first + at + i for at, count in spec.remote_spans(first, end - first) for i in range(count)]
            assert sorted(mine + theirs) == list(range(first, end))
            for element in mine:
                owners[element].append(rank)
    for element, who in enumerate(owners):
        assert who == ([element // spec.shard_numel] if element < spec.sharded_numel else list(range(ranks)))
