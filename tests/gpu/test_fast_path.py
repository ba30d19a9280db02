"""The fast path of DDP's hook on every device: the same bits as the full one, on the communication streams.

And the hook's futures, where DDP asks for them before the last bucket, or where no last bucket comes.
"""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import collectives
from collectives import HookState
from collectives.recorder import Recorder, recording
from tests.ddp.training import Fails, buckets_of, wrap
from tests.gpu.devices import check, compare, everywhere, in_group, on
from tests.gpu.training import RATE, Term, alone, batches, make_terms

STEPS = 9
SETTLED = 6  # steps after which the path is open
CASES = {
    "fp32": {},
    "streams": {"streams": 3},
    "sum": {"average": False},
    "ring": {"algorithm": "ring"},
}
ENV = {"COLLECTIVES_OVERLAP": "0"}


def hooked(rank, views=True, **options):
    """Return a model, its state and DDP with the hook."""
    model, state = make_terms(rank.device), HookState(comm=rank.comm, **options)
    return model, state, wrap(model, "torch", state, gradient_as_bucket_view=views)


def step_of(rank, ddp, number):
    """Make a backward; read the gradients at once, on the stream that is current."""
    ddp.zero_grad(set_to_none=False)
    data = batches(number, rank.rank, rank.device)
    rank.delay()  # so that what isn't ordered behind the stream comes too early
    ddp(data).backward()
    return [param.grad.clone() for param in ddp.parameters()]


def steps_of(rank, ddp, count=SETTLED):
    return [step_of(rank, ddp, number) for number in range(count)]


def trained_by(rank, ddp, model, count=SETTLED):
    """Train; return each step's gradients and the parameters at the end."""
    optimizer, seen = torch.optim.SGD(model.parameters(), RATE), []
    for number in range(count):
        step_of(rank, ddp, number)
        seen.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
    return seen, [param.detach().clone() for param in model.parameters()]


@in_group
def trained(rank, case, views):
    model, state, ddp = hooked(rank, views, **CASES[case])
    assert not state.fast_path.is_open
    found = trained_by(rank, ddp, model, STEPS)
    assert state.fast_path.is_open
    totals, numel = state.stats(), sum(param.numel() for param in model.parameters())
    assert totals["backwards"] == STEPS and totals["buckets"] >= (STEPS - 1) * buckets_of(ddp)
    sent = 2 * (rank.size - 1) * numel * 4 // rank.size
    assert totals["bytes_on_wire"] == totals["bytes_as_fp32"] == STEPS * sent and state.bytes_on_wire == sent
    assert totals["seconds_in_hook"] > 0
    return found


@everywhere([f"{case}, {'views' if views else 'copies'}" for case in CASES for views in (True, False)],
            everyday={"streams, views", "sum, copies"})  # fmt: skip
def test_bits(device, ranks, case):
    name, kind = case.split(", ")
    (found, *_) = check(device, trained, ranks, name, kind == "views", env=ENV)
    if name in ("fp32", "streams", "ring"):
        compare(list(found), list(alone(ranks, STEPS)))


# ---- Hooks around it.


def doubling(calls):
    """Return a hook that doubles what `fused_allreduce` gives it, and adds each bucket's number to `calls`."""

    def doubled(state, bucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        future = collectives.fused_allreduce(state, bucket)
        future.wait()
        return future.then(lambda done: done.value().mul_(2.0))

    return doubled


def wrap_with(hook, model, state):
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    ddp.register_comm_hook(state, hook)
    return ddp


@in_group
def inside_of_a_hook(rank, how):
    """A hook that uses the bucket when `fused_allreduce` is done: of torch's, and of the user's own.

    "then": the module's parameters were in a DDP object with the hook itself before. "refused": the hook itself was
    refused for a DDP object that has the other one.
    """
    model, state, calls = make_terms(rank.device), HookState(comm=rank.comm), []
    if how == "then":
        ddp = wrap(model, "torch", state, gradient_as_bucket_view=True)
        steps_of(rank, ddp)
        assert state.fast_path.is_open
        del ddp
        model.zero_grad()
    hook = doubling(calls) if how != "fp16" else default_hooks.fp16_compress_wrapper(collectives.fused_allreduce)
    ddp = wrap_with(hook, model, state)
    if how == "refused":
        with pytest.raises(RuntimeError):
            ddp.register_comm_hook(state, collectives.fused_allreduce)
    found = steps_of(rank, ddp)
    assert buckets_of(ddp) > 1 and (rank.is_host or not state.fast_path.is_open)
    assert how == "fp16" or len(calls) > SETTLED
    return found


@everywhere(["own", "then", "refused", "fp16"], everyday=["own", "then", "refused"])
def test_a_hook_around_it(device, ranks, case):
    found, *_ = check(device, inside_of_a_hook, ranks, case, exact=case != "fp16", rtol=1e-2, atol=1e-2, env=ENV)
    if case != "fp16":
        grads, _ = alone(ranks, SETTLED, make=lambda params: torch.optim.SGD(params, 0.0))
        compare(found, [[2.0 * grad for grad in each] for each in grads])


# ---- Buckets that are left out, and backwards on other streams.


class WithUnused(nn.Module):
    """A model and a parameter that no forward uses, which is alone in DDP's last bucket."""

    def __init__(self, model, device):
        super().__init__()
        self.unused = Term((60, 40)).to(device)
        self.model = model

    def forward(self, batch):
        return self.model(batch)


@in_group
def without_last_bucket(rank):
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "gradient_as_bucket_view": True}
    model = make_terms(rank.device)
    stages = HookState(comm=rank.new_communicator(), max_norm=1.0)
    ddp = wrap(WithUnused(model, rank.device), "torch", stages, **options)
    with pytest.raises(collectives.errors.InvalidUsage, match="skip_all_reduce_unused_params"):
        ddp(batches(0, rank.rank, rank.device)).backward()
    stages.comm.abort()
    model = make_terms(rank.device)
    whole = WithUnused(model, rank.device)
    whole.unused.weight.grad = torch.zeros_like(whole.unused.weight)
    return trained_by(rank, wrap(whole, "torch", HookState(comm=rank.comm), **options), model)


