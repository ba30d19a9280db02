"""hvd.DistributedOptimizer on real ranks: the same bits as DDP with our hook, its arguments, its memory, its errors."""

import contextlib
import copy
import itertools
import os
import pickle
import warnings

import pytest
import torch
from torch import nn

import collectives
from collectives import horovod as hvd
from collectives import optim
from collectives.horovod import optimizer as made_by
from collectives.horovod.basics import World, activate
from collectives.horovod.settings import read_settings
from collectives.rendezvous.peers import PeerInfo
from tests.ddp.training import batch, make_model, over_gloo
from tests.ranks import run_ranks

STEPS = 4


@contextlib.contextmanager
def a_job(ctx):
    """Make the ranks of this call a Horovod job."""
    comm = ctx.new_communicator()
    peers = [PeerInfo(rank, "here", "1", os.getpid()) for rank in range(ctx.size)]
    activate(World(comm, peers, owns=True, settings=read_settings()))
    try:
        yield
    finally:
        hvd.shutdown()


def train(model, optimizer, rank, *, passes=1, steps=STEPS, to_none=True, between=None):
    """Make steps of `passes` backwards each; give the losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        for micro in range(passes):
            images, labels = batch(step * passes + micro, rank)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            losses.append(loss.item())
        if between is not None:
            between(optimizer)
        optimizer.step()
    return losses


def train_ddp(make, rank, passes=1):
    """The same on DDP with our hook."""
    ddp = collectives.DistributedDataParallel(make_model())
    ddp.register_comm_hook(collectives.fused_allreduce)
    optimizer = make(ddp.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(passes):
            images, labels = batch(step * passes + micro, rank)
            with ddp.no_sync() if micro + 1 < passes else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(ddp(images), labels)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
    return ddp.module, losses


def same(model, other):
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def same_on_all(ctx, model):
    return len(set(ctx.exchange(pickle.dumps([param.tolist() for param in model.parameters()])))) == 1


MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adam, fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "ours": lambda params: optim.AdamW(params, lr=0.01),
}


@over_gloo
def curves(ctx):
    with a_job(ctx):
        for name, make in MAKERS.items():
            reference, losses = train_ddp(make, ctx.rank)
            model = make_model()
            wrapped = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
            assert isinstance(wrapped, type(make(make_model().parameters())))
            assert train(model, wrapped, ctx.rank) == losses, name
            assert same(model, reference), name
        make = MAKERS["sgd"]
        reference, losses = train_ddp(make, ctx.rank)
        for options in (
            {"groups": 2},
            {"groups": [[0, 3], [2]], "gradient_predivide_factor": 2.0},
            {"gradient_predivide_factor": 2.0, "process_set": hvd.global_process_set},
            {"gradient_as_bucket_view": False},
            {"gradient_as_bucket_view": False, "groups": 3},
            {"overlaps": True},
            {"overlaps": True, "gradient_as_bucket_view": False},
            {"to_none": False},
            {"synchronizes": True},
            {"named_parameters": None},
        ):
            given = dict(options)
            model = make_model()
            params = list(model.parameters())
            if isinstance(given.get("groups"), list):
                given["groups"] = [[params[at] for at in group] for group in given["groups"]]
            overlaps, to_none = given.pop("overlaps", None), given.pop("to_none", True)
            synchronizes = given.pop("synchronizes", False)
            given.setdefault("named_parameters", model.named_parameters())
            wrapped = hvd.DistributedOptimizer(make(params), **given)
            if overlaps is not None:
                wrapped._reducer._overlaps = overlaps
            found = []
            for step in range(STEPS):
                wrapped.zero_grad(set_to_none=to_none)
                images, labels = batch(step, ctx.rank)
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                found.append(loss.item())
                if synchronizes:
                    wrapped.synchronize()
                    with wrapped.skip_synchronize():
                        wrapped.step()
                else:
                    wrapped.step()
            assert found == losses and same(model, reference), options

        reference, losses = train_ddp(make, ctx.rank, passes=2)
        model = make_model()
        wrapped = hvd.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), backward_passes_per_step=2
        )
        assert train(model, wrapped, ctx.rank, passes=2) == losses and same(model, reference)
        wrapped.set_backward_passes_per_step(1)
        train(model, wrapped, ctx.rank, steps=1)

        reference, _ = train_ddp(make, ctx.rank)
        for compression, error in (
            (hvd.Compression.fp16, 2e-3),
            (hvd.Compression.bf16, 2e-2),
            (hvd.Compression.int8, 2e-2),
        ):
            model = make_model()
            wrapped = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), compression)
            train(model, wrapped, ctx.rank)
            assert same_on_all(ctx, model) and not same(model, reference), compression
            for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine, right, rtol=0, atol=error)

            class Own(compression):  # a class of the user's: by compress() and decompress()
                pass

            model, again = make_model(), model
            wrapped = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), Own)
            train(model, wrapped, ctx.rank)
            if compression is not hvd.Compression.int8:  # whose blocks begin elsewhere
                assert same(model, again), compression
    return True


def test_the_same_bits_as_ddp_with_our_hook(tmp_path):
    assert run_ranks(curves, 2, tmp_path / "gloo", timeout=90) == [True, True]


# ---- Memory.


def memory(ctx):
    with a_job(ctx):
        model = make_model()
        model.append(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))  # whose gradients have strides
        params = list(model.parameters())
        wrapped = hvd.DistributedOptimizer(MAKERS["sgd"](params), model.named_parameters())
        packs = []
        executor = wrapped._reducer._controller._executor
        executor._buffer = lambda *arguments: packs.append(arguments) or type(executor)._buffer(executor, *arguments)

        def step(to_none=True, inside=None):
            wrapped.zero_grad(set_to_none=to_none)
            images, labels = batch(0, ctx.rank)
            pictures = torch.full((2, 3, 5, 5), ctx.rank + 1.0)
            (nn.functional.cross_entropy(model[:-1](images), labels) + model[-1](pictures).mean()).backward()
            local = [param.grad.clone() for param in params]
            if inside is not None:
                inside()
            wrapped.synchronize()
            everyone = ctx.exchange(pickle.dumps([grad.tolist() for grad in local]))
            mean = zip(*(map(torch.tensor, pickle.loads(each)) for each in everyone), strict=True)
            for param, grads in zip(params, mean, strict=True):
                torch.testing.assert_close(param.grad, sum(grads) / ctx.size, rtol=1e-6, atol=1e-7)
            with wrapped.skip_synchronize():
                wrapped.step()

        step()
        assert packs  # of single gradients
        packs.clear()
        (unit,) = wrapped._reducer._buckets
        slot_of = dict(zip(map(id, unit.params), unit._views, strict=True))
        places = [slot_of[id(param)].data_ptr() for param in params]
        for to_none in (True, True, False, False, True):
            step(to_none)
            assert [param.grad.data_ptr() for param in params] == places
        assert not packs  # reduced where they lie
        assert params[-2].grad.stride() == params[-2].stride() != torch.empty(params[-2].shape).stride()
        low, high = unit.flat.data_ptr(), unit.flat.data_ptr() + unit.flat.nbytes
        assert all(low <= place < high for place in places)

        # What users do with gradients.
        kept = params[0].grad
        before = kept.clone()
        params[0].grad = kept * 1.0  # an assigned one
        wrapped.synchronize()
        assert params[0].grad is kept and torch.equal(kept, before)  # an average of what is equal everywhere
        params[0].grad = torch.ones(params[0].shape[0], 1).expand(params[0].shape)  # one with no memory of its own
        wrapped.synchronize()
        assert torch.equal(params[0].grad, torch.ones_like(params[0]))
        for change in (lambda: params[3].grad.mul_(0.5), lambda: setattr(params[3], "grad", None)):
            with pytest.raises(AssertionError, match=r"gradient of 2\.bias was changed .*synchronize\(\) first"):
                step(inside=change)
        step()

        # A second derivative goes by autograd.grad; backward(create_graph=True) is refused.
        wrapped.zero_grad()
        loss = model[:-1](batch(1, ctx.rank)[0]).square().mean()
        (inner,) = torch.autograd.grad(loss, [params[0]], create_graph=True)
        (loss + inner.square().sum()).backward()
        wrapped.step()
        wrapped.zero_grad()
        with pytest.raises(AssertionError, match="create_graph"):
            model[:-1](batch(1, ctx.rank)[0]).square().mean().backward(create_graph=True)
        wrapped.load_state_dict(wrapped.state_dict())  # forgets the backward
        wrapped.zero_grad()

        # GradScaler: the way that Horovod's programs have it, and as in a program of one process.
        for synchronizes, make in itertools.product((True, False), (MAKERS["sgd"], MAKERS["adam, fused"])):
            model = make_model()
            params = list(model.parameters())
            wrapped = hvd.DistributedOptimizer(make(params))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step, infinite in enumerate((False, True, False)):
                wrapped.zero_grad()
                images, labels = batch(step, ctx.rank)
                loss = nn.functional.cross_entropy(model(images), labels)
                scaler.scale(loss * (float("inf") if infinite and ctx.rank == 0 else 1.0)).backward()
                was = params[0].detach().clone()
                if synchronizes:
                    wrapped.synchronize()
                    scaler.unscale_(wrapped)
                    assert nn.utils.clip_grad_norm_(params, 1.0).isfinite() != infinite
                how = wrapped.skip_synchronize() if synchronizes else contextlib.nullcontext()
                with warnings.catch_warnings(), how:
                    warnings.simplefilter("error")
                    scaler.step(wrapped)
                scaler.update()
                assert torch.equal(was, params[0].detach()) == infinite  # left out on all ranks
            assert scaler.get_scale() == 512.0 and same_on_all(ctx, model)

        # Of other dtypes, complex ones and those of no elements.
        for dtype in (torch.float64, torch.bfloat16, torch.complex64):
            odd = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((3,), (), (0, 2), (2, 5))]
            other = hvd.DistributedOptimizer(torch.optim.SGD(odd, lr=1.0))
            for _ in range(3):
                other.zero_grad()
                sum((param * (ctx.rank + 1)).sum().abs() for param in odd).backward()
                other.synchronize()
                for param in odd:
                    torch.testing.assert_close(param.grad, torch.full_like(param, 1.5))
            with other.skip_synchronize():
                other.step()
    return True


def test_gradients_lie_where_they_are_reduced():
    assert run_ranks(memory, 2, timeout=60) == [True, True]


# ---- Ranks that differ.


class Uneven(nn.Module):
    """`used`: which of its layers are, in which order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.table = nn.Embedding(6, 4, sparse=True)

    def forward(self, used, rows=None):
        x = torch.ones(1, 4) if rows is None else self.table(torch.tensor(rows)).sum(0, keepdim=True)
        for number in used:
            x = self.layers[number](x)
        return x.sum()


