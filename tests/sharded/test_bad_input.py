"""Wrong calls: each raises a named error on every rank, and no rank waits for ever."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage
from collectives.sharded import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardedDataParallel,
    Unit,
    fully_shard,
)
from tests.ddp.training import batch, make_model, over_gloo, run

LOW = MixedPrecision(keep_low_precision_grads=True)


def raised(call):
    """Return an error's class and text."""
    try:
        call()
    except CollectivesError as error:
        return type(error).__name__, str(error)
    return None, ""


def optimizer_before(ctx):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fully_shard(model)
    model(batch(0, ctx.rank)[0]).sum().backward()
    optimizer.step()


def tied_weights(ctx):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    for each in (model[0], model[2]):
        fully_shard(each)


def resized(ctx):
    model = fully_shard(make_model())
    if ctx.rank == 1:
        model[0].weight.data = torch.zeros(3)
    model(batch(0, ctx.rank)[0])


def exchanged(ctx):
    model = fully_shard(make_model())
    if ctx.rank == 0:
        model[0].weight = nn.Parameter(torch.zeros(40, 12))
    model(batch(0, ctx.rank)[0])


def other_modules(ctx):
    fully_shard(nn.Linear(4, 4 + ctx.rank))


def other_policies(ctx):
    policy = ModuleWrapPolicy({nn.Linear}) if ctx.rank else None
    ShardedDataParallel(make_model(), auto_wrap_policy=policy)


def more_units(ctx):
    model = make_model()
    if ctx.rank == 0:
        fully_shard(model[0])
    fully_shard(model)


def late_unit(ctx):
    """One rank goes on to its forward while the other still shards."""
    model = make_model()
    fully_shard(model[0])
    if ctx.rank == 0:
        fully_shard(model[2])
    model(batch(0, ctx.rank)[0])


def to_double(ctx):
    model = fully_shard(make_model()).double()
    model(batch(0, ctx.rank)[0].double())


CASES = {
    optimizer_before: (InvalidUsage, "0.weight of Sequential, which was sharded after the optimizer was made"),
    tied_weights: (InvalidUsage, "weight of this Linear is tied to weight of Linear"),
    resized: (CollectivesError, None),
    exchanged: (CollectivesError, None),
    other_modules: (InvalidUsage, "the ranks don't shard the same modules"),
    other_policies: (InvalidUsage, "the ranks don't shard the same modules"),
    more_units: (InvalidUsage, "the ranks don't shard the same modules"),
    late_unit: (InvalidUsage, "the ranks don't shard the same modules"),
    to_double: (InvalidArgument, "0.weight was made torch.float64 after it was sharded as torch.float32"),
}


@over_gloo
def all_cases(ctx):
    """All cases in one group: an error must leave the ranks in step."""
    return {case.__name__: raised(lambda case=case: case(ctx)) for case in CASES}


def test_named_errors_on_all_ranks(tmp_path):
    results = run(all_cases, 2, str(tmp_path / "store"))
    for case, (kind, text) in CASES.items():
        for rank, found in enumerate(results):
            name, message = found[case.__name__]
            assert name is not None, (case.__name__, rank, "nothing was raised")
            if text is not None:
                assert (name, text in message) == (kind.__name__, True), (case.__name__, rank, message)
    where, other = results[1]["resized"], results[0]["resized"]
    assert where[0] == "InvalidArgument" and "0.weight was resized after it was sharded" in where[1]
    assert other[0] == "RemoteError" and "rank 1 could not go on" in other[1]
    where, other = results[0]["exchanged"], results[1]["exchanged"]
    assert where[0] == "InvalidArgument" and "0.weight was exchanged" in where[1]
    assert other[0] == "RemoteError" and "rank 0 could not go on" in other[1]
    assert "rank 1 shards Linear: weight [5, 4]" in results[0]["other_modules"][1]


@over_gloo
def alone(ctx):
    """Errors that a rank finds without the others."""
    model = fully_shard(make_model())
    found = {
        "twice": raised(lambda: fully_shard(model)),
        "no module": raised(lambda: fully_shard([model])),
        "list": raised(lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)]))),
        "int": raised(lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward=3)),
        "comm": raised(lambda: fully_shard(nn.Linear(2, 2), comm="all")),
        "strategy": raised(lambda: ShardedDataParallel(nn.Linear(2, 2), sharding_strategy="ALL")),
        "precision": raised(lambda: ShardedDataParallel(nn.Linear(2, 2), mixed_precision=torch.bfloat16)),
        "device": raised(lambda: ShardedDataParallel(nn.Linear(2, 2), device_id=99)),
        "group": raised(lambda: ShardedDataParallel(nn.Linear(2, 2), process_group=dist.GroupMember.NON_GROUP_MEMBER)),
        "policy": raised(lambda: fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)),
        "dtypes": raised(lambda: fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(torch.int32))),
        "low": raised(lambda: ShardedDataParallel(nn.Linear(2, 2), mixed_precision=LOW)),
        "buffers": raised(lambda: ShardedDataParallel(nn.Linear(2, 2), mixed_precision=MixedPrecision(buffer_dtype=1))),
        "offload": raised(lambda: fully_shard(nn.Linear(2, 2), offload_policy=True)),
        "cpu_offload": raised(lambda: ShardedDataParallel(nn.Linear(2, 2), cpu_offload=True)),
        "ignored": raised(lambda: fully_shard(nn.Linear(2, 2), ignored_params=3)),
        "lazy": raised(lambda: fully_shard(nn.LazyLinear(3))),
        "copy": raised(lambda: copy.deepcopy(model)),
        "pickle": raised(lambda: pickle.dumps(model)),
        "prefetch": raised(lambda: model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])),
        "factor": raised(lambda: model.set_gradient_divide_factor(0)),
        "wait_for_unshard": raised(lambda: Unit(nn.Linear(2, 2), ctx.communicator()).wait_for_unshard()),
    }
    plain = fully_shard(nn.Linear(2, 2))
    sliced = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))[:1]
    found["sliced"] = type(sliced) is nn.Sequential, type(plain).__name__
    return found


def test_errors_of_one_rank(tmp_path):
    for found in run(alone, 2, str(tmp_path / "store")):
        assert found.pop("sliced") == (True, "Linear")
        for case, (name, text) in found.items():
            assert name in ("InvalidArgument", "InvalidUsage"), (case, name, text)
            assert len(text) > 30, (case, text)


def no_group(ctx):
    with pytest.raises(InvalidUsage, match="torch.distributed's default group"):
        fully_shard(nn.Linear(2, 2))
    model = fully_shard(make_model(), comm=ctx.communicator())  # ours alone, without torch.distributed
    model(batch(0, ctx.rank)[0]).sum().backward()
    return [param.grad is not None for param in model.parameters()]


def test_without_torch_distributed():
    assert run(no_group, 2) == [[True] * 8] * 2
