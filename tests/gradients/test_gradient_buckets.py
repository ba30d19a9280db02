"""GradientBuckets on real ranks against the rank-ordered average of the ranks' own gradients, bit for bit."""

import contextlib
import gc
import os
import weakref

import pytest
import torch
from torch import nn

import collectives
from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage, Mismatch
from collectives.gradients.bucket import GradientBucket
from tests.ddp.training import loss_of, make_model, over_gloo
from tests.ranks import run_ranks

SMALL = {"bucket_cap_mb": 0.004, "first_bucket_mb": 0.001}  # several buckets in the models of training.py


def everyones(comm, tensor):
    """Every rank's tensor, in rank order."""
    if tensor.is_complex():
        return [torch.view_as_complex(part) for part in everyones(comm, torch.view_as_real(tensor.resolve_conj()))]
    own = tensor.resolve_neg().contiguous()
    parts = torch.empty((comm.size, *own.shape), dtype=own.dtype)
    comm.all_gather(parts, own)
    return list(parts)


def average(comm, tensor):
    """What the engine promises: summed in fp32 (fp64) in rank order, divided, rounded once."""
    first, *others = [part if part.itemsize > 2 else part.float() for part in everyones(comm, tensor)]
    total = sum(others, first)
    if total.is_complex():
        torch.view_as_real(total).div_(comm.size)
        return total
    return (total / comm.size).to(tensor.dtype)


def averages(comm, params):
    return [average(comm, torch.zeros_like(p) if p.grad is None else p.grad) for p in params]


def backward(model, step, rank, parts=1, contexts=None, times=1.0):
    """Several backwards into one step's gradients."""
    for part in range(parts):
        with contexts() if contexts is not None and part < parts - 1 else contextlib.nullcontext():
            (loss_of(model, step * parts + part, rank) * times).backward()


def assert_bits(params, wanted):
    for number, (param, value) in enumerate(zip(params, wanted, strict=True)):
        assert torch.equal(param.grad, value), number