def mean_gradients(ctx, model, used, rows):
    """What one process finds: the mean over all ranks of each one's gradient, None where none has one."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in range(ctx.size):
        (alone(used[rank], rows[rank]) / ctx.size).backward()
    return [None if param.grad is None else param.grad.to_dense() for param in alone.parameters()]


def uneven(ctx):
    none = [None] * ctx.size
    with a_job(ctx):
        for options in ({}, {"sparse_as_dense": True}, {"gradient_as_bucket_view": False}, {"overlaps": True}):
            given = dict(options)
            overlaps = given.pop("overlaps", False)
            model = Uneven()
            wrapped = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **given
            )
            params = list(model.parameters())
            for used, rows in (
                ([[0], [0, 1], [1]], none),  # the others are unused everywhere
                ([[0], [0, 1], [1]], none),
                ([[1, 0], [0, 1], [0, 1]], none),  # in another order
                ([[2, 3, 0, 1], [0, 3], [3]], none),  # new ones
                ([[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], [[1, 2, 1], None, [5]]),  # and a sparse one
                ([[0], [0], [0]], [None, [0, 3], None]),
                ([[0], [0], [0]], none),
            ):
                wrapped._reducer._overlaps = overlaps
                wrapped.zero_grad()
                right = mean_gradients(ctx, model, used, rows)
                model(used[ctx.rank], rows[ctx.rank]).backward()
                wrapped.synchronize()
                for (name, param), wanted in zip(model.named_parameters(), right, strict=True):
                    assert (param.grad is None) == (wanted is None), (options, used, name)
                    if wanted is not None:
                        torch.testing.assert_close(param.grad.to_dense(), wanted)
                        assert param.grad.is_sparse == (name == "table.weight" and "sparse_as_dense" not in options)
                with wrapped.skip_synchronize():
                    wrapped.step()
            assert same_on_all(ctx, model)
            assert len(wrapped._reducer._hooks) == len(params)

        # Frozen, unfrozen, added.
        model = Uneven()
        model.layers[1].requires_grad_(False)
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.layers[:2].parameters(), lr=0.1))
        for step in range(5):
            if step == 1:
                model.layers[1].requires_grad_(True)
            if step == 2:
                wrapped.add_param_group({"params": list(model.layers[2:].parameters()), "lr": 0.2})
            if step == 3:
                model.layers[0].requires_grad_(False)
            wrapped.zero_grad()
            right = mean_gradients(ctx, model, [[0, 1, 2, 3]] * ctx.size, none)
            model([0, 1, 2, 3]).backward()
            wrapped.synchronize()
            inside = {id(param) for group in wrapped.param_groups for param in group["params"]}
            for param, wanted in zip(model.parameters(), right, strict=True):
                if id(param) in inside and wanted is not None:
                    torch.testing.assert_close(param.grad, wanted)
            with wrapped.skip_synchronize():
                wrapped.step()
        assert same_on_all(ctx, model) and len(wrapped._reducer._buckets[-1].states) >= 2

        # Uneven numbers of steps: the ranks that have joined give zeros, and agree later.
        model = Uneven()
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.layers.parameters(), lr=0.1))
        for steps in ((0, 2, 3), (3, 1, 2), (2, 2, 2)):
            for _ in range(steps[ctx.rank]):
                wrapped.zero_grad()
                model([0, 1, 2, 3]).backward()
                wrapped.step()
            hvd.join()
            hvd.synchronize(hvd.allreduce_async(torch.zeros(1)))
            for param in model.parameters():
                hvd.broadcast_(param.data, 2 if steps[2] == 3 else 0)
        assert wrapped._reducer._buckets and same_on_all(ctx, model)

        # A process set; the ranks outside of it step on their own.
        few = hvd.add_process_set([0, 2])
        model = Uneven()
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=few)
        for _ in range(3):
            wrapped.zero_grad()
            (model([0, 1]) * (ctx.rank + 1)).backward()
            wrapped.synchronize()
            factor = model.layers[0].weight.grad / (ctx.rank + 1)
            wrapped.zero_grad()
            (model([0, 1]) * (ctx.rank + 1)).backward()
            local = model.layers[0].weight.grad / (ctx.rank + 1)
            torch.testing.assert_close(factor, local if ctx.rank == 1 else local * 2 / (ctx.rank + 1))
            wrapped.synchronize()
            with wrapped.skip_synchronize():
                wrapped.step()
        prints = ctx.exchange(pickle.dumps([param.tolist() for param in model.parameters()]))
        assert prints[0] == prints[2] != prints[1]
    return True


def test_ranks_that_differ():
    assert run_ranks(uneven, 3, timeout=60) == [True, True, True]


# ---- Adasum, closures, sums, several models.


def other_steps(ctx):
    with a_job(ctx):
        # Adasum: gradients that have nothing in common add up, equal ones count once.
        params = [
            nn.Parameter(torch.ones(4)),
            nn.Parameter(torch.ones(4)),
            nn.Parameter(torch.ones(2), requires_grad=False),
        ]
        wrapped = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=0.5), op=hvd.Adasum, compression=hvd.Compression.bf16
        )
        own = torch.zeros(4)
        own[ctx.rank] = 2.0
        for _ in range(2):
            wrapped.zero_grad()
            (params[0] @ own + params[1].sum()).backward()
            wrapped.synchronize()  # does nothing, as in Horovod
            assert torch.equal(params[0].grad, own)
            wrapped.step()
        assert params[0].tolist() == [-1.0, -1.0, 1.0, 1.0] and params[1].tolist() == [0.0] * 4
        with pytest.raises(AssertionError, match="Adasum"), wrapped.skip_synchronize():
            pass
        loss = wrapped.step(lambda: params[0].sum())
        assert isinstance(loss, torch.Tensor)

        # A closure: LBFGS, whose line search goes by the loss, finds the minimum of the ranks' average.
        point = nn.Parameter(torch.zeros(3))
        target = torch.full((3,), float(ctx.rank))
        lbfgs = torch.optim.LBFGS([point], line_search_fn="strong_wolfe", max_iter=8)
        wrapped = hvd.DistributedOptimizer(lbfgs)

        def closure():
            wrapped.zero_grad()
            loss = (point - target).square().sum()
            loss.backward()
            return loss

        first = wrapped.step(closure)
        assert torch.equal(first, torch.tensor(1.5))  # of 0 and 3
        torch.testing.assert_close(point.detach(), torch.full((3,), 0.5))
        assert lbfgs.state is wrapped.state and lbfgs.param_groups is wrapped.param_groups

        # A sum; a second synchronize() reduces nothing again, though gradients lie where they are reduced.
        for _ in range(2):
            weight = nn.Parameter(torch.ones(2))
            wrapped = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
            for _ in range(2):
                wrapped.zero_grad()
                (weight.sum() * (ctx.rank + 1)).backward()
                wrapped.synchronize()
                assert weight.grad.tolist() == [3.0, 3.0]
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    wrapped.step()
                assert "skip_synchronize" in str(told[0].message)
                assert weight.grad.tolist() == [3.0, 3.0]
            assert weight.tolist() == [-5.0, -5.0]

        # Two optimizers whose parameters have the same names, on their way at once.
        nets = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
        both = [
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()) for net in nets
        ]
        for _ in range(3):
            for each in both:
                each._reducer._overlaps = True
                each.zero_grad()
            sum(net(torch.ones(2)).sum() * (ctx.rank + 1) for net in nets).backward()
            for each in both:
                each.step()
            assert nets[0].weight.grad.tolist() == nets[1].weight.grad.tolist() == [[1.5, 1.5]] * 2

        del both, each  # and with them their hooks

        # One that is over the parameters of several models, whose names collide.
        for named in (
            [net.named_parameters() for net in nets],
            {"first": nets[0].named_parameters(), "second": nets[1].named_parameters()},
            {"first": nets[0].weight, "second": nets[1].weight},
        ):
            chained = itertools.chain(*(net.parameters() for net in nets))
            wrapped = hvd.DistributedOptimizer(torch.optim.SGD(chained, lr=0.1), named)
            wrapped.zero_grad()
            sum(net(torch.ones(2)).sum() * (ctx.rank + 1) for net in nets).backward()
            wrapped.step()
            assert nets[0].weight.grad.tolist() == nets[1].weight.grad.tolist() == [[1.5, 1.5]] * 2

        # What Horovod asserts.
        wrapped.zero_grad()
        nets[0](torch.ones(2)).sum().backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after"):
            wrapped.zero_grad()
        with pytest.raises(AssertionError, match="Gradients were computed more than backward_passes_per_step"):
            nets[0](torch.ones(2)).sum().backward()

        del wrapped

        # A learning-rate schedule, made before and after the wrapping.
        plain = torch.optim.SGD(nets[0].parameters(), lr=1.0)
        early = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        wrapped = hvd.DistributedOptimizer(plain, nets[0].named_parameters())
        late = torch.optim.lr_scheduler.StepLR(wrapped, 1, 0.1)
        counts = []
        wrapped.register_step_pre_hook(lambda *_: counts.append(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for schedule in (early, late):
                wrapped.zero_grad()
                (nets[0](torch.ones(2)).sum() * (ctx.rank + 1)).backward()
                wrapped.step()
                schedule.step()
                assert nets[0].weight.grad.tolist() == [[1.5, 1.5]] * 2
        assert plain.param_groups[0]["lr"] == pytest.approx(0.05) and len(counts) == 2
    return True


def test_adasum_closures_and_several_models():
    assert run_ranks(other_steps, 2, timeout=60) == [True, True]


# ---- Arguments.


def refused(ctx):
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.DistributedOptimizer(sgd)
    with a_job(ctx):
        named = list(model.named_parameters())
        for arguments, options, message in (
            ((model,), {}, "takes a torch.optim.Optimizer"),
            (
                (sgd, [*named, ("weight", nn.Parameter(torch.ones(1)))]),
                {},
                "must be unique.*weight.*For several models",
            ),
            ((sgd, [*named, named[0]]), {}, "must be unique"),
            ((sgd, named[:1]), {}, r"were not named: 1 of shapes \(2,\)"),
            ((sgd, model.parameters()), {}, "sequence of tuples"),
            ((sgd, [param for _, param in named]), {}, "sequence of tuples"),
            ((sgd, [["weight", named[0][1]]]), {}, "sequence of tuples"),
            ((sgd, ["weight", "bias"]), {}, "sequence of tuples"),
            ((sgd, named), {"backward_passes_per_step": 0}, "must be > 0"),
            ((sgd, named), {"op": "avg"}, "op must be"),
            ((sgd, named), {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "not supported with op != Average"),
            ((sgd, named), {"gradient_predivide_factor": -1.0}, "above 0"),
            ((sgd, named), {"groups": -1}, "positive integer or a list"),
            ((sgd, named), {"groups": [model.weight]}, "list of lists"),
            ((sgd, named), {"groups": [["weight"]]}, "must consist of torch.Tensor"),
            ((sgd, named), {"groups": [[model.weight], [model.weight]]}, "only appear once"),
            ((sgd, named), {"op": hvd.Adasum, "groups": 2}, "leave out groups"),
            ((sgd, named), {"process_set": hvd.ProcessSet([0])}, "add_process_set"),
        ):
            with pytest.raises(ValueError, match=message):
                hvd.DistributedOptimizer(*arguments, **options)
        with pytest.warns(DeprecationWarning, match="groups"):
            wrapped = hvd.DistributedOptimizer(sgd, named, num_groups=1)
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(wrapped)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                copied(wrapped)
        # Alone it is the optimizer that it was, and steps as often as one likes.
        for op in (hvd.Average, hvd.Adasum):
            other = copy.deepcopy(model)
            plain, wrapped = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (other, model))
            wrapped = hvd.DistributedOptimizer(wrapped, op=op)
            for _ in range(3):
                for net, optimizer in ((other, plain), (model, wrapped)):
                    optimizer.zero_grad()
                    net(torch.ones(3)).sum().backward()
                    net(torch.ones(3)).sum().backward()
                    optimizer.step()
            assert same(model, other)
            plain.load_state_dict(wrapped.state_dict())
            wrapped.load_state_dict(plain.state_dict())
        assert made_by._prefix_counts[hvd.basics.current()]  # the counts go with the job
    return True


def test_what_is_refused():
    assert run_ranks(refused, 1, timeout=60) == [True]


def parts(ctx):
    """Ranks whose models differ, and a rank that ends."""
    with a_job(ctx):
        model = nn.Linear(3, 2 + ctx.rank)
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(torch.ones(3)).sum().backward()
        with pytest.raises(hvd.HorovodInternalError, match=r"allreduce\.(weight|bias).*differ in"):
            wrapped.step()
        wrapped.zero_grad()  # not stuck

    model = nn.Linear(3, 2)
    with a_job(ctx):
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(2):
            wrapped.zero_grad()
            model(torch.ones(3)).sum().backward()
            wrapped.step()
        units = wrapped._reducer._buckets
        assert units
    with a_job(ctx):  # another job, with the same optimizer: all is agreed on anew
        for _ in range(2):
            wrapped.zero_grad()
            (model(torch.ones(3)).sum() * (ctx.rank + 1)).backward()
            wrapped.step()
            assert model.bias.grad.tolist() == [1.5, 1.5]
        assert wrapped._reducer._buckets[0] is not units[0]
        if ctx.rank:
            hvd.shutdown()
            return True
        wrapped.zero_grad()
        model(torch.ones(3)).sum().backward()
        with pytest.raises(hvd.HorovodInternalError):
            wrapped.step()
        wrapped.zero_grad()
    return True


def test_models_that_differ_and_jobs_that_end():
    assert run_ranks(parts, 2, timeout=60) == [True, True]