@everywhere()
def test_a_last_bucket_that_is_left_out(device, ranks):
    """DDP leaves out the buckets of unused parameters, among them the last one, which what needs all can't have."""
    for overlap in "01" if device == "host" else "0":
        (found, *_) = check(device, without_last_bucket, ranks, env={"COLLECTIVES_OVERLAP": overlap})
        compare(list(found), list(alone(ranks, SETTLED)))


@in_group
def on_another_stream(rank, case):
    """DDP is made on the default stream and trains on another one, by which its first buckets are freed; or the fast
    path is open when the backward comes from a new stream, on which the buckets are freed, too.
    """
    model, state, ddp = hooked(rank, case != "copies")
    if case == "opened before":
        steps_of(rank, ddp)
        assert state.fast_path.is_open
    side = rank.new_stream()
    with rank.use(side):
        found = trained_by(rank, ddp, model)
        assert state.fast_path.is_open
        del ddp
        model.zero_grad()
    rank.join(side)
    return found


@everywhere(["views", "copies", "opened before"])
def test_a_backward_on_another_stream(device, ranks, case):
    (found, *_) = check(device, on_another_stream, ranks, case, env=ENV)
    compare(list(found), list(alone(ranks, SETTLED)))


# ---- What comes between.


class Interrupted(nn.Module):
    """The model of `make_terms`, whose backward can fail in the middle."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        terms = self.model.terms
        half = len(terms) // 2
        first = Fails.apply(sum(term(c) for term, c in zip(terms[:half], batch[:half], strict=True)))
        second = sum(term(c) for term, c in zip(terms[half:], batch[half:], strict=True))
        return first + second


@in_group
def interrupted(rank):
    """A backward fails between two buckets; another module of the state, and then a timeline, come next."""
    state = HookState(comm=rank.comm, streams=2)

    def fresh():
        return wrap(Interrupted(make_terms(rank.device)), "torch", state, gradient_as_bucket_view=True)

    ddp = fresh()
    steps_of(rank, ddp)
    assert state.fast_path.is_open
    Fails.on = True
    with pytest.raises(ArithmeticError):
        step_of(rank, ddp, 6)
    Fails.on = False
    assert rank.is_host or state.fast_path._unjoined
    del ddp
    ddp = fresh()
    found = steps_of(rank, ddp)
    assert state.fast_path.is_open
    recording.active = recorder = Recorder()
    try:
        found.append(step_of(rank, ddp, 6))
    finally:
        recording.active = None
    assert state.fast_path.is_open and sum(row == "hook" for row, *_ in recorder.events) == buckets_of(ddp)
    found += steps_of(rank, ddp)
    assert state.fast_path.is_open
    return found


@everywhere()
def test_what_comes_between(device, ranks):
    (found, *_) = check(device, interrupted, ranks, env=ENV)
    grads, _ = alone(ranks, 1)
    compare(found[0], grads[0])


@in_group
def replayed(rank, captured):
    """Steps on the fast path, eager and in a CUDA graph."""
    side = rank.new_stream()
    model, state = make_terms(rank.device), HookState(comm=rank.comm)
    static = batches(0, rank.rank, rank.device)
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step():
        optimizer.zero_grad(set_to_none=True)
        ddp(static).backward()
        optimizer.step()

    with rank.use(side):
        ddp = wrap(model, "torch", state, gradient_as_bucket_view=True)
        for _ in range(12):
            step()
    rank.join(side)
    rank.synchronize()
    assert state.fast_path.is_open
    again = rank.capture(step) if captured else step
    assert state.fast_path.is_open
    for number in range(3):
        for tensor, data in zip(static, batches(number, rank.rank, rank.device), strict=True):
            tensor.copy_(data)
        with rank.no_host_waits():
            again()
    rank.synchronize()
    with rank.use(side):
        step()  # eager, after replays
    rank.join(side)
    rank.synchronize()
    return [param.detach().clone() for param in model.parameters()]


@everywhere(["captured"], devices=("simulated", "cuda"))
def test_graphs(device, ranks, case):
    compare(on(device, replayed, ranks, True, env=ENV), on(device, replayed, ranks, False, env=ENV))