def step_through(ctx, caps, overlap, parts, quiet, to_none):
    comm = ctx.communicator()
    alone, model = make_model(), make_model()
    params = list(model.parameters())
    with collectives.GradientBuckets(model.named_parameters(), comm=comm, overlap=overlap, **caps) as buckets:
        sizes = [info.nbytes for info in buckets.buckets]
        assert buckets.buckets[0].names[0] == "6.bias" and sum(len(info.names) for info in buckets.buckets) == 8
        if len(sizes) == len(params) and not overlap:  # sent where they lie, with no padding
            sizes = [param.nbytes for param in reversed(params)]
        once = sum(2 * (comm.size - 1) * size // comm.size for size in sizes)
        for step in range(3):
            alone.zero_grad()
            model.zero_grad(set_to_none=to_none)
            backward(alone, step, ctx.rank, parts)
            backward(model, step, ctx.rank, parts, buckets.no_sync if quiet else None)
            sent = buckets._next
            buckets.all_reduce()
            assert_bits(params, averages(comm, alone.parameters()))
            started = overlap and step > 0  # the first call makes the hooks
            assert sent == (len(sizes) if started else 0)
            assert buckets.bytes_on_wire == once * (2 if started and parts > 1 and not quiet else 1)
        assert buckets.overlap is overlap
    assert not params[0]._post_accumulate_grad_hooks


def averaging(ctx):
    for overlap in (False, True):
        step_through(ctx, SMALL, overlap, 1, False, True)
        step_through(ctx, SMALL, overlap, 3, True, False)
        step_through(ctx, SMALL, overlap, 3, False, True)
        step_through(ctx, {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}, overlap, 1, False, False)
        step_through(ctx, {}, overlap, 2, True, True)


class Chosen(nn.Module):
    """Parameters that all ranks use, that one uses, and that none does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.all, self.one, self.none = (nn.Linear(12, 30) for _ in range(3))

    def forward(self, x, one):
        return self.all(x).sum() + (self.one(x).sum() if one else 0)


def unused(ctx):
    comm = ctx.communicator()
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(ctx.rank))
    for overlap in (False, True):
        model = Chosen()
        buckets = collectives.GradientBuckets(model.parameters(), comm=comm, overlap=overlap, **SMALL)
        for step in range(3):
            model.zero_grad()
            model(x, one=ctx.rank == step % 2).backward()
            wanted = averages(comm, [*model.all.parameters(), *model.one.parameters()])
            buckets.all_reduce()
            assert_bits([*model.all.parameters(), *model.one.parameters()], wanted)
            assert [p.grad for p in model.none.parameters()] == [None, None]
        buckets.close()


def kinds_of_gradients(ctx):
    comm = ctx.communicator()
    generator = torch.Generator().manual_seed(ctx.rank)

    def random(*shape, dtype=torch.float32):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)

    shapes = {
        "fp32": (7, 3), "scalar": (), "empty": (0, 4), "bf16": (33,), "fp16": (5, 5), "fp64": (9,), "complex": (3, 4),
        "last": (4, 3, 5, 5), "transposed": (4, 6), "slice": (4, 6), "expanded": (6, 2), "negative": (8,),
        "windows": (3, 2), "conj": (2, 3), "last_assigned": (4, 3, 5, 5),
    }  # fmt: skip
    dtypes = {"complex": torch.complex64, "conj": torch.complex64, "bf16": torch.bfloat16, "fp16": torch.float16,
              "fp64": torch.float64}  # fmt: skip
    for overlap in (False, True):
        params = {
            name: nn.Parameter(torch.zeros(shape, dtype=dtypes.get(name, torch.float32)))
            for name, shape in shapes.items()
        }
        for name in ("last", "last_assigned"):
            params[name].data = params[name].data.to(memory_format=torch.channels_last)
        frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        groups = [{"params": list(params.values())}, {"params": [frozen, params["fp32"]]}]
        buckets = collectives.GradientBuckets(groups, comm=comm, overlap=overlap, **SMALL)
        assert {info.dtype for info in buckets.buckets} == {
            torch.float32, torch.bfloat16, torch.float16, torch.float64
        }  # fmt: skip
        base = random(4, 9)
        for step in range(2):
            for name, param in params.items():
                param.grad = random(*shapes[name], dtype=dtypes.get(name, torch.float32))
            params["last"].grad = params["last"].grad.to(memory_format=torch.channels_last)
            params["transposed"].grad = random(6, 4).t()
            params["slice"].grad = base[:, 2:8]
            params["expanded"].grad = random(6, 1).expand(6, 2)
            params["negative"].grad = torch._neg_view(random(8))
            params["windows"].grad = random(4).as_strided((3, 2), (1, 1))
            params["conj"].grad = random(2, 3, dtype=torch.complex64).conj()
            kept = {name: param.grad for name, param in params.items()}
            edges = base[:, :2].clone(), base[:, 8:].clone()
            wanted = averages(comm, params.values())
            buckets.all_reduce()
            assert_bits(params.values(), wanted)
            assert frozen.grad is None
            assert torch.equal(base[:, :2], edges[0]) and torch.equal(base[:, 8:], edges[1])
            new = {name for name, param in params.items() if param.grad is not kept[name]}
            assert new == {"expanded", "windows"}, new  # all others stay the tensors that they were
            assert params["last"].grad.is_contiguous(memory_format=torch.channels_last), step
        buckets.close()


def custom_loops(ctx):
    comm = ctx.communicator()
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(ctx.rank))
    model = make_model()
    params = list(model.parameters())
    with collectives.GradientBuckets(params, comm=comm, **SMALL) as buckets:
        found = torch.autograd.grad(model(x).square().mean(), params, create_graph=True)
        for param, grad in zip(params, torch.autograd.grad(sum(g.square().sum() for g in found), params), strict=False):
            param.grad = grad
        wanted = averages(comm, params)
        buckets.all_reduce()
        assert_bits(params, wanted)

    # As a GAN: two models that step in turn; the second one's backward goes through the first, and leaves gradients.
    for overlap in (False, True):
        torch.manual_seed(3)
        maker, judge = nn.Linear(12, 12), nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 1))
        pairs = [
            (part, collectives.GradientBuckets(part.parameters(), comm=comm, overlap=overlap, **SMALL))
            for part in (judge, maker)
        ]
        for _ in range(3):
            for (part, buckets), sign in zip(pairs, (1, -1), strict=True):
                part.zero_grad()
                (sign * judge(maker(x)).mean() + judge(x).square().mean()).backward()
                wanted = averages(comm, part.parameters())
                buckets.all_reduce()
                assert_bits(part.parameters(), wanted)
                for param in part.parameters():
                    param.data.sub_(param.grad, alpha=0.1)
        for _, buckets in pairs:
            buckets.close()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("made to fail")


def changed_after_sending(ctx):
    """What rank 1 alone does to gradients whose buckets were sent already."""
    comm = ctx.communicator()
    model = make_model()
    params = list(model.parameters())
    buckets = collectives.GradientBuckets(params, comm=comm, overlap=True, **SMALL)
    buckets.all_reduce()
    assert params[0].grad is None

    def clip():
        nn.utils.clip_grad_norm_(params, 1e-3)

    def replace():
        params[-1].grad = torch.ones_like(params[-1])

    def forget():
        params[0].grad = None

    def move():
        params[-1].grad.data = params[-1].grad + 1  # moves no version counter

    def fail():
        model.zero_grad()
        with pytest.raises(ArithmeticError):
            model[2:](Fails.apply(model[:2](torch.ones(2, 12)))).sum().backward()
        assert params[0].grad is None and params[-1].grad is not None

    for change in (clip, replace, forget, move, fail):
        model.zero_grad()
        backward(model, 0, ctx.rank)
        assert buckets._next == len(buckets.buckets)
        if ctx.rank == 1:
            change()
        wanted = averages(comm, params)
        buckets.all_reduce()
        assert_bits(params, wanted)
    # The hooks do nothing inside of no_sync; what is sent later are the gradients accumulated meanwhile.
    model.zero_grad()
    with buckets.no_sync():
        backward(model, 1, ctx.rank)
    assert buckets._next == 0
    wanted = averages(comm, params)
    buckets.all_reduce()
    assert_bits(params, wanted)
    buckets.close()


def refusals(ctx):
    comm = ctx.communicator()
    messages = []
    for overlap in (False, True):
        table = nn.Embedding(10, 4, sparse=True)
        dense = nn.Linear(4, 30)
        named = [*table.named_parameters("table"), *dense.named_parameters("dense")]
        buckets = collectives.GradientBuckets(named, comm=comm, overlap=overlap, **SMALL)
        buckets.all_reduce()
        for _ in range(2):  # on rank 0 only; all get an error, and go on
            table.sparse = ctx.rank == 0
            dense(table(torch.tensor([1, ctx.rank]))).sum().backward()
            before = dense.weight.grad.clone()
            with pytest.raises(InvalidArgument) as caught:
                buckets.all_reduce()
            assert torch.equal(dense.weight.grad, before)
            messages.append(str(caught.value))
            for _, param in named:
                param.grad = None
        dense(table(torch.tensor([1, 0])).detach()).sum().backward()
        wanted = averages(comm, dense.parameters())
        buckets.all_reduce()
        assert_bits(dense.parameters(), wanted)
        buckets.close()
        pair = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        for caps in ({}, {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}):
            with collectives.GradientBuckets(pair, comm=comm, overlap=overlap, **caps) as buckets:
                pair[0].grad = pair[1].grad = torch.ones(4)
                with pytest.raises(InvalidArgument, match="share memory"):
                    buckets.all_reduce()
        for other, settings in ((nn.Linear(4, 4 + ctx.rank), {}), (nn.Linear(4, 4), {"average": ctx.rank == 0})):
            buckets = collectives.GradientBuckets(other.named_parameters(), comm=comm, overlap=overlap, **settings)
            with pytest.raises(Mismatch) as caught:
                buckets.all_reduce()
            messages.append(str(caught.value))
            buckets.close()
    return messages


@over_gloo
def over_torchs_group(ctx):
    """The default group's communicator; a wire; life and end."""
    model = make_model()
    buckets = collectives.GradientBuckets(model.named_parameters(), wire="bf16", error_feedback=True, **SMALL)
    backward(model, 0, ctx.rank)
    own = [p.grad.clone() for p in model.parameters()]
    buckets.all_reduce()
    comm = next(iter(buckets._comms.over_ranks.values()))
    for param, grad in zip(model.parameters(), own, strict=True):
        torch.testing.assert_close(param.grad, average(comm, grad), rtol=0.01, atol=0.001)
    elements = sum(b.elements for b in buckets.buckets)
    assert 2 * elements <= buckets.bytes_on_wire < 2.2 * elements
    buckets.close()

    buckets = collectives.GradientBuckets(model.parameters(), overlap=True, average=False, **SMALL)
    buckets.all_reduce()
    split_off = next(iter(buckets._comms.reducing.values()))
    assert split_off is not comm
    model.zero_grad()
    backward(model, 0, ctx.rank)
    buckets.all_reduce()
    assert_bits(model.parameters(), [sum(others, first) for first, *others in (everyones(comm, g) for g in own)])
    backward(model, 0, ctx.rank)
    child = os.fork()
    if child == 0:  # the hooks are silent there, and all_reduce says why it can't
        code = 1
        try:
            backward(model, 0, ctx.rank)
            buckets.all_reduce()
        except InvalidUsage as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    buckets.all_reduce()

    # Nothing holds the model in a cycle, the gradients aren't held at all, and the communicator goes with the buckets.
    gc.collect()
    gc.disable()
    try:
        grad = weakref.ref(model[0].weight.grad)
        model.zero_grad()
        assert grad() is None
        references = [weakref.ref(each) for each in (model, model[0].weight, buckets)]
        del model, buckets
        assert [reference() for reference in references] == [None] * 3
        assert split_off.closed and not comm.closed
    finally:
        gc.enable()


def scenario(ctx, names, path):
    results = {}
    for name in names:
        results[name] = globals()[name](ctx, path) if name == "over_torchs_group" else globals()[name](ctx)
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_the_rank_ordered_averages(ranks):
    run_ranks(scenario, ranks, ["averaging", "unused", "custom_loops"], None)


def test_gradients_of_all_kinds():
    run_ranks(scenario, 2, ["kinds_of_gradients", "changed_after_sending"], None)


def test_what_is_refused_is_refused_on_all_ranks():
    results = run_ranks(scenario, 2, ["refusals"], None)
    for own, other in zip(*(each["refusals"] for each in results), strict=True):
        if "differ" in own:
            shapes = "strides of weight: ((4, 4), torch.float32, 'cpu', None) on rank 0; ((5, 4), torch.float32"
            assert shapes in own or "average=True, overlap=" in own and "average=False, overlap=" in own
            assert ("elements: 20 on rank 0; 25 on rank 1" in own) == (shapes in own)
            assert own.partition("]")[2] == other.partition("]")[2]
        else:
            assert "the gradient of table.weight is sparse" in own and "sparse=False" in own
            assert "rank 0 has a gradient that can't be averaged" in other


def test_over_torchs_group_and_the_end(tmp_path):
    run_ranks(scenario, 2, ["over_torchs_group"], tmp_path / "store")


def test_arguments():
    comm = collectives.init("host")
    weight = nn.Parameter(torch.zeros(3))
    wrong = [
        ((nn.Linear(2, 2),), {}, "parameters\\(\\)"),
        ((weight,), {}, "params must be"),
        (([],), {}, "no parameter"),
        (([1],), {}, "entry 0"),
        (([{"lr": 1}],), {}, '"params"'),
        (([nn.Parameter(torch.zeros(3), requires_grad=False)],), {}, "no parameter"),
        (([weight * 2],), {}, "no leaf"),
        (([nn.Parameter(torch.zeros(3, device="meta"))],), {}, "meta"),
        (([weight], 0), {}, "bucket_cap_mb"),
        (([weight],), {"first_bucket_mb": True}, "first_bucket_mb"),
        (([weight],), {"overlap": 1}, "overlap"),
        (([weight],), {"comm": "world"}, "comm must be"),
        (([weight],), {"process_group": comm}, "process_group must be"),
        (([weight],), {"wire": "fp7"}, "wire must be"),
        (([nn.LazyLinear(3).weight],), {}, "no shape yet"),
    ]
    for args, options, text in wrong:
        with pytest.raises(InvalidArgument, match=text):
            collectives.GradientBuckets(*args, **options)
    with pytest.raises(InvalidUsage, match="collectives.init"):
        collectives.GradientBuckets([weight]).all_reduce()

    # A world of one; the last parameters come first, and one that is larger than the cap is alone.
    params = {name: nn.Parameter(torch.zeros(count)) for name, count in (("a", 10), ("b", 300), ("c", 20), ("d", 20))}
    buckets = collectives.GradientBuckets(params.items(), 1024 / 2**20, first_bucket_mb=200 / 2**20, comm=comm)
    assert [info.names for info in buckets.buckets] == [("d", "c"), ("b",), ("a",)]
    large = [nn.Parameter(torch.zeros(count)) for count in (5, 1 << 18, 6)]
    assert [info.elements for info in collectives.GradientBuckets(large, comm=comm).buckets] == [1 << 18, 16]
    assert "4 parameters in 3 buckets" in repr(buckets)
    params["b"].grad = torch.arange(300.0)
    buckets.all_reduce()
    assert torch.equal(params["b"].grad, torch.arange(300.0)) and params["a"].grad is None
    with pytest.raises(InvalidUsage, match="copied"):
        buckets.__reduce__()
    buckets.close()
    buckets.close()
    with pytest.raises(CollectivesError, match="after close"):
        buckets.all_reduce()
    comm.close()


def test_gradients_swapped_in_the_bucket_are_refused():
    """Gradients that are views of the buffer at each other's places would be packed over one another."""
    params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    bucket = GradientBucket(0, list(zip("abc", params, strict=True)), torch.float32, torch.device("cpu"))
    bucket.allocate(torch.empty, views=True)

    def round_with(*grads):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        bucket.read_grads()
        bucket.pack(record=False)
        bucket.unpack([True] * 3)
        bucket.rewind()

    round_with(torch.ones(4), torch.ones(4), torch.ones(4))
    round_with(params[0].grad, params[1].grad, torch.ones(4))
    with pytest.raises(InvalidArgument, match="tensor 0 overlaps the flat buffer"):
        round_with(params[1].grad, params[0].grad, torch.ones(4))
