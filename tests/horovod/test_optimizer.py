"""hvd.DistributedOptimizer on real ranks: the same bits as DDP with our hook, its arguments, its errors."""

import copy
import pickle

import pytest
import torch
from torch import nn

from collectives import horovod as hvd
from collectives.horovod import optimizer as made_by
from tests.ddp.training import make_model, over_gloo
from tests.ranks import run_ranks

from .optimizer_training import MAKERS, a_job, same, same_on_all, train, train_ddp


def each_optimizer(ctx):
    for name, make in MAKERS.items():
        reference, losses = train_ddp(make, ctx.rank)
        model = make_model()
        wrapped = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
        assert isinstance(wrapped, type(make(make_model().parameters())))
        assert train(model, wrapped, ctx.rank) == losses, name
        assert same(model, reference), name


def each_option(ctx):
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
        given, model = dict(options), make_model()
        params = list(model.parameters())
        if isinstance(given.get("groups"), list):
            given["groups"] = [[params[at] for at in group] for group in given["groups"]]
        overlaps = given.pop("overlaps", None)
        how = {name: given.pop(name) for name in ("to_none", "synchronizes") if name in given}
        wrapped = hvd.DistributedOptimizer(make(params), **{"named_parameters": model.named_parameters(), **given})
        if overlaps is not None:
            wrapped._reducer._overlaps = overlaps
        assert train(model, wrapped, ctx.rank, **how) == losses and same(model, reference), options


def two_passes(ctx):
    make = MAKERS["sgd"]
    reference, losses = train_ddp(make, ctx.rank, passes=2)
    model = make_model()
    wrapped = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), backward_passes_per_step=2)
    assert train(model, wrapped, ctx.rank, passes=2) == losses and same(model, reference)
    wrapped.set_backward_passes_per_step(1)
    train(model, wrapped, ctx.rank, steps=1)


def each_compression(ctx):
    make = MAKERS["sgd"]
    reference, _ = train_ddp(make, ctx.rank)
    errors = {hvd.Compression.fp16: 2e-3, hvd.Compression.bf16: 2e-2, hvd.Compression.int8: 2e-2}
    for compression, error in errors.items():
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


@over_gloo
def curves(ctx):
    with a_job(ctx):
        each_optimizer(ctx)
        each_option(ctx)
        two_passes(ctx)
        each_compression(ctx)
    return True


def test_the_same_bits_as_ddp_with_our_hook(tmp_path):
    assert run_ranks(curves, 2, tmp_path / "gloo", timeout=90) == [True, True]


# ---- Arguments.


def refused(ctx):
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.DistributedOptimizer(sgd)
    with a_job(ctx):
        named = list(model.named_parameters())
        for given, names in ((named, {"weight", "bias"}), (None, None)):  # programs read the names
            wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), given)
            found = {wrapped._parameter_names[param] for param in model.parameters()}
            assert found == names if names else len(found) == 2
        with pytest.raises(RuntimeError):
            hvd.reducescatter(torch.ones(4), op=hvd.Adasum)
        for arguments, options, message in (
            ((model,), {}, "takes a torch.optim.Optimizer"),
            ((sgd, [*named, named[0]]), {}, "must be unique.*weight.*For several models"),
            ((sgd, named[:1]), {}, r"were not named: 1 of shapes \(2,\): name the parameters of all models"),
            ((sgd, model.parameters()), {}, "sequence of tuples"),
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
