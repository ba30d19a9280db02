"""The fast path of DDP's hook on every device: the same bits as the full one, on the communication streams."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import collectives
from collectives import HookState
from collectives.recorder import Recorder, recording
from tests.ddp.training import Fails, buckets_of, wrap
from tests.gpu.devices import check, compare, everywhere, in_group, on
from tests.gpu.training import RATE, alone, batches, make_terms

STEPS = 9
CASES = {
    "fp32": {},
    "streams": {"streams": 3},
    "sum": {"average": False},
    "ring": {"algorithm": "ring"},
}
ENV = {"COLLECTIVES_OVERLAP": "0"}


def slow(rank, tensors):
    """Return the tensors, with the current stream busy, so that what isn't ordered behind it comes too early."""
    rank.delay()
    return tensors


def step_of(rank, ddp, model, number):
    """Make a backward; read the gradients at once, on the stream that is current."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()
    loss = ddp(slow(rank, batches(number, rank.rank, rank.device)))
    loss.backward()
    return [param.grad.clone() for param in model.parameters()]


@in_group
def trained(rank, case, views):
    model, state = make_terms(rank.device), HookState(comm=rank.comm, **CASES[case])
    ddp = wrap(model, "torch", state, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    seen, is_open = [], []
    for number in range(STEPS):
        is_open.append(state.fast_path.is_open)
        seen.append(step_of(rank, ddp, model, number))
        optimizer.step()
    assert not is_open[0] and is_open[-1], is_open
    totals, numel = state.stats(), sum(param.numel() for param in model.parameters())
    assert totals["backwards"] == STEPS and totals["buckets"] >= (STEPS - 1) * buckets_of(ddp)
    sent = 2 * (rank.size - 1) * numel * 4 // rank.size
    assert totals["bytes_on_wire"] == totals["bytes_as_fp32"] == STEPS * sent and state.bytes_on_wire == sent
    assert totals["seconds_in_hook"] > 0
    return seen, [param.detach().clone() for param in model.parameters()]


@everywhere([f"{case}, {'views' if views else 'copies'}" for case in CASES for views in (True, False)],
            everyday={"streams, views", "sum, copies"})  # fmt: skip
def test_bits(device, ranks, case):
    name, kind = case.split(", ")
    (found, *_) = check(device, trained, ranks, name, kind == "views", env=ENV)
    if name in ("fp32", "streams", "ring"):
        compare(list(found), list(alone(ranks, STEPS)))


def doubling(calls):
    """Return a hook that doubles what `fused_allreduce` gives it, and adds each bucket's number to `calls`."""

    def doubled(state, bucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        return collectives.fused_allreduce(state, bucket).then(lambda done: done.value().mul_(2.0))

    return doubled


def wrap_with(hook, model, state):
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    ddp.register_comm_hook(state, hook)
    return ddp


@in_group
def inside_of_a_hook(rank, how):
    """A hook that uses the bucket when `fused_allreduce` is done: of torch's, and of the user's own."""
    model, state, calls = make_terms(rank.device), HookState(comm=rank.comm), []
    hook = doubling(calls) if how == "own" else default_hooks.fp16_compress_wrapper(collectives.fused_allreduce)
    ddp = wrap_with(hook, model, state)
    found = []
    for number in range(STEPS):
        found.append(step_of(rank, ddp, model, number))
        assert rank.is_host or not state.fast_path.is_open
    assert how != "own" or len(calls) > STEPS
    return found


@everywhere(["own", "fp16"], everyday=["own"])
def test_a_hook_around_it(device, ranks, case):
    found = check(device, inside_of_a_hook, ranks, case, exact=case == "own", rtol=1e-2, atol=1e-2, env=ENV)
    if case == "own":
        grads, _ = alone(ranks, STEPS)
        compare(found[0][0], [2.0 * grad for grad in grads[0]])


@in_group
def then_a_hook_around_it(rank):
    """The module's parameters were in a DDP object with the hook itself, and are in one with a hook around it."""
    model, state = make_terms(rank.device), HookState(comm=rank.comm)
    ddp = wrap(model, "torch", state, gradient_as_bucket_view=True)
    for number in range(6):
        step_of(rank, ddp, model, number)
    assert state.fast_path.is_open
    del ddp
    for param in model.parameters():
        param.grad = None
    ddp = wrap_with(doubling([]), model, state)
    found = [step_of(rank, ddp, model, number) for number in range(6)]
    assert not state.fast_path.is_open
    return found


@everywhere()
def test_a_hook_around_it_afterwards(device, ranks):
    (found, *_) = check(device, then_a_hook_around_it, ranks, env=ENV)
    model, total = make_terms(), None
    for rank in range(ranks):
        model.zero_grad()
        model(batches(5, rank)).backward()
        grads = [param.grad.clone() for param in model.parameters()]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    compare(found[-1], [2.0 * (grad / ranks) for grad in total])


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
        model = make_terms(rank.device)
        return model, wrap(Interrupted(model), "torch", state, gradient_as_bucket_view=True)

    model, ddp = fresh()
    for number in range(6):
        step_of(rank, ddp, model, number)
    assert state.fast_path.is_open
    Fails.on = True
    try:
        step_of(rank, ddp, model, 6)
    except ArithmeticError:
        pass
    else:
        raise AssertionError("the backward was to fail")
    finally:
        Fails.on = False
    assert rank.is_host or state.fast_path._unjoined
    del ddp
    other, ddp = fresh()
    found = [step_of(rank, ddp, other, number) for number in range(6)]
    assert state.fast_path.is_open
    recording.active = recorder = Recorder()
    try:
        found.append(step_of(rank, ddp, other, 6))
    finally:
        recording.active = None
    assert state.fast_path.is_open and sum(row == "hook" for row, *_ in recorder.events) == buckets_of(ddp)
    found += [step_of(rank, ddp, other, number) for number in range(6)]
    assert state.fast_path.is_open
    saved = state.state_dict()
    return found, saved["buckets"] if "buckets" in saved else None


@everywhere()
def test_what_comes_between(device, ranks):
    (found, *_) = check(device, interrupted, ranks, same=True, env=ENV)
    grads, _ = alone(ranks, 1)
    compare(found[0][0], grads[0])


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
