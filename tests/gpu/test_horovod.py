"""Horovod's API on every device: each operation, fused and not, handles, compression, gradients,
the optimizer.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from tests.gpu.devices import check, compare, everywhere
from tests.gpu.training import RATE, STEPS, alone, batches, make_terms, run_backward_on_two_streams
from tests.horovod.started import started as started_on


def started(rank):
    """Have hvd initialised on the test's device."""
    return started_on(rank, COLLECTIVES_ENGINE=rank.engine)


def operations(rank):
    """Every operation; small whole numbers, so that every dtype's sums are exact."""
    found = {}
    with started(rank) as hvd:
        assert (hvd.rank(), hvd.size()) == (rank.rank, rank.size)
        for name in ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "float64"):
            dtype = getattr(torch, name)
            mine = (torch.arange(4097) % 5 + 1 + rank.rank).to(dtype).to(rank.device)
            for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                found[f"{name} {op.name}"] = hvd.allreduce(mine, op=op, name=f"{name} {op.name}")
            if dtype.is_floating_point:
                found[f"{name} average"] = hvd.allreduce(mine)
            found[f"{name} in place"] = hvd.allreduce_(mine.clone(), op=hvd.Sum)
            found[f"{name} group"] = hvd.grouped_allreduce([mine, mine[:3].clone()], op=hvd.Sum)
            found[f"{name} allgather"] = hvd.allgather(mine[: rank.rank + 1])
            found[f"{name} allgathers"] = hvd.grouped_allgather([mine[:2], mine[: rank.rank + 2]])
            found[f"{name} broadcast"] = hvd.broadcast(mine, rank.size - 1)
            found[f"{name} broadcast_"] = hvd.broadcast_(mine.clone(), 0)
            splits = torch.tensor([peer + 1 for peer in range(rank.size)])
            found[f"{name} alltoall"] = hvd.alltoall(mine[: int(splits.sum())], splits=splits)[0]
            found[f"{name} reducescatter"] = hvd.reducescatter(mine, op=hvd.Sum)
            found[f"{name} reducescatters"] = hvd.grouped_reducescatter([mine, mine[:9].clone()], op=hvd.Sum)
        ones = rank.full(1.0, 5)
        found["scaled"] = hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        found["view"] = hvd.allreduce(torch.stack([ones, ones * 2], -1)[..., 1], op=hvd.Sum)
        found["empty"] = hvd.allreduce(ones[:0])
        found["scalar"] = hvd.allreduce(ones[0].clone(), op=hvd.Sum)
        found["on the host"] = hvd.allreduce(torch.full((3,), rank.rank + 1.0), op=hvd.Sum)
        found["object"] = hvd.broadcast_object([1, 2.5, 3], 0)
        hvd.barrier()
    return found


@everywhere()
def test_operations(device, ranks):
    check(device, operations, ranks, same=False)


def handles(rank):
    """Asynchronous operations whose inputs are gone at once, many at a time, in another order on
    each rank.
    """
    results = {}
    with started(rank) as hvd:
        x = rank.random(40_000)
        for turn in range(3):
            begun = []
            numbers = list(range(8)) if rank.rank == 0 else list(range(7, -1, -1))
            rank.delay()
            for number in numbers:
                begun.append((number, hvd.allreduce_async(x * (number + turn), op=hvd.Sum, name=f"x{number}")))
                x.new_full((40_000,), 77.0)  # takes memory that was freed too early
            gathered = hvd.allgather_async(x[:5] * turn, name="gathered")
            for number, handle in begun:
                results[f"{turn} {number}"] = hvd.synchronize(handle)[::997].clone()
                assert hvd.synchronize(handle) is None
            results[f"{turn} gathered"] = hvd.synchronize(gathered)
        own = rank.full(rank.rank + 1.0, 10)
        handle = hvd.allreduce_async_(own, op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle) is own
        results["in place"] = own
    return results


@everywhere()
def test_handles(device, ranks):
    found = check(device, handles, ranks)
    assert found[0]["in place"].unique().tolist() == [ranks * (ranks + 1) / 2]


def compressed(rank, name):
    with started(rank) as hvd:
        kind = getattr(hvd.Compression, name)
        x = rank.random(5000)
        return [hvd.allreduce(x, compression=kind), hvd.allreduce(x, op=hvd.Sum, compression=kind)]


@everywhere(["fp16", "bf16", "int8"], everyday=["int8"])
def test_compression(device, ranks, case):
    for average, total in check(device, compressed, ranks, case):
        slack = {"fp16": 2e-3, "bf16": 2e-2, "int8": 6e-2}[case]
        compare(average * ranks, total, exact=False, rtol=2 * slack, atol=2 * slack)


def differentiated(rank):
    with started(rank) as hvd:
        grads = []
        for operation in (
            lambda x: hvd.allreduce(x, op=hvd.Sum),
            lambda x: hvd.grouped_allreduce([x, x * 2])[1],
            lambda x: hvd.allgather(x),
            lambda x: hvd.broadcast(x, 0),
            lambda x: hvd.alltoall(x),
            lambda x: hvd.reducescatter(x, op=hvd.Sum),
        ):
            x = rank.random(4, 3).requires_grad_()
            (operation(x) * (rank.rank + 1.0)).sum().backward()
            grads.append(x.grad)
        return grads


@everywhere()
def test_gradients_through_operations(device, ranks):
    check(device, differentiated, ranks, same=False)


OPTIMIZERS = {
    "plain": {},
    "fp16": {"compression": "fp16"},
    "int8": {"compression": "int8"},
    "two passes": {"backward_passes_per_step": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "sum": {"op": "Sum"},
    "groups": {"groups": 2},
    "no views": {"gradient_as_bucket_view": False},
    "adasum": {"op": "Adasum"},
}


def optimized(rank, case):
    options = dict(OPTIMIZERS[case])
    with started(rank) as hvd:
        model = make_terms(rank.device)
        if rank.rank:
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for name, owner in (("compression", hvd.Compression), ("op", hvd)):
            if name in options:
                options[name] = getattr(owner, options[name])
        plain = torch.optim.SGD(model.parameters(), RATE)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), **options)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        passes = options.get("backward_passes_per_step", 1)
        for step in range(STEPS):
            for part in range(passes):
                model(batches(10 * part + step, rank.rank, rank.device)).backward()
            if step == 1 and case == "plain":
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                ahead = optimizer.skip_synchronize()
            else:
                ahead = contextlib.nullcontext()
            with ahead:
                optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]


@everywhere(OPTIMIZERS, everyday={"plain", "int8", "adasum"})
def test_optimizer(device, ranks, case):
    # Adasum is made of dot products, and clipping looks at a norm.
    close = {"exact": False, "rtol": 1e-4, "atol": 1e-5} if case == "adasum" else {}
    (found, *_) = check(device, optimized, ranks, case, **close)
    if case in ("plain", "sum", "groups", "no views"):
        compare(found, alone(ranks, average=case != "sum")[1])


def optimized_on_two_streams(rank):
    """Two models, each on a stream of its own, whose gradients share buckets."""
    with started(rank) as hvd:
        models = [make_terms(rank.device) for _ in range(2)]
        named = [each.named_parameters() for each in models]
        params = [param for model in models for param in model.parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, RATE), named_parameters=named)
        for step in range(STEPS):
            run_backward_on_two_streams(rank, models, step)
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in params]


@everywhere()
def test_models_on_two_streams(device, ranks):
    check(device, optimized_on_two_streams, ranks)


def batch_norm(rank):
    with started(rank) as hvd:
        layer = hvd.SyncBatchNorm(3).to(rank.device)
        x = rank.random(6, 3, 2).requires_grad_()
        out = layer(x)
        (out * rank.random(6, 3, 2, seed=5)).sum().backward()
        return [out.detach(), x.grad, layer.running_mean, layer.running_var]


@everywhere()
def test_sync_batch_norm(device, ranks):
    check(device, batch_norm, ranks, exact=False, rtol=1e-4, atol=1e-5, same=False)
